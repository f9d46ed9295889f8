//! Whether this kernel loses writes when a huge page is harvested in parts: tried, in memory of our
//! own, before any tracking begins.
//!
//! A harvest with a limit that ends within a huge page has the kernel split its entry. For a page
//! of a file that means to drop the entry (mm/huge_memory.c, `__split_huge_pmd_locked`); where the
//! kernel then takes what it has not looked at yet for memory that was never touched
//! (fs/proc/task_mmu.c, `pagemap_scan_thp_entry`), it is not reported, and lost. The same goes for
//! what a discard drops. It takes memory that comes in huge pages as the guest's does: a file
//! without a name beside the RAM file.
//!
//! The way round it is `PagemapTracker::protect_all`.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;

use godwit_units::{Hva, PAGE_SIZE, PageCount, PageRun};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::{BlockMapping, DirtyTracker, PagemapTracker, TrackError};

/// Pages of a huge page.
const HUGE: u64 = 512;
/// Two of them.
const PAGES: u64 = 2 * HUGE;
const BYTES: usize = (PAGES * PAGE_SIZE) as usize;

/// Whether harvests in parts report all that was written, in a file in `directory`, or in a
/// nameless one where there is none. `None`: it could not be tried, for want of room or of the
/// right to make a file there.
pub(crate) fn loses_nothing(directory: Option<&Path>) -> Option<bool> {
    let file = file_in(directory).ok()?;
    // In parts of several sizes, none of which a huge page is made of.
    let outcome = [37, 700].into_iter().try_fold(true, |fine, limit| {
        Ok::<_, TrackError>(fine && in_parts(&file, limit)? && beside_a_discard(&file, limit)?)
    });
    outcome.ok()
}

fn file_in(directory: Option<&Path>) -> io::Result<File> {
    let file: OwnedFd = match directory {
        Some(directory) => rustix::fs::open(
            directory,
            OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        )?,
        None => rustix::fs::memfd_create("godwit-try", MemfdFlags::CLOEXEC)?,
    };
    // All at once, so that no store meets a file system without room.
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, BYTES as u64)?;
    Ok(file.into())
}

/// All pages written, and again some; harvested in parts of `limit` pages, twice.
fn in_parts(file: &File, limit: u64) -> Result<bool, TrackError> {
    let (memory, tracker) = tracked(file)?;
    let all = harvest(&tracker, limit)?;
    let quiet = harvest(&tracker, limit)?;
    let some: Vec<u64> =
        (0..PAGES).filter(|page| page % 7 == 0 || (200..280).contains(page)).collect();
    some.iter().for_each(|page| memory.store(*page));
    let again = harvest(&tracker, limit)?;
    Ok(all.len() as u64 == PAGES && quiet.is_empty() && again == some)
}

/// Harvested as a whole, then some pages written and others, of the same huge page, discarded;
/// harvested in parts.
fn beside_a_discard(file: &File, limit: u64) -> Result<bool, TrackError> {
    let (memory, tracker) = tracked(file)?;
    harvest(&tracker, 0)?;
    [10, 300, HUGE + 500].into_iter().for_each(|page| memory.store(page));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // One page, whose place is given back at once.
    for flags in [hole, FallocateFlags::KEEP_SIZE] {
        rustix::fs::fallocate(file, flags, 20 * PAGE_SIZE, PAGE_SIZE).map_err(failed)?;
    }
    let found = harvest(&tracker, limit)?;
    // What was discarded may be reported or not.
    Ok([10, 300, HUGE + 500].iter().all(|page| found.contains(page)))
}

/// The file, mapped anew, so that whole huge pages are, with all pages written, and tracked.
fn tracked(file: &File) -> Result<(Mapping, PagemapTracker), TrackError> {
    let memory = Mapping::new(file).map_err(failed)?;
    (0..PAGES).for_each(|page| memory.store(page));
    let tracker = PagemapTracker::begin_own(&[vec![memory.block()]])?;
    Ok((memory, tracker))
}

fn harvest(tracker: &PagemapTracker, limit: u64) -> Result<Vec<u64>, TrackError> {
    let (mut found, mut at) = (Vec::new(), 0);
    while at < PAGES {
        let rest = PageRun::new(at, PAGES - at);
        let mut add = |run: PageRun| found.extend(run.start.0..run.end().0);
        at = tracker.harvest(0, rest, PageCount(limit), &mut add)?.0;
    }
    Ok(found)
}

fn failed(source: impl Into<io::Error>) -> TrackError {
    let pid = std::process::id().cast_signed();
    TrackError::Attach { pid, step: "trying the kernel's tracking", source: source.into() }
}

/// Memory that begins where a huge page may.
struct Mapping {
    reserved: NonNull<u8>,
    base: NonNull<u8>,
}

impl Mapping {
    fn new(file: &File) -> io::Result<Self> {
        let huge = (HUGE * PAGE_SIZE) as usize;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: new memory at a place of the kernel's choice.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                BYTES + huge,
                ProtFlags::empty(),
                flags,
            )?
        };
        let reserved = NonNull::new(reserved.cast::<u8>()).ok_or(io::ErrorKind::InvalidData)?;
        let offset = reserved.as_ptr().align_offset(huge);
        // SAFETY: at most `huge` bytes on, with `BYTES` after it.
        let base = unsafe { reserved.add(offset) };
        let memory = Self { reserved, base };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: in place of memory that this function has just made and nobody uses.
        unsafe {
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            rustix::mm::mmap(memory.base.as_ptr().cast(), BYTES, protection, flags, file, 0)?;
            // Where the file system gives huge pages only to those who ask. One that has none is no
            // less fine.
            let _ = rustix::mm::madvise(memory.base.as_ptr().cast(), BYTES, Advice::LinuxHugepage);
        }
        Ok(memory)
    }

    fn block(&self) -> BlockMapping {
        BlockMapping { pages: PageRun::new(0, PAGES), address: Hva(self.base.as_ptr() as u64) }
    }

    fn store(&self, page: u64) {
        assert!(page < PAGES);
        // SAFETY: within the mapping, which lives as long as `self`, and used by nobody else.
        unsafe { self.base.add((page * PAGE_SIZE) as usize).write_volatile(1) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let bytes = BYTES + (HUGE * PAGE_SIZE) as usize;
        // SAFETY: made by `new` with this length; nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.reserved.as_ptr().cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_kernel_is_tried_and_found_fine() {
        let began = std::time::Instant::now();
        let outcome = loses_nothing(None);
        println!("{outcome:?} after {:?}", began.elapsed());
        assert!(outcome.is_none_or(|fine| fine));
        assert!(loses_nothing(Some(Path::new("/dev/shm"))).is_none_or(|fine| fine));
        // Where no file can be made.
        assert_eq!(loses_nothing(Some(Path::new("/proc"))), None);
    }
}
