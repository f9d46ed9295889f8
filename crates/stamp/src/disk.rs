//! The workload of a disk: blocks that say what they should hold, and buffers into which they were
//! read.
//!
//! A write gives a block its next version. A read takes a block into one of many buffers, and is
//! checked at once: that is the disk. Each buffer is looked at again until it is used for another
//! block: that is memory that a device has written. A migration that loses what a device wrote late
//! leaves an older block in a buffer, which the second look finds. Where the first one does, the
//! disk is asked again, and is not blamed for what it then gives right.
//!
//! Doing the I/O is left to the caller, by [`Blocks`].

use core::fmt;
use std::io;

use godwit_units::{PageCount, PageIndex};

use crate::stamp::{Fault, Page, mix};

/// Pages that are written at once to fill a disk: 1 MiB.
const FILL: usize = 256;

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

    /// Reads a block into a buffer, both at random, and checks it.
    ///
    /// # Errors
    /// Those of the device.
    pub fn read(&mut self) -> io::Result<Option<DiskBug>> {
        let (at, buffer) = (self.next(self.generations.len()), self.next(self.held.len()));
        let start = self.start(at);
        let into = buffer * self.block..(buffer + 1) * self.block;
        self.held[buffer] = None;
        self.disk.read(start, &mut self.buffers[into])?;
        self.held[buffer] = Some(Held { block: at, generation: self.generations[at] });
        let Some(mut bug) = self.look(buffer, Place::Disk) else { return Ok(None) };
        // What was read may have been lost on its way into memory.
        let read = self.disk.read(start, &mut self.scratch);
        let again = &self.scratch[(bug.page.0 - start.0) as usize];
        if read.is_ok() && again.inspect(bug.page.0, bug.generation).is_ok() {
            bug.place = Place::Buffer;
        }
        // What else is wrong in it is no news, and no damage of memory's.
        self.held[buffer] = None;
        Ok(Some(bug))
    }

    /// Looks at the next buffer again.
    pub fn check(&mut self) -> Option<DiskBug> {
        let buffer = self.next_look;
        self.next_look = (buffer + 1) % self.held.len();
        self.look(buffer, Place::Buffer)
    }

    fn look(&mut self, buffer: usize, place: Place) -> Option<DiskBug> {
        let Held { block, generation } = self.held[buffer]?;
        let start = self.start(block);
        let pages = &mut self.buffers[buffer * self.block..(buffer + 1) * self.block];
        for (index, page) in (start.0..).zip(pages) {
            if page.stamps_match(index, generation) {
                continue;
            }
            if let Err(fault) = page.inspect(index, generation) {
                // Told once.
                *page = Page::expected(index, generation);
                return Some(DiskBug { place, page: PageIndex(index), generation, fault });
            }
        }
        None
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
            assert_eq!(workload.read().unwrap(), None);
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
        let bug = (0..1000).find_map(|_| workload.read().unwrap()).unwrap();
        assert_eq!((bug.place, bug.page, bug.generation), (Place::Disk, PageIndex(20), 1));
        assert!(
            bug.to_string().starts_with("BUG disk page=20 expected=generation 1 found="),
            "{bug}"
        );
    }

    /// A disk of which a read never arrives in memory.
    struct Late(Memory, u32);

    impl Blocks for Late {
        fn read(&mut self, start: PageIndex, pages: &mut [Page]) -> io::Result<()> {
            self.1 += 1;
            if self.1 == 100 { Ok(()) } else { self.0.read(start, pages) }
        }

        fn write(&mut self, start: PageIndex, pages: &[Page]) -> io::Result<()> {
            self.0.write(start, pages)
        }
    }

    #[test]
    fn a_read_that_never_arrived_in_memory_is_not_blamed_on_the_disk() {
        let disk = Late(Memory((0..64).map(Page::first).collect()), 0);
        let mut workload = DiskWorkload::fill(disk, PageIndex(8), PageCount(33), 2, 4).unwrap();
        let bugs: Vec<DiskBug> = (0..150).filter_map(|_| workload.read().unwrap()).collect();
        let [bug] = &bugs[..] else { panic!("{bugs:?}") };
        assert_eq!(bug.place, Place::Buffer);
        assert!(bug.to_string().starts_with("BUG buffer of disk page="), "{bug}");
        assert!(bug.to_string().contains("found=content of page"), "{bug}");
    }

    #[test]
    fn what_a_buffer_lost_is_found_there_and_told_once() {
        let mut workload = workload();
        (0..100).for_each(|_| assert_eq!(workload.read().unwrap(), None));
        workload.buffers[3] = Page::expected(1, 1);
        let bugs: Vec<DiskBug> = (0..8).filter_map(|_| workload.check()).collect();
        assert_eq!(bugs.len(), 1);
        assert_eq!(bugs[0].place, Place::Buffer);
    }
}
