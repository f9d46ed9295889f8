//! Which memory slots show which pages of a RAM block: the bridge between the logs, which count in
//! slots or guest frames, and everyone else, who counts in pages of RAM blocks.
//!
//! Invariant: every part that is handed out lies within its slot, its block and what was asked for.
//! A block may be cut into any number of slots at any page, parts of it may be shown by no slot or
//! by several; nothing is assumed about alignment. How slots come and go is left to the VMM: a
//! tracker is started on a set that stays.

use godwit_memslots::{Slot, SlotFlags};
use godwit_units::{PageCount, PageRun};

use crate::TrackError;

/// The slots of a guest, in the order of the pages that they show.
#[derive(Debug)]
pub(crate) struct BlockSlots {
    slots: Vec<Slot>,
    /// For each block, the slots that show its pages.
    ranges: Vec<std::ops::Range<usize>>,
    /// For each slot, the page after the last one that it or any slot before it in its block shows.
    /// Never falls within a block, so it can be searched even where slots overlap.
    reach: Vec<u64>,
}

/// What one slot shows of the pages that were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The index of the slot.
    pub(crate) slot: usize,
    /// The pages, counted in the slot.
    pub(crate) in_slot: PageRun,
    /// The same pages, counted from the first page that was asked for.
    pub(crate) in_request: PageRun,
}

impl BlockSlots {
    /// Sorts and checks `slots`, those that the guest can write, of RAM blocks of the sizes
    /// `blocks`.
    pub(crate) fn new(blocks: &[PageCount], slots: &[Slot]) -> Result<Self, TrackError> {
        let mut slots: Vec<Slot> = slots
            .iter()
            .copied()
            .filter(|slot| !slot.flags.contains(SlotFlags::READONLY))
            .collect();
        for slot in &slots {
            let refused = |problem| Err(TrackError::Slot { slot: slot.id.0, problem });
            let Some(block) = blocks.get(slot.block as usize) else {
                return refused("names a RAM block that is not among those to be tracked");
            };
            if slot.pages.0 == 0 {
                return refused("is empty");
            }
            if slot.first.0.checked_add(slot.pages.0).is_none_or(|end| end > block.0) {
                return refused("reaches beyond the end of its RAM block");
            }
        }
        slots.sort_by_key(|slot| (slot.block, slot.first));
        let mut reach = Vec::with_capacity(slots.len());
        let mut ranges = Vec::with_capacity(blocks.len());
        for block in 0..blocks.len() {
            let start = reach.len();
            let mut furthest = 0;
            for slot in slots[start..].iter().take_while(|slot| slot.block as usize == block) {
                furthest = furthest.max(slot.first.0 + slot.pages.0);
                reach.push(furthest);
            }
            ranges.push(start..reach.len());
        }
        Ok(Self { slots, ranges, reach })
    }

    /// All slots, in order of block and page; a [`Part`] names one by its index here.
    pub(crate) fn all(&self) -> &[Slot] {
        &self.slots
    }

    /// What each slot shows of the pages `within` of RAM block `block`, in order of their first
    /// page.
    pub(crate) fn parts(&self, block: usize, within: PageRun) -> impl Iterator<Item = Part> + '_ {
        let range = self.ranges.get(block).cloned().unwrap_or(0..0);
        let skip = self.reach[range.clone()].partition_point(|&reach| reach <= within.start.0);
        (range.start + skip..range.end)
            .take_while(move |&slot| self.slots[slot].first < within.end())
            .filter_map(move |slot| {
                let of = &self.slots[slot];
                let pages = PageRun::new(of.first.0, of.pages.0).intersect(within)?;
                Some(Part {
                    slot,
                    in_slot: PageRun::new(pages.start.0 - of.first.0, pages.count.0),
                    in_request: PageRun::new(pages.start.0 - within.start.0, pages.count.0),
                })
            })
    }
}

impl Part {
    /// The pages of this part that come before page `cut` of the request, if any.
    pub(crate) fn before(self, cut: u64) -> Option<Self> {
        let pages = cut.saturating_sub(self.in_request.start.0).min(self.in_request.count.0);
        (pages > 0).then(|| self.trimmed(0, pages))
    }

    /// The pages of this part from page `cut` of the request on, if any.
    pub(crate) fn from(self, cut: u64) -> Option<Self> {
        let skip = cut.saturating_sub(self.in_request.start.0).min(self.in_request.count.0);
        (skip < self.in_request.count.0).then(|| self.trimmed(skip, self.in_request.count.0 - skip))
    }

    fn trimmed(self, skip: u64, pages: u64) -> Self {
        let trim = |run: PageRun| PageRun::new(run.start.0 + skip, pages);
        Self { slot: self.slot, in_slot: trim(self.in_slot), in_request: trim(self.in_request) }
    }
}

#[cfg(test)]
mod tests {
    use godwit_memslots::SlotId;
    use godwit_units::{Gfn, Hva, PageIndex};

    use super::*;

    fn slot(id: u32, block: u32, first: u64, pages: u64) -> Slot {
        Slot {
            id: SlotId(id),
            flags: SlotFlags::NONE,
            gfn: Gfn(u64::from(id) << 20),
            pages: PageCount(pages),
            hva: Hva(0),
            block,
            first: PageIndex(first),
        }
    }

    fn shape(slots: &BlockSlots, block: usize, within: PageRun) -> Vec<(u32, u64, u64, u64)> {
        let parts = slots.parts(block, within);
        parts
            .map(|part| {
                assert_eq!(part.in_slot.count, part.in_request.count);
                let id = slots.all()[part.slot].id.0;
                (id, part.in_slot.start.0, part.in_request.start.0, part.in_slot.count.0)
            })
            .collect()
    }

    #[test]
    fn parts_are_cut_to_slot_and_request() {
        let blocks = [PageCount(1000), PageCount(500)];
        // Out of order, with a gap, and one slot within another.
        let slots =
            [slot(3, 1, 0, 500), slot(2, 0, 700, 300), slot(0, 0, 0, 333), slot(1, 0, 100, 50)];
        let slots = BlockSlots::new(&blocks, &slots).unwrap();
        assert_eq!(
            shape(&slots, 0, PageRun::new(0, 1000)),
            [(0, 0, 0, 333), (1, 0, 100, 50), (2, 0, 700, 300)]
        );
        assert_eq!(
            shape(&slots, 0, PageRun::new(120, 600)),
            [(0, 120, 0, 213), (1, 20, 0, 30), (2, 0, 580, 20)]
        );
        assert_eq!(shape(&slots, 0, PageRun::new(200, 10)), [(0, 200, 0, 10)]);
        assert_eq!(shape(&slots, 0, PageRun::new(400, 100)), []);
        assert_eq!(shape(&slots, 1, PageRun::new(499, 1)), [(3, 499, 0, 1)]);
        assert_eq!(shape(&slots, 7, PageRun::new(0, 1)), []);
    }

    #[test]
    fn parts_are_cut_before_and_after_a_page() {
        let part =
            Part { slot: 0, in_slot: PageRun::new(7, 10), in_request: PageRun::new(100, 10) };
        assert_eq!(part.before(100), None);
        assert_eq!(part.before(103).unwrap().in_slot, PageRun::new(7, 3));
        assert_eq!(part.before(500), Some(part));
        assert_eq!(part.from(110), None);
        assert_eq!(part.from(103).unwrap().in_slot, PageRun::new(10, 7));
        assert_eq!(part.from(0), Some(part));
    }

    #[test]
    fn impossible_slots_are_refused() {
        let refused = |slot| BlockSlots::new(&[PageCount(10)], &[slot]).unwrap_err().to_string();
        assert!(refused(slot(1, 1, 0, 1)).contains("slot 1 names a RAM block"));
        assert!(refused(slot(1, 0, 5, 6)).contains("beyond the end"));
        assert!(refused(slot(1, 0, u64::MAX, 6)).contains("beyond the end"));
        assert!(refused(slot(1, 0, 5, 0)).contains("is empty"));
    }

    #[test]
    fn slots_that_the_guest_cannot_write_are_left_out() {
        let rom = Slot { flags: SlotFlags::READONLY, ..slot(0, 0, 0, 10) };
        assert_eq!(BlockSlots::new(&[PageCount(10)], &[rom]).unwrap().all(), []);
    }
}
