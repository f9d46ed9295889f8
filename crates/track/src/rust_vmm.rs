//! The device log as the dirty bitmap of a region of vm-memory: what devices of a VMM write through
//! `GuestMemory` is marked where a [`crate::VhostLogTracker`] finds it.

use std::sync::Arc;

use godwit_units::{ByteCount, Gpa, Hva, PAGE_SIZE, PageRun};
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use crate::{BlockMapping, VhostLog};

impl BlockMapping {
    /// Where each region of `memory` is mapped in this process, which is what
    /// [`PagemapTracker::start_own`](crate::PagemapTracker::start_own) tracks; region and RAM block
    /// have the same number. `None` where a region has no host address.
    pub fn of_guest_memory<M: GuestMemoryBackend>(memory: &M) -> Option<Vec<Vec<Self>>> {
        let mapping = |region: &M::R| {
            let address = region.get_host_address(MemoryRegionAddress(0)).ok()? as u64;
            let pages = PageRun::new(0, region.len() / PAGE_SIZE);
            Some(vec![Self { pages, address: Hva(address) }])
        };
        memory.iter().map(mapping).collect()
    }
}

/// The part of a [`VhostLog`] that belongs to memory from one guest address on: the bitmap of a
/// region, or of a piece of it.
///
/// ```
/// use godwit_track::{VhostLog, VhostLogRegion};
/// use godwit_units::{Gpa, PageCount};
/// use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap, mmap::MmapRegionBuilder};
///
/// let log = VhostLog::new(PageCount(0x800))?;
/// let bitmap = VhostLogRegion::new(&log, Gpa(0x40_0000));
/// let mapping = MmapRegionBuilder::new_with_bitmap(1 << 20, bitmap)
///     .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
///     .build()?;
/// let region = GuestRegionMmap::new(mapping, GuestAddress(0x40_0000)).expect("no address wraps");
/// let memory = GuestMemoryMmap::from_regions(vec![region])?;
/// memory.write_slice(b"by a device", GuestAddress(0x40_1000))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// ```
/// use godwit_track::{TrackError, VhostLog, VhostLogRegion};
/// use godwit_units::{Gfn, Gpa, PageCount};
/// use vm_memory::bitmap::Bitmap;
///
/// let log = VhostLog::new(PageCount(16))?;
/// let region = VhostLogRegion::new(&log, Gpa(8 * 4096));
/// region.mark_dirty(100, 8);
/// assert!(!log.is_marked(Gfn(8)), "it is off until a tracker is started on it");
/// # Ok::<(), TrackError>(())
/// ```
#[derive(Clone, Debug)]
pub struct VhostLogRegion {
    log: Arc<VhostLog>,
    start: Gpa,
}

impl VhostLogRegion {
    /// What `log` has of memory from `start` on.
    #[must_use]
    pub fn new(log: &Arc<VhostLog>, start: Gpa) -> Self {
        Self { log: Arc::clone(log), start }
    }
}

impl WithBitmapSlice<'_> for VhostLogRegion {
    type S = Self;
}

impl BitmapSlice for VhostLogRegion {}

impl Bitmap for VhostLogRegion {
    /// To be called when the data has landed, as vm-memory does. What lies beyond the log is not
    /// marked.
    fn mark_dirty(&self, offset: usize, len: usize) {
        let _ = self.log.mark(Gpa(self.start.0.wrapping_add(offset as u64)), ByteCount(len as u64));
    }

    /// Whether the page is marked and was not harvested since. Nothing is while the log is off.
    fn dirty_at(&self, offset: usize) -> bool {
        self.log.is_marked(Gpa(self.start.0.wrapping_add(offset as u64)).frame())
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { log: Arc::clone(&self.log), start: Gpa(self.start.0.wrapping_add(offset as u64)) }
    }
}

#[cfg(test)]
mod tests {
    use godwit_memslots::{Slot, SlotId};
    use godwit_units::PageCount;
    use vm_memory::mmap::MmapRegionBuilder;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

    use super::*;
    use crate::{DirtyTracker, VhostLogTracker};

    #[test]
    fn a_tracker_of_devices_finds_what_goes_through_guest_memory() {
        const START: u64 = 0x40_0000;
        let log = VhostLog::new(PageCount(0x800)).unwrap();
        let bitmap = VhostLogRegion::new(&log, Gpa(START));
        let mapping = MmapRegionBuilder::new_with_bitmap(1 << 20, bitmap.clone())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .build()
            .unwrap();
        let region = GuestRegionMmap::new(mapping, GuestAddress(START)).unwrap();
        let memory = GuestMemoryMmap::from_regions(vec![region]).unwrap();
        let pages = PageCount(256);
        let slot = Slot { id: SlotId(0), gfn: Gpa(START).frame(), pages, ..Slot::default() };
        let tracker = VhostLogTracker::start(&log, &[pages], &[slot]).unwrap();
        memory.write_slice(&[1; 4097], GuestAddress(START + 0x3fff)).unwrap();
        assert!(
            bitmap.dirty_at(0x4000)
                && bitmap.slice_at(0x3000).dirty_at(0x1000)
                && !bitmap.dirty_at(0)
        );
        let mut found = Vec::new();
        tracker
            .harvest(0, PageRun::new(0, 256), PageCount::ZERO, &mut |run| found.push(run))
            .unwrap();
        assert_eq!(found, [PageRun::new(3, 2)]);
        assert!(!bitmap.dirty_at(0x4000), "what was harvested is clean");
    }
}
