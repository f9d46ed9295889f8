//! Free memory is not sent, and no page that is in use is taken for free.

use std::time::{Duration, Instant};

use anyhow::ensure;
use godwit_e2e::{LIMIT, MicroPair, Pair, await_copying, check_moved, check_refused};
use godwit_stamp::settings::{BuildWork, Mode};
use godwit_testbed::{
    Godwit, GuestConfig, Link, MicroVm, Movable, TestVm, VmConfig, builds_for, builds_in_turn_for,
    soak,
};
use godwit_units::ByteCount;
use serde_json::Value;

/// 96 MiB that the guest has filled, of which it uses 16 MiB at a time: pages come and go all the
/// time.
const CHURN: &[&str] = &[
    "--memory",
    "128MiB",
    "--mode",
    "churn",
    "--fill",
    "96MiB",
    "--working-set",
    "16MiB",
    "--cpus",
    "2",
];
const HINTS: &[&str] = &["--balloon", "hints"];
const PAGE: u64 = 4096;

#[test]
fn pages_that_the_guest_says_are_free_are_not_sent() -> anyhow::Result<()> {
    for tracker in ["kvm-log", "kvm-ring", "pagemap"] {
        let options = [CHURN, HINTS, &["--tracker", tracker]].concat();
        let test = "pages_that_the_guest_says_are_free_are_not_sent";
        let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
        let (migrate, _) = pair.migrate(&["--verify"])?;
        pair.check_moved(&migrate)?;
        let last = migrate.last();
        ensure!(last["verified"] == true, "{last}");
        let hinted = last["hinted_pages"].as_u64().unwrap_or_default() * PAGE;
        // A guest that hardly runs, on a busy host, does not come to tell of all of them.
        ensure!(hinted > 40 << 20, "{tracker}: only {hinted} bytes of 80 MiB were left out");
        let sent = last["sent_bytes"].as_u64().unwrap_or(u64::MAX);
        ensure!(sent < 70 << 20, "{tracker}: {sent} bytes were sent");
    }
    Ok(())
}

#[test]
fn no_page_in_use_is_taken_for_free() -> anyhow::Result<()> {
    // As fast as it can: pages are taken back while the hint about them is in the queue, and all
    // the time after it.
    let options = [CHURN, HINTS, &["--rate", "0"]].concat();
    let Some(mut pair) = MicroPair::start("no_page_in_use_is_taken_for_free", &options)? else {
        return Ok(());
    };
    // A link that is slower than the guest's hints, and one that is faster; segments that are put
    // off; one channel.
    let ways: [&[&str]; 4] = [
        &["--verify"],
        &["--max-bandwidth", "100MiB/s", "--downtime-limit", "900ms"],
        &["--channels", "1"],
        &["--set", "delay-hot-percent=0"],
    ];
    for number in 0..soak(6) {
        let (migrate, _) = pair.migrate(ways[number % ways.len()])?;
        pair.check_moved(&migrate)?;
        ensure!(migrate.last()["hinted_pages"].as_u64() > Some(0), "{}", migrate.last());
        pair.source = std::mem::replace(
            &mut pair.destination,
            MicroVm::start(&pair.godwit, &[&options[..], &["--incoming"]].concat())?,
        );
    }
    Ok(())
}

#[test]
fn a_second_attempt_finds_what_the_first_one_has_left() -> anyhow::Result<()> {
    // The first attempt is made while all pages that it sends are in use; most are free when the
    // second one is made.
    let options = [CHURN, HINTS, &["--rate", "20000"]].concat();
    let test = "a_second_attempt_finds_what_the_first_one_has_left";
    let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let link = Link::to(&address)?;
    let migrate =
        pair.godwit.migrate(&pair.source, link.address(), &["--max-bandwidth", "10MiB/s"])?;
    await_copying(&migrate)?;
    std::thread::sleep(Duration::from_secs(1));
    link.cut();
    ensure!(migrate.wait(LIMIT)?.status.code() == Some(1));
    receive.wait(LIMIT)?;
    pair.check_untouched()?;
    let left = pair.destination.held()?.0;
    ensure!(left > 4 << 20, "the first attempt left only {left} bytes");
    pair.second_attempt()
}

/// Asks the guest to give `size`, and waits until it has.
fn balloon(pair: &MicroPair, machine: &MicroVm, size: &str, bytes: u64) -> anyhow::Result<()> {
    let socket = machine.control_socket();
    pair.godwit.done(&["microvm", "balloon", &socket.to_string_lossy(), size])?;
    let until = Instant::now() + LIMIT;
    loop {
        let status = machine.ask("status")?["balloon"].take();
        ensure!(status["target_bytes"] == bytes, "{status}");
        if status["given_bytes"] == bytes {
            return Ok(());
        }
        ensure!(Instant::now() < until, "the guest does not give it: {status}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_the_guest_gives_is_given_on_both_sides() -> anyhow::Result<()> {
    // One of the two vCPUs gives, of its half.
    const GIVEN: u64 = 32 << 20;
    let options = [CHURN, HINTS, &["--rate", "2000"]].concat();
    let test = "what_the_guest_gives_is_given_on_both_sides";
    let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
    let before = pair.source.held()?.0;
    balloon(&pair, &pair.source, "32MiB", GIVEN)?;
    let here = pair.source.held()?.0;
    ensure!(before - here >= GIVEN - (1 << 20), "of {before} bytes {here} are still there");
    // Statistics come with the answer after the one that has asked for them.
    std::thread::sleep(Duration::from_millis(500));
    let status = pair.source.ask("status")?["balloon"].take();
    ensure!(status["memory_bytes"] == 48 << 20, "{status}");
    ensure!(status["free_bytes"].as_u64().is_some_and(|free| free < 12 << 20), "{status}");

    let (migrate, _) = pair.migrate(&["--verify"])?;
    pair.check_moved(&migrate)?;
    let there = pair.destination.held()?.0;
    ensure!(there < 72 << 20, "the destination holds {there} bytes");
    let status = pair.destination.ask("status")?["balloon"].take();
    ensure!(status["given_bytes"] == GIVEN && status["target_bytes"] == GIVEN, "{status}");
    // It gets them back, and uses them.
    balloon(&pair, &pair.destination, "0", 0)?;
    pair.destination.await_held(LIMIT, &|held| held.0 >= there + (8 << 20))?;
    let bugs = pair.destination.bugs();
    ensure!(bugs.is_empty(), "{bugs:?}");
    Ok(())
}

#[test]
fn a_balloon_is_not_asked_for_what_is_not_there() -> anyhow::Result<()> {
    let test = "a_balloon_is_not_asked_for_what_is_not_there";
    let Some(with) = MicroPair::start(test, &[CHURN, HINTS].concat())? else { return Ok(()) };
    let Some(without) = MicroPair::start(test, CHURN)? else { return Ok(()) };
    let cases = [
        (&with.source, "1GiB", "the guest has 128MiB, and cannot give 1GiB"),
        (&with.destination, "1MiB", "there is no guest of its own to ask"),
        (&without.source, "1MiB", "start it with --balloon"),
    ];
    for (machine, size, words) in cases {
        let socket = machine.control_socket();
        let output = with.godwit.run(&["microvm", "balloon", &socket.to_string_lossy(), size])?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1) && errors.contains(words), "{errors}");
    }
    Ok(())
}

#[test]
fn reported_pages_are_given_back_and_never_sent() -> anyhow::Result<()> {
    let options = [CHURN, &["--balloon", "reporting"], &["--rate", "500"]].concat();
    let test = "reported_pages_are_given_back_and_never_sent";
    let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
    pair.source.await_held(LIMIT, &|held| held.0 <= 40 << 20)?;
    let (migrate, _) = pair.migrate(&["--verify"])?;
    let here = pair.destination.held()?.0;
    pair.check_moved(&migrate)?;
    ensure!(here < 48 << 20, "the destination holds {here} bytes");
    let sent = migrate.last()["sent_bytes"].as_u64().unwrap_or(u64::MAX);
    ensure!(sent < 48 << 20, "{sent} bytes were sent");
    Ok(())
}

#[test]
fn pages_that_are_given_back_meanwhile_are_discarded_at_the_destination() -> anyhow::Result<()> {
    // So slowly that pages come and go, and are reported, while all of memory is being sent.
    let options = [CHURN, &["--balloon", "reporting"], &["--rate", "2000"]].concat();
    let test = "pages_that_are_given_back_meanwhile_are_discarded_at_the_destination";
    let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
    let (migrate, _) = pair.migrate(&["--max-bandwidth", "5MiB/s", "--compression", "none"])?;
    pair.check_moved(&migrate)?;
    let zero: u64 = migrate.last()["round_list"]
        .as_array()
        .into_iter()
        .flatten()
        .skip(1)
        .filter_map(|round| round["zero_pages"].as_u64())
        .sum();
    ensure!(
        zero > 100,
        "only {zero} pages were discarded after the first round: {}",
        migrate.last()
    );
    Ok(())
}

#[test]
fn a_machine_without_the_balloon_refuses_the_state() -> anyhow::Result<()> {
    let options = [CHURN, HINTS].concat();
    let Some(mut pair) =
        MicroPair::start("a_machine_without_the_balloon_refuses_the_state", &options)?
    else {
        return Ok(());
    };
    pair.destination = MicroVm::start(&pair.godwit, &[CHURN, &["--incoming"]].concat())?;
    let (migrate, _) = pair.migrate(&[])?;
    check_refused(&migrate, 1, &["balloon hints=true reporting=false", "--balloon"])?;
    pair.check_untouched()
}

/// A Linux guest with 512 MiB, of which a process that has ended had 300, and a balloon.
fn linux(build: &godwit_testbed::QemuBuild, balloon: &str) -> VmConfig {
    let work = BuildWork { jobs: 0, past: ByteCount(300 << 20) };
    let guest =
        GuestConfig { memory: ByteCount(512 << 20), build: work, ..GuestConfig::small(Mode::Rate) };
    VmConfig::new(build, guest).booting().with_extra(&["-device", balloon])
}

const REPORTING: &str = "virtio-balloon-pci,free-page-reporting=on";

#[test]
fn what_a_linux_guest_reports_is_neither_sent_nor_held() -> anyhow::Result<()> {
    for build in builds_in_turn_for("what_a_linux_guest_reports_is_neither_sent_nor_held") {
        let mut pair = Pair::start(&linux(&build, REPORTING))?;
        pair.source.await_held(LIMIT, &|held| held.0 <= 280 << 20)?;
        let (migrate, _) = pair.migrate(&["--verify", "--compression", "none"])?;
        let here = pair.destination.held()?.0;
        check_moved(&mut pair, &migrate)?;
        let sent = migrate.last()["sent_bytes"].as_u64().unwrap_or(u64::MAX);
        ensure!(sent < 300 << 20, "{build}: {sent} bytes were sent");
        ensure!(here < 300 << 20, "{build}: the destination holds {here} bytes");
    }
    Ok(())
}

#[test]
fn what_it_reports_while_it_moves_is_discarded() -> anyhow::Result<()> {
    let test = "what_it_reports_while_it_moves_is_discarded";
    let Some(build) = builds_for(test).into_iter().next() else { return Ok(()) };
    let config = linux(&build, REPORTING);
    let destination = TestVm::destination(&config)?;
    let source = TestVm::source(&config)?;
    let mut pair = Pair { source, destination, godwit: Godwit::built()? };
    // It moves from when its process has filled half of its memory. Linux reports what it gets
    // back two seconds after: what was sent by then is a part, whatever else the host does.
    pair.source.await_held(LIMIT, &|held| held.0 >= 200 << 20)?;
    // The guest writes a good part of what that carries.
    let slow = ["--compression", "none", "--max-bandwidth", "60MiB/s", "--downtime-limit", "800ms"];
    let (migrate, _) = pair.migrate(&slow)?;
    check_moved(&mut pair, &migrate)?;
    let rounds = migrate.last()["round_list"].as_array().cloned().unwrap_or_default();
    let zero: u64 = rounds.iter().skip(1).filter_map(|round| round["zero_pages"].as_u64()).sum();
    ensure!(zero >= 512, "only {zero} pages were discarded: {rounds:?}");
    Ok(())
}

#[test]
fn a_plan_says_what_would_make_free_memory_known() -> anyhow::Result<()> {
    let test = "a_plan_says_what_would_make_free_memory_known";
    let Some(build) = builds_for(test).into_iter().next() else { return Ok(()) };
    let small =
        |extra: &[&str]| VmConfig::new(&build, GuestConfig::small(Mode::Idle)).with_extra(extra);
    let cases: [(&[&str], &str); 3] = [
        (&[], "-device virtio-balloon-pci,free-page-reporting=on"),
        (&["-device", "virtio-balloon-pci"], "start it with free-page-reporting=on"),
        (&["-device", REPORTING], ""),
    ];
    for (extra, words) in cases {
        let vm = TestVm::source(&small(extra))?;
        let godwit = Godwit::built()?;
        let output = godwit.run(&["plan", "--vm", &vm.vm_name(), "--for", "200ms", "--json"])?;
        let answer: Value = serde_json::from_slice(&output.stdout)?;
        let advice = answer["advice"].as_str().unwrap_or_default();
        ensure!(
            advice.contains(words) && advice.is_empty() == words.is_empty(),
            "{extra:?}: {answer}"
        );
    }
    Ok(())
}
