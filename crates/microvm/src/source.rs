//! The machine as the source of a migration: what the engine asks of it, done in its own process.
//!
//! This file and `destination` are all that a VMM adds to have the engine inside. Nothing is
//! injected, attached or asked of another process: stopping is a signal to the vCPU threads, the
//! state is a piece of memory.

use std::io::{self, Read};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use godwit_balloon::FreeHints;
use godwit_disk::{Disk as MovingDisk, DiskChoice, DiskReader, DiskRound, granularity_for};
use godwit_engine::vm::{Brake, DiskVm, FreePages, SourceVm, SwitchoverCosts, VmError};
use godwit_memory::RamBlock;
use godwit_track::{DirtyTracker, GovernorMeasures, PagemapTracker};
use godwit_units::{ByteCount, Rate};

use crate::disk::{Disk, NAME};
use crate::{Machine, MicrovmError};

/// A machine whose guest is to leave.
#[derive(Debug)]
pub struct MicrovmSource<'a> {
    machine: &'a Machine,
    was_running: bool,
    /// The tracker that can govern, as long as the engine holds it.
    tracker: Weak<PagemapTracker>,
    governed: GovernorMeasures,
    /// Its disk, if that moves along, and the size of its dirty blocks.
    disk: Option<(&'a Disk, ByteCount)>,
    /// Where the state goes; dropped when all of it went.
    state: Option<Sender<Vec<u8>>>,
}

impl<'a> MicrovmSource<'a> {
    /// Prepares nothing yet.
    #[must_use]
    pub fn new(machine: &'a Machine) -> Self {
        Self {
            machine,
            was_running: machine.is_running(),
            tracker: Weak::new(),
            governed: GovernorMeasures::default(),
            disk: None,
            state: None,
        }
    }

    /// Has disks move along, in dirty blocks of `granularity`; `None`: as the guest writes.
    ///
    /// # Errors
    /// When it has no such disk.
    pub fn with_disks(
        mut self,
        choice: &DiskChoice,
        granularity: Option<ByteCount>,
    ) -> Result<Self, MicrovmError> {
        let disk = self.machine.disk();
        if disk.is_none() && *choice == DiskChoice::All {
            return Err(MicrovmError::NoDisks);
        }
        if let DiskChoice::Named(names) = choice
            && let Some(name) = names.iter().find(|name| *name != NAME || disk.is_none())
        {
            let own = disk.map(|_| NAME);
            return Err(MicrovmError::NoDisk { name: name.clone(), own });
        }
        if let (false, Some(disk)) = (choice.is_none(), disk) {
            self.disk = Some((disk, granularity.unwrap_or_else(|| granularity_for(disk.writes()))));
        }
        Ok(self)
    }

    /// Lets the guest write to its disk as it likes, and marks nothing of it.
    fn release_disk(&self) {
        if let Some(disk) = self.machine.disk() {
            disk.limit(None);
            disk.untrack();
        }
    }

    /// What the disk has to write need not be written when it is copied anyway.
    fn flush_shared(&self) -> Result<(), MicrovmError> {
        if self.disk.is_some() { Ok(()) } else { self.machine.flush() }
    }

    /// Lets the vCPUs run and write freely when they run. There is nothing to report: what failed
    /// has let go of them.
    fn remove_throttle(&mut self) {
        if let Some(tracker) = self.tracker.upgrade() {
            tracker.answer_at_once();
            self.governed = tracker.governor_measures();
        }
        let _ = self.machine.throttle(0.0);
    }
}

impl Drop for MicrovmSource<'_> {
    fn drop(&mut self) {
        self.remove_throttle();
        self.machine.finish_free_page_hints();
        self.release_disk();
    }
}

impl SourceVm for MicrovmSource<'_> {
    fn machine(&self) -> &'static str {
        "microvm"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        self.machine.ram().blocks()
    }

    fn was_running(&self) -> bool {
        self.was_running
    }

    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError> {
        if self.machine.tracks_page_tables() {
            let tracker = Arc::new(PagemapTracker::start_own(&self.machine.ram().mappings())?);
            self.tracker = Arc::downgrade(&tracker);
            return Ok(tracker);
        }
        Ok(self.machine.start_tracking()?)
    }

    fn can_go_untracked(&self) -> bool {
        true
    }

    fn switchover_costs(&self) -> SwitchoverCosts {
        // As measured (docs/benchmarks.md), with room for a busy host.
        SwitchoverCosts {
            lead: Duration::from_millis(2),
            state: Duration::from_millis(3),
            ..SwitchoverCosts::default()
        }
    }

    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError> {
        // What the disk has to write now it need not write when the guest is stopped.
        self.flush_shared()?;
        let (state, pieces) = mpsc::channel();
        self.state = Some(state);
        Ok(Box::new(Pieces { pieces, piece: Vec::new(), read: 0 }))
    }

    fn stop(&mut self) -> Result<Instant, VmError> {
        // A vCPU whose request waits to be paid for would not stop.
        self.limit_disks(&[])?;
        let stopped = self.machine.stop();
        self.remove_throttle();
        // The destination's guest finds this in the state.
        self.machine.finish_free_page_hints();
        let stopped = stopped?;
        // Another host reads the image after the handover.
        self.flush_shared()?;
        Ok(stopped)
    }

    fn release_state(&mut self) -> Result<(), VmError> {
        let state = self.machine.save()?;
        if let Some(sender) = self.state.take() {
            // Nobody takes it: the migration has failed, and the engine knows.
            let _ = sender.send(state);
        }
        Ok(())
    }

    fn state_saved(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmError> {
        self.remove_throttle();
        self.machine.finish_free_page_hints();
        self.release_disk();
        self.state = None;
        if self.was_running {
            self.machine.run();
        }
        Ok(())
    }

    fn retire(&mut self, _keep: bool) -> Result<(), VmError> {
        self.remove_throttle();
        self.release_disk();
        // Stopped it is; that it stays so, and whether the process ends, is decided by the owner of
        // the machine.
        if self.machine.is_running() {
            let error =
                MicrovmError::WrongState { state: "running", cure: "this is a bug in godwit" };
            return Err(error.into());
        }
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.machine.has_ended()
    }

    fn brake(&mut self) -> Option<&mut dyn Brake> {
        Some(self)
    }

    fn moving_disks(&mut self) -> Option<&mut dyn DiskVm> {
        if self.disk.is_some() { Some(self) } else { None }
    }

    fn free_pages(&mut self) -> Option<&mut dyn FreePages> {
        if self.machine.hints_free_pages() { Some(self) } else { None }
    }
}

impl Brake for MicrovmSource<'_> {
    fn throttle(&mut self, share: f64) -> Result<(), VmError> {
        Ok(self.machine.throttle(share)?)
    }

    fn cannot_govern(&self) -> Option<String> {
        (!self.machine.tracks_page_tables())
            .then(|| "it takes page tables as tracker (--tracker pagemap)".to_owned())
    }

    fn govern(&mut self, dirty_rate_limit: Option<f64>) -> Result<(), VmError> {
        let Some(tracker) = self.tracker.upgrade() else { return Ok(()) };
        if dirty_rate_limit.is_some() {
            tracker.prepare_own_governor(self.machine.vcpu_threads())?;
        }
        Ok(tracker.govern(dirty_rate_limit)?)
    }

    fn governor_measures(&self) -> GovernorMeasures {
        self.tracker.upgrade().map_or(self.governed, |tracker| tracker.governor_measures())
    }

    fn vcpu_time(&self) -> Option<Duration> {
        self.machine.vcpu_time()
    }

    fn vcpus(&self) -> usize {
        self.machine.vcpu_threads().len()
    }
}

impl DiskVm for MicrovmSource<'_> {
    fn limit_disks(&mut self, limits: &[Rate]) -> Result<(), VmError> {
        if let Some((disk, _)) = self.disk {
            disk.limit(limits.first().copied());
        }
        Ok(())
    }

    fn disks(&self) -> Vec<MovingDisk> {
        self.disk.iter().map(|(disk, _)| disk.moving()).collect()
    }

    fn start_disk_tracking(&mut self) -> Result<(), VmError> {
        if let Some((disk, granularity)) = self.disk {
            disk.track(granularity);
        }
        Ok(())
    }

    fn disk_granularity(&self) -> Vec<ByteCount> {
        self.disk.iter().map(|(_, granularity)| *granularity).collect()
    }

    fn begin_disk_round(&mut self) -> Result<Vec<Box<dyn DiskRound>>, VmError> {
        let rounds =
            self.disk.iter().map(|(disk, _)| disk.round().ok_or("the disk is not tracked".into()));
        rounds.collect()
    }

    fn read_disks(&mut self) -> Result<Vec<Box<dyn DiskReader>>, VmError> {
        Ok(self.disk.iter().map(|(disk, _)| disk.reader()).collect())
    }

    fn dirty_disks(&mut self) -> Result<Vec<ByteCount>, VmError> {
        Ok(self.disk.iter().map(|(disk, _)| disk.dirty()).collect())
    }

    fn disk_writes(&mut self) -> Option<Vec<ByteCount>> {
        self.disk.map(|(disk, _)| vec![disk.writes().bytes])
    }
}

impl FreePages for MicrovmSource<'_> {
    fn start_free_page_hints(&mut self, hints: &Arc<FreeHints>) -> bool {
        self.machine.start_free_page_hints(hints)
    }

    fn stop_free_page_hints(&mut self) {
        self.machine.stop_free_page_hints();
    }
}

/// The state as a stream.
struct Pieces {
    pieces: Receiver<Vec<u8>>,
    piece: Vec<u8>,
    read: usize,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.read == self.piece.len() {
            let Ok(piece) = self.pieces.recv() else { return Ok(0) };
            (self.piece, self.read) = (piece, 0);
        }
        let count = buffer.len().min(self.piece.len() - self.read);
        buffer[..count].copy_from_slice(&self.piece[self.read..self.read + count]);
        self.read += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_become_a_stream_that_ends() {
        let (sender, pieces) = mpsc::channel();
        let mut stream = Pieces { pieces, piece: Vec::new(), read: 0 };
        sender.send(vec![1; 5]).unwrap();
        sender.send(Vec::new()).unwrap();
        sender.send(vec![2; 2]).unwrap();
        drop(sender);
        let mut all: Vec<u8> = Vec::new();
        let mut buffer = [0; 3];
        while let Ok(count @ 1..) = stream.read(&mut buffer) {
            all.extend(&buffer[..count]);
        }
        assert_eq!(all, [1, 1, 1, 1, 1, 2, 2]);
    }
}
