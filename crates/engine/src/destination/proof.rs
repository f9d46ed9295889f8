//! What was placed is read back while the guest still runs at the source.
//!
//! A thread reads each page behind its last write and keeps its fingerprint, so that the digests of
//! all memory are at hand when the guest is stopped, but for what the last round brought.
//!
//! Invariant: a page is marked behind its write, and its mark is taken before it is read. So a
//! fingerprint that stands when no mark is left is of what the page holds.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use godwit_bitmap::AtomicDirtyBitmap;
use godwit_fingerprints::{Key, PageFingerprints, SegmentFingerprints};
use godwit_memory::{MemoryError, RamBlock, SEGMENT_PAGES, segments};
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};

use crate::{EngineError, limits, threads};

/// Pages read at once: 64 KiB, which stay in the core's own caches.
const READ: u64 = 16;
/// How often it is looked whether anything was placed.
const LOOK: Duration = Duration::from_millis(20);

/// Which pages were placed since they were read back, by RAM block.
#[derive(Debug)]
pub(super) struct Placed(Vec<AtomicDirtyBitmap>);

impl Placed {
    /// None of `ram`.
    pub(super) fn new(ram: &[RamBlock]) -> Self {
        Self(ram.iter().map(|block| AtomicDirtyBitmap::new(block.pages())).collect())
    }

    /// `run` of RAM block `block` was placed.
    pub(super) fn mark(&self, block: usize, run: PageRun) {
        self.0[block].set(run);
    }
}

/// The thread that reads back. It ends with the handle.
#[derive(Debug)]
pub(super) struct Prover {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// How often all was asked for, and for which of these times it is there.
    asked: u64,
    answered: u64,
    digests: Vec<Vec<u128>>,
    failed: Option<MemoryError>,
    ended: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Prover {
    /// Begins to read back what is marked as `placed` in `ram`.
    pub(super) fn start(
        ram: &Arc<Vec<RamBlock>>,
        placed: &Arc<Placed>,
        key: Key,
    ) -> Result<Self, EngineError> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let fingerprints = PageFingerprints::new();
        let tables = ram.iter().map(|block| {
            segments(&[block.pages()]).map(|segment| fingerprints.segment(segment.run)).collect()
        });
        let reader = Reader {
            shared: Arc::clone(&shared),
            ram: Arc::clone(ram),
            placed: Arc::clone(placed),
            key,
            tables: tables.collect(),
            pages: vec![0; PageCount(READ).bytes().0 as usize],
        };
        let thread = threads::start("proof", move || reader.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The digest of each segment of each RAM block, in our order, as they are now; nothing may be
    /// placed meanwhile for that. Waits until all that was placed is read back, or it `ends`
    /// otherwise.
    pub(super) fn digests(
        &self,
        ends: impl Fn() -> Option<EngineError>,
    ) -> Result<Vec<Vec<u128>>, EngineError> {
        let mut state = self.shared.lock();
        state.asked += 1;
        let asked = state.asked;
        self.shared.changed.notify_all();
        loop {
            if let Some(error) = state.failed.take() {
                return Err(error.into());
            }
            if state.answered >= asked {
                return Ok(state.digests.clone());
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
}

impl Drop for Prover {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
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
    placed: Arc<Placed>,
    key: Key,
    tables: Vec<Vec<SegmentFingerprints>>,
    pages: Vec<u8>,
}

/// Why a pass ended before all was read.
enum Stopped {
    Ended,
    Failed(MemoryError),
}

impl From<MemoryError> for Stopped {
    fn from(error: MemoryError) -> Self {
        Self::Failed(error)
    }
}

impl Reader {
    fn run(mut self) {
        loop {
            let asked = {
                let state = self.shared.lock();
                if state.ended {
                    return;
                }
                (state.asked > state.answered).then_some(state.asked)
            };
            let passed = self.pass().and_then(|found| match asked {
                Some(_) => self.digests().map(|digests| (found, digests)),
                None => Ok((found, Vec::new())),
            });
            let (found, digests) = match passed {
                Ok(passed) => passed,
                Err(Stopped::Ended) => return,
                Err(Stopped::Failed(error)) => {
                    self.shared.lock().failed = Some(error);
                    self.shared.changed.notify_all();
                    return;
                }
            };
            let mut state = self.shared.lock();
            if let Some(asked) = asked {
                (state.answered, state.digests) = (asked, digests);
                self.shared.changed.notify_all();
            } else if found == PageCount::ZERO && state.asked == state.answered && !state.ended {
                drop(self.shared.changed.wait_timeout(state, LOOK));
            }
        }
    }

    /// Reads all that was placed; returns how many pages.
    fn pass(&mut self) -> Result<PageCount, Stopped> {
        let placed = Arc::clone(&self.placed);
        let mut found = PageCount::ZERO;
        for (number, marks) in placed.0.iter().enumerate() {
            found += marks.try_harvest(|run| self.read(number, run))?;
        }
        Ok(found)
    }

    /// The digests of all segments. What nobody has placed is read for the first time.
    fn digests(&mut self) -> Result<Vec<Vec<u128>>, Stopped> {
        for number in 0..self.tables.len() {
            for segment in 0..self.tables[number].len() {
                let table = &self.tables[number][segment];
                if let Some(page) = table.first_unknown() {
                    let rest = PageRun::new(page.0, table.run().end().0 - page.0);
                    self.read(number, rest)?;
                }
            }
        }
        let key = self.key;
        let of = |table: &mut SegmentFingerprints| table.digest_of_all(&key);
        Ok(self.tables.iter_mut().map(|tables| tables.iter_mut().map(of).collect()).collect())
    }

    /// Reads `run` of RAM block `number`, of which holes are known to be zeros.
    fn read(&mut self, number: usize, run: PageRun) -> Result<(), Stopped> {
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
        let mut at = run.start.0;
        while at < run.end().0 {
            if self.shared.lock().ended {
                return Err(Stopped::Ended);
            }
            let segment = at / SEGMENT_PAGES;
            let count = READ.min(run.end().0 - at).min((segment + 1) * SEGMENT_PAGES - at);
            let pages = &mut self.pages[..PageCount(count).bytes().0 as usize];
            block.read(PageIndex(at), pages)?;
            let table = &mut self.tables[number][segment as usize];
            for (page, bytes) in (at..).zip(pages.chunks_exact(PAGE_SIZE as usize)) {
                let _ = table.update(PageIndex(page), self.key.page(bytes));
            }
            at += count;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
