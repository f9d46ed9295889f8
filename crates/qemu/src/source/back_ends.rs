//! The back ends of a source's vhost-user devices: tracked beside QEMU, and waited for.
//!
//! What a back end with direct I/O has under way lands after it was seen to be written, and no
//! command waits for a vhost-user device but the guest's stop. So what such a back end has written
//! since tracking began is looked at again when the guest has been stopped. To stop the guest for a
//! moment earlier, so that less is left, was rejected: qemu-storage-daemon breaks its connection
//! now and then when it is stopped with requests under way.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use godwit_memory::RamBlock;
use godwit_track::{PagemapTracker, SharedRamTracker, TrackError};

use super::QemuSource;
use crate::QemuError;
use crate::machine::Machine;
use crate::monitor::QmpError;
use crate::vhost_user::{BackEnd, Front, Queues, Watch};

/// How long the back ends may take to finish, once the guest was stopped.
const IDLE_LIMIT: Duration = Duration::from_secs(5);

/// What a back end takes for a request, where its storage is quick.
const QUIET: Duration = Duration::from_millis(10);
/// No longer than the vCPUs stand still at once.
const QUIET_LIMIT: Duration = Duration::from_millis(90);

/// All back ends of a source.
#[derive(Debug)]
pub(super) struct BackEnds {
    watch: Arc<Watch>,
    queues: Queues,
    /// As long as the engine holds it.
    tracker: Weak<SharedRamTracker>,
    /// Whether one did direct I/O when they were looked at first.
    late: bool,
}

/// The processes of them.
pub(super) fn pids(back_ends: Option<&BackEnds>) -> Vec<i32> {
    let known = back_ends.into_iter().flat_map(|back_ends| back_ends.watch.known());
    known.map(|back_end| back_end.pid).collect()
}

impl BackEnds {
    /// Those of `fronts`, if there are any.
    pub(super) fn look(
        machine: &mut Machine,
        fronts: Vec<Front>,
        ram: &Arc<Vec<RamBlock>>,
    ) -> Result<Option<Self>, QemuError> {
        if fronts.is_empty() {
            return Ok(None);
        }
        let watch = Arc::new(Watch::new(machine.pid, fronts, Arc::clone(ram)));
        let found = watch.look_first()?;
        let queues = Queues::of(machine, watch.fronts())?;
        let late = found.iter().any(BackEnd::lands_late);
        Ok(Some(Self { watch, queues, tracker: Weak::new(), late }))
    }

    /// Looks who they are now, before all other processes are looked at.
    pub(super) fn look_again(&self) -> Result<(), QemuError> {
        self.watch.look().map(drop)
    }

    /// For people.
    pub(super) fn words(&self) -> impl Iterator<Item = String> {
        self.watch.known().into_iter().map(|back_end| back_end.to_string())
    }

    /// Tracks them beside QEMU.
    pub(super) fn track(
        &mut self,
        vmm: Arc<PagemapTracker>,
        ram: &Arc<Vec<RamBlock>>,
    ) -> Result<Arc<SharedRamTracker>, QemuError> {
        let (watch, known) = (Arc::clone(&self.watch), Arc::clone(&self.watch));
        let find = Box::new(move || watch.sharers());
        let tracker = SharedRamTracker::start(vmm, Arc::clone(ram), find);
        let tracker = Arc::new(tracker.map_err(|source| named(&known, source))?);
        self.tracker = Arc::downgrade(&tracker);
        Ok(tracker)
    }

    /// Whether one does direct I/O.
    pub(super) fn land_late(&self) -> bool {
        self.late
    }

    /// Refuses what has changed since the start.
    pub(super) fn check_unchanged(&self) -> Result<(), QemuError> {
        let late = self.tracker.upgrade().is_some_and(|tracker| tracker.lands_late());
        if late && !self.late {
            return Err(QemuError::Changed("a vhost-user back end was switched to direct I/O"));
        }
        Ok(())
    }

    /// Gets ready for the stop of the guest.
    pub(super) fn prepare(&mut self, machine: &mut Machine) -> Result<(), QmpError> {
        // The guest may have set queues up meanwhile.
        self.queues = Queues::of(machine, self.watch.fronts())?;
        Ok(())
    }

    /// With vCPUs that stand still: waits until the back ends have most likely done what they were
    /// given. That they have is checked when the guest was stopped; but one that is stopped with
    /// requests under way may not bear it: qemu-storage-daemon (7.2 and 10.0) closes the queue's
    /// event descriptor at once, fails to signal the first request that is done after that
    /// (`vu_panic` in libvhost-user), and never gives back the others.
    pub(super) fn await_quiet(&self) {
        let began = Instant::now();
        std::thread::sleep(QUIET);
        let waits = |back_end: &BackEnd| back_end.waits_for_storage();
        while self.watch.known().iter().any(waits) && began.elapsed() < QUIET_LIMIT {
            std::thread::sleep(QUIET / 10);
        }
    }

    /// Refuses to hand over memory of which something may not have been seen: a back end has gone,
    /// or has mapped it anew, since it was looked at with the guest stopped.
    pub(super) fn check_intact(&self) -> Result<(), QemuError> {
        match self.tracker.upgrade() {
            Some(tracker) if !tracker.is_intact() => Err(QemuError::Changed(
                "a vhost-user back end went away while the guest stood still",
            )),
            _ => Ok(()),
        }
    }
}

/// The error of a back end, with its name.
fn named(watch: &Watch, source: TrackError) -> QemuError {
    let known = watch.known();
    match known.iter().find(|back_end| Some(back_end.pid) == source.process()) {
        Some(back_end) => QemuError::BackEnd { back_end: back_end.to_string(), source },
        None => source.into(),
    }
}

impl QemuSource {
    /// The guest was stopped: waits until all back ends have finished, and has what landed late
    /// looked at.
    pub(super) fn await_back_ends(&mut self) -> Result<(), QemuError> {
        let Self { back_ends: Some(back_ends), machine, .. } = self else { return Ok(()) };
        let tracker = back_ends.tracker.upgrade();
        let gone = || tracker.as_ref().is_some_and(|tracker| !tracker.is_intact());
        back_ends.queues.await_idle(machine, IDLE_LIMIT, &gone)?;
        match tracker {
            Some(tracker) => {
                tracker.all_landed();
                Ok(())
            }
            None => Ok(()),
        }
    }
}
