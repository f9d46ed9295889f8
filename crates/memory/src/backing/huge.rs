//! A file on hugetlbfs, which knows neither write(2) nor holes smaller than a huge page.
//!
//! Keeps one promise: no store meets a huge page that the kernel cannot supply, which would be
//! SIGBUS. Each is allocated by fallocate(2) first, which says ENOSPC instead. For the guest, which
//! stores without asking, all of the file is reserved: a shared mapping does that, and the
//! reservation stays with the file (Documentation/mm/hugetlbfs_reserv.rst).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_units::ByteCount;
use rustix::fs::FallocateFlags;

use super::{PIECE, ZEROS};
use crate::mapping::WritableMapping;

/// Where the kernel tells of its huge pages of this size, and in `nr_hugepages` is told how many
/// there are to be (Documentation/admin-guide/mm/hugetlbpage.rst).
///
/// ```
/// use godwit_units::ByteCount;
///
/// let pool = godwit_memory::huge_pool(ByteCount(1 << 30));
/// assert_eq!(pool, std::path::Path::new("/sys/kernel/mm/hugepages/hugepages-1048576kB"));
/// ```
#[must_use]
pub fn huge_pool(page: ByteCount) -> PathBuf {
    format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page.0 >> 10).into()
}

/// Bytes in huge pages of `page` bytes that nobody has or has reserved.
pub(crate) fn unreserved(page: u64) -> ByteCount {
    let pool = huge_pool(ByteCount(page));
    let number = |name| {
        let text = std::fs::read_to_string(pool.join(name)).unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or(0)
    };
    ByteCount(number("free_hugepages").saturating_sub(number("resv_hugepages")) * page)
}

/// How a file on hugetlbfs is written.
#[derive(Debug)]
pub(crate) struct HugeFile {
    /// Bytes of a huge page.
    page: u64,
    /// All of the file; it reserves what is not allocated yet.
    window: WritableMapping,
    /// A bit for each huge page that was allocated here.
    allocated: Vec<AtomicU64>,
}

impl HugeFile {
    /// For `file`, whose pages are `page` bytes.
    pub(crate) fn new(file: &File, page: u64) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let window = WritableMapping::new(file, 0, ByteCount(length))?;
        let words = length.div_ceil(page).div_ceil(64);
        Ok(Self { page, window, allocated: (0..words).map(|_| AtomicU64::new(0)).collect() })
    }

    /// Bytes of a huge page.
    pub(crate) fn page(&self) -> u64 {
        self.page
    }

    pub(crate) fn write(&self, file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
        let end = at + bytes.len() as u64;
        for page in at / self.page..end.div_ceil(self.page) {
            let (word, bit) = (&self.allocated[page as usize / 64], 1 << (page % 64));
            if word.load(Ordering::Relaxed) & bit == 0 {
                rustix::fs::fallocate(file, FallocateFlags::empty(), page * self.page, self.page)?;
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
        self.window.write(at, bytes);
        Ok(())
    }

    /// Makes the bytes from `at` to `end` zero: whole huge pages become holes unless
    /// `keep_allocated`.
    pub(crate) fn zero(
        &self,
        file: &File,
        mut at: u64,
        end: u64,
        keep_allocated: bool,
    ) -> io::Result<()> {
        while at < end {
            let next = (at / self.page + 1) * self.page;
            let whole = at.is_multiple_of(self.page) && next <= end && !keep_allocated;
            if whole {
                let page = at / self.page;
                // Another thread that writes there would be a sender that names a page twice in one
                // round.
                self.allocated[page as usize / 64]
                    .fetch_and(!(1 << (page % 64)), Ordering::Relaxed);
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(file, flags, at, self.page)?;
                // A huge page that was allocated took its reservation along. The guest may still
                // want it.
                WritableMapping::new(file, at, ByteCount(self.page))?;
            } else {
                self.clear(file, at, next.min(end))?;
            }
            at = next;
        }
        Ok(())
    }

    /// Overwrites what is not zero yet; reading a hole does not fill it.
    fn clear(&self, file: &File, mut at: u64, end: u64) -> io::Result<()> {
        let mut buffer = [0; PIECE];
        while at < end {
            let part = &mut buffer[..(end - at).min(PIECE as u64) as usize];
            file.read_exact_at(part, at)?;
            if part.iter().any(|&byte| byte != 0) {
                self.write(file, &ZEROS[..part.len()], at)?;
            }
            at += part.len() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};
    use rustix::fs::MemfdFlags;

    use crate::{DataHint, MemoryError, RamBlock};

    const HUGE: u64 = (2 << 20) / PAGE_SIZE;

    /// The pool is the host's: one test at a time.
    static POOL: Mutex<()> = Mutex::new(());

    /// A line of /proc/meminfo about huge pages.
    fn count(name: &str) -> u64 {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    }

    fn of_huge_pages(pages: u64) -> Result<RamBlock, MemoryError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        RamBlock::in_memfd("huge", PageCount(pages * HUGE), flags)
    }

    /// A RAM block of two huge pages, where the host has some to give.
    fn block(test: &str) -> Option<(RamBlock, MutexGuard<'static, ()>)> {
        let pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        if count("HugePages_Free:") < 2 {
            // Another program's test may hold them, so they are not given back.
            let _ = std::fs::write("/proc/sys/vm/nr_hugepages", "4");
        }
        if count("HugePages_Free:") < 2 {
            eprintln!("SKIPPED {test}: the host has no huge pages (/proc/sys/vm/nr_hugepages)");
            return None;
        }
        Some((of_huge_pages(2).unwrap(), pool))
    }

    fn page(block: &RamBlock, at: u64) -> u8 {
        let mut bytes = [1; PAGE_SIZE as usize];
        block.read(PageIndex(at), &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == bytes[0]), "page {at} is mixed");
        bytes[0]
    }

    #[test]
    fn pages_within_huge_pages_are_written_and_cleared() {
        let test = "pages_within_huge_pages_are_written_and_cleared";
        let Some((block, _pool)) = block(test) else { return };
        block.write(PageIndex(HUGE - 1), &[7; 2 * PAGE_SIZE as usize]).unwrap();
        assert_eq!([HUGE - 2, HUGE - 1, HUGE, HUGE + 1].map(|at| page(&block, at)), [0, 7, 7, 0]);
        // A part of one is overwritten, the whole of the other becomes a hole, and is written
        // again.
        block.zero(PageRun::new(HUGE - 1, HUGE + 1)).unwrap();
        assert_eq!([HUGE - 1, HUGE].map(|at| page(&block, at)), [0, 0]);
        block.write(PageIndex(HUGE), &[8; PAGE_SIZE as usize]).unwrap();
        assert_eq!([HUGE - 1, HUGE, HUGE + 1].map(|at| page(&block, at)), [0, 8, 0]);
    }

    #[test]
    fn all_of_it_counts_as_data() {
        let Some((block, _pool)) = block("all_of_it_counts_as_data") else { return };
        let extents: Vec<PageRun> =
            block.data(block.all(), &mut DataHint::default()).map(Result::unwrap).collect();
        assert_eq!(extents, [block.all()]);
    }

    #[test]
    fn a_huge_page_that_is_given_back_stays_reserved_for_the_guest() {
        let test = "a_huge_page_that_is_given_back_stays_reserved_for_the_guest";
        let Some((block, _pool)) = block(test) else { return };
        let all = count("HugePages_Rsvd:");
        block.write(PageIndex(0), &[7; PAGE_SIZE as usize]).unwrap();
        let one_taken = count("HugePages_Rsvd:");
        block.zero(PageRun::new(0, HUGE)).unwrap();
        // Without it the guest's next store there is SIGBUS as soon as somebody else took the page.
        assert_eq!((one_taken, count("HugePages_Rsvd:")), (all - 1, all));
    }

    #[test]
    fn more_than_the_pool_has_is_refused_with_the_cure() {
        let test = "more_than_the_pool_has_is_refused_with_the_cure";
        let Some((_block, _pool)) = block(test) else { return };
        let error = of_huge_pages(count("HugePages_Total:") + 1).unwrap_err().to_string();
        assert!(error.contains("cannot be reserved in huge pages"), "{error}");
        let file = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
        assert!(error.contains(&format!("raise {file}")), "{error}");
    }
}
