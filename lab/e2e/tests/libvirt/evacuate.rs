//! A host that is emptied of its domains: they are found by their libvirt, and each is taken in by
//! the command that the destination names.

use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{DiskImage, GuestConfig, LibvirtGuest, builds_for, images_for};
use godwit_units::ByteCount;
use serde_json::{Value, json};

use crate::disks::{AS_IT_IS, at_work, device};
use crate::hosts::Hosts;

/// The last line that was printed, as JSON.
fn last(output: &Output) -> anyhow::Result<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().with_context(|| told(output))?;
    serde_json::from_str(line).with_context(|| line.to_owned())
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_host_is_emptied_of_the_domains_that_its_libvirt_has() -> anyhow::Result<()> {
    let test = "a_host_is_emptied_of_the_domains_that_its_libvirt_has";
    if !images_for(test) {
        return Ok(());
    }
    let Some(hosts) = Hosts::start(test, Mode::Rate, false)? else { return Ok(()) };
    let builds = builds_for(test);
    let build = oldest(&builds)?;
    let second = LibvirtGuest::new(build, &GuestConfig::small(Mode::Idle), "")?;
    second.create_on(&hosts.west)?;
    let disk = DiskImage::create("qcow2", ByteCount(48 << 20))?;
    std::fs::set_permissions(disk.path(), std::fs::Permissions::from_mode(0o666))?;
    let path = disk.path().display().to_string();
    let devices = device("vda", "qcow2", &path, AS_IT_IS);
    let stays = LibvirtGuest::new(build, &at_work(), &devices)?;
    stays.create_on(&hosts.west)?;
    second.await_beats(3, LIMIT)?;
    stays.await_beats(3, LIMIT)?;

    let godwit = &hosts.godwit;
    let program = godwit.program().display().to_string();
    let east = hosts.east.vm_name();
    let list = |words: &[&str]| {
        let receive = [
            &[&program, "receive", "--vm", &east, "--listen", "127.0.0.1:0"][..],
            &["--json", "--wait", "2min"],
            words,
        ]
        .concat();
        let path = hosts.guest.file("list.json");
        let host = json!({ "name": "east", "memory": "8GiB", "receive": receive });
        std::fs::write(&path, json!({ "destination": [host] }).to_string())?;
        anyhow::Ok(path.display().to_string())
    };
    let name = format!("l{}", std::process::id());
    let state = hosts.guest.file("state").display().to_string();
    let from = format!("libvirt:{}", hosts.west.uri());
    let evacuate = |list: &str, words: &[&str]| {
        let fixed = ["evacuate", list, "--from", &from, "--name", &name, "--state-dir", &state];
        godwit.run(&[&fixed[..], words].concat())
    };

    // Who would leave, with what, and by which command.
    let plain = list(&["--disks", "none"])?;
    let dry = evacuate(&plain, &["--dry-run", "--json", "--", "--disks", "all"])?;
    let plan = last(&dry)?;
    let vms = plan["vms"].as_array().context("no VMs")?;
    let planned = |guest: &LibvirtGuest| {
        vms.iter().find(|vm| vm["name"] == guest.name()).with_context(|| plan.to_string())
    };
    ensure!(vms.len() == 3, "{plan}");
    let (first, third) = (planned(&hosts.guest)?, planned(&stays)?);
    ensure!(first["memory_bytes"] == GuestConfig::small(Mode::Rate).memory.0, "{first}");
    ensure!(first["vm"] == hosts.west.domain(hosts.name()), "{first}");
    ensure!(first["to"] == "east" && first["receiver"]["start"][0] == program, "{first}");
    let disk = third["disk_bytes"]["vda"].as_u64().context("no disk")?;
    ensure!(disk > 0 && disk <= 48 << 20 && third["moving_disks"][0] == "vda", "{third}");

    // A placeholder that there is not, a domain that there is not.
    let wrong = evacuate(&list(&["--disks", "{disk}"])?, &["--dry-run"])?;
    ensure!(told(&wrong).contains("receive: nobody knows {disk}"), "{}", told(&wrong));
    let wrong = evacuate(&plain, &["--only", "nobody", "--dry-run"])?;
    let words = format!("no VM 'nobody' runs in libvirt at {}", hosts.west.uri());
    ensure!(wrong.status.code() == Some(1) && told(&wrong).contains(&words), "{}", told(&wrong));
    let none = godwit.run(&[
        "evacuate",
        &plain,
        "--from",
        &format!("libvirt:{}", hosts.east.uri()),
        "--dry-run",
    ])?;
    ensure!(told(&none).contains("there is nothing to move"), "{}", told(&none));

    // One that cannot be moved is told, and begins nothing.
    hosts.west.virsh(&["snapshot-create-as", stays.name(), "s1", "--disk-only"])?;
    let wrong = evacuate(&plain, &[])?;
    let words = format!("cannot be moved: {} (domain '{0}' has 1 snapshots", stays.name());
    ensure!(wrong.status.code() == Some(1) && told(&wrong).contains(&words), "{}", told(&wrong));
    hosts.check_states(["running", "none"])?;

    // The others leave.
    let named = list(&["--reconnect", "0s"])?;
    let options = ["--except", stays.name(), "--json", "--", "--reconnect", "0s"];
    let done = evacuate(&named, &options)?;
    let report = last(&done)?;
    ensure!(done.status.success() && report["moved"] == 2, "{report} {}", told(&done));
    hosts.check_states(["none", "running"])?;
    ensure!(hosts.east.state(second.name())? == "running");
    ensure!(hosts.west.state(stays.name())? == "running");
    hosts.check_guest()?;
    for guest in [&second, &stays] {
        guest.await_beats(3, LIMIT)?;
        ensure!(guest.bugs().is_empty(), "{:?}", guest.bugs());
    }
    Ok(())
}
