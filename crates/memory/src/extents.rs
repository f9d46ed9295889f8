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
//! it is walked again. Who looks here and there while others write walks nowhere
//! ([`RamBlock::data_coarse`]): a walk holds the lock that every write to the file takes.

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
    /// Without one, no end of data is walked to.
    hint: Option<&'a mut DataHint>,
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
        hint: Option<&'a mut DataHint>,
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
        let seen = self.hint.as_deref().copied();
        let reach = match seen {
            Some(seen) if (seen.start..seen.end).contains(&self.at) => seen.end,
            _ => match self.look(seen.is_some())? {
                Some(reach) => reach,
                None => return Ok(None),
            },
        };
        let start = self.at;
        self.at = reach.min(self.end);
        let first = start / PAGE_SIZE;
        Ok(Some(PageRun::new(first, (self.at - start).div_ceil(PAGE_SIZE))))
    }

    /// Goes to the next data; returns up to where it reaches, and keeps that if it is to be
    /// `walked` to.
    fn look(&mut self, walked: bool) -> io::Result<Option<u64>> {
        let mut known = self.known_end(self.at);
        let data = match known {
            Some(_) => self.at,
            None => self.backing.data_from(self.at, self.end)?.unwrap_or(self.end),
        };
        self.at = data;
        if data >= self.end {
            self.at = self.end;
            return Ok(None);
        }
        known = known.or_else(|| self.known_end(data));
        let reach = match known {
            Some(end) => end,
            None if walked => self.backing.hole_from(data, self.end)?.unwrap_or(self.end),
            None => self.backing.data_end(data, self.end)?,
        };
        // A hole punched between the two calls: never look at the same spot twice.
        let reach = reach.max(data + PAGE_SIZE);
        if let Some(hint) = self.hint.as_deref_mut() {
            *hint = DataHint { start: data, end: reach };
        }
        Ok(Some(reach))
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

    #[test]
    fn a_coarse_look_ends_with_its_piece_and_hides_no_data() {
        let block = block(300, false);
        block.write(PageIndex(2), &vec![1; 200 * 4096]).unwrap();
        block.write(PageIndex(250), &[1; 4096]).unwrap();
        let coarse = |start, count| {
            let extents = block.data_coarse(PageRun::new(start, count)).map(Result::unwrap);
            extents.map(|run| (run.start.0, run.count.0)).collect::<Vec<_>>()
        };
        // In pieces of 64 pages, however far the data reaches: nobody walked to its end.
        assert_eq!(coarse(0, 300), [(2, 62), (64, 64), (128, 64), (192, 64)]);
        assert_eq!(coarse(0, 1), []);
        assert_eq!(coarse(5, 3), [(5, 3)]);
        assert_eq!(coarse(240, 40), [(250, 6)]);
        assert_eq!(coarse(260, 40), []);
    }
}
