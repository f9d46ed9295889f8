//! A data channel at the source: one thread that harvests, reads and sends segments: its own, and
//! where the destination takes them over any channel, those that others have not come to yet.
//!
//! Over a long way what it sends goes over whichever connection takes it.
//!
//! Invariant: a page's dirty bit is harvested before its bytes are read, and both happen in the one
//! thread that deals with its segment in this round. So what is sent is never older than the
//! harvest, and what is written later is found by the next one. In the last round nobody writes any
//! more, and the bits are only read.
//!
//! What is harvested or put into a frame is remembered until the round is acknowledged. When the
//! connections are lost, the destination says how many frames of each it has placed, and what is
//! remembered of segments with a later one is owed to it again ([`Owned::take_back`]).

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use godwit_balloon::FreeHints;
use godwit_bitmap::DirtyBitmap;
use godwit_codec::is_zero;
use godwit_fingerprints::{Key, PageFingerprints};
use godwit_memory::{DataHint, FIRST_HARVEST, NEXT_HARVEST, RamBlock, Segment};
use godwit_track::{AsOf, DirtyTracker};
use godwit_units::{PageCount, PageIndex, PageRun};
use godwit_wire::Content;

use super::frame_sender::{FrameSender, RoundStatistics};
use super::link_share::LinkShare;
use super::owned::{Owned, Pages};
use super::segment_table::SegmentTable;
use super::session::Event;
use super::slips::Slips;
use super::turns::Turns;
use crate::EngineError;

/// Pages read at once, at the most: 64 KiB, which are still in the core's own caches when they are
/// looked at.
const READ_LIMIT: u64 = 16;

/// What a round is to do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) round: u32,
    /// The guest is stopped: no segment is left for later, and what is dirty need not be protected
    /// again, which would flush the TLBs of its processors for each 2 MiB with a dirty page.
    pub(super) last: bool,
    /// Find pages that were sent and have become holes since.
    pub(super) find_holes: bool,
    /// Send nothing, and put down what would be sent: it follows when the guest runs at the
    /// destination.
    pub(super) leave: bool,
}

/// What all channels of memory share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) tracker: Arc<dyn DirtyTracker>,
    pub(super) blocks: Arc<Vec<RamBlock>>,
    pub(super) table: Arc<SegmentTable>,
    /// What the guest says is free.
    pub(super) free: Option<Arc<FreeHints>>,
    /// Where memory waits while disks have the link.
    pub(super) link_share: Arc<LinkShare>,
    /// Where what was sent is remembered, and the key of its fingerprints.
    pub(super) fingerprints: Option<(PageFingerprints, Key)>,
    /// Where the digest of what was sent of each segment is told in the last round, by its number,
    /// if that is wanted.
    pub(super) digests: Option<Arc<Mutex<Vec<u128>>>>,
    /// Where segments are put behind the last round, for an audit, and since when things are
    /// remembered for it.
    pub(super) audit: Option<(Arc<Mutex<Vec<Owned>>>, Instant)>,
    /// Where what is not sent in the last round is put down, by block.
    pub(super) left: Arc<Mutex<Vec<DirtyBitmap>>>,
    /// What is got wrong on purpose.
    pub(super) slips: Slips,
}

pub(super) struct Channel {
    sender: FrameSender,
    shared: Shared,
    /// What it and the others have yet to come to in a round.
    turns: Arc<Turns<Owned>>,
    /// Its own, in the order of their numbers; within a round those that it is done with.
    segments: Vec<Owned>,
    /// Its own that were named as holes and not sent since, by number: between rounds all of these,
    /// and within one those of which nothing was touched.
    holes: BTreeMap<usize, Owned>,
    /// The number of the segment to begin with: where the last pass was cut short.
    first: usize,
    dirty: Vec<PageRun>,
    /// Where data was seen to be in this round, and in which block.
    hint: DataHint,
    hint_block: usize,
    /// The round, and whether the guest is stopped.
    round: u32,
    last: bool,
}

impl Channel {
    /// A channel that begins with these `segments`, in the order of their numbers.
    pub(super) fn new(
        sender: FrameSender,
        (shared, turns): (Shared, &Arc<Turns<Owned>>),
        segments: Vec<Owned>,
    ) -> Self {
        Self {
            sender,
            turns: Arc::clone(turns),
            segments,
            holes: BTreeMap::new(),
            first: 0,
            shared,
            dirty: Vec::new(),
            hint: DataHint::default(),
            hint_block: 0,
            round: 0,
            last: false,
        }
    }

    /// Ends the channel. The destination has `placed` so many frames of each: its segments, with
    /// what has not arrived taken back, and how many pages of that had been read and sent.
    pub(super) fn take_back(mut self, placed: &[u64]) -> (Vec<Owned>, PageCount) {
        let table = Arc::clone(&self.shared.table);
        let sent = self.all_mut().map(|owned| owned.take_back(placed, &table)).sum();
        (self.into_segments(), sent)
    }

    /// Its segments, in no order, when it has ended.
    pub(super) fn into_segments(self) -> Vec<Owned> {
        self.segments.into_iter().chain(self.holes.into_values()).collect()
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Owned> {
        self.segments.iter_mut().chain(self.holes.values_mut())
    }

    /// What sends over its connection, when it has ended.
    pub(super) fn into_sender(self) -> FrameSender {
        self.sender
    }

    /// What it shares with the others.
    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// What was done in the round so far.
    pub(super) fn statistics(&self) -> RoundStatistics {
        self.sender.statistics()
    }

    /// Carries out orders until there are no more, or one fails.
    pub(super) fn run(mut self, orders: &Receiver<Order>, events: &Sender<Event>) -> Self {
        for order in orders {
            let result = self.round(order);
            let failed = result.is_err();
            // A receiver that is gone has no use for the result.
            let _ = events.send(Event::RoundStatistics { round: order.round, result });
            if failed {
                break;
            }
            // What does not change from here on need not be looked at while the guest stands still.
            self.digests().for_each(drop);
        }
        self
    }

    fn round(&mut self, order: Order) -> Result<RoundStatistics, EngineError> {
        self.hint = DataHint::default();
        (self.round, self.last) = (order.round, order.last);
        self.sender.begin();
        self.segments(order)?;
        self.sender.flush()?;
        // Others may have put something on this connection until now.
        if self.sender.shares_connections() && !self.turns.all_are_done(|| self.sender.is_stopped())
        {
            return Err(EngineError::Interrupted);
        }
        self.sender.barrier(order.round, order.last)?;
        if order.last {
            self.tell_digests();
            if let Some((kept, _)) = &self.shared.audit {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.append(&mut self.segments);
                kept.extend(std::mem::take(&mut self.holes).into_values());
            }
        }
        Ok(self.sender.statistics())
    }

    /// The digests of what was sent of its segments, with their numbers; none where nobody wants
    /// them.
    fn digests(&mut self) -> impl Iterator<Item = (usize, u128)> {
        let key = self.shared.fingerprints.as_ref().map(|(_, key)| *key);
        let key = key.filter(|_| self.shared.digests.is_some());
        self.all_mut().filter_map(move |owned| {
            let digest = owned.fingerprints.as_mut()?.digest_of_all(key.as_ref()?);
            Some((owned.number, digest))
        })
    }

    fn tell_digests(&mut self) {
        let Some(told) = self.shared.digests.clone() else { return };
        let own: Vec<_> = self.digests().collect();
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        own.into_iter().for_each(|(number, digest)| told[number] = digest);
    }

    /// Deals with all segments but those that are to be left for later; at the end of the round
    /// with those that no longer are. A pass that disks cut short goes on where it was cut.
    fn segments(&mut self, order: Order) -> Result<(), EngineError> {
        self.take_up_touched()?;
        let mut own = std::mem::take(&mut self.segments);
        if order.leave {
            let result = own.iter_mut().try_for_each(|owned| self.leave(owned));
            self.segments = own;
            return result;
        }
        let first = std::mem::take(&mut self.first);
        let at = own.partition_point(|owned| owned.number < first);
        own.rotate_left(at);
        self.turns.add(self.sender.number(), own);
        let mut left = Vec::new();
        let mut result = self.pass(order, &mut left);
        let rest = self.turns.take_back(self.sender.number());
        if let Some(next) = rest.front() {
            self.first = next.number;
        } else if result.is_ok() {
            result = self.deal_with(&mut left, order);
        }
        self.segments.extend(left.into_iter().chain(rest));
        self.segments.sort_unstable_by_key(Owned::number);
        let table = Arc::clone(&self.shared.table);
        let holes = self.segments.extract_if(.., |it| it.named && table.is_unsent(it.number));
        self.holes.extend(holes.map(|owned| (owned.number, owned)));
        result
    }

    /// What was named as a hole and has been touched since is dealt with again.
    fn take_up_touched(&mut self) -> Result<(), EngineError> {
        let touched = self.shared.table.touched(self.holes.keys().copied())?;
        let taken_up = touched.iter().filter_map(|number| self.holes.remove(number));
        self.segments.extend(taken_up);
        if !touched.is_empty() {
            self.segments.sort_unstable_by_key(Owned::number);
        }
        Ok(())
    }

    /// Deals with whatever comes to its turn; what is to be left for later goes to `left`.
    fn pass(&mut self, order: Order, left: &mut Vec<Owned>) -> Result<(), EngineError> {
        let (table, link_share) =
            (Arc::clone(&self.shared.table), Arc::clone(&self.shared.link_share));
        let mut last = 0;
        while let Some(mut owned) = self.turns.next(self.sender.number()) {
            if !order.last && !link_share.opens(|| table.hurries()) {
                self.turns.put_back(self.sender.number(), owned);
                break;
            }
            let Owned { number, segment, named, .. } = owned;
            // What is known of where data is, is of what lies ahead.
            if std::mem::replace(&mut last, number) > number {
                self.hint = DataHint::default();
            }
            owned.comes_to(self.sender.number(), order.round);
            if order.last && !order.find_holes && self.is_settled(&owned) {
                self.segments.push(owned);
                continue;
            }
            // Nothing is gained by leaving for later what is not there and was not named yet.
            let passes_by = !order.last && table.passes_by(number);
            let leave = match passes_by && !named && table.is_unsent(number) {
                true => self.is_hole(segment).map(|is_hole| !is_hole),
                false => Ok(passes_by),
            };
            let dealt_with = match leave {
                Ok(true) => {
                    left.push(owned);
                    continue;
                }
                Ok(false) => self.segment(&mut owned, order),
                Err(error) => Err(error),
            };
            self.segments.push(owned);
            dealt_with?;
        }
        Ok(())
    }

    /// Whether all were looked at for the last time, and of this one there is nothing to be sent.
    fn is_settled(&self, owned: &Owned) -> bool {
        let table = &self.shared.table;
        let is_clean = || table.last(owned.number).is_some_and(<[PageRun]>::is_empty);
        let none = |pages: &Pages| pages.count() == PageCount::ZERO;
        !table.is_unsent(owned.number)
            && is_clean()
            && none(&owned.owed)
            && owned.recent.as_ref().is_none_or(none)
    }

    /// Deals with those of `left` that are to be left for later no longer.
    fn deal_with(&mut self, left: &mut [Owned], order: Order) -> Result<(), EngineError> {
        let (table, link_share) =
            (Arc::clone(&self.shared.table), Arc::clone(&self.shared.link_share));
        for owned in left {
            if !table.passes_by(owned.number) && link_share.opens(|| table.hurries()) {
                self.segment(owned, order)?;
            }
        }
        Ok(())
    }

    /// Puts down what the destination does not have of a segment, with the guest stopped.
    fn leave(&mut self, owned: &mut Owned) -> Result<(), EngineError> {
        let Segment { block, run } = owned.segment;
        let mut left = DirtyBitmap::new(run.count);
        if self.shared.table.is_unsent(owned.number) {
            // One that was never touched, and named as zero, is that there.
            if !(owned.named && self.is_hole(owned.segment)?) {
                left.set_all();
            }
        } else {
            let mut note = |written: PageRun| {
                left.set(PageRun::new(written.start.0 - run.start.0, written.count.0));
            };
            match self.shared.table.last(owned.number) {
                Some(found) => found.iter().filter_map(|it| it.intersect(run)).for_each(note),
                None => self.shared.tracker.look(block, run, AsOf::Round, &mut note)?,
            }
            owned.owed.add_to(&mut left);
            // Data may have landed there since.
            if let Some(recent) = &owned.recent {
                recent.add_to(&mut left);
            }
        }
        let pages = PageRun::new(0, run.count.0);
        let mut told = self.shared.left.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(told) = told.get_mut(block) {
            told.merge(run.start, &left, pages);
        }
        Ok(())
    }

    fn segment(&mut self, owned: &mut Owned, order: Order) -> Result<(), EngineError> {
        let before = self.sender.statistics();
        owned.carried = None;
        // What is sent first must not come last: each page goes into one frame, or all over one
        // connection. Of new holes `discard_holes` knows.
        let again = owned.recent.is_some() || owned.owed.count() > PageCount::ZERO;
        self.sender.spread(!again);
        self.copy_segment(owned, order)?;
        owned.carried = Some(self.sender.carried()?);
        self.sender.pace();
        let after = self.sender.statistics();
        self.shared.link_share.memory_sent(after.sent - before.sent);
        self.shared.table.sent(owned.number, after.data - before.data);
        Ok(())
    }

    fn copy_segment(&mut self, owned: &mut Owned, order: Order) -> Result<(), EngineError> {
        let Segment { block, run } = owned.segment;
        self.at_block(block);
        let everything = self.shared.table.is_unsent(owned.number);
        if everything && self.is_hole(owned.segment)? {
            return self.name_hole(owned);
        }
        if order.find_holes {
            self.discard_holes(owned)?;
        }
        // Asked for before the harvest, and given once: for a segment that was put off half-way
        // there is nothing any more.
        let mut free = self.shared.free.as_ref().and_then(|hints| hints.take(owned.number));
        let recheck = owned.recent.as_mut().map(std::mem::take);
        // From here on it is not known elsewhere that these are to be sent.
        let owed = std::mem::take(&mut owned.owed);
        owned.unacknowledged.union(&owed);
        if let Some(recheck) = &recheck {
            owned.unacknowledged.union(recheck);
        }
        if everything {
            owned.remember(run);
        }
        let mut at = run.start;
        while at < run.end() {
            if order.round == 0 && !order.last && self.shared.table.passes_by(owned.number) {
                // It was found to be hot while it was sent. It stays unsent, and is sent whole when
                // it has its turn.
                return Ok(());
            }
            let mut rest = PageRun::new(at.0, run.end().0 - at.0);
            if everything {
                // Where all is dirty, ask for no more than is taken: under KVM the scan tells the
                // guest's second page tables of the whole range it was given.
                rest.count = rest.count.min(FIRST_HARVEST);
            }
            let mut dirty = std::mem::take(&mut self.dirty);
            dirty.clear();
            let mut note = |run| dirty.push(run);
            let next = if order.last {
                match self.shared.table.last(owned.number) {
                    Some(found) => {
                        found.iter().filter_map(|run| run.intersect(rest)).for_each(note)
                    }
                    None => self.shared.tracker.look(block, rest, AsOf::Round, &mut note)?,
                }
                rest.end()
            } else {
                self.shared.tracker.harvest(block, rest, NEXT_HARVEST, &mut note)?
            };
            dirty.iter().for_each(|harvested| owned.remember(*harvested));
            if let Some(history) = &mut owned.history {
                dirty.iter().for_each(|harvested| history.reported(*harvested, order.round));
            }
            if let Some(recent) = &mut owned.recent {
                dirty.iter().for_each(|harvested| {
                    let within = PageRun::new(harvested.start.0 - run.start.0, harvested.count.0);
                    recent.set(within, run.count);
                });
            }
            if let Some(hints) = &self.shared.free {
                // What is written is free no more, whatever is done about it from here on.
                for written in &dirty {
                    self.shared.slips.written(block, *written, hints);
                    hints.unskip(block, *written);
                }
            }
            if let Some(free) = &mut free {
                // Written since the guest was asked: perhaps when it was free no more.
                dirty.iter().for_each(|written| {
                    free.clear(PageRun::new(written.start.0 - run.start.0, written.count.0));
                });
            }
            if everything {
                self.send_all(owned, PageRun::new(at.0, next.0 - at.0), free.as_ref())?;
            } else {
                for run in &dirty {
                    self.send(owned, *run)?;
                }
            }
            self.dirty = dirty;
            at = next;
        }
        // What was in flight when these were harvested has landed by now: the machine was drained
        // since. What did not change is not sent.
        for again in recheck.iter().chain([&owed]).flat_map(Pages::runs) {
            self.send(owned, PageRun::new(run.start.0 + again.start.0, again.count.0))?;
        }
        self.shared.table.owes(owned.number, PageCount::ZERO);
        self.shared.table.mark_sent(owned.number);
        Ok(())
    }

    /// What is known of where data is, is of the block that was last looked at.
    fn at_block(&mut self, block: usize) {
        if self.hint_block != block {
            (self.hint, self.hint_block) = (DataHint::default(), block);
        }
    }

    /// Whether nothing of `segment` was ever touched.
    fn is_hole(&mut self, segment: Segment) -> Result<bool, EngineError> {
        self.at_block(segment.block);
        let known = self.shared.table.extents(segment.block);
        let data =
            self.shared.blocks[segment.block].data_known(segment.run, &mut self.hint, known).next();
        Ok(data.transpose()?.is_none())
    }

    /// Deals with a segment that was never touched. It stays unsent, and is not harvested:
    /// protecting it would fill page tables for memory that is not there (8 bytes for each page),
    /// and each look would go through them. What is touched later is data, and is sent with all of
    /// its segment; when the guest is stopped, nothing is touched any more.
    fn name_hole(&mut self, owned: &mut Owned) -> Result<(), EngineError> {
        self.shared.table.mark_dealt_with(owned.number);
        if !std::mem::replace(&mut owned.named, true) {
            // The fingerprints are not kept: they would take memory for each page. Those of pages
            // that were sent before the segment was put off and discarded are of what the
            // destination no longer has.
            if let Some(fingerprints) = &mut owned.fingerprints {
                fingerprints.forget(owned.segment.run);
            }
            self.frame_for(owned)?;
            self.sender.zero(owned.segment.run);
        }
        Ok(())
    }

    /// Sends the data of `run` and names its holes, and what of it is `free`.
    fn send_all(
        &mut self,
        owned: &mut Owned,
        run: PageRun,
        free: Option<&DirtyBitmap>,
    ) -> Result<(), EngineError> {
        let (blocks, table) = (Arc::clone(&self.shared.blocks), Arc::clone(&self.shared.table));
        let block = owned.segment.block;
        let mut at = run.start;
        let mut hint = self.hint;
        for data in blocks[block].data_known(run, &mut hint, table.extents(block)) {
            let data = data?;
            self.send_zero(owned, at, data.start, false)?;
            self.send_unless_free(owned, data, free)?;
            at = data.end();
        }
        self.hint = hint;
        self.send_zero(owned, at, run.end(), false)
    }

    /// Sends `run`; but what of it is `free` is named as zero.
    fn send_unless_free(
        &mut self,
        owned: &mut Owned,
        run: PageRun,
        free: Option<&DirtyBitmap>,
    ) -> Result<(), EngineError> {
        let first = owned.segment.run.start.0;
        let mut at = run.start;
        let next = |at: PageIndex| {
            let free = free?.next_run(PageIndex(at.0 - first))?;
            PageRun::new(free.start.0 + first, free.count.0).intersect(run)
        };
        while let Some(skipped) = next(at) {
            if at < skipped.start {
                self.send(owned, PageRun::new(at.0, skipped.start.0 - at.0))?;
            }
            self.skip(owned, skipped)?;
            at = skipped.end();
        }
        if at < run.end() {
            self.send(owned, PageRun::new(at.0, run.end().0 - at.0))
        } else {
            Ok(())
        }
    }

    fn skip(&mut self, owned: &mut Owned, run: PageRun) -> Result<(), EngineError> {
        if let Some(hints) = &self.shared.free {
            hints.skip(owned.segment.block, run);
        }
        self.sender.count_hinted(run.count);
        self.send_zero(owned, run.start, run.end(), true)
    }

    fn send_zero(
        &mut self,
        owned: &mut Owned,
        start: PageIndex,
        end: PageIndex,
        free: bool,
    ) -> Result<(), EngineError> {
        if start < end {
            self.frame_for(owned)?;
            let run = PageRun::new(start.0, end.0 - start.0);
            self.sender.zero(run);
            if let (Some(fingerprints), Some((_, key))) =
                (&mut owned.fingerprints, &self.shared.fingerprints)
            {
                fingerprints.record_run(run, key.zero());
                if let Some(history) = &mut owned.history {
                    let of = (self.round, self.sender.building());
                    history.sent(run, key.zero(), of, free);
                }
            }
        }
        Ok(())
    }

    /// Reads and sends the pages of `run`; but not those whose fingerprints say that they are at
    /// the destination as they are.
    fn send(&mut self, owned: &mut Owned, run: PageRun) -> Result<(), EngineError> {
        let blocks = Arc::clone(&self.shared.blocks);
        let block = owned.segment.block;
        if let Some(hints) = &self.shared.free {
            hints.unskip(block, run);
        }
        let (slips, last, round) = (self.shared.slips.clone(), self.last, self.round);
        let mut at = run.start.0;
        while at < run.end().0 {
            self.frame_for(owned)?;
            let count = (run.end().0 - at).min(self.sender.room() as u64).min(READ_LIMIT);
            let part = PageRun::new(at, count);
            let history = &mut owned.history;
            let frame = history.as_ref().map_or(0, |_| self.sender.building());
            let mut fingerprints =
                owned.fingerprints.as_mut().zip(self.shared.fingerprints.as_ref());
            let judge = |page: PageIndex, bytes: &[u8]| {
                let zero = is_zero(bytes);
                if let Some((fingerprints, (_, key))) = &mut fingerprints {
                    let print = if zero { key.zero() } else { key.page(bytes) };
                    let changed = || fingerprints.print(page) != Some(print);
                    let slips = slips.believes((block, page))
                        || (last && slips.skips((block, page), bytes, changed));
                    if slips {
                        return None;
                    }
                    if !fingerprints.update(page, print) {
                        if let Some(history) = history {
                            history.unchanged(page.0, round);
                        }
                        return None;
                    }
                    if let Some(history) = history {
                        history.sent(PageRun::new(page.0, 1), print, (round, frame), false);
                    }
                }
                Some(if zero { Content::Zero } else { Content::Data })
            };
            self.sender.add(part, |bytes| blocks[block].read(part.start, bytes), judge)?;
            // Zero pages among them do no harm: to zero a page twice is to zero it.
            owned.held.set(owned.within(part), owned.segment.run.count);
            at += count;
        }
        Ok(())
    }

    /// Names the pages that the destination holds and that have become holes: discarded by a
    /// balloon, which is no write and so not harvested. A hole that is written meanwhile is found
    /// by the harvest that follows, or a later one.
    fn discard_holes(&mut self, owned: &mut Owned) -> Result<(), EngineError> {
        let Segment { block, run } = owned.segment;
        let blocks = Arc::clone(&self.shared.blocks);
        let mut holes = DirtyBitmap::new(run.count);
        owned.held.add_to(&mut holes);
        let mut hint = self.hint;
        for data in blocks[block].data(run, &mut hint) {
            let data = data?;
            holes.clear(PageRun::new(data.start.0 - run.start.0, data.count.0));
        }
        self.hint = hint;
        for hole in holes.runs() {
            // Where it is written meanwhile its data follows, over the same connection.
            self.sender.spread(false);
            owned.held.clear(hole);
            owned.unacknowledged.set(hole, run.count);
            let start = run.start.0 + hole.start.0;
            let end = PageIndex(start + hole.count.0);
            self.send_zero(owned, PageIndex(start), end, false)?;
        }
        Ok(())
    }

    /// Makes sure that the frame being built is for the block of `owned` and has room.
    fn frame_for(&mut self, owned: &Owned) -> Result<(), EngineError> {
        self.sender.frame_for(owned.segment.block as u32, owned.number, 1).map(drop)
    }
}
