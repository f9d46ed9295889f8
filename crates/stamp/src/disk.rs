//! The workload of a disk: blocks that say what they should hold, and buffers into which they were
//! read.
//!
//! A write gives a block its next version. A read takes a block into one of many buffers, and is
//! checked at once: that is the disk. Each buffer is looked at again until it is used for another
//! block: that is memory that a device has written. A migration that loses what a device wrote late
//! leaves an older block in a buffer, which the second look finds. Where the first one does, the
//! disk is asked again for all of the block, and each page that is wrong is judged by itself: what
//! the disk then gives right was lost in memory, what it gives again as it was is the disk's, and
//! of anything else it is not known.
//!
//! Doing the I/O is left to the caller, by [`Blocks`].

use core::fmt;
use std::io;

use godwit_units::{PageCount, PageIndex};

use crate::stamp::{Fault, Page, mix};

/// Pages that are written at once to fill a disk: 1 MiB.
const FILL: usize = 256;
/// A page that no disk has.
const NOWHERE: u64 = u64::MAX;

/// A disk, in pages of 4 KiB.
pub trait Blocks {
    /// Reads the pages from `start` on into `pages`.
    ///
    /// # Errors
    /// Those of the device.
    fn read(&mut self, start: PageIndex, pages: &mut [Page]) -> io::Result<()>;

    /// Writes `pages` from `start` on.
    ///
    /// # Errors
    /// Those of the device.
    fn write(&mut self, start: PageIndex, pages: &[Page]) -> io::Result<()>;
}

/// Where a wrong page was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The disk gave it so.
    Disk,
    /// The disk had given it right, or does when it is asked again, and in memory it is something
    /// else.
    Buffer,
    /// Either: the disk, asked again, gave neither what is right nor the same once more, or
    /// nothing.
    Unknown,
}

impl Place {
    /// Where `bug` is, of a page that was read as `found`, and at once again, into other memory, as
    /// `again`; none where that read failed.
    fn of(bug: &DiskBug, found: &Page, again: Option<&Page>) -> Self {
        match again {
            Some(again) if again.inspect(bug.page.0, bug.generation).is_ok() => Self::Buffer,
            Some(again) if again.0 == found.0 => Self::Disk,
            _ => Self::Unknown,
        }
    }
}

/// A page that is not what was written last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskBug {
    /// Where.
    pub place: Place,
    /// The page of the disk.
    pub page: PageIndex,
    /// The version it should have.
    pub generation: u64,
    /// What it is instead.
    pub fault: Fault,
}

impl fmt::Display for DiskBug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, page, generation, fault } = self;
        let place = match place {
            Place::Disk => "disk",
            Place::Buffer => "buffer of disk",
            Place::Unknown => "disk or its buffer",
        };
        write!(
            f,
            "{} {place} page={} expected=generation {generation} found={fault}",
            crate::heartbeat::BUG,
            page.0
        )
    }
}

/// What a buffer holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    block: usize,
    generation: u64,
}

/// A part of a disk that is written, read and checked.
#[derive(Debug)]
pub struct DiskWorkload<B> {
    disk: B,
    first: PageIndex,
    /// Pages in a block, which is read and written as one.
    block: usize,
    /// The version of each block, 1 after the filling.
    generations: Vec<u64>,
    scratch: Vec<Page>,
    buffers: Vec<Page>,
    held: Vec<Option<Held>>,
    next_look: usize,
    random: u64,
}

impl<B: Blocks> DiskWorkload<B> {
    /// Fills the pages from `first` on, as many as are whole blocks of `block` pages in `pages`,
    /// with their first version. Reads go into `buffers` buffers of a block each.
    ///
    /// # Errors
    /// Those of the device.
    ///
    /// # Panics
    /// When there is not a single block or buffer.
    pub fn fill(
        disk: B,
        first: PageIndex,
        pages: PageCount,
        block: usize,
        buffers: usize,
    ) -> io::Result<Self> {
        let blocks = pages.0 as usize / block.max(1);
        assert!(
            blocks > 0 && buffers > 0 && block > 0,
            "a block of {block} pages, {pages}, {buffers} buffers"
        );
        let zero = |count: usize| (0..count).map(|_| Page::first(0)).collect::<Vec<_>>();
        let mut workload = Self {
            disk,
            first,
            block,
            generations: vec![0; blocks],
            scratch: zero(block),
            buffers: zero(block * buffers),
            held: vec![None; buffers],
            next_look: 0,
            random: first.0 + 1,
        };
        workload.write_first()?;
        Ok(workload)
    }

    /// Writes the first version of all blocks, many at once.
    fn write_first(&mut self) -> io::Result<()> {
        let mut at = 0;
        while at < self.generations.len() * self.block {
            let start = self.first.0 + at as u64;
            let count = FILL.min(self.generations.len() * self.block - at);
            let pages: Vec<Page> =
                (start..).take(count).map(|index| Page::expected(index, 1)).collect();
            self.disk.write(PageIndex(start), &pages)?;
            at += count;
        }
        self.generations.fill(1);
        Ok(())
    }

    /// Writes the next version of a block, at random.
    ///
    /// # Errors
    /// Those of the device.
    pub fn write(&mut self) -> io::Result<()> {
        let at = self.next(self.generations.len());
        self.write_block(at)
    }

    fn write_block(&mut self, at: usize) -> io::Result<()> {
        let generation = self.generations[at] + 1;
        let start = self.start(at);
        for (index, page) in (start.0..).zip(&mut self.scratch) {
            *page = Page::expected(index, generation);
        }
        self.disk.write(start, &self.scratch)?;
        self.generations[at] = generation;
        Ok(())
    }

    /// Reads a block into a buffer, both at random, and checks it. Of the pages that are wrong, the
    /// first of each [`Place`] is told.
    ///
    /// # Errors
    /// Those of the device.
    pub fn read(&mut self) -> io::Result<Vec<DiskBug>> {
        let (at, buffer) = (self.next(self.generations.len()), self.next(self.held.len()));
        let (start, into) = (self.start(at), self.pages_of(buffer));
        self.held[buffer] = None;
        self.disk.read(start, &mut self.buffers[into])?;
        self.held[buffer] = Some(Held { block: at, generation: self.generations[at] });
        let mut wrong = self.wrong(buffer);
        if !wrong.is_empty() {
            self.judge(start, buffer, &mut wrong);
            // They are told, and are no damage of memory's when it is looked at again.
            self.held[buffer] = None;
        }
        Ok(wrong)
    }

    /// Asks the disk again for a block of which pages are wrong in `buffer`. Of these, the first of
    /// each place is left.
    #[cold]
    fn judge(&mut self, start: PageIndex, buffer: usize, wrong: &mut Vec<DiskBug>) {
        // Where a read does not arrive this stays, and no block that was read before.
        self.scratch.fill(Page::first(NOWHERE));
        let read = self.disk.read(start, &mut self.scratch);
        let found = &self.buffers[self.pages_of(buffer)];
        for bug in &mut *wrong {
            let at = (bug.page.0 - start.0) as usize;
            let again = read.is_ok().then_some(&self.scratch[at]);
            bug.place = Place::of(bug, &found[at], again);
        }
        let mut told = Vec::new();
        wrong.retain(|bug| {
            let is_first = !told.contains(&bug.place);
            told.push(bug.place);
            is_first
        });
    }

    /// Looks at the next buffer again.
    pub fn check(&mut self) -> Option<DiskBug> {
        let buffer = self.next_look;
        self.next_look = (buffer + 1) % self.held.len();
        let bug = self.wrong(buffer).into_iter().next()?;
        // Told once.
        let start = self.start(self.held[buffer]?.block);
        let at = buffer * self.block + (bug.page.0 - start.0) as usize;
        self.buffers[at] = Page::expected(bug.page.0, bug.generation);
        Some(bug)
    }

    /// The pages that are wrong in a buffer.
    fn wrong(&self, buffer: usize) -> Vec<DiskBug> {
        let Some(Held { block, generation }) = self.held[buffer] else { return Vec::new() };
        let pages = (self.start(block).0..).zip(&self.buffers[self.pages_of(buffer)]);
        let suspects = pages.filter(|(index, page)| !page.stamps_match(*index, generation));
        suspects
            .filter_map(|(index, page)| {
                let fault = page.inspect(index, generation).err()?;
                Some(DiskBug { place: Place::Buffer, page: PageIndex(index), generation, fault })
            })
            .collect()
    }

    fn pages_of(&self, buffer: usize) -> core::ops::Range<usize> {
        buffer * self.block..(buffer + 1) * self.block
    }

    fn start(&self, block: usize) -> PageIndex {
        PageIndex(self.first.0 + (block * self.block) as u64)
    }

    fn next(&mut self, limit: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.random) % limit as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk in memory.
    struct Memory(Vec<Page>);

    impl Blocks for Memory {
        fn read(&mut self, start: PageIndex, pages: &mut [Page]) -> io::Result<()> {
            pages.clone_from_slice(&self.0[start.0 as usize..][..pages.len()]);
            Ok(())
        }

        fn write(&mut self, start: PageIndex, pages: &[Page]) -> io::Result<()> {
            self.0[start.0 as usize..][..pages.len()].clone_from_slice(pages);
            Ok(())
        }
    }

    fn workload() -> DiskWorkload<Memory> {
        let disk = Memory((0..64).map(Page::first).collect());
        DiskWorkload::fill(disk, PageIndex(8), PageCount(33), 2, 4).unwrap()
    }

    #[test]
    fn a_good_disk_has_no_bug() {
        let mut workload = workload();
        for _ in 0..2000 {
            workload.write().unwrap();
            assert_eq!(workload.read().unwrap(), []);
            assert_eq!(workload.check(), None);
        }
        assert!(workload.generations.iter().all(|&generation| generation > 1));
        // Nothing beside its own part was touched.
        let Memory(pages) = &workload.disk;
        assert!((0..8).chain(40..64).all(|at| pages[at as usize].stamps_match(at, 0)));
    }

    #[test]
    fn an_older_block_is_found_on_the_disk() {
        let mut workload = workload();
        workload.disk.0[20] = Page::expected(20, 7);
        let bug = (0..1000).find_map(|_| workload.read().unwrap().pop()).unwrap();
        assert_eq!((bug.place, bug.page, bug.generation), (Place::Disk, PageIndex(20), 1));
        assert!(
            bug.to_string().starts_with("BUG disk page=20 expected=generation 1 found="),
            "{bug}"
        );
    }

    /// A disk of which the reads of a block go wrong: the nth, from 0 on, is changed in memory,
    /// where something else stood before.
    struct Wrong<F>(Memory, u32, F);

    impl<F> Blocks for Wrong<F>
    where
        F: FnMut(u32, &[Page], &mut [Page]) -> io::Result<()>,
    {
        fn read(&mut self, start: PageIndex, pages: &mut [Page]) -> io::Result<()> {
            let before = pages.to_vec();
            self.0.read(start, pages)?;
            if start != PageIndex(20) {
                return Ok(());
            }
            self.1 += 1;
            (self.2)(self.1 - 1, &before, pages)
        }

        fn write(&mut self, start: PageIndex, pages: &[Page]) -> io::Result<()> {
            self.0.write(start, pages)
        }
    }

    /// What is said where the block of pages 20 and 21 is read `wrong`, with an older version of
    /// the pages `old` on the disk, when it was found `found` times before.
    fn said(
        old: &[usize],
        found: usize,
        wrong: impl FnMut(u32, &[Page], &mut [Page]) -> io::Result<()>,
    ) -> Vec<(Place, u64)> {
        let disk = Wrong(Memory((0..64).map(Page::first).collect()), 0, wrong);
        let mut workload = DiskWorkload::fill(disk, PageIndex(8), PageCount(33), 2, 4).unwrap();
        for &page in old {
            workload.disk.0.0[page] = Page::expected(page as u64, 7);
        }
        let bugs = (0..1000).map(|_| workload.read().unwrap());
        let bugs = bugs.filter(|bugs| !bugs.is_empty()).nth(found).unwrap();
        bugs.iter().map(|bug| (bug.place, bug.page.0)).collect()
    }

    #[test]
    fn a_read_that_never_arrived_in_memory_is_not_blamed_on_the_disk() {
        let mut lines = Vec::new();
        let lost = |nth: u32, before: &[Page], pages: &mut [Page]| {
            if nth == 1 {
                pages.clone_from_slice(before);
            }
            Ok(())
        };
        let disk = Wrong(Memory((0..64).map(Page::first).collect()), 0, lost);
        let mut workload = DiskWorkload::fill(disk, PageIndex(8), PageCount(33), 2, 4).unwrap();
        for _ in 0..1000 {
            lines.extend(workload.read().unwrap().iter().map(ToString::to_string));
        }
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert!(line.starts_with("BUG buffer of disk page=20 "), "{line}");
        assert!(line.contains("found=content of page"), "{line}");
    }

    #[test]
    fn each_page_of_a_block_is_judged_by_itself() {
        // Cause: the first page that was wrong spoke for all of its block; others went unsaid.
        for (old, lost) in [(20, 21), (21, 20)] {
            let lose = |nth: u32, before: &[Page], pages: &mut [Page]| {
                if nth == 0 {
                    pages[lost - 20] = before[lost - 20].clone();
                }
                Ok(())
            };
            let mut said = said(&[old], 0, lose);
            said.sort_by_key(|(_, page)| page.abs_diff(old as u64));
            assert_eq!(said, [(Place::Disk, old as u64), (Place::Buffer, lost as u64)]);
        }
        // Of each place it is told once.
        assert_eq!(said(&[20, 21], 0, |_, _, _| Ok(())), [(Place::Disk, 20)]);
    }

    #[test]
    fn where_the_disk_cannot_be_asked_again_nothing_is_blamed_for_certain() {
        let unknown = [(Place::Unknown, 20)];
        let fails = |nth: u32, _: &[Page], _: &mut [Page]| {
            if nth == 1 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
        };
        assert_eq!(said(&[20], 0, fails), unknown);
        // The second time that it is asked again: what it gave the first time proves nothing.
        let never_arrives = |nth: u32, before: &[Page], pages: &mut [Page]| {
            if nth == 3 {
                pages.clone_from_slice(before);
            }
            Ok(())
        };
        assert_eq!(said(&[20], 0, never_arrives), [(Place::Disk, 20)]);
        assert_eq!(said(&[20], 1, never_arrives), unknown);
        let something_else = |nth: u32, _: &[Page], pages: &mut [Page]| {
            if nth == 1 {
                pages[0] = Page::expected(20, 9);
            }
            Ok(())
        };
        assert_eq!(said(&[20], 0, something_else), unknown);
        let bug = DiskBug {
            place: Place::Unknown,
            page: PageIndex(20),
            generation: 1,
            fault: Fault::Zeroed,
        };
        assert_eq!(
            bug.to_string(),
            "BUG disk or its buffer page=20 expected=generation 1 found=all zeroes"
        );
    }

    #[test]
    fn what_a_buffer_lost_is_found_there_and_told_once() {
        let mut workload = workload();
        (0..100).for_each(|_| assert_eq!(workload.read().unwrap(), []));
        workload.buffers[3] = Page::expected(1, 1);
        let bugs: Vec<DiskBug> = (0..8).filter_map(|_| workload.check()).collect();
        assert_eq!(bugs.len(), 1);
        assert_eq!(bugs[0].place, Place::Buffer);
    }
}
