//! The workload of a program that has a heap: the Linux guest's.

use godwit_units::PageCount;

use crate::stamp::Page;
use crate::workload::Workload;

/// A workload whose buffer is on the heap.
pub type HeapWorkload = Workload<Vec<Page>, Vec<u64>>;

impl HeapWorkload {
    /// Fills a buffer of `pages` pages, of which the first `working_set` are written later (at
    /// least one).
    ///
    /// `working_set` beyond the buffer is cut down to it.
    #[must_use]
    pub fn fill(pages: PageCount, working_set: PageCount) -> Self {
        let count = pages.0.max(1);
        let pages = (0..count).map(Page::first).collect();
        Self::over(pages, (0..count).map(|_| 0).collect(), 0, working_set)
    }
}
