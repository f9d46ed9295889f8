//! A segment as the channel has it that deals with it: what the destination has of it, and what it
//! does not have for sure.
//!
//! Invariant: a segment of which no page was ever dealt with takes no memory for its pages, so one
//! that nobody has touched costs next to nothing.

use std::time::Instant;

use godwit_bitmap::DirtyBitmap;
use godwit_fingerprints::{Fingerprint, PageFingerprints, SegmentFingerprints};
use godwit_memory::Segment;
use godwit_units::{PageCount, PageIndex, PageRun};

use super::frame_sender::Carried;
use super::history::{History, SentOf};
use super::segment_table::SegmentTable;

/// Pages of a segment, by their place in it; they take memory from the first one on.
#[derive(Debug, Default)]
pub(super) struct Pages(Option<Box<DirtyBitmap>>);

impl Pages {
    /// The pages of `run` are among them, of a segment of `count`.
    pub(super) fn set(&mut self, run: PageRun, count: PageCount) {
        self.0.get_or_insert_with(|| Box::new(DirtyBitmap::new(count))).set(run);
    }

    /// Those of `run` no longer are.
    pub(super) fn clear(&mut self, run: PageRun) {
        if let Some(pages) = &mut self.0 {
            pages.clear(run);
        }
    }

    /// None is.
    pub(super) fn clear_all(&mut self) {
        if let Some(pages) = &mut self.0 {
            pages.clear_all();
        }
    }

    /// All of `other`, of the same segment, are as well.
    pub(super) fn union(&mut self, other: &Self) {
        match (&mut self.0, &other.0) {
            (Some(pages), Some(other)) => {
                pages.union(other);
            }
            (None, Some(other)) => self.0 = Some(other.clone()),
            (_, None) => {}
        }
    }

    /// All of them are among `pages`, of the same segment, as well.
    pub(super) fn add_to(&self, pages: &mut DirtyBitmap) {
        if let Some(own) = &self.0 {
            pages.union(own);
        }
    }

    /// How many there are.
    pub(super) fn count(&self) -> PageCount {
        self.0.as_ref().map_or(PageCount::ZERO, |pages| pages.count())
    }

    /// How many of `run` are.
    pub(super) fn count_in(&self, run: PageRun) -> PageCount {
        self.0.as_ref().map_or(PageCount::ZERO, |pages| pages.count_in(run))
    }

    /// They, in runs.
    pub(super) fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        self.0.iter().flat_map(|pages| pages.runs())
    }
}

/// A segment, and which of its pages the destination holds with other bytes than zero.
pub(super) struct Owned {
    /// Its number on the segment table.
    pub(super) number: usize,
    pub(super) segment: Segment,
    pub(super) held: Pages,
    /// It is unsent, and was named as zero: the destination may have held something else.
    pub(super) named: bool,
    pub(super) fingerprints: Option<SegmentFingerprints>,
    /// With direct I/O: pages that were harvested in the last round, into which data may have
    /// landed since.
    pub(super) recent: Option<Pages>,
    /// What was harvested or sent of it in `round`, and the last frames with any of that; `None`
    /// while it is being dealt with.
    pub(super) unacknowledged: Pages,
    round: u32,
    pub(super) carried: Option<Carried>,
    /// What was taken back, and is still to be sent again.
    pub(super) owed: Pages,
    /// When its pages were sent and reported, for an audit.
    pub(super) history: Option<Box<History>>,
}

impl Owned {
    /// Segment `number`, of which nothing was sent; with `prints` where fingerprints are kept, and
    /// since when things are remembered where there is to be an `audit`.
    pub(super) fn new(
        (number, segment): (usize, Segment),
        prints: Option<&PageFingerprints>,
        audit: Option<Instant>,
        direct_io: bool,
    ) -> Self {
        Self {
            number,
            segment,
            held: Pages::default(),
            named: false,
            fingerprints: prints.map(|prints| prints.segment(segment.run)),
            recent: direct_io.then(Pages::default),
            unacknowledged: Pages::default(),
            round: 0,
            carried: Some(Carried::new()),
            owed: Pages::default(),
            history: audit.map(|began| Box::new(History::new(segment, began))),
        }
    }

    /// Its number on the segment table.
    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// The segment.
    pub(super) fn segment(&self) -> Segment {
        self.segment
    }

    /// The destination holds what `prints` say, of every page; none: zeros. What it holds otherwise
    /// than it was sent is owed to it again. Without fingerprints all of it is sent.
    pub(super) fn learn(&mut self, prints: &[u64], zero: Fingerprint, table: &SegmentTable) {
        let Some(fingerprints) = &mut self.fingerprints else { return };
        let run = self.segment.run;
        // One that was never sent whole will be.
        let pages = if table.is_unsent(self.number) { 0 } else { run.count.0 };
        self.owed = Pages::default();
        for index in 0..pages {
            let page = PageIndex(run.start.0 + index);
            let there = match prints.get(index as usize) {
                None => Some(zero),
                Some(word) => Fingerprint::from_word(*word),
            };
            if there.is_none() || fingerprints.print(page) != there {
                self.owed.set(PageRun::new(index, 1), run.count);
            }
        }
        fingerprints.forget(run);
        if prints.is_empty() {
            fingerprints.record_run(run, zero);
        }
        for (page, print) in (run.start.0..).zip(prints) {
            if let Some(print) = Fingerprint::from_word(*print) {
                fingerprints.record(PageIndex(page), print);
            }
        }
        self.named = false;
        table.owes(self.number, self.owed.count());
    }

    /// What is known of what was sent of it.
    pub(super) fn fingerprints(&self) -> Option<&SegmentFingerprints> {
        self.fingerprints.as_ref()
    }

    /// What is known of what was sent of it, for an audit.
    pub(super) fn part(&self) -> SentOf<'_> {
        SentOf {
            segment: self.segment,
            prints: self.fingerprints.as_ref(),
            history: self.history.as_deref(),
        }
    }

    /// Its turn has come in `round`, on `channel`. What was sent in an earlier one, perhaps over
    /// another channel, was acknowledged, or taken back.
    pub(super) fn comes_to(&mut self, channel: usize, round: u32) {
        if self.round != round {
            self.unacknowledged.clear_all();
            (self.round, self.carried) = (round, Some(Carried::new()));
        }
        if let Some(history) = &mut self.history {
            history.goes_over(channel);
        }
    }

    /// Remembers that `run` of its block is dealt with.
    pub(super) fn remember(&mut self, run: PageRun) {
        let within = self.within(run);
        self.unacknowledged.set(within, self.segment.run.count);
    }

    /// Where `run` of its block is in it.
    pub(super) fn within(&self, run: PageRun) -> PageRun {
        PageRun::new(run.start.0 - self.segment.run.start.0, run.count.0)
    }

    /// The destination has `placed` so many frames of each channel and will place no more: what may
    /// be among the others is owed to it again, and nothing is known any more of what it holds.
    /// Returns how many pages of that had been read and sent.
    pub(super) fn take_back(&mut self, placed: &[u64], table: &SegmentTable) -> PageCount {
        let has_come = |(channel, frame): &(usize, u64)| {
            *frame <= placed.get(*channel).copied().unwrap_or_default()
        };
        let carried = self.carried.replace(Carried::new());
        let lost = !carried.is_some_and(|carried| carried.iter().all(has_come));
        let mut sent = PageCount::ZERO;
        if lost {
            let first = self.segment.run.start.0;
            for run in self.unacknowledged.runs() {
                sent += self.held.count_in(run);
                if let Some(fingerprints) = &mut self.fingerprints {
                    fingerprints.forget(PageRun::new(first + run.start.0, run.count.0));
                }
            }
            self.owed.union(&self.unacknowledged);
            self.named = false;
        }
        self.unacknowledged.clear_all();
        // One that was never sent whole will be.
        if table.is_unsent(self.number) {
            self.owed = Pages::default();
        }
        table.owes(self.number, self.owed.count());
        sent
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use godwit_memory::RamBlock;

    use super::*;

    #[test]
    fn of_all_connections_that_a_segment_went_over_all_its_frames_must_have_come() {
        let block = RamBlock::anonymous("ram", PageCount(16)).unwrap();
        let table = SegmentTable::new(Arc::new(vec![block])).unwrap();
        table.mark_sent(0);
        let again = |carried: Option<Carried>, placed: &[u64]| {
            let mut owned = Owned {
                number: 0,
                segment: Segment { block: 0, run: PageRun::new(0, 16) },
                held: Pages::default(),
                named: false,
                fingerprints: None,
                recent: None,
                unacknowledged: Pages::default(),
                round: 3,
                carried,
                owed: Pages::default(),
                history: None,
            };
            owned.remember(PageRun::new(4, 2));
            owned.take_back(placed, &table);
            assert_eq!(owned.unacknowledged.count(), PageCount::ZERO);
            owned.owed.count().0
        };
        let carried = || Some(vec![(0, 5), (2, 9)]);
        assert_eq!(again(carried(), &[5, 0, 9]), 0);
        for placed in [&[4, 0, 9][..], &[5, 9, 8], &[5]] {
            assert_eq!(again(carried(), placed), 2, "{placed:?}");
        }
        assert_eq!(again(Some(Carried::new()), &[]), 0, "nothing was sent");
        assert_eq!(again(None, &[9, 9, 9]), 2, "it was being dealt with");
    }
}
