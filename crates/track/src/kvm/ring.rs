//! The tracker on KVM's dirty rings: what the guest wrote comes as a list, not as a bitmap.
//!
//! Its cost goes with the pages written, not with the size of memory: an idle guest of any size
//! costs nothing to harvest. What leaves the rings ([`super::KvmDirtyRings`]) is marked in one
//! shared bitmap a RAM block, and harvests take from those. Every harvest empties the rings first,
//! so what was written before it is in.
//!
//! On processors that log writes in hardware (Intel PML) some entries wait in the vCPU until it
//! leaves guest mode: a harvest sees all writes of vCPUs that were stopped before it, and perhaps
//! not the last ones of those that run.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use godwit_memslots::Slot;
use godwit_units::{PageCount, PageIndex, PageRun};

use super::Logging;
use super::rings::{KvmDirtyRings, Sink};
use crate::collected::Collectors;
use crate::slots::BlockSlots;
use crate::words::{mark, peek_into, take_into};
use crate::{AsOf, DirtyTracker, TrackError};

/// Tracks what vCPUs write, by KVM's dirty rings. Dropping it ends the logging.
///
/// ```
/// use std::sync::Arc;
///
/// use godwit_memslots::Slot;
/// use godwit_track::{DirtyTracker, KvmDirtyRings, KvmRingTracker, TrackError};
/// use godwit_units::PageCount;
///
/// /// `slots` are the slots of the VM of `rings`, which all show RAM block 0 of `pages` pages.
/// fn track(
///     rings: &Arc<KvmDirtyRings>,
///     pages: PageCount,
///     slots: &[Slot],
/// ) -> Result<Box<dyn DirtyTracker>, TrackError> {
///     // SAFETY: the VM keeps these slots for as long as it is tracked.
///     Ok(Box::new(unsafe { KvmRingTracker::start(rings, &[pages], slots) }?))
/// }
/// ```
pub struct KvmRingTracker {
    logging: Logging,
    rings: Arc<KvmDirtyRings>,
    pages: Arc<WrittenPages>,
    collectors: Collectors,
}

impl fmt::Debug for KvmRingTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmRingTracker").field("logging", &self.logging).finish_non_exhaustive()
    }
}

/// What came out of the rings and was not harvested yet.
struct WrittenPages {
    /// By number of the slot, as the rings have it.
    slots: HashMap<u32, Slot>,
    /// For each RAM block, its pages.
    blocks: Vec<(PageCount, Box<[AtomicU64]>)>,
}

impl Sink for WrittenPages {
    fn publish(&self, slot: u32, page: u64) {
        // A slot that is logged by someone else (a frame buffer) is not ours to report.
        let Some(slot) = self.slots.get(&slot) else { return };
        if page < slot.pages.0 {
            let page = slot.first.0 + page;
            mark(&self.blocks[slot.block as usize].1, page..page + 1);
        }
    }
}

impl KvmRingTracker {
    /// Begins to log `slots` of RAM blocks of the sizes `blocks` into `rings`.
    ///
    /// # Errors
    /// When slots and blocks do not fit, another tracker uses the rings, or KVM refuses; no slot is
    /// logged then that was not before.
    ///
    /// # Safety
    /// The VM of `rings` must have all of `slots`, with these numbers, frames, sizes and host
    /// addresses, for as long as the tracker lives: it changes their flags.
    pub unsafe fn start(
        rings: &Arc<KvmDirtyRings>,
        blocks: &[PageCount],
        slots: &[Slot],
    ) -> Result<Self, TrackError> {
        let slots = BlockSlots::new(blocks, slots)?;
        let words =
            |pages: PageCount| (0..pages.0.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let pages = Arc::new(WrittenPages {
            slots: slots.all().iter().map(|slot| (slot.id.0, *slot)).collect(),
            blocks: blocks.iter().map(|&pages| (pages, words(pages))).collect(),
        });
        // What an earlier tracker left in the rings is not ours.
        rings.collect()?;
        rings.connect(Arc::clone(&pages) as Arc<dyn Sink>)?;
        // SAFETY: by the contract of this function.
        let logging = unsafe { Logging::start(rings.vm(), slots.all()) };
        let logging = logging.inspect_err(|_| rings.disconnect())?;
        Ok(Self { logging, rings: Arc::clone(rings), pages, collectors: Collectors::default() })
    }

    fn pages(&self, block: usize, within: PageRun) -> (&[AtomicU64], std::ops::Range<u64>) {
        let Some((len, words)) = self.pages.blocks.get(block) else { return (&[], 0..0) };
        (words, within.start.0.min(len.0)..within.end().0.min(len.0))
    }
}

impl Drop for KvmRingTracker {
    fn drop(&mut self) {
        // The logging ends after this; entries that still come are thrown away by whoever collects
        // next.
        self.rings.disconnect();
    }
}

impl DirtyTracker for KvmRingTracker {
    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        self.rings.collect()?;
        let mut collected = self.collectors.start(within);
        let (words, pages) = self.pages(block, within);
        take_into(words, pages.clone(), &mut collected.bitmap, 0);
        let cut = collected.cut(limit);
        let beyond = PageRun::new(cut, within.count.0 - cut);
        collected.bitmap.for_each_run_in(beyond, |run| {
            mark(words, pages.start + run.start.0..pages.start + run.end().0);
        });
        Ok(collected.report(cut, found))
    }

    fn look(
        &self,
        block: usize,
        within: PageRun,
        _: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        self.rings.collect()?;
        let mut collected = self.collectors.start(within);
        let (words, pages) = self.pages(block, within);
        peek_into(words, pages, &mut collected.bitmap, 0);
        collected.report(within.count.0, found);
        Ok(())
    }
}
