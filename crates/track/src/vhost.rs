//! The log of devices, in the layout of vhost: one bit for each 4 KiB page of guest physical
//! memory.
//!
//! What a device (in this process, in the kernel's vhost, or a vhost-user back end in another
//! process) writes through host addresses is seen by none of KVM's logs. Such writers share one log
//! (vhost-user specification, "Migration"; drivers/vhost/vhost.c, `log_write`): page P is bit P % 8
//! of byte P / 8, set by an atomic operation **after** the data has landed; the harvester takes
//! bits atomically and reads the pages afterwards.
//!
//! Invariants: a bit is set after its data, and taken before the page is read, so no write is lost.
//! A device that has not been told yet that the log is on leaves no gap either: see
//! [`VhostLog::mark`].
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use godwit_memslots::Slot;
use godwit_units::{ByteCount, Gfn, Gpa, Hva, PAGE_SIZE, PageCount, PageIndex, PageRun};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::collected::{Collected, Collectors};
use crate::slots::{BlockSlots, Part};
use crate::words::{mark, peek_into, take_into};
use crate::{AsOf, DirtyTracker, TrackError};

// Bytes of the log are taken eight at a time: bit P % 8 of byte P / 8 must be bit P % 64 of word P
// / 64.
const _: () = assert!(cfg!(target_endian = "little"), "the log is taken as little-endian words");

/// A log, shared between devices and one tracker. Off until a [`VhostLogTracker`] is started on it.
///
/// ```
/// use godwit_memslots::Slot;
/// use godwit_track::{TrackError, VhostLog, VhostLogTracker};
/// use godwit_units::{ByteCount, Gfn, Gpa, PageCount};
///
/// let slot = Slot { pages: PageCount(16), ..Slot::default() };
/// let log = VhostLog::new(PageCount(16))?;
/// let _tracker = VhostLogTracker::start(&log, &[PageCount(16)], &[slot])?;
/// // A device of this process has written 8 bytes across the end of the third page.
/// log.mark(Gpa(3 * 4096 - 4), ByteCount(8))?;
/// assert!(log.is_marked(Gfn(2)) && log.is_marked(Gfn(3)) && !log.is_marked(Gfn(4)));
/// # Ok::<(), TrackError>(())
/// ```
#[derive(Debug)]
pub struct VhostLog {
    memory: OwnedFd,
    base: NonNull<AtomicU64>,
    bytes: usize,
    frames: u64,
    on: AtomicBool,
}

// SAFETY: the mapping is shared memory accessed only through atomics, and unmapped by its one
// owner.
unsafe impl Send for VhostLog {}
// SAFETY: as above.
unsafe impl Sync for VhostLog {}

impl VhostLog {
    /// A log for guest frames `0..frames`, in anonymous shared memory that other processes can map.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new(frames: PageCount) -> Result<Arc<Self>, TrackError> {
        let failed = |source: io::Error| TrackError::DeviceLog { frames: frames.0, source };
        let bytes = frames.0.div_ceil(8).max(1).next_multiple_of(PAGE_SIZE);
        let size =
            usize::try_from(bytes).map_err(|_| failed(io::ErrorKind::InvalidInput.into()))?;
        let memory = rustix::fs::memfd_create("godwit-device-log", MemfdFlags::CLOEXEC)
            .map_err(|errno| failed(errno.into()))?;
        rustix::fs::ftruncate(&memory, bytes).map_err(|errno| failed(errno.into()))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice, of a file as long as the
        // mapping.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, &memory, 0)
        };
        let base = base.map_err(|errno| failed(errno.into()))?;
        let base =
            NonNull::new(base.cast()).ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?;
        Ok(Arc::new(Self {
            memory,
            base,
            bytes: size,
            frames: frames.0,
            on: AtomicBool::new(false),
        }))
    }

    /// How many guest frames it covers.
    #[must_use]
    pub fn frames(&self) -> PageCount {
        PageCount(self.frames)
    }

    /// Its memory, to hand to a vhost-user back end (VHOST_USER_SET_LOG_BASE).
    #[must_use]
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Its size in bytes, and its address in this process, for the kernel's vhost
    /// (VHOST_SET_LOG_BASE).
    #[must_use]
    pub fn mapped_at(&self) -> (Hva, ByteCount) {
        (Hva(self.base.as_ptr() as u64), ByteCount(self.bytes as u64))
    }

    /// The side of a device in this process: it has written `length` bytes at `address`, and **the
    /// data has landed**. Does nothing while the log is off.
    ///
    /// Nothing is lost when the log is turned on between the write and this call: either the switch
    /// is seen to be on here, or the data landed before the tracker's `start` returned, and the
    /// first round, which sends everything, reads it. That takes a full barrier here, between the
    /// data and the look at the switch, and one there.
    ///
    /// # Errors
    /// When the write lies beyond the log; what lies within is marked.
    pub fn mark(&self, address: Gpa, length: ByteCount) -> Result<(), TrackError> {
        fence(Ordering::SeqCst);
        if length.0 == 0 || !self.on.load(Ordering::Relaxed) {
            return Ok(());
        }
        let last = address.0.saturating_add(length.0 - 1) / PAGE_SIZE;
        let first = address.frame().0;
        mark(self.words(), first.min(self.frames)..(last + 1).min(self.frames));
        if last < self.frames {
            Ok(())
        } else {
            Err(TrackError::OutsideLog { address: address.0, length: length.0 })
        }
    }

    /// Whether guest frame `frame` is marked and was not harvested since.
    #[must_use]
    pub fn is_marked(&self, frame: Gfn) -> bool {
        frame.0 < self.frames
            && self.words()[(frame.0 / 64) as usize].load(Ordering::Relaxed) >> (frame.0 % 64) & 1
                == 1
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is as long as `bytes`, a multiple of the page size, and lives as long
        // as `self`; whatever other processes write there, every bit pattern is an AtomicU64. On
        // x86 their atomic operations on bytes and ours on words are atomic against each other.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes / 8) }
    }
}

impl Drop for VhostLog {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length, and no reference into it is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Tracks what devices write, by their log. The log is on as long as the tracker lives.
///
/// ```
/// use godwit_memslots::Slot;
/// use godwit_track::{DirtyTracker, TrackError, VhostLog, VhostLogTracker};
/// use godwit_units::{ByteCount, Gpa, PageCount, PageRun};
///
/// let slot = Slot { pages: PageCount(16), ..Slot::default() };
/// let log = VhostLog::new(PageCount(16))?;
/// let tracker = VhostLogTracker::start(&log, &[PageCount(16)], &[slot])?;
/// log.mark(Gpa(2 * 4096), ByteCount(8192))?;
/// let mut runs = Vec::new();
/// tracker.harvest(0, PageRun::new(0, 16), PageCount::ZERO, &mut |run| runs.push(run))?;
/// assert_eq!(runs, [PageRun::new(2, 2)]);
/// # Ok::<(), TrackError>(())
/// ```
#[derive(Debug)]
pub struct VhostLogTracker {
    log: Arc<VhostLog>,
    slots: BlockSlots,
    collectors: Collectors,
}

impl VhostLogTracker {
    /// Clears `log` and turns it on. `slots` say which guest frames are which pages of the RAM
    /// blocks, of the sizes `blocks`.
    ///
    /// # Errors
    /// When slots and blocks do not fit, or a slot lies beyond the log.
    pub fn start(
        log: &Arc<VhostLog>,
        blocks: &[PageCount],
        slots: &[Slot],
    ) -> Result<Self, TrackError> {
        let slots = BlockSlots::new(blocks, slots)?;
        for slot in slots.all() {
            if slot.gfn.0.checked_add(slot.pages.0).is_none_or(|end| end > log.frames) {
                return Err(TrackError::Slot {
                    slot: slot.id.0,
                    problem: "lies beyond the device log",
                });
            }
        }
        for word in log.words() {
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
        log.on.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Ok(Self { log: Arc::clone(log), slots, collectors: Collectors::default() })
    }

    /// The bits of the log that belong to `part`.
    fn bits(&self, part: Part) -> std::ops::Range<u64> {
        let start = self.slots.all()[part.slot].gfn.0 + part.in_slot.start.0;
        start..start + part.in_slot.count.0
    }

    fn put_back(&self, part: Part, collected: &Collected<'_>) {
        let base = self.bits(part).start;
        collected.bitmap.for_each_run_in(part.in_request, |run| {
            let start = base + run.start.0 - part.in_request.start.0;
            mark(self.log.words(), start..start + run.count.0);
        });
    }
}

impl Drop for VhostLogTracker {
    fn drop(&mut self) {
        self.log.on.store(false, Ordering::SeqCst);
    }
}

impl DirtyTracker for VhostLogTracker {
    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        let mut collected = self.collectors.start(within);
        for part in self.slots.parts(block, within) {
            let at = part.in_request.start.0;
            take_into(self.log.words(), self.bits(part), &mut collected.bitmap, at);
        }
        let cut = collected.cut(limit);
        let beyond = self.slots.parts(block, within).filter_map(|part| part.from(cut));
        beyond.for_each(|part| self.put_back(part, &collected));
        Ok(collected.report(cut, found))
    }

    fn look(
        &self,
        block: usize,
        within: PageRun,
        _: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        let mut collected = self.collectors.start(within);
        for part in self.slots.parts(block, within) {
            let at = part.in_request.start.0;
            peek_into(self.log.words(), self.bits(part), &mut collected.bitmap, at);
        }
        collected.report(within.count.0, found);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_memslots::{SlotFlags, SlotId};
    use godwit_units::Gfn;

    use super::*;

    fn tracked(frames: u64) -> (Arc<VhostLog>, Result<VhostLogTracker, TrackError>) {
        let log = VhostLog::new(PageCount(frames)).unwrap();
        let slot = Slot {
            id: SlotId(0),
            flags: SlotFlags::NONE,
            gfn: Gfn(101),
            pages: PageCount(50),
            hva: Hva(0),
            block: 0,
            first: PageIndex(3),
        };
        let tracker = VhostLogTracker::start(&log, &[PageCount(53)], &[slot]);
        (log, tracker)
    }

    fn harvest(tracker: &VhostLogTracker) -> Vec<PageRun> {
        let mut runs = Vec::new();
        tracker
            .harvest(0, PageRun::new(0, 53), PageCount::ZERO, &mut |run| runs.push(run))
            .unwrap();
        runs
    }

    #[test]
    fn every_page_of_a_write_is_marked() {
        let (log, tracker) = tracked(200);
        let tracker = tracker.unwrap();
        // From the last byte of frame 101 to the first of 104: pages 3 to 6.
        log.mark(Gpa(102 * PAGE_SIZE - 1), ByteCount(2 * PAGE_SIZE + 2)).unwrap();
        log.mark(Gpa(120 * PAGE_SIZE), ByteCount(0)).unwrap();
        assert_eq!(harvest(&tracker), [PageRun::new(3, 4)]);
        assert_eq!(harvest(&tracker), []);
    }

    #[test]
    fn the_layout_is_that_of_vhost() {
        let (log, tracker) = tracked(200);
        let tracker = tracker.unwrap();
        // A back end in another process: page 122 is bit 2 of byte 15.
        rustix::io::pwrite(log.memory(), &[1 << (122 % 8)], 122 / 8).unwrap();
        assert_eq!(harvest(&tracker), [PageRun::new(24, 1)]);
    }

    #[test]
    fn a_log_that_is_off_is_not_marked() {
        let (log, tracker) = tracked(200);
        drop(tracker);
        log.mark(Gpa(110 * PAGE_SIZE), ByteCount(1)).unwrap();
        assert!(log.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn what_lies_beyond_the_log_is_refused() {
        assert!(tracked(150).1.unwrap_err().to_string().contains("beyond the device log"));
        let (log, tracker) = tracked(151);
        let tracker = tracker.unwrap();
        let error = log.mark(Gpa(150 * PAGE_SIZE), ByteCount(PAGE_SIZE + 1)).unwrap_err();
        assert!(matches!(error, TrackError::OutsideLog { .. }), "{error}");
        assert!(log.mark(Gpa(u64::MAX), ByteCount(u64::MAX)).is_err());
        assert_eq!(harvest(&tracker), [PageRun::new(52, 1)]);
    }
}
