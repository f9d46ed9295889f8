//! A host that has no thread left when a migration fails: the guest is brought back all the same.

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, Pair, await_copying, check_untouched, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{GuestConfig, VmConfig, builds_for};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

/// Less than the stack of a thread.
const ROOM: u64 = 1 << 20;

#[test]
fn a_migration_that_can_start_no_thread_still_ends_well() -> anyhow::Result<()> {
    let builds = builds_for("a_migration_that_can_start_no_thread_still_ends_well");
    if builds.is_empty() {
        return Ok(());
    }
    let mut pair = Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate)))?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &["--max-bandwidth", "20MiB/s"])?;
    await_copying(&migrate)?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", migrate.pid()))?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).context("no VmSize")?;
    let size: u64 = size.trim().trim_end_matches("kB").trim().parse()?;

    // Root has no limit of threads, but a stack needs address space.
    let limit = Rlimit { current: Some((size << 10) + ROOM), maximum: None };
    prlimit(Pid::from_raw(migrate.pid()), Resource::As, limit)?;
    migrate.signal(Signal::INT)?;

    let migrate = migrate.wait(LIMIT)?;
    ensure!(migrate.status.code() == Some(130), "{}: {}", migrate.status, migrate.errors);
    check_untouched(&mut pair.source)?;
    let receive = receive.wait(LIMIT)?;
    ensure!(receive.errors.contains("the source gave up: cancelled"), "{}", receive.errors);
    Ok(())
}
