//! Pages that come while a process runs that knows nothing of it: this test program, started once
//! more. And those of this process itself.
//!
//! The process has private memory, or a file of its own; its threads read and write it, by
//! themselves and by the kernel.
//! Needs Linux 6.7, the right to trace, and the right to handle faults of the kernel; skips aloud
//! without.
#![allow(unsafe_code, clippy::unwrap_used)]

mod role;

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_bitmap::DirtyBitmap;
use godwit_memory::{ProcessBacking, RamBlock};
use godwit_track::{Approach, BlockMapping, KnownProcess, MissingPages, TrackError};
use godwit_units::{Hva, PAGE_SIZE, PageCount, PageIndex, PageRun};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use role::Role;

const PAGES: u64 = 8448;
const WORDS: usize = PAGE_SIZE as usize / 8;
const PROCESS: &str = "GODWIT_TEST_MISSING";
const SERVER: &str = "GODWIT_TEST_MISSING_SERVER";
const LIMIT: Duration = Duration::from_secs(20);

/// What a page holds first, and what is to come.
const OLD: u64 = 1 << 32;
const NEW: u64 = 2 << 32;

/// The memory of the process.
#[derive(Clone, Copy)]
struct Memory(*mut u64);

// SAFETY: it is only accessed by volatile loads and stores of single words.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(file: Option<&File>) -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let (flags, file) = match file {
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        };
        let length = (PAGES * PAGE_SIZE) as usize;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, file, 0) };
        assert_ne!(memory, libc::MAP_FAILED);
        Self(memory.cast())
    }

    fn word(self, page: u64, word: usize) -> *mut u64 {
        // SAFETY: within the mapping, which lives as long as the process.
        unsafe { self.0.add(page as usize * WORDS + word) }
    }

    fn load(self, page: u64, word: usize) -> u64 {
        // SAFETY: as above.
        unsafe { self.word(page, word).read_volatile() }
    }

    fn store(self, page: u64, value: u64) {
        // SAFETY: as above.
        (0..WORDS).for_each(|word| unsafe { self.word(page, word).write_volatile(value) });
    }

    fn advise(self, page: u64, count: u64) -> i32 {
        let length = (count * PAGE_SIZE) as usize;
        // SAFETY: pages of the mapping, which nobody holds a reference to.
        unsafe { libc::madvise(self.word(page, 0).cast(), length, libc::MADV_DONTNEED) }
    }

    /// What the kernel reads there when it copies the page into a pipe.
    fn load_by_kernel(self, page: u64) -> u64 {
        let (mut reader, writer) = std::io::pipe().unwrap();
        // SAFETY: write(2) reads one page of the mapping.
        let written = unsafe {
            libc::write(writer.as_raw_fd(), self.word(page, 0).cast(), PAGE_SIZE as usize)
        };
        assert_eq!(usize::try_from(written), Ok(PAGE_SIZE as usize));
        let mut bytes = vec![0; PAGE_SIZE as usize];
        reader.read_exact(&mut bytes).unwrap();
        u64::from_ne_bytes(bytes[8..16].try_into().unwrap())
    }
}

/// Not a test by itself: the process whose pages are to come.
#[test]
fn process_with_memory() {
    let Ok(kind) = std::env::var(PROCESS) else { return };
    let file = (kind == Kind::File.name()).then(|| {
        let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(PAGES * PAGE_SIZE).unwrap();
        file
    });
    let memory = Memory::map(file.as_ref());
    let read: Arc<Mutex<HashMap<u64, u64>>> = Arc::default();
    println!("\nready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let page = || words[1].parse::<u64>().unwrap();
        match words[0] {
            "address" => println!("{}", memory.0 as u64),
            "file" => println!("{}", file.as_ref().map_or(-1, File::as_raw_fd)),
            "fill" => {
                (0..PAGES).for_each(|page| memory.store(page, OLD + page));
                println!("done");
            }
            // Reads on a thread of its own, which may wait.
            "read" | "kernel" => {
                let (page, read) = (page(), Arc::clone(&read));
                let by_kernel = words[0] == "kernel";
                std::thread::spawn(move || {
                    let value =
                        if by_kernel { memory.load_by_kernel(page) } else { memory.load(page, 1) };
                    read.lock().unwrap().insert(page, value);
                });
                println!("done");
            }
            "result" => println!(
                "{}",
                read.lock().unwrap().get(&page()).map_or("waits".to_owned(), u64::to_string)
            ),
            // All pages, in the order of a stride, by a thread; every third is written.
            "sweep" => {
                let (stride, read) = (page(), Arc::clone(&read));
                std::thread::spawn(move || {
                    let wrong = (0..PAGES)
                        .map(|number| number * stride % PAGES)
                        .filter(|&page| {
                            let word = memory.load(page, WORDS - 1);
                            if page.is_multiple_of(3) {
                                // SAFETY: within the mapping.
                                unsafe { memory.word(page, 0).write_volatile(page) };
                            }
                            word != NEW + page && word != OLD + page
                        })
                        .count();
                    read.lock().unwrap().insert(PAGES + stride, wrong as u64);
                });
                println!("done");
            }
            "hammer" => {
                let page = page();
                std::thread::spawn(move || {
                    loop {
                        memory.store(page, 7);
                    }
                });
                println!("done");
            }
            "store" => {
                memory.store(page(), 77);
                println!("done");
            }
            "punch" => {
                punch(file.as_ref().unwrap(), page(), 1);
                println!("done");
            }
            // A file as QEMU does (ram_block_discard_range).
            "discard" => {
                let count = words[2].parse().unwrap();
                if let Some(file) = &file {
                    punch(file, page(), count);
                }
                println!("{}", memory.advise(page(), count));
            }
            "advise" => println!("{}", memory.advise(page(), words[2].parse().unwrap())),
            other => panic!("unknown command {other}"),
        }
    }
}

fn punch(file: &File, page: u64, count: u64) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, flags, page * PAGE_SIZE, count * PAGE_SIZE).unwrap();
}

/// Not a test by itself: a godwit that hears of a fault and is killed before it answers.
#[test]
fn server_process() {
    let Ok(words) = std::env::var(SERVER) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let number = |word: usize| words[word].parse::<i64>().unwrap();
    let pid = i32::try_from(number(0)).unwrap();
    let file = i32::try_from(number(2)).ok().filter(|file| *file >= 0);
    let pages = bitmap(&[PageRun::new(100, 50)]);
    let ram = Arc::new(vec![block(pid, number(1).cast_unsigned(), file)]);
    let missing = MissingPages::start(Approach::default(), pid, &ram, vec![pages]).unwrap();
    // One has come before.
    assert_eq!(missing.place(0, PageIndex(101), &new_pages(101, 1)).unwrap().0, 1);
    println!("\n{}", missing.number());
    let mut heard = 0;
    while heard == 0 {
        missing.await_faults(Duration::from_millis(100), &mut |_, _| heard += 1).unwrap();
    }
    println!("heard");
    std::thread::sleep(Duration::from_secs(600));
}

fn block(pid: i32, address: u64, file: Option<i32>) -> RamBlock {
    if let Some(file) = file {
        let path = format!("/proc/{pid}/fd/{file}");
        return RamBlock::open("ram", path.as_ref(), 0, PageCount(PAGES).bytes(), false).unwrap();
    }
    let backing = ProcessBacking::open(pid, address, PAGES * PAGE_SIZE).unwrap();
    RamBlock::new("ram", Box::new(backing), PageCount(PAGES))
}

fn bitmap(runs: &[PageRun]) -> DirtyBitmap {
    let mut pages = DirtyBitmap::new(PageCount(PAGES));
    for &run in runs {
        pages.set(run);
    }
    pages
}

fn new_pages(first: u64, count: u64) -> Vec<u8> {
    let words = (first..first + count).flat_map(|page| vec![NEW + page; WORDS]);
    words.flat_map(u64::to_ne_bytes).collect()
}

/// What memory a process has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Own,
    File,
}

const KINDS: [Kind; 2] = [Kind::Own, Kind::File];

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::File => "file",
        }
    }
}

/// The process, and where its memory is.
struct Process {
    role: Role,
    address: u64,
    /// The number of its descriptor.
    file: Option<i32>,
}

impl Process {
    fn start(kind: Kind) -> Self {
        println!("memory: {kind:?}");
        let mut role = Role::start("process_with_memory", PROCESS, kind.name());
        role.hear_until("ready");
        let address = role.ask("address").parse().unwrap();
        let file = role.ask("file").parse().ok().filter(|file| *file >= 0);
        assert_eq!(file.is_some(), kind == Kind::File);
        role.tell("fill");
        Self { role, address, file }
    }

    fn block(&self) -> RamBlock {
        block(self.role.pid(), self.address, self.file)
    }

    fn await_pages(&self, runs: &[PageRun]) -> Option<MissingPages> {
        let started = self.try_to_await(runs);
        match started {
            Ok(missing) => Some(missing),
            Err(
                error @ (TrackError::Kernel { .. }
                | TrackError::NotPermitted { .. }
                | TrackError::NoKernelFaults { .. }),
            ) => {
                // Past the test harness, which keeps what a passing test prints to itself.
                let line = format!("\nSKIPPED a test of missing pages: {error}\n");
                std::io::stderr().write_all(line.as_bytes()).unwrap();
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn try_to_await(&self, runs: &[PageRun]) -> Result<MissingPages, TrackError> {
        let approach = Approach::default();
        let ram = Arc::new(vec![self.block()]);
        MissingPages::start(approach, self.role.pid(), &ram, vec![bitmap(runs)])
    }

    /// What the thread has read that was to read this page.
    fn result(&mut self, page: u64) -> String {
        self.role.ask(&format!("result {page}"))
    }

    fn await_result(&mut self, page: u64) -> u64 {
        let until = Instant::now() + LIMIT;
        loop {
            let result = self.result(page);
            if result != "waits" {
                return result.parse().unwrap();
            }
            assert!(Instant::now() < until, "page {page} is waited for in vain");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn flags(&self) -> Vec<String> {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.role.pid())).unwrap();
        let flags = smaps.lines().filter(|line| line.starts_with("VmFlags:"));
        flags.flat_map(|line| line.split(' ').map(str::to_owned).collect::<Vec<_>>()).collect()
    }

    fn userfaultfds(&self) -> usize {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.role.pid())).unwrap();
        let targets = files.map(|file| std::fs::read_link(file.unwrap().path()).unwrap());
        targets.filter(|target| target.to_str() == Some("anon_inode:[userfaultfd]")).count()
    }
}

/// Answers faults with the new pages; pages that somebody waits for.
fn serve(missing: &MissingPages, time: Duration) -> u64 {
    let mut asked = Vec::new();
    missing.await_faults(time, &mut |_, page| asked.push(page.0)).unwrap();
    for &page in &asked {
        missing.place(0, PageIndex(page), &new_pages(page, 1)).unwrap();
    }
    asked.len() as u64
}

#[test]
fn every_missing_page_comes_to_whoever_accesses_it() {
    KINDS.into_iter().for_each(every_missing_page_comes_to_whoever_accesses_it_in);
}

fn every_missing_page_comes_to_whoever_accesses_it_in(kind: Kind) {
    let mut process = Process::start(kind);
    // Runs of all lengths, far and near; a quarter of all pages.
    let runs: Vec<PageRun> =
        (0..128).map(|number| PageRun::new(number * 64 + number % 7, 1 + number % 31)).collect();
    let Some(missing) = process.await_pages(&runs) else { return };
    let total = missing.left();
    for stride in [1, 5, 4099] {
        process.role.tell(&format!("sweep {stride}"));
    }
    process.role.tell("kernel 130");
    let mut background = PageIndex(0);
    let until = Instant::now() + LIMIT;
    while missing.left().0 > 0 {
        assert!(Instant::now() < until, "{} have not come", missing.left());
        // One page in the background for whatever was asked for meanwhile.
        serve(&missing, Duration::from_millis(1));
        if let Some(run) = missing.next_run(0, background) {
            missing.place(0, run.start, &new_pages(run.start.0, 1)).unwrap();
            background = run.end();
        }
    }
    let measures = missing.measures();
    assert_eq!((measures.placed, measures.discarded), (total.0, 0));
    assert!(measures.faults > total.0 / 4, "{measures:?}");
    for stride in [1, 5, 4099] {
        assert_eq!(process.await_result(PAGES + stride), 0, "pages of another content");
    }
    assert_eq!(process.await_result(130), NEW + 130, "what the kernel read");
    missing.finish().unwrap();
    let memory = process.block();
    let mut bytes = vec![0; PAGE_SIZE as usize];
    for page in 0..PAGES {
        memory.read(PageIndex(page), &mut bytes).unwrap();
        let came = runs.iter().any(|run| run.intersect(PageRun::new(page, 1)).is_some());
        let expected = if came { NEW } else { OLD } + page;
        let word = u64::from_ne_bytes(bytes[16..24].try_into().unwrap());
        assert_eq!(word, expected, "page {page}");
    }
    assert!(!process.flags().iter().any(|flag| flag == "um"), "still registered");
    assert_eq!(process.userfaultfds(), 0);
}

/// A process that has used nothing of its memory yet, or parts of it, is where most guests come to.
#[test]
fn missing_pages_need_not_be_there_before() {
    KINDS.into_iter().for_each(missing_pages_need_not_be_there_before_in);
}

fn missing_pages_need_not_be_there_before_in(kind: Kind) {
    for stored in [&[][..], &[600], &[600, 602, 700], &[100, 701]] {
        let mut process = Process::start(kind);
        assert_eq!(process.role.ask(&format!("discard 0 {PAGES}")), "0");
        for page in stored {
            process.role.tell(&format!("store {page}"));
        }
        let runs = [PageRun::new(100, 1), PageRun::new(600, 101), PageRun::new(PAGES - 1, 1)];
        let Some(missing) = process.await_pages(&runs) else { return };
        let pages = [100, 600, 601, 602, 603, 699, 700, PAGES - 1];
        for page in pages {
            process.role.tell(&format!("read {page}"));
        }
        std::thread::sleep(Duration::from_millis(50));
        for page in pages {
            assert_eq!(process.result(page), "waits", "page {page}, {stored:?} stored");
        }
        missing.place(0, PageIndex(100), &new_pages(100, 1)).unwrap();
        missing.place(0, PageIndex(600), &new_pages(600, 101)).unwrap();
        missing.place(0, PageIndex(PAGES - 1), &new_pages(PAGES - 1, 1)).unwrap();
        for page in pages {
            assert_eq!(process.await_result(page), NEW + page);
        }
        process.role.tell("read 99");
        assert_eq!(process.await_result(99), 0, "what is not missing");
        missing.finish().unwrap();
        assert_eq!(process.userfaultfds(), 0);
    }
}

#[test]
fn a_process_that_was_looked_at_before_may_have_changed_since() {
    let mut process = Process::start(Kind::Own);
    let pid = process.role.pid();
    let known = match KnownProcess::look_at(pid) {
        Err(TrackError::NotPermitted { .. }) => return,
        known => known.unwrap(),
    };
    let ram = Arc::new(vec![process.block()]);
    let pages = || vec![bitmap(&[PageRun::new(100, 50)])];
    // Threads, and with them stacks.
    (0..20).for_each(|page| process.role.tell(&format!("read {page}")));
    match MissingPages::start_in(&known, Approach::default(), &ram, pages()) {
        Err(TrackError::NoKernelFaults { .. }) => return,
        started => {
            let missing = started.unwrap();
            missing.place(0, PageIndex(100), &new_pages(100, 50)).unwrap();
            missing.finish().unwrap();
        }
    }
    process.role.kill();
    // Nobody is taken for it who has its number.
    let error = MissingPages::start_in(&known, Approach::default(), &ram, pages()).unwrap_err();
    assert!(error.to_string().contains("looking whether it lives"), "{error}");
}

/// The promise that all else stands on.
#[test]
fn nobody_reads_zeros_when_godwit_is_killed() {
    KINDS.into_iter().for_each(nobody_reads_zeros_when_godwit_is_killed_in);
}

fn nobody_reads_zeros_when_godwit_is_killed_in(kind: Kind) {
    let mut process = Process::start(kind);
    let Some(probe) = process.await_pages(&[PageRun::new(0, 1)]) else { return };
    probe.place(0, PageIndex(0), &new_pages(0, 1)).unwrap();
    probe.finish().unwrap();
    let file = process.file.unwrap_or(-1);
    let words = format!("{} {} {file}", process.role.pid(), process.address);
    let mut server = Role::start("server_process", SERVER, words);
    let number = loop {
        if let Ok(number) = server.hear().parse() {
            break number;
        }
    };
    process.role.tell("read 120");
    server.hear_until("heard");
    server.kill();
    // Another, and the kernel, begin to wait when nobody serves.
    process.role.tell("read 121");
    process.role.tell("kernel 122");
    std::thread::sleep(Duration::from_millis(300));
    for page in [120, 121, 122] {
        assert_eq!(process.result(page), "waits", "page {page} with nobody there");
    }
    // Those that are there are no business of godwit's.
    process.role.tell("read 101");
    process.role.tell("read 99");
    assert_eq!((process.await_result(101), process.await_result(99)), (NEW + 101, OLD + 99));

    let (pid, pages) = (process.role.pid(), bitmap(&[PageRun::new(100, 50)]));
    let approach = Approach::default();
    let ram = Arc::new(vec![process.block()]);
    let missing = MissingPages::take_again(approach, pid, number, &ram, vec![pages]).unwrap();
    assert_eq!(missing.left(), PageCount(49), "one was placed by the one before");
    let until = Instant::now() + LIMIT;
    let mut asked = 0;
    while asked < 3 && Instant::now() < until {
        asked += serve(&missing, Duration::from_millis(10));
    }
    for page in [120, 121, 122] {
        assert_eq!(process.await_result(page), NEW + page);
    }
    let refused = missing.finish().unwrap_err().to_string();
    assert!(refused.starts_with("46 pages of process "), "{refused}");
}

#[test]
fn a_discarded_page_is_zeros_and_no_older_page_is_placed_over_it() {
    KINDS.into_iter().for_each(a_discarded_page_is_zeros_and_no_older_page_is_placed_over_it_in);
}

fn a_discarded_page_is_zeros_and_no_older_page_is_placed_over_it_in(kind: Kind) {
    let mut process = Process::start(kind);
    let Some(missing) = process.await_pages(&[PageRun::new(10, 20)]) else { return };
    // The process waits until that was read, as a guest's balloon does.
    let discarded = std::thread::scope(|scope| {
        let reader = std::thread::Builder::new().spawn_scoped(scope, || {
            while missing.measures().discarded == 0 {
                missing.await_faults(Duration::from_millis(10), &mut |_, _| {}).unwrap();
            }
        });
        let discarded = process.role.ask("discard 12 3");
        reader.unwrap().join().unwrap();
        discarded
    });
    assert_eq!((discarded.as_str(), missing.measures().discarded), ("0", 3));
    // One was accessed, one written, before the older pages come; one is accessed later.
    process.role.tell("read 12");
    serve_until(&missing, |measures| measures.zeros == 1);
    assert_eq!(process.await_result(12), 0);
    std::thread::scope(|scope| {
        let stored = || serve_until(&missing, |measures| measures.zeros == 2);
        let reader = std::thread::Builder::new().spawn_scoped(scope, stored).unwrap();
        process.role.tell("store 13");
        reader.join().unwrap();
    });
    assert_eq!(missing.place(0, PageIndex(10), &new_pages(10, 20)).unwrap(), PageCount(17));
    process.role.tell("read 13");
    assert_eq!(process.await_result(13), 77, "an older page was placed over it");
    process.role.tell("read 14");
    serve_until(&missing, |measures| measures.zeros == 3);
    assert_eq!(process.await_result(14), 0);
    missing.finish().unwrap();
}

#[test]
fn a_page_that_came_between_the_hole_and_the_word_of_it_is_thrown_away_again() {
    let mut process = Process::start(Kind::File);
    let Some(missing) = process.await_pages(&[PageRun::new(10, 20)]) else { return };
    process.role.tell("punch 12");
    assert_eq!(missing.place(0, PageIndex(12), &new_pages(12, 1)).unwrap(), PageCount(1));
    std::thread::scope(|scope| {
        let read = || serve_until(&missing, |measures| measures.discarded > 0);
        let reader = std::thread::Builder::new().spawn_scoped(scope, read).unwrap();
        // One that has come and two that have not.
        assert_eq!(process.role.ask("advise 12 3"), "0");
        reader.join().unwrap();
    });
    assert_eq!(missing.measures().discarded, 2);
    process.role.tell("read 12");
    serve_until(&missing, |measures| measures.zeros == 1);
    assert_eq!(process.await_result(12), 0, "the older page is still there");
    missing.place(0, PageIndex(10), &new_pages(10, 20)).unwrap();
    missing.finish().unwrap();
}

fn serve_until(missing: &MissingPages, reached: impl Fn(&godwit_track::MissingMeasures) -> bool) {
    let until = Instant::now() + LIMIT;
    while !reached(&missing.measures()) {
        assert!(Instant::now() < until, "{:?}", missing.measures());
        serve(missing, Duration::from_millis(10));
    }
}

#[test]
fn a_page_comes_once_and_in_any_order() {
    KINDS.into_iter().for_each(a_page_comes_once_and_in_any_order_in);
}

fn a_page_comes_once_and_in_any_order_in(kind: Kind) {
    let process = Process::start(kind);
    let Some(missing) = process.await_pages(&[PageRun::new(0, 300)]) else { return };
    assert_eq!(missing.place(0, PageIndex(100), &new_pages(100, 150)).unwrap(), PageCount(150));
    assert_eq!(missing.place(0, PageIndex(0), &new_pages(0, 300)).unwrap(), PageCount(150));
    assert_eq!(missing.place_zeros(0, PageRun::new(0, 300)).unwrap(), PageCount(0));
    assert_eq!((missing.left(), missing.measures().placed), (PageCount(0), 300));
    missing.finish().unwrap();
}

#[test]
fn what_cannot_be_waited_for_is_refused() {
    let process = Process::start(Kind::Own);
    let Some(missing) = process.await_pages(&[PageRun::new(0, 1)]) else { return };
    let refused = |runs: &[PageRun]| process.try_to_await(runs).unwrap_err();
    // Somebody else's userfaultfd is on a part of it. Nothing was thrown away.
    let error = refused(&[PageRun::new(0, 2)]);
    assert!(matches!(error, TrackError::Registered { .. }), "{error}");
    let mut bytes = vec![0; PAGE_SIZE as usize];
    process.block().read(PageIndex(1), &mut bytes).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes[..8].try_into().unwrap()), OLD + 1);
    let scattered: Vec<PageRun> = (0..4097).map(|run| PageRun::new(run * 2, 1)).collect();
    let error = refused(&scattered);
    assert!(matches!(error, TrackError::TooManyRuns { runs: 4097, most: 4096 }), "{error}");
    let file = Arc::new(vec![RamBlock::anonymous("file", PageCount(16)).unwrap()]);
    let mut all = DirtyBitmap::new(PageCount(16));
    all.set_all();
    let approach = Approach::default();
    let of_file = MissingPages::start(approach, process.role.pid(), &file, vec![all]);
    assert!(matches!(of_file.unwrap_err(), TrackError::NotMapped { .. }));
    assert_eq!(process.userfaultfds(), 1, "what was refused leaves nothing behind");
    drop(missing);
}

#[test]
fn who_uses_a_page_before_it_is_waited_for_is_found_out() {
    // Of a file nobody finds zeros: it waits from before its pages are thrown away.
    let mut process = Process::start(Kind::Own);
    process.role.tell("hammer 5");
    // Where processors are few it may not run in between; not so each time.
    let error = (0..100).find_map(|_| match process.try_to_await(&[PageRun::new(0, 4096)]) {
        Ok(missing) => {
            missing.place(0, PageIndex(0), &new_pages(0, 4096)).unwrap();
            missing.finish().unwrap();
            None
        }
        Err(error) => Some(error),
    });
    let error = error.expect("it is never found out");
    if matches!(error, TrackError::NotPermitted { .. } | TrackError::NoKernelFaults { .. }) {
        return;
    }
    assert!(matches!(error, TrackError::Intruded { page: 5, .. }), "{error}");
    assert_eq!(process.userfaultfds(), 0);
}

/// A thread of this process that reads a page, itself or by the kernel.
fn reader(memory: Memory, page: u64, by_kernel: bool) -> JoinHandle<u64> {
    std::thread::spawn(
        move || {
            if by_kernel { memory.load_by_kernel(page) } else { memory.load(page, 1) }
        },
    )
}

/// Memory of this process, of which pages 10 to 29 are to come.
struct Own {
    memory: Memory,
    ram: Arc<Vec<RamBlock>>,
}

impl Own {
    fn start(kind: Kind) -> Option<(Self, MissingPages)> {
        println!("memory: {kind:?}");
        if let Err(error) = MissingPages::can_start_own() {
            let line = format!("\nSKIPPED a test of missing pages: {error}\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            return None;
        }
        let file = (kind == Kind::File).then(|| {
            let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(PAGES * PAGE_SIZE).unwrap();
            file
        });
        let memory = Memory::map(file.as_ref());
        (0..PAGES).for_each(|page| memory.store(page, OLD + page));
        let number = file.as_ref().map(AsRawFd::as_raw_fd);
        let ram = vec![block(std::process::id().cast_signed(), memory.0 as u64, number)];
        let own = Self { memory, ram: Arc::new(ram) };
        let missing = own.await_pages().unwrap();
        Some((own, missing))
    }

    fn await_pages(&self) -> Result<MissingPages, TrackError> {
        let (pages, address) = (PageRun::new(0, PAGES), Hva(self.memory.0 as u64));
        let mappings = vec![vec![BlockMapping { pages, address }]];
        let missing = vec![bitmap(&[PageRun::new(10, 20)])];
        // SAFETY: the block is mapped there, and accessed by pointers only.
        unsafe { MissingPages::start_own(mappings, &self.ram, missing) }
    }

    /// Throws a page away as a balloon would.
    fn discard(&self, kind: Kind, page: u64) -> JoinHandle<i32> {
        let memory = self.memory;
        std::thread::spawn(move || {
            let how = if kind == Kind::File { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
            // SAFETY: a page of the mapping, which nobody holds a reference to.
            unsafe { libc::madvise(memory.word(page, 0).cast(), PAGE_SIZE as usize, how) }
        })
    }
}

#[test]
fn own_pages_come_to_threads_of_this_process_and_to_the_kernel() {
    for kind in KINDS {
        let Some((own, missing)) = Own::start(kind) else { return };
        let waiting = [reader(own.memory, 12, false), reader(own.memory, 15, true)];
        // What is there is had at once, and nobody else has these pages come.
        assert_eq!(reader(own.memory, 9, false).join().unwrap(), OLD + 9);
        assert!(matches!(own.await_pages(), Err(TrackError::Registered { .. })));
        let until = Instant::now() + LIMIT;
        let mut served = 0;
        while served < 2 {
            assert!(Instant::now() < until, "{served} were asked for");
            served += serve(&missing, Duration::from_millis(10));
        }
        assert_eq!(waiting.map(|thread| thread.join().unwrap()), [NEW + 12, NEW + 15]);
        // A page that is given back does not come any more.
        let discarded = own.discard(kind, 20);
        while !discarded.is_finished() {
            assert_eq!(serve(&missing, Duration::from_millis(1)), 0);
        }
        assert_eq!(discarded.join().unwrap(), 0);
        let empty = reader(own.memory, 20, false);
        while !empty.is_finished() {
            assert_eq!(serve(&missing, Duration::from_millis(1)), 0);
        }
        assert_eq!(empty.join().unwrap(), 0);
        assert_eq!(missing.place(0, PageIndex(10), &new_pages(10, 20)).unwrap().0, 17);
        missing.finish().unwrap();
        drop(missing);
        let read = [11, 20, 29, 30].map(|page| own.memory.load(page, 1));
        assert_eq!(read, [NEW + 11, 0, NEW + 29, OLD + 30]);
        // Nothing is registered any more.
        drop(own.await_pages().unwrap());
    }
}

#[test]
fn nobody_finds_zeros_when_own_pages_are_forgotten_but_when_they_are_given_up() {
    for kind in KINDS {
        let Some((own, missing)) = Own::start(kind) else { return };
        drop(missing);
        let waiting = [reader(own.memory, 12, false), reader(own.memory, 15, true)];
        std::thread::sleep(Duration::from_millis(300));
        assert!(!waiting.iter().any(JoinHandle::is_finished), "{kind:?}: a page that never came");

        let Some((own, missing)) = Own::start(kind) else { return };
        let waiting = reader(own.memory, 12, false);
        missing.await_faults(LIMIT, &mut |_, page| assert_eq!(page, PageIndex(12))).unwrap();
        missing.give_up().unwrap();
        assert_eq!(waiting.join().unwrap(), 0);
    }
}
