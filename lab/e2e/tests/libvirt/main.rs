//! Domains of libvirt's, between two daemons: named as `virsh` names them, and in the end as virsh
//! shows them after a migration of libvirt's own.
//!
//! ```text
//!   hosts        two hosts and a guest, and what is looked at behind each move
//!   disks        on storage that both have, and moved along
//!   evacuate     a host whose domains all leave
//!   failures     whatever ends in the midst of it
//!   refusals     what is said before anything is sent
//!   doctor       what `godwit doctor` finds of one
//!   document     docs/libvirt.md, word for word
//!   to_and_fro   many moves in a row, with failures among them
//! ```

mod disks;
mod doctor;
mod document;
mod evacuate;
mod failures;
mod hosts;
mod refusals;
mod to_and_fro;

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use godwit_e2e::LIMIT;
use godwit_stamp::settings::Mode;
use godwit_testbed::{GuestConfig, LibvirtHost, builds_for, builds_since, libvirt_for, tool};

use hosts::{Hosts, check_migrated};

fn moves(test: &str, mode: Mode) -> anyhow::Result<()> {
    let Some(hosts) = Hosts::start(test, mode, false)? else { return Ok(()) };

    let (migrate, receive) = hosts.migrate(&["--verify"])?;

    check_migrated(&migrate, &receive)?;
    ensure!(migrate.last()["verified"] == true, "{}", migrate.last());
    hosts.check_guest()?;
    // A transient domain leaves nothing.
    hosts.check_states(["none", "running"])?;
    ensure!(hosts.east.info(hosts.name(), "Persistent")? == "no");
    Ok(())
}

#[test]
fn an_idle_domain_moves() -> anyhow::Result<()> {
    moves("an_idle_domain_moves", Mode::Idle)
}

#[test]
fn a_writing_domain_moves() -> anyhow::Result<()> {
    moves("a_writing_domain_moves", Mode::Rate)
}

#[test]
fn a_persistent_domain_moves_to_and_fro_with_its_definition() -> anyhow::Result<()> {
    let test = "a_persistent_domain_moves_to_and_fro_with_its_definition";
    let Some(mut hosts) = Hosts::start(test, Mode::Rate, true)? else { return Ok(()) };
    let name = hosts.name().to_owned();
    hosts.west.virsh(&["autostart", &name])?;
    let dumpxml = |host: &LibvirtHost| host.virsh(&["dumpxml", "--inactive", &name]);
    let defined = dumpxml(&hosts.west)?;

    // What stays behind is shut off, is not started with its host, and does not stand in the way
    // of the way back.
    for turn in 0..2 {
        let (migrate, receive) = hosts.migrate(&["--verify"])?;
        check_migrated(&migrate, &receive).with_context(|| format!("move {turn}"))?;
        hosts.check_states(["shut off", "running"])?;
        ensure!(dumpxml(&hosts.east)? == defined, "{}", dumpxml(&hosts.east)?);
        ensure!(hosts.east.info(&name, "Persistent")? == "yes");
        ensure!(hosts.east.info(&name, "Autostart")? == "enable");
        ensure!(hosts.west.info(&name, "Autostart")? == "disable");
        hosts.check_guest()?;
        hosts.turn();
    }

    // And nothing stays, if that is wanted.
    let (migrate, receive) = hosts.migrate(&["--undefine-source"])?;
    check_migrated(&migrate, &receive)?;
    hosts.check_states(["none", "running"])?;
    hosts.check_guest()
}

#[test]
fn a_paused_domain_arrives_paused() -> anyhow::Result<()> {
    let test = "a_paused_domain_arrives_paused";
    let Some(hosts) = Hosts::start(test, Mode::Idle, false)? else { return Ok(()) };
    hosts.west.virsh(&["suspend", hosts.name()])?;

    let (migrate, receive) = hosts.migrate(&["--verify"])?;

    ensure!(migrate.last()["outcome"] == "migrated", "{}", migrate.errors);
    ensure!(receive.last()["outcome"] == "paused", "{}", receive.errors);
    hosts.check_states(["none", "paused"])?;
    hosts.east.virsh(&["resume", hosts.name()])?;
    hosts.check_guest()
}

#[test]
fn a_domain_in_qemu_10_moves() -> anyhow::Result<()> {
    let test = "a_domain_in_qemu_10_moves";
    let builds = builds_since(10, builds_for(test), test);
    let Some(build) = builds.first().filter(|_| libvirt_for(test)) else { return Ok(()) };
    let hosts = Hosts::of(build, &GuestConfig::small(Mode::Rate), "")?;
    hosts.guest.define_on(&hosts.west)?;
    hosts.guest.await_beats(3, LIMIT)?;

    let (migrate, receive) = hosts.migrate(&["--verify"])?;

    check_migrated(&migrate, &receive)?;
    hosts.check_states(["shut off", "running"])?;
    hosts.check_guest()
}

/// Libvirt opens the tap, and QEMU has a descriptor without a name.
#[test]
fn what_is_sent_to_the_card_of_a_domain_that_stands_still_is_carried() -> anyhow::Result<()> {
    // Mutation: a descriptor's interface is not looked for.
    let test = "what_is_sent_to_the_card_of_a_domain_that_stands_still_is_carried";
    let mac = "52:54:00:12:34:56";
    let card = format!(
        "<interface type='ethernet'><mac address='{mac}'/><model type='virtio'/></interface>"
    );
    let config = GuestConfig::small(Mode::Rate);
    let Some(hosts) = Hosts::with_devices(test, &config, &card, false)? else { return Ok(()) };
    let list = hosts.west.virsh(&["domiflist", hosts.name()])?;
    let line = list.lines().find(|line| line.contains(mac));
    let interface = line.and_then(|line| line.split_whitespace().next()).context(list.clone())?;
    // The range for benchmarks (RFC 2544); it goes with the interface.
    let [here, there] = [1, 2].map(|host| format!("198.18.{}.{host}", std::process::id() % 250));
    tool("ip", &["address", "add", &here, "peer", &there, "dev", interface])?;
    tool("ip", &["neighbour", "add", &there, "lladdr", mac, "dev", interface])?;
    let network = UdpSocket::bind((here.as_str(), 0))?;

    let moved = AtomicBool::new(false);
    let (migrate, receive) = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !moved.load(Ordering::Relaxed) {
                // The interface goes with its QEMU.
                let _ = network.send_to(&[0; 64], (there.as_str(), 9));
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let ended = hosts.migrate(&[]);
        moved.store(true, Ordering::Relaxed);
        ended
    })?;

    check_migrated(&migrate, &receive)?;
    let [carried, delivered] = [&migrate, &receive].map(|it| &it.last()["late_packets"]);
    ensure!(carried.as_u64() > Some(0) && carried == delivered, "{carried} {delivered}");
    hosts.check_guest()
}

/// What libvirt tells its hook, of a move.
fn told_hooks(hosts: &Hosts) -> anyhow::Result<[Vec<String>; 2]> {
    let told = [hosts.west.hook_calls()?, hosts.east.hook_calls()?];
    Ok(told.map(|calls| {
        let own = calls.lines().filter_map(|line| line.strip_prefix(hosts.name()));
        own.map(|line| line.trim().to_owned()).collect()
    }))
}

#[test]
fn hooks_are_called_as_for_a_restore_and_a_destroy() -> anyhow::Result<()> {
    let test = "hooks_are_called_as_for_a_restore_and_a_destroy";
    let Some(mut hosts) = Hosts::not_started(test, &GuestConfig::small(Mode::Idle), "")? else {
        return Ok(());
    };
    hosts.west.hook()?;
    hosts.east.hook()?;
    hosts.guest.create_on(&hosts.west)?;
    hosts.guest.await_beats(3, LIMIT)?;
    let begins = ["prepare begin -", "start begin -", "started begin -"];
    told_hooks(&hosts)?;

    hosts.west.migrate(hosts.name(), &hosts.east, &[])?;
    let [west, east] = told_hooks(&hosts)?;
    let ends = ["stopped end -", "release end -"];
    ensure!(west == ends, "{west:?}");
    ensure!(east == [&["migrate begin -"], &begins[..]].concat(), "{east:?}");

    hosts.turn();
    let (migrate, receive) = hosts.migrate(&[])?;
    check_migrated(&migrate, &receive)?;
    let [west, east] = told_hooks(&hosts)?;
    ensure!(west == ends, "{west:?}");
    ensure!(east == [&["restore begin -"], &begins[..]].concat(), "{east:?}");
    Ok(())
}
