//! Where a RAM file holds data and where it has holes.
//!
//! `SEEK_DATA` and `SEEK_HOLE` (lseek(2)) count a page that was swapped out as data, so nothing that the guest
//! ever wrote is taken for a hole.

use std::fs::File;

use godwit_units::{PAGE_SIZE, PageRun};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::{MemoryError, RamBlock};

/// Iterator over the data extents within a run of pages, see [`RamBlock::data`].
#[derive(Debug)]
pub struct DataExtents<'a> {
    block: &'a RamBlock,
    file: &'a File,
    /// File offsets, in bytes.
    at: u64,
    end: u64,
}

impl<'a> DataExtents<'a> {
    pub(crate) fn new(block: &'a RamBlock, file: &'a File, run: PageRun) -> Self {
        let run = run.intersect(block.all()).unwrap_or(PageRun::new(0, 0));
        let offset = block.file_offset();
        Self { block, file, at: offset + run.start.offset(), end: offset + run.end().offset() }
    }

    fn seek(&self, target: SeekFrom) -> Result<u64, Errno> {
        match rustix::fs::seek(self.file, target) {
            // Past the last data, or past the end of the file.
            Err(Errno::NXIO) => Ok(self.end),
            other => other.map(|at| at.min(self.end)),
        }
    }

    fn step(&mut self) -> Result<Option<PageRun>, Errno> {
        if self.at >= self.end {
            return Ok(None);
        }
        let data = self.seek(SeekFrom::Data(self.at))?;
        if data >= self.end {
            self.at = self.end;
            return Ok(None);
        }
        let hole = self.seek(SeekFrom::Hole(data))?;
        // A hole punched between the two calls: look again from here on, never loop on the spot.
        self.at = hole.max(data + PAGE_SIZE).min(self.end);
        let first = (data - self.block.file_offset()) / PAGE_SIZE;
        Ok(Some(PageRun::new(first, (self.at - data).div_ceil(PAGE_SIZE))))
    }
}

impl Iterator for DataExtents<'_> {
    type Item = Result<PageRun, MemoryError>;

    fn next(&mut self) -> Option<Self::Item> {
        let from = self.at;
        self.step()
            .map_err(|errno| {
                self.at = self.end;
                let offset = self.block.file_offset();
                MemoryError::Access {
                    block: self.block.name().to_owned(),
                    action: "find the data of",
                    run: PageRun::new((from - offset) / PAGE_SIZE, (self.end - from) / PAGE_SIZE),
                    source: errno.into(),
                }
            })
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use godwit_units::{PageIndex, PageRun};

    use crate::block::tests::block;

    #[test]
    fn extents_are_cut_to_the_run() {
        let block = block(64, false);
        for (start, pages) in [(0, 3), (10, 2), (60, 4)] {
            block.write(PageIndex(start), &vec![1; pages * 4096]).unwrap();
        }
        let extents =
            |start, count| block.data(PageRun::new(start, count)).map(Result::unwrap).collect::<Vec<_>>();
        assert_eq!(extents(0, 64), [PageRun::new(0, 3), PageRun::new(10, 2), PageRun::new(60, 4)]);
        assert_eq!(extents(2, 9), [PageRun::new(2, 1), PageRun::new(10, 1)]);
        assert_eq!(extents(12, 48), []);
        assert_eq!(extents(62, 100), [PageRun::new(62, 2)]);
    }
}
