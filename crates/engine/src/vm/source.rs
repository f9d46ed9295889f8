//! A VM that is to leave this host.

use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_memory::RamBlock;
use godwit_track::DirtyTracker;

use super::{Brake, DirectIo, DiskVm, FreePages, LatePackets, SwitchoverCosts, VmError};
use crate::Interrupt;

/// A VM that is to leave this host. The first ten functions are every VM's; the others have answers
/// that fit a VM without the capability, or one that needs no care.
///
/// ```
/// use godwit_engine::vm::SourceVm;
///
/// /// What it can do beside being moved. A whole adapter is in `examples/embed.rs`.
/// fn abilities(vm: &mut dyn SourceVm) -> [bool; 3] {
///     [vm.brake().is_some(), vm.moving_disks().is_some(), vm.free_pages().is_some()]
/// }
/// ```
pub trait SourceVm {
    /// The kind of machine; its device state is understood by the same kind only.
    fn machine(&self) -> &'static str;

    /// The RAM blocks to copy. Both sides must have the same, in any order.
    fn ram(&self) -> Arc<Vec<RamBlock>>;

    /// Whether the guest ran when the adapter looked first. It is brought back to this.
    fn was_running(&self) -> bool;

    /// Starts tracking writes to the RAM blocks. Tracking ends when the last clone of the tracker
    /// is dropped.
    ///
    /// # Errors
    /// When the machine cannot be tracked; it is then as before.
    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError>;

    /// Opens the stream from which the device state will be read. It may yield bytes from
    /// [`Self::stop`] on, and ends after [`Self::release_state`].
    ///
    /// # Errors
    /// When the machine refuses; the guest runs on.
    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError>;

    /// Stops the guest, which has run on since [`Self::open_state`], perhaps for a while: what may
    /// not have changed meanwhile is checked here. When it returns, no vCPU and no device writes
    /// guest memory any more. Returns when the guest stopped. A throttle holds until then and is
    /// gone afterwards.
    ///
    /// # Errors
    /// When it cannot be stopped; [`Self::resume`] brings it back.
    fn stop(&mut self) -> Result<Instant, VmError>;

    /// Lets the device state flow to its end.
    ///
    /// # Errors
    /// When the machine refuses.
    fn release_state(&mut self) -> Result<(), VmError>;

    /// The same, without waiting for the machine's answer, which [`Self::await_release`] asks for:
    /// more is left to do meanwhile. Nothing but [`Self::has_ended`] is asked in between, and
    /// [`Self::befallen`] of a machine that has; where the migration fails meanwhile,
    /// [`Self::resume`] comes instead.
    ///
    /// # Errors
    /// As [`Self::release_state`].
    fn begin_release(&mut self) -> Result<(), VmError> {
        self.release_state()
    }

    /// Waits for the end of [`Self::begin_release`].
    ///
    /// # Errors
    /// As [`Self::release_state`].
    fn await_release(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Called after the stream has ended: was the state saved completely?
    ///
    /// # Errors
    /// When it was not.
    fn state_saved(&mut self) -> Result<(), VmError>;

    /// Brings the guest back to how it was found, from wherever the calls above had come, and
    /// undoes every setting that they made. The stream of [`Self::open_state`] ends with it at the
    /// latest.
    ///
    /// # Errors
    /// When the guest could not be made to run again.
    fn resume(&mut self) -> Result<(), VmError>;

    /// The guest runs elsewhere: ends the machine, or leaves it stopped for good with `keep`.
    ///
    /// # Errors
    /// When it could not be ended. It never runs the guest again in any case.
    fn retire(&mut self, keep: bool) -> Result<(), VmError>;

    /// Called before all else. An adapter whose calls may take longer than
    /// [`limits::TICK`](crate::limits::TICK), as they do where a process has to answer, keeps
    /// `interrupt`, looks at it within its waits, and ends a call with an error when it is raised;
    /// [`Self::resume`] then brings the guest back from wherever it was.
    fn heed(&mut self, interrupt: &Interrupt) {
        let _ = interrupt;
    }

    /// How the guest is slowed down; `None`, and it never is, where the VMM cannot.
    fn brake(&mut self) -> Option<&mut dyn Brake> {
        None
    }

    /// The disks that move along; `None` where storage is shared.
    fn moving_disks(&mut self) -> Option<&mut dyn DiskVm> {
        None
    }

    /// A guest that can say which of its pages are free while it migrates (virtio-balloon,
    /// VIRTIO_BALLOON_F_FREE_PAGE_HINT).
    fn free_pages(&mut self) -> Option<&mut dyn FreePages> {
        None
    }

    /// Devices that write guest memory by direct I/O: pages are pinned, which the tracker sees as a
    /// write, and data lands later, which it does not see. `None` where there are none.
    fn direct_io(&mut self) -> Option<&mut dyn DirectIo> {
        None
    }

    /// What is sent to the guest's cards while it stands still; `None` where that cannot be had.
    fn late_packets(&mut self) -> Option<&mut dyn LatePackets> {
        None
    }

    /// Whether the machine is known to have ended, and the guest with it. Asked all the time.
    fn has_ended(&self) -> bool {
        false
    }

    /// What has befallen the guest that leaves nothing to be moved, in words and with what to do:
    /// it powered off or panicked, and its machine keeps it so; or it was reset when it stood still
    /// already. Asked several times a second while the guest runs, and once more before COMMIT:
    /// waits for nothing.
    fn befallen(&mut self) -> Option<String> {
        None
    }

    /// Answers what the destination's adapter asks in
    /// [`DestinationVm::compare`](super::DestinationVm::compare), before anything is tracked or
    /// sent; at most [`godwit_wire::ANSWER_LIMIT`] bytes. Changes nothing, and takes no longer than
    /// a few seconds.
    ///
    /// # Errors
    /// When it does not understand the question, or the machine does not tell.
    fn answer(&mut self, question: &[u8]) -> Result<Vec<u8>, VmError> {
        let _ = question;
        Err("this kind of machine answers no questions".into())
    }

    /// Called after the offer was sent, also where it was an inquiry, while the destination looks
    /// at its own machine: what takes long to find out of what [`Self::answer`] will be asked for,
    /// and cannot change any more, can be found out now. Changes nothing, and takes no longer than
    /// `answer` may: a question that has come meanwhile waits. What fails here is for `answer` to
    /// tell.
    fn foresee_questions(&mut self) {}

    /// Whether [`Self::start_tracking`] may be left out where none of the memory is sent before the
    /// guest stands still, as in post-copy at once: nothing else of the machine hangs on it. To say
    /// no is always right, and costs the time that it takes to start tracking.
    fn can_go_untracked(&self) -> bool {
        false
    }

    /// How long a part of the machine was stopped to start the tracking.
    fn tracking_stop(&self) -> Duration {
        Duration::ZERO
    }

    /// What its switchover will probably cost.
    fn switchover_costs(&self) -> SwitchoverCosts {
        SwitchoverCosts::default()
    }

    /// Called right before COMMIT is sent for the first time: from here on nobody may run the guest
    /// here, whatever becomes of this process, until [`Self::resume`] is called, which then means
    /// that the destination has discarded it.
    ///
    /// # Errors
    /// When that could not be made sure of; [`Self::resume`] brings the guest back.
    fn handing_over(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}
