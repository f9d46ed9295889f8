//! `godwit recover`: what is known of a guest whose migration nobody saw the end of, and how an
//! operator settles it.

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{
    LIMIT, Pair, await_alone, await_copying, await_quit, await_words, check_refused,
    check_untouched, ends_with_its_guardian, oldest,
};
use godwit_stamp::settings::Mode;
use godwit_testbed::{Backend, Godwit, GuestConfig, Movable, TestVm, VmConfig, builds_for};
use serde_json::Value;

/// A pair with RAM in files, and one with the QEMU's own.
fn pairs(test: &str) -> anyhow::Result<Vec<Pair>> {
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(Vec::new());
    }
    let config = VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate));
    let own = config.clone().with_backend(Backend::Anonymous);
    [config, own].iter().map(Pair::start).collect()
}

/// What `godwit recover` says, with its exit code.
fn known(godwit: &Godwit, vm: &TestVm) -> anyhow::Result<(String, Option<i32>)> {
    let output = godwit.run(&["recover", "--vm", &vm.vm_name(), "--json"])?;
    let said: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    Ok((said["known"].as_str().unwrap_or_default().to_owned(), output.status.code()))
}

fn check_known(godwit: &Godwit, vm: &TestVm, word: &str, code: i32) -> anyhow::Result<()> {
    let said = known(godwit, vm)?;
    ensure!(said == (word.to_owned(), Some(code)), "{said:?} instead of {word}");
    Ok(())
}

/// Says where the guest is; returns what godwit has against it.
fn settle(godwit: &Godwit, vm: &TestVm, words: &[&str]) -> anyhow::Result<String> {
    let output = godwit.run(&[&["recover", "--vm", &vm.vm_name(), "--guest"], words].concat())?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success() == errors.is_empty(), "{output:?}");
    Ok(errors)
}

/// Has `migrate` killed at `fault`.
fn killed(pair: &Pair, address: &str, fault: &str) -> anyhow::Result<()> {
    let options = ["--fault", fault, "--max-bandwidth", "50MiB/s"];
    let ended = pair.godwit.migrate(&pair.source, address, &options)?.wait(LIMIT)?;
    ensure!(ended.status.signal() == Some(9), "{}", ended.errors);
    Ok(())
}

#[test]
fn a_guest_in_doubt_that_runs_at_the_destination_is_ended_at_the_source() -> anyhow::Result<()> {
    for mut pair in pairs("a_guest_in_doubt_that_runs_at_the_destination_is_ended_at_the_source")? {
        let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        killed(&pair, &address, "kill-after-farewell")?;
        receive.wait(LIMIT)?;

        check_known(&pair.godwit, &pair.source, "in-doubt", 3)?;
        let name = pair.source.vm_name();
        let said = pair.godwit.done(&["status", "--vm", &name])?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        ensure!(said.contains("IN DOUBT") && said.contains("godwit recover"), "{said}");
        // A look does not settle it, and neither does another migration.
        let plan = pair.godwit.run(&["plan", "--vm", &name, "--for", "200ms"])?;
        ensure!(!plan.status.success(), "{plan:?}");
        let again = pair.godwit.migrate(&pair.source, "127.0.0.1:1", &[])?.wait(LIMIT)?;
        check_refused(&again, 1, &["godwit recover --vm VM tells what to do"])?;
        check_known(&pair.godwit, &pair.source, "in-doubt", 3)?;

        check_known(&pair.godwit, &pair.destination, "runs", 0)?;
        let refused = settle(&pair.godwit, &pair.destination, &["there"])?;
        ensure!(refused.contains("does not end this VM without --force"), "{refused}");
        ensure!(settle(&pair.godwit, &pair.source, &["there"])?.is_empty());

        await_quit(&mut pair.source)?;
        pair.destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        ensure!(pair.destination.bugs().is_empty(), "{:?}", pair.destination.bugs());
    }
    Ok(())
}

#[test]
fn a_guest_in_doubt_that_never_came_to_the_destination_runs_on_at_the_source() -> anyhow::Result<()>
{
    let test = "a_guest_in_doubt_that_never_came_to_the_destination_runs_on_at_the_source";
    for mut pair in pairs(test)? {
        let (mut receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        killed(&pair, &address, "kill-before-commit")?;

        check_known(&pair.godwit, &pair.source, "in-doubt", 3)?;
        // It waits for the source; whoever ends it makes sure that the guest never comes.
        let busy = pair.godwit.run(&["recover", "--vm", &pair.destination.vm_name()])?;
        let said = String::from_utf8_lossy(&busy.stderr).into_owned();
        ensure!(said.contains("(godwit receive) is at work at the monitor"), "{said}");
        receive.kill();
        await_quit(&mut pair.destination)?;
        let gone = pair.godwit.run(&["recover", "--vm", &pair.destination.vm_name()])?;
        let said = String::from_utf8_lossy(&gone.stdout).into_owned();
        ensure!(gone.status.success() && said.contains("there is no VM"), "{gone:?}");

        ensure!(settle(&pair.godwit, &pair.source, &["here"])?.is_empty());
        check_untouched(&mut pair.source)?;
        check_known(&pair.godwit, &pair.source, "runs", 0)?;
        // And it moves as if nothing had been.
        pair.destination = TestVm::destination(pair.destination.config())?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        ensure!(migrate.last()["verified"] == true, "{}", migrate.last());
    }
    Ok(())
}

#[test]
fn a_guest_whose_godwit_and_guardian_were_killed_is_this_sides() -> anyhow::Result<()> {
    for mut pair in pairs("a_guest_whose_godwit_and_guardian_were_killed_is_this_sides")? {
        let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        let options = ["--fault", "kill-after-stop", "--max-bandwidth", "50MiB/s"];
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
        await_copying(&migrate)?;
        let ended = ends_with_its_guardian(&pair.source, migrate)?;
        ensure!(ended.status.signal() == Some(9), "{}", ended.errors);

        check_known(&pair.godwit, &pair.source, "stopped", 3)?;
        let refused = settle(&pair.godwit, &pair.source, &["there"])?;
        ensure!(refused.contains("without --force"), "{refused}");
        ensure!(settle(&pair.godwit, &pair.source, &["here"])?.is_empty());
        check_untouched(&mut pair.source)?;
    }
    Ok(())
}

/// Pauses the guest at the source, before a destination that has just begun.
fn pause(pair: &mut Pair) -> anyhow::Result<()> {
    if pair.source.status()? != "running" {
        pair.source.resume()?;
        pair.destination = TestVm::destination(pair.source.config())?;
    }
    pair.source.pause()?;
    ensure!(pair.source.status()? == "paused");
    Ok(())
}

#[test]
fn a_paused_guest_that_stays_postmigrate_is_told_of() -> anyhow::Result<()> {
    const TOLD: &str = "QEMU calls it 'postmigrate' instead of 'paused'";
    let builds = builds_for("a_paused_guest_that_stays_postmigrate_is_told_of");
    if builds.is_empty() {
        return Ok(());
    }
    // With memory of QEMU's own it stays `paused`: the devices are not saved by a migration of
    // QEMU's that comes to its end.
    let mut pair = Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate)))?;

    // By `migrate`, whose destination fails.
    pause(&mut pair)?;
    let (_receive, address) =
        pair.godwit.receive(&pair.destination, &["--fault", "kill-after-load"])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &[])?.wait(LIMIT)?;
    ensure!(migrate.last()["guest"] == "source", "{}", migrate.last());
    ensure!(migrate.errors.contains(TOLD), "{}", migrate.errors);
    ensure!(pair.source.status()? == "postmigrate");

    // By the guardian of one that is killed.
    pause(&mut pair)?;
    let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &["--fault", "kill-after-ready"])?;
    await_words(&migrate, TOLD)?;
    await_alone(&pair.source)?;
    ensure!(pair.source.status()? == "postmigrate");

    // By `recover`, of one that is in doubt.
    pause(&mut pair)?;
    let (mut receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    killed(&pair, &address, "kill-before-commit")?;
    receive.kill();
    await_quit(&mut pair.destination)?;
    let name = pair.source.vm_name();
    let words = ["recover", "--vm", &name, "--guest", "here", "--json"];
    let settled = pair.godwit.done(&words)?;
    let said: Value = serde_json::from_slice(&settled.stdout)?;
    ensure!(said["remark"].as_str().is_some_and(|it| it.contains(TOLD)), "{said}");
    ensure!(pair.source.status()? == "postmigrate");

    pair.source.resume()?;
    check_untouched(&mut pair.source)
}

#[test]
fn a_guest_that_did_not_come_whole_is_never_run() -> anyhow::Result<()> {
    for mut pair in pairs("a_guest_that_did_not_come_whole_is_never_run")? {
        let (receive, address) =
            pair.godwit.receive(&pair.destination, &["--fault", "kill-after-load"])?;
        let migrate = pair.godwit.migrate(&pair.source, &address, &[])?;
        await_copying(&migrate)?;
        let ended = ends_with_its_guardian(&pair.destination, receive)?;
        ensure!(ended.status.signal() == Some(9), "{}", ended.errors);
        let migrate = migrate.wait(LIMIT)?;
        ensure!(migrate.last()["guest"] == "source", "{}", migrate.last());
        check_untouched(&mut pair.source)?;

        check_known(&pair.godwit, &pair.destination, "never-came", 0)?;
        let refused = settle(&pair.godwit, &pair.destination, &["here", "--force"])?;
        ensure!(refused.contains("it is the other side's"), "{refused}");
        std::thread::sleep(Duration::from_millis(200));
        ensure!(pair.destination.status()? != "running");
        ensure!(settle(&pair.godwit, &pair.destination, &["there"])?.is_empty());
        await_quit(&mut pair.destination)?;
    }
    Ok(())
}
