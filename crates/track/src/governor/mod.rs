//! The write governor: write faults on protected pages wait for an answer, and answers come at
//! a rate that is set.
//!
//! ```text
//!  vCPU writes a clean page      kernel                        godwit
//!    fault ───────────────────▶  message, vCPU sleeps ───────▶ handler: whose? a vCPU's: into the queue
//!                                                                         another's: answered at once
//!    goes on ◀──────────────────  protection lifted, woken ◀── a token for it: UFFDIO_WRITEPROTECT, mode 0
//! ```
//!
//! Reads, computation and writes to pages that are dirty already never come here. So the guest's
//! dirty rate is a number that is set, and what it loses is the time in which it waits to make
//! clean pages dirty.
//!
//! Invariants:
//! - Only threads that write for the guest ever wait, and none longer than [`queue::LONGEST_WAIT`]
//!   for a token.
//! - A handler that makes no progress for [`watchdog::PATIENCE`] is stood in for, without a limit.
//! - When the descriptor is closed, also since this process was killed, the kernel lifts all
//!   protection and wakes all who wait (fs/userfaultfd.c, `userfaultfd_release`).
//!
//! Which pages are protected, and that no write is lost, is the tracker's business (`pagemap`).

mod handler;
mod queue;
mod watchdog;
mod writers;

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_memory::SEGMENT_PAGES;
use godwit_units::PAGE_SIZE;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;

use crate::TrackError;
use crate::attach::Attachment;
use crate::mappings::BlockMapping;

/// What a governor did so far.
///
/// ```
/// use godwit_track::{PagemapTracker, TrackError};
///
/// fn held_back(tracker: &PagemapTracker) -> Result<(), TrackError> {
///     tracker.govern(Some(10_000.0))?;
///     let measures = tracker.governor_measures();
///     println!("{} of {} waited", measures.delayed, measures.dirtied);
///     Ok(())
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GovernorMeasures {
    /// Clean pages that it let the guest make dirty.
    pub dirtied: u64,
    /// Of the write faults they came as, those that had to wait for the rate.
    pub delayed: u64,
    /// How long the guest's threads waited for the rate, summed up.
    pub waited: Duration,
    /// The longest of these waits.
    pub longest_wait: Duration,
    /// Faults of threads that do not run the guest: answered at once.
    pub others: u64,
    /// How often the watchdog had to stand in for the handler.
    pub takeovers: u64,
}

/// Counts that the threads add to.
#[derive(Debug, Default)]
struct Counts {
    dirtied: AtomicU64,
    delayed: AtomicU64,
    waited: AtomicU64,
    longest: AtomicU64,
    others: AtomicU64,
    takeovers: AtomicU64,
}

/// A stretch of the other process's memory that belongs to RAM, and the page of the block that it
/// begins with.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    start: u64,
    end: u64,
    first: u64,
}

/// What the threads share.
#[derive(Debug)]
struct Shared {
    pid: i32,
    attachment: Attachment,
    /// Wakes the handler.
    bell: OwnedFd,
    began: Instant,
    /// Pages a second, as the bits of an f64.
    rate: AtomicU64,
    /// Counts up with each change of `vcpus`.
    generation: AtomicU64,
    vcpus: Mutex<Vec<i32>>,
    /// By address.
    memory: Vec<Stretch>,
    /// When the handler was last seen at work, in milliseconds since the beginning.
    beat: AtomicU64,
    /// The handler is to do nothing for so many milliseconds: for tests.
    #[cfg(feature = "test-hooks")]
    stall: AtomicU64,
    over: AtomicBool,
    counts: Counts,
}

impl Shared {
    fn uffd(&self) -> BorrowedFd<'_> {
        self.attachment.userfaultfd()
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Pages from `address` to the end of its segment, which is protected as one.
    fn room(&self, address: u64) -> u64 {
        let at = self.memory.partition_point(|stretch| stretch.end <= address);
        let Some(stretch) = self.memory.get(at).filter(|stretch| stretch.start <= address) else {
            return 1;
        };
        let page = stretch.first + (address - stretch.start) / PAGE_SIZE;
        (SEGMENT_PAGES - page % SEGMENT_PAGES).min((stretch.end - address) / PAGE_SIZE)
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// The governor of one process: its threads. Dropping it ends them and closes the descriptor.
#[derive(Debug)]
pub(crate) struct Governor {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Governor {
    /// Starts answering faults on `attachment` of process `pid`, without a limit. `vcpus` are the
    /// threads that run the guest.
    pub(crate) fn start(
        pid: i32,
        attachment: Attachment,
        blocks: &[Vec<BlockMapping>],
        vcpus: &[i32],
    ) -> Result<Self, TrackError> {
        let failed = |step| move |source: std::io::Error| TrackError::Governor { step, source };
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed("eventfd(2)")(errno.into()))?;
        let mut memory: Vec<Stretch> = blocks
            .iter()
            .flatten()
            .map(|mapping| Stretch {
                start: mapping.address.0,
                end: mapping.address.0 + mapping.pages.count.bytes().0,
                first: mapping.pages.start.0,
            })
            .collect();
        memory.sort_unstable_by_key(|stretch| stretch.start);
        let shared = Arc::new(Shared {
            pid,
            attachment,
            bell,
            began: Instant::now(),
            rate: AtomicU64::new(f64::INFINITY.to_bits()),
            generation: AtomicU64::new(0),
            vcpus: Mutex::new(vcpus.to_vec()),
            memory,
            beat: AtomicU64::new(0),
            #[cfg(feature = "test-hooks")]
            stall: AtomicU64::new(0),
            over: AtomicBool::new(false),
            counts: Counts::default(),
        });
        let mut governor = Self { shared, threads: Vec::new() };
        governor.spawn("governor", handler::run).map_err(failed("starting a thread"))?;
        governor.spawn("governor-watch", watchdog::run).map_err(failed("starting a thread"))?;
        Ok(governor)
    }

    fn spawn(&mut self, name: &str, run: fn(&Shared)) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread =
            std::thread::Builder::new().name(name.to_owned()).spawn(move || run(&shared))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Allows `rate` clean pages to become dirty each second from now on; infinite: no limit.
    pub(crate) fn set_rate(&self, rate: f64) {
        self.shared.rate.store(rate.max(0.0).to_bits(), Ordering::Relaxed);
        self.shared.ring();
    }

    /// `vcpus` run the guest from now on.
    pub(crate) fn set_vcpus(&self, vcpus: &[i32]) {
        let mut known = self.shared.vcpus.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != vcpus {
            known.clear();
            known.extend_from_slice(vcpus);
            drop(known);
            self.shared.generation.fetch_add(1, Ordering::Release);
            self.shared.ring();
        }
    }

    pub(crate) fn userfaultfd(&self) -> BorrowedFd<'_> {
        self.shared.uffd()
    }

    /// How long a thread of the process was stopped for it.
    pub(crate) fn stopped(&self) -> Duration {
        self.shared.attachment.stopped()
    }

    /// Has the handler do nothing for a while: a fault made up for tests of the watchdog.
    #[cfg(feature = "test-hooks")]
    pub(crate) fn stall(&self, time: Duration) {
        self.shared.stall.store(time.as_millis() as u64, Ordering::Relaxed);
        self.shared.ring();
    }

    pub(crate) fn measures(&self) -> GovernorMeasures {
        let counts = &self.shared.counts;
        let take = |count: &AtomicU64| count.load(Ordering::Relaxed);
        GovernorMeasures {
            dirtied: take(&counts.dirtied),
            delayed: take(&counts.delayed),
            waited: Duration::from_nanos(take(&counts.waited)),
            longest_wait: Duration::from_nanos(take(&counts.longest)),
            others: take(&counts.others),
            takeovers: take(&counts.takeovers),
        }
    }
}

impl Drop for Governor {
    fn drop(&mut self) {
        // Until the threads have ended all faults are answered at once.
        self.set_rate(f64::INFINITY);
        self.shared.over.store(true, Ordering::Relaxed);
        self.shared.ring();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
