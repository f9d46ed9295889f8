//! Where guest addresses are in RAM blocks.
//!
//! Invariant: what leaves here lies within a block, in whole pages that the guest named from their
//! first byte to their last.

use godwit_units::{Gpa, PAGE_SIZE, PageCount, PageRun};

/// A piece of guest memory: where a RAM block, or a part of it, is seen by the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first guest address, page-aligned.
    pub start: Gpa,
    /// The RAM block.
    pub block: usize,
    /// Which pages of the block.
    pub run: PageRun,
}

/// All of them, in order.
#[derive(Clone, Debug)]
pub(crate) struct Layout(Vec<Region>);

impl Layout {
    pub(crate) fn new(mut regions: Vec<Region>) -> Self {
        regions.sort_by_key(|region| region.start);
        Self(regions)
    }

    /// How many pages there are.
    pub(crate) fn pages(&self) -> PageCount {
        self.0.iter().map(|region| region.run.count).sum()
    }

    /// The whole pages among `len` bytes from `start` on that are memory, block by block.
    pub(crate) fn pages_of(&self, start: Gpa, len: u64, mut found: impl FnMut(usize, PageRun)) {
        let first = start.0.div_ceil(PAGE_SIZE);
        let end = start.0.saturating_add(len) / PAGE_SIZE;
        let after = self.0.partition_point(|region| region.start.frame().0 <= first);
        for region in &self.0[after.saturating_sub(1)..] {
            let frame = region.start.frame().0;
            if frame >= end {
                break;
            }
            let (from, to) = (first.max(frame), end.min(frame.saturating_add(region.run.count.0)));
            if from < to {
                found(region.block, PageRun::new(region.run.start.0 + (from - frame), to - from));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages_of(start: u64, len: u64) -> Vec<(usize, PageRun)> {
        let region = |start, block, first, count| Region {
            start: Gpa(start),
            block,
            run: PageRun::new(first, count),
        };
        let layout = Layout::new(vec![
            region(0x8000, 1, 100, 4),
            region(0, 0, 0, 4),
            region(0xc000, 2, 0, 1),
        ]);
        let mut found = Vec::new();
        layout.pages_of(Gpa(start), len, |block, run| found.push((block, run)));
        found
    }

    #[test]
    fn only_whole_pages_of_memory_count() {
        assert_eq!(pages_of(0, 0x1000), [(0, PageRun::new(0, 1))]);
        assert_eq!(pages_of(1, 0x2000), [(0, PageRun::new(1, 1))]);
        assert_eq!(pages_of(1, 0x1000), []);
        assert_eq!(pages_of(0x3000, 0), []);
        assert_eq!(pages_of(0x4000, 0x4000), []);
        let all = [(0, PageRun::new(2, 2)), (1, PageRun::new(100, 4)), (2, PageRun::new(0, 1))];
        assert_eq!(pages_of(0x2000, u64::MAX), all);
        assert_eq!(pages_of(u64::MAX, u64::MAX), []);
        assert_eq!(pages_of(u64::MAX - 0x1000, 0x1001), []);
    }
}
