//! Tracking and copying while the kernel merges equal pages and splits them again (KSM,
//! Documentation/admin-guide/mm/ksm.rst), which libvirt and QEMU leave on for guest RAM.
//!
//! A merged page is another page in the tables than the one that was protected, and a write to it
//! makes a third: none of this may lose a write. Needs root and a kernel with KSM; skips aloud
//! without.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_track::{BlockMapping, DirtyTracker, PagemapTracker};
use godwit_units::{Hva, PAGE_SIZE, PageCount, PageRun};

const KSM: &str = "/sys/kernel/mm/ksm";
const PAGES: u64 = 8192;
const LIMIT: Duration = Duration::from_secs(60);
/// How long the memory is written and copied with merges going on.
const TIME: Duration = Duration::from_secs(3);

/// KSM at full speed; dropping it puts back what was before.
struct Ksm(Vec<(&'static str, String)>);

impl Ksm {
    fn at_full_speed(test: &str) -> Option<Self> {
        let wanted = [("sleep_millisecs", "0"), ("pages_to_scan", "20000"), ("run", "1")];
        let mut before = Vec::new();
        for (name, value) in wanted {
            let path = Path::new(KSM).join(name);
            let was = std::fs::read_to_string(&path);
            match was.and_then(|was| std::fs::write(path, value).map(|()| was)) {
                Ok(was) => before.insert(0, (name, was)),
                Err(error) => {
                    eprintln!("SKIPPED {test}: no KSM here, or no right to it: {error}");
                    drop(Self(before));
                    return None;
                }
            }
        }
        Some(Self(before))
    }

    /// Whether the kernel has merged pages of this process.
    fn has_merged() -> bool {
        let text = std::fs::read_to_string("/proc/self/ksm_merging_pages").unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or(0) > 100
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        for (name, value) in &self.0 {
            let _ = std::fs::write(Path::new(KSM).join(name), value);
        }
    }
}

/// Private memory that may be merged.
struct Memory(*mut u8);

// SAFETY: the mapping lives as long as this, and its bytes are only reached by volatile accesses.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Self {
        let (length, access) = ((PAGES * PAGE_SIZE) as usize, libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice; advice changes no bytes.
        let memory = unsafe {
            let memory = libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0);
            libc::madvise(memory, length, libc::MADV_MERGEABLE);
            memory
        };
        assert_ne!(memory, libc::MAP_FAILED);
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
        unsafe { libc::munmap(self.0.cast(), (PAGES * PAGE_SIZE) as usize) };
    }
}

#[test]
fn no_write_is_lost_while_pages_are_merged() {
    // Mutation: what a harvest finds of every seventh page is not copied.
    let test = "no_write_is_lost_while_pages_are_merged";
    let memory = Memory::new();
    let Some(_ksm) = Ksm::at_full_speed(test) else { return };
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
        Err(error) => return eprintln!("SKIPPED {test}: {error}"),
    };
    let mut copy = vec![0; (PAGES * PAGE_SIZE / 8) as usize];
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
            merged |= Ksm::has_merged();
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
