//! Which blocks of the disk the guest has written while it moves.
//!
//! Invariant: a block is marked after the data has landed, and what is marked is taken in one step
//! with its being cleared. So a write that a round did not read is in the next one. In the first
//! pass, what lies above the point that it has come to is not marked: it will be read there.

use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_bitmap::LayeredBitmap;
use godwit_units::{ByteCount, PageCount, PageRun};

#[derive(Debug)]
struct State {
    size: u64,
    granularity: u64,
    /// A bit for each block.
    dirty: LayeredBitmap,
    /// How far the first pass has come, in bytes; `None` when it is over.
    copied_to: Option<u64>,
    begun: bool,
}

impl State {
    fn clean(size: u64, granularity: u64) -> LayeredBitmap {
        LayeredBitmap::new(PageCount(size.div_ceil(granularity)))
    }

    fn set(&mut self, start: u64, end: u64) {
        if start < end {
            let first = start / self.granularity;
            self.dirty.set(PageRun::new(first, (end - 1) / self.granularity + 1 - first));
        }
    }
}

/// What a round goes over.
#[derive(Debug)]
pub(super) enum Pass {
    /// Everything.
    All,
    /// The blocks that are set.
    Blocks {
        /// A bit for each block.
        dirty: LayeredBitmap,
        /// Bytes of a block.
        granularity: u64,
    },
}

/// The marks; none while the disk does not move.
#[derive(Debug, Default)]
pub(super) struct Marks(Mutex<Option<State>>);

impl Marks {
    fn state(&self) -> MutexGuard<'_, Option<State>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to mark, in blocks of `granularity`, a power of two.
    pub(super) fn start(&self, size: ByteCount, granularity: ByteCount) {
        let (size, granularity) = (size.0, granularity.0);
        let dirty = State::clean(size, granularity);
        *self.state() = Some(State { size, granularity, dirty, copied_to: Some(0), begun: false });
    }

    /// Ends it.
    pub(super) fn stop(&self) {
        *self.state() = None;
    }

    /// The guest has written `len` bytes at `at`.
    pub(super) fn mark(&self, at: u64, len: u64) {
        if let Some(state) = &mut *self.state() {
            let end = (at + len).min(state.copied_to.unwrap_or(u64::MAX));
            state.set(at, end);
        }
    }

    /// What the next round goes over; from now on writes belong to the one after. `None` when
    /// nothing is marked.
    pub(super) fn begin(&self) -> Option<Pass> {
        let mut state = self.state();
        let state = state.as_mut()?;
        if !std::mem::replace(&mut state.begun, true) {
            return Some(Pass::All);
        }
        // A first pass that did not come to its end: all the rest.
        if let Some(copied_to) = state.copied_to.take() {
            state.set(copied_to, state.size);
        }
        let clean = State::clean(state.size, state.granularity);
        let dirty = std::mem::replace(&mut state.dirty, clean);
        Some(Pass::Blocks { dirty, granularity: state.granularity })
    }

    /// The first pass is about to look at everything below `end`: what is written there from now on
    /// is marked.
    pub(super) fn come_to(&self, end: u64) {
        if let Some(state) = &mut *self.state() {
            state.copied_to = Some(end).filter(|end| *end < state.size);
        }
    }

    /// Bytes written since the round began, in whole blocks.
    pub(super) fn dirty(&self) -> ByteCount {
        self.state()
            .as_ref()
            .map_or(ByteCount::ZERO, |state| ByteCount(state.dirty.count().0 * state.granularity))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    fn runs(pass: Option<Pass>) -> Vec<(u64, u64)> {
        match pass.unwrap() {
            Pass::All => vec![(u64::MAX, 0)],
            Pass::Blocks { dirty, .. } => {
                dirty.runs().map(|run| (run.start.0, run.count.0)).collect()
            }
        }
    }

    fn marks() -> Marks {
        let marks = Marks::default();
        marks.start(ByteCount(1000 * KIB + 512), ByteCount(64 * KIB));
        marks
    }

    #[test]
    fn what_the_first_pass_will_still_read_is_not_marked() {
        let marks = marks();
        assert_eq!(runs(marks.begin()), [(u64::MAX, 0)]);
        marks.mark(0, 4 * KIB);
        assert_eq!(marks.dirty(), ByteCount::ZERO);
        marks.come_to(128 * KIB);
        marks.mark(64 * KIB, 1);
        marks.mark(128 * KIB - 1, 100 * KIB);
        marks.mark(640 * KIB, 4 * KIB);
        assert_eq!(marks.dirty(), ByteCount(64 * KIB));
        marks.come_to(1000 * KIB + 512);
        marks.mark(1000 * KIB, 512);
        assert_eq!(runs(marks.begin()), [(1, 1), (15, 1)]);
        assert_eq!(runs(marks.begin()), []);
    }

    #[test]
    fn a_first_pass_that_was_given_up_leaves_all_the_rest() {
        let marks = marks();
        marks.begin();
        marks.come_to(320 * KIB);
        marks.mark(0, 1);
        assert_eq!(runs(marks.begin()), [(0, 1), (5, 11)]);
        // And it is over: everything is marked now.
        marks.mark(999 * KIB, 1);
        assert_eq!(runs(marks.begin()), [(15, 1)]);
    }

    #[test]
    fn a_write_over_several_blocks_marks_them_all_and_nothing_is_marked_in_the_end() {
        let marks = marks();
        marks.begin();
        marks.come_to(u64::MAX);
        marks.mark(63 * KIB, 66 * KIB);
        assert_eq!(runs(marks.begin()), [(0, 3)]);
        marks.stop();
        marks.mark(0, 1);
        assert!(marks.begin().is_none());
        assert_eq!(marks.dirty(), ByteCount::ZERO);
    }
}
