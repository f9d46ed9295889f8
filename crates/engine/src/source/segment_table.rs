//! The segments, and what the main thread and the channels tell each other about them.
//!
//! Invariant: a segment that was never sent is sent whole (data and holes) whenever it is dealt
//! with for the first time, in whichever round that is; a delay only moves that. A segment that was
//! never touched stays unsent, and the tracker is not asked about it: the file tells when that
//! changes.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use godwit_memory::{DataHint, MemoryError, RamBlock, SEGMENT_PAGES, Segment, segments};
use godwit_policy::Delayed;
use godwit_track::{AsOf, DirtyTracker, TrackError};
use godwit_units::{PageCount, PageRun};

use crate::EngineError;
use crate::threads::processors;

/// How long memory is made clean before it is sent for the first time, at the most.
pub(super) const ARMING: Duration = Duration::from_millis(500);
/// Extents of data that are remembered of a block, at the most: 1 MiB of them.
const MOST_EXTENTS: usize = 65_536;

/// Pages with data that one thread looks at by itself: 8 GiB, which takes it some milliseconds.
/// With more, several threads share the work.
const PART: u64 = 1 << 21;
/// The same of the last look, for which the guest waits: 1 GiB.
const LAST_PART: u64 = 1 << 18;
/// More threads than this do not look.
const THREADS_LIMIT: u64 = 16;

/// All segments of a VM, in the order of blocks and pages, by which the policy knows them.
pub(super) struct SegmentTable {
    blocks: Arc<Vec<RamBlock>>,
    segments: Vec<Segment>,
    /// Whether all of a segment is still to be sent.
    unsent: Vec<AtomicBool>,
    /// Whether a segment with data has had its turn: it was sent, or found to be a hole by then.
    dealt_with: Vec<AtomicBool>,
    /// Pages of a segment that were sent, did not arrive, and are to be sent again.
    owed: Vec<AtomicU32>,
    /// Pages of a segment that its file had data for when the migration began.
    data: Vec<u32>,
    /// Where that was, by block; nothing where it is scattered too much.
    extents: Vec<Vec<PageRun>>,
    delayed: Mutex<Delayed>,
    /// Pass by whatever is left of this round: the operator does not want to wait for it.
    hurry: AtomicBool,
    /// What the tracker reported before anything was harvested: one that starts with everything
    /// dirty cannot tell what the guest has written to a segment before its first harvest.
    baseline: Vec<u32>,
    /// Pages that their files had data for then.
    present: u64,
    /// How many threads share a look, where the tracker lets them.
    threads: usize,
    /// What is dirty when the guest is stopped, by segment, where all were looked at once.
    last: OnceLock<Vec<Vec<PageRun>>>,
    /// Pages sent in this round, by equal parts of all segments: for who looks at it afterwards.
    parts: Vec<AtomicU32>,
}

/// Parts that are told apart.
const PARTS: usize = 128;

/// What a look found.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// Pages written, by segment.
    pub(super) dirty: Vec<u32>,
    /// Pages still to be sent, those of unsent segments included.
    pub(super) remaining: PageCount,
    /// How long the threads were at it, all together.
    pub(super) spent: Duration,
}

impl SegmentTable {
    /// The segment table for `blocks`, none of which was sent.
    pub(super) fn new(blocks: Arc<Vec<RamBlock>>) -> Result<Self, MemoryError> {
        let sizes: Vec<PageCount> = blocks.iter().map(RamBlock::pages).collect();
        let segments: Vec<Segment> = segments(&sizes).collect();
        let mut data = vec![0; segments.len()];
        let mut extents = Vec::with_capacity(blocks.len());
        let mut first = 0;
        for block in blocks.iter() {
            let count = block.pages().0.div_ceil(SEGMENT_PAGES) as usize;
            let (own, counts) = (&segments[first..first + count], &mut data[first..first + count]);
            let (mut found, mut scattered, mut at) = (Vec::new(), false, 0);
            for run in block.data(block.all(), &mut DataHint::default()) {
                let run = run?;
                at = spread(run, own, at, counts);
                scattered |= found.len() >= MOST_EXTENTS;
                if !scattered {
                    found.push(run);
                }
            }
            extents.push(if scattered { Vec::new() } else { found });
            first += count;
        }
        let unsent = segments.iter().map(|_| AtomicBool::new(true)).collect();
        let dealt_with = data.iter().map(|pages| AtomicBool::new(*pages == 0)).collect();
        let owed = segments.iter().map(|_| AtomicU32::new(0)).collect();
        let baseline = vec![0; segments.len()];
        let parts = (0..segments.len().min(PARTS)).map(|_| AtomicU32::new(0)).collect();
        let present: u64 = data.iter().copied().map(u64::from).sum();
        let most = (processors() as u64).min(THREADS_LIMIT);
        let threads = (present / PART).clamp(1, most) as usize;
        Ok(Self {
            blocks,
            segments,
            unsent,
            dealt_with,
            owed,
            data,
            extents,
            delayed: Mutex::default(),
            hurry: AtomicBool::new(false),
            baseline,
            present,
            threads,
            last: OnceLock::new(),
            parts,
        })
    }

    /// So many `pages` of segment `number` were sent.
    pub(super) fn sent(&self, number: usize, pages: PageCount) {
        let part = number * self.parts.len() / self.segments.len().max(1);
        if let (Some(part), 1..) = (self.parts.get(part), pages.0) {
            part.fetch_add(pages.0 as u32, Ordering::Relaxed);
        }
    }

    /// What was sent of each part since this was last asked.
    pub(super) fn take_parts(&self) -> Vec<u32> {
        self.parts.iter().map(|part| part.swap(0, Ordering::Relaxed)).collect()
    }

    /// Looks before anything is sent. With `arming`, segments are made clean in `tracker` first, so
    /// that later looks show what was written since: which of them are hot is then known before
    /// their turn comes. Nothing is lost, as all are unsent. With much memory only what can be done
    /// in that time.
    pub(super) fn begin(
        &mut self,
        tracker: &dyn DirtyTracker,
        arming: Option<Duration>,
    ) -> Result<Look, EngineError> {
        let armed = arming.map_or(Ok(0), |time| self.arm(tracker, time))?;
        let (dirty, spent) = self.dirty(tracker)?;
        self.baseline[armed..].copy_from_slice(&dirty[armed..]);
        self.judge(dirty, spent)
    }

    /// Whether segment `number` had nothing but a hole when the migration began.
    fn was_hole(&self, number: usize) -> bool {
        self.data[number] == 0
    }

    /// Makes segments clean, from the first on; returns how many. Only while all are unsent.
    pub(super) fn arm(
        &self,
        tracker: &dyn DirtyTracker,
        time: Duration,
    ) -> Result<usize, TrackError> {
        let until = Instant::now() + time;
        tracker.begin_round();
        for (number, segment) in self.segments().filter(|(number, _)| !self.was_hole(*number)) {
            if Instant::now() >= until {
                return Ok(number);
            }
            tracker.harvest(segment.block, segment.run, PageCount::ZERO, &mut |_| {})?;
        }
        Ok(self.segments.len())
    }

    /// The segments with their numbers.
    pub(super) fn segments(&self) -> impl Iterator<Item = (usize, Segment)> {
        self.segments.iter().copied().enumerate()
    }

    /// Puts `delayed` in force, for segments that channels have yet to come to.
    pub(super) fn delay(&self, delayed: Delayed) {
        *self.delayed.lock().unwrap_or_else(PoisonError::into_inner) = delayed;
    }

    /// How many segments are to be left for later.
    pub(super) fn delayed(&self) -> usize {
        self.delayed.lock().unwrap_or_else(PoisonError::into_inner).count()
    }

    /// Ends this round as soon as may be, or no longer so.
    pub(super) fn hurry(&self, hurry: bool) {
        self.hurry.store(hurry, Ordering::Relaxed);
    }

    /// Whether this round is to end as soon as may be.
    pub(super) fn hurries(&self) -> bool {
        self.hurry.load(Ordering::Relaxed)
    }

    /// Whether segment `number` is to be left for later.
    pub(super) fn passes_by(&self, number: usize) -> bool {
        self.hurries()
            || self.delayed.lock().unwrap_or_else(PoisonError::into_inner).contains(number)
    }

    /// Whether all of segment `number` is still to be sent.
    pub(super) fn is_unsent(&self, number: usize) -> bool {
        self.unsent[number].load(Ordering::Relaxed)
    }

    /// Whether all segments that had data when the migration began have had their turn.
    pub(super) fn all_are_dealt_with(&self) -> bool {
        self.dealt_with.iter().all(|dealt_with| dealt_with.load(Ordering::Relaxed))
    }

    /// Segment `number` has had its turn.
    pub(super) fn mark_dealt_with(&self, number: usize) {
        self.dealt_with[number].store(true, Ordering::Relaxed);
    }

    /// Which of `holes`, segments in the order of their numbers that had nothing when they were
    /// last dealt with, have something now.
    ///
    /// What follows upon each other with nothing between that was sent is asked about at once, and
    /// again behind what is found: holes of whatever size cost one question, and a few steps for
    /// each segment.
    pub(super) fn touched(
        &self,
        holes: impl Iterator<Item = usize>,
    ) -> Result<Vec<usize>, MemoryError> {
        let (mut touched, mut own) = (Vec::new(), Vec::new());
        let mut holes = holes.peekable();
        while let Some(first) = holes.next() {
            let block = self.segments[first].block;
            let follows = |last: usize, next: usize| {
                self.segments[next].block == block
                    && (last + 1..next).all(|between| self.is_unsent(between))
            };
            let mut last = first;
            own.clear();
            own.push(first);
            while let Some(next) = holes.next_if(|next| follows(last, *next)) {
                last = next;
                own.push(next);
            }
            let (end, mut rest) = (self.segments[last].run.end().0, own.as_slice());
            while let [next, ..] = rest {
                let start = self.segments[*next].run.start.0;
                let data = self.blocks[block].first_data(PageRun::new(start, end - start))?;
                let Some(data) = data else { break };
                // Others may lie before it, and it may lie between two.
                let before = |number: &usize| self.segments[*number].run.end() <= data;
                rest = &rest[rest.partition_point(before)..];
                if let [found, behind @ ..] = rest
                    && self.segments[*found].run.start <= data
                {
                    touched.push(*found);
                    rest = behind;
                }
            }
        }
        Ok(touched)
    }

    /// Where block `block` had data when the migration began, as far as that is known. It may have
    /// got more since.
    pub(super) fn extents(&self, block: usize) -> &[PageRun] {
        &self.extents[block]
    }

    /// Segment `number` was sent whole.
    pub(super) fn mark_sent(&self, number: usize) {
        self.unsent[number].store(false, Ordering::Relaxed);
        self.mark_dealt_with(number);
    }

    /// So many pages of segment `number`, which was sent, are to be sent again though nobody wrote
    /// to them.
    pub(super) fn owes(&self, number: usize, pages: PageCount) {
        self.owed[number].store(pages.0 as u32, Ordering::Relaxed);
    }

    /// What is dirty and what remains now. Clears nothing.
    pub(super) fn look(&self, tracker: &dyn DirtyTracker) -> Result<Look, EngineError> {
        let (dirty, spent) = self.dirty(tracker)?;
        self.judge(dirty, spent)
    }

    /// With the guest stopped: looks at all segments at once, where the tracker lets that be done
    /// in parts. A look at each by its channel would be a system call for each, which takes longer
    /// than what it looks at where pages are huge. With at least as many threads as there are
    /// `channels`, but for little memory, for which it does not pay to start another.
    pub(super) fn look_for_the_last_time(
        &self,
        tracker: &dyn DirtyTracker,
        channels: usize,
    ) -> Result<(), TrackError> {
        if tracker.looks_in_parts() {
            let enough = (self.present / LAST_PART).max(1) as usize;
            let threads = self.threads.max(channels.min(processors())).min(enough);
            let note = |runs: &mut Vec<PageRun>, run| runs.push(run);
            let (runs, _) = self.each(tracker, threads, note)?;
            let _ = self.last.set(runs);
        }
        Ok(())
    }

    /// What is dirty in segment `number`, if it was looked at for the last time.
    pub(super) fn last(&self, number: usize) -> Option<&[PageRun]> {
        let runs = self.last.get().filter(|_| !self.is_untouched(number));
        runs.map(|runs| runs[number].as_slice())
    }

    /// Whether nothing is known of segment `number` but that it had nothing when the migration
    /// began: its tracker would report all of it.
    fn is_untouched(&self, number: usize) -> bool {
        self.is_unsent(number) && self.was_hole(number)
    }

    /// How long the last look takes, of which the threads together take `spent`, with so many
    /// `channels`.
    pub(super) fn last_look(&self, spent: Duration, channels: usize) -> Duration {
        spent / self.threads.max(channels.min(processors())).max(1) as u32
    }

    /// What `tracker` reports, by segment, and how long the threads were at it together.
    fn dirty(&self, tracker: &dyn DirtyTracker) -> Result<(Vec<u32>, Duration), TrackError> {
        let threads = if tracker.looks_in_parts() { self.threads } else { 1 };
        self.each(tracker, threads, |count: &mut u32, run| *count += run.count.0 as u32)
    }

    /// Has `note` take in the runs that `tracker` reports of each segment, cut at its ends, by so
    /// many `threads`. Returns also how long they were at it together.
    fn each<T: Clone + Default + Send>(
        &self,
        tracker: &dyn DirtyTracker,
        threads: usize,
        note: impl Fn(&mut T, PageRun) + Sync,
    ) -> Result<(Vec<T>, Duration), TrackError> {
        let mut all = vec![T::default(); self.segments.len()];
        let size = self.segments.len().div_ceil(threads).max(1);
        let parts = Mutex::new(all.chunks_mut(size).enumerate());
        let work = || {
            let began = Instant::now();
            loop {
                let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((number, own)) = next else { return Ok(began.elapsed()) };
                let first = number * size;
                self.part(tracker, first..first + own.len(), own, &note)?;
            }
        };
        let spent = std::thread::scope(|scope| {
            // A thread that cannot be had leaves its part to the others.
            let start = |_| Builder::new().name("look".to_owned()).spawn_scoped(scope, work);
            let others: Vec<_> = (1..threads).map_while(|number| start(number).ok()).collect();
            let mut spent: Result<Duration, TrackError> = work();
            for other in others {
                let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                spent = spent.and_then(|spent| Ok(spent + other?));
            }
            spent
        })?;
        Ok((all, spent))
    }

    /// The same for the segments `part`, in this thread. Nothing is said of those that have been
    /// untouched.
    fn part<T>(
        &self,
        tracker: &dyn DirtyTracker,
        part: Range<usize>,
        found: &mut [T],
        note: &impl Fn(&mut T, PageRun),
    ) -> Result<(), TrackError> {
        let (segments, number) = (&self.segments[part.clone()], part.start);
        let mut first = 0;
        while first < segments.len() {
            let block = segments[first].block;
            let follows =
                |at: &usize| segments[*at].block == block && !self.is_untouched(number + *at);
            let count = (first..segments.len()).take_while(follows).count();
            if count == 0 {
                first += 1;
                continue;
            }
            let own = &segments[first..first + count];
            let pages = own.iter().map(|segment| segment.run.count.0).sum();
            let (found, mut at) = (&mut found[first..first + count], 0);
            tracker.look(
                block,
                PageRun::new(own[0].run.start.0, pages),
                AsOf::Now,
                &mut |run| {
                    at = cut(run, own, at, |number, run| note(&mut found[number], run));
                },
            )?;
            first += count;
        }
        Ok(())
    }

    /// What was written and what remains, where `dirty` is reported.
    fn judge(&self, mut dirty: Vec<u32>, spent: Duration) -> Result<Look, EngineError> {
        self.correct(&mut dirty)?;
        let mut remaining = 0;
        for (number, dirty) in dirty.iter().enumerate() {
            let unsent = if self.is_unsent(number) { self.data[number] } else { 0 };
            let owed = self.owed[number].load(Ordering::Relaxed);
            remaining += u64::from(unsent.max(*dirty)) + u64::from(owed);
        }
        Ok(Look { dirty, remaining: PageCount(remaining), spent })
    }

    /// Corrects what is reported of unsent segments: nothing of what was there before; and of those
    /// that were holes what their file has now, as their pages were never made clean.
    fn correct(&self, dirty: &mut [u32]) -> Result<(), MemoryError> {
        let mut at = 0;
        while at < self.segments.len() {
            let (first, block) = (at, self.segments[at].block);
            // As many at once as follow upon each other: a hole of any size is one call.
            while at < self.segments.len()
                && self.segments[at].block == block
                && self.is_untouched(at)
            {
                dirty[at] = 0;
                at += 1;
            }
            if at == first {
                if self.is_unsent(at) {
                    dirty[at] = dirty[at].saturating_sub(self.baseline[at]);
                }
                at += 1;
                continue;
            }
            let own = &self.segments[first..at];
            let (start, end) = (own[0].run.start.0, own[own.len() - 1].run.end().0);
            let mut next = 0;
            for data in
                self.blocks[block].data(PageRun::new(start, end - start), &mut DataHint::default())
            {
                next = spread(data?, own, next, &mut dirty[first..at]);
            }
        }
        Ok(())
    }
}

/// Adds the pages of `run` to the `counts` of the segments `own` that they are in, from the one at
/// `at` on; returns the one it ends in. Runs come in order and may go over the ends of segments.
fn spread(run: PageRun, own: &[Segment], at: usize, counts: &mut [u32]) -> usize {
    cut(run, own, at, |number, run| counts[number] += run.count.0 as u32)
}

/// Cuts `run` at the ends of the segments `own`, as [`spread`] does.
fn cut(
    run: PageRun,
    own: &[Segment],
    mut at: usize,
    mut found: impl FnMut(usize, PageRun),
) -> usize {
    let mut start = run.start.0;
    while start < run.end().0 && at < own.len() {
        let end = own[at].run.end().0.min(run.end().0);
        if start < end {
            found(at, PageRun::new(start, end - start));
            start = end;
        }
        if start >= own[at].run.end().0 {
            at += 1;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use godwit_units::PageIndex;

    use super::*;

    /// A tracker that says what it is told to.
    struct Told(Mutex<Vec<(usize, PageRun)>>);

    impl DirtyTracker for Told {
        fn harvest(
            &self,
            block: usize,
            within: PageRun,
            _: PageCount,
            _: &mut dyn FnMut(PageRun),
        ) -> Result<PageIndex, TrackError> {
            let inside = |run: &PageRun| run.start < within.end() && within.start < run.end();
            self.0.lock().unwrap().retain(|(of, run)| *of != block || !inside(run));
            Ok(within.end())
        }

        fn look(
            &self,
            block: usize,
            within: PageRun,
            _: AsOf,
            found: &mut dyn FnMut(PageRun),
        ) -> Result<(), TrackError> {
            let told = self.0.lock().unwrap();
            let own = told.iter().filter(|(of, _)| *of == block);
            own.filter_map(|(_, run)| run.intersect(within)).for_each(found);
            Ok(())
        }

        fn looks_in_parts(&self) -> bool {
            true
        }
    }

    /// Four segments, all of them holes.
    fn holes() -> SegmentTable {
        let block = |name, pages| RamBlock::anonymous(name, PageCount(pages)).unwrap();
        SegmentTable::new(Arc::new(vec![block("a", 2 * SEGMENT_PAGES + 10), block("b", 5)]))
            .unwrap()
    }

    fn touch(table: &SegmentTable, block: usize, page: u64) {
        table.blocks[block].write(PageIndex(page), &[1; 4096]).unwrap();
    }

    /// The same with a page of data in each.
    fn table() -> SegmentTable {
        let table = holes();
        table.segments().for_each(|(_, segment)| touch(&table, segment.block, segment.run.start.0));
        SegmentTable::new(table.blocks).unwrap()
    }

    #[test]
    fn all_are_dealt_with_when_those_with_data_were_sent_or_are_holes_by_then() {
        assert!(holes().all_are_dealt_with());
        let table = table();
        (0..3).for_each(|number| table.mark_sent(number));
        assert!(!table.all_are_dealt_with());
        table.mark_dealt_with(3);
        assert!(table.all_are_dealt_with() && table.is_unsent(3));
    }

    #[test]
    fn runs_are_counted_by_segment() {
        let table = table();
        let tracker = Told(Mutex::new(vec![
            (0, PageRun::new(3, 2)),
            (0, PageRun::new(SEGMENT_PAGES - 1, SEGMENT_PAGES + 3)),
            (1, PageRun::new(4, 1)),
        ]));
        let look = table.look(&tracker).unwrap();
        assert_eq!(look.dirty, [3, SEGMENT_PAGES as u32, 2, 1]);
        // Little data: unsent segments remain as far as they were written.
        assert_eq!(look.remaining, PageCount(SEGMENT_PAGES + 6));
    }

    #[test]
    fn a_tracker_that_starts_with_everything_dirty_says_nothing_of_unsent_segments() {
        let mut table = table();
        let tracker = Told(Mutex::new(vec![(0, PageRun::new(0, 2 * SEGMENT_PAGES + 10))]));
        assert_eq!(table.begin(&tracker, None).unwrap().dirty, [0, 0, 0, 0]);
        assert_eq!(table.look(&tracker).unwrap().dirty, [0, 0, 0, 0]);
        table.mark_sent(1);
        let look = table.look(&tracker).unwrap();
        assert_eq!(look.dirty, [0, SEGMENT_PAGES as u32, 0, 0]);
        assert_eq!(look.remaining, PageCount(SEGMENT_PAGES + 3));
    }

    #[test]
    fn what_was_never_touched_is_known_by_its_file_and_left_alone() {
        let mut table = holes();
        touch(&table, 0, SEGMENT_PAGES + 7);
        let whole = [(0, PageRun::new(0, 2 * SEGMENT_PAGES + 10)), (1, PageRun::new(0, 5))];
        let tracker = Told(Mutex::new(whole.to_vec()));
        let began = table.begin(&tracker, Some(Duration::from_secs(60))).unwrap();
        assert_eq!(*tracker.0.lock().unwrap(), whole, "it was harvested");
        // What was touched before this look and after the segment table was made counts as well.
        assert_eq!((began.dirty, began.remaining), (vec![0, 1, 0, 0], PageCount(1)));
        for (block, page) in [(0, SEGMENT_PAGES - 1), (0, SEGMENT_PAGES), (1, 4)] {
            touch(&table, block, page);
        }
        let look = table.look(&tracker).unwrap();
        assert_eq!((look.dirty, look.remaining), (vec![1, 2, 0, 1], PageCount(4)));
        table.mark_sent(1);
        let look = table.look(&tracker).unwrap();
        assert_eq!(look.dirty, [1, SEGMENT_PAGES as u32, 0, 1]);
    }

    #[test]
    fn holes_that_were_touched_are_found_wherever_they_lie_among_others() {
        // Mutations: a stretch ends at its first hole; what lies between two is not looked at; a
        // stretch goes over what was sent, or from one block into the next.
        let block = |name, pages| RamBlock::anonymous(name, PageCount(pages)).unwrap();
        let blocks = vec![block("a", 9 * SEGMENT_PAGES), block("b", 2 * SEGMENT_PAGES)];
        let table = SegmentTable::new(Arc::new(blocks)).unwrap();
        let touched = |holes: &[usize]| table.touched(holes.iter().copied()).unwrap();
        // Those of one channel of two.
        let own = [0, 2, 4, 6, 8, 10];
        assert_eq!((touched(&own), touched(&[])), (vec![], vec![]));
        touch(&table, 0, 4 * SEGMENT_PAGES + 7);
        assert_eq!(touched(&own), [4]);
        // Another channel's, and the last page of one of this one's.
        touch(&table, 0, 5 * SEGMENT_PAGES);
        touch(&table, 0, 7 * SEGMENT_PAGES - 1);
        assert_eq!(touched(&own), [4, 6]);
        table.mark_sent(5);
        assert_eq!(touched(&own), [4, 6]);
        assert!(touched(&[0, 2, 8, 10]).is_empty());
        touch(&table, 1, 2 * SEGMENT_PAGES - 1);
        assert_eq!(touched(&[0, 2, 10]), [10]);
        // More than one in a row, at once.
        for page in SEGMENT_PAGES - 1..2 * SEGMENT_PAGES + 1 {
            touch(&table, 0, page);
        }
        assert_eq!(touched(&[0, 1, 2, 3]), [0, 1, 2]);
        assert_eq!(touched(&[0, 2]), [0, 2]);
        assert_eq!(touched(&[2]), [2]);
    }

    #[test]
    fn of_armed_segments_it_says_what_was_written_since() {
        let mut table = table();
        let tracker = Told(Mutex::new(vec![(0, PageRun::new(0, 2 * SEGMENT_PAGES + 10))]));
        assert_eq!(
            table.begin(&tracker, Some(Duration::from_secs(60))).unwrap().dirty,
            [0, 0, 0, 0]
        );
        *tracker.0.lock().unwrap() = vec![(0, PageRun::new(7, 3))];
        assert_eq!(table.look(&tracker).unwrap().dirty, [3, 0, 0, 0]);
        // Out of time at once: all is as it was.
        assert_eq!(table.begin(&tracker, Some(Duration::ZERO)).unwrap().dirty, [0, 0, 0, 0]);
        assert_eq!(table.look(&tracker).unwrap().dirty, [0, 0, 0, 0]);
    }

    #[test]
    fn many_threads_see_what_one_sees() {
        let mut table = table();
        let told = vec![
            (0, PageRun::new(3, 2)),
            (0, PageRun::new(SEGMENT_PAGES - 1, SEGMENT_PAGES + 3)),
            (1, PageRun::new(4, 1)),
        ];
        let tracker = Told(Mutex::new(told));
        let alone = table.look(&tracker).unwrap().dirty;
        for threads in 2..6 {
            table.threads = threads;
            assert_eq!(table.look(&tracker).unwrap().dirty, alone, "{threads} threads");
        }
    }

    #[test]
    fn the_last_look_sees_all_by_as_many_threads_as_there_are_channels() {
        let told = vec![(0, PageRun::new(SEGMENT_PAGES - 1, SEGMENT_PAGES + 3))];
        for (threads, channels, present) in [(1, 1, 0), (1, 3, 0), (1, 3, 3 * LAST_PART), (4, 2, 0)]
        {
            let mut table = table();
            (table.threads, table.present) = (threads, present);
            table.look_for_the_last_time(&Told(Mutex::new(told.clone())), channels).unwrap();
            assert_eq!(table.last(0), Some(&[PageRun::new(SEGMENT_PAGES - 1, 1)][..]));
            assert_eq!(table.last(1), Some(&[PageRun::new(SEGMENT_PAGES, SEGMENT_PAGES)][..]));
            assert_eq!(table.last(2), Some(&[PageRun::new(2 * SEGMENT_PAGES, 2)][..]));
            assert_eq!(table.last(3), Some(&[][..]));
        }
    }

    #[test]
    fn delays_and_hurry() {
        let table = table();
        assert!(!table.passes_by(1));
        table.delay(Delayed::new([1]));
        assert!(table.passes_by(1) && !table.passes_by(2));
        table.hurry(true);
        assert!(table.passes_by(2));
        table.hurry(false);
        table.delay(Delayed::default());
        assert!(!table.passes_by(1));
    }
}
