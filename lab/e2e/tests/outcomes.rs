//! What befalls the guest itself while it moves, and what others do to its VM meanwhile: the guest
//! is reset, powers off or panics; somebody plugs a device, begins a block job or takes a snapshot.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{
    LIMIT, Pair, await_alone, await_copying, check_refused, check_settings, check_untouched,
};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    DiskImage, Ended, GuestConfig, Ports, QemuBuild, Running, TestVm, VmConfig, builds_for,
    builds_in_turn_for, images_for,
};
use godwit_units::ByteCount;
use serde_json::{Value, json};

/// What has to be noticed is noticed by then, on a busy machine too: the migration itself would go
/// on for much longer.
const SOON: Duration = Duration::from_secs(5);
/// So slow that it does not end by itself within a test, nor the first round within a few seconds.
const SLOW: &[&str] = &["--max-bandwidth", "5MiB/s", "--compression", "none", "--throttle", "off"];

/// What a guest does by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    PowersOff,
    Panics,
    Resets,
}

/// When it does so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    PreCopy,
    /// Its vCPUs were stopped, and what it did just before comes to light.
    Stopped,
}

/// A pair whose source guest does what the test has it do, with more options for the source QEMU.
struct Acting {
    pair: Pair,
    ports: Ports,
}

impl Acting {
    fn start(build: &QemuBuild, options: &[&str]) -> anyhow::Result<Self> {
        let ports = Ports::new()?;
        let plain = VmConfig::new(build, GuestConfig::small(Mode::Rate));
        let mut source = plain.clone().with_extra(options);
        source.extra.extend(ports.arguments());
        let pair = Pair::start_apart(&source, &plain.with_extra(&["-device", "pvpanic"]))?;
        Ok(Self { pair, ports })
    }

    /// A migration that has come to `when`.
    fn migrate(&mut self, when: When) -> anyhow::Result<(Running, Running)> {
        let (receive, address) = self.pair.godwit.receive(&self.pair.destination, &[])?;
        let options = if when == When::PreCopy { SLOW } else { &["--fault", "hold-stopped"] };
        let migrate = self.pair.godwit.migrate(&self.pair.source, &address, options)?;
        match when {
            When::PreCopy => await_copying(&migrate)?,
            When::Stopped => {
                await_state(&mut self.pair.source, &["finish-migrate"])?;
                // QEMU is in that state before its vCPUs have stopped (do_vm_stop, softmmu/cpus.c).
                std::thread::sleep(Duration::from_millis(300));
            }
        }
        Ok((migrate, receive))
    }

    fn act(&self, act: Act) -> anyhow::Result<()> {
        match act {
            Act::PowersOff => self.ports.power_off(),
            Act::Panics => self.ports.panic(),
            Act::Resets => self.ports.reset(),
        }
    }
}

/// Waits until the machine is in one of the states `wanted`.
fn await_state(vm: &mut TestVm, wanted: &[&str]) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    loop {
        let state = vm.status()?;
        if wanted.contains(&state.as_str()) {
            return Ok(());
        }
        ensure!(Instant::now() < until, "it is '{state}' and never one of {wanted:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Checks that `migrate` left the guest at the source and said `words`, in one line.
fn check_left(migrate: &Ended, words: &str) -> anyhow::Result<()> {
    check_refused(migrate, 1, &[words, "; the guest is at the source"])?;
    ensure!(migrate.last()["outcome"] == "failed", "{}", migrate.last());
    ensure!(migrate.last()["guest"] == "source", "{}", migrate.last());
    Ok(())
}

/// Waits until a guest that was reset counts anew in `vm`.
fn await_new_count(vm: &TestVm, old: u64) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    loop {
        let beats = vm.heartbeats();
        if beats.last().is_some_and(|beat| beat.heartbeat.n < old) {
            return Ok(());
        }
        ensure!(Instant::now() < until, "the guest does not boot anew");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_guest_that_powers_off_or_panics_and_its_qemu_with_it_has_ended() -> anyhow::Result<()> {
    for build in
        builds_in_turn_for("a_guest_that_powers_off_or_panics_and_its_qemu_with_it_has_ended")
    {
        for (act, when, words) in [
            (Act::PowersOff, When::PreCopy, "the guest powered off"),
            (Act::PowersOff, When::Stopped, "the guest powered off"),
            (Act::Panics, When::PreCopy, "the guest panicked"),
        ] {
            let mut acting = Acting::start(&build, &[])?;
            let (migrate, receive) = acting.migrate(when)?;

            acting.act(act)?;

            let acted = Instant::now();
            let migrate = migrate.wait(LIMIT)?;
            let context = || format!("{build}, {act:?} {when:?}: {}", migrate.errors);
            ensure!(acted.elapsed() < SOON, "{}: {:?}", context(), acted.elapsed());
            check_refused(&migrate, 3, &[words, "the guest has ended with its VM"])
                .with_context(context)?;
            ensure!(migrate.last()["guest"] == "ended", "{}", migrate.last());
            ensure!(receive.wait(LIMIT)?.status.code() == Some(1));
        }
    }
    Ok(())
}

#[test]
fn a_guest_that_powered_off_or_panicked_and_is_kept_is_not_moved() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_guest_that_powered_off_or_panicked_and_is_kept_is_not_moved")
    {
        for (act, words, state) in [
            (Act::PowersOff, "the guest powered off and does not run any more", "shutdown"),
            (Act::Panics, "the guest panicked and does not run any more", "guest-panicked"),
        ] {
            let mut acting = Acting::start(&build, &["-no-shutdown", "-action", "panic=pause"])?;
            let (migrate, receive) = acting.migrate(When::PreCopy)?;

            acting.act(act)?;

            let acted = Instant::now();
            let migrate = migrate.wait(LIMIT)?;
            let context = || format!("{build}, {act:?}: {}", migrate.errors);
            ensure!(acted.elapsed() < SOON, "{}: {:?}", context(), acted.elapsed());
            check_left(&migrate, words).with_context(context)?;
            ensure!(receive.wait(LIMIT)?.last()["vm_waits"] == true);
            let Acting { pair, .. } = &mut acting;
            await_alone(&pair.source)?;
            ensure!(pair.source.status()? == state, "{}", context());
            check_settings(&mut pair.source)?;
            // What has ended is not begun with, either.
            let again = pair.godwit.migrate(&pair.source, "127.0.0.1:1", &[])?.wait(LIMIT)?;
            check_refused(&again, 1, &[&format!("in the state '{state}'")])?;
        }
    }
    Ok(())
}

#[test]
fn a_guest_that_ended_just_before_it_was_stopped_runs_on_neither_side() -> anyhow::Result<()> {
    for build in
        builds_in_turn_for("a_guest_that_ended_just_before_it_was_stopped_runs_on_neither_side")
    {
        for (act, words) in
            [(Act::PowersOff, "the guest powered off"), (Act::Panics, "the guest panicked")]
        {
            let mut acting = Acting::start(&build, &["-no-shutdown", "-action", "panic=pause"])?;
            let (migrate, receive) = acting.migrate(When::Stopped)?;

            acting.act(act)?;

            let migrate = migrate.wait(LIMIT)?;
            let context = || format!("{build}, {act:?}: {}", migrate.errors);
            check_left(&migrate, words).with_context(context)?;
            ensure!(receive.wait(LIMIT)?.status.code() == Some(1));
            let Acting { pair, .. } = &mut acting;
            await_alone(&pair.source)?;
            check_settings(&mut pair.source)?;
            let state = pair.source.status()?;
            ensure!(state == "paused" || state == "postmigrate", "{}: '{state}'", context());
            ensure!(!pair.destination.is_alive(), "the destination has not ended");
        }
    }
    Ok(())
}

#[test]
fn a_guest_that_is_reset_boots_anew_and_moves() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_guest_that_is_reset_boots_anew_and_moves") {
        // When it has booted again, and while its firmware still runs.
        for booted in [true, false] {
            let mut acting = Acting::start(&build, &["-action", "reboot=reset"])?;
            let (receive, address) = acting.pair.godwit.receive(&acting.pair.destination, &[])?;
            let name = format!("reset-{}-{booted}", std::process::id());
            let options = [SLOW, &["--verify", "--name", &name]].concat();
            let migrate = acting.pair.godwit.migrate(&acting.pair.source, &address, &options)?;
            await_copying(&migrate)?;
            let old = acting.pair.source.heartbeats().last().context("no heartbeat")?.heartbeat.n;

            acting.act(Act::Resets)?;

            if booted {
                await_new_count(&acting.pair.source, old)?;
            }
            let free = ["max-bandwidth=off", "compression=auto", "throttle=adaptive"];
            let set = ["set", "--migration", &name];
            acting.pair.godwit.done(&[&set[..], &free[..]].concat())?;
            let migrate = migrate.wait(LIMIT)?;
            let context =
                || format!("{build}, booted {booted}: {} {}", migrate.last(), migrate.errors);
            ensure!(migrate.last()["outcome"] == "migrated", "{}", context());
            ensure!(migrate.last()["verified"] == true, "{}", context());
            ensure!(receive.wait(LIMIT)?.status.success());
            let destination = &mut acting.pair.destination;
            destination
                .wait_for_heartbeats_after(Instant::now(), 3, LIMIT)
                .with_context(context)?;
            if !booted {
                let first = destination.heartbeats()[0].heartbeat.n;
                ensure!(first < old, "{}: it booted before it moved: {first}", context());
            }
            ensure!(destination.bugs().is_empty(), "{:?}", destination.bugs());
        }
    }
    Ok(())
}

#[test]
fn a_guest_that_is_reset_when_it_stands_still_stays_and_boots_anew() -> anyhow::Result<()> {
    for build in
        builds_in_turn_for("a_guest_that_is_reset_when_it_stands_still_stays_and_boots_anew")
    {
        let mut acting = Acting::start(&build, &["-action", "reboot=reset"])?;
        let old = acting.pair.source.heartbeats().last().context("no heartbeat")?.heartbeat.n;
        let (migrate, _receive) = acting.migrate(When::Stopped)?;

        acting.act(Act::Resets)?;

        let migrate = migrate.wait(LIMIT)?;
        check_left(&migrate, "the guest was reset while it stood still for the handover")?;
        await_new_count(&acting.pair.source, old).with_context(|| build.to_string())?;
        check_untouched(&mut acting.pair.source)?;
    }
    Ok(())
}

/// What somebody else does to the VM.
struct Intrusion {
    /// Commands of QMP.
    does: Vec<(&'static str, Value)>,
    /// What godwit says to it.
    words: Vec<String>,
    /// What undoes it.
    undone: Option<(&'static str, Value)>,
}

#[test]
fn what_others_do_to_the_vm_meanwhile_ends_the_migration() -> anyhow::Result<()> {
    // Mutation: `check_unchanged` is not asked before the guest is stopped.
    let test = "what_others_do_to_the_vm_meanwhile_ends_the_migration";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds_for(test) {
        let size = ByteCount(16 << 20);
        let (image, overlay) = (DiskImage::create("raw", size)?, DiskImage::create("qcow2", size)?);
        let port = ["-device", "pcie-root-port,id=hot,chassis=1"];
        let target = format!("driver=null-co,node-name=target,size={}", size.0);
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_extra(&port);
        let config = config.with_extra(&["-blockdev", &target]).with_disk("disk", &image);
        let mut pair = Pair::start(&config)?;
        let job = |kind: &str| {
            json!({
                "job-id": kind, "device": "disk", "target": "target", "sync": "full", "speed": 1,
            })
        };
        let told_job = |kind: &str| vec![format!("a block job ('{kind}', {kind}) runs")];
        let cancel = |id: &str| Some(("block-job-cancel", json!({ "device": id, "force": true })));
        let plugged = json!({ "driver": "virtio-rng-pci", "id": "plugged", "bus": "hot" });
        let rng = json!({ "qom-type": "rng-random", "id": "rng0", "filename": "/dev/urandom" });
        let plugged = [("object-add", rng), ("device_add", plugged)];
        let snapshot = json!({ "node-name": "disk", "snapshot-file": overlay.path(),
            "format": "qcow2", "mode": "existing", "snapshot-node-name": "over" });
        // QEMU 7.2 names an image with its backing file by a whole line of JSON.
        let overlaid = overlay.path().display().to_string();
        for (index, Intrusion { does, words, undone }) in [
            Intrusion {
                does: vec![("blockdev-backup", job("backup"))],
                words: told_job("backup"),
                undone: cancel("backup"),
            },
            Intrusion {
                does: vec![("blockdev-mirror", job("mirror"))],
                words: told_job("mirror"),
                undone: cancel("mirror"),
            },
            Intrusion {
                does: plugged.to_vec(),
                words: vec![
                    "device 'plugged' (virtio-rng-pci) was added during the migration".to_owned(),
                ],
                undone: None,
            },
            Intrusion {
                does: vec![("blockdev-snapshot-sync", snapshot)],
                words: vec![overlaid, "was added during the migration".to_owned()],
                undone: None,
            },
        ]
        .into_iter()
        .enumerate()
        {
            let what = does.last().map_or("", |(command, _)| command);
            let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            let name = format!("intruded-{}-{index}", std::process::id());
            let slow = ["--disks-are-shared", "--allow-differences", "device", "--name", &name];
            let options = [SLOW, &slow].concat();
            let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
            await_copying(&migrate)?;

            for (command, arguments) in does {
                pair.source.qmp().execute(command, arguments)?;
            }

            let set = ["set", "--migration", &name, "max-bandwidth=off", "throttle=adaptive"];
            pair.godwit.done(&set)?;
            let migrate = migrate.wait(LIMIT)?;
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            check_refused(&migrate, 1, &words).with_context(|| format!("{build}: {what}"))?;
            receive.wait(LIMIT)?;
            if let Some((command, arguments)) = undone {
                pair.source.qmp().execute(command, arguments)?;
            }
            check_untouched(&mut pair.source).with_context(|| format!("{build}: {what}"))?;
            // It was found when the destination had been told to get ready.
            pair.destination = TestVm::destination(&config)?;
        }
    }
    Ok(())
}
