//! Memory slots of a VMM that holds its memory in vm-memory, as those of the rust-vmm family do.

use godwit_units::{Gpa, Hva, PAGE_SIZE, PageCount, PageIndex};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use crate::{MemSlots, Slot, SlotError, SlotFlags, SlotId};

impl MemSlots {
    /// A slot for each region of `memory`, in its order: slot, RAM block and region have the same
    /// number, and the block begins where the region does.
    ///
    /// # Errors
    /// When a region does not begin and end with a page, or has no host address.
    ///
    /// ```
    /// use godwit_memslots::{MemSlots, SlotId};
    /// use godwit_units::Gpa;
    /// use vm_memory::{GuestAddress, GuestMemoryMmap};
    ///
    /// let ranges = [(GuestAddress(0), 1 << 20), (GuestAddress(1 << 32), 2 << 20)];
    /// let memory = GuestMemoryMmap::<()>::from_ranges(&ranges)?;
    /// let slots = MemSlots::of_guest_memory(&memory)?;
    /// let high = slots.map().by_gfn(Gpa((1 << 32) + 8192).frame()).expect("it was just made");
    /// assert_eq!((high.id, high.block, high.pages.0), (SlotId(1), 1, 512));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of_guest_memory<M: GuestMemoryBackend>(memory: &M) -> Result<Self, SlotError> {
        let mut slots = Self::new();
        slots.update(|edit| {
            for (number, region) in (0..).zip(memory.iter()) {
                let (id, start) = (SlotId(number), region.start_addr().raw_value());
                let whole =
                    [start, region.len()].iter().all(|bytes| bytes.is_multiple_of(PAGE_SIZE));
                if !whole {
                    return Err(SlotError::NotPages {
                        slot: id,
                        start: Gpa(start),
                        bytes: region.len(),
                    });
                }
                let address = region.get_host_address(MemoryRegionAddress(0));
                let address =
                    address.map_err(|_| SlotError::NotMapped { slot: id, start: Gpa(start) })?;
                edit.insert(Slot {
                    id,
                    flags: SlotFlags::NONE,
                    gfn: Gpa(start).frame(),
                    pages: PageCount(region.len() / PAGE_SIZE),
                    hva: Hva(address as u64),
                    block: number,
                    first: PageIndex(0),
                })?;
            }
            Ok(())
        })?;
        Ok(slots)
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    use super::*;

    #[test]
    fn a_page_is_found_by_its_address_in_the_guest_and_in_the_host() {
        let ranges = [(GuestAddress(0), 1 << 20), (GuestAddress(0x40_0000), 0x5000)];
        let memory = GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap();
        let slots = MemSlots::of_guest_memory(&memory).unwrap();
        let mut reader = slots.reader();
        let host = memory.get_host_address(GuestAddress(0x40_3123)).unwrap() as u64;
        let slot = reader.by_hva(Hva(host)).unwrap();
        assert_eq!((slot.block, slot.page_of_hva(Hva(host))), (1, Some(PageIndex(3))));
        assert_eq!(reader.by_gfn(Gpa(0x40_3123).frame()), Some(slot));
        assert_eq!(reader.by_gfn(Gpa(0x40_5000).frame()), None);
    }

    #[test]
    fn a_region_that_is_no_pages_is_refused() {
        for range in [(GuestAddress(0), 0x1800), (GuestAddress(0x800), 0x1000)] {
            let memory = GuestMemoryMmap::<()>::from_ranges(&[range]).unwrap();
            let refused = MemSlots::of_guest_memory(&memory).unwrap_err().to_string();
            assert!(refused.contains("not whole pages"), "{refused}");
        }
    }
}
