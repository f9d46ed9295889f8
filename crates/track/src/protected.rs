//! Memory of a process under write protection, and the scan that finds what was written: what the
//! pagemap tracker and the write governor share.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use godwit_memory::pagemap::{
    Looked, PM_SCAN_CHECK_WPASYNC, PM_SCAN_WP_MATCHING, PageRegion, scan,
};
use godwit_units::{PAGE_SIZE, PageIndex, PageRun};

use crate::TrackError;
use crate::attach::Attachment;
use crate::mappings::BlockMapping;

/// What an entry of a huge page maps.
const HUGE: u64 = 2 << 20;
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
    pub(crate) attachment: Arc<Attachment>,
    pub(crate) pagemap: Arc<File>,
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
            Then::Protect | Then::Nothing => PM_SCAN_CHECK_WPASYNC,
            Then::NothingIfGoverned => 0,
        };
        let (mut seen, mut regions) =
            ([PageRegion::default(); REGIONS], [PageRegion::default(); REGIONS]);
        let mut left = limit;
        for mapping in &self.blocks[block] {
            let Some(part) = mapping.pages.intersect(within) else { continue };
            // Addresses and pages of one mapping differ by a constant.
            let to_page =
                |address: u64| mapping.pages.start.0 + (address - mapping.address.0) / PAGE_SIZE;
            let to_address =
                |page: u64| mapping.address.0 + (page - mapping.pages.start.0) * PAGE_SIZE;
            // Returns how many pages it reports.
            let mut report = |regions: &[PageRegion]| {
                let runs = regions.iter().map(|region| {
                    let (start, end) = (to_page(region.start), to_page(region.end));
                    PageRun::new(start, end - start)
                });
                runs.inspect(|run| found(*run)).map(|run| run.count.0).sum::<u64>()
            };
            let mut at = to_address(part.start.0);
            let end = to_address(part.end().0);
            while at < end {
                let (filled, walked) =
                    self.walk(at..end, flags, left, &mut seen).map_err(failed)?;
                if then != Then::Protect {
                    left = left.saturating_sub(report(&seen[..filled]));
                } else {
                    for mut spot in spots(&seen[..filled], at..walked) {
                        while spot.start < spot.end {
                            let flags = flags | PM_SCAN_WP_MATCHING;
                            let (filled, walked) = self
                                .walk(spot.clone(), flags, left, &mut regions)
                                .map_err(failed)?;
                            spot.start = walked;
                            left = left.saturating_sub(report(&regions[..filled]));
                            if limit > 0 && left == 0 {
                                return Ok(PageIndex(to_page(walked)));
                            }
                        }
                    }
                }
                at = walked;
                if limit > 0 && left == 0 {
                    return Ok(PageIndex(to_page(at)));
                }
            }
        }
        Ok(within.end())
    }

    /// One scan for what was written, which gets somewhere.
    fn walk(
        &self,
        range: Range<u64>,
        flags: u64,
        limit: u64,
        regions: &mut [PageRegion],
    ) -> io::Result<(usize, u64)> {
        let pagemap = self.pagemap.as_fd();
        let (filled, walked) =
            scan(pagemap, Looked::Written, range.clone(), flags, limit, regions)?;
        if walked <= range.start || walked > range.end {
            return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
        }
        Ok((filled, walked))
    }
}

/// The parts of `walked` to be protected, where `seen` was found: whole entries of huge pages, so
/// that none is split by this.
///
/// A scan that protects tells KVM of the whole range it was given, whatever it finds there
/// (`do_pagemap_scan` in fs/proc/task_mmu.c, mmu_notifier_invalidate_range_start), and KVM takes
/// all of it out of the guest's page tables: the guest then faults on each page that it only reads.
/// So what nobody wrote to is looked at and left alone.
fn spots(seen: &[PageRegion], walked: Range<u64>) -> Vec<Range<u64>> {
    let mut spots: Vec<Range<u64>> = Vec::new();
    for region in seen {
        let start = (region.start - region.start % HUGE).max(walked.start);
        let end = region.end.next_multiple_of(HUGE).min(walked.end);
        match spots.last_mut() {
            Some(last) if start <= last.end => last.end = end.max(last.end),
            _ => spots.push(start..end),
        }
    }
    spots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_protected_is_whole_huge_pages_within_what_was_walked() {
        let region = |start: u64, end: u64| PageRegion { start, end, categories: 0 };
        let page = PAGE_SIZE;
        // Two in one huge page and its neighbour, one further away, and the ends of the walk.
        let seen = [
            region(HUGE + page, HUGE + 2 * page),
            region(2 * HUGE - page, 2 * HUGE + page),
            region(7 * HUGE + page, 7 * HUGE + 3 * page),
        ];
        let walked = HUGE + page..7 * HUGE + 4 * page;
        let expected = [HUGE + page..3 * HUGE, 7 * HUGE..7 * HUGE + 4 * page];
        assert_eq!(spots(&seen, walked), expected);
        assert!(spots(&[], 0..HUGE).is_empty());
    }
}
