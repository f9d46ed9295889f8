//! Domains of libvirt's, between two daemons: named as `virsh` names them, and in the end as virsh
//! shows them after a migration of libvirt's own.

use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, check_refused, oldest};
use godwit_guest_workload::settings::{DiskWork, Mode};
use godwit_testbed::{
    DiskImage, Ended, Godwit, GuestConfig, LibvirtGuest, LibvirtHost, builds_for, images_for,
    libvirt_for,
};
use godwit_units::ByteCount;
use rustix::process::{Pid, Signal, kill_process};

/// Two hosts and a guest on the first.
struct Hosts {
    west: LibvirtHost,
    east: LibvirtHost,
    guest: LibvirtGuest,
    godwit: Godwit,
}

impl Hosts {
    /// `None` where there is no libvirt, which is said.
    fn start(test: &str, mode: Mode, persistent: bool) -> anyhow::Result<Option<Self>> {
        Self::with_devices(test, &GuestConfig::small(mode), "", persistent)
    }

    fn with_devices(
        test: &str,
        config: &GuestConfig,
        devices: &str,
        persistent: bool,
    ) -> anyhow::Result<Option<Self>> {
        let builds = builds_for(test);
        if builds.is_empty() || !libvirt_for(test) {
            return Ok(None);
        }
        let guest = LibvirtGuest::new(oldest(&builds)?, config, devices)?;
        let (west, east) = (LibvirtHost::start()?, LibvirtHost::start()?);
        if persistent {
            guest.define_on(&west)?;
        } else {
            guest.create_on(&west)?;
        }
        guest.await_beats(3, LIMIT)?;
        Ok(Some(Self { west, east, guest, godwit: Godwit::built()? }))
    }

    /// Where the guest is next.
    fn turn(&mut self) {
        std::mem::swap(&mut self.west, &mut self.east);
    }

    fn name(&self) -> &str {
        self.guest.name()
    }

    /// Moves it from west to east: migrate, receive.
    fn migrate(&self, options: &[&str]) -> anyhow::Result<(Ended, Ended)> {
        self.migrate_with(options, &[])
    }

    fn migrate_with(&self, options: &[&str], receive: &[&str]) -> anyhow::Result<(Ended, Ended)> {
        let (receive, address) = self.godwit.receive_named(&self.east.vm_name(), receive)?;
        let domain = self.west.domain(self.name());
        let migrate = self.godwit.migrate_named(&domain, &address, options)?;
        Ok((migrate.wait(LIMIT)?, receive.wait(LIMIT)?))
    }

    /// The states that virsh shows: west, east.
    fn states(&self) -> anyhow::Result<[String; 2]> {
        Ok([self.west.state(self.name())?, self.east.state(self.name())?])
    }

    fn check_states(&self, expected: [&str; 2]) -> anyhow::Result<()> {
        let states = self.states()?;
        ensure!(states == expected, "virsh shows {states:?} instead of {expected:?}");
        Ok(())
    }

    /// The guest works on, counts up, and has found no damage.
    fn check_guest(&self) -> anyhow::Result<()> {
        self.guest.await_beats(3, LIMIT)?;
        let numbers: Vec<u64> = self.guest.beats().iter().map(|beat| beat.heartbeat.n).collect();
        ensure!(numbers.windows(2).all(|pair| pair[1] > pair[0]), "went back: {numbers:?}");
        ensure!(self.guest.bugs().is_empty(), "{:?}", self.guest.bugs());
        Ok(())
    }
}

fn check_migrated(migrate: &Ended, receive: &Ended) -> anyhow::Result<()> {
    let told = || format!("{} {} {}", migrate.last(), migrate.errors, receive.errors);
    ensure!(migrate.last()["outcome"] == "migrated", "{}", told());
    ensure!(receive.last()["outcome"] == "running", "{}", told());
    Ok(())
}

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
fn a_disk_that_both_hosts_have_goes_on_at_the_destination() -> anyhow::Result<()> {
    let test = "a_disk_that_both_hosts_have_goes_on_at_the_destination";
    if !images_for(test) {
        return Ok(());
    }
    let disk = DiskImage::create("qcow2", ByteCount(48 << 20))?;
    // Both daemons are on one machine, and would take the file from each other.
    std::fs::set_permissions(disk.path(), std::fs::Permissions::from_mode(0o666))?;
    let devices = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='qcow2' cache='none'/>\
         <source file='{}'><seclabel model='dac' relabel='no'/></source>\
         <target dev='vda' bus='virtio'/></disk>",
        disk.path().display()
    );
    // The guest checks what it reads of what it wrote.
    let span = ByteCount(16 << 20);
    let work = DiskWork { write: 2 << 20, read: 2 << 20, span, ..DiskWork::default() };
    let config = GuestConfig { disk: work, ..GuestConfig::small(Mode::Rate) };
    let Some(mut hosts) = Hosts::with_devices(test, &config, &devices, true)? else {
        return Ok(());
    };

    // Nobody has said that the other host has it.
    let (migrate, _) = hosts.migrate(&[])?;
    ensure!(migrate.errors.contains("--disks-are-shared"), "{}", migrate.errors);
    hosts.check_states(["running", "none"])?;

    for turn in 0..2 {
        let (migrate, receive) = hosts.migrate(&["--verify", "--disks-are-shared"])?;
        check_migrated(&migrate, &receive).with_context(|| format!("move {turn}"))?;
        hosts.check_states(["shut off", "running"])?;
        hosts.check_guest()?;
        hosts.turn();
    }
    Ok(())
}

#[test]
fn a_libvirt_that_ends_in_the_midst_of_it_is_waited_for_or_costs_the_move() -> anyhow::Result<()> {
    let test = "a_libvirt_that_ends_in_the_midst_of_it_is_waited_for_or_costs_the_move";
    let Some(mut hosts) = Hosts::start(test, Mode::Rate, true)? else { return Ok(()) };
    let slow = ["--max-bandwidth", "10MiB/s"];

    // The destination's: with it goes what it was about to start, and the guest stays.
    let (receive, address) = hosts.godwit.receive_named(&hosts.east.vm_name(), &[])?;
    let domain = hosts.west.domain(hosts.name());
    let migrate = hosts.godwit.migrate_named(&domain, &address, &slow)?;
    godwit_e2e::await_copying(&migrate)?;
    hosts.east.restart_daemon()?;
    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    let told = format!("{} {}", migrate.errors, receive.errors);
    ensure!(migrate.last()["outcome"] == "failed", "{} {told}", migrate.last());
    hosts.check_states(["running", "none"]).context(told)?;
    hosts.check_guest()?;

    // The source's: it is connected to again.
    let (receive, address) = hosts.godwit.receive_named(&hosts.east.vm_name(), &[])?;
    let migrate = hosts.godwit.migrate_named(&domain, &address, &slow)?;
    godwit_e2e::await_copying(&migrate)?;
    hosts.west.restart_daemon()?;
    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    check_migrated(&migrate, &receive)?;
    hosts.check_states(["shut off", "running"])?;
    hosts.check_guest()
}

#[test]
fn a_destination_killed_when_the_guest_is_its_own_leaves_it_as_it_was() -> anyhow::Result<()> {
    let test = "a_destination_killed_when_the_guest_is_its_own_leaves_it_as_it_was";
    let Some(hosts) = Hosts::start(test, Mode::Rate, true)? else { return Ok(()) };
    let name = hosts.name();
    hosts.west.virsh(&["autostart", name])?;

    // The guardian runs it, and has libvirt keep it; the source, which is in doubt, waits.
    let fault = ["--fault", "kill-before-run"];
    let (receive, address) = hosts.godwit.receive_named(&hosts.east.vm_name(), &fault)?;
    let _migrate = hosts.godwit.migrate_named(&hosts.west.domain(name), &address, &[])?;
    receive.wait(LIMIT)?;

    let until = std::time::Instant::now() + LIMIT;
    while hosts.east.info(name, "Autostart").ok().as_deref() != Some("enable")
        && std::time::Instant::now() < until
    {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    ensure!(hosts.east.state(name)? == "running");
    ensure!(hosts.east.info(name, "Persistent")? == "yes");
    ensure!(hosts.east.info(name, "Autostart")? == "enable");
    hosts.check_guest()
}

#[test]
fn a_qemu_that_ends_at_the_destination_costs_the_move_alone() -> anyhow::Result<()> {
    let test = "a_qemu_that_ends_at_the_destination_costs_the_move_alone";
    let Some(hosts) = Hosts::start(test, Mode::Rate, true)? else { return Ok(()) };
    let (receive, address) = hosts.godwit.receive_named(&hosts.east.vm_name(), &[])?;
    let domain = hosts.west.domain(hosts.name());
    let slow = ["--max-bandwidth", "10MiB/s"];
    let migrate = hosts.godwit.migrate_named(&domain, &address, &slow)?;
    godwit_e2e::await_copying(&migrate)?;
    let qemu = Pid::from_raw(hosts.east.qemu(hosts.name())?).context("no process")?;
    kill_process(qemu, Signal::KILL)?;
    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    let told = format!("{} {}", migrate.errors, receive.errors);
    ensure!(migrate.last()["outcome"] == "failed", "{} {told}", migrate.last());
    hosts.check_states(["running", "none"]).context(told)?;
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
fn whatever_fails_libvirt_has_both_as_they_were() -> anyhow::Result<()> {
    let test = "whatever_fails_libvirt_has_both_as_they_were";
    let Some(hosts) = Hosts::start(test, Mode::Rate, true)? else { return Ok(()) };
    let until_untouched = || -> anyhow::Result<()> {
        let until = std::time::Instant::now() + LIMIT;
        while hosts.states()? != ["running", "none"] && std::time::Instant::now() < until {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        hosts.check_states(["running", "none"])?;
        hosts.check_guest()
    };

    // Ctrl-C while it copies.
    let (receive, address) = hosts.godwit.receive_named(&hosts.east.vm_name(), &[])?;
    let domain = hosts.west.domain(hosts.name());
    let slow = ["--max-bandwidth", "10MiB/s"];
    let migrate = hosts.godwit.migrate_named(&domain, &address, &slow)?;
    godwit_e2e::await_copying(&migrate)?;
    migrate.signal(Signal::INT)?;
    ensure!(migrate.wait(LIMIT)?.status.code() == Some(130));
    receive.wait(LIMIT)?;
    until_untouched().context("cancelled")?;

    // Killed at the source, before and behind the stop, and with the state saved.
    for fault in ["kill-after-prepare", "kill-after-stop", "kill-after-state"] {
        let (receive, address) = hosts.godwit.receive_named(&hosts.east.vm_name(), &[])?;
        let domain = hosts.west.domain(hosts.name());
        hosts.godwit.migrate_named(&domain, &address, &["--fault", fault])?.wait(LIMIT)?;
        // A destination that has all of it waits for the source, which is gone.
        drop(receive);
        until_untouched().context(fault)?;
    }

    // Killed at the destination: with the state asked for, and loaded. (Behind its word that it is
    // ready the source may be in doubt.)
    for fault in ["kill-after-prepare", "kill-after-load"] {
        hosts.migrate_with(&[], &["--fault", fault])?;
        until_untouched().with_context(|| format!("receive: {fault}"))?;
    }

    // And then it moves all the same.
    let (migrate, receive) = hosts.migrate(&["--verify"])?;
    check_migrated(&migrate, &receive)?;
    hosts.check_states(["shut off", "running"])?;
    hosts.check_guest()
}

#[test]
fn what_libvirt_has_against_it_is_told_in_a_line() -> anyhow::Result<()> {
    let test = "what_libvirt_has_against_it_is_told_in_a_line";
    let Some(hosts) = Hosts::start(test, Mode::Idle, true)? else { return Ok(()) };
    let Hosts { west, east, godwit, .. } = &hosts;
    let name = hosts.name();
    let refused = |domain: &str, host: &LibvirtHost, options: &[&str], words: &[&str]| {
        let migrate = godwit.migrate_named(&host.domain(domain), "127.0.0.1:1", options)?;
        check_refused(&migrate.wait(LIMIT)?, 1, words)
    };

    refused("nobody", west, &[], &["no domain 'nobody'", name])?;
    refused("", west, &[], &["which domain?"])?;
    let nowhere = "libvirt:vm1@qemu+unix:///system?socket=/nowhere";
    let output = godwit.run(&["migrate", "--vm", nowhere, "--to", "127.0.0.1:1"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(said.contains("cannot connect to libvirt at qemu+unix"), "{said}");

    // The destination has it already, running or under another UUID; nothing is started there.
    let arrives = |words: &str| {
        let (migrate, _) = hosts.migrate(&[])?;
        ensure!(migrate.errors.contains(words), "{}", migrate.errors);
        hosts.check_guest()
    };
    let other = west.virsh(&["dumpxml", "--inactive", name])?;
    let uuid = west.virsh(&["domuuid", name])?;
    let other = other.replace(&uuid, "1c1e3f6c-2d4e-4f1e-9f0e-4f4e5d6c7b8a");
    let path = hosts.guest.file("other.xml");
    std::fs::write(&path, other)?;
    east.virsh(&["define", &path.display().to_string()])?;
    arrives("another domain called")?;
    east.virsh(&["undefine", name])?;

    // Shut off; and with what would be lost.
    west.virsh(&["snapshot-create-as", name, "before", "--disk-only"]).err();
    west.virsh(&["destroy", name])?;
    refused(name, west, &[], &["is shut off"])
}
