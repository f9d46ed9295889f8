//! `godwit upgrade`: the QEMU under a guest changes, and its memory stays where it is, or is copied
//! within the host.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{
    LIMIT, await_process_alone, await_quit, check_refused, check_settings, check_untouched,
    guardian_of_process, oldest, only_page, rank,
};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    Backend, DiskImage, Ended, Godwit, GuestConfig, MemoryGroup, QemuBuild, Qmp, Room, Running,
    StartedVm, TestVm, VmConfig, builds_for, images_for, kvm_builds_in_turn_for, skip,
};
use godwit_units::ByteCount;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// A QEMU that an upgrade has started, and that ends with the test.
struct Successor(StartedVm);

impl Successor {
    fn of(upgrade: &Running) -> anyhow::Result<Self> {
        StartedVm::of(upgrade, LIMIT).map(Self)
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.0.pid).filter(|_| self.0.is_alive()) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Begins an upgrade to `build`. A new QEMU that does not come up in time, as was seen twice on a
/// host whose storage was busy, costs the attempt and nothing else: another one is made, aloud.
fn begin(vm: &mut TestVm, build: &QemuBuild) -> anyhow::Result<(Running, Successor)> {
    let begun =
        |vm: &TestVm| Godwit::built()?.upgrade(&name_of(vm), &["--program", &program(build)]);
    let first = begun(vm)?;
    match Successor::of(&first) {
        Ok(successor) => Ok((first, successor)),
        Err(why) => {
            let ended = first.wait(LIMIT)?;
            let late = ["did not open its monitor", "did not answer qmp_capabilities"];
            let late = late.iter().any(|words| ended.errors.contains(words));
            ensure!(late, "{why:#} {}", ended.errors);
            eprintln!("{build} did not come up in time, and is tried once more: {}", ended.errors);
            check_stayed(vm)?;
            let second = begun(vm)?;
            let successor = Successor::of(&second)?;
            Ok((second, successor))
        }
    }
}

/// The oldest and the newest QEMU that there are for `test`, if there is one at all.
fn oldest_and_newest(test: &str) -> anyhow::Result<Option<(QemuBuild, QemuBuild)>> {
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(None);
    }
    let newest = builds.iter().max_by_key(|build| build.version).context("no QEMU")?;
    Ok(Some((oldest(&builds)?.clone(), newest.clone())))
}

fn config(build: &QemuBuild) -> VmConfig {
    let config = VmConfig::new(build, GuestConfig::small(Mode::Full));
    config.with_extra(&["-device", "VGA", "-device", "virtio-rng-pci,id=rng"])
}

fn started(config: &VmConfig) -> anyhow::Result<TestVm> {
    let vm = TestVm::source(config)?;
    vm.wait_ready(LIMIT)?;
    vm.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
    Ok(vm)
}

fn name_of(vm: &TestVm) -> String {
    format!("qemu:{}", vm.qmp_socket().display())
}

fn program(build: &QemuBuild) -> String {
    build.program.display().to_string()
}

/// Files under which a new QEMU has what the old one has as well.
fn staged(vm: &TestVm) -> anyhow::Result<Vec<String>> {
    let directory = vm.qmp_socket().parent().context("no directory")?.to_owned();
    let names = std::fs::read_dir(directory)?.flatten().map(|entry| entry.file_name());
    let names = names.map(|name| name.to_string_lossy().into_owned());
    Ok(names.filter(|name| name.contains(".godwit-")).collect())
}

/// The guest runs in the old QEMU as if nothing had been there.
fn check_stayed(vm: &mut TestVm) -> anyhow::Result<()> {
    check_untouched(vm)?;
    let staged = staged(vm)?;
    ensure!(staged.is_empty(), "{staged:?}");
    // Others find it where it was.
    let status = Qmp::connect(&vm.qmp_socket())?;
    drop(status);
    Ok(())
}

fn check_upgraded(ended: &Ended, version: (u32, u32, u32)) -> anyhow::Result<()> {
    let last = ended.last();
    ensure!(ended.status.success(), "{last} {}", ended.errors);
    ensure!(last["outcome"] == "upgraded", "{last} {}", ended.errors);
    ensure!(last["remarks"] == serde_json::json!([]), "{last}");
    let told = last["version"].as_str().unwrap_or_default();
    let wanted = format!("{}.{}.{}", version.0, version.1, version.2);
    ensure!(told == wanted, "{told} is not {wanted}");
    // Nothing of memory was moved.
    ensure!(last["memory"] == "in-place", "{last}");
    ensure!(last["ram_bytes"] == 0 && last["raw_bytes"] == 0, "{last}");
    let downtime = last["downtime_ms"].as_f64().context("no downtime")?;
    let part = |key: &str| last[key].as_f64().unwrap_or_default();
    let parts = ["stop_ms", "drain_ms", "copy_ms", "save_ms", "load_ms", "handover_ms"];
    let parts = parts.map(|key| format!("{key} {:.1}", part(key)));
    println!("downtime {downtime:.1} ms: {}", parts.join(", "));
    ensure!(downtime > 0.0 && downtime < 10_000.0, "{last}");
    Ok(())
}

/// The guest of `vm`, whose QEMU has ended, counts on in `first`, unharmed, and nothing is left.
fn check_goes_on(vm: &mut TestVm, first: &Successor) -> anyhow::Result<()> {
    await_quit(vm)?;
    let last = vm.heartbeats().last().context("no heartbeat")?.heartbeat.n;
    let numbers = first.0.await_beats(5, LIMIT)?;
    ensure!(numbers.first() > Some(&last), "{last}, {numbers:?}");
    ensure!(numbers.windows(2).all(|pair| pair[1] > pair[0]), "{numbers:?}");
    ensure!(vm.bugs().is_empty(), "{:?}", vm.bugs());
    ensure!(staged(vm)?.is_empty(), "{:?}", staged(vm)?);
    await_process_alone(first.0.pid)
}

/// The same of one that has left `first` for `second`.
fn check_went_on(first: &Successor, second: &Successor) -> anyhow::Result<()> {
    first.0.await_end(LIMIT)?;
    let last = first.0.await_beats(0, LIMIT)?.last().copied().context("no heartbeat")?;
    let numbers = second.0.await_beats(5, LIMIT)?;
    ensure!(numbers.first() > Some(&last), "{last}, {numbers:?}");
    Ok(())
}

/// A new QEMU whose device cannot load the old one's state is ended, and the upgrade has failed.
fn check_does_not_load(name: &str, room: &Room, build: &QemuBuild) -> anyhow::Result<()> {
    let less = "-global virtio-rng-pci.disable-legacy=on -global virtio-rng-pci.vectors=0";
    let less = wrapper(room, build, less)?;
    let options = ["--program", &less, "--allow-differences", "all"];
    let upgrade = Godwit::built()?.upgrade(name, &options)?;
    let new = Successor::of(&upgrade)?;
    let refuses = upgrade.wait(LIMIT)?;
    ensure!(refuses.status.code() == Some(1), "{} {}", refuses.last(), refuses.errors);
    ensure!(refuses.errors.contains("load"), "{}", refuses.errors);
    new.0.await_end(LIMIT)
}

#[test]
fn a_guest_goes_on_in_another_qemu_and_back_with_its_memory_where_it_is() -> anyhow::Result<()> {
    let test = "a_guest_goes_on_in_another_qemu_and_back_with_its_memory_where_it_is";
    let Some((old, new)) = oldest_and_newest(test)?.filter(|_| images_for(test)) else {
        return Ok(());
    };
    let image = DiskImage::create("qcow2", ByteCount(48 << 20))?;
    let mut config = config(&old).with_disk("disk0", &image);
    let span = ByteCount(16 << 20);
    config.guest.disk = DiskWork { write: 2 << 20, read: 2 << 20, span, ..DiskWork::default() };
    let mut vm = started(&config)?;

    let (upgrade, first) = begin(&mut vm, &new)?;
    check_upgraded(&upgrade.wait(LIMIT)?, new.version)?;

    check_goes_on(&mut vm, &first)?;

    // Under the name by which others knew the old one, and from the new one's own command line.
    let upgrade = Godwit::built()?.upgrade(&name_of(&vm), &["--program", &program(&old)])?;
    let second = Successor::of(&upgrade)?;
    check_upgraded(&upgrade.wait(LIMIT)?, old.version)?;

    check_went_on(&first, &second)?;
    let mut qmp = Qmp::connect(&vm.qmp_socket())?;
    let status = qmp.execute("query-status", serde_json::Value::Null)?;
    ensure!(status["status"] == "running", "{status}");
    await_process_alone(second.0.pid)
}

/// A program that starts `build` with more options.
fn wrapper(room: &Room, build: &QemuBuild, more: &str) -> anyhow::Result<String> {
    let path = room.dir().join("qemu-system-other");
    let script = format!("#!/bin/sh\nexec {} \"$@\" {more}\n", program(build));
    std::fs::write(&path, script)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path.display().to_string())
}

#[test]
fn a_new_qemu_that_does_not_come_up_or_load_leaves_the_guest_in_the_old_one() -> anyhow::Result<()>
{
    let test = "a_new_qemu_that_does_not_come_up_or_load_leaves_the_guest_in_the_old_one";
    let Some((build, _)) = oldest_and_newest(test)? else { return Ok(()) };
    let mut vm = started(&config(&build))?;
    let (godwit, name) = (Godwit::built()?, name_of(&vm));
    let failed = |options: &[&str]| godwit.upgrade(&name, options)?.wait(LIMIT);

    let missing = failed(&["--program", "/nowhere/qemu"])?;
    check_refused(&missing, 1, &["--program /nowhere/qemu", "no such program"])?;
    check_stayed(&mut vm)?;

    let other = failed(&["--program", "/bin/true"])?;
    check_refused(&other, 1, &["did not start (it has ended)"])?;
    check_stayed(&mut vm)?;

    let shown = failed(&["--program", &program(&build), "--dry-run"])?;
    ensure!(shown.status.success() && shown.last()["outcome"] == "shown", "{}", shown.errors);
    check_stayed(&mut vm)?;

    // One with a device more: it is told before the guest is stopped, and if it may differ all the
    // same, by the state that does not load.
    let room = Room::new()?;
    let more = wrapper(&room, &build, "-device virtio-rng-pci,id=more,addr=0x1c")?;
    let differs = failed(&["--program", &more])?;
    ensure!(differs.errors.contains("the two VMs differ"), "{}", differs.errors);
    check_stayed(&mut vm)?;
    check_does_not_load(&name, &room, &build)?;
    check_stayed(&mut vm)?;

    // Other memory is found out, by its file and not by its name.
    let words = std::fs::read(format!("/proc/{}/cmdline", vm.pid()))?;
    let words: Vec<String> = words
        .split(|byte| *byte == 0)
        .filter(|word| !word.is_empty())
        .map(|word| format!("'{}'", String::from_utf8_lossy(word)))
        .collect();
    let taken = failed(&["--exec", &words.join(" ")])?;
    check_refused(&taken, 1, &["--exec", "another name"])?;
    check_stayed(&mut vm)?;
    let pair = |pair: &[String]| ["'-qmp'", "'-pidfile'"].contains(&pair[0].as_str());
    let mut bare = Vec::new();
    let mut rest = words.as_slice();
    while let Some((word, after)) = rest.split_first() {
        match rest.get(..2).is_some_and(pair) {
            true => rest = &rest[2..],
            false => {
                bare.push(word.clone());
                rest = after;
            }
        }
    }
    let ram = vm.ram_file().display().to_string();
    let other = format!("{ram}-other");
    let elsewhere = bare.join(" ").replace(&ram, &other);
    let elsewhere = failed(&["--exec", &elsewhere])?;
    let _ = std::fs::remove_file(other);
    ensure!(elsewhere.errors.contains("is not that of the old one"), "{}", elsewhere.errors);
    check_stayed(&mut vm)?;

    // And the same command with the same memory does.
    let upgrade = godwit.upgrade(&name, &["--exec", &bare.join(" ")])?;
    let new = Successor::of(&upgrade)?;
    check_upgraded(&upgrade.wait(LIMIT)?, build.version)?;
    await_quit(&mut vm)?;
    new.0.await_beats(3, LIMIT).map(drop)
}

/// Memory of the QEMU's own, in a guest whose writes go on.
fn anonymous(build: &QemuBuild) -> VmConfig {
    config(build).with_backend(Backend::Anonymous)
}

/// It says that the memory was copied, and how much.
fn check_copied(ended: &Ended, version: (u32, u32, u32)) -> anyhow::Result<()> {
    let last = ended.last();
    ensure!(ended.status.success(), "{last} {}", ended.errors);
    ensure!(last["outcome"] == "upgraded" && last["memory"] == "copied", "{last}");
    ensure!(last["remarks"] == json!([]), "{last}");
    let wanted = format!("{}.{}.{}", version.0, version.1, version.2);
    ensure!(last["version"] == wanted.as_str(), "{last}");
    let bytes = |key: &str| last[key].as_u64().unwrap_or_default();
    ensure!(bytes("ram_bytes") >= 256 << 20 && bytes("raw_bytes") > 16 << 20, "{last}");
    println!("downtime {} ms", last["downtime_ms"]);
    Ok(())
}

#[test]
fn memory_of_the_old_qemus_own_is_copied_within_the_host() -> anyhow::Result<()> {
    let test = "memory_of_the_old_qemus_own_is_copied_within_the_host";
    let Some((build, new)) = oldest_and_newest(test)? else { return Ok(()) };
    let mut vm = started(&anonymous(&build))?;

    let (upgrade, first) = begin(&mut vm, &new)?;
    let progress = |line: &serde_json::Value| line["event"] == "progress";
    upgrade.wait_for("progress", LIMIT, progress)?;
    check_copied(&upgrade.wait(LIMIT)?, new.version)?;

    check_goes_on(&mut vm, &first)?;

    // Once more, from the new one's own command line.
    let upgrade = Godwit::built()?.upgrade(&name_of(&vm), &["--program", &program(&new)])?;
    let second = Successor::of(&upgrade)?;
    check_copied(&upgrade.wait(LIMIT)?, new.version)?;
    check_went_on(&first, &second)?;
    await_process_alone(second.0.pid)
}

#[test]
fn memory_of_a_guest_on_kvm_is_copied_within_the_host() -> anyhow::Result<()> {
    let test = "memory_of_a_guest_on_kvm_is_copied_within_the_host";
    for build in kvm_builds_in_turn_for(test) {
        let guest = GuestConfig { fill: ByteCount(32 << 20), ..GuestConfig::small(Mode::Rate) };
        let config = VmConfig::new(&build, guest).with_backend(Backend::Anonymous).on_kvm();
        let mut vm = started(&config)?;
        let (upgrade, new) = begin(&mut vm, &build)?;
        check_copied(&upgrade.wait(LIMIT)?, build.version)?;
        await_quit(&mut vm)?;
        new.0.await_beats(5, LIMIT)?;
        ensure!(vm.bugs().is_empty(), "{:?}", vm.bugs());
    }
    Ok(())
}

#[test]
fn a_memfd_is_handed_over_by_its_descriptor() -> anyhow::Result<()> {
    let test = "a_memfd_is_handed_over_by_its_descriptor";
    let Some((build, new)) = oldest_and_newest(test)? else { return Ok(()) };
    let mut vm = started(&config(&build).with_backend(Backend::Memfd))?;
    let room = Room::new()?;
    let godwit = keeping_in(&room)?;
    let in_place = |ended: &Ended| {
        let last = ended.last();
        ensure!(ended.status.success(), "{last} {}", ended.errors);
        ensure!(last["memory"] == "in-place", "{last}");
        // VGA memory and firmware at most.
        ensure!(last["ram_bytes"].as_u64().is_some_and(|bytes| bytes < 64 << 20), "{last}");
        println!("downtime {} ms", last["downtime_ms"]);
        Ok(())
    };

    let (upgrade, first) = begin(&mut vm, &new)?;
    in_place(&upgrade.wait(LIMIT)?)?;
    await_quit(&mut vm)?;
    first.0.await_beats(5, LIMIT)?;
    ensure!(vm.bugs().is_empty(), "{:?}", vm.bugs());

    // One that does not load, and then one that does, by the descriptor of the one before.
    check_does_not_load(&name_of(&vm), &room, &new)?;
    first.0.await_beats(3, LIMIT)?;
    let upgrade = godwit.upgrade(&name_of(&vm), &["--program", &program(&new)])?;
    let second = Successor::of(&upgrade)?;
    in_place(&upgrade.wait(LIMIT)?)?;
    first.0.await_end(LIMIT)?;
    second.0.await_beats(5, LIMIT)?;
    let page = only_page(&godwit, "source")?;
    ensure!(page.contains(": upgraded in ") && page.contains("<td>where it was"), "{page}");
    await_process_alone(second.0.pid)
}

/// A command whose records are in `room`.
fn keeping_in(room: &Room) -> anyhow::Result<Godwit> {
    Ok(Godwit::built()?.with_variable("XDG_STATE_HOME", &room.dir().display().to_string()))
}

/// What `godwit status` tells of the upgrade of the VM `name`, which is the only one.
fn status_of(godwit: &Godwit, name: &str) -> anyhow::Result<Value> {
    let told: Value = serde_json::from_slice(&godwit.done(&["status", "--json"])?.stdout)?;
    let all = told["migrations"].as_array().context("no list")?;
    let of_it: Vec<&Value> = all.iter().filter(|it| it["vm"] == name).collect();
    ensure!(of_it.len() == 1, "{told}");
    Ok(of_it[0].clone())
}

/// That `command` is refused for the migration `called`, in these words.
fn check_not_done(
    godwit: &Godwit,
    command: &[&str],
    called: &str,
    words: &str,
) -> anyhow::Result<()> {
    let refused = godwit.run(&[command, &["--migration", called]].concat())?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(refused.status.code() == Some(1) && said.contains(words), "{command:?}: {said}");
    Ok(())
}

#[test]
fn a_copy_is_seen_steered_and_kept_as_a_migration_is() -> anyhow::Result<()> {
    // Mutations: it has no socket; it keeps no record; the new QEMU goes first for good.
    let test = "a_copy_is_seen_steered_and_kept_as_a_migration_is";
    let Some((build, _)) = oldest_and_newest(test)? else { return Ok(()) };
    let mut vm = started(&anonymous(&build))?;
    let room = Room::new()?;
    let (godwit, name, program) = (keeping_in(&room)?, name_of(&vm), program(&build));
    let called = format!("upgrade-{}", std::process::id());
    let slowly = ["--program", &program, "--max-bandwidth", "5MiB/s", "--name", &called];
    let copies = |line: &Value| line["sent_bytes"].as_u64() > Some(8 << 20);

    let upgrade = godwit.upgrade(&name, &slowly)?;
    let new = Successor::of(&upgrade)?;
    upgrade.wait_for("copying", LIMIT, copies)?;
    let status = status_of(&godwit, &name)?;
    ensure!(status["migration"] == called.as_str(), "{status}");
    ensure!(status["to"] == format!("{program} on this host").as_str(), "{status}");
    ensure!(status["progress"]["stage"] == "pre-copy", "{status}");
    ensure!(status["settings"]["max-bandwidth"] == "5MiB/s", "{status}");
    let watch = godwit.watch(&called)?;
    watch.wait_for("progress", LIMIT, |line| line["event"] == "progress")?;
    check_not_done(&godwit, &["redirect", "--to", "127.0.0.1:1"], &called, "within its process")?;
    check_not_done(&godwit, &["switchover", "--postcopy"], &called, "has no post-copy")?;
    ensure!(rank(new.0.pid)? == 1000, "{}", rank(new.0.pid)?);
    godwit.done(&["cancel", "--migration", &called])?;
    let ended = upgrade.wait(LIMIT)?;
    ensure!(ended.status.code() == Some(130), "{} {}", ended.last(), ended.errors);
    ensure!(ended.last()["outcome"] == "cancelled", "{}", ended.last());
    ensure!(watch.wait(LIMIT)?.last()["event"] == "ended");
    new.0.await_end(LIMIT)?;
    await_guardian(vm.pid())?;
    check_stayed(&mut vm)?;
    let page = only_page(&godwit, "source")?;
    ensure!(page.contains(": cancelled</h1>"), "{page}");

    // What is set while it runs is in force; and who came later goes where the old one would.
    std::fs::write(format!("/proc/{}/oom_score_adj", vm.pid()), "300")?;
    let upgrade = godwit.upgrade(&name, &slowly)?;
    let new = Successor::of(&upgrade)?;
    upgrade.wait_for("copying", LIMIT, copies)?;
    godwit.done(&["set", "--migration", &called, "max-bandwidth=off"])?;
    check_copied(&upgrade.wait(LIMIT)?, build.version)?;
    check_goes_on(&mut vm, &new)?;
    ensure!(rank(new.0.pid)? == 300, "{}", rank(new.0.pid)?);
    let page = godwit.done(&["report", "--out", "-"])?;
    let page = String::from_utf8(page.stdout)?;
    for wanted in [": upgraded in ", "<td>copied within the host", "Memory, round by round"] {
        ensure!(page.contains(wanted), "{wanted}: {page}");
    }
    let told = String::from_utf8(godwit.done(&["metrics"])?.stdout)?;
    for outcome in ["upgraded", "cancelled"] {
        let line = format!("\ngodwit_migrations_total{{outcome=\"{outcome}\"}} 1\n");
        ensure!(told.contains(&line), "{told}");
    }
    Ok(())
}

#[test]
fn a_copy_that_comes_to_nothing_leaves_the_guest_in_the_old_qemu() -> anyhow::Result<()> {
    let test = "a_copy_that_comes_to_nothing_leaves_the_guest_in_the_old_qemu";
    let Some((build, _)) = oldest_and_newest(test)? else { return Ok(()) };
    let mut vm = started(&anonymous(&build))?;
    let (godwit, name, program) = (Godwit::built()?, name_of(&vm), program(&build));

    // What the new one does not load.
    let room = Room::new()?;
    check_does_not_load(&name, &room, &build)?;
    check_stayed(&mut vm)?;

    // In the middle of the copy: the new QEMU is killed, then Ctrl-C, then godwit is killed.
    let slowly = ["--program", &program, "--max-bandwidth", "10MiB/s"];
    for (killed, signal, code) in [
        ("QEMU", Signal::KILL, Some(1)),
        ("godwit", Signal::INT, Some(130)),
        ("godwit", Signal::KILL, None),
    ] {
        let upgrade = godwit.upgrade(&name, &slowly)?;
        let new = Successor::of(&upgrade)?;
        let copies = |line: &serde_json::Value| line["sent_bytes"].as_u64() > Some(8 << 20);
        upgrade.wait_for("copying", LIMIT, copies)?;
        let pid = if killed == "QEMU" { new.0.pid } else { upgrade.pid() };
        kill_process(Pid::from_raw(pid).context("no process")?, signal)?;
        let ended = upgrade.wait(LIMIT)?;
        let what = || format!("{killed} {signal:?}");
        ensure!(ended.status.code() == code, "{}: {} {}", what(), ended.last(), ended.errors);
        new.0.await_end(LIMIT).with_context(what)?;
        await_guardian(vm.pid())?;
        check_stayed(&mut vm).with_context(what)?;
    }

    // With the guest stopped, and all of its state loaded; and it goes all the same after all that.
    for fault in ["kill-after-stop", "kill-before-commit"] {
        let upgrade = godwit.upgrade(&name, &["--program", &program, "--fault", fault])?;
        let new = Successor::of(&upgrade)?;
        ensure!(!upgrade.wait(LIMIT)?.status.success(), "{fault}");
        new.0.await_end(LIMIT).with_context(|| fault.to_owned())?;
        await_guardian(vm.pid())?;
        check_stayed(&mut vm).with_context(|| fault.to_owned())?;
    }
    let upgrade = godwit.upgrade(&name, &["--program", &program])?;
    let new = Successor::of(&upgrade)?;
    check_copied(&upgrade.wait(LIMIT)?, build.version)?;
    await_quit(&mut vm)?;
    new.0.await_beats(3, LIMIT).map(drop)
}

#[test]
fn memory_that_can_neither_stay_nor_be_copied_is_refused() -> anyhow::Result<()> {
    let test = "memory_that_can_neither_stay_nor_be_copied_is_refused";
    let Some((build, _)) = oldest_and_newest(test)? else { return Ok(()) };
    let godwit = Godwit::built()?;
    // What is in a file, and would go with the old QEMU.
    let mut vm = started(&config(&build))?;
    let discards = json!({ "path": "/objects/mem", "property": "discard-data", "value": true });
    vm.qmp().execute("qom-set", discards)?;
    let ended = godwit.upgrade(&name_of(&vm), &[])?.wait(LIMIT)?;
    check_refused(&ended, 1, &["'mem' has discard-data=on", "start the VM without it"])?;
    check_stayed(&mut vm)?;

    // A part in a file, and a part of the old QEMU's own.
    let more = "memory-backend-ram,id=more,size=64M";
    let more = ["-object", more, "-device", "pc-dimm,memdev=more", "-m", "slots=1,maxmem=1G"];
    let mut vm = started(&config(&build).with_extra(&more))?;
    let ended = godwit.upgrade(&name_of(&vm), &[])?.wait(LIMIT)?;
    check_refused(&ended, 1, &["in files ('mem')", "own ('more')", "share=on, or none"])?;
    check_stayed(&mut vm)?;
    drop(vm);

    // No room for it twice.
    let group = match MemoryGroup::new(64 << 20) {
        Ok(group) => group,
        Err(why) => {
            skip(test, format_args!("{why:#}"));
            return Ok(());
        }
    };
    let mut vm = started(&anonymous(&build))?;
    // The new QEMU is started where godwit is.
    let ended = godwit.in_group(&group).upgrade(&name_of(&vm), &[])?.wait(LIMIT)?;
    check_refused(&ended, 1, &["has to be copied", "make room, or say --overcommit"])?;
    check_stayed(&mut vm)
}

/// Waits until the guardian of the QEMU `pid` has done what it is for.
fn await_guardian(pid: i32) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    while guardian_of_process(pid)?.is_some() {
        ensure!(Instant::now() < until, "a guardian stays");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Runs an upgrade that is killed, and returns the two QEMUs that may have the guest.
fn killed(config: &VmConfig, fault: &str) -> anyhow::Result<(TestVm, Successor)> {
    let vm = started(config)?;
    let program = program(&config.build);
    let upgrade =
        Godwit::built()?.upgrade(&name_of(&vm), &["--program", &program, "--fault", fault])?;
    let new = Successor::of(&upgrade)?;
    let ended = upgrade.wait(LIMIT)?;
    ensure!(!ended.status.success(), "{fault}: {}", ended.last());
    await_guardian(vm.pid())?;
    await_guardian(new.0.pid)?;
    Ok((vm, new))
}

fn one_has_the_guest(test: &str, faults: &[(&str, Option<bool>)]) -> anyhow::Result<()> {
    let Some((build, _)) = oldest_and_newest(test)? else { return Ok(()) };
    let config = config(&build);
    for (fault, stays) in faults {
        let (mut vm, new) = killed(&config, fault)?;
        let status = vm.status().with_context(|| (*fault).to_owned())?;
        let here = status == "running";
        ensure!(stays.is_none_or(|stays| stays == here), "{fault}: the old one is '{status}'");
        if here {
            new.0.await_end(LIMIT).with_context(|| (*fault).to_owned())?;
            check_stayed(&mut vm).with_context(|| (*fault).to_owned())?;
        } else {
            ensure!(status == "postmigrate", "{fault}: the old one is '{status}'");
            new.0.await_beats(3, LIMIT).with_context(|| (*fault).to_owned())?;
            ensure!(vm.status()? == "postmigrate", "{fault}");
        }
    }
    Ok(())
}

#[test]
fn an_upgrade_that_is_killed_leaves_the_guest_in_exactly_one_process() -> anyhow::Result<()> {
    let test = "an_upgrade_that_is_killed_leaves_the_guest_in_exactly_one_process";
    one_has_the_guest(
        test,
        &[
            ("kill-after-release", Some(true)),
            ("kill-before-commit", Some(true)),
            ("kill-after-commit", None),
            ("kill-after-farewell", Some(false)),
        ],
    )
}

#[test]
#[ignore = "takes a minute: make test-long"]
fn an_upgrade_that_is_killed_anywhere_leaves_the_guest_in_one_process() -> anyhow::Result<()> {
    let test = "an_upgrade_that_is_killed_anywhere_leaves_the_guest_in_one_process";
    let before = ["kill-after-prepare", "kill-after-stop", "kill-after-state", "kill-after-ready"];
    let again = [("kill-after-commit", None); 5];
    let faults: Vec<_> = before.iter().map(|fault| (*fault, Some(true))).chain(again).collect();
    one_has_the_guest(test, &faults)
}

#[test]
fn an_upgrade_that_is_interrupted_or_hangs_leaves_the_guest_in_the_old_qemu() -> anyhow::Result<()>
{
    let test = "an_upgrade_that_is_interrupted_or_hangs_leaves_the_guest_in_the_old_qemu";
    let Some((build, _)) = oldest_and_newest(test)? else { return Ok(()) };
    let config = config(&build);
    let mut vm = started(&config)?;
    let program = program(&config.build);
    // With the guest stopped, and all of its state loaded.
    for fault in ["hold-stopped", "hold-ready"] {
        let options = ["--program", &program, "--fault", fault];
        let upgrade = Godwit::built()?.upgrade(&name_of(&vm), &options)?;
        let new = Successor::of(&upgrade)?;
        let until = Instant::now() + LIMIT;
        while vm.status()? == "running" {
            ensure!(Instant::now() < until, "{fault}: the guest is not stopped");
            std::thread::sleep(Duration::from_millis(2));
        }
        upgrade.signal(Signal::INT)?;
        let ended = upgrade.wait(LIMIT)?;
        ensure!(ended.status.code() == Some(130), "{fault}: {} {}", ended.last(), ended.errors);
        new.0.await_end(LIMIT).with_context(|| fault.to_owned())?;
        check_stayed(&mut vm).with_context(|| fault.to_owned())?;
    }

    // A new QEMU that is killed.
    let options = ["--program", &program, "--fault", "hold-stopped"];
    let upgrade = Godwit::built()?.upgrade(&name_of(&vm), &options)?;
    let new = Successor::of(&upgrade)?;
    kill_process(Pid::from_raw(new.0.pid).context("no process")?, Signal::KILL)?;
    let ended = upgrade.wait(LIMIT)?;
    ensure!(ended.status.code() == Some(1), "{} {}", ended.last(), ended.errors);
    check_stayed(&mut vm)?;
    ensure!(Path::new(vm.ram_file()).exists());
    check_settings(&mut vm)
}
