//! Whatever ends in the midst of a move: godwit, libvirt or QEMU, on either side.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::LIMIT;
use godwit_stamp::settings::Mode;
use rustix::process::{Pid, Signal, kill_process};

use crate::hosts::{Hosts, check_migrated};

#[test]
fn a_libvirt_that_ends_in_the_midst_of_it_is_waited_for_or_costs_the_move() -> anyhow::Result<()> {
    let test = "a_libvirt_that_ends_in_the_midst_of_it_is_waited_for_or_costs_the_move";
    let Some(mut hosts) = Hosts::start(test, Mode::Rate, true)? else { return Ok(()) };

    // The destination's: with it goes what it was about to start, and the guest stays.
    let (migrate, receive) = hosts.begin(&[], &[])?;
    hosts.east.restart_daemon()?;
    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    let told = format!("{} {}", migrate.errors, receive.errors);
    ensure!(migrate.last()["outcome"] == "failed", "{} {told}", migrate.last());
    hosts.check_states(["running", "none"]).context(told)?;
    hosts.check_guest()?;

    // The source's: it is connected to again.
    let (migrate, receive) = hosts.begin(&[], &[])?;
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

    let until = Instant::now() + LIMIT;
    while hosts.east.info(name, "Autostart").ok().as_deref() != Some("enable")
        && Instant::now() < until
    {
        std::thread::sleep(Duration::from_millis(50));
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
    let (migrate, receive) = hosts.begin(&[], &[])?;
    let qemu = Pid::from_raw(hosts.east.qemu(hosts.name())?).context("no process")?;
    kill_process(qemu, Signal::KILL)?;
    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    let told = format!("{} {}", migrate.errors, receive.errors);
    ensure!(migrate.last()["outcome"] == "failed", "{} {told}", migrate.last());
    hosts.check_states(["running", "none"]).context(told)?;
    hosts.check_guest()
}

#[test]
fn whatever_fails_libvirt_has_both_as_they_were() -> anyhow::Result<()> {
    let test = "whatever_fails_libvirt_has_both_as_they_were";
    let Some(hosts) = Hosts::start(test, Mode::Rate, true)? else { return Ok(()) };
    // Ctrl-C while it copies.
    let (migrate, receive) = hosts.begin(&[], &[])?;
    migrate.signal(Signal::INT)?;
    ensure!(migrate.wait(LIMIT)?.status.code() == Some(130));
    receive.wait(LIMIT)?;
    hosts.await_untouched("none").context("cancelled")?;

    // Killed at the source, before and behind the stop, and while and after the state is saved.
    for fault in ["kill-after-prepare", "kill-after-stop", "kill-after-release", "kill-after-state"]
    {
        let (receive, address) = hosts.godwit.receive_named(&hosts.east.vm_name(), &[])?;
        let domain = hosts.west.domain(hosts.name());
        hosts.godwit.migrate_named(&domain, &address, &["--fault", fault])?.wait(LIMIT)?;
        // A destination that has all of it waits for the source, which is gone.
        drop(receive);
        hosts.await_untouched("none").context(fault)?;
    }

    // Killed at the destination: with the state asked for, and loaded. (Behind its word that it is
    // ready the source may be in doubt.)
    for fault in ["kill-after-prepare", "kill-after-load"] {
        hosts.migrate_with(&[], &["--fault", fault])?;
        hosts.await_untouched("none").with_context(|| format!("receive: {fault}"))?;
    }

    // And then it moves all the same.
    let (migrate, receive) = hosts.migrate(&["--verify"])?;
    check_migrated(&migrate, &receive)?;
    hosts.check_states(["shut off", "running"])?;
    hosts.check_guest()
}
