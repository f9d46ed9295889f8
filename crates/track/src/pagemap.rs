//! The pagemap tracker: asynchronous write protection of another process's memory, read by
//! `PAGEMAP_SCAN`.
//!
//! How it works (kernel: Documentation/admin-guide/mm/pagemap.rst and userfaultfd.rst): a range
//! registered with `UFFD_FEATURE_WP_ASYNC` is write-protected page by page; the first write to a
//! page faults, and the kernel lifts the protection without telling anyone. A page without
//! protection is therefore *written*. `PAGEMAP_SCAN` with `PM_SCAN_WP_MATCHING` reports those pages
//! and protects them again in one step under the page-table lock, so no write falls between the
//! two.
//!
//! What was rejected: to ask for written *and present* pages. A page that was written and then
//! swapped out of the process has an empty page-table entry: the pure query for written pages
//! reports it, the other one loses it. Holes are told from data by the file instead.
//!
//! Two things this tracker does not see: a write through another process's page tables (track that
//! process too) and direct I/O that lands after the page was harvested (the adapter refuses disks
//! that do it).
//!
//! Segments may be governed instead (`governor`, `governed`): then their write faults wait for an
//! answer.
//!
//! A whole page table that was never filled (2 MiB of untouched memory) is not reported either,
//! even if the *file* has data there. So the first round sends all data, whatever is reported.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use godwit_memory::pagemap::{Looked, PageRegion, scan};
use godwit_memory::{RamBlock, SEGMENT_PAGES};
use godwit_units::{ByteCount, PAGE_SIZE, PageCount, PageIndex, PageRun};

use crate::attach::{Approach, Attachment, Kind, Way, attach, attach_governing, attach_own};
use crate::giant::Giant;
use crate::governed::Governed;
use crate::governor::{Governor, GovernorMeasures};
use crate::mappings::{AddressSpace, BlockMapping, open_pagemap};
use crate::partial::loses_nothing;
use crate::protected::{Protected, Then};
use crate::uapi;
use crate::{AsOf, DirtyTracker, TrackError};

/// Tracks the memory of one process. Dropping it ends the tracking: the kernel lifts all protection
/// when the only descriptor is closed, also when this process is killed.
///
/// ```
/// use godwit_memory::RamBlock;
/// use godwit_track::{DirtyTracker, PagemapTracker, TrackError};
///
/// /// What process `pid` writes to `block` within a second; needs the right to trace it.
/// fn written(pid: i32, block: RamBlock) -> Result<(), TrackError> {
///     let pages = block.all();
///     let tracker = PagemapTracker::start(pid, &[block])?;
///     tracker.harvest(0, pages, pages.count, &mut |_| {})?;
///     std::thread::sleep(std::time::Duration::from_secs(1));
///     println!("{} within a second", tracker.count(0, pages)?);
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct PagemapTracker {
    pid: i32,
    protected: Protected,
    /// Some of the memory comes in huge pages only.
    huge: bool,
    /// For each block in huge pages that are larger than a segment, what is known of it.
    giant: Vec<Option<Giant>>,
    /// See [`Approach`].
    harmless_filters: u32,
    /// All was protected at once, so that nothing is mapped in huge pages.
    in_small: bool,
    /// Once there is a governor: which segments it has.
    governed: OnceLock<Governed>,
    /// Held while it is made.
    making: Mutex<()>,
}

/// Checks that this kernel can do what the tracker needs, without touching another process.
///
/// # Errors
/// [`TrackError::Kernel`] naming what is missing.
///
/// ```
/// if let Err(error) = godwit_track::kernel_support() {
///     println!("page tables cannot be tracked here: {error}");
/// }
/// ```
pub fn kernel_support() -> Result<(), TrackError> {
    let own = File::open("/proc/self/pagemap").map_err(|_| TrackError::Kernel {
        missing: "/proc/PID/pagemap (CONFIG_PROC_PAGE_MONITOR)",
    })?;
    // An empty range does nothing where the ioctl exists.
    match scan(own.as_fd(), Looked::Written, 0..0, 0, 0, &mut [PageRegion::default()]) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
            Err(TrackError::Kernel { missing: "the PAGEMAP_SCAN ioctl" })
        }
        _ => Ok(()),
    }
}

impl PagemapTracker {
    /// Starts tracking `blocks` in process `pid`: from now on every write makes its page dirty. All
    /// pages count as dirty at first.
    ///
    /// # Errors
    /// When the kernel lacks the feature, the process may not be traced, does not map the blocks,
    /// or has them registered with a userfaultfd already. The process is then as it was.
    pub fn start(pid: i32, blocks: &[RamBlock]) -> Result<Self, TrackError> {
        Self::start_by(Approach::default(), pid, blocks)
    }

    /// The same for a process of which more is known.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_by(approach: Approach, pid: i32, blocks: &[RamBlock]) -> Result<Self, TrackError> {
        kernel_support()?;
        let space = AddressSpace::of(pid)?;
        let mappings = blocks
            .iter()
            .map(|block| space.mappings_of(block))
            .collect::<Result<Vec<_>, TrackError>>()?;
        let pagemap = open_pagemap(pid)?;
        let names: Vec<&str> = blocks.iter().map(RamBlock::name).collect();
        let mut tracker = Self::protect(pid, attach(pid, approach)?, pagemap, mappings, &names)?;
        tracker.harmless_filters = approach.harmless_filters;
        tracker.huge = blocks.iter().any(RamBlock::has_huge_pages);
        let large = |page: &ByteCount| page.0 > SEGMENT_PAGES * PAGE_SIZE;
        let giant = |block: &RamBlock| {
            let page = block.huge_page().filter(large)?;
            Some(Giant::new(page.0, block.pages()))
        };
        tracker.giant = blocks.iter().map(giant).collect();
        // Memory of hugetlbfs comes in huge pages for ever, whose entries nobody splits.
        let ordinary = blocks.iter().filter(|block| !block.has_huge_pages());
        // Without a file, no page is reached but by the entry that is split.
        let mut directories: Vec<_> = ordinary.filter_map(|block| block.path()?.parent()).collect();
        directories.dedup();
        if directories.into_iter().any(|directory| loses_nothing(Some(directory)) == Some(false)) {
            tracker.protect_all()?;
            tracker.in_small = true;
        }
        Ok(tracker)
    }

    /// Whether this kernel loses writes in huge pages, so that there must not be any.
    pub(crate) fn is_in_small(&self) -> bool {
        self.in_small
    }

    /// Starts tracking memory of this process itself, a VMM's guest memory: for each RAM block,
    /// where it is mapped. Shared or private, from a file or not; nobody is traced or stopped.
    /// Writes by KVM's vCPUs are seen as well as those of this process's threads, since both go by
    /// its page tables.
    ///
    /// # Errors
    /// When the kernel lacks the feature or the memory is registered with a userfaultfd already.
    pub fn start_own(blocks: &[Vec<BlockMapping>]) -> Result<Self, TrackError> {
        kernel_support()?;
        let tracker = Self::begin_own(blocks)?;
        if loses_nothing(None) == Some(false) {
            tracker.protect_all()?;
        }
        Ok(tracker)
    }

    /// Protects all memory at once, as a harvest of all of it would, and leaves page tables with an
    /// entry for each 4 KiB. From then on nothing is mapped in huge pages, and no harvest in parts
    /// has any to split: for kernels that lose writes in doing so (`partial`). Costs the guest the
    /// huge pages until tracking ends.
    fn protect_all(&self) -> Result<(), TrackError> {
        for (block, mapped) in self.protected.blocks.iter().enumerate() {
            for mapping in mapped {
                let bytes = mapping.pages.count.bytes().0;
                uapi::uffd_write_protect(
                    self.protected.attachment.userfaultfd(),
                    mapping.address.0,
                    bytes,
                    true,
                )
                .map_err(|source| TrackError::Scan { block, source })?;
            }
        }
        Ok(())
    }

    /// Tracks memory of this process, of whose kind nothing has been tried.
    pub(crate) fn begin_own(blocks: &[Vec<BlockMapping>]) -> Result<Self, TrackError> {
        let pid = std::process::id().cast_signed();
        let names: Vec<String> = (0..blocks.len()).map(|number| number.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        Self::protect(pid, attach_own(Kind::Tracking)?, open_pagemap(pid)?, blocks.to_vec(), &names)
    }

    fn protect(
        pid: i32,
        attachment: Attachment,
        pagemap: File,
        mappings: Vec<Vec<BlockMapping>>,
        names: &[&str],
    ) -> Result<Self, TrackError> {
        for (name, mapped) in names.iter().zip(&mappings) {
            for mapping in mapped {
                uapi::uffd_register_wp(
                    attachment.userfaultfd(),
                    mapping.address.0,
                    mapping.pages.count.bytes().0,
                )
                .map_err(|source| match source.raw_os_error() {
                    Some(libc::EBUSY) => TrackError::Registered { block: (*name).to_owned() },
                    _ => TrackError::Attach { pid, step: "UFFDIO_REGISTER", source },
                })?;
            }
        }
        Ok(Self {
            pid,
            protected: Protected {
                attachment: Arc::new(attachment),
                pagemap: Arc::new(pagemap),
                blocks: mappings,
            },
            huge: false,
            giant: Vec::new(),
            harmless_filters: 0,
            in_small: false,
            governed: OnceLock::new(),
            making: Mutex::new(()),
        })
    }

    /// Gets a write governor ready, whose descriptor is made in the process by `way`. Nothing is
    /// governed yet. `vcpus` are the threads that run the guest, by their numbers here; all others
    /// are never kept waiting.
    ///
    /// # Errors
    /// When the process has no right to it, the kernel lacks the feature, RAM is on a hugetlbfs or
    /// a thread cannot be started. Tracking goes on as it did.
    pub fn prepare_governor(&self, way: Way, vcpus: &[i32]) -> Result<(), TrackError> {
        let approach = Approach { way, harmless_filters: self.harmless_filters };
        self.prepare(vcpus, || attach_governing(self.pid, approach))
    }

    /// The same for a VMM's own memory ([`Self::start_own`]).
    ///
    /// # Errors
    /// As [`Self::prepare_governor`].
    pub fn prepare_own_governor(&self, vcpus: &[i32]) -> Result<(), TrackError> {
        self.prepare(vcpus, || attach_own(Kind::Governing))
    }

    fn prepare(
        &self,
        vcpus: &[i32],
        attach: impl FnOnce() -> Result<Attachment, TrackError>,
    ) -> Result<(), TrackError> {
        if self.huge {
            return Err(TrackError::GovernedHugePages);
        }
        let _alone = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        match self.governed.get() {
            Some(governed) => governed.governor.set_vcpus(vcpus),
            None => {
                let governor = Governor::start(self.pid, attach()?, &self.protected.blocks, vcpus)?;
                let _ =
                    self.governed.set(Governed::new(self.pid, governor, &self.protected.blocks));
            }
        }
        Ok(())
    }

    /// From now on, the guest may make `dirty_rate_limit` clean pages dirty each second; infinite:
    /// as many as it likes. That holds for segments from their next harvest on, when they are
    /// handed to the governor: what is written before that harvest is sent with it and costs
    /// nothing. With `None` they go back, likewise at their next harvest, and until then their
    /// writers are answered at once.
    ///
    /// A segment that is handed over or back is reported as dirty as a whole once, as what is
    /// written in that moment is not seen: whoever remembers what was sent finds out which pages
    /// those are.
    ///
    /// Does nothing before [`Self::prepare_governor`].
    ///
    /// # Errors
    /// When `dirty_rate_limit` is a rate and a segment could not be handed over before: then no
    /// more are, and the writers of those that are governed are answered at once.
    pub fn govern(&self, dirty_rate_limit: Option<f64>) -> Result<(), TrackError> {
        let Some(governed) = self.governed.get() else { return Ok(()) };
        governed.govern(dirty_rate_limit);
        match governed.failure() {
            Some(words) if dirty_rate_limit.is_some() => {
                self.answer_at_once();
                Err(TrackError::NotHandedOver(words))
            }
            _ => Ok(()),
        }
    }

    /// From now on, all writers are answered at once; segments stay with whom they are.
    pub fn answer_at_once(&self) {
        if let Some(governed) = self.governed.get() {
            governed.govern(Some(f64::INFINITY));
        }
    }

    /// What the governor did so far.
    #[must_use]
    pub fn governor_measures(&self) -> GovernorMeasures {
        self.governed.get().map(|governed| governed.governor.measures()).unwrap_or_default()
    }

    /// How many segments are governed now.
    #[must_use]
    pub fn governed_segments(&self) -> usize {
        self.governed.get().map_or(0, Governed::count)
    }

    /// How long a thread of the process was stopped to make the governor's descriptor.
    #[must_use]
    pub fn governor_stop(&self) -> std::time::Duration {
        self.governed.get().map(|governed| governed.governor.stopped()).unwrap_or_default()
    }

    /// Works as on a kernel that loses writes in huge pages: for tests on kernels that do not.
    ///
    /// # Errors
    /// When the kernel refuses, or has no memory for the page tables.
    #[cfg(feature = "test-hooks")]
    pub fn protect_once(&self) -> Result<(), TrackError> {
        self.protect_all()
    }

    /// Has the governor's handler do nothing for a while: a fault made up for tests.
    #[cfg(feature = "test-hooks")]
    pub fn stall_governor(&self, time: std::time::Duration) {
        if let Some(governed) = self.governed.get() {
            governed.governor.stall(time);
        }
    }

    /// The attachment to the process, with how long it was stopped.
    #[must_use]
    pub fn attachment(&self) -> &Attachment {
        &self.protected.attachment
    }
}

impl DirtyTracker for PagemapTracker {
    fn harvest(
        &self,
        block: usize,
        within: PageRun,
        limit: PageCount,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        if let Some(Some(giant)) = self.giant.get(block) {
            return giant.harvest(&self.protected, block, within, limit, found);
        }
        match self.governed.get() {
            Some(governed) => governed.harvest(&self.protected, block, within, limit, found),
            None => self.protected.scan(block, within, Then::Protect, limit.0, found),
        }
    }

    fn look(
        &self,
        block: usize,
        within: PageRun,
        _: AsOf,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<(), TrackError> {
        if let Some(Some(giant)) = self.giant.get(block) {
            return giant.look(&self.protected, block, within, found);
        }
        match self.governed.get() {
            Some(governed) => governed.look(&self.protected, block, within, found),
            None => self.protected.scan(block, within, Then::Nothing, 0, found).map(drop),
        }
    }

    fn looks_in_parts(&self) -> bool {
        true
    }
}
