//! VMs that nobody has prepared: RAM that no file with a name holds.

use std::os::unix::net::UnixStream;
use std::time::Instant;

use anyhow::{Context, ensure};
use godwit_e2e::{
    LIMIT, Pair, await_copying, await_quit, check_moved, check_refused, check_rights,
    check_untouched,
};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    Backend, DiskImage, Godwit, GuestConfig, HugePages, Link, QemuBuild, TestVm, VmConfig, at_most,
    builds_for, builds_in_turn_for, images_for, skip,
};
use godwit_units::ByteCount;
use rustix::process::Signal;
use serde_json::json;

/// Where its RAM is, and what is plugged in: VGA memory and firmware are RAM blocks, too.
fn config(build: &QemuBuild, mode: Mode, backend: Backend) -> VmConfig {
    let config = VmConfig::new(build, GuestConfig::small(mode)).with_backend(backend);
    config.with_extra(&["-device", "VGA", "-device", "virtio-rng-pci"])
}

fn moves(test: &str, mode: Mode, backend: Backend) -> anyhow::Result<()> {
    for build in builds_in_turn_for(test) {
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
    for build in builds_in_turn_for(test) {
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

        // Killed with the guest stopped, before, while and after its devices are saved and its
        // image is let go of: the guardian brings it back.
        let faults = ["kill-after-stop", "kill-after-release", "kill-after-state"];
        let post_copy = ["--postcopy", "now", "--reconnect", "60s"];
        let at_once = [&["--fault", "kill-after-release"][..], &post_copy].concat();
        let faults = faults.map(|fault| vec!["--fault", fault]);
        for options in faults.into_iter().chain([at_once]) {
            let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
            check_untouched(&mut pair.source).with_context(|| format!("{build}: {options:?}"))?;
            let killed = migrate.status.code().is_none();
            ensure!(killed, "{options:?}: {} {}", migrate.status, migrate.errors);
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
    for build in
        builds_in_turn_for("a_source_that_is_kept_stands_and_a_paused_guest_arrives_paused")
    {
        let mut pair = Pair::start(&config(&build, Mode::Rate, Backend::Anonymous))?;
        pair.source.pause()?;
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
fn a_guest_moves_between_kinds_of_ram() -> anyhow::Result<()> {
    let kinds = [Backend::SharedFile, Backend::Anonymous, Backend::Memfd];
    for build in builds_in_turn_for("a_guest_moves_between_kinds_of_ram") {
        let config = |kind| config(&build, Mode::Rate, kind);
        let mut pair = Pair::start_apart(&config(kinds[0]), &config(kinds[1]))?;
        // The destination of each is the source of the next.
        for next in [2, 0, 2, 1, 0] {
            let (migrate, _) = pair.migrate(&["--verify"])?;
            check_moved(&mut pair, &migrate).with_context(|| {
                let kinds = [&pair.source, &pair.destination].map(|vm| vm.config().backend);
                format!("{build}: {kinds:?}")
            })?;
            let next = TestVm::destination(&config(kinds[next]))?;
            pair.move_on(next);
        }
    }
    Ok(())
}

#[test]
fn several_nodes_and_what_is_plugged_in_move() -> anyhow::Result<()> {
    // A DIMM, and a virtio-mem device with half of what it may have plugged in.
    let plugged = [
        "-m",
        "slots=2,maxmem=2G",
        "-object",
        "memory-backend-ram,id=dimm0,size=128M",
        "-device",
        "pc-dimm,memdev=dimm0",
        "-object",
        "memory-backend-ram,id=vmem0,size=256M,reserve=off",
        "-device",
        "virtio-mem-pci,memdev=vmem0,requested-size=128M",
    ];
    for build in builds_in_turn_for("several_nodes_and_what_is_plugged_in_move") {
        let config = config(&build, Mode::Rate, Backend::Nodes).with_extra(&plugged);
        let mut pair = Pair::start(&config)?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
        // All of it in rounds, and none of it with the device state.
        let (ram, all) = (&migrate.last()["ram_bytes"], config.guest.memory.0 + (384 << 20));
        ensure!(ram.as_u64() >= Some(all), "{build}: {ram} bytes of {all}");
        ensure!(migrate.last()["verified"] == true, "{}", migrate.last());
        ensure!(pair.destination.errors() == "", "{}", pair.destination.errors());
    }
    Ok(())
}

#[test]
fn a_guest_moves_into_huge_pages_and_out_of_them() -> anyhow::Result<()> {
    let test = "a_guest_moves_into_huge_pages_and_out_of_them";
    let small = GuestConfig::small(Mode::Rate).memory;
    for build in builds_in_turn_for(test) {
        let Some(_huge) = HugePages::for_test(test, small) else { return Ok(()) };
        let config = |backend| config(&build, Mode::Rate, backend);
        let mut pair = Pair::start_apart(&config(Backend::Anonymous), &config(Backend::HugeMemfd))?;
        for next in [Backend::Anonymous, Backend::Memfd] {
            let (migrate, _) = pair.migrate(&["--verify"])?;
            check_moved(&mut pair, &migrate).with_context(|| format!("{build}: {next:?}"))?;
            let next = TestVm::destination(&config(next))?;
            pair.move_on(next);
        }
    }
    Ok(())
}

/// A write makes 1 GiB dirty at once, of which the fingerprints find what did change.
#[test]
fn a_guest_moves_into_giant_pages_and_out_of_them() -> anyhow::Result<()> {
    // Mutation: what a harvest finds beyond what it was asked for is not kept. Then pages are
    // missing at the destination.
    let test = "a_guest_moves_into_giant_pages_and_out_of_them";
    let guest = GuestConfig { memory: ByteCount(1 << 30), ..GuestConfig::small(Mode::Rate) };
    for build in builds_in_turn_for(test) {
        let Some(huge) = HugePages::giant_for_test(test, ByteCount(2 << 30)) else {
            return Ok(());
        };
        let config = |backend| VmConfig::new(&build, guest).with_backend(backend);
        let file = config(Backend::SharedFile).with_ram_in(huge.dir());
        let mut pair = Pair::start_apart(&config(Backend::Anonymous), &file)?;
        for next in [config(Backend::GiantMemfd), config(Backend::Anonymous), file] {
            // All of a huge page is looked at while the guest stands still.
            let (migrate, _) = pair.migrate(&["--verify", "--downtime-limit", "30s"])?;
            let backend = pair.destination.config().backend;
            check_moved(&mut pair, &migrate).with_context(|| format!("{build}: {backend:?}"))?;
            println!("{build} {backend:?}: downtime {}", migrate.last()["downtime_ms"]);
            // A page that is held by one that has left is not there for the next one.
            pair.source.kill();
            let next = TestVm::destination(&next)?;
            pair.move_on(next);
        }
        // The files go before their mount does.
        drop(pair);
    }
    Ok(())
}

/// The bytes of the VGA memory, wherever the guest has it.
fn vga_memory(vm: &mut TestVm) -> anyhow::Result<Vec<u8>> {
    let tree = human(vm, "info mtree -f")?;
    let line =
        tree.lines().find(|line| line.contains("ram): vga.vram")).context("no VGA memory")?;
    let address = line.trim().split('-').next().context("no address")?;
    let file = vm.qmp_socket().with_file_name("vga-memory");
    let address = u64::from_str_radix(address, 16)?;
    let save = json!({ "val": address, "size": 16 << 20, "filename": file });
    vm.qmp().execute("pmemsave", save)?;
    Ok(std::fs::read(file)?)
}

fn human(vm: &mut TestVm, line: &str) -> anyhow::Result<String> {
    let said = vm.qmp().execute("human-monitor-command", json!({ "command-line": line }))?;
    Ok(said.as_str().unwrap_or_default().to_owned())
}

#[test]
fn vga_memory_arrives() -> anyhow::Result<()> {
    for build in builds_for("vga_memory_arrives") {
        let mut pair = Pair::start(&config(&build, Mode::Idle, Backend::Anonymous))?;
        let before = vga_memory(&mut pair.source)?;
        let fresh = before.iter().all(|byte| *byte == 0);
        ensure!(!fresh, "{build}: the firmware has shown nothing");

        let (migrate, _) = pair.migrate(&["--keep-source"])?;

        ensure!(migrate.last()["outcome"] == "migrated", "{} {}", migrate.last(), migrate.errors);
        let after = vga_memory(&mut pair.destination)?;
        let first = before.iter().zip(&after).position(|(a, b)| a != b);
        ensure!(first.is_none(), "{build}: VGA memory differs at byte {first:?}");
        ensure!(pair.destination.errors() == "", "{}", pair.destination.errors());
    }
    Ok(())
}

#[test]
fn a_guest_with_anonymous_ram_moves_to_a_newer_qemu() -> anyhow::Result<()> {
    let test = "a_guest_with_anonymous_ram_moves_to_a_newer_qemu";
    let builds = builds_for(test);
    let old = builds.iter().find(|build| build.version.0 < 8);
    let new = builds.iter().find(|build| build.version.0 >= 8);
    let (Some(old), Some(new)) = (old, new) else {
        skip(test, "it needs a QEMU before 8.0 and one since");
        return Ok(());
    };
    let config = |build: &QemuBuild| {
        config(build, Mode::Rate, Backend::Anonymous).with_extra(&["-machine", "pc-q35-7.2"])
    };
    let mut pair = Pair::start_apart(&config(old), &config(new))?;
    let (migrate, _) = pair.migrate(&["--verify"])?;
    check_moved(&mut pair, &migrate)?;
    ensure!(pair.destination.errors() == "", "{}", pair.destination.errors());

    // Back it cannot go, and the words say why.
    pair.source = TestVm::destination(&config(old))?;
    std::mem::swap(&mut pair.source, &mut pair.destination);
    let (migrate, _) = pair.migrate(&[])?;
    ensure!(migrate.status.code() == Some(1), "{} {}", migrate.status, migrate.errors);
    let words = "take the guest in with QEMU 8.0 or newer";
    ensure!(migrate.errors.contains(words), "{}", migrate.errors);
    check_untouched(&mut pair.source)
}

#[test]
fn the_writes_of_a_guest_with_anonymous_ram_are_governed() -> anyhow::Result<()> {
    for build in builds_in_turn_for("the_writes_of_a_guest_with_anonymous_ram_are_governed") {
        let mut pair = Pair::start(&config(&build, Mode::Full, Backend::Anonymous))?;
        // So slow that the guest outruns it, however busy this host is.
        let slow = ["--max-bandwidth", "20MiB/s", "--compression", "none"];
        let governed = [&slow[..], &["--throttle", "governor"]].concat();
        let options = [&governed[..], &["--downtime-limit", "400ms", "--verify"]].concat();

        let (migrate, _) = pair.migrate(&options)?;

        check_moved(&mut pair, &migrate)?;
        ensure!(migrate.last()["write_faults_delayed"].as_u64() > Some(0), "{}", migrate.last());
    }
    Ok(())
}

#[test]
fn a_plan_tells_which_way_the_device_state_takes() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_plan_tells_which_way_the_device_state_takes") {
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
fn a_vm_is_found_by_its_process() -> anyhow::Result<()> {
    // Mutation: sockets are not looked at for who is connected. Then the test's own is taken.
    for build in builds_in_turn_for("a_vm_is_found_by_its_process") {
        let mut vm = TestVm::source(&config(&build, Mode::Idle, Backend::Anonymous))?;
        vm.wait_ready(LIMIT)?;
        let name = format!("pid:{}", vm.pid());
        let godwit = Godwit::built()?;
        let plan = ["plan", "--vm", &name, "--for", "1s"];
        godwit.done(&plan)?;
        check_untouched(&mut vm)?;

        // The second of the two is the test's; so now both are in use.
        let holder = UnixStream::connect(vm.qmp_socket())?;
        let refused = godwit.run(&plan)?;
        drop(holder);
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(refused.status.code() == Some(2), "{}: {words}", refused.status);
        let holder = format!("by process {} (e2e-", std::process::id());
        let socket = vm.qmp_socket().display().to_string();
        let all = ["each QMP monitor of process", "in use", &socket, &holder, "one more -qmp"];
        for part in all {
            ensure!(words.contains(part), "'{part}' is not in: {words}");
        }
        let own = format!("pid:{}", std::process::id());
        for (name, part) in [(own.as_str(), "has no QMP monitor"), ("pid:x", "no process number")] {
            let refused = godwit.run(&["plan", "--vm", name])?;
            let words = String::from_utf8_lossy(&refused.stderr).into_owned();
            ensure!(words.contains(part), "'{part}' is not in: {words}");
        }
    }
    Ok(())
}

#[test]
fn every_step_is_told_to_who_asks() -> anyhow::Result<()> {
    for build in builds_in_turn_for("every_step_is_told_to_who_asks") {
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
fn nothing_is_asked_before_the_stop_that_cannot_have_changed() -> anyhow::Result<()> {
    for build in builds_in_turn_for("nothing_is_asked_before_the_stop_that_cannot_have_changed") {
        let mut pair = Pair::start(&config(&build, Mode::Idle, Backend::Anonymous))?;
        let (migrate, _) = pair.migrate(&["--log", "godwit_engine=debug,godwit_qemu=trace"])?;
        check_moved(&mut pair, &migrate)?;
        let stopping = migrate.errors.lines().filter(|line| line.contains("action=StopGuest"));
        let told: Vec<&str> = stopping.filter(|line| line.contains("command=")).collect();
        ensure!(told.iter().any(|line| line.contains("\"query-status\"")), "{told:#?}");
        // Whether guests of its own may run in it (of no concern under TCG), and in which files its
        // memory is (in none).
        for needless in ["\"query-kvm\"", "refused command=\"qom-get\""] {
            ensure!(!told.iter().any(|line| line.contains(needless)), "{needless}: {told:#?}");
        }
    }
    Ok(())
}

#[test]
fn disks_move_along_with_anonymous_ram() -> anyhow::Result<()> {
    let test = "disks_move_along_with_anonymous_ram";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
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

/// Moves a guest with anonymous RAM so often in a row, each time into a new QEMU, with its memory
/// compared.
fn repeat(test: &str, times: usize) -> anyhow::Result<()> {
    for build in builds_in_turn_for(test) {
        let config = config(&build, Mode::Rate, Backend::Anonymous);
        let mut pair = Pair::start(&config)?;
        for number in 1..=times {
            let (migrate, _) = pair.migrate(&["--verify"])?;
            let moved = check_moved(&mut pair, &migrate);
            moved.with_context(|| format!("{build}: move {number}"))?;
            ensure!(migrate.last()["verified"] == true, "move {number}: {}", migrate.last());
            let next = TestVm::destination(&config)?;
            pair.move_on(next);
        }
    }
    Ok(())
}

#[test]
fn three_moves_in_a_row_with_anonymous_ram() -> anyhow::Result<()> {
    repeat("three_moves_in_a_row_with_anonymous_ram", 3)
}

#[test]
#[ignore = "takes five minutes: make test-long"]
fn a_hundred_moves_in_a_row_with_anonymous_ram() -> anyhow::Result<()> {
    repeat("a_hundred_moves_in_a_row_with_anonymous_ram", at_most(100))
}

/// What the unit of the package and docs/service.md give it.
const CAPABILITIES: [&str; 6] =
    ["sys_ptrace", "checkpoint_restore", "dac_override", "kill", "sys_resource", "net_raw"];

/// What both sides keep: CAP_DAC_OVERRIDE, CAP_KILL, CAP_NET_BIND_SERVICE, CAP_NET_RAW,
/// CAP_SYS_PTRACE, CAP_SYS_RESOURCE, CAP_CHECKPOINT_RESTORE.
const KEPT: [u64; 7] = [1, 5, 10, 13, 19, 24, 40];

#[test]
fn a_source_keeps_the_rights_of_its_work_and_each_thread_those_of_its_own() -> anyhow::Result<()> {
    let test = "a_source_keeps_the_rights_of_its_work_and_each_thread_those_of_its_own";
    if !rustix::process::geteuid().is_root() {
        skip(test, "only root has rights to give up");
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate));
        let user = build.as_user("nobody");
        let config = config.with_backend(Backend::Anonymous).with_extra(&[&user[0], &user[1]]);
        let mut pair = Pair::start(&config)?;
        let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        let slow =
            ["--max-bandwidth", "10MiB/s", "--compression", "none", "--downtime-limit", "1ms"];
        let migrate = pair.godwit.migrate(&pair.source, &address, &slow)?;
        await_copying(&migrate)?;
        // CAP_SYS_ADMIN for a QEMU in a sandbox, CAP_SYS_NICE to hold the guest back.
        let kept = [KEPT.as_slice(), &[21, 23]].concat();
        check_rights(migrate.pid(), &kept, &[("control", &[]), ("channel", &[19])])?;
        check_rights(receive.pid(), &KEPT, &[("control", &[]), ("channel", &[19])])?;
        migrate.signal(Signal::INT)?;
        drop(migrate.wait(LIMIT)?);
        drop(receive.wait(LIMIT)?);
        check_untouched(&mut pair.source)?;
    }
    Ok(())
}

#[test]
fn six_capabilities_are_enough_for_a_qemu_of_another_user() -> anyhow::Result<()> {
    let test = "six_capabilities_are_enough_for_a_qemu_of_another_user";
    let unit = include_str!("../../../packaging/systemd/godwit-receive@.service");
    let bound = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let named = CAPABILITIES.map(|name| format!("CAP_{}", name.to_uppercase())).join(" ");
    ensure!(bound == Some(named.as_str()), "the unit has {bound:?}");
    if !rustix::process::geteuid().is_root() {
        skip(test, "only root may give up capabilities");
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
        for backend in [Backend::Anonymous, Backend::SharedFile, Backend::Memfd] {
            let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate));
            let user = build.as_user("nobody");
            let config = config.with_backend(backend).with_extra(&[&user[0], &user[1]]);
            let mut pair = Pair::start(&config)?;
            let whole = pair.godwit.clone();
            let with = |names: &[&str]| {
                let list: Vec<String> = names.iter().map(|name| format!("+{name}")).collect();
                whole.clone().with_capabilities(&list.join(","))
            };
            // Without the first: one line that names it, and nothing has changed.
            let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            check_rights(receive.pid(), &KEPT, &[])?;
            let short = with(&CAPABILITIES[1..]);
            let migrate = short.migrate(&pair.source, &address, &[])?.wait(LIMIT)?;
            check_refused(&migrate, 1, &["CAP_SYS_PTRACE", "give it that capability"])?;
            check_untouched(&mut pair.source)?;
            receive.signal(Signal::INT)?;
            drop(receive.wait(LIMIT)?);

            pair.godwit = with(&CAPABILITIES);
            let (migrate, _) = pair.migrate(&["--verify"])?;
            check_moved(&mut pair, &migrate).with_context(|| format!("{build} {backend:?}"))?;
        }
    }
    Ok(())
}
