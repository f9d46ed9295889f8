//! The work on disks: a few threads for each, which read and write past the page cache.
//!
//! Keeps one promise: a thread has a part of its disk and its buffers to itself, so nothing is
//! looked at while it changes. What is wrong is told and counted; a disk that fails ends the work
//! on it with a word.

use std::error::Error;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_stamp::disk::{Blocks, DiskBug, DiskWorkload};
use godwit_stamp::heartbeat::{DISK, DiskSecond, FAILED};
use godwit_stamp::pace::Pace;
use godwit_stamp::settings::DiskWork;
use godwit_stamp::stamp::Page;
use godwit_units::{PAGE_SIZE, PageCount, PageIndex};
use rustix::fs::{Mode, OFlags, SeekFrom, open, seek};
use rustix::io::{preadv, pwritev};
use zerocopy::IntoBytes;

use super::drivers;

/// Bytes of buffers that a thread reads into.
const BUFFERS: u64 = 4 << 20;
/// Bugs that a thread prints.
const BUGS_IN_FULL: u64 = 20;
const IDLE_SLEEP: Duration = Duration::from_micros(200);
/// Reads or writes that may be owed; what cannot be kept up with is forgotten.
const OWED: u64 = 64;

/// Starts the work on all disks; the counter is of bugs.
pub(super) fn start(work: &DiskWork) -> Result<Arc<AtomicU64>, Box<dyn Error>> {
    let bugs = Arc::new(AtomicU64::new(0));
    if work.is_idle() {
        return Ok(bugs);
    }
    let disks = drivers::disks()?;
    if disks.is_empty() {
        return Err("there is work for disks, and no virtio disk".into());
    }
    for path in disks {
        let name = path.display().to_string();
        let size = seek(Device::open(&path)?.0, SeekFrom::End(0))?;
        let part = size.min(work.span.0) / PAGE_SIZE / u64::from(work.threads);
        let block = work.block.0 / PAGE_SIZE;
        if part < block {
            return Err(
                format!("{name} has {size} bytes: too few for {} threads", work.threads).into()
            );
        }
        for thread in 0..u64::from(work.threads) {
            let buffers = (BUFFERS / work.block.0).max(1);
            let workload = DiskWorkload::fill(
                Device::open(&path)?,
                PageIndex(part * thread),
                PageCount(part),
                block as usize,
                buffers as usize,
            )
            .map_err(|problem| format!("cannot fill {name}: {problem}"))?;
            let per_second = |bytes: u64| bytes / work.block.0 / u64::from(work.threads);
            let worker = Worker {
                workload,
                writes: Pace::new(per_second(work.write), 0),
                reads: Pace::new(per_second(work.read), 0),
                bugs: Arc::clone(&bugs),
                told: 0,
                latency: Latency::default(),
            };
            let name = format!("{name}/{thread}");
            std::thread::spawn(move || worker.run(&name));
        }
    }
    Ok(bugs)
}

/// A disk, past the page cache.
struct Device(OwnedFd);

impl Device {
    fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(open(path, OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())?))
    }
}

/// A vector of pages keeps each where the device wants it: on a multiple of 4 KiB.
impl Blocks for Device {
    fn read(&mut self, start: PageIndex, pages: &mut [Page]) -> io::Result<()> {
        let mut parts: Vec<_> =
            pages.iter_mut().map(|page| IoSliceMut::new(page.0.as_mut_bytes())).collect();
        let count = preadv(&self.0, &mut parts, start.0 * PAGE_SIZE)?;
        if count as u64 == pages.len() as u64 * PAGE_SIZE {
            Ok(())
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }

    fn write(&mut self, start: PageIndex, pages: &[Page]) -> io::Result<()> {
        let parts: Vec<_> = pages.iter().map(|page| IoSlice::new(page.0.as_bytes())).collect();
        let count = pwritev(&self.0, &parts, start.0 * PAGE_SIZE)?;
        if count as u64 == pages.len() as u64 * PAGE_SIZE {
            Ok(())
        } else {
            Err(io::ErrorKind::WriteZero.into())
        }
    }
}

/// A thread of work.
struct Worker {
    workload: DiskWorkload<Device>,
    writes: Pace,
    reads: Pace,
    bugs: Arc<AtomicU64>,
    told: u64,
    latency: Latency,
}

impl Worker {
    fn run(mut self, name: &str) {
        if let Err(problem) = self.work(name) {
            say!("{FAILED} {name}: {problem}");
        }
    }

    fn work(&mut self, name: &str) -> io::Result<()> {
        let began = Instant::now();
        let (mut writes, mut reads) = (0, 0);
        loop {
            let now = began.elapsed().as_micros() as u64;
            writes = (writes + self.writes.due(now)).min(OWED);
            reads = (reads + self.reads.due(now)).min(OWED);
            if writes > 0 {
                let began = Instant::now();
                self.workload.write()?;
                self.latency.add(began.elapsed());
                writes -= 1;
            }
            if reads > 0 {
                for bug in self.workload.read()? {
                    self.tell(&bug);
                }
                self.latency.reads += 1;
                reads -= 1;
            }
            if let Some(bug) = self.workload.check() {
                self.tell(&bug);
            }
            if writes + reads == 0 {
                std::thread::sleep(IDLE_SLEEP);
            }
            self.latency.tell(name, now);
        }
    }

    fn tell(&mut self, bug: &DiskBug) {
        self.bugs.fetch_add(1, Ordering::Relaxed);
        self.told += 1;
        if self.told <= BUGS_IN_FULL {
            say!("{bug}");
        }
    }
}

/// What was done, and how long writes took; told once a second.
#[derive(Default)]
struct Latency {
    reads: u64,
    micros: Vec<u64>,
    next: u64,
}

impl Latency {
    fn add(&mut self, time: Duration) {
        self.micros.push(time.as_micros() as u64);
    }

    fn tell(&mut self, name: &str, now: u64) {
        if now < self.next {
            return;
        }
        self.next = now + 1_000_000;
        self.micros.sort_unstable();
        let (reads, writes) = (self.reads, self.micros.len());
        let at =
            |share: usize| self.micros.get(writes.saturating_sub(1) * share / 100).unwrap_or(&0);
        let [median, p99, max] = [50, 99, 100].map(|share| *at(share));
        let writes = writes as u64;
        let second = DiskSecond { reads, writes, median_us: median, p99_us: p99, max_us: max };
        say!("{DISK} {name} {second}");
        self.micros.clear();
        self.reads = 0;
    }
}
