//! Memory of a process under write protection, and the scan that finds what was written: what the
//! pagemap tracker and the write governor share.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use godwit_memory::pagemap::{
    Looked, PM_SCAN_CHECK_WPASYNC, PM_SCAN_WP_MATCHING, PageRegion, scan,
};
use godwit_units::{PAGE_SIZE, PageIndex, PageRun};

use crate::TrackError;
use crate::attach::Attachment;
use crate::mappings::BlockMapping;

/// Regions asked for in one scan: 24 bytes each, on the stack.
const REGIONS: usize = 512;

/// What a scan is to do beside reporting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Protect again in the same step; everything must be tracked asynchronously.
    Protect,
    /// Nothing; everything must be tracked asynchronously.
    Nothing,
    /// Nothing, where some of it may be governed, which is not protected asynchronously. Memory
    /// that nobody protects counts as written.
    NothingIfGoverned,
}

/// All RAM blocks of a process, as it maps them.
#[derive(Debug)]
pub(crate) struct Protected {
    pub(crate) attachment: Attachment,
    pub(crate) pagemap: File,
    pub(crate) blocks: Vec<Vec<BlockMapping>>,
}

impl Protected {
    /// Reports pages of `within` that are not protected, up to `limit` of them (0: all).
    pub(crate) fn scan(
        &self,
        block: usize,
        within: PageRun,
        then: Then,
        limit: u64,
        found: &mut dyn FnMut(PageRun),
    ) -> Result<PageIndex, TrackError> {
        let failed = |source: io::Error| TrackError::Scan { block, source };
        let flags = match then {
            Then::Protect => PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
            Then::Nothing => PM_SCAN_CHECK_WPASYNC,
            Then::NothingIfGoverned => 0,
        };
        let mut regions = [PageRegion::default(); REGIONS];
        let mut left = limit;
        for mapping in &self.blocks[block] {
            let Some(part) = mapping.pages.intersect(within) else { continue };
            // Addresses and pages of one mapping differ by a constant.
            let to_page =
                |address: u64| mapping.pages.start.0 + (address - mapping.address.0) / PAGE_SIZE;
            let to_address =
                |page: u64| mapping.address.0 + (page - mapping.pages.start.0) * PAGE_SIZE;
            let mut at = to_address(part.start.0);
            let end = to_address(part.end().0);
            while at < end {
                let pagemap = self.pagemap.as_fd();
                let (filled, walked) =
                    scan(pagemap, Looked::Written, at..end, flags, left, &mut regions)
                        .map_err(failed)?;
                for region in &regions[..filled] {
                    let (start, end) = (to_page(region.start), to_page(region.end));
                    found(PageRun::new(start, end - start));
                    left = left.saturating_sub(end - start);
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
