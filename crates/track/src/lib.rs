//! Dirty trackers: they say which pages were written since they were last harvested.
//!
//! One trait, [`DirtyTracker`]; here its implementation on page tables ([`PagemapTracker`]), which tracks a
//! process that knows nothing of it. Invariant: a page is harvested *before* its bytes are read, so a write
//! that comes later is found by the next harvest.

mod attach;
mod error;
mod mappings;
mod pagemap;
mod uapi;

pub use attach::{Attachment, attach};
pub use error::TrackError;
pub use mappings::{BlockMapping, Writer, mappings_of, other_writers};
pub use pagemap::{PagemapTracker, kernel_support};

use godwit_units::{PageCount, PageIndex, PageRun};

/// Tells which pages of the RAM blocks were written.
pub trait DirtyTracker: Send + Sync {
    /// Harvests (reads and clears in one atomic step) the dirty pages of `within`, from its start on, and
    /// reports them in order as maximal runs. Stops early once `limit` pages were found.
    ///
    /// Returns the first page that was not looked at: all dirty pages of `within` before it are harvested, none
    /// after it is.
    ///
    /// # Errors
    /// When the kernel refuses, for instance since the process has ended. What was reported by then is harvested.
    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError>;

    /// Reports the dirty pages of `within` like [`Self::harvest`], but leaves them dirty. For the last round, when nobody
    /// writes any more: to clear them would be work for nobody.
    ///
    /// # Errors
    /// As [`Self::harvest`].
    fn peek(&self, block: usize, within: PageRun, found: &mut dyn FnMut(PageRun)) -> Result<(), TrackError>;

    /// Counts the dirty pages of `within` and leaves them dirty.
    ///
    /// # Errors
    /// As [`Self::harvest`].
    fn count(&self, block: usize, within: PageRun) -> Result<PageCount, TrackError> {
        let mut pages = PageCount::ZERO;
        self.peek(block, within, &mut |run| pages += run.count)?;
        Ok(pages)
    }
}
