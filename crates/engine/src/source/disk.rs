//! The channel of a disk at the source: one thread that asks for what is dirty, reads ahead and
//! sends.
//!
//! Invariant: a pass is taken to its end, also one that was cut short because the operator wants to
//! switch over, or because the connections were lost. It is then finished, at the latest with the
//! guest stopped, before the pass over what the guest has written since it began. So nothing is
//! lost, and no older version of a page is sent after a newer one.
//!
//! What is put into frames is remembered until the round is acknowledged. What the destination has
//! not placed when the connections are lost is read once more, in the pass that is finished or in
//! the next one: what has been written there since is dirty in the one behind that.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_codec::is_zero;
use godwit_disk::{Content as OnDisk, DiskRound, Extent};
use godwit_memory::SEGMENT_PAGES;
use godwit_units::{ByteCount, PageCount, PageRun};
use godwit_wire::{Content, FRAME_PAGES};

use super::disk_sent::DiskSent;
use super::frame_sender::{DiskStatistics, FrameSender};
use super::link_share::LinkShare;
use super::segment_table::SegmentTable;
use super::session::Event;
use super::slips::Slips;
use crate::EngineError;
use crate::disk_prints::{Held, Same};

/// Pages of zeros named at once, at the most: 1 TiB, which the run table holds.
const ZERO_LIMIT: u64 = 1 << 28;

/// What is to be done.
pub(super) enum DiskOrder {
    /// Make a pass, and end the round.
    Pass {
        /// The round.
        round: u32,
        /// The guest is stopped: the pass is not cut short.
        last: bool,
        /// What is dirty.
        pass: Box<dyn DiskRound>,
    },
    /// Finish the pass that was cut short; another one follows in this round.
    Finish {
        /// The round.
        round: u32,
    },
}

/// What is remembered of what was sent; of more, the oldest is remembered as one stretch, all of
/// which would be sent again.
const REMEMBERED_LIMIT: usize = 4096;

/// What was put into a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Remembered {
    frame: u64,
    extent: Extent,
}

/// What was sent and is not acknowledged yet, in order.
#[derive(Debug, Default)]
struct Memory {
    round: u32,
    sent: VecDeque<Remembered>,
}

impl Memory {
    /// Something is about to be sent in `round`: what was sent before was acknowledged, or taken
    /// back.
    fn begin(&mut self, round: u32) {
        if self.round != round {
            self.sent.clear();
            self.round = round;
        }
    }

    /// `extent` is put into frame number `frame`.
    fn remember(&mut self, frame: u64, extent: Extent) {
        match self.sent.back_mut() {
            Some(last)
                if last.extent.content == extent.content
                    && last.frame == frame
                    && last.extent.run.end() == extent.run.start =>
            {
                last.extent.run.count += extent.run.count;
            }
            _ => self.sent.push_back(Remembered { frame, extent }),
        }
        if self.sent.len() > REMEMBERED_LIMIT
            && let (Some(first), Some(second)) = (self.sent.pop_front(), self.sent.front_mut())
        {
            let (one, other) = (first.extent.run, second.extent.run);
            let start = one.start.0.min(other.start.0);
            let end = one.end().0.max(other.end().0);
            let run = PageRun::new(start, end - start);
            // The frame of the later one: all of it counts as lost as long as any of it may be.
            second.extent = Extent { run, content: OnDisk::Data };
        }
    }

    /// What may be lost where the destination has placed `placed` frames, which is forgotten.
    fn take_back(&mut self, placed: u64) -> Vec<Extent> {
        let lost = self.sent.drain(..).filter(|remembered| remembered.frame > placed);
        lost.map(|remembered| remembered.extent).collect()
    }
}

/// Counts that are looked at while a round runs.
#[derive(Debug, Default)]
pub(super) struct DiskCounters {
    /// Bytes on the wire, in all rounds.
    pub(super) sent: AtomicU64,
    /// Pages of data that were read, in this round.
    pub(super) read: AtomicU64,
    /// Pages that were named as zero without being read, in this round.
    pub(super) skipped: AtomicU64,
}

/// What was sent of each disk, by its number, once all of it was.
pub(super) type SentDisks = Arc<Mutex<Vec<(usize, DiskSent)>>>;

/// The thread's state.
pub(super) struct DiskChannel {
    /// Which of the disks, and its number in frames.
    index: usize,
    number: u32,
    segments: usize,
    sender: FrameSender,
    table: Arc<SegmentTable>,
    link_share: Arc<LinkShare>,
    counters: Arc<DiskCounters>,
    /// What was asked for and not taken yet.
    asked: VecDeque<PageRun>,
    /// The pass that was cut short.
    unfinished: Option<Box<dyn DiskRound>>,
    /// The rest of an extent of data that is being asked for.
    rest: Option<PageRun>,
    /// The rest of an extent of zeros that is being named.
    zeros: Option<PageRun>,
    /// What was sent, did not arrive, and is to be sent again.
    owed: VecDeque<Extent>,
    memory: Memory,
    /// What the destination holds of it already, until the first pass is over.
    held: Option<Held>,
    /// Time spent in this round waiting for storage.
    storage: Duration,
    /// What is got wrong on purpose.
    slips: Slips,
    /// What was sent, if that is to be compared, and where it is put behind the last round.
    sent: Option<(DiskSent, SentDisks)>,
}

impl DiskChannel {
    /// For disk `index`, which is number `number` in frames.
    pub(super) fn new(
        (index, number, segments): (usize, usize, usize),
        sender: FrameSender,
        table: Arc<SegmentTable>,
        link_share: Arc<LinkShare>,
        counters: Arc<DiskCounters>,
        slips: Slips,
    ) -> Self {
        Self {
            index,
            number: number as u32,
            segments,
            sender,
            table,
            link_share,
            counters,
            asked: VecDeque::new(),
            unfinished: None,
            rest: None,
            zeros: None,
            owed: VecDeque::new(),
            memory: Memory::default(),
            held: None,
            storage: Duration::ZERO,
            slips,
            sent: None,
        }
    }

    /// The same, which remembers what is sent, and puts it into `sent` behind the last round.
    pub(super) fn remembering(self, sent: Option<(DiskSent, SentDisks)>) -> Self {
        Self { sent, ..self }
    }

    /// The same where the destination holds something of the disk already.
    pub(super) fn knowing(self, held: Option<Held>) -> Self {
        Self { held, ..self }
    }

    /// Takes back what the destination has not placed, of which it has `placed` frames: it is owed
    /// to it. Returns how many pages of data that are.
    pub(super) fn take_back(&mut self, placed: u64) -> PageCount {
        let lost = self.memory.take_back(placed);
        let data = lost.iter().filter(|extent| extent.content == OnDisk::Data);
        let pages = data.map(|extent| extent.run.count).sum();
        self.owed.extend(lost);
        pages
    }

    /// What it did since its last order.
    pub(super) fn statistics(&self) -> DiskStatistics {
        DiskStatistics {
            statistics: self.sender.statistics(),
            storage: self.storage,
            ..DiskStatistics::default()
        }
    }

    /// How many pieces the codec is chosen for.
    pub(super) fn segments(&self) -> usize {
        self.segments
    }

    /// Whether its pass is to be finished before another one begins.
    pub(super) fn is_unfinished(&self) -> bool {
        self.unfinished.is_some()
    }

    /// The same channel with another sending end.
    pub(super) fn over(self, sender: FrameSender) -> Self {
        Self { sender, ..self }
    }

    /// Carries out orders until there are no more, or one fails.
    pub(super) fn run(mut self, orders: &Receiver<DiskOrder>, events: &Sender<Event>) -> Self {
        for order in orders {
            self.storage = Duration::ZERO;
            self.sender.begin();
            let (round, result) = match order {
                DiskOrder::Pass { round, last, pass } => {
                    self.counters.read.store(0, Ordering::Relaxed);
                    self.counters.skipped.store(0, Ordering::Relaxed);
                    let result = self.round(round, last, pass);
                    self.link_share.disk_done();
                    (round, result)
                }
                DiskOrder::Finish { round } => (round, self.finish(round)),
            };
            let failed = result.is_err();
            let _ = events.send(Event::DiskStatistics { disk: self.index, round, result });
            if failed {
                break;
            }
            // What does not change from here on need not be looked at while the guest stands still.
            if let Some((sent, _)) = &mut self.sent {
                sent.digests();
            }
        }
        self
    }

    fn round(
        &mut self,
        round: u32,
        last: bool,
        mut pass: Box<dyn DiskRound>,
    ) -> Result<DiskStatistics, EngineError> {
        self.memory.begin(round);
        let copied = self.copy(pass.as_mut(), last);
        // The machine may begin the next round only when this pass is gone.
        self.unfinished = (!matches!(copied, Ok(true))).then_some(pass);
        let whole = copied?;
        if whole {
            self.held = None;
        }
        let sent = self.sender.flush()?;
        self.count(sent);
        self.sender.barrier(round, last)?;
        if last {
            self.tell_sent();
        }
        Ok(DiskStatistics {
            statistics: self.sender.statistics(),
            storage: self.storage,
            cut: !whole,
            goes_on: false,
        })
    }

    /// What was sent is complete.
    fn tell_sent(&mut self) {
        if let Some((mut sent, told)) = self.sent.take() {
            sent.digests();
            let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
            told.push((self.index, sent));
        }
    }

    fn finish(&mut self, round: u32) -> Result<DiskStatistics, EngineError> {
        self.memory.begin(round);
        if let Some(mut pass) = self.unfinished.take() {
            let copied = self.copy(pass.as_mut(), true);
            self.unfinished = copied.is_err().then_some(pass);
            copied?;
            self.held = None;
        }
        Ok(DiskStatistics {
            statistics: self.sender.statistics(),
            storage: self.storage,
            cut: false,
            goes_on: true,
        })
    }

    /// Sends all of `pass`, or as much of it as there is time for; whether it was all.
    fn copy(&mut self, pass: &mut dyn DiskRound, last: bool) -> Result<bool, EngineError> {
        let depth = pass.depth().max(1);
        let mut ends = None;
        loop {
            while ends.is_none() && self.asked.len() < depth {
                if !last && self.table.hurries() {
                    ends = Some(false);
                    break;
                }
                match self.next_data(pass)? {
                    Some(run) => {
                        pass.submit(run).map_err(EngineError::Disk)?;
                        self.asked.push_back(run);
                    }
                    None => ends = Some(true),
                }
            }
            match (self.asked.front().copied(), ends) {
                (Some(run), _) => self.send(pass, run)?,
                (None, Some(whole)) => return Ok(whole),
                (None, None) => {}
            }
        }
    }

    /// The next stretch of data to ask for, no longer than a frame; zeros on the way are named.
    fn next_data(&mut self, pass: &mut dyn DiskRound) -> Result<Option<PageRun>, EngineError> {
        loop {
            self.send_zeros()?;
            if let Some(rest) = self.rest.take() {
                let count = rest.count.0.min(FRAME_PAGES as u64);
                if count < rest.count.0 {
                    self.rest = Some(PageRun::new(rest.start.0 + count, rest.count.0 - count));
                }
                return Ok(Some(PageRun::new(rest.start.0, count)));
            }
            let began = Instant::now();
            let next = match self.owed.pop_front() {
                // Perhaps it is zero no more: what was written there since is dirty.
                Some(owed) => Some(owed),
                None => {
                    let next = pass.next().map_err(EngineError::Disk)?;
                    if let (Some((sent, _)), Some(extent)) = (&mut self.sent, next) {
                        sent.reported(extent.run, self.memory.round);
                    }
                    next
                }
            };
            self.storage += began.elapsed();
            match next {
                None => return Ok(None),
                Some(Extent { run, content: OnDisk::Data }) => self.rest = Some(run),
                Some(Extent { run, content: OnDisk::Zero }) => self.zeros = Some(run),
            }
        }
    }

    /// Names what is left of an extent of zeros.
    fn send_zeros(&mut self) -> Result<(), EngineError> {
        while let Some(run) = self.zeros {
            let start = run.start.0;
            self.frame_for(start, 1)?;
            let piece = PageRun::new(start, ZERO_LIMIT.min(run.count.0));
            self.sender.zero(piece);
            let extent = Extent { run: piece, content: OnDisk::Zero };
            let frame = self.sender.building();
            self.memory.remember(frame, extent);
            if let Some((sent, _)) = &mut self.sent {
                sent.zeros(piece, (self.memory.round, frame));
            }
            self.counters.skipped.fetch_add(piece.count.0, Ordering::Relaxed);
            let left = run.count.0 - piece.count.0;
            self.zeros = (left > 0).then(|| PageRun::new(start + piece.count.0, left));
        }
        Ok(())
    }

    /// Takes the bytes of `run`, which were asked for first, and sends them. Where that fails they
    /// are still asked for.
    fn send(&mut self, pass: &mut dyn DiskRound, run: PageRun) -> Result<(), EngineError> {
        self.frame_for(run.start.0, run.count.0 as usize)?;
        self.asked.pop_front();
        let (slips, index) = (self.slips.clone(), self.index);
        let same = Cell::new(Same::default());
        let of = (self.memory.round, self.sender.building());
        let mut sent = self.sent.as_mut().map(|(sent, _)| sent);
        let judge = |page, bytes: &[u8]| {
            if slips.drops(index, (page, run), bytes) {
                return None;
            }
            if let Some(sent) = &mut sent {
                sent.sent(page, bytes, of);
            }
            if same.get().has(page) {
                return None;
            }
            Some(if is_zero(bytes) { Content::Zero } else { Content::Data })
        };
        // Reads were asked for ahead, so only storage that is slower than the link makes this wait.
        let mut waited = Duration::ZERO;
        let read = |bytes: &mut [u8]| {
            let began = Instant::now();
            let taken = pass.complete(bytes);
            waited += began.elapsed();
            if let (Some(held), Ok(())) = (&self.held, &taken) {
                same.set(held.same(run, bytes));
            }
            taken
        };
        let added = self.sender.add(run, read, judge);
        self.storage += waited;
        added.map_err(EngineError::Disk)?;
        let extent = Extent { run, content: OnDisk::Data };
        self.memory.remember(self.sender.building(), extent);
        self.counters.read.fetch_add(run.count.0, Ordering::Relaxed);
        self.sender.pace();
        Ok(())
    }

    /// Makes sure that the frame being built has room for `pages` more, the first of which is
    /// `start`.
    fn frame_for(&mut self, start: u64, pages: usize) -> Result<(), EngineError> {
        let segment = (start / SEGMENT_PAGES) as usize;
        let sent = self.sender.frame_for(self.number, segment, pages)?;
        self.count(sent);
        Ok(())
    }

    /// So much of the disk went onto the link.
    fn count(&self, sent: ByteCount) {
        if sent > ByteCount::ZERO {
            self.counters.sent.fetch_add(sent.0, Ordering::Relaxed);
            self.link_share.disk_sent(sent);
        }
    }
}

/// How many pieces the codec is chosen for, of a disk of `pages`.
pub(super) fn segments(pages: PageCount) -> usize {
    pages.0.div_ceil(SEGMENT_PAGES) as usize
}

/// What is left of a pass, of which `counters` tell; `dirty` is what it had to do, where that was
/// known.
pub(super) fn left_of_pass(
    size: ByteCount,
    dirty: Option<ByteCount>,
    counters: &DiskCounters,
) -> ByteCount {
    let read = PageCount(counters.read.load(Ordering::Relaxed)).bytes();
    let skipped = PageCount(counters.skipped.load(Ordering::Relaxed)).bytes();
    match dirty {
        Some(dirty) => dirty.saturating_sub(read),
        None => size.saturating_sub(read).saturating_sub(skipped),
    }
}
