//! Which pages the destination, where the guest runs already, does not have (post-copy): what was
//! not sent of them yet, and in which order that goes.
//!
//! Invariant: nobody writes the pages any more, so whoever sends one sends the same, and to send
//! one twice does no harm.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_bitmap::DirtyBitmap;
use godwit_memory::{RamBlock, SEGMENT_PAGES};
use godwit_units::{PageCount, PageIndex, PageRun};

use super::PEER;
use crate::EngineError;

/// Pages that are sent together where somebody waits for one of them, in groups that begin at a
/// multiple of it: 32 KiB. Whoever was stopped goes on with its page tables, its stack and what it
/// had at hand, which lie close together.
const NEIGHBOURS: u64 = 8;

pub(super) struct ToServe {
    blocks: Arc<Vec<RamBlock>>,
    /// The number of each block's first segment.
    first_segments: Vec<usize>,
    state: Mutex<State>,
}

struct State {
    /// What the destination was told to be missing, by block.
    missing: Vec<DirtyBitmap>,
    /// What was not sent of that since.
    unsent: Vec<DirtyBitmap>,
    /// Where to go on: behind the page that was asked for last, whose neighbours are likely next.
    at: (usize, PageIndex),
}

impl ToServe {
    /// The pages of `blocks` in `missing`, of which none was sent.
    pub(super) fn new(blocks: &Arc<Vec<RamBlock>>, missing: Vec<DirtyBitmap>) -> Self {
        let mut segments = 0;
        let first = |block: &RamBlock| {
            let first = segments;
            segments += block.pages().0.div_ceil(SEGMENT_PAGES) as usize;
            first
        };
        let first_segments = blocks.iter().map(first).collect();
        let unsent = missing.clone();
        let state = Mutex::new(State { missing, unsent, at: (0, PageIndex(0)) });
        Self { blocks: Arc::clone(blocks), first_segments, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The destination has said anew what is missing: all of that is unsent.
    pub(super) fn begin_again(&self, missing: Vec<DirtyBitmap>) {
        let mut state = self.state();
        (state.unsent, state.missing) = (missing.clone(), missing);
    }

    /// How many pages were not sent yet.
    pub(super) fn unsent(&self) -> PageCount {
        self.state().unsent.iter().map(DirtyBitmap::count).sum()
    }

    /// Somebody at the destination waits for `page` of `block`. It is to be sent now, also where it
    /// is on its way over a channel that has much to carry.
    ///
    /// # Errors
    /// When it is not missing.
    pub(super) fn ask(&self, block: u32, page: PageIndex) -> Result<(), EngineError> {
        let block = block as usize;
        let mut state = self.state();
        let is_missing = state
            .missing
            .get(block)
            .is_some_and(|missing| page.0 < missing.len().0 && missing.is_set(page));
        if !is_missing {
            let what = format!("it asked for {page} of block {block}, which it has");
            return Err(EngineError::Protocol { peer: PEER, what });
        }
        state.unsent[block].clear(PageRun::new(page.0, 1));
        state.at = (block, PageIndex(page.0 + 1));
        Ok(())
    }

    /// The neighbours of a page that was asked for which were not sent yet, in runs: they are to be
    /// sent right behind it.
    pub(super) fn neighbours(&self, block: usize, page: PageIndex) -> Vec<PageRun> {
        let unsent = &mut self.state().unsent[block];
        let group = PageRun::new(page.0 - page.0 % NEIGHBOURS, NEIGHBOURS);
        let mut runs = Vec::new();
        unsent.for_each_run_in(group, |run| runs.push(run));
        unsent.clear(group);
        runs
    }

    /// The next run of pages to be sent unasked, of `most` at the most, with their block; `None`
    /// when all were sent.
    pub(super) fn next(&self, most: u64) -> Option<(usize, PageRun)> {
        let mut state = self.state();
        let (first, from) = state.at;
        let blocks = state.unsent.len();
        for step in 0..=blocks {
            let block = (first + step) % blocks.max(1);
            let from = if step == 0 { from } else { PageIndex(0) };
            let Some(run) = state.unsent.get(block)?.next_run(from) else { continue };
            let run = PageRun::new(run.start.0, run.count.0.min(most));
            state.unsent[block].clear(run);
            state.at = (block, run.end());
            return Some((block, run));
        }
        None
    }

    /// The block of this number.
    pub(super) fn block(&self, number: usize) -> &RamBlock {
        &self.blocks[number]
    }

    /// The segment that `page` of `block` is in.
    pub(super) fn segment(&self, block: usize, page: PageIndex) -> usize {
        self.first_segments[block] + (page.0 / SEGMENT_PAGES) as usize
    }

    /// How many segments there are.
    pub(super) fn segments(&self) -> usize {
        let last = self.blocks.last().map_or(0, |last| last.pages().0.div_ceil(SEGMENT_PAGES));
        self.first_segments.last().map_or(0, |first| first + last as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> ToServe {
        let block = |pages| RamBlock::anonymous("ram", PageCount(pages)).unwrap();
        let blocks = Arc::new(vec![block(10), block(5000)]);
        let missing = |pages, runs: &[PageRun]| {
            let mut missing = DirtyBitmap::new(PageCount(pages));
            for run in runs {
                missing.set(*run);
            }
            missing
        };
        let missing =
            vec![missing(10, &[PageRun::new(2, 3)]), missing(5000, &[PageRun::new(0, 100)])];
        ToServe::new(&blocks, missing)
    }

    #[test]
    fn everything_is_sent_once_and_neighbours_of_what_was_asked_for_come_first() {
        let table = table();
        assert_eq!(table.unsent(), PageCount(103));
        assert_eq!(table.next(2), Some((0, PageRun::new(2, 2))));
        table.ask(1, PageIndex(50)).unwrap();
        assert_eq!(table.next(64), Some((1, PageRun::new(51, 49))));
        assert_eq!(table.next(64), Some((0, PageRun::new(4, 1))));
        assert_eq!(table.next(64), Some((1, PageRun::new(0, 50))));
        assert_eq!((table.next(64), table.unsent()), (None, PageCount::ZERO));
        // One that is on its way is sent all the same.
        table.ask(1, PageIndex(99)).unwrap();
    }

    #[test]
    fn neighbours_are_what_was_not_sent_of_a_group() {
        // Mutations: those that were sent are named, those beyond the group are, and they are not
        // taken for sent.
        let table = table();
        table.ask(1, PageIndex(13)).unwrap();
        assert_eq!(table.next(1), Some((1, PageRun::new(14, 1))));
        let runs = [PageRun::new(8, 5), PageRun::new(15, 1)];
        assert_eq!(table.neighbours(1, PageIndex(13)), runs);
        assert_eq!(table.neighbours(1, PageIndex(13)), []);
        assert_eq!(table.unsent(), PageCount(103 - 8));
        // What is missing ends within its group.
        assert_eq!(table.neighbours(0, PageIndex(4)), [PageRun::new(2, 3)]);
    }

    #[test]
    fn nobody_asks_for_what_is_not_missing() {
        let table = table();
        for (block, page) in [(0, 1), (0, 10), (1, 100), (1, 1 << 40), (2, 0)] {
            assert!(table.ask(block, PageIndex(page)).is_err(), "{block} {page}");
        }
        assert_eq!((table.segment(1, PageIndex(4096)), table.segments()), (2, 3));
    }

    #[test]
    fn what_is_missing_still_is_sent_again() {
        let table = table();
        while table.next(64).is_some() {}
        let mut missing = vec![DirtyBitmap::new(PageCount(10)), DirtyBitmap::new(PageCount(5000))];
        missing[1].set(PageRun::new(7, 1));
        table.begin_again(missing);
        assert_eq!(table.next(64), Some((1, PageRun::new(7, 1))));
        assert_eq!(table.next(64), None);
        assert!(table.ask(0, PageIndex(2)).is_err());
    }
}
