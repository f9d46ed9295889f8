//! Disks that move along: microvms and QEMUs with an image on each side. The guest stamps a part of
//! its disk, writes and checks it all the time; of a microvm's, which uses the first 16 MiB, what
//! is behind them is compared here.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::ensure;
use godwit_e2e::{LIMIT, MicroPair, Pair, check_moved, check_refused, check_untouched};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    DiskImage, Ended, GuestConfig, MicroVm, Mount, QemuBuild, RemoteDisk, Running, TestVm,
    VmConfig, allocated, builds_for, builds_in_turn_for, images_for, skip,
};
use godwit_units::ByteCount;
use rustix::process::Signal;
use serde_json::{Value, json};

/// No whole number of pages, and of no dirty block.
const SIZE: u64 = (96 << 20) + 512;
/// The guest uses no more.
const USED: u64 = 16 << 20;
/// Slow enough that the full pass lasts for seconds.
const SLOW: &[&str] = &["--disks", "all", "--max-bandwidth", "10MiB/s", "--compression", "none"];
const OPTIONS: &[&str] = &["--memory", "64MiB", "--mode", "rate", "--working-set", "8MiB"];

/// An image file; it goes with this value.
struct Image(PathBuf);

impl Image {
    /// One of zeros.
    fn new(name: &str, size: u64) -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("godwit-e2e-{name}-{}", std::process::id()));
        File::create(&path)?.set_len(size)?;
        Ok(Self(path))
    }

    /// One with data of which no two pages are alike, and holes.
    fn filled(name: &str) -> anyhow::Result<Self> {
        let image = Self::new(name, SIZE)?;
        let file = File::options().write(true).open(&image.0)?;
        let mut rng = fastrand::Rng::with_seed(1);
        let mut bytes = vec![0; 8 << 20];
        for at in [USED, USED + (32 << 20), SIZE - (8 << 20)] {
            rng.fill(&mut bytes);
            file.write_all_at(&bytes, at)?;
        }
        Ok(image)
    }

    /// One that is full of something else.
    fn stale(name: &str) -> anyhow::Result<Self> {
        let image = Self::new(name, SIZE)?;
        std::fs::write(&image.0, vec![0xee; SIZE as usize])?;
        Ok(image)
    }

    fn option(&self) -> [&str; 2] {
        ["--disk", self.0.to_str().unwrap_or_default()]
    }

    fn bytes_from(&self, offset: u64) -> anyhow::Result<Vec<u8>> {
        Ok(std::fs::read(&self.0)?.split_off(usize::try_from(offset)?))
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Two machines with an image each.
struct DiskPair {
    pair: MicroPair,
    from: Image,
    to: Image,
}

impl DiskPair {
    fn start(test: &str) -> anyhow::Result<Option<Self>> {
        Self::start_with(test, OPTIONS)
    }

    fn start_with(test: &str, options: &[&str]) -> anyhow::Result<Option<Self>> {
        let (from, to) =
            (Image::filled(&format!("{test}-from"))?, Image::stale(&format!("{test}-to"))?);
        let source = [options, &from.option()].concat();
        let destination = [options, &to.option()].concat();
        let pair = MicroPair::start_apart(&format!("disks: {test}"), &source, &destination)?;
        Ok(pair.map(|pair| Self { pair, from, to }))
    }

    /// A migration with [`SLOW`] that is in the full pass.
    fn in_full_pass(&self, more: &[&str]) -> anyhow::Result<(Running, Running)> {
        let (receive, address) =
            self.pair.godwit.receive(&self.pair.destination, &["--disks", "all"])?;
        let migrate =
            self.pair.godwit.migrate(&self.pair.source, &address, &[SLOW, more].concat())?;
        let copying = |line: &Value| {
            line["disks"][0]["full_pass"] == true
                && line["disks"][0]["sent_bytes"].as_u64() > Some(4 << 20)
        };
        migrate.wait_for("full pass", LIMIT, copying)?;
        Ok((migrate, receive))
    }

    fn check_moved(&self, migrate: &Ended) -> anyhow::Result<()> {
        self.pair.check_moved(migrate)?;
        let disk = &migrate.last()["disks"][0];
        ensure!(disk["name"] == "disk" && disk["size_bytes"] == SIZE, "{disk}");
        ensure!(
            self.from.bytes_from(USED)? == self.to.bytes_from(USED)?,
            "what the guest does not write differs"
        );
        Ok(())
    }

    fn second_attempt(&self) -> anyhow::Result<()> {
        let (migrate, _) = self.pair.migrate(&["--disks", "disk", "--verify"])?;
        self.check_moved(&migrate)
    }
}

#[test]
fn a_disk_moves_along_in_blocks_of_any_size() -> anyhow::Result<()> {
    for granularity in ["auto", "4KiB", "1MiB"] {
        let Some(disks) = DiskPair::start("any_size")? else { return Ok(()) };
        let options = ["--disks", "all", "--disk-granularity", granularity, "--channels", "2"];
        let (migrate, receive) = disks.pair.migrate(&options)?;
        disks.check_moved(&migrate)?;
        assert_eq!(receive.last()["outcome"], "running");
        let accepted = receive.lines.iter().find(|line| line["event"] == "accepted");
        ensure!(
            accepted.is_some_and(|line| line["disks"][0]["size_bytes"] == SIZE),
            "{:?}",
            receive.lines
        );
        let last = migrate.last();
        let expected = if granularity == "1MiB" { 1 << 20 } else { 4 << 10 };
        ensure!(last["disks"][0]["granularity_bytes"] == expected, "{}", last["disks"]);
        let first = &last["round_list"][0];
        ensure!(
            first["data_pages"] == 0 && first["zero_pages"] == 0,
            "memory in the full pass: {first}"
        );
        // Holes were neither read nor filled: of what was stale before, nothing is allocated any
        // more.
        let allocated = allocated(&disks.to.0)?.0;
        ensure!(allocated < 45 << 20, "{allocated} bytes are allocated at the destination");
    }
    Ok(())
}

#[test]
fn the_disk_of_a_paused_guest_is_equal_afterwards() -> anyhow::Result<()> {
    let Some(disks) = DiskPair::start("paused")? else { return Ok(()) };
    assert_eq!(disks.pair.source.ask("pause")?["answer"], "done");
    let (migrate, receive) = disks.pair.migrate(&["--disks", "all", "--verify"])?;
    assert_eq!(migrate.last()["outcome"], "migrated", "{}", migrate.errors);
    assert_eq!(receive.last()["outcome"], "paused");
    assert_eq!(migrate.last()["disks"][0]["verified"], true, "{}", migrate.last());
    ensure!(disks.from.bytes_from(0)? == disks.to.bytes_from(0)?, "the images differ");
    assert_eq!(disks.pair.destination.ask("resume")?["answer"], "done");
    disks.check_moved(&migrate)
}

#[test]
fn the_destination_killed_in_the_full_pass() -> anyhow::Result<()> {
    let Some(mut disks) = DiskPair::start("killed")? else { return Ok(()) };
    let (migrate, _receive) = disks.in_full_pass(&[])?;

    disks.pair.destination.kill();

    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.status.code() == Some(1), "{}", migrate.status);
    disks.pair.check_untouched()?;
    let options = [OPTIONS, &disks.to.option(), &["--incoming"]].concat();
    disks.pair.destination = MicroVm::start(&disks.pair.godwit, &options)?;
    disks.second_attempt()
}

#[test]
fn a_destination_without_room_for_the_disk_leaves_the_guest_at_the_source() -> anyhow::Result<()> {
    let test = "a_destination_without_room_for_the_disk_leaves_the_guest_at_the_source";
    let mount = match Mount::new("tmpfs", "size=8M") {
        Ok(mount) => mount,
        Err(why) => {
            skip(test, format_args!("{why:#}"));
            return Ok(());
        }
    };
    let from = Image::filled("room-from")?;
    let to = Image(mount.dir().join("image"));
    File::create(&to.0)?.set_len(SIZE)?;
    let source = [OPTIONS, &from.option()].concat();
    let destination = [OPTIONS, &to.option()].concat();
    let Some(pair) = MicroPair::start_apart(&format!("disks: {test}"), &source, &destination)?
    else {
        return Ok(());
    };
    let (migrate, receive) = pair.migrate(&["--disks", "all", "--compression", "none"])?;
    let told = format!("{} {}", migrate.errors, receive.errors);
    ensure!(migrate.last()["guest"] == "source", "{} {told}", migrate.last());
    for ended in [&migrate, &receive] {
        ensure!(ended.errors.contains("No space left on device"), "{told}");
    }
    pair.check_untouched()?;

    // The cure, and the same destination takes the guest in.
    let more = format!("mount -o remount,size=128M {}", mount.dir().display());
    ensure!(std::process::Command::new("sh").args(["-c", &more]).status()?.success());
    let pair = DiskPair { pair, from, to };
    pair.second_attempt()?;
    // The image goes before its mount does.
    drop(pair);
    Ok(())
}

#[test]
fn cancelled_in_the_full_pass() -> anyhow::Result<()> {
    let Some(disks) = DiskPair::start("cancelled")? else { return Ok(()) };
    let (migrate, receive) = disks.in_full_pass(&[])?;

    migrate.signal(Signal::INT)?;

    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    ensure!(migrate.status.code() == Some(130), "{} {}", migrate.status, migrate.errors);
    ensure!(receive.errors.contains("gave up: cancelled"), "{}", receive.errors);
    disks.pair.check_untouched()?;
    disks.second_attempt()
}

#[test]
fn a_switchover_is_forced_in_the_full_pass() -> anyhow::Result<()> {
    let Some(disks) = DiskPair::start("forced")? else { return Ok(()) };
    let name = format!("forced-{}", std::process::id());
    let (migrate, _receive) = disks.in_full_pass(&["--name", &name])?;
    // All at once: the guest is stopped for what is left.
    for [command, argument] in [["set", "max-bandwidth=off"], ["switchover", "--force"]] {
        disks.pair.godwit.done(&[command, argument, "--migration", &name])?;
    }
    let migrate = migrate.wait(LIMIT)?;
    disks.check_moved(&migrate)?;
    let rounds = migrate.last()["rounds"].as_u64();
    ensure!(rounds == Some(2), "{rounds:?} rounds: the one that was cut short, and the last");
    Ok(())
}

#[test]
fn free_pages_are_asked_for_when_memory_has_its_turn() -> anyhow::Result<()> {
    // Of 96 MiB that the guest has filled it uses 16 at a time, and goes through all of it in a
    // second.
    let churn =
        ["--memory", "128MiB", "--mode", "churn", "--fill", "96MiB", "--working-set", "16MiB"];
    let options = [&churn[..], &["--rate", "20000", "--balloon", "hints"]].concat();
    let Some(disks) = DiskPair::start_with("free_pages", &options)? else { return Ok(()) };
    let name = format!("free-{}", std::process::id());
    let (migrate, _receive) = disks.in_full_pass(&["--verify", "--name", &name])?;
    std::thread::sleep(Duration::from_secs(1));
    disks.pair.godwit.done(&["set", "max-bandwidth=off", "--migration", &name])?;
    let migrate = migrate.wait(LIMIT)?;
    disks.check_moved(&migrate)?;
    let hinted = migrate.last()["hinted_pages"].as_u64().unwrap_or_default() * 4096;
    ensure!(hinted > 70 << 20, "only {hinted} bytes of 80 MiB were left out");
    Ok(())
}

#[test]
fn the_guests_writes_are_limited_until_it_has_moved() -> anyhow::Result<()> {
    const LIMIT_RATE: f64 = 100.0 * 1024.0;
    let Some(disks) = DiskPair::start("limited")? else { return Ok(()) };
    let name = format!("limited-{}", std::process::id());
    // Nothing is to be given up: not every host comes near that limit.
    let options = ["--set", "disk-limit=100KiB/s", "--downtime-limit", "1ms", "--patience", "0s"];
    let (migrate, _receive) = disks.in_full_pass(&[&options[..], &["--name", &name]].concat())?;
    // Some rounds with the limit in force; then it may end.
    let limited = |line: &Value| {
        line["disk_limit_bytes_per_second"].as_f64() == Some(LIMIT_RATE)
            && line["round"].as_u64() > Some(3)
    };
    migrate.wait_for("rounds with a limit", LIMIT, limited)?;
    // Where the host is quick enough for the limit of downtime, it has come to its end by itself
    // meanwhile: what was written says as much then.
    disks.pair.godwit.run(&["switchover", "--force", "--migration", &name])?;
    let migrate = migrate.wait(LIMIT)?;
    disks.check_moved(&migrate)?;
    // From the second round on, and all but the last, where the guest stands still.
    let rounds = migrate.last()["round_list"].as_array().cloned().unwrap_or_default();
    let limited = &rounds[1..rounds.len() - 1];
    let written: f64 =
        limited.iter().filter_map(|round| round["disk_written_bytes"].as_f64()).sum();
    let milliseconds = |value: &Value| value.as_f64().unwrap_or(0.0);
    let seconds =
        (milliseconds(&migrate.last()["total_ms"]) - milliseconds(&rounds[0]["ms"])) / 1e3;
    // A write that was under way when the limit came is not held back, and one may be counted
    // before it is paid for.
    ensure!(
        written <= LIMIT_RATE * seconds * 1.1 + 16_384.0,
        "{written} bytes in {seconds} s of limited rounds"
    );
    ensure!(rounds[0]["disk_written_bytes"].as_u64() > Some(0), "{}", rounds[0]);
    Ok(())
}

#[test]
fn disks_that_do_not_fit_are_refused_and_nothing_is_written() -> anyhow::Result<()> {
    let Some(mut disks) = DiskPair::start("unfit")? else { return Ok(()) };
    let small = Image::new("unfit-small", SIZE - 512)?;
    let shared = disks.from.0.display().to_string();
    let cases: [(&[&str], &[&str]); 3] = [
        (&[], &["the machine has no disk 'disk' (it has none)", "start both machines with --disk"]),
        (&small.option(), &["has 96MiB and the source's has", "truncate -s 100663808 FILE"]),
        (&["--disk", &shared], &["is open in another machine", "leave out --disks"]),
    ];
    for (option, words) in cases {
        let options = [OPTIONS, option, &["--incoming"]].concat();
        disks.pair.destination = MicroVm::start(&disks.pair.godwit, &options)?;
        let (migrate, _) = disks.pair.migrate(&["--disks", "all"])?;
        check_refused(&migrate, 1, words)?;
        disks.pair.check_untouched()?;
    }
    ensure!(small.bytes_from(0)?.iter().all(|byte| *byte == 0), "something was written");
    let unknown =
        disks.pair.godwit.migrate(&disks.pair.source, "127.0.0.1:1", &["--disks", "vda"])?;
    check_refused(&unknown.wait(LIMIT)?, 1, &["no disk 'vda' (it has 'disk')"])?;
    disks.pair.check_untouched()
}

/// QEMUs, each with a disk of the same name and an image of its own, whose guest writes and checks
/// it.
fn qemus(test: &str, format: &'static str) -> anyhow::Result<Vec<(Pair, [DiskImage; 2])>> {
    if !images_for(test) {
        return Ok(Vec::new());
    }
    let start = |build| {
        let image = || DiskImage::create(format, ByteCount(64 << 20));
        let images = [image()?, image()?];
        let rate = 2 << 20;
        let disk =
            DiskWork { write: rate, read: rate, span: ByteCount(16 << 20), ..DiskWork::default() };
        let guest = GuestConfig { disk, ..GuestConfig::small(Mode::Rate) };
        let config = |image| VmConfig::new(build, guest).with_disk("disk0", image);
        let pair = Pair::start_apart(&config(&images[0]), &config(&images[1]))?;
        Ok((pair, images))
    };
    builds_in_turn_for(test).iter().map(start).collect()
}

#[test]
fn the_disk_of_a_qemu_moves_along_with_its_guest() -> anyhow::Result<()> {
    for format in ["raw", "qcow2"] {
        for (mut pair, _images) in qemus("the_disk_of_a_qemu_moves_along_with_its_guest", format)? {
            let (migrate, _) = pair.migrate(&["--disks", "all", "--verify"])?;
            check_moved(&mut pair, &migrate)?;
            let disk = &migrate.last()["disks"][0];
            ensure!(disk["name"] == "disk0" && disk["data_pages"].as_u64() >= Some(4096), "{disk}");
            ensure!(disk["verified"] == true, "{disk}");
        }
    }
    Ok(())
}

/// What bears godwit's name in QEMU's block layer.
fn left_in(vm: &mut TestVm) -> anyhow::Result<Vec<String>> {
    let nodes = vm.qmp().execute("query-named-block-nodes", json!({ "flat": true }))?;
    let exports = vm.qmp().execute("query-block-exports", Value::Null)?;
    let bitmaps =
        nodes.as_array().into_iter().flatten().filter_map(|node| node["dirty-bitmaps"].as_array());
    let bitmaps = bitmaps.flatten().map(|bitmap| bitmap["name"].to_string());
    Ok(exports
        .as_array()
        .into_iter()
        .flatten()
        .map(|export| export["id"].to_string())
        .chain(bitmaps)
        .collect())
}

/// What `godwit receive` with these `allowed` says to a source whose disk would be moved.
fn refused_by(pair: &Pair, allowed: &[&str]) -> anyhow::Result<[Ended; 2]> {
    let (receive, address) = pair.godwit.receive(&pair.destination, allowed)?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &["--disks", "all"])?;
    Ok([migrate.wait(LIMIT)?, receive.wait(LIMIT)?])
}

/// Whoever reached the port could name a disk and overwrite it, whatever the operator there had in
/// mind.
#[test]
fn no_disk_is_overwritten_that_receive_was_not_told_of() -> anyhow::Result<()> {
    for (mut pair, images) in qemus("no_disk_is_overwritten_that_receive_was_not_told_of", "raw")? {
        let before = std::fs::read(images[1].path())?;
        for ended in refused_by(&pair, &[])? {
            check_refused(
                &ended,
                1,
                &["overwrite disk 'disk0'", "receive with --disks disk0 or --disks all"],
            )?;
        }
        let unknown =
            pair.godwit.receive(&pair.destination, &["--disks", "disk1"]).map(drop).unwrap_err();
        ensure!(
            unknown.to_string().contains("has no disk 'disk1'; its drives are disk0"),
            "{unknown}"
        );
        ensure!(std::fs::read(images[1].path())? == before, "something was written");
        check_untouched(&mut pair.source)?;
        // By another of its names, and into the machine that refused.
        let (receive, address) =
            pair.godwit.receive(&pair.destination, &["--disks", "disk0-device"])?;
        let migrate =
            pair.godwit.migrate(&pair.source, &address, &["--disks", "all"])?.wait(LIMIT)?;
        check_moved(&mut pair, &migrate)?;
        drop(receive);
    }
    Ok(())
}

#[test]
fn a_microvm_takes_no_disk_that_receive_was_not_told_of() -> anyhow::Result<()> {
    let Some(disks) = DiskPair::start("allowed")? else { return Ok(()) };
    let before = disks.to.bytes_from(0)?;
    let (receive, address) = disks.pair.godwit.receive(&disks.pair.destination, &[])?;
    let migrate = disks.pair.godwit.migrate(&disks.pair.source, &address, &["--disks", "all"])?;
    for ended in [migrate.wait(LIMIT)?, receive.wait(LIMIT)?] {
        check_refused(
            &ended,
            1,
            &["overwrite disk 'disk'", "receive with --disks disk or --disks all"],
        )?;
    }
    ensure!(disks.to.bytes_from(0)? == before, "something was written");
    disks.pair.check_untouched()?;
    disks.second_attempt()
}

#[test]
fn three_disks_of_a_qemu_move_along_and_nothing_stays_behind() -> anyhow::Result<()> {
    let test = "three_disks_of_a_qemu_move_along_and_nothing_stays_behind";
    let builds = if images_for(test) { builds_for(test) } else { Vec::new() };
    for build in builds {
        let disk = DiskWork {
            write: 2 << 20,
            read: 2 << 20,
            span: ByteCount(16 << 20),
            ..DiskWork::default()
        };
        let guest = GuestConfig { disk, ..GuestConfig::small(Mode::Rate) };
        let mut images = Vec::new();
        let mut config = |formats: [&'static str; 3]| -> anyhow::Result<VmConfig> {
            let mut config = VmConfig::new(&build, guest);
            for (name, format) in ["disk0", "disk1", "disk2"].into_iter().zip(formats) {
                let image = DiskImage::create(format, ByteCount(48 << 20))?;
                config = config.with_disk(name, &image);
                images.push(image);
            }
            Ok(config)
        };
        let (from, to) = (config(["raw", "qcow2", "raw"])?, config(["qcow2", "raw", "raw"])?);
        let mut pair = Pair::start_apart(&from, &to)?;

        let (migrate, _) = pair.migrate(&["--disks", "all", "--verify", "--keep-source"])?;

        check_moved(&mut pair, &migrate)?;
        ensure!(migrate.last()["disks"].as_array().map(Vec::len) == Some(3), "{}", migrate.last());
        for vm in [&mut pair.source, &mut pair.destination] {
            let left = left_in(vm)?;
            ensure!(left.is_empty(), "{left:?}");
        }
    }
    Ok(())
}

#[test]
fn a_disk_that_cannot_be_flushed_keeps_the_guest_at_the_source() -> anyhow::Result<()> {
    // Mutation: the QEMU adapter does not flush, so READY is said of what is in caches only.
    let test = "a_disk_that_cannot_be_flushed_keeps_the_guest_at_the_source";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
        let size = ByteCount(16 << 20);
        let (from, to) = (DiskImage::create("raw", size)?, DiskImage::create("raw", size)?);
        File::options().write(true).open(from.path())?.write_all_at(&[0x5a; 1 << 20], 0)?;
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Idle));
        // All is taken, and a flush fails (QEMU's blkdebug).
        let mut destination = config.clone().with_disk("d", &to);
        let failing = ",file.driver=blkdebug,file.image.driver=file,file.inject-error.0.event=none,\
            file.inject-error.0.iotype=flush,file.inject-error.0.errno=5,file.image.filename=";
        for argument in &mut destination.extra {
            *argument = argument.replace(",file.driver=file,file.filename=", failing);
        }
        let mut pair = Pair::start_apart(&config.with_disk("d", &from), &destination)?;
        let (migrate, receive) = pair.migrate(&["--disks", "all"])?;
        let words = ["export 'd': cannot flush", "the guest is at the source"];
        check_refused(&migrate, 1, &words)?;
        ensure!(receive.status.code() == Some(1), "{build}: {}", receive.errors);
        check_untouched(&mut pair.source)?;
    }
    Ok(())
}

/// A guest whose disk goes to storage that hangs when some of it was written there: godwit's two
/// sides, as they are then.
fn hung(build: &QemuBuild) -> anyhow::Result<(Pair, [Running; 2], RemoteDisk, DiskImage)> {
    let size = ByteCount(64 << 20);
    let from = DiskImage::create("raw", size)?;
    File::options().write(true).open(from.path())?.write_all_at(&[0x5a; 48 << 20], 0)?;
    let to = RemoteDisk::start(size)?;
    let config = VmConfig::new(build, GuestConfig::small(Mode::Rate));
    let mut destination = config.clone();
    destination.extra.extend(to.arguments("d"));
    let pair = Pair::start_apart(&config.with_disk("d", &from), &destination)?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &["--disks", "all"])?;
    let slow = ["--disks", "all", "--max-bandwidth", "16MiB/s", "--compression", "none"];
    let migrate = pair.godwit.migrate(&pair.source, &address, &slow)?;
    let copying = |line: &Value| line["disks"][0]["sent_bytes"].as_u64() > Some(4 << 20);
    migrate.wait_for("full pass", LIMIT, copying)?;
    to.hang()?;
    Ok((pair, [migrate, receive], to, from))
}

#[test]
fn a_disk_whose_new_storage_hangs_for_a_while_arrives() -> anyhow::Result<()> {
    let test = "a_disk_whose_new_storage_hangs_for_a_while_arrives";
    let builds = if images_for(test) { builds_for(test) } else { Vec::new() };
    for build in builds.iter().rev().take(1) {
        let (mut pair, [migrate, receive], storage, _image) = hung(build)?;
        pair.source.wait_for_heartbeats_after(Instant::now(), 8, LIMIT)?;
        let ended = migrate.has_ended() || receive.has_ended();
        ensure!(!ended, "nobody waited: {} {}", migrate.errors(), receive.errors());
        storage.answer()?;
        let migrate = migrate.wait(LIMIT)?;
        ensure!(receive.wait(LIMIT)?.status.success(), "{}", migrate.errors);
        check_moved(&mut pair, &migrate)?;
    }
    Ok(())
}

#[test]
#[ignore = "takes a minute or two: make test-long"]
fn a_disk_whose_new_storage_hangs_for_good_leaves_the_guest_where_it_runs() -> anyhow::Result<()> {
    let test = "a_disk_whose_new_storage_hangs_for_good_leaves_the_guest_where_it_runs";
    let builds = if images_for(test) { builds_for(test) } else { Vec::new() };
    for build in builds.iter().rev().take(1) {
        let (mut pair, [migrate, receive], storage, _image) = hung(build)?;
        let migrate = migrate.wait(LIMIT)?;
        check_refused(&migrate, 1, &["silence for", "the guest is at the source"])?;
        check_untouched(&mut pair.source)?;
        storage.answer()?;
        ensure!(receive.wait(LIMIT)?.status.code() == Some(1), "{}", migrate.errors);
        let (migrate, _) = pair.migrate(&["--disks", "all"])?;
        check_moved(&mut pair, &migrate)?;
    }
    Ok(())
}

#[test]
fn a_qemu_whose_disk_was_on_its_way_is_untouched() -> anyhow::Result<()> {
    for (mut pair, _images) in qemus("a_qemu_whose_disk_was_on_its_way_is_untouched", "raw")? {
        let (receive, address) = pair.godwit.receive(&pair.destination, &["--disks", "disk0"])?;
        let slow = ["--disks", "disk0", "--max-bandwidth", "2MiB/s", "--compression", "none"];
        let migrate = pair.godwit.migrate(&pair.source, &address, &slow)?;
        let copying = |line: &Value| line["disks"][0]["sent_bytes"].as_u64() > Some(1 << 20);
        migrate.wait_for("full pass", LIMIT, copying)?;

        migrate.signal(Signal::INT)?;

        ensure!(migrate.wait(LIMIT)?.status.code() == Some(130), "not cancelled");
        drop(receive.wait(LIMIT)?);
        check_untouched(&mut pair.source)?;
        let (migrate, _) = pair.migrate(&["--disks", "disk0"])?;
        check_moved(&mut pair, &migrate)?;
    }
    Ok(())
}
