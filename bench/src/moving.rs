//! A guest moved by godwit, timed as QEMU's own migration is: until QEMU says that the guest runs at the destination.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use godwit_testbed::{Ended, Godwit, TestVm};

/// Moves the guest with the options `options` of `godwit migrate`; the time it took, by QEMU's own time stamp at the end, and what the two commands
/// said.
///
/// # Errors
/// When the guest does not move within `limit`.
pub fn by_godwit_within(
    limit: Duration,
    godwit: &Godwit,
    source: &TestVm,
    destination: &mut TestVm,
    options: &[&str],
) -> anyhow::Result<(Duration, Ended, Ended)> {
    let (receive, address) = godwit.receive(destination, &[])?;
    destination.qmp().forget_events();
    let started = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    let migrate = godwit.migrate(source, &address, options)?.wait(limit)?;
    let last = migrate.last();
    ensure!(last["outcome"] == "migrated", "godwit migrate: {last} {}", migrate.errors.trim());
    let receive = receive.wait(limit)?;
    let running = destination.qmp().wait_event("RESUME", limit)?;
    Ok((running.emitted.saturating_sub(started), migrate, receive))
}
