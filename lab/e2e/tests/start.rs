//! `godwit receive --start`: destinations that nobody has prepared.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{
    LIMIT, await_copying, await_quit, check_untouched, guardian_of_process, oldest, rank,
};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    Backend, DiskImage, Ended, Godwit, GuestConfig, GuestFiles, QemuBuild, Room, Running,
    StartedVm, StorageDaemon, TestVm, VmConfig, builds_for, images_for, storage_daemon_for,
};
use godwit_units::ByteCount;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

/// What the operator has to say for a machine of the tests.
struct Said {
    room: Room,
    words: Vec<String>,
}

impl Said {
    /// That what lies beside the file `beside` lies in a room, and that the guest's files and what
    /// is in `more` are the same on both hosts.
    fn of(build: &QemuBuild, beside: &Path, more: &[String]) -> anyhow::Result<Self> {
        let room = Room::new()?;
        let guest = GuestFiles::find()?;
        let guest = guest.kernel.parent().context("no directory")?.display().to_string();
        let mut words =
            vec!["--map".to_owned(), room.instead_of(beside), "--map".to_owned(), guest];
        words.extend(more.iter().flat_map(|more| ["--map".to_owned(), more.clone()]));
        if build.program.is_absolute() {
            words.extend(["--emulator".to_owned(), build.program.display().to_string()]);
        }
        Ok(Self { room, words })
    }

    fn receive(&self, options: &[&str]) -> anyhow::Result<(Running, String)> {
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        Godwit::built()?.receive_starting(&[&words, options].concat())
    }
}

fn config(build: &QemuBuild, mode: Mode) -> VmConfig {
    let config = VmConfig::new(build, GuestConfig::small(mode)).with_backend(Backend::Anonymous);
    config.with_extra(&["-device", "VGA", "-device", "virtio-rng-pci,id=rng"])
}

fn source(config: &VmConfig) -> anyhow::Result<TestVm> {
    let vm = TestVm::source(config)?;
    vm.wait_ready(LIMIT)?;
    vm.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
    Ok(vm)
}

fn check_migrated(migrate: &Ended, receive: &Ended) -> anyhow::Result<()> {
    let told = || format!("{} {} {}", migrate.last(), migrate.errors, receive.errors);
    ensure!(migrate.last()["outcome"] == "migrated", "{}", told());
    ensure!(migrate.last()["verified"] == true, "{}", told());
    ensure!(receive.last()["outcome"] == "running", "{}", told());
    Ok(())
}

/// The guest counts on from `last`, in a process that is nobody's, in a session that nobody leads.
fn check_runs(vm: &StartedVm, last: u64) -> anyhow::Result<()> {
    let numbers = vm.await_beats(3, LIMIT)?;
    let counted = numbers.windows(2).all(|pair| pair[1] > pair[0]);
    ensure!(counted && numbers.first() > Some(&last), "{last}, {numbers:?}");
    let pid = Pid::from_raw(vm.pid).context("no process")?;
    let session = rustix::process::getsid(Some(pid))?.as_raw_nonzero();
    ensure!(!Path::new(&format!("/proc/{session}")).exists(), "it is in somebody's session");
    // It has the guest, and goes first no more when memory runs out.
    let own = rank(std::process::id().cast_signed())?;
    ensure!(rank(vm.pid)? == own, "{} instead of {own}", rank(vm.pid)?);
    Ok(())
}

#[test]
fn a_destination_is_made_from_what_the_source_tells_and_the_next_from_that() -> anyhow::Result<()> {
    let test = "a_destination_is_made_from_what_the_source_tells_and_the_next_from_that";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds_for(test) {
        let image = DiskImage::create("qcow2", ByteCount(48 << 20))?;
        let shared = image.path().display().to_string();
        let mut config = config(&build, Mode::Rate).with_disk("disk0", &image);
        let span = ByteCount(16 << 20);
        config.guest.disk = DiskWork { write: 2 << 20, read: 2 << 20, span, ..DiskWork::default() };
        let mut vm = source(&config)?;

        // The disk is the same on both hosts.
        let said = Said::of(&build, &vm.qmp_socket(), std::slice::from_ref(&shared))?;
        let (receive, address) = said.receive(&[])?;
        let godwit = Godwit::built()?;
        let migrate = godwit.migrate(&vm, &address, &["--verify"])?;
        let first = StartedVm::of(&receive, LIMIT)?;
        let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        check_migrated(&migrate, &receive).with_context(|| build.to_string())?;
        await_quit(&mut vm)?;
        let last = vm.heartbeats().last().context("no heartbeat")?.heartbeat.n;
        check_runs(&first, last).with_context(|| build.to_string())?;
        ensure!(vm.bugs().is_empty(), "{:?}", vm.bugs());
        let command = receive.lines.iter().find(|line| line["event"] == "command");
        let command = command.context("the command line was not shown")?;
        ensure!(command["command"].as_str().is_some_and(|it| it.contains("-incoming defer")));
        ensure!(command["left_out"].is_array(), "{command}");

        // The disk has another path on the next host.
        if build.version.0 >= 8 {
            continue;
        }
        let beside = said.room.dir().join("qmp");
        let other = Room::new()?;
        let link = other.dir().join("disk");
        std::os::unix::fs::symlink(image.path(), &link)?;
        let next = Said::of(&build, &beside, &[format!("{shared}={}", link.display())])?;
        let (receive, address) = next.receive(&[])?;
        let migrate = godwit.migrate_named(&first.vm_name(), &address, &["--verify"])?;
        let second = StartedVm::of(&receive, LIMIT)?;
        let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        check_migrated(&migrate, &receive).with_context(|| build.to_string())?;
        first.await_end(LIMIT)?;
        let last = first.await_beats(0, LIMIT)?.last().copied().context("no heartbeat")?;
        check_runs(&second, last).with_context(|| build.to_string())?;
        let command = receive.lines.iter().find(|line| line["event"] == "command");
        let command = command.and_then(|it| it["command"].as_str()).unwrap_or_default();
        ensure!(command.contains(&link.display().to_string()), "{command}");
        ensure!(command.matches("id=godwit-monitor").count() == 1, "{command}");
    }
    Ok(())
}

#[test]
fn what_cannot_be_carried_is_refused_before_anything_is_started() -> anyhow::Result<()> {
    let test = "what_cannot_be_carried_is_refused_before_anything_is_started";
    for build in builds_for(test).into_iter().take(1) {
        let ports = ["-device", "pcie-root-port,id=slot0", "-name", "guest=x,process=other"];
        let config = config(&build, Mode::Rate).with_extra(&ports);
        let mut vm = source(&config)?;
        let godwit = Godwit::built()?;
        let said = Said::of(&build, &vm.qmp_socket(), &[])?;

        // Only to be shown.
        let (receive, address) = said.receive(&["--dry-run"])?;
        let migrate = godwit.migrate(&vm, &address, &[])?.wait(LIMIT)?;
        let receive = receive.wait(LIMIT)?;
        ensure!(migrate.errors.contains("--dry-run"), "{}", migrate.errors);
        ensure!(receive.status.success(), "{}", receive.errors);
        ensure!(receive.last()["outcome"] == "shown", "{}", receive.last());
        check_untouched(&mut vm)?;

        let refused = |vm: &mut TestVm, options: &[&str], words: &[&str]| {
            let (receive, address) = match options {
                [] => said.receive(&[])?,
                _ => godwit.receive_starting(options)?,
            };
            let migrate = godwit.migrate(vm, &address, &[])?.wait(LIMIT)?;
            let receive = receive.wait(LIMIT)?;
            let started = receive.lines.iter().any(|line| line["event"] == "started");
            ensure!(!started, "{:?}", receive.lines);
            for (word, errors) in
                words.iter().flat_map(|it| [(it, &migrate.errors), (it, &receive.errors)])
            {
                ensure!(errors.contains(word), "'{word}' is not in: {errors}");
            }
            ensure!(migrate.errors.trim().lines().count() == 1, "{}", migrate.errors);
            check_untouched(vm)
        };
        // Nobody has said which paths may be used.
        refused(&mut vm, &["--map", "/nowhere"], &["has the path", "--map"])?;
        let missing = format!("--emulator={}", "/bin/true");
        let words: Vec<&str> = said.words.iter().map(String::as_str).collect();
        let mut other: Vec<&str> = words.clone();
        other.retain(|word| *word != "--emulator" && Path::new(word) != build.program);
        other.push(&missing);
        refused(&mut vm, &other, &["did not start (it has ended)", "its log is"])?;
        // What is not on the command line.
        let plug = json!({ "driver": "virtio-rng-pci", "id": "late", "bus": "slot0" });
        vm.qmp().execute("device_add", plug)?;
        refused(&mut vm, &[], &["device 'late' (virtio-rng-pci) was plugged in after"])?;
    }
    Ok(())
}

/// What may go wrong half way, and where.
const HALF_WAY: [&str; 4] = ["killed", "receive", "migrate", "qemu"];

fn ends_whatever_fails(test: &str, half_way: &[&str], faults: &[&str]) -> anyhow::Result<()> {
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let build = oldest(&builds)?;
    let mut vm = source(&config(build, Mode::Rate))?;
    let godwit = Godwit::built()?;
    let said = Said::of(build, &vm.qmp_socket(), &[])?;
    let slow = ["--max-bandwidth", "20MiB/s"];

    // Godwit is killed at the destination, or its QEMU; or it is cancelled at either side.
    for what in half_way {
        let (mut receive, address) = said.receive(&[])?;
        let migrate = godwit.migrate(&vm, &address, &slow)?;
        let started = StartedVm::of(&receive, LIMIT)?;
        await_copying(&migrate)?;
        ensure!(started.is_alive());
        match *what {
            "killed" => receive.kill(),
            "receive" => receive.signal(Signal::INT)?,
            "migrate" => migrate.signal(Signal::INT)?,
            _ => kill_process(Pid::from_raw(started.pid).context("no process")?, Signal::KILL)?,
        }
        let migrate = migrate.wait(LIMIT)?;
        ensure!(!migrate.status.success(), "{}", migrate.last());
        started.await_end(LIMIT).with_context(|| (*what).to_owned())?;
        check_untouched(&mut vm).with_context(|| (*what).to_owned())?;
    }

    // Killed with the state asked for, and loaded.
    for fault in faults {
        let (receive, address) = said.receive(&["--fault", fault])?;
        let migrate = godwit.migrate(&vm, &address, &[])?;
        let started = StartedVm::of(&receive, LIMIT)?;
        migrate.wait(LIMIT)?;
        started.await_end(LIMIT).with_context(|| (*fault).to_owned())?;
        check_untouched(&mut vm).with_context(|| (*fault).to_owned())?;
    }

    // Killed when the guest is its own: the guardian runs it, and it stays.
    let (receive, address) = said.receive(&["--fault", "kill-before-run"])?;
    let _migrate = godwit.migrate(&vm, &address, &[])?;
    let started = StartedVm::of(&receive, LIMIT)?;
    receive.wait(LIMIT)?;
    started.await_beats(3, LIMIT).map(drop)
}

#[test]
fn a_destination_that_gets_no_guest_ends_with_what_fails() -> anyhow::Result<()> {
    let test = "a_destination_that_gets_no_guest_ends_with_what_fails";
    ends_whatever_fails(test, &HALF_WAY[..1], &["kill-after-load"])
}

#[test]
#[ignore = "takes half a minute: make test-long"]
fn a_destination_that_gets_no_guest_ends_whatever_fails() -> anyhow::Result<()> {
    let test = "a_destination_that_gets_no_guest_ends_whatever_fails";
    ends_whatever_fails(test, &HALF_WAY, &["kill-after-prepare", "kill-after-load"])
}

#[test]
fn a_destination_that_has_no_guardian_yet_ends_with_its_godwit() -> anyhow::Result<()> {
    let test = "a_destination_that_has_no_guardian_yet_ends_with_its_godwit";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let build = oldest(&builds)?;
    let mut vm = source(&config(build, Mode::Rate))?;
    let godwit = Godwit::built()?;
    let said = Said::of(build, &vm.qmp_socket(), &[])?;
    // A QEMU that takes its time: it reserves memory, or its storage is slow.
    let room = Room::new()?;
    let (slow, number) = (room.dir().join("slow"), room.dir().join("number"));
    let script = format!("#!/bin/sh\necho $$ > {}\nexec sleep 600\n", number.display());
    std::fs::write(&slow, script)?;
    std::fs::set_permissions(&slow, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let slow = slow.to_str().context("a path of text")?;
    let (mut receive, address) = said.receive(&["--emulator", slow])?;
    let migrate = godwit.migrate(&vm, &address, &[])?;
    let until = Instant::now() + LIMIT;
    let pid: u32 = loop {
        ensure!(Instant::now() < until, "it was not started");
        let text = std::fs::read_to_string(&number).unwrap_or_default();
        match text.trim().parse() {
            Ok(pid) if text.ends_with('\n') => break pid,
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    };

    receive.kill();

    let migrate = migrate.wait(LIMIT)?;
    ensure!(!migrate.status.success(), "{}", migrate.last());
    while Path::new(&format!("/proc/{pid}")).exists() {
        ensure!(Instant::now() < until, "process {pid} goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
    check_untouched(&mut vm)
}

#[test]
#[ignore = "takes ten seconds: make test-long"]
fn what_a_godwit_and_its_guardian_leave_that_are_both_killed_is_ended_by_the_next()
-> anyhow::Result<()> {
    let test = "what_a_godwit_and_its_guardian_leave_that_are_both_killed_is_ended_by_the_next";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let build = oldest(&builds)?;
    let mut vm = source(&config(build, Mode::Rate))?;
    let godwit = Godwit::built()?;
    let said = Said::of(build, &vm.qmp_socket(), &[])?;
    let (mut receive, address) = said.receive(&[])?;
    let migrate = godwit.migrate(&vm, &address, &["--max-bandwidth", "20MiB/s"])?;
    let started = StartedVm::of(&receive, LIMIT)?;
    await_copying(&migrate)?;
    let guardian = guardian_of_process(started.pid)?.context("no guardian")?;
    kill_process(guardian, Signal::KILL)?;
    receive.kill();
    migrate.wait(LIMIT)?;
    check_untouched(&mut vm)?;
    ensure!(started.is_alive());

    // Its paths are those of the one that waits still, so another room is named.
    let next = Said::of(build, &vm.qmp_socket(), &[])?;
    let (receive, address) = next.receive(&[])?;
    let migrate = godwit.migrate(&vm, &address, &["--verify"])?;
    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    check_migrated(&migrate, &receive)?;
    started.await_end(LIMIT)
}

#[test]
#[ignore = "takes ten seconds: make test-long"]
fn a_destination_that_is_started_has_a_back_end_of_its_own() -> anyhow::Result<()> {
    let test = "a_destination_that_is_started_has_a_back_end_of_its_own";
    let builds = builds_for(test);
    let Some(build) = builds.first() else { return Ok(()) };
    let Some(program) = storage_daemon_for(build, test) else { return Ok(()) };
    let godwit = Godwit::built()?;
    for attempt in 1.. {
        let image = DiskImage::create("raw", ByteCount(32 << 20))?;
        let daemons = [(); 2].map(|()| StorageDaemon::start(&program, &image, ""));
        let [from, to] = daemons;
        let (from, to) = (from?, to?);
        let mut config = VmConfig::new(build, GuestConfig::small(Mode::Rate));
        config.extra = from.arguments(None);
        let vm = source(&config.with_backend(Backend::Memfd))?;
        let served = format!("{}={}", from.socket().display(), to.socket().display());
        let said = Said::of(build, &vm.qmp_socket(), &[served])?;
        let (receive, address) = said.receive(&[])?;
        let migrate = godwit.migrate(&vm, &address, &["--verify"])?;
        let started = StartedVm::of(&receive, LIMIT)?;
        let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        // Some do not bear to be stopped, and the guest stays (docs/vhost-user.md).
        if migrate.errors.contains("broke off with") && attempt < 5 {
            continue;
        }
        check_migrated(&migrate, &receive)?;
        return check_runs(&started, 0);
    }
    Ok(())
}
