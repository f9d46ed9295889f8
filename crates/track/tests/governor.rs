//! The write governor on a real process that knows nothing of it: this test program, started once
//! more.
//!
//! The process maps a RAM file; its threads write random pages of it as fast as they can, and stand
//! for vCPUs. Needs Linux 6.7, the right to trace, and the right to handle faults of the kernel;
//! skips aloud without.
#![allow(unsafe_code, clippy::unwrap_used)]

mod role;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_memory::RamBlock;
use godwit_track::{AsOf, DirtyTracker, PagemapTracker, TrackError, Way};
use godwit_units::{PAGE_SIZE, PageCount, PageRun};

use role::Role;

/// Four segments and a bit.
const PAGES: u64 = 4 * 4096 + 100;
const ALL: PageRun = PageRun::new(0, PAGES);
const WRITER: &str = "GODWIT_TEST_GOVERNED";
const GOVERNOR: &str = "GODWIT_TEST_GOVERNOR";

/// Not a test by itself: the process that is governed, when the environment names a RAM file.
#[test]
fn governed_process() {
    let Some(path) = std::env::var_os(WRITER) else { return };
    let memory = Memory::map(Path::new(&path));
    let (writes, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let mut threads = Vec::new();
    println!("\nready");
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "writer" => {
                let (writes, stop) = (Arc::clone(&writes), Arc::clone(&stop));
                let (tell, told) = std::sync::mpsc::channel();
                threads.push(std::thread::spawn(move || {
                    // SAFETY: takes nothing.
                    tell.send(unsafe { libc::gettid() }).unwrap();
                    let mut rng = fastrand::Rng::new();
                    while !stop.load(Ordering::Relaxed) {
                        let count = writes.fetch_add(1, Ordering::Relaxed);
                        memory.store(rng.u64(..PAGES), count);
                    }
                }));
                println!("{}", told.recv().unwrap());
            }
            "writes" => println!("{}", writes.load(Ordering::Relaxed)),
            "sweep" => {
                (0..PAGES).for_each(|page| memory.store(page, page));
                println!("done");
            }
            "stop" => {
                stop.store(true, Ordering::Relaxed);
                threads.drain(..).for_each(|thread| thread.join().unwrap());
                println!("done");
            }
            other => panic!("unknown command {other}"),
        }
    }
}

/// Not a test by itself: a governor in a process of its own, to be killed.
#[test]
fn governor_process() {
    let Ok(words) = std::env::var(GOVERNOR) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let numbers: Vec<i32> = words[1..].iter().map(|word| word.parse().unwrap()).collect();
    let block =
        [RamBlock::open("mem", Path::new(words[0]), 0, PageCount(PAGES).bytes(), false).unwrap()];
    let tracker = PagemapTracker::start(numbers[0], &block).unwrap();
    tracker.prepare_governor(Way::Call, &numbers[1..]).unwrap();
    tracker.govern(Some(0.0)).unwrap();
    tracker.harvest(0, ALL, PageCount::ZERO, &mut |_| {}).unwrap();
    println!("\ngoverning");
    std::thread::sleep(Duration::from_secs(600));
}

/// The mapped RAM file.
#[derive(Clone, Copy)]
struct Memory(*mut u64);

// SAFETY: it is only written through volatile stores, and what is read back is read from the file.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(path: &Path) -> Self {
        use std::os::fd::AsRawFd;
        let file = File::options().read(true).write(true).open(path).unwrap();
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new shared mapping at an address of the kernel's choice.
        let memory = unsafe {
            let length = (PAGES * PAGE_SIZE) as usize;
            libc::mmap(
                std::ptr::null_mut(),
                length,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(memory, libc::MAP_FAILED);
        Self(memory.cast())
    }

    fn store(&self, page: u64, value: u64) {
        // SAFETY: the page lies within the mapping, which lives as long as the process.
        unsafe { self.0.add((page * PAGE_SIZE / 8) as usize).write_volatile(value) };
    }
}

struct Governed {
    process: Role,
    path: PathBuf,
    block: Vec<RamBlock>,
    vcpus: Vec<i32>,
}

impl Governed {
    /// A process with so many threads that write all the time.
    fn start(name: &str, writers: usize) -> Self {
        let path = PathBuf::from(format!("/dev/shm/godwit-governor-{name}-{}", std::process::id()));
        File::create(&path).unwrap().set_len(PAGES * PAGE_SIZE).unwrap();
        let block = RamBlock::open("mem", &path, 0, PageCount(PAGES).bytes(), false).unwrap();
        let mut process = Role::start("governed_process", WRITER, &path);
        process.hear_until("ready");
        let mut governed = Self { process, path, block: vec![block], vcpus: Vec::new() };
        governed.ask("sweep");
        for _ in 0..writers {
            let thread = governed.ask("writer").parse().unwrap();
            governed.vcpus.push(thread);
        }
        governed
    }

    fn ask(&mut self, command: &str) -> String {
        self.process.ask(command)
    }

    fn writes(&mut self) -> u64 {
        self.ask("writes").parse().unwrap()
    }

    /// Waits until the threads have made so many more writes.
    fn await_writes(&mut self, more: u64) {
        let until = self.writes() + more;
        while self.writes() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn pid(&self) -> i32 {
        self.process.pid()
    }

    fn track(&self) -> Option<PagemapTracker> {
        let tracker = PagemapTracker::start(self.pid(), &self.block)
            .and_then(|tracker| tracker.prepare_governor(Way::Call, &self.vcpus).map(|()| tracker));
        match tracker {
            Ok(tracker) => Some(tracker),
            Err(
                error @ (TrackError::Kernel { .. }
                | TrackError::NotPermitted { .. }
                | TrackError::NoKernelFaults { .. }),
            ) => {
                // Past the test harness, which keeps what a passing test prints to itself.
                let line = format!("\nSKIPPED a test of the write governor: {error}\n");
                std::io::stderr().write_all(line.as_bytes()).unwrap();
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Whether the kernel still has write protection by a userfaultfd on the RAM file's mapping.
    fn is_registered(&self) -> bool {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.pid())).unwrap();
        let of_file = smaps.split(self.path.to_str().unwrap()).skip(1);
        let flags =
            of_file.filter_map(|part| part.lines().find(|line| line.starts_with("VmFlags:")));
        flags.into_iter().any(|line| line.split(' ').any(|flag| flag == "uw"))
    }
}

impl Drop for Governed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn harvest(tracker: &PagemapTracker, within: PageRun) -> Vec<PageRun> {
    let mut runs = Vec::new();
    tracker.harvest(0, within, PageCount::ZERO, &mut |run| runs.push(run)).unwrap();
    runs
}

/// Harvests all again and again; how many pages the guest was allowed to make dirty in a
/// second.
fn rate_under(tracker: &PagemapTracker, time: Duration) -> f64 {
    let (began, before) = (Instant::now(), tracker.governor_measures().dirtied);
    while began.elapsed() < time {
        std::thread::sleep(Duration::from_millis(5));
        harvest(tracker, ALL);
    }
    (tracker.governor_measures().dirtied - before) as f64 / began.elapsed().as_secs_f64()
}

#[test]
fn pages_become_dirty_at_the_rate_that_is_set() {
    let governed = Governed::start("rate", 2);
    let Some(tracker) = governed.track() else { return };
    for wanted in [500.0, 4000.0] {
        tracker.govern(Some(wanted)).unwrap();
        harvest(&tracker, ALL);
        let seen = rate_under(&tracker, Duration::from_secs(1));
        assert!((0.7..1.3).contains(&(seen / wanted)), "{seen} instead of {wanted}");
    }
    assert_eq!(tracker.governed_segments(), 5);
    let measures = tracker.governor_measures();
    assert!(measures.delayed > 0 && !measures.waited.is_zero() && !measures.longest_wait.is_zero());
}

#[test]
fn what_the_governor_lets_through_is_what_a_harvest_finds() {
    let governed = Governed::start("log", 2);
    let Some(tracker) = governed.track() else { return };
    tracker.govern(Some(3000.0)).unwrap();
    harvest(&tracker, ALL);
    let before = tracker.governor_measures().dirtied;
    let mut found = 0;
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(5));
        found += harvest(&tracker, ALL).iter().map(|run| run.count.0).sum::<u64>();
    }
    // Between the harvest and the count a few more are let through.
    let allowed = tracker.governor_measures().dirtied - before;
    assert!(allowed.abs_diff(found) <= allowed / 10 + 60, "{allowed} allowed, {found} found");
}

#[test]
fn no_write_is_lost_while_segments_change_hands() {
    let mut governed = Governed::start("hands", 2);
    let Some(tracker) = governed.track() else { return };
    let block = RamBlock::open("mem", &governed.path, 0, PageCount(PAGES).bytes(), false).unwrap();
    let mut copy = vec![0; PageCount(PAGES).bytes().0 as usize];
    let mut take = |run: PageRun| {
        let bytes = (run.start.0 * PAGE_SIZE) as usize..(run.end().0 * PAGE_SIZE) as usize;
        block.read(run.start, &mut copy[bytes]).unwrap();
    };
    // What the page fingerprints do for the first round.
    harvest(&tracker, ALL);
    take(ALL);
    let mut changes = 0;
    // The last round hands segments to the governor: what was missed then, no later round makes
    // good. Where the guest is given little time, few do.
    let mut round = 0;
    while round < 60 || (changes <= 100 && round < 1200) {
        round += 1;
        tracker.govern((round % 3 != 1).then_some(20_000.0)).unwrap();
        for start in (0..PAGES).step_by(4096) {
            let segment = PageRun::new(start, 4096.min(PAGES - start));
            let before = tracker.governed_segments();
            let mut at = segment.start;
            while at < segment.end() {
                let rest = PageRun::new(at.0, segment.end().0 - at.0);
                let mut runs = Vec::new();
                at = tracker.harvest(0, rest, PageCount(1000), &mut |run| runs.push(run)).unwrap();
                runs.into_iter().for_each(&mut take);
            }
            changes += usize::from(before != tracker.governed_segments());
        }
    }
    tracker.govern(Some(f64::INFINITY)).unwrap();
    governed.ask("stop");
    let mut last = Vec::new();
    tracker.look(0, ALL, AsOf::Round, &mut |run| last.push(run)).unwrap();
    last.into_iter().for_each(&mut take);

    assert!(changes > 100, "{changes}");
    let mut memory = vec![0; copy.len()];
    block.read(ALL.start, &mut memory).unwrap();
    let different = memory
        .chunks(PAGE_SIZE as usize)
        .zip(copy.chunks(PAGE_SIZE as usize))
        .filter(|(a, b)| a != b);
    assert_eq!(different.count(), 0);
}

#[test]
fn what_a_harvest_did_not_come_to_is_seen_by_the_last_one() {
    let mut governed = Governed::start("unseen", 0);
    let Some(tracker) = governed.track() else { return };
    harvest(&tracker, ALL);
    governed.ask("sweep");
    tracker.govern(Some(f64::INFINITY)).unwrap();
    // One harvest takes the segment over and reports but the first pages of it.
    let next = tracker.harvest(0, PageRun::new(0, 4096), PageCount(10), &mut |_| {}).unwrap();
    assert_eq!(next.0, 10);
    // The others are taken over and reported.
    harvest(&tracker, PageRun::new(4096, PAGES - 4096));
    let mut seen = Vec::new();
    tracker.look(0, ALL, AsOf::Round, &mut |run| seen.push(run)).unwrap();
    assert_eq!(seen, [PageRun::new(10, 4086)]);
    assert_eq!(harvest(&tracker, PageRun::new(0, 4096)), [PageRun::new(10, 4086)]);
    assert_eq!(harvest(&tracker, PageRun::new(0, 4096)), []);
}

#[test]
fn a_segment_that_nobody_writes_is_left_alone() {
    let mut governed = Governed::start("alone", 0);
    let Some(tracker) = governed.track() else { return };
    harvest(&tracker, ALL);
    tracker.govern(Some(100.0)).unwrap();
    assert_eq!(harvest(&tracker, ALL), []);
    assert_eq!(tracker.governed_segments(), 0);
    governed.ask("sweep");
    assert_eq!(harvest(&tracker, ALL), [ALL]);
    assert_eq!(tracker.governed_segments(), 5);
}

#[test]
fn threads_that_are_no_vcpus_never_wait() {
    let mut governed = Governed::start("others", 0);
    let Some(tracker) = governed.track() else { return };
    tracker.govern(Some(0.0)).unwrap();
    harvest(&tracker, ALL);
    governed.ask("sweep");
    let measures = tracker.governor_measures();
    assert_eq!((measures.others, measures.delayed), (PAGES, 0));
    assert_eq!(harvest(&tracker, ALL), [ALL]);
}

#[test]
fn dropping_it_frees_all_who_wait() {
    let mut governed = Governed::start("drop", 3);
    let Some(tracker) = governed.track() else { return };
    tracker.govern(Some(0.0)).unwrap();
    harvest(&tracker, ALL);
    // Three at a time every 20 ms: they hardly get on.
    let (began, before) = (Instant::now(), governed.writes());
    std::thread::sleep(Duration::from_millis(200));
    let slow = (governed.writes() - before) as f64 / began.elapsed().as_secs_f64();
    drop(tracker);
    assert!(!governed.is_registered());
    let (began, before) = (Instant::now(), governed.writes());
    governed.await_writes(1_000_000);
    let fast = (governed.writes() - before) as f64 / began.elapsed().as_secs_f64();
    assert!(slow * 10.0 < fast, "{slow} {fast}");
}

#[test]
fn killing_it_frees_all_who_wait() {
    let mut governed = Governed::start("kill", 3);
    if governed.track().is_none() {
        return;
    }
    let threads = governed.vcpus.iter().map(|thread| format!(" {thread}")).collect::<String>();
    let value = format!("{} {}{threads}", governed.path.display(), governed.pid());
    let mut governor = Role::start("governor_process", GOVERNOR, &value);
    governor.hear_until("governing");
    assert!(governed.is_registered());
    governor.kill();
    governed.await_writes(1_000_000);
    assert!(!governed.is_registered());
}

#[test]
fn a_handler_that_hangs_is_stood_in_for() {
    let mut governed = Governed::start("hang", 2);
    let Some(tracker) = governed.track() else { return };
    tracker.govern(Some(0.0)).unwrap();
    harvest(&tracker, ALL);
    let hung = Instant::now();
    tracker.stall_governor(Duration::from_secs(30));
    while tracker.governor_measures().takeovers == 0 && hung.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The watchdog's patience is 50 ms; a host without a processor to spare takes longer.
    let noticed = hung.elapsed();
    assert!(noticed < Duration::from_secs(2), "{noticed:?}");
    // Without a limit, all pages are soon dirty, and then there is nothing to wait for.
    governed.await_writes(1_000_000);
    assert!(tracker.governor_measures().takeovers > 0);
    let mut dirty = PageCount::ZERO;
    harvest(&tracker, ALL).iter().for_each(|run| dirty += run.count);
    assert!(dirty.0 > PAGES / 2, "{dirty:?}");
    // It is back in the end; not waited for here.
    std::mem::forget(tracker);
}

#[test]
fn a_process_that_was_handed_back_is_tracked_as_before() {
    let mut governed = Governed::start("back", 0);
    let Some(tracker) = governed.track() else { return };
    tracker.govern(Some(1000.0)).unwrap();
    harvest(&tracker, ALL);
    tracker.govern(None).unwrap();
    assert_eq!(harvest(&tracker, ALL), [ALL], "reported once as a whole");
    assert_eq!((tracker.governed_segments(), harvest(&tracker, ALL)), (0, Vec::new()));
    governed.ask("sweep");
    assert_eq!(tracker.governor_measures().others, 0);
    assert_eq!(harvest(&tracker, ALL), [ALL]);
}
