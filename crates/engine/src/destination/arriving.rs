//! Pages that are still to come when the guest runs here (post-copy): who waits for one, and since
//! when; a thread asks the source for it.
//!
//! Invariants: the source is asked for a page as long as somebody waits for it, once over each
//! control connection. A page that comes twice is placed once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_confine::Rights;
use godwit_memory::RamBlock;
use godwit_units::{PageCount, PageIndex, PageRun};
use godwit_wire::{Content, Message, WANTED_LIMIT};

use super::Fetched;
use crate::cells::Cells;
use crate::link::ControlWriter;
use crate::vm::{ArrivingPages, VmError};
use crate::{EngineError, Interrupt, limits, threads};

/// Answers of which the time is remembered.
const MOST_ANSWERS: usize = 1 << 20;

/// The pages, and who waits for them.
pub(super) struct Arriving {
    pages: Arc<dyn ArrivingPages>,
    waits: Mutex<Waits>,
    began: Instant,
    missing: PageCount,
    /// How many pages each of our blocks has.
    blocks: Vec<u64>,
    /// What ends a long call of the machine, which may wait for one of them.
    interrupt: Interrupt,
}

/// Who waits for what.
#[derive(Default)]
struct Waits {
    /// Pages that somebody waits for, by our number of the block, and since when.
    since: BTreeMap<(usize, u64), Instant>,
    /// How long they were waited for that have come.
    answered: Vec<Duration>,
}

impl Arriving {
    fn waits(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Places what has come of `run` of our block `block`; `bytes` are those of a data run.
    pub(super) fn place(
        &self,
        block: usize,
        run: PageRun,
        content: Content,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        // Before it is placed: who is killed in between has it come once more.
        #[cfg(feature = "test-hooks")]
        if self.largest() == Some(block) {
            let data = (content == Content::Data).then_some(bytes);
            crate::stamped::note_placed(run, data);
        }
        match content {
            Content::Data => self.pages.place(block, run.start, bytes),
            Content::Zero => self.pages.place_zeros(block, run),
        }
        .map_err(EngineError::Vm)?;
        let now = Instant::now();
        let mut waits = self.waits();
        let range = (block, run.start.0)..(block, run.end().0);
        let come: Vec<_> = waits.since.range(range).map(|(at, since)| (*at, *since)).collect();
        for &(at, since) in &come {
            waits.since.remove(&at);
            if waits.answered.len() < MOST_ANSWERS {
                waits.answered.push(now - since);
            }
        }
        drop(waits);
        for ((_, page), since) in come {
            tracing::trace!(block, page, waited = ?(now - since), "came");
        }
        Ok(())
    }

    /// How many pages are still to come.
    pub(super) fn left(&self) -> PageCount {
        self.pages.left()
    }

    /// A connection has ended over which they come: before COMMIT none is made in its place, and
    /// behind it nobody hears this.
    pub(super) fn starve(&self) {
        self.interrupt.starve();
    }

    /// Whether any page of `run` of our block `block` is still to come.
    pub(super) fn lacks(&self, block: usize, run: PageRun) -> bool {
        self.pages.next_run(block, run.start).is_some_and(|next| next.start < run.end())
    }

    /// How many pages each of our blocks has.
    pub(super) fn blocks(&self) -> &[u64] {
        &self.blocks
    }

    /// The largest of our blocks, of which it is written down for tests what becomes of it.
    #[cfg(feature = "test-hooks")]
    fn largest(&self) -> Option<usize> {
        self.blocks.iter().position(|pages| Some(pages) == self.blocks.iter().max())
    }

    /// What is still to come of our block `block`, in runs.
    fn left_of(&self, block: usize) -> impl Iterator<Item = PageRun> {
        let next = move |from| self.pages.next_run(block, from);
        std::iter::successors(next(PageIndex(0)), move |run| next(run.end()))
    }

    /// What somebody still waits for. What was discarded since is waited for by nobody.
    pub(super) fn still_wanted(&self) -> Vec<(usize, PageIndex)> {
        let mut waits = self.waits();
        let is_missing = |block, page| {
            self.pages.next_run(block, PageIndex(page)).is_some_and(|run| run.start.0 == page)
        };
        waits.since.retain(|(block, page), _| is_missing(*block, *page));
        waits.since.keys().map(|(block, page)| (*block, PageIndex(*page))).collect()
    }
}

/// The thread that asks for what somebody waits for.
pub(super) struct Fetching {
    arriving: Arc<Arriving>,
    asking: Arc<Asking>,
    thread: Option<JoinHandle<()>>,
}

struct Asking {
    control: Arc<ControlWriter>,
    /// Our number of a block -> the source's.
    numbers: Vec<u32>,
    stop: AtomicBool,
    /// All that is waited for is to be asked for once more.
    again: AtomicBool,
    failure: Mutex<Option<VmError>>,
}

impl Fetching {
    /// Begins to ask over `control` for those of `pages` that somebody waits for, of the blocks of
    /// `ram`, which the source has in `order`. Calls of the machine that may wait for one of them
    /// are ended by `interrupt`.
    pub(super) fn start(
        pages: Arc<dyn ArrivingPages>,
        (ram, order): (&[RamBlock], &[usize]),
        (control, interrupt): (Arc<ControlWriter>, &Interrupt),
        cells: &Cells,
    ) -> Result<Self, EngineError> {
        let missing = pages.left();
        let (waits, began) = (Mutex::default(), Instant::now());
        let blocks = ram.iter().map(|block| block.pages().0).collect();
        let interrupt = interrupt.clone();
        let arriving = Arc::new(Arriving { pages, waits, began, missing, blocks, interrupt });
        let mut numbers = vec![0; order.len()];
        order.iter().zip(0..).for_each(|(own, number)| numbers[*own] = number);
        let asking = Arc::new(Asking {
            control,
            numbers,
            stop: AtomicBool::new(false),
            again: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        #[cfg(feature = "test-hooks")]
        if let Some(largest) = arriving.largest() {
            crate::stamped::note_missing(arriving.left_of(largest));
        }
        let (cell, asks, pages) =
            (cells.with(Rights::NONE), Arc::clone(&asking), Arc::clone(&arriving));
        let thread = threads::start("faults", move || match cell.enter() {
            Ok(_confined) => asks.run(&pages),
            Err(error) => asks.failed(error.to_string().into()),
        })?;
        Ok(Self { arriving, asking, thread: Some(thread) })
    }

    /// Where what comes is placed.
    pub(super) fn arriving(&self) -> &Arc<Arriving> {
        &self.arriving
    }

    /// How many pages are still to come.
    pub(super) fn left(&self) -> PageCount {
        self.arriving.left()
    }

    /// The source's number of a block -> ours.
    pub(super) fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.asking.numbers.len()).collect();
        order.sort_unstable_by_key(|own| self.asking.numbers[*own]);
        order
    }

    /// What is still to come of our block `block`, in runs.
    pub(super) fn left_of(&self, block: usize) -> Vec<PageRun> {
        self.arriving.left_of(block).collect()
    }

    /// The source is back: it is asked once more for all that somebody waits for.
    pub(super) fn ask_again(&self) {
        self.asking.again.store(true, Ordering::SeqCst);
    }

    /// Why nobody can be asked for pages any more.
    pub(super) fn failure(&self) -> Option<EngineError> {
        let mut failure = self.asking.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.take().map(EngineError::Vm)
    }

    /// All pages are here: nothing of it stays in the machine.
    pub(super) fn finish(&mut self) -> Result<Fetched, VmError> {
        self.end();
        let measures = self.arriving.pages.measures();
        #[cfg(feature = "test-hooks")]
        crate::stamped::note_all(measures.discarded);
        let mut answered = std::mem::take(&mut self.arriving.waits().answered);
        answered.sort_unstable();
        let part = |percent: usize| {
            answered.get((answered.len() * percent / 100).min(answered.len().saturating_sub(1)))
        };
        let (median, p99) = (part(50).copied(), part(99).copied());
        let fetched = Fetched {
            missing: self.arriving.missing,
            faults: measures.faults,
            discarded: measures.discarded,
            median_wait: median.unwrap_or_default(),
            p99_wait: p99.unwrap_or_default(),
            longest_wait: answered.last().copied().unwrap_or_default(),
            time: self.arriving.began.elapsed(),
        };
        self.arriving.pages.finish().map(|()| fetched)
    }

    fn end(&mut self) {
        self.asking.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            let _ = thread.join();
        }
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        self.end();
    }
}

impl Asking {
    fn run(&self, arriving: &Arriving) {
        let mut found: Vec<(usize, PageIndex)> = Vec::new();
        while !self.stop.load(Ordering::SeqCst) {
            found.clear();
            let waited = arriving
                .pages
                .await_faults(limits::TICK / 4, &mut |block, page| found.push((block, page)));
            if let Err(error) = waited {
                return self.failed(error);
            }
            let now = Instant::now();
            for (block, page) in &found {
                tracing::trace!(block, page = page.0, "somebody waits");
            }
            let mut waits = arriving.waits();
            for (block, page) in &found {
                waits.since.entry((*block, page.0)).or_insert(now);
            }
            drop(waits);
            if self.again.swap(false, Ordering::SeqCst) {
                found = arriving.still_wanted();
            }
            self.ask(&mut found);
        }
    }

    /// Asks for pages. A link that is broken is found by others, and all is asked for again when it
    /// stands.
    fn ask(&self, wanted: &mut [(usize, PageIndex)]) {
        wanted.sort_unstable();
        for of_block in wanted.chunk_by(|one, other| one.0 == other.0) {
            for pages in of_block.chunks(WANTED_LIMIT) {
                let block = self.numbers[pages[0].0];
                let pages = pages.iter().map(|(_, page)| *page).collect();
                if self.control.send(&Message::Wanted { block, pages }).is_err() {
                    return;
                }
            }
        }
    }

    fn failed(&self, error: VmError) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }
}
