//! A pair of microvms, and what it means that their guest has moved or is untouched.

use std::time::Instant;

use anyhow::ensure;
use godwit_testbed::{Ended, Godwit, MicroVm, Movable, kvm_for, shared_by};

use crate::LIMIT;

/// A source with a guest at work and a destination that waits.
#[derive(Debug)]
pub struct MicroPair {
    /// The command.
    pub godwit: Godwit,
    /// Where the guest is.
    pub source: MicroVm,
    /// Where it is to go.
    pub destination: MicroVm,
}

impl MicroPair {
    /// Starts two machines with the same options, or says that `test` is skipped where there is no
    /// KVM.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn start(test: &str, options: &[&str]) -> anyhow::Result<Option<Self>> {
        Self::start_apart(test, options, options)
    }

    /// The same with options of its own for each machine.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn start_apart(
        test: &str,
        source: &[&str],
        destination: &[&str],
    ) -> anyhow::Result<Option<Self>> {
        if !kvm_for(test) {
            return Ok(None);
        }
        let godwit = Godwit::built()?;
        let source = MicroVm::start(&godwit, source)?;
        let destination = MicroVm::start(&godwit, &[destination, &["--incoming"]].concat())?;
        source.wait_ready(LIMIT)?;
        source.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
        Ok(Some(Self { godwit, source, destination }))
    }

    /// Runs both commands to their ends: migrate, receive. Disks that move may be filled.
    ///
    /// # Errors
    /// When one of them does not start or does not end.
    pub fn migrate(&self, options: &[&str]) -> anyhow::Result<(Ended, Ended)> {
        let (receive, address) = self.godwit.receive(&self.destination, shared_by(options))?;
        let migrate = self.godwit.migrate(&self.source, &address, options)?;
        Ok((migrate.wait(LIMIT)?, receive.wait(LIMIT)?))
    }

    /// Checks that the guest runs at the destination, counts on and finds no damage.
    ///
    /// # Errors
    /// What is not as it should be.
    pub fn check_moved(&self, migrate: &Ended) -> anyhow::Result<()> {
        ensure!(migrate.last()["outcome"] == "migrated", "{} {}", migrate.last(), migrate.errors);
        ensure!(migrate.status.success(), "exit status {}", migrate.status);
        // The source may hear of it before the destination has put everything away.
        let passing = ["arriving", "lacks-pages"];
        ensure!(Self::status_after(&passing, &self.destination)? == "running");
        self.destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        let beats = self.source.heartbeats_across(&self.destination);
        ensure!(
            beats.windows(2).all(|pair| pair[1].heartbeat.n == pair[0].heartbeat.n + 1),
            "{beats:?}"
        );
        let bugs = [self.source.bugs(), self.destination.bugs()].concat();
        ensure!(bugs.is_empty(), "{bugs:?}");
        Ok(())
    }

    /// The status of `machine` when it is no longer `passing`.
    fn status_after(passing: &[&str], machine: &MicroVm) -> anyhow::Result<String> {
        let until = Instant::now() + LIMIT;
        loop {
            let status = machine.status()?;
            if !passing.contains(&&*status) || Instant::now() > until {
                return Ok(status);
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Checks that the guest runs at the source as if nothing had been.
    ///
    /// # Errors
    /// What is not as it should be.
    pub fn check_untouched(&self) -> anyhow::Result<()> {
        // The command may have been killed; the engine in the VMM then takes its time to notice.
        let status = Self::status_after(&["leaving"], &self.source)?;
        ensure!(status == "running", "the guest is '{status}'");
        self.source.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        ensure!(self.source.bugs().is_empty(), "{:?}", self.source.bugs());
        Ok(())
    }

    /// Moves it once more, with digests compared.
    ///
    /// # Errors
    /// When that does not come to a good end.
    pub fn second_attempt(&self) -> anyhow::Result<()> {
        let (migrate, _) = self.migrate(&["--verify"])?;
        self.check_moved(&migrate)
    }
}
