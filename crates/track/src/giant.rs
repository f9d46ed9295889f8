//! RAM in huge pages that are larger than a segment (hugetlbfs of 1 GiB).
//!
//! The kernel protects such a page as a whole, and harvests ask for 16 MiB of it: without more, the
//! first of them would make clean what the others were to find. So what one harvest finds and was
//! not asked for is kept for those who will ask. A write to any byte costs all of the page.
//!
//! Invariant: a page is protected before any of its bytes is reported, and so before it is read;
//! what is written from then on is found again.

use std::sync::{Mutex, PoisonError};

use godwit_bitmap::DirtyBitmap;
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};

use crate::TrackError;
use crate::mappings::BlockMapping;
use crate::protected::{Protected, Then};
use crate::uapi;

/// A RAM block in such pages.
#[derive(Debug)]
pub(crate) struct Giant {
    /// Bytes of a huge page.
    page: u64,
    /// What was found and not reported yet.
    found: Mutex<DirtyBitmap>,
}

impl Giant {
    /// A block of `pages` in huge pages of `page` bytes.
    pub(crate) fn new(page: u64, pages: PageCount) -> Self {
        Self { page, found: Mutex::new(DirtyBitmap::new(pages)) }
    }

    /// As [`crate::DirtyTracker::harvest`].
    pub(crate) fn harvest(
        &self,
        protected: &Protected,
        block: usize,
        within: PageRun,
        limit: PageCount,
        report: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        // Others ask for their part of the same huge page at the same time.
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        self.written(protected, block, within, &mut |mapping, whole| {
            let address = address_of(mapping, whole.start.0);
            let bytes = whole.count.bytes().0;
            uapi::uffd_write_protect(protected.attachment.userfaultfd(), address, bytes, true)
                .map_err(|source| TrackError::Scan { block, source })?;
            found.set(whole);
            Ok(())
        })?;
        let (mut runs, mut left) = (Vec::new(), limit.0);
        let mut at = within.end();
        found.for_each_run_in(within, |run| {
            let count = if limit.0 == 0 { run.count.0 } else { run.count.0.min(left) };
            if limit.0 > 0 && left > 0 && count == left {
                at = PageIndex(run.start.0 + count);
            }
            left = left.saturating_sub(count);
            if count > 0 {
                runs.push(PageRun::new(run.start.0, count));
            }
        });
        for run in runs {
            found.clear(run);
            report(run);
        }
        Ok(at)
    }

    /// As [`crate::DirtyTracker::look`].
    pub(crate) fn look(
        &self,
        protected: &Protected,
        block: usize,
        within: PageRun,
        report: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = DirtyBitmap::new(found.len());
        self.written(protected, block, within, &mut |_, whole| {
            seen.set(whole);
            Ok(())
        })?;
        seen.union(&found);
        seen.for_each_run_in(within, report);
        Ok(())
    }

    /// Tells of each huge page with a part in `within` that was written since it was protected.
    fn written(
        &self,
        protected: &Protected,
        block: usize,
        within: PageRun,
        tell: &mut dyn FnMut(&BlockMapping, PageRun) -> Result<(), TrackError>,
    ) -> Result<(), TrackError> {
        for mapping in &protected.blocks[block] {
            let Some(part) = mapping.pages.intersect(within) else { continue };
            let mut at = address_of(mapping, part.start.0);
            let end = address_of(mapping, part.end().0);
            at -= at % self.page;
            while at < end {
                // One entry maps it all; a mapping of hugetlbfs is of whole huge pages.
                let first =
                    mapping.pages.start.0 + at.saturating_sub(mapping.address.0) / PAGE_SIZE;
                let whole = PageRun::new(first, self.page / PAGE_SIZE).intersect(mapping.pages);
                let (mut written, one) = (false, PageRun::new(first, 1));
                protected.scan(block, one, Then::Nothing, 0, &mut |_| written = true)?;
                if let Some(whole) = whole.filter(|_| written) {
                    tell(mapping, whole)?;
                }
                at += self.page;
            }
        }
        Ok(())
    }
}

fn address_of(mapping: &BlockMapping, page: u64) -> u64 {
    mapping.address.0 + (page - mapping.pages.start.0) * PAGE_SIZE
}
