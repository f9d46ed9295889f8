//! The page-table tracker on transparent huge pages: of a tmpfs that gives them always or to large
//! files, and of anonymous memory. Threads write and discard while harvests take parts of huge
//! pages; a page that is reported is copied after that. When all have stopped and a last harvest is
//! done, the copy must be the memory, but for what was discarded last.
//!
//! Each kind also with the way round for kernels that lose writes in this, which none here is known
//! to do. Mounting a tmpfs takes root; skips aloud without, and where there are no huge pages.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_track::{BlockMapping, DirtyTracker, PagemapTracker, kernel_support};
use godwit_units::{Hva, PAGE_SIZE, PageCount, PageRun};
use rustix::fs::FallocateFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Pages of a huge page.
const HUGE: u64 = 512;
const PAGES: u64 = 8 * HUGE;
const BYTES: usize = (PAGES * PAGE_SIZE) as usize;

fn skip(what: &str, why: &str) {
    // Past the test harness, which keeps what a passing test prints to itself.
    let line = format!("\nSKIPPED {what}: {why}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

/// A tmpfs of this test's own.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(huge: &str) -> Option<Self> {
        let dir = std::env::temp_dir().join(format!("godwit-huge-{huge}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let options = format!("size=64M,huge={huge}");
        let mut mount = Command::new("mount");
        let mounted = mount.args(["-t", "tmpfs", "-o", &options, "none"]).arg(&dir).status();
        let tmpfs = Self(dir);
        mounted.is_ok_and(|status| status.success()).then_some(tmpfs)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).stderr(std::process::Stdio::null()).status();
        let _ = fs::remove_dir(&self.0);
    }
}

/// Memory in huge pages.
struct Memory {
    base: *mut u8,
    /// Its file, or this process's memory where it has none, and where in that it begins.
    file: File,
    offset: u64,
    anonymous: bool,
    /// Whether a page was discarded since it was written last. Held while either is done.
    discarded: Vec<Mutex<bool>>,
}

// SAFETY: the memory is written under the lock of its page, and read by system calls.
unsafe impl Sync for Memory {}
// SAFETY: as above; it is unmapped by its one owner.
unsafe impl Send for Memory {}

impl Memory {
    /// All pages written.
    fn new(tmpfs: Option<&Tmpfs>) -> Self {
        let huge = (HUGE * PAGE_SIZE) as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new memory at a place of the kernel's choice, and in it, where a huge page may
        // begin, memory of a file.
        let (base, file) = unsafe {
            let reserved = rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                BYTES + huge,
                protection,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            );
            let reserved = reserved.unwrap().cast::<u8>();
            let base = reserved.add(reserved.align_offset(huge));
            let file = match tmpfs {
                Some(tmpfs) => {
                    let path = tmpfs.0.join("ram");
                    let file = File::options()
                        .read(true)
                        .write(true)
                        .create(true)
                        .truncate(true)
                        .open(&path)
                        .unwrap();
                    file.set_len(BYTES as u64).unwrap();
                    fs::remove_file(path).unwrap();
                    let flags = MapFlags::SHARED | MapFlags::FIXED;
                    rustix::mm::mmap(base.cast(), BYTES, protection, flags, &file, 0).unwrap();
                    file
                }
                None => File::open("/proc/self/mem").unwrap(),
            };
            rustix::mm::madvise(base.cast(), BYTES, Advice::LinuxHugepage).unwrap();
            (base, file)
        };
        let anonymous = tmpfs.is_none();
        let offset = if anonymous { base as u64 } else { 0 };
        let discarded = (0..PAGES).map(|_| Mutex::new(false)).collect();
        let memory = Self { base, file, offset, anonymous, discarded };
        (0..PAGES).for_each(|page| memory.write(page, 1));
        memory
    }

    fn block(&self) -> Vec<BlockMapping> {
        vec![BlockMapping { pages: PageRun::new(0, PAGES), address: Hva(self.base as u64) }]
    }

    /// KiB of it that are mapped in huge pages.
    fn huge(&self) -> u64 {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = format!("{:x}-", self.base as u64);
        let own = smaps.lines().skip_while(|line| !line.starts_with(&begin)).take(25);
        let huge = own.filter(|line| {
            ["AnonHugePages:", "ShmemPmdMapped:"].iter().any(|name| line.starts_with(name))
        });
        huge.map(|line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()).sum()
    }

    fn write(&self, page: u64, stamp: u64) {
        let mut discarded = self.discarded[page as usize].lock().unwrap();
        // SAFETY: within the mapping, and under the page's lock.
        unsafe { self.base.add((page * PAGE_SIZE) as usize).cast::<u64>().write_volatile(stamp) };
        *discarded = false;
    }

    fn discard(&self, pages: PageRun) {
        let range = pages.start.0 as usize..pages.end().0 as usize;
        let mut locks: Vec<_> =
            self.discarded[range].iter().map(|lock| lock.lock().unwrap()).collect();
        let (start, length) = (pages.start.0 * PAGE_SIZE, pages.count.0 * PAGE_SIZE);
        // SAFETY: within the mapping, and under the pages' locks.
        let at = unsafe { self.base.add(start as usize) };
        if self.anonymous {
            // SAFETY: as above.
            unsafe {
                rustix::mm::madvise(at.cast(), length as usize, Advice::LinuxDontNeed).unwrap()
            };
        } else if pages.start.0.is_multiple_of(2) {
            // SAFETY: as above.
            assert_eq!(unsafe { libc::madvise(at.cast(), length as usize, libc::MADV_REMOVE) }, 0);
        } else {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&self.file, hole, start, length).unwrap();
        }
        locks.iter_mut().for_each(|discarded| **discarded = true);
    }

    fn read(&self, page: u64) -> u64 {
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, self.offset + page * PAGE_SIZE).unwrap();
        u64::from_le_bytes(word)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: its own mapping, to which nothing refers any more; what was reserved around it
        // holds nothing.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), BYTES) };
    }
}

/// Harvests all in parts of `limit` pages and copies what is reported.
fn round(memory: &Memory, tracker: &PagemapTracker, copy: &mut [u64], limit: u64) {
    let mut at = 0;
    while at < PAGES {
        let rest = PageRun::new(at, PAGES - at);
        let mut runs = Vec::new();
        let end = tracker.harvest(0, rest, PageCount(limit), &mut |run| runs.push(run)).unwrap();
        for page in runs.into_iter().flat_map(|run| run.start.0..run.end().0) {
            copy[page as usize] = memory.read(page);
        }
        assert!(end.0 > at);
        at = end.0;
    }
}

/// Pages that the copy has otherwise than the memory, though nobody has discarded them.
fn migrate(memory: &Memory, protected_once: bool, seed: u64) -> Vec<u64> {
    let tracker = PagemapTracker::start_own(&[memory.block()]).unwrap();
    if protected_once {
        tracker.protect_once().unwrap();
    }
    // The first round sends everything.
    let mut copy: Vec<u64> = (0..PAGES).map(|page| memory.read(page)).collect();
    let (stop, stamps) = (AtomicBool::new(false), AtomicU64::new(2));
    std::thread::scope(|scope| {
        for writer in 0..2_u64 {
            let (stop, stamps) = (&stop, &stamps);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed ^ writer << 40);
                while !stop.load(Ordering::Relaxed) {
                    let stamp = stamps.fetch_add(1, Ordering::Relaxed);
                    // Some pages many times, and then for long not again.
                    let window = stamp / 400 * 70;
                    memory.write((window + rng.u64(..70)) % PAGES, stamp);
                    (0..300).for_each(|_| std::hint::spin_loop());
                }
            });
        }
        scope.spawn(|| {
            let mut rng = fastrand::Rng::with_seed(seed);
            while !stop.load(Ordering::Relaxed) {
                let page = rng.u64(..PAGES);
                let pages = match rng.u64(..8) {
                    0 => PageRun::new(page / HUGE * HUGE, HUGE),
                    _ => PageRun::new(page, (1 + page % 5).min(PAGES - page)),
                };
                memory.discard(pages);
                if pages.count.0 == HUGE {
                    // Whole again, and perhaps in one page.
                    let stamp = stamps.fetch_add(1, Ordering::Relaxed);
                    (pages.start.0..pages.end().0).for_each(|page| memory.write(page, stamp));
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        let began = Instant::now();
        for limit in [700, 1, 37, 300, 1024, 0].into_iter().cycle() {
            round(memory, &tracker, &mut copy, limit);
            if began.elapsed() > Duration::from_millis(120) {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    round(memory, &tracker, &mut copy, 300);
    let differs = |page: &u64| {
        !*memory.discarded[*page as usize].lock().unwrap()
            && copy[*page as usize] != memory.read(*page)
    };
    (0..PAGES).filter(differs).collect()
}

fn nothing_is_lost_in(what: &str, tmpfs: Option<&Tmpfs>) {
    if let Err(error) = kernel_support() {
        return skip(what, &error.to_string());
    }
    for seed in 1..=6_u64 {
        let memory = Memory::new(tmpfs);
        if memory.huge() == 0 {
            return skip(what, "no huge pages are to be had");
        }
        let lost = migrate(&memory, seed % 2 == 0, seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        assert_eq!(lost, [0; 0], "{what}: lost pages, seed {seed}");
    }
}

#[test]
fn nothing_is_lost_on_a_tmpfs_of_huge_pages() {
    match Tmpfs::mount("always") {
        Some(tmpfs) => nothing_is_lost_in("a tmpfs with huge=always", Some(&tmpfs)),
        None => skip("a tmpfs with huge=always", "it cannot be mounted (this needs root)"),
    }
}

#[test]
fn nothing_is_lost_on_a_tmpfs_of_huge_pages_within_size() {
    match Tmpfs::mount("within_size") {
        Some(tmpfs) => nothing_is_lost_in("a tmpfs with huge=within_size", Some(&tmpfs)),
        None => skip("a tmpfs with huge=within_size", "it cannot be mounted (this needs root)"),
    }
}

#[test]
fn nothing_is_lost_in_anonymous_huge_pages() {
    nothing_is_lost_in("anonymous huge pages", None);
}
