//! The pagemap tracker on a real process that knows nothing of it: this test program, started once
//! more.
//!
//! The process maps a RAM file, or memory that no file holds, and writes what it is told to on its
//! standard input. Needs Linux 6.7
//! and the right to trace; skips aloud without.
#![allow(unsafe_code, clippy::unwrap_used)]

mod role;

use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use godwit_memory::{ProcessBacking, RamBlock};
use godwit_track::{
    AddressSpace, BlockMapping, DirtyTracker, PagemapTracker, TrackError, other_writers,
};
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};

use role::Role;

const PAGES: u64 = 5000;
const ROLE: &str = "GODWIT_TEST_WRITER";

/// Not a test by itself: the writer process, when the environment names a RAM file.
#[test]
fn writer_process() {
    let Some(path) = std::env::var_os(ROLE) else { return };
    let memory = match path.as_encoded_bytes() {
        b"" => map(None),
        _ => map(Some(&File::options().read(true).write(true).open(path).unwrap())),
    };
    println!("\n{}", memory as u64);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let (start, count): (u64, u64) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        for page in start..start + count {
            let offset = (page * PAGE_SIZE) as usize;
            match words[0] {
                // SAFETY: the page lies within the mapping, which lives as long as the process.
                "store" => unsafe { memory.add(offset).write_volatile(page as u8 | 1) },
                "read" => {
                    // SAFETY: as above; nothing else uses the page.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.add(offset), 4096) };
                    File::open("/dev/urandom").unwrap().read_exact(bytes).unwrap();
                }
                other => panic!("unknown command {other}"),
            }
        }
        println!("done");
    }
}

/// All of the file; or private memory, in huge pages where they fit, as QEMU has it by default.
fn map(file: Option<&File>) -> *mut u8 {
    use std::os::fd::AsRawFd;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let length = (PAGES * PAGE_SIZE) as usize;
    let (flags, fd) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    // SAFETY: a new mapping at an address of the kernel's choice; advice changes no bytes.
    let memory = unsafe {
        let memory = libc::mmap(std::ptr::null_mut(), length, protection, flags, fd, 0);
        libc::madvise(memory, length, libc::MADV_HUGEPAGE);
        memory
    };
    assert_ne!(memory, libc::MAP_FAILED);
    memory.cast()
}

/// Where the guest's memory is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Memory {
    File,
    Private,
}

const KINDS: [Memory; 2] = [Memory::File, Memory::Private];

fn mappings_of(pid: i32, block: &RamBlock) -> Result<Vec<BlockMapping>, TrackError> {
    AddressSpace::of(pid)?.mappings_of(block)
}

struct Writer {
    process: Role,
    path: Option<PathBuf>,
    block: Vec<RamBlock>,
}

impl Writer {
    fn start(name: &str, memory: Memory) -> Self {
        let path = (memory == Memory::File).then(|| {
            PathBuf::from(format!("/dev/shm/godwit-track-test-{name}-{}", std::process::id()))
        });
        if let Some(path) = &path {
            File::create(path).unwrap().set_len(PAGES * PAGE_SIZE).unwrap();
        }
        let value = path.clone().unwrap_or_default();
        let mut process = Role::start("writer_process", ROLE, value);
        let size = PageCount(PAGES).bytes();
        let address = loop {
            if let Ok(address) = process.hear().parse() {
                break address;
            }
        };
        let mut writer = Self { process, path, block: Vec::new() };
        writer.block.push(match &writer.path {
            Some(path) => RamBlock::open("mem", path, 0, size, false).unwrap(),
            None => {
                let backing = ProcessBacking::open(writer.pid(), address, size.0).unwrap();
                RamBlock::new("mem", Box::new(backing), PageCount(PAGES))
            }
        });
        writer
    }

    fn tell(&mut self, command: &str) {
        self.process.tell(command);
    }

    fn pid(&self) -> i32 {
        self.process.pid()
    }

    fn track(&self) -> Option<PagemapTracker> {
        match PagemapTracker::start(self.pid(), &self.block) {
            Ok(tracker) => Some(tracker),
            Err(error @ (TrackError::Kernel { .. } | TrackError::NotPermitted { .. })) => {
                // Past the test harness, which keeps what a passing test prints to itself.
                let line = format!("\nSKIPPED a test of the pagemap tracker: {error}\n");
                std::io::stderr().write_all(line.as_bytes()).unwrap();
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Whether the kernel still has write protection by a userfaultfd on the memory's mapping.
    fn is_registered(&self) -> bool {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.pid())).unwrap();
        let address = mappings_of(self.pid(), &self.block[0]).unwrap()[0].address.0;
        let of_memory = smaps.split(&format!("\n{address:x}-")).nth(1).unwrap();
        let flags = of_memory.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
        flags.split(' ').any(|flag| flag == "uw")
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.path.take().map(std::fs::remove_file);
    }
}

fn harvest(tracker: &PagemapTracker, within: PageRun, limit: u64) -> (Vec<PageRun>, PageIndex) {
    let mut runs = Vec::new();
    let end = tracker.harvest(0, within, PageCount(limit), &mut |run| runs.push(run)).unwrap();
    (runs, end)
}

const ALL: PageRun = PageRun::new(0, PAGES);

#[test]
fn every_write_is_found_and_none_invented() {
    for memory in KINDS {
        let mut writer = Writer::start("writes", memory);
        writer.tell("store 0 5000");
        let Some(tracker) = writer.track() else { return };
        assert_eq!(harvest(&tracker, ALL, 0).0, [ALL], "at first all is dirty");
        assert_eq!(harvest(&tracker, ALL, 0).0, [], "nothing was written since");

        writer.tell("store 7 1");
        writer.tell("store 4000 100");
        assert_eq!(tracker.count(0, ALL).unwrap(), PageCount(101));
        assert_eq!(tracker.count(0, PageRun::new(7, 4000)).unwrap(), PageCount(8));
        assert_eq!(harvest(&tracker, ALL, 0).0, [PageRun::new(7, 1), PageRun::new(4000, 100)]);
        assert_eq!(tracker.count(0, ALL).unwrap(), PageCount(0));

        // A write from kernel mode: read(2) straight into the page.
        writer.tell("read 99 2");
        assert_eq!(harvest(&tracker, ALL, 0).0, [PageRun::new(99, 2)]);
    }
}

#[test]
fn a_harvest_stops_at_its_limit_and_goes_on_from_there() {
    for memory in KINDS {
        let mut writer = Writer::start("limit", memory);
        writer.tell("store 0 5000");
        let Some(tracker) = writer.track() else { return };
        harvest(&tracker, ALL, 0);
        writer.tell("store 10 100");
        writer.tell("store 3000 100");
        let (runs, end) = harvest(&tracker, ALL, 60);
        assert_eq!(runs, [PageRun::new(10, 60)]);
        assert_eq!(end, PageIndex(70));
        let (runs, end) = harvest(&tracker, PageRun::new(70, PAGES - 70), 1000);
        assert_eq!(runs, [PageRun::new(70, 40), PageRun::new(3000, 100)]);
        assert_eq!(end, PageIndex(PAGES));
    }
}

#[test]
fn pages_touched_for_the_first_time_are_found() {
    for memory in KINDS {
        let mut writer = Writer::start("first-touch", memory);
        let Some(tracker) = writer.track() else { return };
        harvest(&tracker, ALL, 0);
        writer.tell("store 600 2");
        let (runs, _) = harvest(&tracker, ALL, 0);
        assert!(
            runs.iter()
                .any(|run| run.intersect(PageRun::new(600, 2)) == Some(PageRun::new(600, 2)))
        );
    }
}

#[test]
fn nothing_is_left_behind() {
    for memory in KINDS {
        let mut writer = Writer::start("nothing-left", memory);
        writer.tell("store 0 100");
        for _ in 0..3 {
            let Some(tracker) = writer.track() else { return };
            assert!(writer.is_registered());
            harvest(&tracker, ALL, 0);
            drop(tracker);
            // A test beside this one that starts a process has all descriptors twice until that
            // process has loaded its program.
            let until = Instant::now() + Duration::from_secs(5);
            while writer.is_registered() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(!writer.is_registered());
            let status = std::fs::read_to_string(format!("/proc/{}/status", writer.pid())).unwrap();
            assert!(status.contains("TracerPid:\t0"));
            writer.tell("store 0 200");
        }
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", writer.pid())).unwrap();
        let left = descriptors.filter(|entry| {
            let target = std::fs::read_link(entry.as_ref().unwrap().path()).unwrap_or_default();
            target.to_string_lossy().contains("userfaultfd")
        });
        assert_eq!(left.count(), 0);
    }
}

#[test]
fn a_second_tracker_is_refused() {
    for memory in KINDS {
        let writer = Writer::start("second", memory);
        let Some(_tracker) = writer.track() else { return };
        assert!(matches!(
            PagemapTracker::start(writer.pid(), &writer.block),
            Err(TrackError::Registered { .. })
        ));
    }
}

#[test]
fn mappings_and_other_writers_are_found() {
    let writer = Writer::start("mappings", Memory::File);
    let mapped = mappings_of(writer.pid(), &writer.block[0]).unwrap();
    assert_eq!(mapped.len(), 1);
    assert_eq!(mapped[0].pages, ALL);
    assert_eq!(other_writers(writer.pid(), &writer.block), []);
    let seen = other_writers(1, &writer.block);
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].pid, writer.pid());
    let own = i32::try_from(std::process::id()).unwrap();
    assert!(matches!(mappings_of(own, &writer.block[0]), Err(TrackError::NotMapped { .. })));
}

#[test]
fn private_memory_is_its_process_s_alone() {
    let writer = Writer::start("private", Memory::Private);
    let mapped = mappings_of(writer.pid(), &writer.block[0]).unwrap();
    assert_eq!(mapped.iter().map(|mapping| mapping.pages.count.0).sum::<u64>(), PAGES);
    assert_eq!(other_writers(1, &writer.block), []);
    let own = i32::try_from(std::process::id()).unwrap();
    assert!(matches!(mappings_of(own, &writer.block[0]), Err(TrackError::NotMapped { .. })));
    // One page further than is mapped.
    let backing = ProcessBacking::open(writer.pid(), mapped[0].address.0, (PAGES + 1) * PAGE_SIZE);
    let block = RamBlock::new("mem", Box::new(backing.unwrap()), PageCount(PAGES + 1));
    let past = mappings_of(writer.pid(), &block);
    // The neighbour may happen to be memory of the same kind.
    assert!(past.is_err() || past.unwrap().len() > 1);
}

#[test]
fn what_is_read_while_it_is_tracked_is_not_dirty_and_what_is_dirty_can_be_read() {
    let mut writer = Writer::start("read", Memory::Private);
    writer.tell("store 100 1000");
    let Some(tracker) = writer.track() else { return };
    harvest(&tracker, ALL, 0);
    let block = &writer.block[0];
    let mut bytes = vec![0; 5000 * 4096];
    block.read(PageIndex(0), &mut bytes).unwrap();
    let (runs, _) = harvest(&tracker, ALL, 0);
    // Reading what was never touched may have filled in the kernel's page of zeros.
    let within = PageRun::new(100, 1000);
    assert!(runs.iter().all(|run| run.intersect(within).is_none()), "{runs:?}");

    writer.tell("store 104 1");
    let (runs, _) = harvest(&tracker, within, 0);
    assert_eq!(runs, [PageRun::new(104, 1)]);
    let mut page = [0; 4096];
    writer.block[0].read(PageIndex(104), &mut page).unwrap();
    assert_eq!(page[0], 104 | 1);
}
