//! A migration that is held at a step, and what can be done to it.
//!
//! Keeps one promise: what a fault has stopped or held back is let go at its end, so that only what
//! it broke is broken.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use fastrand::Rng;
use godwit_testbed::{Harm, MemoryGroup, Proxy, Running, Way};
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::{Rig, Side};

/// From a kill to a guardian that is dead or alive.
const SOON: Duration = Duration::from_secs(5);

/// Less memory than any guest has.
const LITTLE: u64 = 2 << 20;

/// A migration at work, held at a step.
pub struct Scene<'a> {
    /// The two VMs.
    pub rig: &'a mut dyn Rig,
    /// What all connections pass through.
    pub proxy: &'a Proxy,
    /// `godwit migrate`.
    pub migrate: &'a mut Running,
    /// `godwit receive`.
    pub receive: &'a mut Running,
    /// Control groups that somebody was put into.
    pub groups: &'a mut Vec<MemoryGroup>,
    /// What is left to chance.
    pub rng: &'a mut Rng,
}

impl Scene<'_> {
    fn godwit(&mut self, side: Side) -> &mut Running {
        if side == Side::Source { self.migrate } else { self.receive }
    }

    /// Kills godwit on that side, as a crash would.
    pub fn kill(&mut self, side: Side) {
        self.godwit(side).kill();
    }

    /// Sends godwit on that side a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&mut self, side: Side, signal: Signal) -> anyhow::Result<()> {
        self.godwit(side).signal(signal)
    }

    /// Gives godwit on that side no more memory than it has, and a little. Whoever fills a guest's
    /// memory with so little is ended by the kernel, or refuses to go on.
    ///
    /// # Errors
    /// When no control group can be had.
    pub fn take_memory(&mut self, side: Side) -> anyhow::Result<()> {
        let group = MemoryGroup::new(LITTLE)?;
        group.take(self.godwit(side).pid())?;
        self.groups.push(group);
        Ok(())
    }

    /// Kills the guardian on that side; where none is at work yet there is nothing to kill.
    ///
    /// # Errors
    /// When processes cannot be listed.
    pub fn kill_guardian(&mut self, side: Side) -> anyhow::Result<()> {
        match self.rig.guardian(side)? {
            Some(guardian) => Ok(kill_process(guardian, Signal::KILL)?),
            None => Ok(()),
        }
    }

    /// Kills godwit and its guardian on that side, before either can do anything for the other.
    ///
    /// # Errors
    /// When processes cannot be listed.
    pub fn kill_with_guardian(&mut self, side: Side) -> anyhow::Result<()> {
        let guardian = self.rig.guardian(side)?;
        if let Some(guardian) = guardian {
            kill_process(guardian, Signal::STOP)?;
        }
        self.kill(side);
        if let Some(guardian) = guardian {
            kill_process(guardian, Signal::KILL)?;
            let until = Instant::now() + SOON;
            while self.rig.guardian(side)?.is_some() {
                ensure!(Instant::now() < until, "a guardian that was killed stays");
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    }

    /// Sends the VM's process on that side a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal_vm(&mut self, side: Side, signal: Signal) -> anyhow::Result<()> {
        let vm = Pid::from_raw(self.rig.process(side)).context("no process")?;
        kill_process(vm, signal).with_context(|| format!("the VM at the {side} has ended"))
    }

    /// Ends who manages the VM on that side, and starts them again.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn restart_manager(&mut self, side: Side) -> anyhow::Result<()> {
        self.rig.restart_manager(side)
    }

    /// Has the process of that side's godwit stand still for a while.
    ///
    /// # Errors
    /// When it has ended.
    pub fn hang(&mut self, side: Side, time: Duration) -> anyhow::Result<()> {
        self.signal(side, Signal::STOP)?;
        self.pass();
        std::thread::sleep(time);
        self.signal(side, Signal::CONT)
    }

    /// The same with the VM, which answers nothing meanwhile.
    ///
    /// # Errors
    /// When it has ended.
    pub fn hang_vm(&mut self, side: Side, time: Duration) -> anyhow::Result<()> {
        self.signal_vm(side, Signal::STOP)?;
        self.pass();
        std::thread::sleep(time);
        // One whose guest has left may have been ended meanwhile.
        let _ = self.signal_vm(side, Signal::CONT);
        Ok(())
    }

    /// Lets everything pass as it came.
    pub fn pass(&self) {
        self.proxy.release(Harm::None);
    }

    /// Lets everything pass, with harm done to what was held.
    pub fn harm(&self, harm: Harm) {
        self.proxy.release(harm);
    }

    /// Closes the connections of one end only.
    pub fn half_open(&self, closed: Side) {
        let way = if closed == Side::Destination { Way::There } else { Way::Back };
        self.proxy.half_open(way);
    }
}
