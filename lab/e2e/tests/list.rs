//! `godwit list`: the VMs of a host, whoever runs them, seen without being disturbed.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, Pair, check_moved, check_untouched, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, Godwit, GuestConfig, LibvirtGuest, LibvirtHost, MicroVm, Room, TestVm, VmConfig,
    builds_for, kvm_for, libvirt_for, skip,
};
use serde_json::{Value, json};

/// What `output` lists of process `pid`.
fn listed(output: &std::process::Output, pid: i32) -> anyhow::Result<Value> {
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && errors.is_empty(), "{}: {errors}", output.status);
    let list: Value = serde_json::from_slice(&output.stdout)?;
    let vms = list["vms"].as_array().context("no list")?;
    let found = vms.iter().find(|vm| vm["pid"] == pid).cloned();
    found.with_context(|| format!("{pid} is not in {list}"))
}

fn list(pid: i32) -> anyhow::Result<Value> {
    listed(&Godwit::built()?.run(&["list", "--json", &pid.to_string()])?, pid)
}

fn check(vm: &Value, expected: &Value) -> anyhow::Result<()> {
    for (key, value) in expected.as_object().context("no object")? {
        ensure!(vm[key] == *value, "{key} is not {value} in {vm}");
    }
    Ok(())
}

#[test]
fn a_qemu_is_listed_as_it_is_and_does_not_notice() -> anyhow::Result<()> {
    for build in builds_for("a_qemu_is_listed_as_it_is_and_does_not_notice") {
        let guest = GuestConfig::small(Mode::Rate);
        let named = ["-name", "guest=listed,debug-threads=on"];
        let config = VmConfig::new(&build, guest).with_extra(&named);
        let kinds = [
            (Backend::Anonymous, "anonymous"),
            (Backend::Memfd, "memfd"),
            (Backend::SharedFile, "file"),
        ];
        // /proc tells of all kinds whatever the version.
        for (backend, kind) in kinds.into_iter().take(if build.version.0 < 8 { 3 } else { 1 }) {
            let mut vm = TestVm::source(&config.clone().with_backend(backend))?;
            vm.wait_ready(LIMIT)?;
            let (pid, moves) = (vm.pid(), json!({ "moves": true, "why": null }));
            let seen = list(pid).with_context(|| build.to_string())?;
            check(&seen, &moves)?;
            check(
                &seen,
                &json!({
                    "name": "listed", "by": "plain", "accelerator": "tcg", "state": "running",
                    "ram_bytes": guest.memory.0, "ram_kind": kind, "vm": format!("pid:{pid}"),
                }),
            )?;
            // What it is called by is taken.
            let text = Godwit::built()?.done(&["list", "listed", &pid.to_string()])?;
            let text = String::from_utf8_lossy(&text.stdout).into_owned();
            let row = text.lines().find(|line| line.contains(&format!("pid:{pid}  yes")));
            ensure!(row.is_some_and(|row| row.contains("listed")), "{text}");
            check_untouched(&mut vm)?;
        }
    }
    Ok(())
}

#[test]
fn what_stands_against_a_move_is_told_and_by_whom_a_monitor_is_held() -> anyhow::Result<()> {
    let test = "what_stands_against_a_move_is_told_and_by_whom_a_monitor_is_held";
    for build in builds_for(test).into_iter().take(1) {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Idle));
        let config = config.with_backend(Backend::Anonymous);
        let destination = TestVm::destination(&config)?;
        let seen = list(destination.pid())?;
        check(&seen, &json!({ "moves": false, "state": "inmigrate" }))?;
        ensure!(seen["why"].as_str().unwrap_or_default().contains("'inmigrate'"), "{seen}");

        // Mutation: a held monitor is waited for, five seconds and more.
        let holder = UnixStream::connect(destination.qmp_socket())?;
        let began = Instant::now();
        let seen = list(destination.pid())?;
        let took = began.elapsed();
        drop(holder);
        check(&seen, &json!({ "moves": false, "vm": null, "accelerator": "tcg" }))?;
        let holder = format!("by process {} (e2e-", std::process::id());
        let why = seen["why"].as_str().unwrap_or_default();
        ensure!(why.contains("in use") && why.contains(&holder), "{seen}");
        ensure!(took.as_secs() < 5, "{took:?}");
    }
    Ok(())
}

#[test]
fn who_may_see_less_is_shown_less_and_told_so() -> anyhow::Result<()> {
    let test = "who_may_see_less_is_shown_less_and_told_so";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    if !rustix::process::getuid().is_root() {
        skip(test, "another user's process is started as root alone");
        return Ok(());
    }
    let config = VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Idle));
    let vm = TestVm::source(&config.with_backend(Backend::Anonymous))?;
    // Where nobody may go in, nobody can run what lies there.
    let copy = std::env::temp_dir().join(format!("godwit-list-{}", std::process::id()));
    std::fs::copy(Godwit::built()?.program(), &copy)?;
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o755))?;
    let pid = vm.pid().to_string();
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&copy)
        .args(["list", "--json", &pid])
        .output();
    std::fs::remove_file(&copy)?;
    let seen = listed(&output?, vm.pid())?;
    check(&seen, &json!({ "moves": false, "by": "plain", "ram_kind": "anonymous", "vm": null }))?;
    check(&seen, &json!({ "ram_bytes": GuestConfig::small(Mode::Idle).memory.0 }))?;
    let why = seen["why"].as_str().unwrap_or_default();
    ensure!(why.contains("godwit root or its user"), "{seen}");
    Ok(())
}

#[test]
fn a_domain_of_libvirts_is_listed_under_its_name_and_not_tainted() -> anyhow::Result<()> {
    let test = "a_domain_of_libvirts_is_listed_under_its_name_and_not_tainted";
    let builds = builds_for(test);
    if builds.is_empty() || !libvirt_for(test) {
        return Ok(());
    }
    let config = GuestConfig::small(Mode::Idle);
    let guest = LibvirtGuest::new(oldest(&builds)?, &config, "")?;
    let (host, other) = (LibvirtHost::start()?, LibvirtHost::start()?);
    guest.create_on(&host)?;
    let pid = host.qemu(guest.name())?;
    let seen_by = |host: &LibvirtHost| {
        let output = Command::new(Godwit::built()?.program())
            .env("LIBVIRT_DEFAULT_URI", host.uri())
            .args(["list", "--json", guest.name()])
            .output()?;
        listed(&output, pid)
    };

    let seen = seen_by(&host)?;
    check(&seen, &json!({ "by": "libvirt", "id": guest.name(), "name": guest.name() }))?;
    check(&seen, &json!({ "moves": null, "state": "running", "ram_kind": "anonymous" }))?;
    check(&seen, &json!({ "vm": format!("libvirt:{}", guest.name()) }))?;
    check(&seen, &json!({ "ram_bytes": config.memory.0 }))?;
    ensure!(!host.log(guest.name()).contains("custom-monitor"), "{}", host.log(guest.name()));
    let elsewhere = seen_by(&other)?;
    check(&elsewhere, &json!({ "by": "libvirt", "vm": null, "moves": false }))?;
    let why = elsewhere["why"].as_str().unwrap_or_default();
    ensure!(why.contains("LIBVIRT_DEFAULT_URI"), "{elsewhere}");
    Ok(())
}

#[test]
fn a_microvm_is_listed_by_its_control_socket() -> anyhow::Result<()> {
    if !kvm_for("a_microvm_is_listed_by_its_control_socket") {
        return Ok(());
    }
    let vm = MicroVm::start(&Godwit::built()?, &["--memory", "128MiB", "--mode", "idle"])?;
    let seen = list(vm.pid())?;
    let name = format!("microvm:{}", vm.control_socket().display());
    check(&seen, &json!({ "by": "microvm", "accelerator": "kvm", "vm": name, "moves": true }))?;
    check(&seen, &json!({ "state": "running", "ram_bytes": 128 << 20, "ram_kind": "file" }))
}

#[test]
fn an_instance_of_incuss_is_named_and_moves_where_it_has_a_monitor_to_spare() -> anyhow::Result<()>
{
    let test = "an_instance_of_incuss_is_named_and_moves_where_it_has_a_monitor_to_spare";
    for build in builds_for(test).into_iter().take(1) {
        // As Incus writes it (its driver_qemu_config_template.go), but for what the test has.
        let room = Room::new()?;
        let place = room.dir().join("run/incus/v1");
        std::fs::create_dir_all(&place)?;
        let monitor = place.join("qemu.monitor");
        let settings = format!(
            "# Console\n[chardev \"monitor\"]\nbackend = \"socket\"\npath = \"{}\"\nserver = \
             \"on\"\nwait = \"off\"\n\n[mon]\nchardev = \"monitor\"\nmode = \"control\"\n",
            monitor.display()
        );
        let file = place.join("qemu.conf");
        std::fs::write(&file, settings)?;
        let file = file.display().to_string();
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate));
        let config = config.with_backend(Backend::Memfd);
        let incus = config.clone().with_extra(&["-name", "v1", "-readconfig", &file]);
        let mut pair = Pair::start_apart(&incus, &config)?;
        let incusd = UnixStream::connect(&monitor)?;

        // As Incus starts it: the second of its monitors is the test's own.
        let holder = UnixStream::connect(pair.source.qmp_socket())?;
        let seen = list(pair.source.pid())?;
        let expected = json!({ "by": "incus", "id": "v1", "name": "v1", "ram_kind": "memfd" });
        check(&seen, &expected)?;
        check(&seen, &json!({ "moves": false, "vm": null }))?;
        let why = seen["why"].as_str().unwrap_or_default();
        ensure!(why.contains("incus config set v1 raw.qemu="), "{seen}");
        let refused = pair.godwit.run(&["plan", "--vm", "incus:v1"])?;
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(words.contains("incusd holds its only monitor"), "{words}");
        let refused = pair.godwit.run(&["plan", "--vm", "incus:v2"])?;
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(words.contains("no instance 'v2'") && words.contains("v1"), "{words}");

        // And with one to spare.
        drop(holder);
        check(&list(pair.source.pid())?, &json!({ "moves": true, "vm": "incus:v1" }))?;
        let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        let migrate = pair.godwit.migrate_named("incus:v1", &address, &["--verify"])?;
        check_moved(&mut pair, &migrate.wait(LIMIT)?)?;
        drop(incusd);
    }
    Ok(())
}
