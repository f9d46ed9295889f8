//! `PAGEMAP_SCAN` (Documentation/admin-guide/mm/pagemap.rst): what the page tables of a process
//! say of a range of its addresses, and write protection in the same step.
//!
//! Everything unsafe about the call is here; the structures and numbers are those of `linux/fs.h`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u64 = 0xc060_6610;

/// The page was written since it was write-protected.
pub const PAGE_IS_WRITTEN: u64 = 1 << 1;
/// The page is in memory.
pub const PAGE_IS_PRESENT: u64 = 1 << 3;
/// The page is in the swap.
pub const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// The page is the kernel's page of zeros: it was read and never written.
pub const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// Write-protect the pages that are reported.
pub const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
/// Fail where the range is not registered for asynchronous write protection.
pub const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;

/// `struct page_region`: addresses of pages that are alike.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PageRegion {
    /// The first address.
    pub start: u64,
    /// The first one after it.
    pub end: u64,
    /// What they are, of what was asked for.
    pub categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Which pages a scan reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    /// Those that were written since they were write-protected.
    Written,
    /// Those that hold bytes, in memory or in the swap: not the ones that were never touched, or
    /// only read.
    Filled,
    /// Those that have an entry at all, in memory or in the swap, the kernel's page of zeros
    /// included: an access to them needs nobody's help.
    Mapped,
}

/// Scans `start..end` for pages that are as `looked` says, reporting up to `max_pages` (0: no
/// limit) of them in `regions`; `flags` are `PM_SCAN_…`. Returns how many regions were filled and
/// the address where the walk ended.
///
/// # Errors
/// What the ioctl says; ENOTTY before Linux 6.7.
///
/// ```
/// use std::os::fd::AsFd;
/// use godwit_memory::pagemap::{Looked, PageRegion, scan};
///
/// let touched = vec![7_u8; 8192];
/// let page = touched.as_ptr() as u64 & !4095;
/// let pagemap = std::fs::File::open("/proc/self/pagemap")?;
/// let mut regions = [PageRegion::default(); 4];
/// let (filled, end) =
///     scan(pagemap.as_fd(), Looked::Filled, page..page + 4096, 0, 0, &mut regions)?;
/// assert_eq!((filled, end), (1, page + 4096));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn scan(
    pagemap: BorrowedFd<'_>,
    looked: Looked,
    range: std::ops::Range<u64>,
    flags: u64,
    max_pages: u64,
    regions: &mut [PageRegion],
) -> io::Result<(usize, u64)> {
    let (inverted, mask, any) = match looked {
        Looked::Written => (0, PAGE_IS_WRITTEN, 0),
        Looked::Filled => (PAGE_IS_PFNZERO, PAGE_IS_PFNZERO, PAGE_IS_PRESENT | PAGE_IS_SWAPPED),
        Looked::Mapped => (0, 0, PAGE_IS_PRESENT | PAGE_IS_SWAPPED),
    };
    let mut arg = ScanArg {
        size: size_of::<ScanArg>() as u64,
        flags,
        start: range.start,
        end: range.end,
        vec: regions.as_mut_ptr() as u64,
        vec_len: regions.len() as u64,
        max_pages,
        category_inverted: inverted,
        category_mask: mask,
        category_anyof_mask: any,
        // Of one kind, so that neighbours are one region.
        return_mask: mask,
        ..ScanArg::default()
    };
    // SAFETY: PAGEMAP_SCAN reads and writes one `struct pm_scan_arg` of the size it names, and
    // writes at most `vec_len` regions to `vec`; both belong to this call and are borrowed
    // exclusively.
    let filled = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
    if filled < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((filled.unsigned_abs() as usize, arg.walk_end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structures_have_the_kernels_sizes() {
        // The size is part of the ioctl's number.
        assert_eq!(PAGEMAP_SCAN >> 16 & 0x3fff, size_of::<ScanArg>() as u64);
        assert_eq!(size_of::<PageRegion>(), 24);
    }
}
