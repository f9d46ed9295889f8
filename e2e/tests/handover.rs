//! What befalls the link or either QEMU while the guest is stopped: who has the guest then, and that it is said so.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, Link, Pair, check_untouched};
use godwit_testbed::{DiskImage, Ended, GuestConfig, Running, TestVm, VmConfig, flavours_for, images_for};
use godwit_units::ByteCount;
use godwit_verify::settings::Mode;

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
    for flavour in flavours_for(test) {
        let image = |format| DiskImage::create(format, ByteCount(16 << 20));
        let (raw, qcow2) = (image("raw")?, image("qcow2")?);
        let config = VmConfig::new(&flavour, GuestConfig::small(Mode::Rate));
        let mut pair = Pair::start(&config.with_disk("raw", &raw).with_disk("qcow2", &qcow2))?;
        let (link, migrate, receive) = held_at_ready(&mut pair, &[])?;

        link.cut();

        // The destination waits for two minutes for a word from the source, and holds no lock meanwhile.
        let cut = Instant::now();
        let migrate = migrate.wait(LIMIT)?;
        check_back(&migrate).with_context(|| flavour.to_string())?;
        ensure!(cut.elapsed() < Duration::from_secs(10), "{:?}", cut.elapsed());
        ensure!(pair.destination.status()? == "paused");
        check_untouched(&mut pair.source)?;
        drop(receive);
    }
    Ok(())
}
