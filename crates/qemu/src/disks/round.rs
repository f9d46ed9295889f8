//! One round of one disk: what is dirty, where it reads as zeros, and its bytes.
//!
//! What reads as zeros is asked for (`base:allocation`) a window ahead of the reads, over the same
//! connection. In the first round whatever has been asked for is told to the tracking, before it is
//! sent: a write behind that point may have been missed, one ahead of it has not.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_bitmap::DirtyBitmap;
use godwit_disk::{Content, Disk, DiskError, DiskRound, Extent};
use godwit_nbd::{ALLOCATION, Asked, STRETCH_MAX, Stretch, Wish, ZERO};
use godwit_units::{ByteCount, PAGE_SIZE, PageCount, PageIndex, PageRun};

use crate::QemuError;
use crate::disks::pooled::Pooled;

/// Reads and status requests under way; together no more than a server works at
/// ([`godwit_nbd::DEPTH`]).
const READS: usize = 12;
const STATUSES: usize = 4;
/// Bytes whose status is asked for at once. What the guest writes within the windows under way
/// counts as behind the copy, so they begin small; they grow over parts that are nothing but zeros.
/// A multiple of every granularity.
const WINDOW: u64 = 16 << 20;

/// How a server is asked for the disk of that name, to read it.
pub(crate) fn reading(name: &str) -> Wish {
    Wish::new(name).with_context(ALLOCATION).ahead()
}

/// What is dirty in a round.
#[derive(Debug)]
pub(crate) enum Dirty {
    /// The first round: all of it.
    All {
        /// How far has been asked, in bytes.
        asked: Arc<AtomicU64>,
    },
    /// Blocks, one bit each.
    Blocks { blocks: DirtyBitmap, granularity: ByteCount },
}

/// A round of a disk.
#[derive(Debug)]
pub(crate) struct Round {
    disk: Disk,
    dirty: Dirty,
    link: Pooled,
    /// From which byte on nothing was asked about yet.
    next: u64,
    window: u64,
    statuses: VecDeque<(u64, u64, Asked)>,
    /// Extents that are known and not yet handed out.
    extents: VecDeque<Extent>,
    reads: VecDeque<(PageRun, Asked)>,
}

impl Round {
    pub(crate) fn new(disk: Disk, dirty: Dirty, link: Pooled) -> Self {
        Self {
            disk,
            dirty,
            link,
            next: 0,
            window: WINDOW,
            statuses: VecDeque::new(),
            extents: VecDeque::new(),
            reads: VecDeque::new(),
        }
    }

    /// The next dirty bytes from `from` on, at most a window of them.
    fn dirty_from(&self, from: u64) -> Option<(u64, u64)> {
        let size = self.disk.size.0;
        let (start, end) = match &self.dirty {
            Dirty::All { .. } => (from, size),
            Dirty::Blocks { blocks, granularity } => {
                let first = PageIndex(from.div_ceil(granularity.0));
                let run = (first.0 < blocks.len().0).then(|| blocks.next_run(first)).flatten()?;
                (run.start.0 * granularity.0, (run.end().0 * granularity.0).min(size))
            }
        };
        let end = end.min(start.saturating_add(self.window));
        (start < end).then_some((start, end))
    }

    fn ask_statuses(&mut self) -> Result<(), QemuError> {
        while self.statuses.len() < STATUSES {
            let Some((start, end)) = self.dirty_from(self.next) else { return Ok(()) };
            if let Dirty::All { asked } = &self.dirty {
                asked.store(end, Ordering::SeqCst);
            }
            let asked = self.link.link()?.ask_status(start, (end - start) as u32)?;
            self.statuses.push_back((start, end, asked));
            self.next = end;
        }
        Ok(())
    }

    /// Takes the oldest status, and what is missing of it. False when there is none.
    fn take_status(&mut self) -> Result<bool, QemuError> {
        let Some((start, end, asked)) = self.statuses.pop_front() else { return Ok(false) };
        let found = self.link.take_status(asked, end)?;
        let all_zero = found.iter().all(|stretch| stretch.flags & ZERO != 0);
        let grown = (self.window * 2).min(STRETCH_MAX.into());
        self.window = if all_zero { grown } else { WINDOW };
        self.extents.extend(extents(&found, start, end, self.disk.size.0));
        Ok(true)
    }
}

/// Bytes of `run` that are within `disk`.
pub(super) fn byte_length(disk: &Disk, run: PageRun) -> u64 {
    run.count.bytes().0.min(disk.size.0.saturating_sub(run.start.offset()))
}

/// Whole pages of `start..end`, those that are nothing but zeros apart. Both are at page borders,
/// or the end is that of the disk.
pub(super) fn extents(found: &[Stretch], start: u64, end: u64, size: u64) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut push = |from: u64, to: u64, content| {
        if from >= to {
            return;
        }
        match extents.last_mut().filter(|last| last.content == content) {
            Some(last) => last.run.count = PageCount(to - last.run.start.0),
            None => extents.push(Extent { run: PageRun::new(from, to - from), content }),
        }
    };
    let last_page = end.div_ceil(PAGE_SIZE);
    let mut at = start / PAGE_SIZE;
    let mut zeros = merged_zeros(found);
    zeros.retain(|(from, to)| from < to);
    for (from, to) in zeros {
        let first = from.div_ceil(PAGE_SIZE).max(at);
        // The rest of the last page is no part of the disk.
        let behind = if to >= size { last_page } else { (to / PAGE_SIZE).min(last_page) };
        if first < behind {
            push(at, first, Content::Data);
            push(first, behind, Content::Zero);
            at = behind;
        }
    }
    push(at, last_page, Content::Data);
    extents
}

/// Stretches that read as zeros, neighbours in one.
fn merged_zeros(found: &[Stretch]) -> Vec<(u64, u64)> {
    let mut zeros: Vec<(u64, u64)> = Vec::new();
    for stretch in found.iter().filter(|stretch| stretch.flags & ZERO != 0) {
        let end = stretch.offset + stretch.length;
        match zeros.last_mut().filter(|last| last.1 == stretch.offset) {
            Some(last) => last.1 = end,
            None => zeros.push((stretch.offset, end)),
        }
    }
    zeros
}

impl DiskRound for Round {
    fn dirty(&self) -> Option<ByteCount> {
        match &self.dirty {
            Dirty::All { .. } => None,
            Dirty::Blocks { blocks, granularity } => {
                Some(ByteCount(blocks.count().0 * granularity.0))
            }
        }
    }

    fn next(&mut self) -> Result<Option<Extent>, DiskError> {
        loop {
            self.ask_statuses()?;
            if let Some(extent) = self.extents.pop_front() {
                return Ok(Some(extent));
            }
            if !self.take_status()? {
                return Ok(None);
            }
        }
    }

    fn submit(&mut self, run: PageRun) -> Result<(), DiskError> {
        let length = byte_length(&self.disk, run) as u32;
        let asked =
            self.link.link()?.ask_read(run.start.offset(), length).map_err(QemuError::from)?;
        self.reads.push_back((run, asked));
        Ok(())
    }

    fn depth(&self) -> usize {
        READS
    }

    fn complete(&mut self, bytes: &mut [u8]) -> Result<(), DiskError> {
        let (run, asked) =
            self.reads.pop_front().unwrap_or_else(|| panic!("nothing was asked for"));
        assert_eq!(bytes.len() as u64, run.count.bytes().0, "another length than was asked for");
        let (within, beyond) = bytes.split_at_mut(byte_length(&self.disk, run) as usize);
        beyond.fill(0);
        Ok(self.link.link()?.take_read(asked, within).map_err(QemuError::from)?)
    }
}

#[cfg(test)]
mod tests {
    use godwit_nbd::HOLE;

    use super::*;

    fn stretches(of: &[(u64, u32)]) -> Vec<Stretch> {
        let mut offset = 0;
        let mut next = |(length, flags): &(u64, u32)| {
            offset += length;
            Stretch { offset: offset - length, length: *length, flags: *flags }
        };
        of.iter().map(&mut next).collect()
    }

    fn cut(of: &[(u64, u32)], size: u64) -> Vec<(u64, u64, Content)> {
        let found = stretches(of);
        let end = found.iter().map(|stretch| stretch.length).sum();
        let extents = extents(&found, 0, end, size);
        extents
            .iter()
            .map(|extent| (extent.run.start.0, extent.run.count.0, extent.content))
            .collect()
    }

    #[test]
    fn a_page_is_zero_only_where_all_of_it_is() {
        use Content::{Data, Zero};
        let large = 1 << 30;
        assert_eq!(cut(&[(8192, 0)], large), [(0, 2, Data)]);
        assert_eq!(cut(&[(8192, ZERO)], large), [(0, 2, Zero)]);
        assert_eq!(cut(&[(6144, 0), (10240, ZERO)], large), [(0, 2, Data), (2, 2, Zero)]);
        assert_eq!(cut(&[(6144, ZERO), (2048, 0)], large), [(0, 1, Zero), (1, 1, Data)]);
        assert_eq!(cut(&[(2048, ZERO), (2048, ZERO | HOLE)], large), [(0, 1, Zero)]);
        assert_eq!(cut(&[(512, 0), (4096, ZERO), (3584, 0)], large), [(0, 2, Data)]);
        assert_eq!(cut(&[(4096, HOLE), (4096, ZERO)], large), [(0, 1, Data), (1, 1, Zero)]);
    }

    #[test]
    fn the_end_of_the_disk_ends_its_last_page() {
        use Content::{Data, Zero};
        assert_eq!(cut(&[(4096, 0), (512, ZERO)], 4608), [(0, 1, Data), (1, 1, Zero)]);
        assert_eq!(cut(&[(4096, ZERO), (512, 0)], 4608), [(0, 1, Zero), (1, 1, Data)]);
    }
}
