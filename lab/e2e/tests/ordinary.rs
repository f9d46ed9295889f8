//! VMs that nobody has prepared: RAM that no file with a name holds.

use std::time::Instant;

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, Link, Pair, await_copying, await_quit, check_moved, check_untouched};
use godwit_guest_workload::settings::{DiskWork, Mode};
use godwit_testbed::{
    Backend, DiskImage, Godwit, GuestConfig, QemuBuild, TestVm, VmConfig, builds_for, images_for,
};
use godwit_units::ByteCount;
use rustix::process::Signal;

/// QEMUs that tell where RAM is: from 8.0 on.
fn builds(test: &str) -> Vec<QemuBuild> {
    let mut builds = builds_for(test);
    builds.retain(|build| build.version.0 >= 8);
    builds
}

/// Where its RAM is, and what is plugged in: VGA memory and firmware are RAM blocks, too.
fn config(build: &QemuBuild, mode: Mode, backend: Backend) -> VmConfig {
    let config = VmConfig::new(build, GuestConfig::small(mode)).with_backend(backend);
    config.with_extra(&["-device", "VGA", "-device", "virtio-rng-pci"])
}

fn moves(test: &str, mode: Mode, backend: Backend) -> anyhow::Result<()> {
    for build in builds(test) {
        let mut pair = Pair::start(&config(&build, mode, backend))?;

        let (migrate, receive) = pair.migrate(&["--verify"])?;

        check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
        ensure!(migrate.last()["verified"] == true, "{}", migrate.last());
        ensure!(receive.last()["outcome"] == "running", "{}", receive.last());
        ensure!(pair.destination.errors() == "", "{}", pair.destination.errors());
        await_quit(&mut pair.source)?;
    }
    Ok(())
}

#[test]
fn an_idle_guest_with_anonymous_ram() -> anyhow::Result<()> {
    moves("an_idle_guest_with_anonymous_ram", Mode::Idle, Backend::Anonymous)
}

#[test]
fn a_writing_guest_with_anonymous_ram() -> anyhow::Result<()> {
    moves("a_writing_guest_with_anonymous_ram", Mode::Rate, Backend::Anonymous)
}

#[test]
fn a_guest_at_full_speed_with_anonymous_ram() -> anyhow::Result<()> {
    moves("a_guest_at_full_speed_with_anonymous_ram", Mode::Full, Backend::Anonymous)
}

#[test]
fn a_writing_guest_in_a_memfd() -> anyhow::Result<()> {
    moves("a_writing_guest_in_a_memfd", Mode::Rate, Backend::Memfd)
}

/// A pair whose guest writes, with an image that both have open and lock.
fn pair(build: &QemuBuild, image: &DiskImage) -> anyhow::Result<Pair> {
    Pair::start(&config(build, Mode::Rate, Backend::Anonymous).with_disk("shared", image))
}

#[test]
fn whatever_fails_the_guest_runs_on_with_its_disk() -> anyhow::Result<()> {
    let test = "whatever_fails_the_guest_runs_on_with_its_disk";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds(test) {
        let image = DiskImage::create("raw", ByteCount(16 << 20))?;
        let mut pair = pair(&build, &image)?;

        // While it copies: a cut, and Ctrl-C.
        for cut in [true, false] {
            let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            let link = Link::to(&address)?;
            let slow = ["--max-bandwidth", "20MiB/s"];
            let migrate = pair.godwit.migrate(&pair.source, link.address(), &slow)?;
            await_copying(&migrate)?;
            if cut {
                link.cut();
            } else {
                migrate.signal(Signal::INT)?;
            }
            let code = if cut { 1 } else { 130 };
            let migrate = migrate.wait(LIMIT)?;
            ensure!(migrate.status.code() == Some(code), "{} {}", migrate.status, migrate.errors);
            check_untouched(&mut pair.source).with_context(|| build.to_string())?;
            drop(receive);
        }

        // Killed with the guest stopped, before and after its devices were saved and its image was
        // let go of: the guardian brings it back.
        for fault in ["kill-after-stop", "kill-after-release", "kill-after-state"] {
            let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            let migrate = pair.godwit.migrate(&pair.source, &address, &["--fault", fault])?;
            migrate.wait(LIMIT)?;
            check_untouched(&mut pair.source).with_context(|| format!("{build}: {fault}"))?;
            pair.destination = TestVm::destination(pair.source.config())?;
        }

        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate)?;
        // The image is the destination's now, to write.
        pair.destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        ensure!(pair.destination.errors() == "", "{}", pair.destination.errors());
    }
    Ok(())
}

#[test]
fn a_source_that_is_kept_stands_and_a_paused_guest_arrives_paused() -> anyhow::Result<()> {
    for build in builds("a_source_that_is_kept_stands_and_a_paused_guest_arrives_paused") {
        let mut pair = Pair::start(&config(&build, Mode::Rate, Backend::Anonymous))?;
        pair.source.qmp().execute("stop", serde_json::Value::Null)?;
        let (migrate, _) = pair.migrate(&["--verify", "--keep-source"])?;
        ensure!(migrate.last()["outcome"] == "migrated", "{}", migrate.errors);
        ensure!(pair.source.status()? == "paused", "{}", pair.source.status()?);
        ensure!(pair.destination.status()? == "paused");
        pair.destination.resume()?;
        check_moved(&mut pair, &migrate)?;
    }
    Ok(())
}

#[test]
fn both_sides_have_ram_of_other_names() -> anyhow::Result<()> {
    for build in builds("both_sides_have_ram_of_other_names") {
        let source = config(&build, Mode::Idle, Backend::Anonymous);
        let mut pair =
            Pair::start_apart(&source, &config(&build, Mode::Idle, Backend::SharedFile))?;
        let (migrate, _) = pair.migrate(&[])?;
        ensure!(migrate.status.code() == Some(1), "{} {}", migrate.status, migrate.errors);
        ensure!(migrate.errors.contains("RAM block"), "{}", migrate.errors);
        check_untouched(&mut pair.source)?;
    }
    Ok(())
}

#[test]
fn the_writes_of_a_guest_with_anonymous_ram_are_governed() -> anyhow::Result<()> {
    for build in builds("the_writes_of_a_guest_with_anonymous_ram_are_governed") {
        let mut pair = Pair::start(&config(&build, Mode::Full, Backend::Anonymous))?;
        let governed = ["--max-bandwidth", "40MiB/s", "--throttle", "governor"];
        let options = [&governed[..], &["--downtime-limit", "200ms", "--verify"]].concat();

        let (migrate, _) = pair.migrate(&options)?;

        check_moved(&mut pair, &migrate)?;
        ensure!(migrate.last()["write_faults_delayed"].as_u64() > Some(0), "{}", migrate.last());
    }
    Ok(())
}

#[test]
fn a_plan_tells_which_way_the_device_state_takes() -> anyhow::Result<()> {
    for build in builds("a_plan_tells_which_way_the_device_state_takes") {
        for (backend, way) in [(Backend::Anonymous, "saving"), (Backend::SharedFile, "migration")] {
            let mut vm = TestVm::source(&config(&build, Mode::Idle, backend))?;
            vm.wait_ready(LIMIT)?;
            let name = format!("qemu:{}", vm.qmp_socket().display());
            let output =
                Godwit::built()?.done(&["plan", "--vm", &name, "--for", "1s", "--json"])?;
            let plan: serde_json::Value = serde_json::from_slice(&output.stdout)?;
            ensure!(plan["device_state"] == way, "{backend:?}: {}", plan["device_state"]);
            check_untouched(&mut vm)?;
        }
    }
    Ok(())
}

#[test]
fn every_step_is_told_to_who_asks() -> anyhow::Result<()> {
    for build in builds("every_step_is_told_to_who_asks") {
        let mut pair = Pair::start(&config(&build, Mode::Idle, Backend::Anonymous))?;
        let (migrate, _) = pair.migrate(&["--log", "debug"])?;
        check_moved(&mut pair, &migrate)?;
        for step in ["action=StopGuest", "action=SendCommit", "carried round=1 data_pages="] {
            ensure!(migrate.errors.contains(step), "'{step}' is not in: {}", migrate.errors);
        }
        let refused = Godwit::built()?.run(&["migrate", "--log", "loud"])?;
        ensure!(refused.status.code() == Some(2), "{}", refused.status);
    }
    Ok(())
}

#[test]
fn disks_move_along_with_anonymous_ram() -> anyhow::Result<()> {
    let test = "disks_move_along_with_anonymous_ram";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds(test) {
        let image = || DiskImage::create("qcow2", ByteCount(48 << 20));
        let (from, to) = (image()?, image()?);
        let mut config = config(&build, Mode::Rate, Backend::Anonymous);
        // The guest checks what it reads of what it wrote.
        let span = ByteCount(16 << 20);
        config.guest.disk = DiskWork { write: 2 << 20, read: 2 << 20, span, ..DiskWork::default() };
        let config = |image| config.clone().with_disk("disk0", image);
        let mut pair = Pair::start_apart(&config(&from), &config(&to))?;

        let (migrate, _) = pair.migrate(&["--disks", "all", "--verify"])?;

        check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
        ensure!(pair.destination.errors() == "", "{}", pair.destination.errors());
    }
    Ok(())
}
