//! A guest moved by godwit, timed as QEMU's own migration is: until QEMU says that the guest runs
//! at the destination.

use std::time::{Duration, Instant};

use anyhow::Context;
use godwit_testbed::{
    EmulatedLink, Ended, Godwit, Movable, Running, SlowLink, TestVm, shared_by, wall_clock,
};

/// One run of `godwit migrate` and `godwit receive`.
#[derive(Debug)]
pub struct Attempt {
    /// When it began, by the clock that QEMU stamps its events with.
    pub began: Duration,
    /// Until the guest ran at the destination, by QEMU's own time stamp, or until `godwit migrate`
    /// gave up.
    pub wall: Duration,
    /// Until `godwit migrate` was over.
    pub whole: Duration,
    /// Processor time of both commands, by the kernel's account: not godwit's word for it.
    pub cpu: Duration,
    /// What `godwit migrate` said.
    pub migrate: Ended,
    /// What `godwit receive` said, when the guest moved.
    pub receive: Option<Ended>,
}

/// Where the two commands run.
#[derive(Clone, Copy, Debug, Default)]
pub enum Over<'a> {
    /// Both on this host.
    #[default]
    Loopback,
    /// `godwit receive` at the far end of this link.
    Slow(&'a SlowLink),
    /// Each at an end of this one.
    Emulated(&'a EmulatedLink),
}

/// Where and for how long it may try.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// Over what.
    pub link: Over<'a>,
    /// `godwit migrate` is interrupted after so long; `None`: never.
    pub patience: Option<Duration>,
    /// Each command ends within this.
    pub limit: Duration,
}

impl Attempt {
    /// Moves the guest on this host, or tries to, with the options `options` of `godwit migrate`.
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
        let terms = Terms { link: Over::Loopback, patience: None, limit };
        Self::under(terms, godwit, source, destination, options)
    }

    /// The same under other terms.
    ///
    /// # Errors
    /// As [`Self::within`].
    pub fn under(
        terms: Terms<'_>,
        godwit: &Godwit,
        source: &TestVm,
        destination: &mut TestVm,
        options: &[&str],
    ) -> anyhow::Result<Self> {
        let cpu_before = ended_children()?;
        let disks = shared_by(options);
        let (here, there) = (source.vm_name(), destination.vm_name());
        let (receive, address) = match terms.link {
            Over::Slow(link) => godwit.receive_over(link, destination, disks)?,
            Over::Loopback => godwit.receive(destination, disks)?,
            Over::Emulated(link) => {
                let listen = format!("{}:0", link.far().address());
                link.far().within(|| godwit.receive_named_on(&listen, &there, disks))?
            }
        };
        destination.qmp().forget_events();
        let began = wall_clock();
        let migrate = || godwit.migrate_named(&here, &address, options);
        let migrate = match terms.link {
            Over::Emulated(link) => link.near().within(migrate)?,
            _ => migrate()?,
        };
        if let Some(patience) = terms.patience {
            interrupt_after(patience, &migrate)?;
        }
        let migrate = migrate.wait(terms.limit)?;
        let whole = wall_clock().saturating_sub(began);
        let (end, receive) = if migrate.last()["outcome"] == "migrated" {
            let receive = receive.wait(terms.limit)?;
            (destination.qmp().wait_event("RESUME", terms.limit)?.emitted, Some(receive))
        } else {
            let gave_up = wall_clock();
            drop(receive);
            (gave_up, None)
        };
        let cpu = ended_children()?.saturating_sub(cpu_before);
        Ok(Self { began, wall: end.saturating_sub(began), whole, cpu, migrate, receive })
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

/// Lets it run for so long; then it is cancelled as by Ctrl-C.
fn interrupt_after(patience: Duration, running: &Running) -> anyhow::Result<()> {
    let until = Instant::now() + patience;
    while !running.has_ended() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    if running.has_ended() { Ok(()) } else { running.signal(rustix::process::Signal::INT) }
}

/// Processor time of all children of this process that ended and were waited for.
fn ended_children() -> anyhow::Result<Duration> {
    let stat = procfs::process::Process::myself()?.stat()?;
    let ticks = u64::try_from(stat.cutime + stat.cstime).context("negative processor time")?;
    Ok(Duration::from_secs_f64(ticks as f64 / procfs::ticks_per_second() as f64))
}
