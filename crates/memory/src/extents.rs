//! Where a RAM block holds data and where it has holes.
//!
//! Of a file, `SEEK_DATA` and `SEEK_HOLE` (lseek(2)) count a page that was swapped out as data, so
//! nothing that the guest ever wrote is taken for a hole. Of memory without a file the page tables
//! say it.
//!
//! `SEEK_HOLE` has no end: within much data it walks page by page, far past what was asked for (1
//! ms a GiB). So where a block is gone through piece by piece, what it found is kept in a
//! [`DataHint`]. Only data is kept, never holes: what was data and has become a hole since reads as
//! zeros, which does no harm; what was a hole and was written since must be seen. Where all of it
//! was gone through before, the data found then is told ([`RamBlock::data_known`]), and no page of
//! it is walked again.

use std::io;

use godwit_units::{PAGE_SIZE, PageIndex, PageRun};

use crate::backing::Backing;
use crate::{MemoryError, RamBlock};

/// Up to where data was seen to reach, kept from one piece of a block to the next.
#[derive(Clone, Copy, Debug, Default)]
pub struct DataHint {
    /// Bytes from the beginning of the block.
    start: u64,
    end: u64,
}

/// Iterator over the data extents within a run of pages, see [`RamBlock::data`].
#[derive(Debug)]
pub struct DataExtents<'a> {
    block: &'a RamBlock,
    backing: &'a dyn Backing,
    hint: &'a mut DataHint,
    known: &'a [PageRun],
    /// Bytes from the beginning of the block.
    at: u64,
    end: u64,
}

impl<'a> DataExtents<'a> {
    pub(crate) fn new(
        block: &'a RamBlock,
        backing: &'a dyn Backing,
        run: PageRun,
        hint: &'a mut DataHint,
        known: &'a [PageRun],
    ) -> Self {
        let run = run.intersect(block.all()).unwrap_or(PageRun::new(0, 0));
        Self { block, backing, hint, known, at: run.start.offset(), end: run.end().offset() }
    }

    /// Of the known data that `at` lies in, the end; both in bytes.
    fn known_end(&self, at: u64) -> Option<u64> {
        let page = PageIndex(at / PAGE_SIZE);
        let after = self.known.partition_point(|run| run.start <= page);
        let run = self.known.get(after.checked_sub(1)?)?;
        (page < run.end()).then(|| run.end().offset())
    }

    fn step(&mut self) -> io::Result<Option<PageRun>> {
        if self.at >= self.end {
            return Ok(None);
        }
        if !(self.hint.start..self.hint.end).contains(&self.at) {
            let mut known = self.known_end(self.at);
            let data = match known {
                Some(_) => self.at,
                None => self.backing.data_from(self.at, self.end)?.unwrap_or(self.end),
            };
            if data >= self.end {
                self.at = self.end;
                return Ok(None);
            }
            known = known.or_else(|| self.known_end(data));
            let hole = match known {
                Some(end) => end,
                None => self.backing.hole_from(data, self.end)?.unwrap_or(self.end),
            };
            // A hole punched between the two calls: never look at the same spot twice.
            *self.hint = DataHint { start: data, end: hole.max(data + PAGE_SIZE) };
            self.at = data;
        }
        let start = self.at;
        self.at = self.hint.end.min(self.end);
        let first = start / PAGE_SIZE;
        Ok(Some(PageRun::new(first, (self.at - start).div_ceil(PAGE_SIZE))))
    }
}

impl Iterator for DataExtents<'_> {
    type Item = Result<PageRun, MemoryError>;

    fn next(&mut self) -> Option<Self::Item> {
        let from = self.at;
        self.step()
            .map_err(|source| {
                self.at = self.end;
                MemoryError::Access {
                    block: self.block.name().to_owned(),
                    action: "find the data of",
                    run: PageRun::new(from / PAGE_SIZE, (self.end - from) / PAGE_SIZE),
                    source,
                }
            })
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use godwit_units::{PageIndex, PageRun};

    use crate::DataHint;
    use crate::block::tests::block;

    #[test]
    fn extents_are_cut_to_the_run() {
        let block = block(64, false);
        for (start, pages) in [(0, 3), (10, 2), (60, 4)] {
            block.write(PageIndex(start), &vec![1; pages * 4096]).unwrap();
        }
        let extents = |start, count| {
            block
                .data(PageRun::new(start, count), &mut DataHint::default())
                .map(Result::unwrap)
                .collect::<Vec<_>>()
        };
        assert_eq!(extents(0, 64), [PageRun::new(0, 3), PageRun::new(10, 2), PageRun::new(60, 4)]);
        assert_eq!(extents(2, 9), [PageRun::new(2, 1), PageRun::new(10, 1)]);
        assert_eq!(extents(12, 48), []);
        assert_eq!(extents(62, 100), [PageRun::new(62, 2)]);
    }

    #[test]
    fn known_data_is_taken_for_granted_and_hides_no_other() {
        let block = block(64, false);
        for (start, pages) in [(0, 3), (10, 2), (60, 4)] {
            block.write(PageIndex(start), &vec![1; pages * 4096]).unwrap();
        }
        // Pages 12 to 14 have become holes since. Nobody has said what is at 0 and 60.
        let known = [PageRun::new(10, 5)];
        let extents = |start, count| {
            block
                .data_known(PageRun::new(start, count), &mut DataHint::default(), &known)
                .map(Result::unwrap)
                .collect::<Vec<_>>()
        };
        let all = [(0, 3), (10, 5), (60, 4)].map(|(start, count)| PageRun::new(start, count));
        assert_eq!(extents(0, 64), all);
        assert_eq!(extents(10, 54), all[1..]);
        assert_eq!(extents(12, 2), [PageRun::new(12, 2)]);
        block.write(PageIndex(15), &[1; 4096]).unwrap();
        assert_eq!(extents(9, 8), [PageRun::new(10, 5), PageRun::new(15, 1)]);
    }

    #[test]
    fn a_hint_spares_seeking_but_never_hides_data() {
        let block = block(64, false);
        block.write(PageIndex(0), &vec![1; 20 * 4096]).unwrap();
        let mut hint = DataHint::default();
        let mut extents = |start, count| {
            block
                .data(PageRun::new(start, count), &mut hint)
                .map(Result::unwrap)
                .collect::<Vec<_>>()
        };
        assert_eq!(extents(0, 10), [PageRun::new(0, 10)]);
        assert_eq!(extents(10, 20), [PageRun::new(10, 10)]);
        block.write(PageIndex(40), &[1; 4096]).unwrap();
        assert_eq!(extents(30, 34), [PageRun::new(40, 1)]);
    }
}
