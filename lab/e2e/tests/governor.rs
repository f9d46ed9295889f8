//! Guests under the write governor: they arrive exact, a godwit that is killed or cancelled leaves
//! nothing behind, and where a guest cannot be governed its vCPUs are throttled instead.

use anyhow::{Context, ensure};
use godwit_e2e::{
    LIMIT, MicroPair, Pair, Unprivileged, await_copying, check_moved, check_untouched, oldest,
};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Ended, GuestConfig, HugePages, QemuBuild, Running, VmConfig, builds_for, builds_in_turn_for,
};
use godwit_units::ByteCount;
use rustix::process::Signal;
use serde_json::Value;

const GOVERNED: &[&str] = &["--max-bandwidth", "40MiB/s", "--throttle", "governor"];
const ARRIVES: &[&str] = &["--downtime-limit", "200ms", "--verify"];
/// What would never end by itself.
const ENDLESS: &[&str] = &["--downtime-limit", "1ms", "--patience", "0s"];

fn busy(build: &QemuBuild) -> VmConfig {
    VmConfig::new(build, GuestConfig::small(Mode::Full))
}

fn is_governed(line: &Value) -> bool {
    line["dirty_rate_limit"].as_f64() > Some(0.0)
}

/// It was governed, waited, and was never throttled.
fn check_governed(migrate: &Ended) -> anyhow::Result<()> {
    let last = migrate.last();
    ensure!(migrate.lines.iter().any(is_governed), "{last}");
    ensure!(last["write_faults_delayed"].as_u64() > Some(0), "{last}");
    ensure!(last["vcpus_waited_ms"].as_f64() > Some(0.0), "{last}");
    let throttled = |line: &&Value| line["throttle"].as_f64() > Some(0.0);
    ensure!(!migrate.lines.iter().any(|line| throttled(&line)), "{last}");
    Ok(())
}

/// It was said `why` it was not governed, and its vCPUs were throttled.
fn check_fell_back(migrate: &Ended, why: &str) -> anyhow::Result<()> {
    let says = |line: &Value| line["warning"].as_str().is_some_and(|words| words.contains(why));
    ensure!(migrate.lines.iter().any(says), "{}", migrate.last());
    ensure!(
        migrate.lines.iter().any(|line| line["throttle"].as_f64() > Some(0.0)),
        "{}",
        migrate.last()
    );
    ensure!(!migrate.lines.iter().any(is_governed), "{}", migrate.last());
    Ok(())
}

/// A migration that governs its guest by now.
fn governing(pair: &Pair, options: &[&str]) -> anyhow::Result<(Running, Running)> {
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &[GOVERNED, options].concat())?;
    await_copying(&migrate)?;
    migrate.wait_for("a governed guest", LIMIT, is_governed)?;
    Ok((migrate, receive))
}

/// Moves a guest that may arrive when it is slower for being governed, at the earliest after some
/// rounds, each more than the one before: on a busy host it writes too little to feel the first
/// ones.
fn migrate_governed(pair: &Pair, options: &[&str]) -> anyhow::Result<Ended> {
    let name = format!("governed-{}-{}", std::process::id(), pair.source.pid());
    let options = [ENDLESS, &["--verify", "--name", name.as_str()], options].concat();
    let (migrate, receive) = governing(pair, &options)?;
    let round = |line: &Value| line["round"].as_u64();
    let first = migrate.lines().into_iter().find(is_governed);
    let later = first.as_ref().and_then(round).context("a line without its round")? + 5;
    migrate.wait_for("a guest that is governed for rounds", LIMIT, |line| {
        let is_slower = line["guest_speed"].as_f64().is_some_and(|speed| speed < 0.95);
        is_governed(line) && round(line) >= Some(later) && is_slower
    })?;
    pair.godwit.done(&["set", "--migration", &name, "downtime-limit=200ms"])?;
    let migrate = migrate.wait(LIMIT)?;
    ensure!(receive.wait(LIMIT)?.status.success());
    Ok(migrate)
}

#[test]
fn a_busy_guest_is_governed_and_arrives() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_busy_guest_is_governed_and_arrives") {
        let mut pair = Pair::start(&busy(&build))?;
        let migrate = migrate_governed(&pair, &[])?;
        check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
        check_governed(&migrate)?;
    }
    Ok(())
}

#[test]
fn several_vcpus_are_governed() -> anyhow::Result<()> {
    let builds = builds_for("several_vcpus_are_governed");
    let Some(build) = builds.last() else { return Ok(()) };
    let mut pair = Pair::start(&VmConfig { cpus: 2, ..busy(build) })?;
    let migrate = migrate_governed(&pair, &["--channels", "3"])?;
    check_moved(&mut pair, &migrate)?;
    check_governed(&migrate)
}

#[test]
fn a_guest_is_governed_and_let_go_while_it_is_copied() -> anyhow::Result<()> {
    let builds = builds_for("a_guest_is_governed_and_let_go_while_it_is_copied");
    let Some(build) = builds.last() else { return Ok(()) };
    let mut pair = Pair::start(&busy(build))?;
    let name = format!("governed-{}", std::process::id());
    let options = [ENDLESS, &["--verify", "--name", name.as_str()]].concat();
    let (migrate, receive) = governing(&pair, &options)?;
    let set = |setting: &str| -> anyhow::Result<()> {
        pair.godwit.done(&["set", "--migration", name.as_str(), setting]).map(drop)
    };
    for _ in 0..3 {
        set("throttle=off")?;
        let is_let_go = |line: &Value| line["event"] == "progress" && !is_governed(line);
        migrate.wait_for_new("a guest that is let go", LIMIT, is_let_go)?;
        set("throttle=governor")?;
        migrate.wait_for_new("a governed guest", LIMIT, is_governed)?;
    }
    set("downtime-limit=200ms")?;
    let migrate = migrate.wait(LIMIT)?;
    check_moved(&mut pair, &migrate)?;
    ensure!(migrate.last()["verified"] == true, "{}", migrate.last());
    ensure!(receive.wait(LIMIT)?.status.success());
    Ok(())
}

#[test]
fn a_killed_governor_leaves_the_guest_as_it_was() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_killed_governor_leaves_the_guest_as_it_was") {
        let mut pair = Pair::start(&busy(&build))?;
        let (mut migrate, _receive) = governing(&pair, ENDLESS)?;
        migrate.kill();
        check_untouched(&mut pair.source)?;
    }
    Ok(())
}

#[test]
fn a_cancelled_governor_leaves_the_guest_as_it_was() -> anyhow::Result<()> {
    let builds = builds_for("a_cancelled_governor_leaves_the_guest_as_it_was");
    let Some(build) = builds.last() else { return Ok(()) };
    let mut pair = Pair::start(&busy(build))?;
    let (migrate, receive) = governing(&pair, ENDLESS)?;
    migrate.signal(Signal::INT)?;
    ensure!(migrate.wait(LIMIT)?.status.code() == Some(130));
    drop(receive);
    check_untouched(&mut pair.source)
}

#[test]
fn an_unprivileged_qemu_is_governed_by_a_device_that_it_is_handed() -> anyhow::Result<()> {
    let test = "an_unprivileged_qemu_is_governed_by_a_device_that_it_is_handed";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let Some(unprivileged) = Unprivileged::new(test, oldest(&builds)?)? else { return Ok(()) };
    let mut pair = Pair::start(&busy(&unprivileged.build))?;
    let migrate = migrate_governed(&pair, &[])?;
    check_moved(&mut pair, &migrate)?;
    check_governed(&migrate)
}

#[test]
fn where_a_guest_cannot_be_governed_it_is_throttled() -> anyhow::Result<()> {
    let builds = builds_for("where_a_guest_cannot_be_governed_it_is_throttled");
    let Some(build) = builds.last() else { return Ok(()) };
    let mut pair = Pair::start(&busy(build))?;
    let (migrate, _) = pair.migrate(&[GOVERNED, ARRIVES, &["--fingerprints", "off"]].concat())?;
    check_moved(&mut pair, &migrate)?;
    check_fell_back(&migrate, "it needs the page fingerprints")
}

#[test]
fn memory_in_huge_pages_is_not_governed() -> anyhow::Result<()> {
    let test = "memory_in_huge_pages_is_not_governed";
    let builds = builds_for(test);
    let Some(build) = builds.last() else { return Ok(()) };
    let Some(huge) = HugePages::for_test(test, ByteCount(512 << 20)) else { return Ok(()) };
    let mut pair = Pair::start(&busy(build).with_ram_in(huge.dir()))?;
    let options = ["--downtime-limit", "400ms", "--compression", "none", "--verify"];
    let (migrate, _) = pair.migrate(&[GOVERNED, &options].concat())?;
    check_moved(&mut pair, &migrate)?;
    check_fell_back(&migrate, "RAM on hugetlbfs cannot be governed")
}

#[test]
fn a_microvm_that_tracks_by_page_tables_governs_itself() -> anyhow::Result<()> {
    let options =
        ["--memory", "128MiB", "--mode", "full", "--working-set", "64MiB", "--tracker", "pagemap"];
    let test = "a_microvm_that_tracks_by_page_tables_governs_itself";
    let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
    // A guest that shares its processor with another test is no match for a faster link.
    let link = ["--max-bandwidth", "20MiB/s", "--compression", "none", "--throttle", "governor"];
    let (migrate, _) = pair.migrate(&[&link, ARRIVES].concat())?;
    pair.check_moved(&migrate)?;
    check_governed(&migrate)
}
