//! RAM that several processes write: this test program, started once more, as a back end that has a
//! part of the file mapped twice.
//!
//! Needs Linux 6.7 and the right to trace; skips aloud without.
#![allow(unsafe_code, clippy::unwrap_used)]

mod role;

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use godwit_memory::RamBlock;
use godwit_track::{
    Approach, AsOf, DirtyTracker, FindSharers, PagemapTracker, SharedRamTracker, Sharer, Sharers,
    TrackError,
};
use godwit_units::{PAGE_SIZE, PageCount, PageRun};

use role::Role;

const PAGES: u64 = 3000;
/// Where the second mapping begins.
const SECOND: u64 = 1000;
const ROLE: &str = "GODWIT_TEST_SHARER";

/// Not a test by itself: a process that writes, when the environment names a RAM file.
#[test]
fn sharing_process() {
    let Some(path) = std::env::var_os(ROLE) else { return };
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut first = map(&file, 0, None);
    let second = map(&file, SECOND, None);
    println!("\nready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words[0] {
            // As libvhost-user does for a new memory table; often at the same address.
            "remap" => first = map(&file, 0, Some(first)),
            way => {
                let page: u64 = words[1].parse().unwrap();
                let (memory, page) =
                    if way == "first" { (first, page) } else { (second, page - SECOND) };
                // SAFETY: the page lies within the mapping, which lives as long as the process.
                unsafe { memory.add((page * PAGE_SIZE) as usize).write_volatile(7) };
            }
        }
        println!("done");
    }
}

/// The file from page `from` on, in place of `old`.
fn map(file: &File, from: u64, old: Option<*mut u8>) -> *mut u8 {
    let length = ((PAGES - from) * PAGE_SIZE) as usize;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let address: *mut libc::c_void = old.map_or(std::ptr::null_mut(), |old| old.cast());
    let fixed = if old.is_some() { libc::MAP_FIXED } else { 0 };
    let offset = (from * PAGE_SIZE).cast_signed();
    // SAFETY: a new mapping at an address of the kernel's choice, or of one that this process has
    // made and uses no more.
    let memory = unsafe {
        if !address.is_null() {
            libc::munmap(address, length);
        }
        let flags = libc::MAP_SHARED | fixed;
        libc::mmap(address, length, protection, flags, file.as_raw_fd(), offset)
    };
    assert_ne!(memory, libc::MAP_FAILED);
    memory.cast()
}

fn start(path: &Path) -> Role {
    let mut process = Role::start("sharing_process", ROLE, path);
    process.hear_until("ready");
    process
}

/// Whether somebody watches its memory.
fn is_watched(process: &Role) -> bool {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", process.pid())).unwrap();
    smaps.lines().any(|line| line.starts_with("VmFlags:") && line.contains(" uw"))
}

/// Nobody watches it any more. Another test that starts a process just then has a copy of every
/// descriptor in it, until that process becomes the other program.
fn is_let_go(process: &Role) -> bool {
    let begin = Instant::now();
    while is_watched(process) && begin.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(5));
    }
    !is_watched(process)
}

/// A back end, and who is found to be one.
struct Shared {
    back_end: Role,
    found: Arc<Mutex<Sharers>>,
    tracker: SharedRamTracker,
    path: PathBuf,
}

fn sharer(process: &Role, lands_late: bool) -> Sharer {
    Sharer { pid: process.pid(), approach: Approach::default(), lands_late }
}

impl Shared {
    /// `None`, told aloud, where it cannot be had.
    fn start(name: &str, lands_late: bool) -> Option<Self> {
        let path = PathBuf::from(format!("/dev/shm/godwit-shared-{name}-{}", std::process::id()));
        File::create(&path).unwrap().set_len(PAGES * PAGE_SIZE).unwrap();
        let back_end = start(&path);
        let size = PageCount(PAGES).bytes();
        let blocks = Arc::new(vec![RamBlock::open("ram", &path, 0, size, false).unwrap()]);
        let who = vec![sharer(&back_end, lands_late)];
        let found = Arc::new(Mutex::new(Sharers { who, steady: true }));
        let told = Arc::clone(&found);
        let find: FindSharers = Box::new(move || Ok(told.lock().unwrap().clone()));
        // A VMM that maps nothing and writes nothing.
        let own = Arc::new(match PagemapTracker::start_own(&[vec![]]) {
            Ok(tracker) => tracker,
            Err(error @ TrackError::Kernel { .. }) => {
                println!("SKIPPED {name}: {error}");
                return None;
            }
            Err(error) => panic!("{error}"),
        });
        match SharedRamTracker::start(own, blocks, find) {
            Ok(tracker) => Some(Self { back_end, found, tracker, path }),
            Err(error @ (TrackError::Kernel { .. } | TrackError::NotPermitted { .. })) => {
                println!("SKIPPED {name}: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn harvest(&self) -> BTreeSet<u64> {
        let (mut pages, mut at) = (BTreeSet::new(), 0);
        self.tracker.begin_round();
        while at < PAGES {
            let rest = PageRun::new(at, PAGES - at);
            let mut note = |run: PageRun| pages.extend(run.start.0..run.end().0);
            at = self.tracker.harvest(0, rest, PageCount(700), &mut note).unwrap().0;
        }
        pages
    }

    fn look(&self) -> BTreeSet<u64> {
        let mut pages = BTreeSet::new();
        let mut note = |run: PageRun| pages.extend(run.start.0..run.end().0);
        self.tracker.look(0, PageRun::new(0, PAGES), AsOf::Round, &mut note).unwrap();
        pages
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn a_back_ends_writes_are_found_through_each_of_its_mappings() {
    let Some(mut shared) = Shared::start("writes", false) else { return };
    assert_eq!(shared.harvest().len() as u64, PAGES, "all of it at first");
    assert_eq!(shared.harvest(), BTreeSet::new());
    for command in ["first 17", "first 2000", "second 2000", "second 2999"] {
        shared.back_end.tell(command);
    }
    assert_eq!(shared.look(), [17, 2000, 2999].into());
    assert_eq!(shared.harvest(), [17, 2000, 2999].into());
    assert_eq!(shared.harvest(), BTreeSet::new());
    assert!(is_watched(&shared.back_end));
    shared.found.lock().unwrap().who.clear();
    assert!(shared.tracker.follow().unwrap());
    assert!(is_let_go(&shared.back_end), "nothing is left of it");
}

#[test]
fn memory_that_is_mapped_anew_is_looked_at_again() {
    // Mutation: mappings at the same addresses are taken for the same.
    let Some(mut shared) = Shared::start("anew", false) else { return };
    shared.harvest();
    shared.back_end.tell("first 17");
    shared.back_end.tell("remap");
    shared.back_end.tell("first 18");
    assert!(!shared.tracker.is_intact());
    assert_eq!(shared.harvest().len() as u64, PAGES);
    assert!(shared.tracker.is_intact());
    shared.back_end.tell("first 19");
    assert_eq!(shared.harvest(), [19].into());
}

#[test]
fn a_back_end_that_ends_and_one_that_comes_are_followed() {
    // Mutation: a process that has ended is passed over.
    let Some(mut shared) = Shared::start("comes", false) else { return };
    shared.harvest();
    shared.back_end.tell("first 17");
    shared.back_end.kill();
    assert!(!shared.tracker.is_intact());
    assert_eq!(shared.harvest().len() as u64, PAGES);
    assert_eq!(shared.tracker.pids(), []);
    shared.back_end = start(&shared.path);
    shared.back_end.tell("first 18");
    shared.found.lock().unwrap().who = vec![sharer(&shared.back_end, false)];
    assert_eq!(shared.harvest().len() as u64, PAGES);
    shared.back_end.tell("second 1500");
    assert_eq!(shared.harvest(), [1500].into());
}

#[test]
fn what_was_written_by_direct_io_is_looked_at_again_when_it_has_landed() {
    let Some(mut shared) = Shared::start("late", true) else { return };
    shared.harvest();
    shared.tracker.all_landed();
    shared.harvest();
    shared.back_end.tell("first 17");
    assert_eq!(shared.harvest(), [17].into());
    // Whatever lands from here on faults nothing.
    assert_eq!(shared.harvest(), BTreeSet::new());
    shared.tracker.all_landed();
    assert_eq!(shared.look(), [17].into());
    assert_eq!(shared.harvest(), [17].into());
    // One that goes leaves its requests behind.
    shared.found.lock().unwrap().who.clear();
    shared.harvest();
    shared.tracker.all_landed();
    assert_eq!(shared.look().len() as u64, PAGES);
}

#[test]
fn one_that_came_and_went_between_two_looks_is_reckoned_with() {
    // Mutation: only a process that was attached to can be missed.
    let Some(mut shared) = Shared::start("went", true) else { return };
    shared.back_end.kill();
    shared.found.lock().unwrap().who.clear();
    shared.harvest();
    shared.tracker.all_landed();
    shared.harvest();
    assert_eq!(shared.harvest(), BTreeSet::new());
    let mut brief = start(&shared.path);
    brief.tell("first 17");
    brief.kill();
    shared.found.lock().unwrap().steady = false;
    assert_eq!(shared.harvest().len() as u64, PAGES, "page 17 among them");
    shared.found.lock().unwrap().steady = true;
    assert_eq!(shared.harvest(), BTreeSet::new());
    // Those here do direct I/O, so it may have, too.
    shared.tracker.all_landed();
    assert_eq!(shared.look().len() as u64, PAGES);
}
