//! A client that pings the guest over a switch hears it on the other side about as soon as after a
//! move that QEMU makes by itself: the guest is an idle one with the devices that most have.
//!
//! The bounds are wide, since other work on this machine must not break them. Where the time goes
//! says `make bench-ping`.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, Pair, check_moved};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, DiskImage, GuestConfig, Heard, Lan, QemuBuild, Silence, Style, TestVm, VmConfig,
    builds_for, builds_in_turn_for, images_for, own_migration, skip,
};
use godwit_units::ByteCount;

/// Moves by each, of which the quickest counts: what else the machine does only ever adds.
const MOVES: usize = 3;
/// The silence of a client is as long, to within a quarter, whoever moves the guest.
const SILENCE: f64 = 4.0;
/// Enough to be sure that a guest answers.
const ANSWERS: usize = 50;
/// What is shorter is as good as nothing.
const LEAST: Duration = Duration::from_millis(60);

#[test]
fn a_client_hears_its_guest_soon_after_a_move() -> anyhow::Result<()> {
    let test = "a_client_hears_its_guest_soon_after_a_move";
    if !images_for(test) {
        return Ok(());
    }
    let builds = builds_for(test);
    // Of QEMU 7.2 no move by itself is asked for, which the tests of bounds do not either.
    let Some(newest) = builds.last() else { return Ok(()) };
    let lan = match Lan::create() {
        Ok(lan) => lan,
        Err(why) => {
            skip(test, format_args!("{why:#}"));
            return Ok(());
        }
    };
    let image = DiskImage::create("raw", ByteCount(64 << 20))?;
    let own = silences(&lan, newest, &image, Mover::Qemu)?;
    let bound = quickest(&own).max(LEAST).mul_f64(SILENCE);
    for build in &builds {
        let moved = silences(&lan, build, &image, Mover::Godwit)?;
        println!("{build}: {moved:?}; by {newest} itself: {own:?}");
        ensure!(quickest(&moved) < bound, "{build}: {moved:?}, by QEMU itself {own:?}");
    }
    Ok(())
}

/// Traffic through every move: what a guest's card receives is written to its memory by QEMU, while
/// that is tracked, copied and handed over.
#[test]
fn a_connection_outlives_moves_of_a_guest_with_anonymous_ram() -> anyhow::Result<()> {
    let test = "a_connection_outlives_moves_of_a_guest_with_anonymous_ram";
    let lan = match Lan::create() {
        Ok(lan) => lan,
        Err(why) => {
            skip(test, format_args!("{why:#}"));
            return Ok(());
        }
    };
    for build in builds_in_turn_for(test) {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate));
        let config = config.with_backend(Backend::Anonymous).with_extra(&["-device", "VGA"]);
        let mut pair = Pair::start_apart(&lan.attach(&config)?, &lan.attach(&config)?)?;
        let (talk, pings) = (lan.talk()?, lan.ping()?);
        talk.await_answers(ANSWERS)?;
        pings.await_answers(ANSWERS, LIMIT)?;
        let began = Instant::now();
        let mut downtimes = Vec::new();
        for _ in 0..MOVES {
            let (migrate, _) = pair.migrate(&["--verify"])?;
            check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
            downtimes.push(migrate.last()["downtime_ms"].clone());
            pair.source.kill();
            talk.await_answers(ANSWERS)?;
            pings.await_answers(ANSWERS, LIMIT)?;
            let next = TestVm::destination(&lan.attach(&config)?)?;
            pair.move_on(next);
        }
        let (talked, pinged) = (talk.finish()?, pings.finish()?);
        ensure!(pair.source.errors() == "", "{}", pair.source.errors());
        let longest = |heard: &Heard| {
            let silence = heard.longest_silence(began, Instant::now());
            silence.as_ref().map(Silence::length).context("nothing was heard")
        };
        let (by_talk, by_pings) = (longest(&talked)?, longest(&pinged)?);
        let count = talked.answered.len();
        println!(
            "{build}: {count} messages, the longest silence {by_talk:?}, of pings {by_pings:?} \
             ({} lost); downtimes {downtimes:?} ms",
            pinged.lost()
        );
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mover {
    Godwit,
    Qemu,
}

fn quickest(silences: &[Duration]) -> Duration {
    silences.iter().min().copied().unwrap_or_default()
}

/// What a client hears nothing for while the guest moves, once for each of a few moves.
fn silences(
    lan: &Lan,
    build: &QemuBuild,
    image: &DiskImage,
    by: Mover,
) -> anyhow::Result<Vec<Duration>> {
    let node = format!(
        "driver=raw,node-name=disk,file.driver=file,file.filename={}",
        image.path().display()
    );
    let node = format!("{node},cache.direct=on,file.cache.direct=on");
    let balloon = "virtio-balloon-pci,free-page-reporting=on";
    let disk = ["-blockdev", &node, "-device", "virtio-blk-pci,drive=disk"];
    let config = VmConfig::new(build, GuestConfig::small(Mode::Idle))
        .with_extra(&disk)
        .with_extra(&["-cpu", "max", "-device", balloon]);
    let mut pair = Pair::start_apart(&lan.attach(&config)?, &lan.attach(&config)?)?;
    let mut found = Vec::new();
    for _ in 0..MOVES {
        let pings = lan.ping()?;
        pings.await_answers(ANSWERS, LIMIT)?;
        let began = Instant::now();
        match by {
            Mover::Godwit => {
                let (migrate, _) = pair.migrate(&[])?;
                check_moved(&mut pair, &migrate)?;
            }
            Mover::Qemu => {
                own_migration(&mut pair.source, &mut pair.destination, Style::Plain, LIMIT)?;
            }
        }
        // Whoever moved it, it is the guest over there that answers now.
        pair.source.kill();
        pings.await_answers(ANSWERS, LIMIT)?;
        let heard = pings.finish()?;
        let silence = heard.longest_silence(began, Instant::now());
        found.push(silence.as_ref().map(Silence::length).context("the client heard nothing")?);
        let next = TestVm::destination(&lan.attach(&config)?)?;
        pair.move_on(next);
    }
    Ok(found)
}
