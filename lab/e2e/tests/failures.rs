//! Migrations that fail on the way: the guest survives them, and the next attempt succeeds.

use std::io::BufRead;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, Pair, await_copying, check_moved, check_untouched, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{GuestConfig, Link, Movable, SlowLink, TestVm, VmConfig, builds_for, skip};
use godwit_units::Rate;
use rustix::process::{Pid, Signal, kill_process};

/// Slow enough that a pre-copy of the small guest lasts for seconds.
const SLOW: &[&str] = &["--max-bandwidth", "20MiB/s"];

/// A pair with a guest that writes, or nothing where there is no QEMU.
fn pair(test: &str) -> anyhow::Result<Option<Pair>> {
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(None);
    }
    Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate))).map(Some)
}

fn second_attempt(pair: &mut Pair) -> anyhow::Result<()> {
    let (migrate, _) = pair.migrate(&["--verify"])?;
    check_moved(pair, &migrate)
}

#[test]
fn a_link_cut_in_pre_copy() -> anyhow::Result<()> {
    let Some(mut pair) = pair("a_link_cut_in_pre_copy")? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let link = Link::to(&address)?;
    let migrate = pair.godwit.migrate(&pair.source, link.address(), SLOW)?;
    await_copying(&migrate)?;

    link.cut();

    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.status.code() == Some(1), "{}", migrate.status);
    assert_eq!(migrate.last()["guest"], "source");
    assert_eq!(migrate.last()["phase"], "pre-copy");
    check_untouched(&mut pair.source)?;
    assert_eq!(receive.wait(LIMIT)?.status.code(), Some(1));
    // The same destination QEMU takes the second attempt: what the first one left in its RAM is
    // overwritten.
    second_attempt(&mut pair)
}

#[test]
fn the_receiving_godwit_killed() -> anyhow::Result<()> {
    let Some(mut pair) = pair("the_receiving_godwit_killed")? else { return Ok(()) };
    let (mut receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    receive.kill();

    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.status.code() == Some(1), "{}", migrate.status);
    check_untouched(&mut pair.source)?;
    second_attempt(&mut pair)
}

#[test]
fn the_destination_qemu_killed_before_it_is_ready() -> anyhow::Result<()> {
    let Some(mut pair) = pair("the_destination_qemu_killed_before_it_is_ready")? else {
        return Ok(());
    };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    pair.destination.kill();

    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.status.code() == Some(1), "{}", migrate.status);
    ensure!(migrate.errors.contains("the destination gave up"), "{}", migrate.errors);
    check_untouched(&mut pair.source)?;
    assert_eq!(receive.wait(LIMIT)?.status.code(), Some(1));
    pair.destination = TestVm::destination(pair.source.config())?;
    second_attempt(&mut pair)
}

#[test]
fn a_destination_with_other_devices() -> anyhow::Result<()> {
    let builds = builds_for("a_destination_with_other_devices");
    if builds.is_empty() {
        return Ok(());
    }
    let config = VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate));
    let mut pair = Pair::start(&config.clone().with_extra(&["-device", "virtio-rng-pci"]))?;
    pair.destination = TestVm::destination(&config)?;

    // Let pass by the operator, and found out by QEMU when it loads the device state: the guest is
    // stopped by then.
    let (migrate, receive) = pair.migrate(&["--allow-differences", "all"])?;

    ensure!(migrate.status.code() == Some(1), "{}", migrate.status);
    assert_eq!(migrate.last()["phase"], "stop-and-copy");
    ensure!(receive.errors.contains("do the options of both sides agree"), "{}", receive.errors);
    check_untouched(&mut pair.source)?;
    pair.destination = TestVm::destination(pair.source.config())?;
    second_attempt(&mut pair)
}

#[test]
fn ctrl_c_at_the_source() -> anyhow::Result<()> {
    let Some(mut pair) = pair("ctrl_c_at_the_source")? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    migrate.signal(Signal::INT)?;

    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.status.code() == Some(130), "{}", migrate.status);
    assert_eq!(migrate.last()["outcome"], "cancelled");
    check_untouched(&mut pair.source)?;
    let receive = receive.wait(LIMIT)?;
    ensure!(receive.errors.contains("the source gave up: cancelled"), "{}", receive.errors);
    second_attempt(&mut pair)
}

#[test]
fn ctrl_c_at_the_destination() -> anyhow::Result<()> {
    let Some(mut pair) = pair("ctrl_c_at_the_destination")? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    receive.signal(Signal::INT)?;

    ensure!(receive.wait(LIMIT)?.status.code() == Some(130));
    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.errors.contains("the destination gave up: cancelled"), "{}", migrate.errors);
    check_untouched(&mut pair.source)?;
    second_attempt(&mut pair)
}

#[test]
fn the_migrating_godwit_killed() -> anyhow::Result<()> {
    let Some(mut pair) = pair("the_migrating_godwit_killed")? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let mut migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    // Nothing of ours is left to clean up: the kernel does it.
    migrate.kill();

    check_untouched(&mut pair.source)?;
    assert_eq!(receive.wait(LIMIT)?.status.code(), Some(1));
    second_attempt(&mut pair)
}

#[test]
fn a_destination_that_hangs() -> anyhow::Result<()> {
    let Some(mut pair) = pair("a_destination_that_hangs")? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    receive.signal(Signal::STOP)?;

    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.status.code() == Some(1), "{}", migrate.status);
    check_untouched(&mut pair.source)
}

#[test]
fn a_cable_that_is_pulled_is_noticed_by_both() -> anyhow::Result<()> {
    // Mutation: no signs of life, no keep-alive, no user timeout. No packet says that the other
    // side is gone.
    let test = "a_cable_that_is_pulled_is_noticed_by_both";
    let Some(mut pair) = pair(test)? else { return Ok(()) };
    let link = match SlowLink::create(Rate::from_bytes_per_second(f64::from(100 << 20))) {
        Ok(link) => link,
        Err(why) => {
            skip(test, format_args!("{why:#}"));
            return Ok(());
        }
    };
    let (receive, address) = pair.godwit.receive_over(&link, &pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    link.lose()?;

    let since = Instant::now();
    let migrate = migrate.wait(LIMIT)?;
    let noticed = since.elapsed();
    ensure!(migrate.status.code() == Some(1), "{}: {}", migrate.status, migrate.errors);
    assert_eq!(migrate.last()["guest"], "source");
    let receive = receive.wait(LIMIT)?;
    ensure!(receive.status.code() == Some(1), "{}: {}", receive.status, receive.errors);
    // A write that is stuck is given up after 20 s, a read never.
    ensure!(
        noticed.as_secs() < 16 && since.elapsed().as_secs() < 18,
        "{noticed:?}, {:?}",
        since.elapsed()
    );
    check_untouched(&mut pair.source)?;
    second_attempt(&mut pair)
}

/// Sees a line of `stream`, and then goes away.
fn one_line(stream: impl std::io::Read) -> anyhow::Result<String> {
    let mut line = String::new();
    std::io::BufReader::with_capacity(1, stream).read_line(&mut line)?;
    Ok(line)
}

#[test]
fn nobody_reads_what_they_say() -> anyhow::Result<()> {
    // A terminal that is closed, a pager that ends: in the middle of it, and at the handover.
    // Mutation: a macro that panics then.
    let test = "nobody_reads_what_they_say";
    for fault in [None, Some("cut-after-commit"), Some("lose-commit")] {
        let Some(mut pair) = pair(test)? else { return Ok(()) };
        let socket = std::env::temp_dir().join(format!("godwit-{test}-{}", std::process::id()));
        let address = format!("unix:{}", socket.display());
        let start = |arguments: &[&str]| {
            let mut command = Command::new(pair.godwit.program());
            command
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            command.spawn()
        };
        let mut receive =
            start(&["receive", "--vm", &pair.destination.vm_name(), "--listen", &address])?;
        let said = one_line(receive.stderr.take().context("no standard error")?)?;
        ensure!(said.starts_with("listening on unix:"), "{said}");
        drop(receive.stdout.take());

        let vm = pair.source.vm_name();
        let fault: Vec<&str> = fault.iter().flat_map(|fault| ["--fault", fault]).collect();
        let mut migrate =
            start(&[&["migrate", "--vm", &vm, "--to", &address], SLOW, &fault[..]].concat())?;
        one_line(migrate.stderr.take().context("no standard error")?)?;
        drop(migrate.stdout.take());

        ensure!(migrate.wait()?.success() && receive.wait()?.success(), "fault {fault:?}");
        ensure!(pair.destination.status()? == "running");
        pair.destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
    }
    Ok(())
}

#[test]
fn under_nohup_the_end_of_a_session_is_ignored() -> anyhow::Result<()> {
    // Mutation: a handler is installed for a signal that was to be ignored.
    let Some(mut pair) = pair("under_nohup_the_end_of_a_session_is_ignored")? else {
        return Ok(());
    };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let program = pair.godwit.program().display().to_string();
    let vm = pair.source.vm_name();
    let mut migrate = Command::new("sh")
        .args(["-c", "trap '' HUP INT; exec \"$@\"", "sh"])
        .args([&program, "migrate", "--vm", &vm, "--to", &address])
        .args(SLOW)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    one_line(migrate.stderr.take().context("no standard error")?)?;
    let pid = Pid::from_child(&migrate);
    for signal in [Signal::HUP, Signal::INT] {
        kill_process(pid, signal)?;
    }
    ensure!(migrate.wait()?.success(), "a signal that is ignored has ended it");
    ensure!(receive.wait(LIMIT)?.status.success());
    ensure!(pair.destination.status()? == "running");
    Ok(())
}

#[test]
fn a_peer_that_hangs_on_a_link_that_stands() -> anyhow::Result<()> {
    // A unix socket, as a tunnel has it: the kernel never says that the other side is gone.
    let test = "a_peer_that_hangs_on_a_link_that_stands";
    let Some(mut pair) = pair(test)? else { return Ok(()) };
    let socket = std::env::temp_dir().join(format!("godwit-{test}-{}", std::process::id()));
    let address = format!("unix:{}", socket.display());
    for (stopped, other) in [("source", "destination"), ("destination", "source")] {
        let (receive, _) = pair.godwit.receive_on(&address, &pair.destination, &[])?;
        let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
        await_copying(&migrate)?;
        let (hangs, waits) =
            if stopped == "source" { (migrate, receive) } else { (receive, migrate) };

        hangs.signal(Signal::STOP)?;

        let since = Instant::now();
        let waits = waits.wait(LIMIT)?;
        ensure!(waits.status.code() == Some(1), "the {other}: {}", waits.status);
        let words = format!("nothing was heard of the {stopped} for 10s");
        ensure!(waits.errors.contains(&words), "{}", waits.errors);
        // A write that is stuck is given up after 20 s.
        ensure!(since.elapsed().as_secs() < 16, "noticed after {:?}", since.elapsed());
        // It learns that the other side has gone, and brings its guest back.
        hangs.signal(Signal::CONT)?;
        let hangs = hangs.wait(LIMIT)?;
        ensure!(hangs.status.code() == Some(1), "the {stopped}: {} {}", hangs.status, hangs.errors);
        check_untouched(&mut pair.source)?;
    }
    second_attempt(&mut pair)
}

#[test]
fn a_guest_that_outruns_the_link() -> anyhow::Result<()> {
    let builds = builds_for("a_guest_that_outruns_the_link");
    if builds.is_empty() {
        return Ok(());
    }
    let mut pair = Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Full)))?;
    let limits = ["--max-bandwidth", "20MiB/s", "--patience", "3s", "--downtime-limit", "50ms"];
    let (migrate, _) = pair.migrate(&[&limits[..], &["--throttle", "off"]].concat())?;
    ensure!(migrate.errors.contains("not converging"), "{}", migrate.errors);
    ensure!(migrate.errors.contains("--downtime-limit"), "{}", migrate.errors);
    check_untouched(&mut pair.source)
}

#[test]
fn the_link_breaks_at_the_handover() -> anyhow::Result<()> {
    for fault in ["cut-after-commit", "lose-commit", "lose-farewell"] {
        let Some(mut pair) = pair("the_link_breaks_at_the_handover")? else { return Ok(()) };
        // In doubt, the source asks the destination over a new connection.
        let (migrate, receive) = pair.migrate(&["--fault", fault])?;
        check_moved(&mut pair, &migrate)?;
        assert_eq!(receive.last()["outcome"], "running", "{fault}");
    }
    Ok(())
}

#[test]
fn a_copy_that_is_not_exact_never_runs() -> anyhow::Result<()> {
    let Some(mut pair) = pair("a_copy_that_is_not_exact_never_runs")? else { return Ok(()) };
    let (migrate, receive) = pair.migrate(&["--verify", "--fault", "wrong-digest"])?;
    ensure!(migrate.status.code() == Some(1), "{}", migrate.status);
    ensure!(migrate.errors.contains("NOT exact: 1 of 16 chunks of 16MiB"), "{}", migrate.errors);
    assert_eq!(receive.status.code(), Some(1));
    check_untouched(&mut pair.source)?;
    let after = Instant::now();
    ensure!(
        pair.destination
            .wait_for_heartbeats_after(after, 1, std::time::Duration::from_secs(1))
            .is_err()
    );
    Ok(())
}
