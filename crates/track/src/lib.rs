//! Dirty trackers: they say which pages were written since they were last harvested.
//!
//! One trait, [`DirtyTracker`], and who implements it:
//! - [`PagemapTracker`], on page tables: tracks a process that knows nothing of it, or a VMM's own
//!   memory;
//! - [`KvmLogTracker`] and [`KvmRingTracker`], on what KVM knows of its vCPUs' writes, inside a
//!   VMM;
//! - [`VhostLogTracker`], on what devices say that they wrote;
//! - [`SharedRamTracker`], on the page tables of all processes that share a VM's RAM;
//! - [`UnionTracker`], on several of these at once;
//! - [`Untracked`], on nothing: all counts as written.
//!
//! Invariant: a page is harvested *before* its bytes are read, so a write that comes later is found
//! by the next harvest. docs/trackers.md tells what each costs, sees and does not see.

mod attach;
#[cfg(feature = "bare-guest")]
pub mod bare;
mod collected;
mod error;
mod giant;
mod governed;
mod governor;
mod kvm;
mod mappings;
mod missing;
mod pagemap;
mod partial;
mod permission;
mod protected;
#[cfg(feature = "vm-memory")]
mod rust_vmm;
mod shared_ram;
mod slots;
mod threads;
mod uapi;
mod union;
mod untracked;
mod vhost;
mod words;

pub use attach::{Approach, Attachment, Way, attach, has_userfaultfd};
pub use error::TrackError;
pub use governor::GovernorMeasures;
pub use kvm::{
    DirtyRingSize, KvmDirtyRings, KvmLogCalls, KvmLogTracker, KvmRingTracker, LogMode,
    clear_dirty_log,
};
pub use mappings::{AddressSpace, BlockMapping, Mapped, Mapper, other_mappers, other_writers};
pub use missing::{KnownProcess, MissingMeasures, MissingPages};
pub use pagemap::{PagemapTracker, kernel_support};
pub use permission::may_trace;
#[cfg(feature = "vm-memory")]
pub use rust_vmm::VhostLogRegion;
pub use shared_ram::{FindSharers, SharedRamTracker, Sharer, Sharers};
pub use threads::{ThreadNumbers, threads_of};
pub use union::UnionTracker;
pub use untracked::Untracked;
pub use vhost::{VhostLog, VhostLogTracker};

use std::sync::Arc;

use godwit_units::{PageCount, PageIndex, PageRun};

/// What a look at dirty pages goes by.
///
/// ```
/// use godwit_track::{AsOf, DirtyTracker, TrackError};
/// use godwit_units::PageRun;
///
/// /// The runs of block 0 that are dirty now.
/// fn dirty(tracker: &dyn DirtyTracker, block: PageRun) -> Result<Vec<PageRun>, TrackError> {
///     let mut runs = Vec::new();
///     tracker.look(0, block, AsOf::Now, &mut |run| runs.push(run))?;
///     Ok(runs)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsOf {
    /// As it was when the round began: for the last round, when nobody writes any more. To clear
    /// what is sent then, or to fetch it again, would be work for nobody.
    Round,
    /// As it is now, whenever the round began: for counts, while the guest runs. Trackers of whole
    /// memory slots fetch those anew, so ask for whole blocks.
    Now,
}

/// Tells which pages of the RAM blocks were written.
///
/// What was written before the tracker was started may be reported or not: the first round sends
/// everything.
///
/// ```
/// use godwit_track::{DirtyTracker, TrackError};
/// use godwit_units::{PageCount, PageRun};
///
/// /// One round over a block of `pages` pages: what was written is read only after its harvest.
/// fn round(
///     tracker: &dyn DirtyTracker,
///     pages: PageCount,
///     mut send: impl FnMut(PageRun),
/// ) -> Result<(), TrackError> {
///     tracker.begin_round();
///     let all = PageRun::new(0, pages.0);
///     tracker.harvest(0, all, PageCount::ZERO, &mut |run| send(run)).map(drop)
/// }
/// ```
pub trait DirtyTracker: Send + Sync {
    /// Says that a round begins: from now on, each page is harvested once until the next call.
    ///
    /// It lets a tracker that can only ask for a whole memory slot do so once a round. Once it was
    /// called, a harvest finds what was written before the last such call, and may leave what came
    /// later to the next round. So whoever calls it does so before every round, and again when the
    /// guest has been stopped. If it is never called, a harvest finds all that was written before
    /// the harvest.
    fn begin_round(&self) {}

    /// Harvests (reads and clears in one atomic step) the dirty pages of `within`, from its start
    /// on, and reports them in order as maximal runs. Stops early once `limit` pages were found.
    ///
    /// Returns the first page that was not looked at: all dirty pages of `within` before it are
    /// harvested, none after it is.
    ///
    /// # Errors
    /// When the kernel refuses, for instance since the process has ended. What was reported by then
    /// is harvested.
    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError>;

    /// Reports the dirty pages of `within` like [`Self::harvest`], but leaves them dirty.
    ///
    /// # Errors
    /// As [`Self::harvest`].
    fn look(
        &self,
        block: usize,
        within: PageRun,
        asof: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError>;

    /// Whether several threads may look at parts of a block at once, at no more cost in all than
    /// one that looks at the whole.
    fn looks_in_parts(&self) -> bool {
        false
    }

    /// Counts what [`Self::look`] reports.
    ///
    /// # Errors
    /// As [`Self::harvest`].
    fn count(&self, block: usize, within: PageRun) -> Result<PageCount, TrackError> {
        let mut pages = PageCount::ZERO;
        self.look(block, within, AsOf::Now, &mut |run| pages += run.count)?;
        Ok(pages)
    }
}

impl<T: DirtyTracker + ?Sized> DirtyTracker for Arc<T> {
    fn begin_round(&self) {
        (**self).begin_round();
    }

    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        (**self).harvest(block, within, limit, found)
    }

    fn look(
        &self,
        block: usize,
        within: PageRun,
        asof: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        (**self).look(block, within, asof, found)
    }

    fn looks_in_parts(&self) -> bool {
        (**self).looks_in_parts()
    }
}
