//! Kernel threads that write memory of a process by its page tables, as those of vhost-net do: they
//! are tracked, and the write governor does not hold them up.
//!
//! The stand-in for vhost-net, which not every kernel has, is an io_uring: its polling thread and
//! its workers belong to the process, use its page tables and copy into its memory. The process is
//! this test program, started once more. Skips aloud without Linux 6.7, the right to trace or
//! io_uring.
#![allow(unsafe_code, clippy::unwrap_used)]

mod role;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use godwit_memory::RamBlock;
use godwit_track::{DirtyTracker, PagemapTracker, TrackError, Way};
use godwit_units::{PAGE_SIZE, PageCount, PageRun};

use role::Role;

const PAGES: u64 = 1024;
const ALL: PageRun = PageRun::new(0, PAGES);
const PROCESS: &str = "GODWIT_TEST_KERNEL_WRITERS";
const PAGE: usize = PAGE_SIZE as usize;
const LIMIT: Duration = Duration::from_secs(20);

// linux/io_uring.h.
const SETUP_SQPOLL: u32 = 1 << 1;
const ENTER_SQ_WAKEUP: u32 = 1 << 1;
const SQ_NEED_WAKEUP: u32 = 1;
const IOSQE_ASYNC: u8 = 1 << 4;
const OP_READ: u8 = 22;
const OP_RECV: u8 = 27;
const ENTRIES: usize = 4;

#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread: [u32; 2],
    features: u32,
    reserved: [u32; 4],
    /// head, tail, mask, entries, flags, dropped, array, reserved.
    sq: [u32; 8],
    sq_address: u64,
    /// head, tail, mask, entries, overflow, entries of the queue, flags, reserved.
    cq: [u32; 8],
    cq_address: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Submission {
    operation: u8,
    flags: u8,
    priority: u16,
    file: i32,
    offset: u64,
    address: u64,
    length: u32,
    more: [u32; 9],
}

/// An io_uring with one request at a time.
struct Ring {
    fd: OwnedFd,
    polled: bool,
    params: Params,
    sq: *mut u8,
    cq: *mut u8,
    submissions: *mut Submission,
}

impl Ring {
    fn new(polled: bool) -> io::Result<Self> {
        let flags = if polled { SETUP_SQPOLL } else { 0 };
        let mut params = Params { flags, sq_thread: [0, 10], ..Params::default() };
        // SAFETY: io_uring_setup(2) fills the structure, which has the kernel's layout.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, ENTRIES, &raw mut params) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor of nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let map = |offset: i64, length: usize| {
            let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            // SAFETY: a new mapping at an address of the kernel's choice.
            let at =
                unsafe { libc::mmap(null_mut(), length, access, flags, fd.as_raw_fd(), offset) };
            assert_ne!(at, libc::MAP_FAILED);
            at.cast::<u8>()
        };
        let sq = map(0, params.sq[6] as usize + ENTRIES * 4);
        let cq = map(0x800_0000, params.cq[5] as usize + params.cq_entries as usize * 16);
        let submissions = map(0x1000_0000, ENTRIES * 64).cast();
        Ok(Self { fd, polled, params, sq, cq, submissions })
    }

    fn word(ring: *mut u8, offset: u32) -> &'static AtomicU32 {
        // SAFETY: an aligned word of a ring, which stays mapped as long as the process lives.
        unsafe { &*ring.add(offset as usize).cast::<AtomicU32>() }
    }

    /// What the kernel answers to one request: a number of bytes, or an error.
    fn ask(&self, submission: Submission) -> i32 {
        let tail = Self::word(self.sq, self.params.sq[1]);
        let at = tail.load(Ordering::Relaxed)
            & Self::word(self.sq, self.params.sq[2]).load(Ordering::Relaxed);
        // SAFETY: an entry that the kernel has taken and answered, or never had.
        unsafe { self.submissions.add(at as usize).write_volatile(submission) };
        Self::word(self.sq, self.params.sq[6] + at * 4).store(at, Ordering::Relaxed);
        tail.fetch_add(1, Ordering::Release);
        let enter = |count: u32, flags: u32| {
            let fd = self.fd.as_raw_fd();
            // SAFETY: no pointer is passed.
            unsafe { libc::syscall(libc::SYS_io_uring_enter, fd, count, 0, flags, 0, 0) };
        };
        if !self.polled {
            enter(1, 0);
        }
        let head = Self::word(self.cq, self.params.cq[0]);
        let until = Instant::now() + LIMIT;
        while Self::word(self.cq, self.params.cq[1]).load(Ordering::Acquire)
            == head.load(Ordering::Relaxed)
        {
            if Instant::now() > until {
                return -libc::ETIMEDOUT;
            }
            let flags = Self::word(self.sq, self.params.sq[4]).load(Ordering::SeqCst);
            if self.polled && flags & SQ_NEED_WAKEUP != 0 {
                enter(1, ENTER_SQ_WAKEUP);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let at = head.load(Ordering::Relaxed)
            & Self::word(self.cq, self.params.cq[2]).load(Ordering::Relaxed);
        let result = Self::word(self.cq, self.params.cq[5] + at * 16 + 8).load(Ordering::Relaxed);
        head.fetch_add(1, Ordering::Release);
        result.cast_signed()
    }
}

/// The memory, which this process maps and never touches itself.
fn map(path: &str) -> *mut u8 {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let (access, length) = (libc::PROT_READ | libc::PROT_WRITE, PAGES as usize * PAGE);
    // SAFETY: a new shared mapping at an address of the kernel's choice.
    let at =
        unsafe { libc::mmap(null_mut(), length, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at.cast()
}

/// Whether this process has a thread of this name: a kernel's, since it starts none of it.
fn has_thread(name: &str) -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.into_iter().any(|comm| comm.starts_with(name))
}

/// Puts write protection on all of the memory by a userfaultfd that may not handle faults of the
/// kernel, and whose messages nobody answers.
fn protect_for_users_only(memory: *mut u8) -> OwnedFd {
    // SAFETY: takes no pointer. UFFD_USER_MODE_ONLY is 1.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: a new descriptor of nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let (start, length) = (memory as u64, PAGES * PAGE_SIZE);
    // UFFDIO_API with write protection of shared memory, UFFDIO_REGISTER for it, and
    // UFFDIO_WRITEPROTECT (linux/userfaultfd.h).
    let mut calls: [(libc::c_ulong, [u64; 4]); 3] = [
        (0xc018_aa3f, [0xaa, 1 | 1 << 12, 0, 0]),
        (0xc020_aa00, [start, length, 2, 0]),
        (0xc018_aa06, [start, length, 1, 0]),
    ];
    for (call, words) in &mut calls {
        // SAFETY: each of the three structures is at most four words long.
        let done = unsafe { libc::ioctl(fd.as_raw_fd(), *call as _, words.as_mut_ptr()) };
        assert_eq!(done, 0, "{call:#x}: {}", io::Error::last_os_error());
    }
    fd
}

/// Not a test by itself: the process whose kernel threads write, when the environment names a RAM
/// file.
#[test]
fn writing_process() {
    let Ok(path) = std::env::var(PROCESS) else { return };
    let memory = map(&path);
    let rings = [Ring::new(true), Ring::new(false)];
    let [Ok(polled), Ok(worked)] = rings else {
        println!("\nno io_uring");
        return;
    };
    println!("\nready");
    let mut protection = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        if words[0] == "protect" {
            protection = match protection.take() {
                None => Some(protect_for_users_only(memory)),
                Some(_) => None,
            };
            println!("done");
            continue;
        }
        // READ of a file or RECV of a socket, by the polling thread or by a worker, into a page.
        let (ring, flags, thread) = match words[1] {
            "poller" => (&polled, 0, "iou-sqp-"),
            _ => (&worked, IOSQE_ASYNC, "iou-wrk-"),
        };
        let page: usize = words[2].parse().unwrap();
        let (here, mut there) = UnixStream::pair().unwrap();
        let file = File::open(std::env::current_exe().unwrap()).unwrap();
        let (operation, fd) = match words[0] {
            "read" => (OP_READ, file.as_raw_fd()),
            _ => {
                there.write_all(&[7; PAGE]).unwrap();
                (OP_RECV, here.as_raw_fd())
            }
        };
        let result = ring.ask(Submission {
            operation,
            flags,
            priority: 0,
            file: fd,
            offset: 0,
            address: memory as u64 + (page * PAGE) as u64,
            length: PAGE as u32,
            more: [0; 9],
        });
        assert!(has_thread(thread), "there is no {thread}");
        println!("{result}");
    }
}

struct Target {
    process: Role,
    path: PathBuf,
    block: [RamBlock; 1],
}

impl Target {
    /// None where there is no io_uring.
    fn start(name: &str) -> Option<Self> {
        let name = format!("godwit-kernel-writers-{name}-{}", std::process::id());
        let path = PathBuf::from("/dev/shm").join(name);
        let length = PageCount(PAGES).bytes();
        File::create(&path).unwrap().set_len(length.0).unwrap();
        // Full of something, so that nothing is found because it is new.
        std::fs::write(&path, vec![1; length.0 as usize]).unwrap();
        let block = [RamBlock::open("mem", &path, 0, length, false).unwrap()];
        let process = Role::start("writing_process", PROCESS, &path);
        let mut target = Self { process, path, block };
        loop {
            match target.process.hear().as_str() {
                "ready" => return Some(target),
                "no io_uring" => {
                    skipped("this kernel has no io_uring, or forbids it");
                    return None;
                }
                _ => {}
            }
        }
    }

    fn ask(&mut self, command: &str) -> String {
        self.process.ask(command)
    }

    fn track(&self) -> Option<PagemapTracker> {
        match PagemapTracker::start(self.process.pid(), &self.block) {
            Ok(tracker) => Some(tracker),
            Err(error @ (TrackError::Kernel { .. } | TrackError::NotPermitted { .. })) => {
                skipped(error);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Past the test harness, which keeps what a passing test prints to itself.
fn skipped(why: impl std::fmt::Display) {
    let line = format!("\nSKIPPED a test of kernel threads that write: {why}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

fn harvest(tracker: &PagemapTracker) -> Vec<PageRun> {
    let mut runs = Vec::new();
    tracker.harvest(0, ALL, PageCount::ZERO, &mut |run| runs.push(run)).unwrap();
    runs
}

/// Each operation by each of the two threads, into a page of its own.
const WAYS: [(&str, u64); 4] =
    [("read poller", 100), ("recv poller", 200), ("read worker", 300), ("recv worker", 400)];

#[test]
fn what_kernel_threads_write_is_found() {
    let Some(mut target) = Target::start("found") else { return };
    let Some(tracker) = target.track() else { return };
    harvest(&tracker);
    assert_eq!(harvest(&tracker), []);
    for (way, page) in WAYS {
        // Twice: into a page that was never written, and into one that was harvested.
        for _ in 0..2 {
            assert_eq!(target.ask(&format!("{way} {page}")), PAGE_SIZE.to_string(), "{way}");
            assert_eq!(harvest(&tracker), [PageRun::new(page, 1)], "{way}");
            assert_eq!(harvest(&tracker), [], "{way}");
        }
    }
}

#[test]
fn kernel_threads_are_not_held_up_by_the_governor_and_are_found() {
    let Some(mut target) = Target::start("governed") else { return };
    let Some(tracker) = target.track() else { return };
    let main = target.process.pid();
    match tracker.prepare_governor(Way::Call, &[main]) {
        Ok(()) => {}
        Err(error @ TrackError::NoKernelFaults { .. }) => return skipped(error),
        Err(error) => panic!("{error}"),
    }
    // No vCPU may make any page dirty.
    tracker.govern(Some(0.0)).unwrap();
    harvest(&tracker);
    harvest(&tracker);
    assert_eq!((tracker.governed_segments(), harvest(&tracker)), (1, vec![]));
    for (way, page) in WAYS {
        let began = Instant::now();
        assert_eq!(target.ask(&format!("{way} {page}")), PAGE_SIZE.to_string(), "{way}");
        assert!(began.elapsed() < LIMIT / 4, "{way}: {:?}", began.elapsed());
        assert_eq!(harvest(&tracker), [PageRun::new(page, 1)], "{way}");
    }
    // Mutation: who is no vCPU waits for a token, too.
    assert_eq!(tracker.governor_measures().delayed, 0);
}

/// Why the governor's descriptor must be one that handles faults of the kernel, and refuses to work
/// without: a kernel thread would not wait, but fail.
#[test]
fn without_the_right_to_handle_them_kernel_threads_fail() {
    let Some(mut target) = Target::start("refused") else { return };
    assert_eq!(target.ask("protect"), "done");
    for (way, page) in WAYS {
        let refused = target.ask(&format!("{way} {page}"));
        assert_eq!(refused, (-libc::EFAULT).to_string(), "{way}");
    }
    assert_eq!(target.ask("protect"), "done");
    for (way, page) in WAYS {
        assert_eq!(target.ask(&format!("{way} {page}")), PAGE_SIZE.to_string(), "{way}");
    }
}
