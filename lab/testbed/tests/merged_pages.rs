//! Tracking and copying while the kernel merges equal pages and splits them again (KSM,
//! Documentation/admin-guide/mm/ksm.rst), which libvirt and QEMU leave on for guest RAM.
//!
//! A merged page is another page in the tables than the one that was protected, and a write to it
//! makes a third: none of this may lose a write. Needs root and a kernel with KSM; skips aloud
//! without.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_testbed::{Ksm, skip};
use godwit_track::{BlockMapping, DirtyTracker, PagemapTracker};
use godwit_units::{Hva, PAGE_SIZE, PageCount, PageRun};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

const PAGES: u64 = 8192;
const BYTES: usize = (PAGES * PAGE_SIZE) as usize;
const LIMIT: Duration = Duration::from_secs(60);
/// How long the memory is written and copied with merges going on.
const TIME: Duration = Duration::from_secs(3);

/// Private memory that may be merged.
struct Memory(*mut u8);

// SAFETY: the mapping lives as long as this, and its bytes are only reached by volatile accesses.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Self {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice; advice changes no bytes.
        let memory = unsafe {
            let memory = mmap_anonymous(null_mut(), BYTES, access, MapFlags::PRIVATE).unwrap();
            madvise(memory, BYTES, Advice::LinuxMergeable).unwrap();
            memory
        };
        Self(memory.cast())
    }

    fn word(&self, page: u64, word: u64) -> *mut u64 {
        // SAFETY: within the mapping, as the callers' loops are.
        unsafe { self.0.add((page * PAGE_SIZE + word * 8) as usize).cast() }
    }

    fn fill(&self, page: u64, value: u64) {
        for word in 0..PAGE_SIZE / 8 {
            // SAFETY: within the mapping and aligned; one thread writes.
            unsafe { self.word(page, word).write_volatile(value) };
        }
    }

    fn copy(&self, page: u64, to: &mut [u64]) {
        for (word, to) in (0..).zip(to) {
            // SAFETY: within the mapping and aligned; a torn page is written later and copied
            // again.
            *to = unsafe { self.word(page, word).read_volatile() };
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nobody has a reference into it.
        unsafe { munmap(self.0.cast(), BYTES).unwrap() };
    }
}

#[test]
fn no_write_is_lost_while_pages_are_merged() {
    // Mutation: what a harvest finds of every seventh page is not copied.
    let test = "no_write_is_lost_while_pages_are_merged";
    let memory = Memory::new();
    let Some(ksm) = Ksm::for_test(test) else { return };
    let pages = PageRun::new(0, PAGES);
    let mapping = BlockMapping { pages, address: Hva(memory.0 as u64) };
    // A third each of zeros, of pages that are equal, and of pages like no other.
    let value = |random: u64| match random % 3 {
        0 => 0,
        1 => random / 3 % 4 + 1,
        _ => random | 1 << 63,
    };
    let mut rng = fastrand::Rng::with_seed(7);
    for page in 0..PAGES {
        memory.fill(page, value(rng.u64(..)));
    }
    let tracker = match PagemapTracker::start_own(&[vec![mapping]]) {
        Ok(tracker) => tracker,
        Err(error) => return skip(test, error),
    };
    let mut copy = vec![0; BYTES / 8];
    let mut found = Vec::new();
    let mut round = |copy: &mut [u64]| {
        found.clear();
        tracker.harvest(0, pages, PageCount(0), &mut |run| found.push(run)).unwrap();
        for run in &found {
            for page in run.start.0..run.end().0 {
                let words = (PAGE_SIZE / 8) as usize;
                memory.copy(page, &mut copy[page as usize * words..][..words]);
            }
        }
    };
    let (over, memory) = (AtomicBool::new(false), &memory);
    let merged = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                memory.fill(rng.u64(..PAGES), value(rng.u64(..)));
                // Slow enough that pages stay as they are for long enough to be merged.
                if rng.u64(..64) == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let began = Instant::now();
        let mut merged = false;
        while began.elapsed() < LIMIT && !(merged && began.elapsed() > TIME) {
            round(&mut copy);
            merged |= ksm.merged(std::process::id().cast_signed()).unwrap() > 100;
        }
        over.store(true, Ordering::Relaxed);
        merged
    });
    // What is merged after the last write is the same as before.
    round(&mut copy);
    std::thread::sleep(Duration::from_millis(200));
    round(&mut copy);
    assert!(merged, "the kernel has merged nothing within {LIMIT:?}");
    let mut now = vec![0; 512];
    for page in 0..PAGES {
        memory.copy(page, &mut now);
        assert!(now == copy[page as usize * 512..][..512], "page {page} is an old one");
    }
}
