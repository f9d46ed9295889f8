//! What the engine needs of a machine: two traits, implemented by the adapters.
//!
//! The engine calls them in the order of the state machines and never from two threads at once.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_balloon::FreeHints;
use godwit_block::{Disk, DiskChoice, DiskRound, DiskSink};
use godwit_memory::RamBlock;
use godwit_track::{DirtyTracker, GovernorMeasures};
use godwit_units::{ByteCount, Rate};

/// An adapter's error; the adapter's words say what to do.
pub type VmError = Box<dyn std::error::Error + Send + Sync>;

/// What a switchover costs beside what the engine measures itself, as far as a machine can tell beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchoverCosts {
    /// From the call of [`SourceVm::stop`] until the guest stands still.
    pub lead: Duration,
    /// Saving the device state, loading it, and running the guest.
    pub state: Duration,
}

impl Default for SwitchoverCosts {
    /// What is usual.
    fn default() -> Self {
        Self { lead: Duration::from_millis(10), state: Duration::from_millis(15) }
    }
}

/// Has a question of the destination's adapter answered by the source's.
pub type Ask<'a> = dyn FnMut(&[u8]) -> Result<Vec<u8>, VmError> + 'a;

/// A VM that is to leave this host.
pub trait SourceVm {
    /// The kind of machine; its device state is understood by the same kind only.
    fn machine(&self) -> &'static str;

    /// The RAM blocks to copy. Both sides must have the same, in any order.
    fn ram(&self) -> Arc<Vec<RamBlock>>;

    /// Whether the guest ran when the adapter looked first. It is brought back to this.
    fn was_running(&self) -> bool;

    /// Whether the machine is known to have ended, and the guest with it. Asked all the time.
    fn has_ended(&self) -> bool {
        false
    }

    /// What has befallen the guest that leaves nothing to be moved, in words and with what to do: it
    /// powered off or panicked, and its machine keeps it so; or it was reset when it stood still
    /// already. Asked several times a second while the guest runs, and once more before COMMIT: waits
    /// for nothing.
    fn befallen(&mut self) -> Option<String> {
        None
    }

    /// Answers what the destination's adapter asks in [`DestinationVm::compare`], before anything is tracked or sent; at most
    /// [`godwit_wire::ANSWER_LIMIT`] bytes. Changes nothing, and takes no longer than a few seconds.
    ///
    /// # Errors
    /// When it does not understand the question, or the machine does not tell.
    fn answer(&mut self, question: &[u8]) -> Result<Vec<u8>, VmError> {
        let _ = question;
        Err("this kind of machine answers no questions".into())
    }

    /// Starts tracking writes to the RAM blocks. Tracking ends when the last clone of the tracker is dropped.
    ///
    /// # Errors
    /// When the machine cannot be tracked; it is then as before.
    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError>;

    /// Whether the guest can say which of its pages are free while it migrates (virtio-balloon, VIRTIO_BALLOON_F_FREE_PAGE_HINT).
    fn hints_free_pages(&self) -> bool {
        false
    }

    /// Asks the guest to hint free pages, from now on, to `hints`. Only called after [`Self::start_tracking`]: no hint may be older than the
    /// tracking. Returns whether the guest takes part.
    fn start_free_page_hints(&mut self, hints: &Arc<FreeHints>) -> bool {
        let _ = hints;
        false
    }

    /// Hints are of no use any more. The guest should keep the pages to itself, as they are still left out. [`Self::stop`], [`Self::resume`] and
    /// [`Self::retire`] end that, too.
    fn stop_free_page_hints(&mut self) {}

    /// How long a part of the machine was stopped to start the tracking.
    fn tracking_stop(&self) -> Duration;

    /// Keeps the vCPUs from running for `share` of the time (0.0 to 0.99), from now on and until the guest is stopped;
    /// 0.0 removes the throttle. [`Self::resume`], [`Self::retire`] and the end of the adapter remove it, too, and so does
    /// the end of this process, however it comes.
    ///
    /// # Errors
    /// When it is no share: nothing changes. When the vCPUs cannot be throttled, or have not been since some moment after
    /// the last call: the guest runs at full speed.
    fn throttle(&mut self, share: f64) -> Result<(), VmError>;

    /// Whether the guest can be governed: `None` if it can, else why not, in one line. Asks without touching the machine.
    fn cannot_govern(&self) -> Option<String> {
        Some("this kind of machine has no write governor".to_owned())
    }

    /// Lets the guest make `first_writes` clean pages dirty each second, in segments that are harvested from now on, until the
    /// guest is stopped; `None` lets it write freely. [`Self::resume`], [`Self::retire`] and the end of the adapter let it write
    /// freely, too, and so does the end of this process, however it comes. A segment is reported as dirty as a whole
    /// when it changes hands, which the ledger makes good.
    ///
    /// # Errors
    /// When it cannot be governed, or has not been in full since some moment after the last call: the guest writes freely.
    fn govern(&mut self, first_writes: Option<f64>) -> Result<(), VmError> {
        match (first_writes, self.cannot_govern()) {
            (Some(_), Some(why)) => Err(why.into()),
            _ => Ok(()),
        }
    }

    /// What the governor did so far.
    fn governor_measures(&self) -> GovernorMeasures {
        GovernorMeasures::default()
    }

    /// Limits what the guest may write to each of [`Self::disks`], in their order; other disks are
    /// left alone. Empty: lifts all limits. [`Self::resume`] and [`Self::retire`] lift them, too.
    ///
    /// # Errors
    /// When the machine refuses.
    fn limit_disks(&mut self, limits: &[Rate]) -> Result<(), VmError>;

    /// The disks that are to move along, in the order in which all calls below have them; empty where storage is shared.
    fn disks(&self) -> Vec<Disk> {
        Vec::new()
    }

    /// Starts tracking the guest's writes to the disks, in blocks of [`Self::disk_granularity`]. [`Self::resume`] and [`Self::retire`] end it
    /// and remove whatever it left in the machine.
    ///
    /// # Errors
    /// When the machine refuses; it is then as before.
    fn start_disk_tracking(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// The granularity of each disk, from [`Self::start_disk_tracking`] on.
    fn disk_granularity(&self) -> Vec<ByteCount> {
        Vec::new()
    }

    /// Begins a round for all disks in one moment. In the first one a disk is dirty wherever it is not known to be zero, in each other
    /// one where the guest wrote since the last call. May be called with the guest running or after [`Self::stop`]. The rounds of the
    /// call before must have been dropped.
    ///
    /// # Errors
    /// When the machine refuses.
    fn begin_disk_round(&mut self) -> Result<Vec<Box<dyn DiskRound>>, VmError> {
        Ok(Vec::new())
    }

    /// While the first round of the disks is under way, from time to time (a second or so): lets the adapter tell apart writes ahead of
    /// what the round has asked for, which the round will still read, from those behind it, which are the next round's. An adapter
    /// that does so leaves the former out of the next round; so the first round must be taken to its end. It knows the point
    /// itself, from its [`DiskRound`]s: it must be looked at after the writes were divided.
    ///
    /// # Errors
    /// When the machine refuses.
    fn disk_progress(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Bytes of each disk written since the last round began, in whole dirty blocks. Clears nothing.
    ///
    /// # Errors
    /// When the machine refuses.
    fn dirty_disks(&mut self) -> Result<Vec<ByteCount>, VmError> {
        Ok(Vec::new())
    }

    /// Bytes that the guest has written to each of these disks since it was opened, if that is known.
    fn disk_writes(&mut self) -> Option<Vec<ByteCount>> {
        None
    }

    /// The CPU time that all vCPUs together have consumed since they were started; `None` where it is not known. It may
    /// lag by a tick of the host's clock, and falls when a vCPU is unplugged.
    fn vcpu_time(&self) -> Option<Duration>;

    /// How many vCPUs there are.
    fn vcpus(&self) -> usize;

    /// Whether devices write guest memory by direct I/O: pages are pinned, which the tracker sees as a write, and data lands
    /// later, which it does not see.
    fn direct_io(&self) -> bool;

    /// Waits until all direct I/O has landed that was in flight when this was called. Only called where there is such.
    ///
    /// # Errors
    /// When the machine refuses.
    fn drain(&mut self) -> Result<(), VmError>;

    /// What its switchover will probably cost.
    fn switchover_costs(&self) -> SwitchoverCosts {
        SwitchoverCosts::default()
    }

    /// Opens the stream from which the device state will be read. It may yield bytes from [`Self::stop`] on, and ends
    /// after [`Self::release_state`].
    ///
    /// # Errors
    /// When the machine refuses; the guest runs on.
    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError>;

    /// Stops the guest, which has run on since [`Self::open_state`], perhaps for a while: what may not
    /// have changed meanwhile is checked here. When it returns, no vCPU and no device writes guest
    /// memory any more. Returns when the guest stopped. A throttle holds until then and is gone
    /// afterwards.
    ///
    /// # Errors
    /// When it cannot be stopped; [`Self::resume`] brings it back.
    fn stop(&mut self) -> Result<Instant, VmError>;

    /// Lets the device state flow to its end.
    ///
    /// # Errors
    /// When the machine refuses.
    fn release_state(&mut self) -> Result<(), VmError>;

    /// Called after the stream has ended: was the state saved completely?
    ///
    /// # Errors
    /// When it was not.
    fn state_saved(&mut self) -> Result<(), VmError>;

    /// Called right before COMMIT is sent for the first time: from here on nobody may run the guest here, whatever becomes
    /// of this process, until [`Self::resume`] is called, which then means that the destination has discarded it.
    ///
    /// # Errors
    /// When that could not be made sure of; [`Self::resume`] brings the guest back.
    fn handing_over(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Brings the guest back to how it was found, from wherever the calls above had come, and undoes every setting
    /// that they made. The stream of [`Self::open_state`] ends with it at the latest.
    ///
    /// # Errors
    /// When the guest could not be made to run again.
    fn resume(&mut self) -> Result<(), VmError>;

    /// The guest runs elsewhere: ends the machine, or leaves it stopped for good with `keep`.
    ///
    /// # Errors
    /// When it could not be ended. It never runs the guest again in any case.
    fn retire(&mut self, keep: bool) -> Result<(), VmError>;
}

/// A VM that waits to take a guest in.
pub trait DestinationVm {
    /// The kind of machine.
    fn machine(&self) -> &'static str;

    /// The RAM blocks to fill.
    fn ram(&self) -> Arc<Vec<RamBlock>>;

    /// Compares the machine that the source offers with this one, as far as that shows beforehand. `ask` has a question answered by
    /// the source's adapter ([`SourceVm::answer`]), whose words are a stranger's: they are checked before they are used. Comes before anything
    /// else is done; changes nothing, so that the machine can go on waiting for another source.
    ///
    /// # Errors
    /// When they differ: all differences and their cures, in one line.
    fn compare(&mut self, ask: &mut Ask<'_>) -> Result<(), VmError> {
        let _ = ask;
        Ok(())
    }

    /// The process in which the guest will run, whose control group has to hold its memory. Without an answer of its own: this one.
    fn pid(&self) -> u32 {
        std::process::id()
    }

    /// Whether the machine is known to have ended, so that the guest runs here neither now nor later. Asked all the time
    /// until [`Self::run`].
    fn has_ended(&self) -> bool {
        false
    }

    /// Opens the disks that the source wants to send, in its order. Only those that `allowed` names may be opened, by whatever
    /// name it has for them ([`DiskChoice::allow`]): anybody who reaches the port can ask for any.
    /// Rounds come also after [`Self::prepare`], and [`Self::close_disks`] behind the last of them. [`Self::discard`] closes them as well; the sinks have been dropped by then.
    ///
    /// # Errors
    /// When one is missing, too small, in use or read-only: says which and what to do. Nothing is written then.
    fn open_disks(
        &mut self,
        wanted: &[Disk],
        allowed: &DiskChoice,
    ) -> Result<Vec<Box<dyn DiskSink>>, VmError> {
        let _ = allowed;
        match wanted.first() {
            None => Ok(Vec::new()),
            Some(disk) => {
                Err(format!("disk '{}' cannot be received by this kind of machine", disk.name).into())
            }
        }
    }

    /// The last round of all disks is on stable storage and the sinks have been dropped: lets the machine have its disks. Comes before the
    /// first piece of device state is written. Not called where no disk moves.
    ///
    /// # Errors
    /// When the machine refuses.
    fn close_disks(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Makes the machine ready to load device state and returns where to write it. The guest must not run when it is
    /// loaded.
    ///
    /// # Errors
    /// When the machine refuses.
    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError>;

    /// Waits until the device state, which was written to its end, is loaded.
    ///
    /// # Errors
    /// When the machine could not load it.
    fn finish_load(&mut self) -> Result<(), VmError>;

    /// COMMIT has come, and [`Self::run`] is called next: from here on whoever stands in for this
    /// process runs the guest.
    ///
    /// # Errors
    /// When that cannot be made sure of; the guest is then discarded.
    fn taking_over(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Runs the guest.
    ///
    /// # Errors
    /// [`RunError::NeverRan`] lets the source have its guest back, so it must be certain.
    fn run(&mut self) -> Result<(), RunError>;

    /// Tells the network where the guest is now. Called when it runs.
    ///
    /// # Errors
    /// When the machine refuses; the guest runs all the same.
    fn announce(&mut self) -> Result<(), VmError>;

    /// Makes sure that the guest never runs here. A machine that took nothing in but pages may go on waiting for
    /// another attempt.
    ///
    /// # Errors
    /// When that is not certain.
    fn discard(&mut self) -> Result<(), VmError>;
}

/// Why a guest could not be run.
#[derive(Debug)]
pub enum RunError {
    /// It has not executed a single instruction here.
    NeverRan(VmError),
    /// It may have run, and may have written to its disks.
    Unknown(VmError),
}
