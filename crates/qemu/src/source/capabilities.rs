//! What a QEMU can do beside being moved: its guest is slowed down, its disks move along, and its
//! direct I/O is waited for.

use std::time::Duration;

use godwit_disk::{Disk, DiskReader, DiskRound};
use godwit_engine::vm::{Brake, DirectIo, DiskVm, VmError};
use godwit_track::GovernorMeasures;
use godwit_units::{ByteCount, Rate};
use godwit_vcpu_throttle::vcpu_time;

use super::QemuSource;
use crate::QemuError;
use crate::disks::{self, Tracking};
use crate::governor;
use crate::monitor::commands::Transaction;

impl Brake for QemuSource {
    fn throttle(&mut self, share: f64) -> Result<(), VmError> {
        if share == 0.0 {
            // Not by way of the monitor, which may be what has failed.
            return Ok(self.throttle.set(share)?);
        }
        // vCPUs may have been plugged or unplugged.
        match self.machine.vcpu_threads() {
            Ok(threads) => self.vcpus = threads,
            Err(error) => {
                self.remove_throttle();
                return Err(QemuError::from(error).into());
            }
        }
        self.throttle.set_threads(&self.vcpus)?;
        Ok(self.throttle.set(share)?)
    }

    fn cannot_govern(&self) -> Option<String> {
        governor::refusal(self.machine.pid, self.offered())
    }

    fn govern(&mut self, dirty_rate_limit: Option<f64>) -> Result<(), VmError> {
        let Some(tracker) = self.tracker.upgrade() else { return Ok(()) };
        if dirty_rate_limit.is_some() {
            self.vcpus = self.machine.vcpu_threads()?;
            governor::prepare(&mut self.machine, &tracker, &self.vcpus)?;
        }
        Ok(tracker.govern(dirty_rate_limit)?)
    }

    fn governor_measures(&self) -> GovernorMeasures {
        self.tracker.upgrade().map_or(self.governed, |tracker| tracker.governor_measures())
    }

    fn vcpu_time(&self) -> Option<Duration> {
        let mut threads = self.vcpus.clone();
        threads.sort_unstable();
        threads.dedup();
        vcpu_time(self.machine.pid, &threads)
    }

    fn vcpus(&self) -> usize {
        self.vcpus.len()
    }
}

impl DiskVm for QemuSource {
    fn limit_disks(&mut self, limits: &[Rate]) -> Result<(), VmError> {
        if limits.is_empty() {
            return Ok(self.lift_disk_limits()?);
        }
        let nodes = self.moving.iter().map(|found| found.node.as_str());
        let limits: Vec<(&str, Rate)> = nodes.zip(limits.iter().copied()).collect();
        self.disk_limits.plan(&mut *self.machine.qmp, &limits)?;
        let planned = self.disk_limits.clone();
        self.note(|left| left.limits = planned)?;
        Ok(self.disk_limits.apply(&mut *self.machine.qmp)?)
    }

    fn disks(&self) -> Vec<Disk> {
        self.moving
            .iter()
            .map(|found| Disk { name: found.name.clone(), size: found.size })
            .collect()
    }

    fn start_disk_tracking(&mut self) -> Result<(), VmError> {
        if !self.moving.is_empty() {
            self.note(|left| left.disks = true)?;
            self.tracking =
                Some(Tracking::start(&mut self.machine, &self.moving, &self.granularity)?);
        }
        Ok(())
    }

    fn disk_granularity(&self) -> Vec<ByteCount> {
        self.tracking.as_ref().map_or_else(Vec::new, Tracking::granularity)
    }

    fn begin_disk_round(&mut self) -> Result<Vec<Box<dyn DiskRound>>, VmError> {
        if self.moving.is_empty() {
            return Ok(Vec::new());
        }
        let (tracking, qmp) = self.tracking()?;
        Ok(tracking.round(qmp)?)
    }

    fn read_disks(&mut self) -> Result<Vec<Box<dyn DiskReader>>, VmError> {
        self.tracking.as_ref().map_or(Ok(Vec::new()), |tracking| Ok(tracking.read()?))
    }

    fn disk_progress(&mut self) -> Result<(), VmError> {
        match &mut self.tracking {
            Some(tracking) => Ok(tracking.progress(&mut *self.machine.qmp)?),
            None => Ok(()),
        }
    }

    fn dirty_disks(&mut self) -> Result<Vec<ByteCount>, VmError> {
        if self.moving.is_empty() {
            return Ok(Vec::new());
        }
        let (tracking, qmp) = self.tracking()?;
        Ok(tracking.dirty(qmp)?)
    }

    fn disk_writes(&mut self) -> Option<Vec<ByteCount>> {
        if self.moving.is_empty() {
            return None;
        }
        disks::written(&mut *self.machine.qmp, &self.moving).ok()
    }
}

impl DirectIo for QemuSource {
    fn drain(&mut self) -> Result<(), VmError> {
        if self.direct_io {
            // Any transaction, an empty one too, begins by draining all block devices
            // (qmp_transaction in blockdev.c).
            self.machine.qmp.run(&Transaction::default())?;
        }
        // Back ends are waited for when the guest has been stopped.
        Ok(())
    }
}
