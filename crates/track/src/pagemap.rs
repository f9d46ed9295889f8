//! The pagemap tracker: asynchronous write protection of another process's memory, read by `PAGEMAP_SCAN`.
//!
//! How it works (kernel: Documentation/admin-guide/mm/pagemap.rst and userfaultfd.rst): a range registered with
//! `UFFD_FEATURE_WP_ASYNC` is write-protected page by page; the first write to a page faults, and the kernel
//! lifts the protection without telling anyone. A page without protection is therefore *written*.
//! `PAGEMAP_SCAN` with `PM_SCAN_WP_MATCHING` reports those pages and protects them again in one step under
//! the page-table lock, so no write falls between the two.
//!
//! What was rejected: to ask for written *and present* pages. A page that was written and then swapped out of
//! the process has an empty page-table entry: the pure query for written pages reports it, the other one
//! loses it. Holes are told from data by the file instead.
//!
//! Two things this tracker does not see: a write through another process's page tables (track that process too)
//! and direct I/O that lands after the page was harvested (the adapter refuses disks that do it).
//!
//! A whole page table that was never filled (2 MiB of untouched memory) is not reported either, even if the
//! *file* has data there. So the first round sends all data, whatever is reported.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use godwit_memory::RamBlock;
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};

use crate::attach::{Attachment, attach, attach_own};
use crate::mappings::{BlockMapping, mappings_of, open_pagemap};
use crate::uapi::{self, PM_SCAN_CHECK_WPASYNC, PM_SCAN_WP_MATCHING, PageRegion};
use crate::{DirtyTracker, TrackError};

/// Regions asked for in one scan: 24 bytes each, on the stack.
const REGIONS: usize = 512;

/// Tracks the memory of one process. Dropping it ends the tracking: the kernel lifts all protection when
/// the only descriptor is closed, also when this process is killed.
#[derive(Debug)]
pub struct PagemapTracker {
    attachment: Attachment,
    pagemap: File,
    blocks: Vec<Vec<BlockMapping>>,
}

/// Checks that this kernel can do what the tracker needs, without touching another process.
///
/// # Errors
/// [`TrackError::Kernel`] naming what is missing.
pub fn kernel_support() -> Result<(), TrackError> {
    let own = File::open("/proc/self/pagemap")
        .map_err(|_| TrackError::Kernel { missing: "/proc/PID/pagemap (CONFIG_PROC_PAGE_MONITOR)" })?;
    // An empty range does nothing where the ioctl exists.
    match uapi::pagemap_scan(own.as_fd(), 0, 0, 0, 0, &mut [PageRegion::default()]) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
            Err(TrackError::Kernel { missing: "the PAGEMAP_SCAN ioctl" })
        }
        _ => Ok(()),
    }
}

impl PagemapTracker {
    /// Starts tracking `blocks` in process `pid`: from now on every write makes its page dirty. All pages count
    /// as dirty at first.
    ///
    /// # Errors
    /// When the kernel lacks the feature, the process may not be traced, does not map the blocks, or has
    /// them registered with a userfaultfd already. The process is then as it was.
    pub fn start(pid: i32, blocks: &[RamBlock]) -> Result<Self, TrackError> {
        kernel_support()?;
        let mappings =
            blocks.iter().map(|block| mappings_of(pid, block)).collect::<Result<Vec<_>, TrackError>>()?;
        let pagemap = open_pagemap(pid)?;
        let names: Vec<&str> = blocks.iter().map(RamBlock::name).collect();
        Self::protect(pid, attach(pid)?, pagemap, mappings, &names)
    }

    /// Starts tracking memory of this process itself, a VMM's guest memory: for each RAM block, where it is mapped.
    /// Shared or private, from a file or not; nobody is traced or stopped. Writes by KVM's vCPUs are seen as well as
    /// those of this process's threads, since both go by its page tables.
    ///
    /// # Errors
    /// When the kernel lacks the feature or the memory is registered with a userfaultfd already.
    pub fn start_own(blocks: &[Vec<BlockMapping>]) -> Result<Self, TrackError> {
        kernel_support()?;
        let pid = std::process::id().cast_signed();
        let names: Vec<String> = (0..blocks.len()).map(|number| number.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        Self::protect(pid, attach_own()?, open_pagemap(pid)?, blocks.to_vec(), &names)
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
        Ok(Self { attachment, pagemap, blocks: mappings })
    }

    /// The attachment to the process, with how long it was stopped.
    #[must_use]
    pub fn attachment(&self) -> &Attachment {
        &self.attachment
    }

    fn scan(
        &self,
        block: usize,
        within: PageRun,
        flags: u64,
        limit: u64,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        let failed = |source: io::Error| TrackError::Scan { block, source };
        let mut regions = [PageRegion::default(); REGIONS];
        let mut left = limit;
        for mapping in &self.blocks[block] {
            let Some(part) = mapping.pages.intersect(within) else { continue };
            // Addresses and pages of one mapping differ by a constant.
            let to_page = |address: u64| mapping.pages.start.0 + (address - mapping.address.0) / PAGE_SIZE;
            let to_address = |page: u64| mapping.address.0 + (page - mapping.pages.start.0) * PAGE_SIZE;
            let mut at = to_address(part.start.0);
            let end = to_address(part.end().0);
            while at < end {
                let (filled, walked) =
                    uapi::pagemap_scan(self.pagemap.as_fd(), at, end, flags, left, &mut regions)
                        .map_err(failed)?;
                for region in &regions[..filled] {
                    let first = to_page(region.start);
                    let pages = to_page(region.end) - first;
                    found(PageRun::new(first, pages));
                    left = left.saturating_sub(pages);
                }
                if walked <= at || walked > end {
                    return Err(failed(io::Error::other("PAGEMAP_SCAN made no progress")));
                }
                at = walked;
                if limit > 0 && left == 0 {
                    return Ok(PageIndex(to_page(at)));
                }
            }
        }
        Ok(within.end())
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
        self.scan(block, within, PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC, limit.0, found)
    }

    fn count(&self, block: usize, within: PageRun) -> Result<PageCount, TrackError> {
        let mut pages = PageCount::ZERO;
        self.scan(block, within, PM_SCAN_CHECK_WPASYNC, 0, &mut |run| pages += run.count)?;
        Ok(pages)
    }
}
