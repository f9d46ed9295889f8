//! What was placed is read back while the guest still runs at the source.
//!
//! A thread reads each page behind its last write and keeps its fingerprint, so that the digests of
//! all memory, and of the disks that move along, are at hand when the guest is stopped, but for
//! what the last round brought. What is placed for the first time, many pages at once, is read back
//! by the channel that wrote it, while it is in the processor's caches: that costs half as much
//! (docs/benchmarks.md).
//!
//! Invariant: a page is marked behind its write, and its mark is taken before it is read. So a
//! fingerprint that stands when no mark is left is of what the page holds. A write to a disk may be
//! under way for a while: it is marked behind the flush that waits for it.
//!
//! Invariant: a page is claimed once, by the channel that places it first or by the thread that
//! reads what nobody has placed. What a channel has read of pages that it claimed counts only where
//! nothing is known yet, so that it cannot hide what came later, which was marked.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_bitmap::AtomicDirtyBitmap;
use godwit_disk::{Content, Disk, DiskReader, Extent};
use godwit_fingerprints::{Fingerprint, Key, PageFingerprints, SegmentFingerprints};
use godwit_memory::{MemoryError, RamBlock, SEGMENT_PAGES, segments};
use godwit_units::{PAGE_SIZE, PageBuffer, PageCount, PageIndex, PageRun};

use crate::disk_prints::{READ_PAGES, parts};
use crate::{EngineError, limits, threads};

/// Pages read at once, 1 MiB: each read of another process costs the kernel a look at it, and few
/// pages are looked up at once (docs/benchmarks.md).
const READ: u64 = 256;
/// Pages of a disk in a row that are read without asking first what of them is data.
const FEW: u64 = 16;
/// Pages of a disk of which it is asked at once what is data: 1 GiB.
const ASKED: u64 = 64 * SEGMENT_PAGES;
/// How often it is looked whether anything was placed.
const LOOK: Duration = Duration::from_millis(20);

/// Pages in a row that the channel reads back itself, at the least: for fewer the look at another
/// process costs more than it spares.
const MANY: u64 = 16;

/// Which pages were placed since they were read back, by RAM block and, behind these, by disk.
#[derive(Debug)]
pub(super) struct Placed {
    marks: Vec<AtomicDirtyBitmap>,
    /// By RAM block: pages that were placed once, or looked at.
    claimed: Vec<AtomicDirtyBitmap>,
    /// What channels have read back, and the key that they do so under, once there is one.
    first: Mutex<First>,
}

#[derive(Debug, Default)]
struct First {
    key: Option<Key>,
    reads: Vec<FirstRead>,
}

/// What a channel has read back of pages that it was the first to place.
#[derive(Debug)]
struct FirstRead {
    block: usize,
    run: PageRun,
    key: Key,
    prints: Vec<Fingerprint>,
}

impl Placed {
    /// None of `ram` and of `disks`.
    pub(super) fn new(ram: &[RamBlock], disks: &[Disk]) -> Self {
        let bitmaps = |pages: &mut dyn Iterator<Item = PageCount>| {
            pages.map(AtomicDirtyBitmap::new).collect::<Vec<_>>()
        };
        let memory = || ram.iter().map(RamBlock::pages);
        Self {
            marks: bitmaps(&mut memory().chain(disks.iter().map(Disk::pages))),
            claimed: bitmaps(&mut memory()),
            first: Mutex::default(),
        }
    }

    /// `run` of RAM block or disk `number` was placed.
    pub(super) fn mark(&self, number: usize, run: PageRun) {
        if let Some(claimed) = self.claimed.get(number) {
            claimed.set(run);
        }
        self.marks[number].set(run);
    }

    /// `run` of RAM block `number`, which is `block`, was placed; where none of it was before, it
    /// is read back here and now, through `buffer`.
    pub(super) fn placed(
        &self,
        (number, block): (usize, &RamBlock),
        run: PageRun,
        buffer: &mut PageBuffer,
    ) -> Result<(), MemoryError> {
        let key = if run.count.0 < MANY { None } else { self.first().key };
        let Some(key) = key.filter(|_| self.claimed[number].set(run) == run.count) else {
            self.mark(number, run);
            return Ok(());
        };
        buffer.fit(PageCount(READ).bytes());
        let mut prints = Vec::with_capacity(run.count.0 as usize);
        for part in parts(run, READ) {
            let bytes = &mut buffer[..part.count.bytes().0 as usize];
            block.read(part.start, bytes)?;
            prints.extend(bytes.chunks_exact(PAGE_SIZE as usize).map(|page| key.page(page)));
        }
        self.first().reads.push(FirstRead { block: number, run, key, prints });
        Ok(())
    }

    /// Nothing is known of what was placed: all of it is marked.
    pub(super) fn mark_all(&self) {
        for (number, pages) in self.marks.iter().enumerate() {
            self.mark(number, PageRun::new(0, pages.len().0));
        }
    }

    fn first(&self) -> MutexGuard<'_, First> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What was read back of each segment of each RAM block and disk, in our order.
pub(super) type Tables = Vec<Vec<SegmentFingerprints>>;

/// The thread that reads back. It ends with the handle.
#[derive(Debug)]
pub(super) struct Prover {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Tables>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// How often it was asked for what was read back, for how much the last time, and for which of
    /// these times it is there.
    asked: u64,
    wanted: Wanted,
    answered: u64,
    digests: Vec<Vec<u128>>,
    failed: Option<EngineError>,
    ended: bool,
}

/// How much is to be read back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Wanted {
    /// What was placed.
    #[default]
    Placed,
    /// Also what nobody has placed in memory. Digests of what does not change any more are made.
    Memory,
    /// Everything, with the digests.
    All,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Prover {
    /// Begins to read back what is marked as `placed` in `ram`, and in the disks that these
    /// `readers` read.
    pub(super) fn start(
        ram: &Arc<Vec<RamBlock>>,
        readers: Vec<Box<dyn DiskReader>>,
        placed: &Arc<Placed>,
        key: Key,
    ) -> Result<Self, EngineError> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let fingerprints = PageFingerprints::new();
        placed.first().key = Some(key);
        let tables = placed.marks[..ram.len() + readers.len()].iter().map(|pages| {
            segments(&[pages.len()]).map(|segment| fingerprints.segment(segment.run)).collect()
        });
        let tables: Tables = tables.collect();
        let reader = Reader {
            shared: Arc::clone(&shared),
            ram: Arc::clone(ram),
            pages: PageBuffer::new(pages_read(&readers)),
            disks: readers,
            placed: Arc::clone(placed),
            key,
            complete: tables.iter().map(|tables| vec![false; tables.len()]).collect(),
            tables,
            few: (0, Vec::new()),
        };
        let thread = threads::start("proof", move || reader.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The digest of each segment of each RAM block and disk, in our order, as they are now;
    /// nothing may be placed meanwhile for that. Waits until all that was placed is read back, or
    /// it `ends` otherwise.
    pub(super) fn digests(
        &self,
        ends: impl Fn() -> Option<EngineError>,
    ) -> Result<Vec<Vec<u128>>, EngineError> {
        let found = self.ask(Wanted::All, None, ends)?;
        found.ok_or(EngineError::Panicked("proof"))
    }

    /// Waits, for no longer than `limit`, until all that was placed so far is read back; whether it
    /// is.
    pub(super) fn catch_up(
        &self,
        limit: Duration,
        ends: impl Fn() -> Option<EngineError>,
    ) -> Result<bool, EngineError> {
        self.ask(Wanted::Placed, Some(limit), ends).map(|found| found.is_some())
    }

    /// The same, and leaves as little as possible to [`Self::digests`]: also what nobody has placed
    /// in memory is read. On disks it is not, most of which may still come.
    pub(super) fn get_ready(
        &self,
        limit: Duration,
        ends: impl Fn() -> Option<EngineError>,
    ) -> Result<bool, EngineError> {
        self.ask(Wanted::Memory, Some(limit), ends).map(|found| found.is_some())
    }

    /// Why it can read no more, if nobody was told yet.
    pub(super) fn failure(&self) -> Option<EngineError> {
        self.shared.lock().failed.take()
    }

    /// Has so much read back; its digests, if there are any. `None`: it is not done within `limit`.
    fn ask(
        &self,
        wanted: Wanted,
        limit: Option<Duration>,
        ends: impl Fn() -> Option<EngineError>,
    ) -> Result<Option<Vec<Vec<u128>>>, EngineError> {
        let until = limit.map(|limit| Instant::now() + limit);
        let mut state = self.shared.lock();
        state.asked += 1;
        state.wanted = wanted;
        let asked = state.asked;
        self.shared.changed.notify_all();
        loop {
            if let Some(error) = state.failed.take() {
                return Err(error);
            }
            if state.answered >= asked {
                return Ok(Some(std::mem::take(&mut state.digests)));
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                return Err(EngineError::Panicked("proof"));
            }
            if let Some(error) = ends() {
                return Err(error);
            }
            let waited = self.shared.changed.wait_timeout(state, limits::TICK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends it; what it has read.
    pub(super) fn finish(mut self) -> Result<Tables, EngineError> {
        self.end();
        let thread = self.thread.take().ok_or(EngineError::Panicked("proof"))?;
        thread.join().map_err(|_| EngineError::Panicked("proof"))
    }

    fn end(&self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for Prover {
    fn drop(&mut self) {
        self.end();
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Reader {
    shared: Arc<Shared>,
    ram: Arc<Vec<RamBlock>>,
    disks: Vec<Box<dyn DiskReader>>,
    placed: Arc<Placed>,
    key: Key,
    tables: Tables,
    /// Segments of which every page was read once.
    complete: Vec<Vec<bool>>,
    pages: PageBuffer,
    /// Short stretches of a disk that are read together.
    few: (usize, Vec<PageRun>),
}

/// Pages that are read at once at the most.
fn pages_read(disks: &[Box<dyn DiskReader>]) -> PageCount {
    PageCount(if disks.is_empty() { READ } else { READ.max(READ_PAGES) })
}

/// Why a pass ended before all was read.
enum Stopped {
    Ended,
    Failed(EngineError),
}

impl From<MemoryError> for Stopped {
    fn from(error: MemoryError) -> Self {
        Self::Failed(error.into())
    }
}

impl Reader {
    fn run(mut self) -> Tables {
        loop {
            let asked = {
                let state = self.shared.lock();
                if state.ended {
                    return self.tables;
                }
                (state.asked > state.answered).then_some((state.asked, state.wanted))
            };
            let passed = self.pass().and_then(|found| match asked {
                None | Some((_, Wanted::Placed)) => Ok((found, Vec::new())),
                Some((_, wanted)) => {
                    self.first_reads(wanted)?;
                    Ok((found, self.digests()))
                }
            });
            let (found, digests) = match passed {
                Ok(passed) => passed,
                Err(Stopped::Ended) => return self.tables,
                Err(Stopped::Failed(error)) => {
                    self.shared.lock().failed = Some(error);
                    self.shared.changed.notify_all();
                    return self.tables;
                }
            };
            let mut state = self.shared.lock();
            if let Some((asked, _)) = asked {
                (state.answered, state.digests) = (asked, digests);
                self.shared.changed.notify_all();
            } else if found == PageCount::ZERO && state.asked == state.answered && !state.ended {
                drop(self.shared.changed.wait_timeout(state, LOOK));
            }
        }
    }

    /// Takes in what channels have read back, and reads the rest of what was placed; returns how
    /// many pages.
    fn pass(&mut self) -> Result<PageCount, Stopped> {
        let placed = Arc::clone(&self.placed);
        let mut found = PageCount::ZERO;
        let reads = std::mem::take(&mut placed.first().reads);
        for read in reads {
            found += read.run.count;
            self.take_in(&read)?;
        }
        for (number, marks) in placed.marks.iter().enumerate() {
            found += marks.try_harvest(|run| self.read(number, run))?;
            self.read_few()?;
        }
        Ok(found)
    }

    /// Takes in what a channel has `read`, of pages of which nothing is known.
    fn take_in(&mut self, read: &FirstRead) -> Result<(), Stopped> {
        if read.key.seed() != self.key.seed() {
            return self.read(read.block, read.run);
        }
        let tables = &mut self.tables[read.block];
        for (page, print) in (read.run.start.0..).zip(&read.prints) {
            let table = &mut tables[(page / SEGMENT_PAGES) as usize];
            if table.print(PageIndex(page)).is_none() {
                table.record(PageIndex(page), *print);
            }
        }
        Ok(())
    }

    /// Claims what of `run` nobody has claimed of RAM block `number`, in runs.
    fn claim(&self, number: usize, run: PageRun) -> Vec<PageRun> {
        let claimed = &self.placed.claimed[number];
        let mut ours: Vec<PageRun> = Vec::new();
        for page in run.start.0..run.end().0 {
            if claimed.set(PageRun::new(page, 1)) == PageCount::ZERO {
                continue;
            }
            match ours.last_mut() {
                Some(last) if last.end().0 == page => last.count += PageCount(1),
                _ => ours.push(PageRun::new(page, 1)),
            }
        }
        ours
    }

    /// Reads what nobody has placed, of as much as is `wanted`.
    fn first_reads(&mut self, wanted: Wanted) -> Result<(), Stopped> {
        for number in 0..self.tables.len() {
            let reads = wanted == Wanted::All || number < self.ram.len();
            for segment in 0..self.tables[number].len() {
                // What is known once is known for good.
                if self.complete[number][segment] {
                    continue;
                }
                let table = &self.tables[number][segment];
                match table.first_unknown() {
                    Some(page) if reads => {
                        let rest = PageRun::new(page.0, table.run().end().0 - page.0);
                        // What a channel has claimed meanwhile it reads back. With all wanted
                        // nobody places anything any more.
                        let runs = match wanted {
                            Wanted::All => vec![rest],
                            Wanted::Placed | Wanted::Memory => self.claim(number, rest),
                        };
                        runs.into_iter().try_for_each(|run| self.read(number, run))?;
                        self.read_few()?;
                        if self.tables[number][segment].first_unknown().is_some() {
                            continue;
                        }
                    }
                    Some(_) => continue,
                    None => {}
                }
                self.complete[number][segment] = true;
            }
        }
        Ok(())
    }

    /// The digests of all segments, 0 for those that are not complete. What does not change any
    /// more is at hand the next time.
    fn digests(&mut self) -> Vec<Vec<u128>> {
        let key = self.key;
        let of = |(table, complete): (&mut SegmentFingerprints, &bool)| {
            if *complete { table.digest_of_all(&key) } else { 0 }
        };
        let parts = self.tables.iter_mut().zip(&self.complete);
        parts.map(|(tables, complete)| tables.iter_mut().zip(complete).map(of).collect()).collect()
    }

    /// Reads `run` of RAM block or disk `number`, of which holes are known to be zeros.
    fn read(&mut self, number: usize, run: PageRun) -> Result<(), Stopped> {
        if let Some(disk) = number.checked_sub(self.ram.len()) {
            return self.read_disk(disk, run);
        }
        let ram = Arc::clone(&self.ram);
        let mut at = run.start;
        for data in ram[number].data_coarse(run) {
            let data = data?;
            self.holes(number, at, data.start);
            self.data(&ram[number], number, data)?;
            at = data.end();
        }
        self.holes(number, at, run.end());
        Ok(())
    }

    /// Short stretches are read as they are, many at once; of long ones it is asked what is data.
    fn read_disk(&mut self, disk: usize, run: PageRun) -> Result<(), Stopped> {
        if run.count.0 <= FEW {
            let pages: u64 = self.few.1.iter().map(|run| run.count.0).sum();
            if self.few.0 != disk || pages + run.count.0 > READ_PAGES {
                self.read_few()?;
            }
            self.few.0 = disk;
            self.few.1.push(run);
            return Ok(());
        }
        let failed = |error| Stopped::Failed(EngineError::Disk(error));
        let number = self.ram.len() + disk;
        let ahead = parts(run, ASKED);
        for run in ahead {
            self.check_wanted()?;
            let extents = self.disks[disk].extents(run).map_err(failed)?;
            self.read_extents((disk, number), &extents)?;
        }
        Ok(())
    }

    fn read_extents(
        &mut self,
        (disk, number): (usize, usize),
        extents: &[Extent],
    ) -> Result<(), Stopped> {
        let failed = |error| Stopped::Failed(EngineError::Disk(error));
        for extent in extents {
            if extent.content == Content::Zero {
                self.holes(number, extent.run.start, extent.run.end());
                continue;
            }
            for part in parts(extent.run, READ_PAGES) {
                self.check_wanted()?;
                let bytes = part.count.bytes().0 as usize;
                self.disks[disk].read(&[part], &mut self.pages[..bytes]).map_err(failed)?;
                self.record(number, part, 0);
            }
        }
        Ok(())
    }

    /// Reads the short stretches that were put off.
    fn read_few(&mut self) -> Result<(), Stopped> {
        let (disk, runs) = (self.few.0, std::mem::take(&mut self.few.1));
        if runs.is_empty() {
            return Ok(());
        }
        self.check_wanted()?;
        let bytes = runs.iter().map(|run| run.count.bytes().0).sum::<u64>() as usize;
        let read = self.disks[disk].read(&runs, &mut self.pages[..bytes]);
        read.map_err(|error| Stopped::Failed(EngineError::Disk(error)))?;
        let mut at = 0;
        for run in runs {
            self.record(self.ram.len() + disk, run, at);
            at += run.count.bytes().0 as usize;
        }
        Ok(())
    }

    /// The pages of `run` were read into `self.pages`, from byte `at` of it on.
    fn record(&mut self, number: usize, run: PageRun, at: usize) {
        let pages = self.pages[at..].chunks_exact(PAGE_SIZE as usize);
        for (page, bytes) in (run.start.0..run.end().0).zip(pages) {
            let table = &mut self.tables[number][(page / SEGMENT_PAGES) as usize];
            let _ = table.update(PageIndex(page), self.key.page(bytes));
        }
    }

    fn check_wanted(&self) -> Result<(), Stopped> {
        if self.shared.lock().ended { Err(Stopped::Ended) } else { Ok(()) }
    }

    /// The pages from `start` to `end` are holes.
    fn holes(&mut self, number: usize, start: PageIndex, end: PageIndex) {
        let mut at = start.0;
        while at < end.0 {
            let segment = at / SEGMENT_PAGES;
            let until = end.0.min((segment + 1) * SEGMENT_PAGES);
            let table = &mut self.tables[number][segment as usize];
            table.record_run(PageRun::new(at, until - at), self.key.zero());
            at = until;
        }
    }

    fn data(&mut self, block: &RamBlock, number: usize, run: PageRun) -> Result<(), Stopped> {
        for part in parts(run, READ) {
            self.check_wanted()?;
            block.read(part.start, &mut self.pages[..part.count.bytes().0 as usize])?;
            self.record(number, part, 0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
