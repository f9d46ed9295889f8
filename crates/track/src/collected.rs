//! What a harvest has collected before it is reported: one bitmap over the pages that were asked
//! for.
//!
//! Logs come in pieces (slots, several logs of the same memory) that begin at any bit, may overlap
//! and cut runs in two. Merged here at their offset, whole words at a time, they come out once, in
//! order and as maximal runs. Buffers are reused: a harvest allocates nothing once its size was
//! seen.

use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};

use godwit_bitmap::DirtyBitmap;
use godwit_units::{PageCount, PageIndex, PageRun};

/// Bitmaps to collect in, as many as there are harvests at a time.
#[derive(Debug, Default)]
pub(crate) struct Collectors {
    spare: Mutex<Vec<DirtyBitmap>>,
}

/// The dirty pages of one request, counted from its first page.
#[derive(Debug)]
pub(crate) struct Collected<'a> {
    home: &'a Collectors,
    /// At least as long as the request; beyond its end nothing is ever set.
    pub(crate) bitmap: DirtyBitmap,
    within: PageRun,
}

impl Collectors {
    /// An empty collection for the pages `within`.
    pub(crate) fn start(&self, within: PageRun) -> Collected<'_> {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let bitmap = match spare.iter().position(|bitmap| bitmap.len() >= within.count) {
            Some(fits) => spare.swap_remove(fits),
            // Too short for this request, too short for the next one of its kind: make room.
            None => {
                spare.pop();
                DirtyBitmap::new(within.count)
            }
        };
        Collected { home: self, bitmap, within }
    }
}

impl Collected<'_> {
    /// Where to stop so that no more than `limit` pages (0: no limit) are reported: a page of the
    /// request.
    pub(crate) fn cut(&self, limit: PageCount) -> u64 {
        let end = self.within.count.0;
        if limit.0 == 0 {
            return end;
        }
        let mut left = limit.0;
        let found = self.bitmap.try_for_each_run_in(PageRun::new(0, end), |run| {
            if run.count.0 >= left {
                return ControlFlow::Break(run.start.0 + left);
            }
            left -= run.count.0;
            ControlFlow::Continue(())
        });
        found.break_value().unwrap_or(end)
    }

    /// Reports all runs before page `cut` of the request; returns the page of the block to go on
    /// from.
    pub(crate) fn report(&self, cut: u64, found: &mut dyn FnMut(PageRun)) -> PageIndex {
        let base = self.within.start.0;
        self.bitmap.for_each_run_in(PageRun::new(0, cut), |run| {
            found(PageRun::new(base + run.start.0, run.count.0));
        });
        PageIndex(base + cut)
    }
}

impl Drop for Collected<'_> {
    fn drop(&mut self) {
        self.bitmap.clear(PageRun::new(0, self.within.count.0));
        let bitmap = std::mem::replace(&mut self.bitmap, DirtyBitmap::new(PageCount::ZERO));
        self.home.spare.lock().unwrap_or_else(PoisonError::into_inner).push(bitmap);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_and_report_agree() {
        let home = Collectors::default();
        let mut collected = home.start(PageRun::new(1000, 200));
        collected.bitmap.set(PageRun::new(10, 60));
        collected.bitmap.set(PageRun::new(100, 5));
        for (limit, cut) in [(0, 200), (1, 11), (60, 70), (61, 101), (65, 105), (66, 200)] {
            assert_eq!(collected.cut(PageCount(limit)), cut, "{limit}");
        }
        let mut runs = Vec::new();
        assert_eq!(collected.report(101, &mut |run| runs.push(run)), PageIndex(1101));
        assert_eq!(runs, [PageRun::new(1010, 60), PageRun::new(1100, 1)]);
    }

    #[test]
    fn a_reused_buffer_is_clean() {
        let home = Collectors::default();
        home.start(PageRun::new(0, 200)).bitmap.set(PageRun::new(0, 200));
        for pages in [100, 200, 300] {
            let collected = home.start(PageRun::new(0, pages));
            assert!(collected.bitmap.len() >= PageCount(pages));
            assert_eq!(collected.bitmap.count(), PageCount::ZERO);
        }
    }
}
