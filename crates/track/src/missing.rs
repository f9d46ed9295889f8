//! Pages of a process's memory that are still to come while it runs: who accesses one waits until
//! it is placed (userfaultfd in missing mode, Documentation/admin-guide/mm/userfaultfd.rst).
//!
//! ```text
//!  thread of the process          kernel                          godwit
//!    access to a missing page ──▶  message, thread sleeps ──────▶ asks whoever has the page
//!    goes on ◀───────────────────  entry made, thread woken ◀──── UFFDIO_COPY, UFFDIO_ZEROPAGE
//! ```
//!
//! Invariants:
//! - *Nobody reads zeros where a page is missing, whatever becomes of godwit.* When the last
//!   descriptor of a userfaultfd is closed the kernel ends the registration, and the next access
//!   finds a page of zeros (fs/userfaultfd.c, `userfaultfd_release`). So the process itself keeps a
//!   descriptor: it closes when the process ends, and not before. When godwit is killed, those who
//!   wait go on waiting, and [`MissingPages::take_again`] serves them. Where the process is this
//!   one ([`MissingPages::start_own`]), it closes when [`MissingPages`] is told that the pages are
//!   there or that nobody will use them, and not when that is dropped.
//! - *A page is placed once, and never over what is there.* The kernel refuses to fill a page that
//!   has an entry. An entry that should not be there is an error, [`TrackError::Intruded`].
//! - *What was discarded meanwhile is zeros, and stays so.* The kernel tells of `MADV_DONTNEED`,
//!   and discards nothing before that was read. What was told of is not awaited any more; an access
//!   to it is answered with zeros.
//!
//! Memory is the process's own, or a file on a tmpfs (a memfd as well) that this process alone
//! maps.
//! Of a file a page is missing where the file has a hole. Three things are different then. It is
//! thrown away by a hole that godwit punches, and nobody is stopped for that. Whether a page is
//! there is asked of the file, since the kernel takes entries out of the page tables as it likes.
//! And who discards punches the hole first and tells afterwards (QEMU's `ram_block_discard_range`):
//! a page that was placed in between is thrown away once more.
//!
//! As long as pages are missing, nobody may go by another way to them: process_vm_readv(2) would
//! wait like everyone else, and read(2) of a file finds zeros.
//!
//! What was rejected: that the guardian holds the descriptor. It can be killed as well.

mod ranges;

use std::collections::VecDeque;
use std::io;
use std::ops::{ControlFlow, Range};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_bitmap::DirtyBitmap;
use godwit_memory::RamBlock;
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;

use ranges::{
    check_kinds, is_file, mappings_of, ranges_of, register, register_all, there, throw_away,
    unregister,
};

use crate::TrackError;
use crate::attach::{
    Approach, Attachment, Kind, LookedAt, attach_filling, attach_own, close_in, take_again,
};
use crate::mappings::{AddressSpace, BlockMapping};
use crate::uapi::{self, Message};

/// Placed without a look at what was discarded meanwhile, and while whoever asks for a page waits.
const PLACED_AT_ONCE: u64 = 16;
/// Fewer pages at once come with one that somebody waits for, and others may wait behind them.
const SHORT: u64 = 8;
/// How often messages are read when nothing is awaited any more.
const READ_EVERY: Duration = Duration::from_millis(1);
/// How long messages of this process's own threads are read when nothing is registered any more:
/// one that had begun to discard something before has told of it by then.
const LAST_MESSAGES: Duration = Duration::from_millis(10);
/// How long the kernel may refuse to place pages because mappings change.
const CHANGING: Duration = Duration::from_secs(5);

/// Pages of a process that are still to come.
///
/// ```no_run
/// use std::sync::Arc;
/// use std::time::Duration;
/// use godwit_bitmap::DirtyBitmap;
/// use godwit_memory::RamBlock;
/// use godwit_track::{Approach, MissingPages, TrackError};
///
/// /// Has process `pid`, which must stand still, wait for all of `block`; and serves it.
/// fn serve(pid: i32, block: RamBlock, page: &[u8; 4096]) -> Result<(), TrackError> {
///     let mut all = DirtyBitmap::new(block.pages());
///     all.set_all();
///     let blocks = Arc::new(vec![block]);
///     let missing = MissingPages::start(Approach::default(), pid, &blocks, vec![all])?;
///     // The process may run from here on.
///     while missing.left().0 > 0 {
///         let mut asked = Vec::new();
///         let time = Duration::from_millis(10);
///         missing.await_faults(time, &mut |block, at| asked.push((block, at)))?;
///         for (block, at) in asked {
///             missing.place(block, at, page)?;
///         }
///     }
///     missing.finish()
/// }
/// ```
#[derive(Debug)]
pub struct MissingPages {
    pid: i32,
    attachment: Attachment,
    kept: Kept,
    ram: Arc<Vec<RamBlock>>,
    blocks: Vec<Vec<BlockMapping>>,
    /// What is registered.
    ranges: Vec<Range<u64>>,
    /// Wakes who waits for faults when another thread has taken messages.
    bell: OwnedFd,
    state: Mutex<State>,
    /// How many threads want the state for what somebody waits for: those that place many pages let
    /// them go first. A mutex by itself is had again by whoever has just let go of it.
    urgent: AtomicUsize,
}

/// A process of which pages may come to be missing, as it was when it was looked at: what takes
/// time of [`MissingPages::start`] and can be done before. Nothing of the process is changed.
///
/// ```no_run
/// use std::sync::Arc;
/// use godwit_bitmap::DirtyBitmap;
/// use godwit_memory::RamBlock;
/// use godwit_track::{Approach, KnownProcess, MissingPages, TrackError};
///
/// /// Has `process` wait for all of `block`, which it has mapped since before it was looked at.
/// fn start(process: &KnownProcess, block: RamBlock) -> Result<MissingPages, TrackError> {
///     let mut all = DirtyBitmap::new(block.pages());
///     all.set_all();
///     MissingPages::start_in(process, Approach::default(), &Arc::new(vec![block]), vec![all])
/// }
/// ```
#[derive(Debug)]
pub struct KnownProcess {
    looked_at: LookedAt,
    space: AddressSpace,
}

impl KnownProcess {
    /// Looks at process `pid`.
    ///
    /// # Errors
    /// When it may not be traced, or is none that system calls can be made in.
    pub fn look_at(pid: i32) -> Result<Self, TrackError> {
        Ok(Self { looked_at: LookedAt::of(pid)?, space: AddressSpace::of(pid)? })
    }

    /// What it has mapped.
    #[must_use]
    pub fn space(&self) -> &AddressSpace {
        &self.space
    }

    fn pid(&self) -> i32 {
        self.looked_at.pid()
    }
}

/// The descriptor that the process keeps.
#[derive(Debug)]
enum Kept {
    /// Another process, under this number.
    There { number: RawFd, approach: Approach },
    /// This one, until it is let go of.
    Here { number: RawFd, descriptor: Mutex<Option<OwnedFd>> },
}

/// What is known of the pages.
#[derive(Debug)]
struct State {
    /// Still to come, by block.
    awaited: Vec<DirtyBitmap>,
    /// Of these, the ones somebody waits for that were reported.
    asked: Vec<DirtyBitmap>,
    /// To be reported.
    faults: VecDeque<(usize, PageIndex)>,
    measures: MissingMeasures,
}

/// What was done for missing pages so far.
///
/// ```
/// use godwit_track::MissingMeasures;
///
/// assert_eq!(MissingMeasures::default().faults, 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissingMeasures {
    /// Pages that somebody waited for.
    pub faults: u64,
    /// Pages that were placed.
    pub placed: u64,
    /// Pages that the process discarded before they had come.
    pub discarded: u64,
    /// Accesses to discarded pages, answered with zeros.
    pub zeros: u64,
}

impl MissingPages {
    /// The most runs of missing pages. Each is a system call of the process while it stands still,
    /// and takes up to two of its mappings, of which it may have 65,530.
    pub const MOST_RUNS: usize = 4096;

    /// Throws away what process `pid` has of the pages in `missing`, one bitmap a block, and lets
    /// whoever accesses one wait. The process must not use them before this has returned; its main
    /// thread is stopped for it.
    ///
    /// # Errors
    /// When there are more than [`Self::MOST_RUNS`] runs, the memory is of another kind than pages
    /// of 4 KiB of the process's own or of a file that nobody else maps, the process may not be
    /// traced or may not handle faults of
    /// the kernel, another userfaultfd is there, or somebody used the pages meanwhile. What was
    /// thrown away is lost then.
    pub fn start(
        approach: Approach,
        pid: i32,
        blocks: &Arc<Vec<RamBlock>>,
        missing: Vec<DirtyBitmap>,
    ) -> Result<Self, TrackError> {
        Self::start_in(&KnownProcess::look_at(pid)?, approach, blocks, missing)
    }

    /// The same in a process that was looked at before, which takes less time.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_in(
        process: &KnownProcess,
        approach: Approach,
        blocks: &Arc<Vec<RamBlock>>,
        missing: Vec<DirtyBitmap>,
    ) -> Result<Self, TrackError> {
        let pid = process.pid();
        let mappings = mappings_of(pid, &process.space, blocks, &missing)?;
        let ranges = checked_ranges(&mappings, &missing)?;
        let stands = AtomicBool::new(false);
        let to_discard = |uffd: BorrowedFd<'_>| {
            let held = register_all(uffd, pid, blocks, &ranges)?;
            stands.store(held.is_empty(), Ordering::Relaxed);
            Ok(held)
        };
        let (attachment, number) = attach_filling(&process.looked_at, approach, &to_discard)?;
        let kept = Kept::There { number, approach };
        let (kept, stands) = ((attachment, kept), stands.into_inner());
        Self::armed(pid, kept, blocks, (mappings, ranges), stands, missing)
    }

    /// The same for a VMM's own memory: `mappings` tell for each block where it is mapped. Nobody
    /// is traced or stopped. KVM's vCPUs wait as well as threads of this process.
    ///
    /// # Errors
    /// As [`Self::start`]; this process needs the right to handle faults of the kernel.
    ///
    /// # Safety
    /// The memory at `mappings` is that of `blocks`, there are no references into it, and both
    /// stays so until [`Self::finish`] or [`Self::give_up`] has returned, or else until this
    /// process ends: what is missing of it is thrown away, and pages are placed there.
    #[allow(unsafe_code, reason = "only whoever has mapped the memory can promise that")]
    pub unsafe fn start_own(
        mappings: Vec<Vec<BlockMapping>>,
        blocks: &Arc<Vec<RamBlock>>,
        missing: Vec<DirtyBitmap>,
    ) -> Result<Self, TrackError> {
        let pid = std::process::id().cast_signed();
        check_kinds(pid, blocks, &missing)?;
        let ranges = checked_ranges(&mappings, &missing)?;
        let attachment = attach_own(Kind::Filling)?;
        let held = register_all(attachment.userfaultfd(), pid, blocks, &ranges)?;
        let stands = held.is_empty();
        for range in held {
            // SAFETY: within the mappings, of which the caller has promised it.
            let discarded = unsafe { discard_own(&range) };
            discarded.map_err(|source| TrackError::Missing { pid, source })?;
        }
        let kept = attachment.userfaultfd().try_clone_to_owned();
        let kept = kept.map_err(|source| TrackError::Missing { pid, source })?;
        let kept = Kept::Here { number: kept.as_raw_fd(), descriptor: Mutex::new(Some(kept)) };
        Self::armed(pid, (attachment, kept), blocks, (mappings, ranges), stands, missing)
    }

    /// Whether this process can have its own pages awaited, as far as its rights and the kernel go.
    ///
    /// # Errors
    /// Why it cannot.
    ///
    /// ```
    /// if let Err(refused) = godwit_track::MissingPages::can_start_own() {
    ///     println!("no post-copy: {refused}");
    /// }
    /// ```
    pub fn can_start_own() -> Result<(), TrackError> {
        attach_own(Kind::Filling).map(drop)
    }

    /// Goes on for a godwit that was killed: `number` is what its [`Self::number`] was, and
    /// `missing` what it was to await. What it has placed is found by the page tables. Who waits
    /// asks anew.
    ///
    /// # Errors
    /// When the process has no such userfaultfd, or may not be traced.
    pub fn take_again(
        approach: Approach,
        pid: i32,
        number: RawFd,
        blocks: &Arc<Vec<RamBlock>>,
        mut missing: Vec<DirtyBitmap>,
    ) -> Result<Self, TrackError> {
        let mappings = mappings_of(pid, &AddressSpace::of(pid)?, blocks, &missing)?;
        let ranges = ranges_of(&mappings, &missing).into_iter().flatten().collect();
        let attachment = take_again(pid, number)?;
        for (block, awaited) in missing.iter_mut().enumerate() {
            let mut held = Vec::new();
            let wanted = (block, awaited as &DirtyBitmap);
            there(pid, &blocks[block], &mappings[block], wanted, &mut |run| held.push(run))?;
            for run in held {
                awaited.clear(run);
            }
        }
        let kept = (attachment, Kept::There { number, approach });
        let taken = Self::new(pid, kept, blocks, (mappings, ranges), missing)?;
        // Messages that the one before has read are told to nobody again, unless who waits is
        // woken and comes back.
        for range in &taken.ranges {
            let (start, length) = (range.start, range.end - range.start);
            uapi::uffd_wake(taken.uffd(), start, length).map_err(|error| taken.failed(error))?;
        }
        Ok(taken)
    }

    /// Memory of which what is missing was thrown away, but for that of files; with whether all of
    /// `ranges` is registered still, since there was nothing to throw away.
    fn armed(
        pid: i32,
        kept: (Attachment, Kept),
        blocks: &Arc<Vec<RamBlock>>,
        (mappings, ranges): (Vec<Vec<BlockMapping>>, Vec<Vec<Range<u64>>>),
        stands: bool,
        awaited: Vec<DirtyBitmap>,
    ) -> Result<Self, TrackError> {
        let all = ranges.iter().flatten().cloned().collect();
        let missing = Self::new(pid, kept, blocks, (mappings, all), awaited)?;
        if let Err(error) = missing.arm(&ranges, stands) {
            // Nobody runs on it: what was registered is taken back, and nothing stays.
            let _ = missing.end();
            return Err(error);
        }
        Ok(missing)
    }

    fn new(
        pid: i32,
        (attachment, kept): (Attachment, Kept),
        ram: &Arc<Vec<RamBlock>>,
        (blocks, ranges): (Vec<Vec<BlockMapping>>, Vec<Range<u64>>),
        awaited: Vec<DirtyBitmap>,
    ) -> Result<Self, TrackError> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            TrackError::Attach { pid, step: "eventfd(2)", source: errno.into() }
        })?;
        let asked = awaited.iter().map(|pages| DirtyBitmap::new(pages.len())).collect();
        let (faults, measures) = (VecDeque::new(), MissingMeasures::default());
        let state = Mutex::new(State { awaited, asked, faults, measures });
        let (ram, urgent) = (Arc::clone(ram), AtomicUsize::new(0));
        Ok(Self { pid, attachment, kept, ram, blocks, ranges, bell, state, urgent })
    }

    /// Lets accesses wait, and makes sure that none came before. What `stands` registered was seen
    /// to hold nothing since, but for files.
    fn arm(&self, ranges: &[Vec<Range<u64>>], stands: bool) -> Result<(), TrackError> {
        let state = self.state();
        for ((block, awaited), ranges) in self.ram.iter().zip(&state.awaited).zip(ranges) {
            if !stands {
                register(self.uffd(), self.pid, block, ranges)?;
            }
            if is_file(block) {
                throw_away(block, awaited)?;
            }
        }
        for (block, awaited) in state.awaited.iter().enumerate() {
            let (ram, mappings) = (&self.ram[block], &self.blocks[block]);
            if stands && !is_file(ram) {
                continue;
            }
            let mut intruder = None;
            there(self.pid, ram, mappings, (block, awaited), &mut |run| {
                let found = awaited.try_for_each_run_in(run, ControlFlow::Break).break_value();
                intruder = intruder.or(found.map(|run| run.start));
            })?;
            if let Some(page) = intruder {
                return Err(TrackError::Intruded { pid: self.pid, block, page: page.0 });
            }
        }
        Ok(())
    }

    /// The number of the descriptor that the process keeps, by which another godwit goes on; of no
    /// use where the process is this one ([`Self::start_own`]).
    #[must_use]
    pub fn number(&self) -> RawFd {
        let (Kept::There { number, .. } | Kept::Here { number, .. }) = &self.kept;
        *number
    }

    /// How long the process's main thread was stopped.
    #[must_use]
    pub fn stopped(&self) -> Duration {
        self.attachment.stopped()
    }

    /// How many pages are still to come.
    #[must_use]
    pub fn left(&self) -> PageCount {
        self.state().awaited.iter().map(DirtyBitmap::count).sum()
    }

    /// The first run of pages of `block` from `from` on that are still to come.
    #[must_use]
    pub fn next_run(&self, block: usize, from: PageIndex) -> Option<PageRun> {
        self.state().awaited.get(block)?.next_run(from)
    }

    /// What was done so far.
    #[must_use]
    pub fn measures(&self) -> MissingMeasures {
        self.state().measures
    }

    /// Waits for up to `time`, and reports each page that somebody has begun to wait for: block and
    /// page, once each.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn await_faults(
        &self,
        time: Duration,
        found: &mut dyn FnMut(usize, PageIndex),
    ) -> Result<(), TrackError> {
        if !self.take_faults(found)? {
            self.sleep(time);
            self.take_faults(found)?;
        }
        Ok(())
    }

    /// Reports what is there already; whether that was anything.
    fn take_faults(&self, found: &mut dyn FnMut(usize, PageIndex)) -> Result<bool, TrackError> {
        let mut state = self.urgent_state();
        self.read(&mut state)?;
        let faults = std::mem::take(&mut state.faults);
        // Whoever is told may want to place pages at once.
        drop(state);
        faults.iter().for_each(|&(block, page)| found(block, page));
        Ok(!faults.is_empty())
    }

    /// Places `bytes`, whole pages, at page `start` of `block` on: those of them that are still to
    /// come. Returns how many that were.
    ///
    /// # Errors
    /// When the process has ended, or something is where nothing should be.
    ///
    /// # Panics
    /// When `bytes` are not whole pages.
    pub fn place(
        &self,
        block: usize,
        start: PageIndex,
        bytes: &[u8],
    ) -> Result<PageCount, TrackError> {
        assert!(bytes.len().is_multiple_of(PAGE_SIZE as usize), "whole pages");
        let pages = PageRun::new(start.0, bytes.len() as u64 / PAGE_SIZE);
        self.fill(block, pages, &|address, run| {
            let at = ((run.start.0 - start.0) * PAGE_SIZE) as usize;
            let bytes = &bytes[at..at + run.count.bytes().0 as usize];
            uapi::uffd_copy(self.uffd(), address, bytes)
        })
    }

    /// The same with zeros.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub fn place_zeros(&self, block: usize, pages: PageRun) -> Result<PageCount, TrackError> {
        self.fill(block, pages, &|address, run| {
            uapi::uffd_zero(self.uffd(), address, run.count.bytes().0)
        })
    }

    /// Ends it when every page has come.
    ///
    /// # Errors
    /// When some have not: [`TrackError::StillMissing`]; those who wait for them go on waiting.
    /// Another error: all have come, and the process keeps a descriptor that does nothing.
    pub fn finish(&self) -> Result<(), TrackError> {
        let left = self.left();
        if left > PageCount::ZERO {
            return Err(TrackError::StillMissing { pid: self.pid, pages: left.0 });
        }
        self.end()
    }

    /// Ends it though pages have not come, and nobody will ever use the memory as it is: whoever
    /// accesses a page that is missing finds zeros from here on.
    ///
    /// # Errors
    /// The process keeps a descriptor that does nothing.
    pub fn give_up(&self) -> Result<(), TrackError> {
        self.end()
    }

    /// Ends the registration and has the process close its descriptor.
    fn end(&self) -> Result<(), TrackError> {
        unregister(self.uffd(), &self.ranges);
        // Who has begun to discard something goes on waiting until that was read, and may be the
        // thread that is to close.
        let closed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let read = || {
                while !closed.load(Ordering::Relaxed) {
                    let _ = uapi::uffd_messages(self.uffd(), |_| {});
                    std::thread::sleep(READ_EVERY);
                }
            };
            let reader =
                std::thread::Builder::new().name("missing".to_owned()).spawn_scoped(scope, read);
            let ended = self.close_kept();
            closed.store(true, Ordering::Relaxed);
            reader.map_err(|error| self.failed(error))?;
            ended
        })
    }

    fn close_kept(&self) -> Result<(), TrackError> {
        match &self.kept {
            Kept::There { number, approach } => close_in(self.pid, *number, *approach),
            Kept::Here { descriptor, .. } => {
                std::thread::sleep(LAST_MESSAGES);
                drop(descriptor.lock().unwrap_or_else(PoisonError::into_inner).take());
                Ok(())
            }
        }
    }

    /// Has `place` fill those of `pages` that are still to come.
    fn fill(
        &self,
        block: usize,
        pages: PageRun,
        place: &dyn Fn(u64, PageRun) -> (usize, io::Result<()>),
    ) -> Result<PageCount, TrackError> {
        let mut filled = PageCount::ZERO;
        let mut at = pages.start;
        let mut patience: Option<Instant> = None;
        while at < pages.end() {
            // Looked at and filled under one lock: what is told of as discarded in between would
            // be filled with what it was before.
            let mut state =
                if pages.count.0 < SHORT { self.urgent_state() } else { self.state_in_turn() };
            let end = pages.end().0.min(at.0 + PLACED_AT_ONCE);
            let part = PageRun::new(at.0, end - at.0);
            let wanted = state.awaited.get(block).and_then(|awaited| {
                awaited.try_for_each_run_in(part, ControlFlow::Break).break_value()
            });
            let Some((address, run)) = wanted.and_then(|run| self.address(block, run)) else {
                at = part.end();
                continue;
            };
            let (bytes, outcome) = place(address, run);
            let placed = PageRun::new(run.start.0, bytes as u64 / PAGE_SIZE);
            state.awaited[block].clear(placed);
            state.asked[block].clear(placed);
            state.measures.placed += placed.count.0;
            filled += placed.count;
            at = placed.end();
            match outcome {
                Ok(()) => {}
                // The rest says why by itself.
                Err(_) if placed.count > PageCount::ZERO => {}
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                    return Err(TrackError::Intruded { pid: self.pid, block, page: at.0 });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let since = *patience.get_or_insert_with(Instant::now);
                    if since.elapsed() > CHANGING {
                        return Err(self.failed(error));
                    }
                    // Mappings change, or something is discarded as soon as it was read.
                    self.read(&mut state)?;
                    if !state.faults.is_empty() {
                        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
                    }
                    drop(state);
                    std::thread::yield_now();
                    continue;
                }
                Err(error) => return Err(self.failed(error)),
            }
            patience = None;
        }
        Ok(filled)
    }

    /// Takes all messages.
    fn read(&self, state: &mut State) -> Result<(), TrackError> {
        loop {
            let (mut zeros, mut gone) = (Vec::new(), Vec::new());
            let more = uapi::uffd_messages(self.uffd(), |message| match message {
                Message::Fault(fault) => zeros.extend(self.fault(state, fault.address)),
                Message::Remove { start, end } => gone.extend(self.discarded(state, start..end)),
            });
            let more = more.map_err(|error| self.failed(error))?;
            for (block, run) in gone {
                self.ram[block].give_back(run)?;
            }
            for address in zeros {
                state.measures.zeros += 1;
                self.answer_with_zeros(address)?;
            }
            if !more {
                return Ok(());
            }
        }
    }

    /// Somebody waits at `address`. Returns the page's address where nothing is to come.
    fn fault(&self, state: &mut State, address: u64) -> Option<u64> {
        let address = address & !(PAGE_SIZE - 1);
        let Some((block, page)) = self.page_at(address) else { return Some(address) };
        if !state.awaited[block].is_set(page) {
            return Some(address);
        }
        if state.asked[block].set(PageRun { start: page, count: PageCount(1) }).0 == 1 {
            state.measures.faults += 1;
            state.faults.push_back((block, page));
        }
        None
    }

    /// What is at these addresses is being thrown away. Returns what of files that is.
    fn discarded(&self, state: &mut State, range: Range<u64>) -> Vec<(usize, PageRun)> {
        let mut of_files = Vec::new();
        for (block, mappings) in self.blocks.iter().enumerate() {
            for mapping in mappings {
                let last = mapping.address.0 + mapping.pages.count.bytes().0;
                let (from, to) = (range.start.max(mapping.address.0), range.end.min(last));
                if from < to {
                    let first = mapping.pages.start.0 + (from - mapping.address.0) / PAGE_SIZE;
                    let run = PageRun::new(first, (to - from).div_ceil(PAGE_SIZE));
                    if is_file(&self.ram[block]) {
                        of_files.push((block, run));
                    }
                    state.measures.discarded += state.awaited[block].clear(run).0;
                    // Who waits for one already was told of, and comes back for zeros.
                    if state.asked[block].clear(run) > PageCount::ZERO {
                        let _ = uapi::uffd_wake(self.uffd(), from, to - from);
                    }
                }
            }
        }
        of_files
    }

    /// Nothing is to come for the page at `address`: it was placed since somebody began to wait, or
    /// thrown away.
    fn answer_with_zeros(&self, address: u64) -> Result<(), TrackError> {
        match uapi::uffd_zero(self.uffd(), address, PAGE_SIZE).1 {
            Ok(()) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(self.failed(error)),
            // It is there, or the mappings change: who is woken in vain comes back.
            Err(_) => {
                uapi::uffd_wake(self.uffd(), address, PAGE_SIZE).map_err(|error| self.failed(error))
            }
        }
    }

    /// Where the beginning of `run` is mapped, and how much of it there.
    fn address(&self, block: usize, run: PageRun) -> Option<(u64, PageRun)> {
        self.blocks.get(block)?.iter().find_map(|mapping| {
            let part = mapping.pages.intersect(run).filter(|part| part.start == run.start)?;
            Some((mapping.address.0 + (part.start.0 - mapping.pages.start.0) * PAGE_SIZE, part))
        })
    }

    fn page_at(&self, address: u64) -> Option<(usize, PageIndex)> {
        self.blocks.iter().enumerate().find_map(|(block, mappings)| {
            mappings.iter().find_map(|mapping| {
                let offset = address.checked_sub(mapping.address.0)?;
                let page = mapping.pages.start.0 + offset / PAGE_SIZE;
                (page < mapping.pages.end().0).then_some((block, PageIndex(page)))
            })
        })
    }

    fn sleep(&self, time: Duration) {
        let timeout =
            Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() };
        let uffd = self.uffd();
        let mut wanted =
            [PollFd::new(&uffd, PollFlags::IN), PollFd::new(&self.bell, PollFlags::IN)];
        let _ = poll(&mut wanted, Some(&timeout));
        if wanted[1].revents().contains(PollFlags::IN) {
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        }
    }

    fn uffd(&self) -> BorrowedFd<'_> {
        self.attachment.userfaultfd()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, for what somebody waits for.
    fn urgent_state(&self) -> MutexGuard<'_, State> {
        self.urgent.fetch_add(1, Ordering::SeqCst);
        let state = self.state();
        self.urgent.fetch_sub(1, Ordering::SeqCst);
        state
    }

    /// The state, for what nobody waits for.
    fn state_in_turn(&self) -> MutexGuard<'_, State> {
        while self.urgent.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        self.state()
    }

    fn failed(&self, source: io::Error) -> TrackError {
        TrackError::Missing { pid: self.pid, source }
    }
}

impl Drop for MissingPages {
    fn drop(&mut self) {
        if let Kept::Here { descriptor, .. } = &self.kept {
            let kept = descriptor.lock().unwrap_or_else(PoisonError::into_inner).take();
            // Pages are missing, and whoever waits for one must not find zeros: it stays open for
            // as long as this process lives.
            std::mem::forget(kept);
        }
    }
}

/// The addresses of the missing pages, by block, if they are not too many.
fn checked_ranges(
    mappings: &[Vec<BlockMapping>],
    missing: &[DirtyBitmap],
) -> Result<Vec<Vec<Range<u64>>>, TrackError> {
    let ranges = ranges_of(mappings, missing);
    let (runs, most) = (ranges.iter().flatten().count(), MissingPages::MOST_RUNS);
    if runs > most { Err(TrackError::TooManyRuns { runs, most }) } else { Ok(ranges) }
}

/// Throws away what this process has of private memory there.
///
/// # Safety
/// Nobody holds references into it.
#[allow(unsafe_code, reason = "madvise(2) of memory whose addresses were told")]
unsafe fn discard_own(range: &Range<u64>) -> io::Result<()> {
    let length = (range.end - range.start) as usize;
    let start = std::ptr::with_exposed_provenance_mut(range.start as usize);
    // SAFETY: as promised; the kernel refuses what is not mapped.
    let outcome = unsafe { rustix::mm::madvise(start, length, rustix::mm::Advice::LinuxDontNeed) };
    Ok(outcome?)
}
