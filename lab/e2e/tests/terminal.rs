//! What people see: on a terminal of 80 columns nothing wraps, and progress is rewritten in its
//! line.

use anyhow::ensure;
use godwit_e2e::{MicroPair, Terminal};
use godwit_testbed::{Godwit, Movable};

const NARROW: u16 = 80;
const SMALL: &[&str] = &["--memory", "128MiB", "--mode", "rate", "--working-set", "16MiB"];

#[test]
fn a_migration_on_a_narrow_terminal() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("a_migration_on_a_narrow_terminal", SMALL)? else {
        return Ok(());
    };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let vm = pair.source.vm_name();
    let name = format!("narrow-{}", std::process::id());
    let migrate = Terminal::start(
        &pair.godwit,
        NARROW,
        &[
            "migrate",
            "--vm",
            &vm,
            "--to",
            &address,
            "--name",
            &name,
            "--max-bandwidth",
            "320Mbit",
            "--verify",
        ],
    )?;
    // What is asked and changed meanwhile, as another person at another terminal does.
    let ask = |words: &[&str]| {
        Terminal::run(&pair.godwit, NARROW, &[words, &["--migration", &name]].concat())
    };
    receive.wait_for("accepted", godwit_e2e::LIMIT, |line| line["event"] == "accepted")?;
    let status = ask(&["status"])?;
    status.check_fits()?;
    status.check_says(&[
        &format!("migration {name} of {vm} to {address}"),
        "max-bandwidth 320Mbit (38.1MiB/s)",
    ])?;
    let set = ask(&["set", "max-bandwidth=640Mbit", "downtime-limit=200ms"])?;
    set.check_fits()?;
    set.check_says(&[&address, "now max-bandwidth=640Mbit (76.3MiB/s), downtime-limit=200ms"])?;
    let wrong = ask(&["set", "max-bandwidth=1G"])?;
    wrong.check_says(&["'1G' is ambiguous: write 1Gbit (119MiB/s) or 1GiB/s (8.59Gbit)"])?;
    ensure!(wrong.status.code() == Some(1), "{}", wrong.status);

    let screen = migrate.wait()?;
    receive.wait(godwit_e2e::LIMIT)?;
    ensure!(screen.status.success(), "{}", screen.text);
    screen.check_fits()?;
    ensure!(screen.rewritten() >= 5, "{}: {:?}", screen.rewritten(), screen.text);
    // A heading, a line for each round and one for the handover, and the result; not one for each
    // look.
    let lines = screen.lines();
    let rows = lines.iter().filter(|line| line.contains(" round ")).count();
    ensure!(rows < screen.rewritten(), "{rows} of {}: {lines:#?}", screen.rewritten());
    ensure!(lines[0].starts_with("  time  stage") && lines.len() < rows + 20, "{lines:#?}");
    screen
        .check_says(&["migrated set-up", "verified yes: digests of all 128MiB equal on both sides"])
}

#[test]
fn a_cancelled_migration_says_so_to_both() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("a_cancelled_migration_says_so_to_both", SMALL)? else {
        return Ok(());
    };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let name = format!("cancelled-{}", std::process::id());
    let slow = ["--name", &name, "--max-bandwidth", "10Mbit"];
    let migrate = pair.godwit.migrate(&pair.source, &address, &slow)?;
    receive.wait_for("accepted", godwit_e2e::LIMIT, |line| line["event"] == "accepted")?;
    let cancel = Terminal::run(&pair.godwit, NARROW, &["cancel", "--migration", &name])?;
    cancel.check_fits()?;
    cancel.check_says(&[
        &name,
        &pair.source.vm_name(),
        "is being cancelled; the guest stays where it is",
    ])?;
    ensure!(migrate.wait(godwit_e2e::LIMIT)?.status.code() == Some(130));
    receive.wait(godwit_e2e::LIMIT)?;
    pair.check_untouched()
}

#[test]
fn what_is_printed_fits_80_columns() -> anyhow::Result<()> {
    let godwit = Godwit::built()?;
    for arguments in [
        &["simulate", "--list"][..],
        &["simulate", "--scenario", "busy"],
        &["simulate", "--scenario", "disk-share"],
        &["simulate", "--scenario", "idle", "--sweep", "throttle"],
        &["--help"],
        &["migrate", "--help"],
        &["status"],
    ] {
        let screen = Terminal::run(&godwit, NARROW, arguments)?;
        screen.check_fits()?;
        ensure!(screen.status.success(), "{arguments:?}: {}", screen.text);
    }
    let wide = Terminal::run(&godwit, 120, &["simulate", "--scenario", "disk-share"])?;
    wide.check_says(&["memory share"])
}

#[test]
fn a_plan_for_a_quiet_guest_is_a_sentence() -> anyhow::Result<()> {
    let idle = ["--memory", "64MiB", "--mode", "idle"];
    let Some(pair) = MicroPair::start("a_plan_for_a_quiet_guest_is_a_sentence", &idle)? else {
        return Ok(());
    };
    let vm = pair.source.vm_name();
    let plan = Terminal::run(&pair.godwit, NARROW, &["plan", "--vm", &vm, "--for", "500ms"])?;
    plan.check_fits()?;
    plan.check_says(&[
        "over a link of 1Gbit (119MiB/s): ",
        "the guest never slowed; no setting makes a difference",
        "governor ",
    ])?;
    ensure!(plan.lines().len() < 20, "{}", plan.text);
    Ok(())
}

#[test]
fn a_long_benchmark_shows_that_it_goes_on() -> anyhow::Result<()> {
    // Nothing was shown for a minute and more.
    let words = ["--synthetic", "2:1", "1MiB", "--runs", "2", "--quick"];
    let screen = Terminal::run(&Godwit::built()?.beside("godwit-codecs"), NARROW, &words)?;
    ensure!(screen.status.success(), "{}", screen.text);
    screen.check_fits()?;
    for pass in ["pass 1 of 2: lz4", "pass 2 of 2: lz4"] {
        ensure!(screen.text.contains(pass), "'{pass}' is not in: {:?}", screen.text);
    }
    // The line goes when the table comes, which is judged by nobody's targets.
    ensure!(screen.lines().iter().all(|line| !line.contains("pass 1 of")), "{:#?}", screen.lines());
    ensure!(!screen.text.contains("target"), "{:?}", screen.text);
    Ok(())
}
