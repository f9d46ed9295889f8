//! What befalls the link or either QEMU while the guest is stopped: who has the guest then, and
//! that it is said so.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, Pair, await_copying, check_moved, check_untouched};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, DiskImage, Ended, GuestConfig, Link, Network, QemuBuild, RemoteDisk, Running, TestVm,
    VmConfig, builds_in_turn_for, images_for,
};
use godwit_units::ByteCount;
use serde_json::json;

/// What has to be noticed is noticed by then, on a busy machine too; all limits of the product are
/// longer.
const SOON: Duration = Duration::from_secs(3);

/// A pair with a guest that writes.
fn pair(build: &QemuBuild) -> anyhow::Result<Pair> {
    Pair::start(&VmConfig::new(build, GuestConfig::small(Mode::Rate)))
}

/// A migration that is held while the guest is stopped.
fn held_when_stopped(pair: &mut Pair) -> anyhow::Result<(Running, Running)> {
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &["--fault", "hold-stopped"])?;
    await_state(&mut pair.source, "finish-migrate")?;
    Ok((migrate, receive))
}

/// Waits until the machine is in the state `wanted`.
fn await_state(vm: &mut TestVm, wanted: &str) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    loop {
        let state = vm.status()?;
        if state == wanted {
            return Ok(());
        }
        ensure!(Instant::now() < until, "it is '{state}' and never '{wanted}'");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A migration that is held at READY: the destination has loaded the guest.
fn held_at_ready(pair: &mut Pair, options: &[&str]) -> anyhow::Result<(Link, Running, Running)> {
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let link = Link::to(&address)?;
    let options = [&["--fault", "hold-ready"], options].concat();
    let migrate = pair.godwit.migrate(&pair.source, link.address(), &options)?;
    await_state(&mut pair.destination, "paused")?;
    // READY follows when godwit has heard it, too.
    std::thread::sleep(Duration::from_millis(300));
    Ok((link, migrate, receive))
}

/// Checks that `migrate` failed and says that the guest is back at the source.
fn check_back(migrate: &Ended) -> anyhow::Result<()> {
    ensure!(migrate.status.code() == Some(1), "{}: {}", migrate.status, migrate.errors);
    ensure!(migrate.last()["guest"] == "source", "{}", migrate.last());
    Ok(())
}

#[test]
fn a_link_cut_at_ready_with_locked_images_that_both_have_open() -> anyhow::Result<()> {
    let test = "a_link_cut_at_ready_with_locked_images_that_both_have_open";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
        let image = |format| DiskImage::create(format, ByteCount(16 << 20));
        let (raw, qcow2) = (image("raw")?, image("qcow2")?);
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate));
        let mut pair = Pair::start(&config.with_disk("raw", &raw).with_disk("qcow2", &qcow2))?;
        let (link, migrate, receive) = held_at_ready(&mut pair, &[])?;

        link.cut();

        // The destination waits for two minutes for a word from the source, and holds no lock
        // meanwhile.
        let cut = Instant::now();
        let migrate = migrate.wait(LIMIT)?;
        check_back(&migrate).with_context(|| build.to_string())?;
        ensure!(cut.elapsed() < Duration::from_secs(10), "{:?}", cut.elapsed());
        ensure!(pair.destination.status()? == "paused");
        check_untouched(&mut pair.source)?;
        drop(receive);
    }
    Ok(())
}

#[test]
fn a_source_qemu_that_is_killed_takes_its_guest_along_and_it_is_said_at_once() -> anyhow::Result<()>
{
    for build in builds_in_turn_for(
        "a_source_qemu_that_is_killed_takes_its_guest_along_and_it_is_said_at_once",
    ) {
        for stopped in [false, true] {
            let mut pair = pair(&build)?;
            let (migrate, receive) = if stopped {
                held_when_stopped(&mut pair)?
            } else {
                let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
                let slow = ["--max-bandwidth", "5MiB/s"];
                let migrate = pair.godwit.migrate(&pair.source, &address, &slow)?;
                await_copying(&migrate)?;
                (migrate, receive)
            };

            pair.source.kill();

            let killed = Instant::now();
            let migrate = migrate.wait(LIMIT)?;
            ensure!(killed.elapsed() < SOON, "{build}, stopped {stopped}: {:?}", killed.elapsed());
            ensure!(migrate.status.code() == Some(3), "{}: {}", migrate.status, migrate.errors);
            ensure!(migrate.last()["guest"] == "ended", "{}", migrate.last());
            ensure!(migrate.last()["outcome"] == "failed", "{}", migrate.last());
            ensure!(
                migrate.errors.contains("the guest has ended with its VM"),
                "{}",
                migrate.errors
            );
            ensure!(migrate.errors.trim().lines().count() == 1, "{}", migrate.errors);
            ensure!(receive.wait(LIMIT)?.status.code() == Some(1));
        }
    }
    Ok(())
}

#[test]
fn a_guest_that_has_arrived_outlives_the_qemu_it_came_from() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_guest_that_has_arrived_outlives_the_qemu_it_came_from") {
        let mut pair = pair(&build)?;
        let (_link, migrate, receive) = held_at_ready(&mut pair, &[])?;

        pair.source.kill();

        check_moved(&mut pair, &migrate.wait(LIMIT)?).with_context(|| build.to_string())?;
        ensure!(receive.wait(LIMIT)?.status.success());
    }
    Ok(())
}

#[test]
fn a_destination_qemu_that_is_killed_never_ran_the_guest_and_the_source_hears_it()
-> anyhow::Result<()> {
    let test = "a_destination_qemu_that_is_killed_never_ran_the_guest_and_the_source_hears_it";
    for build in builds_in_turn_for(test) {
        for ready in [false, true] {
            let mut pair = pair(&build)?;
            let (_link, migrate, receive) = if ready {
                let (link, migrate, receive) = held_at_ready(&mut pair, &[])?;
                (Some(link), migrate, receive)
            } else {
                let (migrate, receive) = held_when_stopped(&mut pair)?;
                (None, migrate, receive)
            };

            pair.destination.kill();

            // Long before the source would say COMMIT.
            let killed = Instant::now();
            let migrate = migrate.wait(LIMIT)?;
            ensure!(killed.elapsed() < SOON, "{build}, ready {ready}: {:?}", killed.elapsed());
            check_back(&migrate)?;
            // Whether its process or its monitor is seen to end first is a matter of luck.
            let words = ["the destination VM has ended", "it has exited"];
            let hears = words.iter().any(|words| migrate.errors.contains(words));
            ensure!(hears, "{}", migrate.errors);
            check_untouched(&mut pair.source).with_context(|| format!("{build}, ready {ready}"))?;
            ensure!(receive.wait(LIMIT)?.status.code() == Some(1));
        }
    }
    Ok(())
}

#[test]
fn a_destination_that_refuses_to_run_the_guest_says_why_and_the_source_has_it_back()
-> anyhow::Result<()> {
    let test = "a_destination_that_refuses_to_run_the_guest_says_why_and_the_source_has_it_back";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
        let image = DiskImage::create("raw", ByteCount(16 << 20))?;
        let config =
            VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_disk("disk", &image);
        let mut pair = Pair::start(&config)?;
        let (_link, migrate, receive) = held_at_ready(&mut pair, &[])?;

        // Neither side has the image's lock now, and somebody else takes it.
        let thief = RemoteDisk::serve(image)?;
        let receive = receive.wait(LIMIT)?;
        ensure!(!pair.destination.is_alive(), "the destination QEMU still runs");
        drop(thief);

        let migrate = migrate.wait(LIMIT)?;
        check_back(&migrate)?;
        for errors in [&migrate.errors, &receive.errors] {
            ensure!(errors.contains("QEMU refused cont: Failed to get"), "{errors}");
        }
        check_untouched(&mut pair.source)?;
    }
    Ok(())
}

#[test]
fn the_network_is_told_as_often_as_is_wanted() -> anyhow::Result<()> {
    for build in builds_in_turn_for("the_network_is_told_as_often_as_is_wanted") {
        for rounds in [0_usize, 12] {
            let (here, there) = (Network::listen()?, Network::listen()?);
            let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate));
            let config = |network: &Network| {
                let mut config = config.clone();
                config.extra.extend(network.arguments());
                config
            };
            let mut pair = Pair::start_apart(&config(&here), &config(&there))?;
            let wanted = rounds.to_string();
            let options = ["--announce", &wanted];
            let (receive, address) = pair.godwit.receive(&pair.destination, &options)?;
            let migrate = pair.godwit.migrate(&pair.source, &address, &[])?.wait(LIMIT)?;
            check_moved(&mut pair, &migrate)?;
            ensure!(receive.wait(LIMIT)?.status.success());
            // Twelve rounds take six seconds; ten is what QEMU and godwit would do unasked.
            let (until, mut announced) = (Instant::now() + LIMIT, there.announcements()?);
            let least = if rounds == 0 { 0 } else { 11 };
            std::thread::sleep(Duration::from_secs(1));
            while announced < least && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(100));
                announced += there.announcements()?;
            }
            ensure!(announced >= least, "{build}: announced {announced} times");
            ensure!(rounds > 0 || announced + there.announcements()? == 0, "{build}: {announced}");
            let parameters =
                pair.destination.qmp().execute("query-migrate-parameters", json!({}))?;
            ensure!(parameters["announce-rounds"] == 5, "{build}: it stays set: {parameters}");
        }
    }
    Ok(())
}

#[test]
fn the_network_is_told_where_the_guest_is() -> anyhow::Result<()> {
    let backends = [Backend::SharedFile, Backend::Anonymous];
    let builds = builds_in_turn_for("the_network_is_told_where_the_guest_is");
    for (build, backend) in builds.iter().flat_map(|build| backends.map(|kind| (build, kind))) {
        let (here, there) = (Network::listen()?, Network::listen()?);
        let config = VmConfig::new(build, GuestConfig::small(Mode::Rate)).with_backend(backend);
        let mut source = config.clone();
        source.extra.extend(here.arguments());
        let mut destination = config;
        destination.extra.extend(there.arguments());

        let mut pair = Pair::start_apart(&source, &destination)?;
        let (link, migrate, receive) = held_at_ready(&mut pair, &[])?;
        std::thread::sleep(Duration::from_millis(2500));
        let (before, there_before) = (here.announcements()?, there.announcements()?);
        link.cut();
        check_back(&migrate.wait(LIMIT)?)?;
        std::thread::sleep(Duration::from_secs(1));
        ensure!(before == 0 && here.announcements()? > 0, "{build}: not announced at the source");
        ensure!(there_before == 0, "{build}: a guest that does not run was announced");
        drop(receive);

        pair.destination = TestVm::destination(&destination)?;
        let (_link, migrate, receive) = held_at_ready(&mut pair, &[])?;
        std::thread::sleep(Duration::from_millis(2500));
        there.announcements()?;
        check_moved(&mut pair, &migrate.wait(LIMIT)?)?;
        std::thread::sleep(Duration::from_secs(1));
        // Five are QEMU's own, which it makes when it has loaded a guest and sends when that runs.
        let announced = there.announcements()?;
        ensure!(announced > 5, "{build}, {backend:?}: announced {announced} times");
        ensure!(receive.wait(LIMIT)?.status.success());
    }
    Ok(())
}
