//! A guest moved by godwit, timed as QEMU's own migration is: until QEMU says that the guest runs at the destination.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use godwit_testbed::{Ended, Godwit, TestVm};

/// One run of `godwit migrate` and `godwit receive`.
#[derive(Debug)]
pub struct Attempt {
    /// Until the guest ran at the destination, by QEMU's own time stamp, or until `godwit migrate` gave up.
    pub wall: Duration,
    /// Processor time of both commands, by the kernel's account: not godwit's word for it.
    pub cpu: Duration,
    /// What `godwit migrate` said.
    pub migrate: Ended,
    /// What `godwit receive` said, when the guest moved.
    pub receive: Option<Ended>,
}

impl Attempt {
    /// Moves the guest, or tries to, with the options `options` of `godwit migrate`.
    ///
    /// # Errors
    /// When a command cannot be started, or does not end within `limit`.
    pub fn within(
        limit: Duration,
        godwit: &Godwit,
        source: &TestVm,
        destination: &mut TestVm,
        options: &[&str],
    ) -> anyhow::Result<Self> {
        let cpu_before = ended_children()?;
        let (receive, address) = godwit.receive(destination, &[])?;
        destination.qmp().forget_events();
        let began = now()?;
        let migrate = godwit.migrate(source, &address, options)?.wait(limit)?;
        let (end, receive) = if migrate.last()["outcome"] == "migrated" {
            let receive = receive.wait(limit)?;
            (destination.qmp().wait_event("RESUME", limit)?.emitted, Some(receive))
        } else {
            let gave_up = now()?;
            drop(receive);
            (gave_up, None)
        };
        let cpu = ended_children()?.saturating_sub(cpu_before);
        Ok(Self { wall: end.saturating_sub(began), cpu, migrate, receive })
    }

    /// What the two commands said, when the guest moved.
    ///
    /// # Errors
    /// When it did not: what `godwit migrate` said.
    pub fn moved(&self) -> anyhow::Result<(&Ended, &Ended)> {
        let migrate = &self.migrate;
        let words = || format!("godwit migrate: {} {}", migrate.last(), migrate.errors.trim());
        Ok((migrate, self.receive.as_ref().with_context(words)?))
    }
}

fn now() -> anyhow::Result<Duration> {
    SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")
}

/// Processor time of all children of this process that ended and were waited for.
fn ended_children() -> anyhow::Result<Duration> {
    let stat = procfs::process::Process::myself()?.stat()?;
    let ticks = u64::try_from(stat.cutime + stat.cstime).context("negative processor time")?;
    Ok(Duration::from_secs_f64(ticks as f64 / procfs::ticks_per_second() as f64))
}
