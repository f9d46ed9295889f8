//! The shared bitmap as the dirty bitmap of a region of vm-memory: what a device writes through
//! `GuestMemory` is marked, in pages, and harvested like anything else.

use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};
use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};

use crate::AtomicDirtyBitmap;

impl Default for AtomicDirtyBitmap {
    /// A bitmap of no pages.
    fn default() -> Self {
        Self::new(PageCount::ZERO)
    }
}

impl<'a> WithBitmapSlice<'a> for AtomicDirtyBitmap {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for AtomicDirtyBitmap {
    /// Marks every page that the bytes lie in, as far as it is in the bitmap.
    fn mark_dirty(&self, offset: usize, len: usize) {
        let (start, end) = (offset as u64, (offset as u64).saturating_add(len as u64));
        let (first, end) = (start / PAGE_SIZE, end.div_ceil(PAGE_SIZE));
        if len > 0 {
            self.set(PageRun::new(first, end - first));
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.is_set(PageIndex(offset as u64 / PAGE_SIZE))
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

impl NewBitmap for AtomicDirtyBitmap {
    fn with_len(len: usize) -> Self {
        Self::new(PageCount((len as u64).div_ceil(PAGE_SIZE)))
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

    use super::*;

    #[test]
    fn what_is_written_by_way_of_guest_memory_is_harvested() {
        let ranges = [(GuestAddress(0), 1 << 20), (GuestAddress(0x40_0000), 1 << 20)];
        let memory = GuestMemoryMmap::<AtomicDirtyBitmap>::from_ranges(&ranges).unwrap();
        memory.write_slice(&[7; 4097], GuestAddress(0x40_2fff)).unwrap();
        memory.write_obj(1u8, GuestAddress(0x5000)).unwrap();
        let harvest = |gpa| {
            let mut found = Vec::new();
            let region = memory.find_region(GuestAddress(gpa)).unwrap();
            region.get_mmap().bitmap().harvest(|run| found.push(run));
            found
        };
        assert_eq!(harvest(0), [PageRun::new(5, 1)]);
        assert_eq!(harvest(0x40_0000), [PageRun::new(2, 2)]);
        assert_eq!(harvest(0x40_0000), []);
    }

    #[test]
    fn a_slice_counts_from_its_own_beginning() {
        let bitmap = AtomicDirtyBitmap::with_len(0x5001);
        assert_eq!(bitmap.len(), PageCount(6));
        bitmap.slice_at(0x1000).slice_at(0xfff).mark_dirty(1, 1);
        assert!(bitmap.dirty_at(0x2fff) && !bitmap.dirty_at(0x1fff) && !bitmap.dirty_at(0x3000));
        bitmap.mark_dirty(0x4000, 0);
        bitmap.mark_dirty(0x5000, usize::MAX);
        assert_eq!(bitmap.count(), PageCount(2));
    }
}
