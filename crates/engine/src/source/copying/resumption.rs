//! Connections that are lost before the guest is stopped, and made again.
//!
//! Invariants: while they are lost nothing holds the guest back, and its writes are tracked.
//! Channels have ended before the destination is asked what it has placed; what it has not is owed
//! to it again before any channel sends. No segment is in a channel's hands then, so there may be
//! another number of channels.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use godwit_memory::Segment;
use godwit_protocol::source::Input;
use godwit_units::PageCount;
use godwit_wire::Message;

use super::super::channel::Shared;
use super::super::lanes::Ended;
use super::super::outage::Outage;
use super::super::owned::Owned;
use super::super::session::Event;
use super::super::{PEER, Source};
use super::{Copying, add_channels};
use crate::address::Stream;
use crate::disk_prints::Held;
use crate::report::{RoundMeasures, Stage};
use crate::{EngineError, limits};

/// What is lost, and what there is instead of channels.
pub(super) struct Lost {
    outage: Outage,
    /// What is left of channels of which the destination has not said yet what it has.
    ended: Ended,
    /// The segments of those of which it has, and what memory's channels share.
    segments: Vec<Owned>,
    shared: Option<Shared>,
    /// What was sent and is to be sent again.
    again: PageCount,
    /// How long the round had taken that was cut off, if one was.
    in_round: Option<Duration>,
    /// It is not known what the destination holds.
    forgotten: bool,
    /// No channel of a disk was made yet.
    new_disks: bool,
    /// The destination can be asked what its disks hold, and what it has said.
    disks_are_told: bool,
    held: Vec<Held>,
}

impl Lost {
    /// What a godwit begins with that takes the place of one that was killed: nothing is known of
    /// what was sent, so all of memory and of the disks is to be looked at.
    pub(super) fn restarted(
        limit: Duration,
        segments: Vec<Owned>,
        (shared, disks_are_told): (Shared, bool),
    ) -> Self {
        Self {
            outage: Outage::new(EngineError::Killed, limit),
            ended: Ended::default(),
            segments,
            shared: Some(shared),
            again: PageCount::ZERO,
            in_round: None,
            forgotten: true,
            new_disks: true,
            disks_are_told,
            held: Vec::new(),
        }
    }

    /// Takes back what the destination has not placed: of each channel it has so many frames.
    fn take_back(&mut self, placed: &[u64]) {
        let of_memory = self.ended.memory.len();
        for channel in self.ended.memory.drain(..) {
            self.shared.get_or_insert_with(|| channel.shared().clone());
            let (segments, again) = channel.take_back(placed);
            self.segments.extend(segments);
            self.again += again;
        }
        for (number, channel) in (of_memory..).zip(&mut self.ended.disks) {
            self.again += channel.take_back(placed.get(number).copied().unwrap_or_default());
        }
        self.segments.sort_unstable_by_key(Owned::number);
    }
}

impl Copying {
    /// The connections are lost, by `cause`: lets the guest run free, and ends all channels.
    pub(in super::super) fn sever(
        &mut self,
        source: &mut Source<'_>,
        cause: EngineError,
    ) -> Result<(), EngineError> {
        tracing::warn!(%cause, "the connections are lost");
        let lost = self.lost.insert(Lost {
            outage: Outage::new(cause, source.options.reconnect),
            ended: Ended::default(),
            segments: Vec::new(),
            shared: None,
            again: PageCount::ZERO,
            in_round: None,
            forgotten: false,
            new_disks: false,
            disks_are_told: false,
            held: Vec::new(),
        });
        self.convergence.let_go(source.vm, &mut self.disks);
        self.free.stop(source.vm);
        self.lanes.cut();
        self.lanes.dismiss();
        source.session.sever(source.vm)?;
        // A channel may hang at storage that does.
        while !self.lanes.have_ended() && !lost.outage.is_over() {
            source.session.next_event(source.vm, limits::TICK / 10)?;
        }
        lost.ended = self.lanes.take()?;
        source.session.forget_reports();
        if let Some(round) = self.under_way.take() {
            lost.in_round = Some(source.meter.in_round());
            source.meter.severed(cut_off(round, &lost.ended), self.segments.take_parts());
        }
        let disks = &lost.ended.disks;
        self.disks.cut_off(disks.iter().map(|disk| (disk.statistics(), disk.is_unfinished())));
        self.report(source, Stage::PreCopy, self.round.round, false);
        Ok(())
    }

    /// One attempt to make the connections again, when it is due.
    pub(in super::super) fn reconnect(
        &mut self,
        source: &mut Source<'_>,
    ) -> Result<Input, EngineError> {
        let Some(lost) = &mut self.lost else { return Err(EngineError::Panicked("main")) };
        let due = Instant::now() + lost.outage.next_attempt();
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.wait(source, left.min(limits::TICK))?;
        }
        match self.attempt(source) {
            Ok(()) => self.taken_up(source).map(|()| Input::Resumed),
            Err(error) if error.may_pass() => {
                if let Some(lost) = &mut self.lost {
                    lost.outage.failed(source.explained(error));
                }
                Ok(Input::LinkLost)
            }
            Err(error) => Err(error),
        }
    }

    /// How the connections were lost, if they are.
    pub(super) fn outage(&self) -> Option<&Outage> {
        self.lost.as_ref().map(|lost| &lost.outage)
    }

    /// Waits for a moment, if there is time left.
    fn wait(&mut self, source: &mut Source<'_>, moment: Duration) -> Result<(), EngineError> {
        if self.outage().is_some_and(Outage::is_over)
            && let Some(lost) = self.lost.take()
        {
            return Err(lost.outage.into_error());
        }
        source.check_fate()?;
        // What else comes over a connection of an attempt that has failed is of no interest.
        let event = source.session.next_event(source.vm, moment)?;
        if let Some(event @ Event::Peer { message: Ok(Message::Abort { .. }), .. }) = event {
            return Err(event.out_of_place());
        }
        if self.lost.as_mut().is_some_and(|lost| lost.outage.is_to_be_told()) {
            self.report(source, Stage::PreCopy, self.round.round, false);
        }
        Ok(())
    }

    fn attempt(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        let (to, channels) = source.way();
        let disks = self.disks.len() as u8;
        let dialled = source.session.begin_return(&to, channels)?;
        let stream = loop {
            match dialled.recv_timeout(limits::TICK) {
                Ok(stream) => break stream?,
                Err(RecvTimeoutError::Timeout) => self.wait(source, Duration::ZERO)?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(EngineError::Panicked("connect"));
                }
            }
        };
        let placed = source.session.finish_return(source.vm, stream)?;
        let Some(lost) = &mut self.lost else { return Err(EngineError::Panicked("main")) };
        lost.forgotten |= placed.is_none();
        lost.take_back(&placed.unwrap_or_default());
        let streams = source.session.connect_channels(0..channels.saturating_add(disks))?;
        self.learn(source)?;
        self.have_proven_again(source)?;
        self.start_again(source, channels.into(), streams)
    }

    /// Has a destination that was started anew read back what there is, where the one before it
    /// did.
    fn have_proven_again(&self, source: &Source<'_>) -> Result<(), EngineError> {
        let forgotten = self.lost.as_ref().is_some_and(|lost| lost.forgotten);
        match &self.fingerprints {
            Some((_, key)) if forgotten && self.digests.is_some() => {
                source.session.say(&Message::Prove { seed: key.seed() })
            }
            _ => Ok(()),
        }
    }

    /// Asks what the destination holds, where that is not known.
    fn learn(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        let Some(Lost { segments, forgotten: true, new_disks, held, disks_are_told, .. }) =
            &mut self.lost
        else {
            return Ok(());
        };
        let disks_are_told = *disks_are_told;
        let Some((_, key)) = &self.fingerprints else { return Ok(()) };
        let disks = disks_are_told && *new_disks && !self.disks.is_empty();
        source.session.say(&Message::PrintsRequest { disks })?;
        let mut next = (0, 0);
        for owned in segments {
            let prints = await_prints(source, owned.segment(), &mut next)?;
            owned.learn(&prints, key.zero(), &self.segments);
        }
        held.clear();
        let disks = if disks { self.disks.pages() } else { Vec::new() };
        for (block, pages) in (source.ram.len() as u32..).zip(disks) {
            held.push(learn_disk(source, block, Held::new(pages, *key))?);
        }
        Ok(())
    }

    /// Starts channels, as many of memory as are wanted now, over new connections.
    fn start_again(
        &mut self,
        source: &mut Source<'_>,
        channels: usize,
        mut streams: Vec<(Stream, Stream)>,
    ) -> Result<(), EngineError> {
        let Some(Lost { ended, segments, shared: Some(shared), new_disks, held, .. }) =
            &mut self.lost
        else {
            return Err(EngineError::Panicked("main"));
        };
        self.lanes.reopen(streams.len());
        let disk_streams = streams.split_off(channels);
        let (session, parts) = (&source.session, (shared.clone(), self.any_channel));
        add_channels(&mut self.lanes, streams, session, parts, segments)?;
        if std::mem::take(new_disks) {
            let session = (&shared.table, &source.session);
            let held = std::mem::take(held);
            let streams = (disk_streams, held);
            return self.disks.connect(source.ram.len(), &mut self.lanes, streams, session, None);
        }
        for (disk, stream) in ended.disks.drain(..).zip(disk_streams) {
            let segments = disk.segments();
            let over = |sender| disk.over(sender);
            self.lanes.add_disk(stream, segments, source.session.for_disk(), over)?;
        }
        Ok(())
    }

    /// All connections stand again: the guest is held back as it was, and counts begin anew.
    fn taken_up(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        let Some(lost) = self.lost.take() else { return Err(EngineError::Panicked("main")) };
        let time = lost.outage.time();
        source.meter.resumed(time, lost.again.bytes(), self.lanes.memory());
        tracing::info!(?time, again_pages = lost.again.0, "taken up again");
        self.convergence.take_up(source.vm, &mut self.disks, lost.in_round)?;
        // Behind it, what is found by a harvest before it need not be looked at once more.
        self.drain(source)?;
        self.report(source, Stage::PreCopy, self.round.round, false);
        Ok(())
    }
}

/// Takes in what the destination says that it holds of the disk with this number in frames.
fn learn_disk(source: &mut Source<'_>, number: u32, mut held: Held) -> Result<Held, EngineError> {
    let what = "the destination's fingerprints of a disk";
    while held.is_incomplete() {
        let (at, prints) =
            source.session.await_message(source.vm, what, limits::ANSWER, |message| {
                let Message::Prints { block, segment, prints } = message else { return None };
                Some(((*block, *segment), prints.clone()))
            })?;
        if at != (number, held.next_segment()) || !held.add(prints) {
            let what = "it sent fingerprints of a disk that nobody asked for".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        }
    }
    Ok(held)
}

/// What was done of `round`.
fn cut_off(round: u32, ended: &Ended) -> RoundMeasures {
    let mut total = RoundMeasures { round, ..RoundMeasures::default() };
    ended.memory.iter().for_each(|channel| total.add(&channel.statistics()));
    total.disk_sent = ended.disks.iter().map(|disk| disk.statistics().statistics.sent).sum();
    total
}

/// The fingerprints that the destination tells of each page of `segment`, which is to be the `next`
/// one; none: it holds zeros there.
pub(super) fn await_prints(
    source: &mut Source<'_>,
    segment: Segment,
    next: &mut (u32, u32),
) -> Result<Vec<u64>, EngineError> {
    let block = segment.block as u32;
    *next = if next.0 == block { *next } else { (block, 0) };
    let what = "the destination's fingerprints";
    let (at, prints) =
        source.session.await_message(source.vm, what, limits::ANSWER, |message| {
            let Message::Prints { block, segment, prints } = message else { return None };
            Some(((*block, *segment), prints.clone()))
        })?;
    let whole = prints.len() as u64 == segment.run.count.0;
    if at != *next || !(whole || prints.is_empty()) {
        let what = "it sent fingerprints that nobody asked for".to_owned();
        return Err(EngineError::Protocol { peer: PEER, what });
    }
    next.1 += 1;
    Ok(prints)
}
