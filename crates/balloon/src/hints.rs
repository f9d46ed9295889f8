//! What a guest has said to be free, between the device that hears it and the engine that sends
//! memory.
//!
//! Invariant: a segment's hints are given out once. Why that is needed, and why nothing else is, is
//! said at the head of the crate. The device adds from any thread; each segment is taken by one.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use godwit_bitmap::{AtomicDirtyBitmap, DirtyBitmap};
use godwit_memory::{SEGMENT_PAGES, segments};
use godwit_units::{PageCount, PageIndex, PageRun};

/// The pages of a VM that its guest has hinted to be free during one migration.
#[derive(Debug)]
pub struct FreeHints {
    /// In the order of [`segments`].
    segments: Vec<SegmentHints>,
    /// The number of each block's first segment.
    first: Vec<usize>,
    hinted: AtomicU64,
    complete: AtomicBool,
}

#[derive(Debug)]
struct SegmentHints {
    pages: PageCount,
    /// Made when the first hint comes: most segments of a large guest may have none.
    hinted: OnceLock<AtomicDirtyBitmap>,
    taken: AtomicBool,
    /// Left out, and not sent since.
    skipped: OnceLock<AtomicDirtyBitmap>,
}

impl SegmentHints {
    fn new(pages: PageCount) -> Self {
        Self {
            pages,
            hinted: OnceLock::new(),
            taken: AtomicBool::new(false),
            skipped: OnceLock::new(),
        }
    }
}

impl FreeHints {
    /// No hints yet, for RAM blocks of the sizes `blocks`.
    #[must_use]
    pub fn new(blocks: &[PageCount]) -> Self {
        let mut first = Vec::new();
        let mut next = 0;
        for pages in blocks {
            first.push(next);
            next += pages.0.div_ceil(SEGMENT_PAGES) as usize;
        }
        let segments =
            segments(blocks).map(|segment| SegmentHints::new(segment.run.count)).collect();
        Self { segments, first, hinted: AtomicU64::new(0), complete: AtomicBool::new(false) }
    }

    /// The device: the pages of `run` were free after the command id was issued. What lies beyond
    /// the block is left out.
    pub fn add(&self, block: usize, run: PageRun) {
        self.each(block, run, |segment, run| {
            if !segment.taken.load(Ordering::Relaxed) {
                let hinted = segment.hinted.get_or_init(|| AtomicDirtyBitmap::new(segment.pages));
                self.hinted.fetch_add(hinted.set(run).0, Ordering::Relaxed);
            }
        });
    }

    /// The device: the driver has no more.
    pub fn complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    /// Whether the driver has said that it has no more.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }

    /// How many pages were hinted so far.
    #[must_use]
    pub fn hinted(&self) -> PageCount {
        PageCount(self.hinted.load(Ordering::Relaxed))
    }

    /// The hinted pages of segment `segment`, numbered from its first page; `None` if there are
    /// none, and whenever it is asked again. Of these, those may be left out that are not reported
    /// by the harvest that follows.
    #[must_use]
    pub fn take(&self, segment: usize) -> Option<DirtyBitmap> {
        let segment = self.segments.get(segment)?;
        if segment.taken.swap(true, Ordering::Relaxed) {
            return None;
        }
        let mut taken = DirtyBitmap::new(segment.pages);
        segment.hinted.get()?.harvest_into(&mut taken, PageIndex(0));
        Some(taken)
    }

    /// The pages of `run` were left out, and named as zero.
    pub fn skip(&self, block: usize, run: PageRun) {
        self.each(block, run, |segment, run| {
            segment.skipped.get_or_init(|| AtomicDirtyBitmap::new(segment.pages)).set(run);
        });
    }

    /// The pages of `run` are sent as they are after all.
    pub fn unskip(&self, block: usize, run: PageRun) {
        self.each(block, run, |segment, run| {
            if let Some(skipped) = segment.skipped.get() {
                skipped.clear(run);
            }
        });
    }

    /// The pages of `run` that were left out and not sent since: at the destination they are zero,
    /// whatever they are here.
    pub fn skipped(&self, block: usize, run: PageRun, mut found: impl FnMut(PageIndex)) {
        let mut start = run.start.0;
        self.each(block, run, |segment, run| {
            if let Some(skipped) = segment.skipped.get() {
                let pages = run.start.0..run.end().0;
                let skipped = pages.filter(|page| skipped.is_set(PageIndex(*page)));
                skipped.for_each(|page| found(PageIndex(start + page - run.start.0)));
            }
            start += run.count.0;
        });
    }

    /// The parts of `run` by segment, numbered from the segment's first page.
    fn each(&self, block: usize, run: PageRun, mut f: impl FnMut(&SegmentHints, PageRun)) {
        let Some(&first) = self.first.get(block) else { return };
        let last = self.first.get(block + 1).copied().unwrap_or(self.segments.len());
        let (mut at, end) = (run.start.0, run.start.0.saturating_add(run.count.0));
        while at < end {
            let number = first + (at / SEGMENT_PAGES) as usize;
            let Some(segment) = self.segments[..last].get(number) else { return };
            let inside = at % SEGMENT_PAGES;
            let count = (end - at).min(segment.pages.0.saturating_sub(inside));
            if count == 0 {
                return;
            }
            f(segment, PageRun::new(inside, count));
            at += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BIG: u64 = 2 * SEGMENT_PAGES + 10;

    fn hints() -> FreeHints {
        FreeHints::new(&[PageCount(5), PageCount(BIG)])
    }

    fn taken(hints: &FreeHints, segment: usize) -> Option<Vec<PageRun>> {
        hints.take(segment).map(|taken| taken.runs().collect())
    }

    #[test]
    fn hints_are_found_by_segment() {
        let hints = hints();
        hints.add(1, PageRun::new(SEGMENT_PAGES - 1, SEGMENT_PAGES + 3));
        assert_eq!(hints.hinted(), PageCount(SEGMENT_PAGES + 3));
        assert_eq!(taken(&hints, 0), None);
        assert_eq!(taken(&hints, 1).unwrap(), [PageRun::new(SEGMENT_PAGES - 1, 1)]);
        assert_eq!(taken(&hints, 2).unwrap(), [PageRun::new(0, SEGMENT_PAGES)]);
        assert_eq!(taken(&hints, 3).unwrap(), [PageRun::new(0, 2)]);
    }

    #[test]
    fn hints_are_given_out_once() {
        let hints = hints();
        hints.add(0, PageRun::new(0, 5));
        assert!(hints.take(0).is_some());
        hints.add(0, PageRun::new(0, 5));
        assert_eq!(taken(&hints, 0), None);
        assert_eq!(hints.hinted(), PageCount(5));
    }

    #[test]
    fn what_is_beyond_a_block_is_left_out() {
        let hints = hints();
        for (block, start, count) in
            [(0, 4, u64::MAX), (1, BIG, 7), (2, 0, 1), (0, u64::MAX, 1), (1, 3, 0)]
        {
            hints.add(block, PageRun::new(start, count));
        }
        assert_eq!(hints.hinted(), PageCount(1));
        assert_eq!(taken(&hints, 0).unwrap(), [PageRun::new(4, 1)]);
        assert_eq!((1..4).find_map(|segment| taken(&hints, segment)), None);
    }

    #[test]
    fn what_was_left_out_is_known_until_it_is_sent() {
        let hints = hints();
        hints.skip(1, PageRun::new(SEGMENT_PAGES - 2, 4));
        hints.unskip(1, PageRun::new(SEGMENT_PAGES - 1, 1));
        hints.unskip(1, PageRun::new(0, 1));
        let mut found = Vec::new();
        hints.skipped(1, PageRun::new(SEGMENT_PAGES - 5, 200), |page| found.push(page.0));
        assert_eq!(found, [SEGMENT_PAGES - 2, SEGMENT_PAGES, SEGMENT_PAGES + 1]);
    }
}
