//! The rounds: what is held from the beginning of the tracking to the end, and a pass over all that
//! is dirty, with the guest running or stopped.
//!
//! Invariant: the tracker lives as long as the channels that harvest it, and no longer than this.

mod resumption;

use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_bitmap::DirtyBitmap;
use godwit_fingerprints::{Key, PageFingerprints};
use godwit_policy::Decision;
use godwit_protocol::source::Input;
use godwit_track::{DirtyTracker, Untracked};
use godwit_units::ByteCount;
use godwit_wire::{Feature, Message};

use super::Source;
use super::audit::{Auditor, Differing};
use super::channel::{Channel, Order, Shared};
use super::convergence::{Convergence, Governs};
use super::disk::SentDisks;
use super::disk_sent::DiskSent;
use super::disks::{Disks, Remember};
use super::fault::Fault;
use super::frame_sender::{DiskStatistics, RoundStatistics};
use super::free::FreeMemory;
use super::history::SentOf;
use super::lanes::Lanes;
use super::meter::{Part, Totals};
use super::outage::Outage;
use super::owned::Owned;
use super::post_copy::{could_leave, with_post_copy};
use super::segment_table::{ARMING, SegmentTable};
use super::session::{Event, Session};
use super::setup::Setup;
use super::slips::Slips;
use super::state_relay::StateRelay;
use super::turns::Turns;
use super::verification::{self, Cost};
use super::wires::Wires;
use super::{PEER, PostCopy, Verify, look_back, switchover};
use crate::address::Stream;
use crate::link::link_error;
use crate::report::{RoundMeasures, Stage};
use crate::vm::SourceVm;
use crate::{EngineError, limits};

use resumption::Lost;

/// What one channel has done.
enum Done {
    Memory(RoundStatistics),
    /// Of the disk of this index.
    Disk(usize, DiskStatistics),
}

pub(super) struct Copying {
    lanes: Lanes,
    disks: Disks,
    convergence: Convergence,
    free: FreeMemory,
    segments: Arc<SegmentTable>,
    tracker: Arc<dyn DirtyTracker>,
    fingerprints: Option<(PageFingerprints, Key)>,
    /// The digests of what was sent, by segment, where the destination reads back what it places.
    digests: Option<Arc<Mutex<Vec<u128>>>>,
    /// Where channels of disks put what they have sent behind the last round, if the destination
    /// reads that back.
    sent_disks: Option<SentDisks>,
    /// Where channels put their segments behind the last round, if there is to be an audit.
    audited: Option<Arc<Mutex<Vec<Owned>>>>,
    /// Where channels put down what they do not send in the last round, by block.
    left: Arc<Mutex<Vec<DirtyBitmap>>>,
    /// Whether data may land in guest memory without the tracker's knowledge.
    direct_io: bool,
    /// The round that was made last.
    round: RoundMeasures,
    /// The round that channels are at.
    under_way: Option<u32>,
    /// What the device state will come through, where the destination was asked to get ready and
    /// not heard to be.
    state: Option<Box<dyn Read + Send>>,
    /// Whether pages may go over any channel.
    any_channel: bool,
    /// Connections that are lost.
    lost: Option<Lost>,
}

impl Copying {
    /// Starts tracking, and all channels.
    pub(super) fn start(source: &mut Source<'_>, setup: Setup) -> Result<Self, EngineError> {
        let Setup { settings, own, mut disks, fingerprints, direct_io, .. } = setup;
        let Setup { restarted, proves, common, .. } = setup;
        let (options, session) = (source.options, &source.session);
        let of_memory = source.channels();
        let channels = of_memory.saturating_add(disks.len() as u8);
        let at_once = if restarted { 0 } else { channels };
        let mut streams = session.connect_channels(0..at_once)?;
        let disk_streams = streams.split_off(streams.len().min(of_memory.into()));
        source.meter.goes_over(of_memory);
        // Where nothing is sent before the guest has left, what it writes need not be known.
        let untracked =
            source.leaves_at_once() && !(restarted || direct_io) && source.vm.can_go_untracked();
        let tracker = match untracked {
            true => Arc::new(Untracked),
            false => source.vm.start_tracking().map_err(EngineError::Vm)?,
        };
        // From here on direct I/O that begins is seen to begin; what began before must be over.
        drain(source.vm, direct_io)?;
        let tracking = (!untracked).then(|| source.vm.tracking_stop());
        let free = FreeMemory::new(source.vm, direct_io || untracked);
        let mut segments = SegmentTable::new(Arc::clone(&source.ram))?;
        // Direct I/O that is in flight now must be found by the harvest before its page is sent, so
        // as to be looked at again. A page that counts as dirty from the start cannot be left out.
        let arms = source.vm.was_running()
            && !(direct_io || untracked)
            && (settings.delay_hot_percent > 0 || free.hints().is_some());
        let look = segments.begin(tracker.as_ref(), arms.then_some(ARMING))?;
        let segments = Arc::new(segments);
        let peer = (common.codecs, source.is_within_a_host());
        let mut lanes = Lanes::new(&own, channels.into(), peer, !disks.is_empty());
        let count = segments.segments().count();
        let digests = proves.then(|| Arc::new(Mutex::new(vec![0; count])));
        let audited: Option<Arc<Mutex<Vec<Owned>>>> = options.audit.then(Arc::default);
        let audit_began = options.audit.then(Instant::now);
        let proves_disks = proves && common.features.contains(Feature::DiskProof);
        let remember = fingerprints.as_ref().filter(|_| proves_disks && !disks.is_empty());
        let remember = remember.map(|(_, key)| Remember {
            key: *key,
            audit: audit_began,
            told: SentDisks::default(),
        });
        disks.track(source.vm)?;
        if !restarted {
            let (blocks, session) = (source.ram.len(), (&segments, &source.session));
            let streams = (disk_streams, Vec::new());
            disks.connect(blocks, &mut lanes, streams, session, remember.as_ref())?;
        }
        let blocks = source.ram.iter().map(|block| DirtyBitmap::new(block.pages()));
        let left = Arc::new(Mutex::new(blocks.collect()));
        let shared = Shared {
            tracker: Arc::clone(&tracker),
            blocks: Arc::clone(&source.ram),
            table: Arc::clone(&segments),
            free: free.hints().cloned(),
            link_share: Arc::clone(lanes.link_share()),
            fingerprints: fingerprints.clone(),
            digests: digests.clone(),
            audit: audited.clone().zip(audit_began),
            left: Arc::clone(&left),
            slips: Slips::new(source.session.made_up()),
        };
        let any_channel = common.features.contains(Feature::AnyChannel);
        let prints = fingerprints.as_ref().map(|(prints, _)| prints);
        let owned = |numbered| Owned::new(numbered, prints, audit_began, direct_io);
        let mut owned: Vec<Owned> = segments.segments().map(owned).collect();
        let lost = match restarted {
            true => {
                let disks_are_told = common.features.contains(Feature::DiskPrints);
                Some(Lost::restarted(options.reconnect, owned, (shared, disks_are_told)))
            }
            false => {
                let shared = (shared, any_channel);
                add_channels(&mut lanes, streams, &source.session, shared, &mut owned)?;
                None
            }
        };
        source.meter.set_up(&source.ram, tracking);
        let cost = Cost::new(options.verify != Verify::No && !proves);
        let parts = (&segments, &tracker);
        let mut convergence =
            Convergence::new(source.handle, settings, parts, &lanes, cost, look.remaining);
        lanes.begin_idle_watch();
        // Nor is a guest slowed down that leaves at once.
        let governs = match (untracked, &fingerprints) {
            (true, _) => Governs::NeedNot,
            (_, None) => Governs::Cannot("it needs the page fingerprints"),
            _ => Governs::Can,
        };
        convergence.begin(source.vm, &mut disks, governs);
        let round = RoundMeasures::default();
        Ok(Self {
            lanes,
            disks,
            convergence,
            free,
            segments,
            tracker,
            fingerprints,
            digests,
            sent_disks: remember.map(|remember| remember.told),
            audited,
            left,
            direct_io,
            round,
            under_way: None,
            state: None,
            any_channel,
            lost,
        })
    }

    /// A round with the guest running: what is dirty is copied, and in place at the destination.
    pub(super) fn copy(
        &mut self,
        source: &mut Source<'_>,
        round: u32,
    ) -> Result<Input, EngineError> {
        source.meter.begin_round(self.lanes.sent());
        // What a balloon gave back is a hole and was not written. The destination need not keep it.
        // Not asked as long as there is memory with data that was not dealt with: what was made
        // clean is marked where it was never touched.
        let find_holes = self.segments.all_are_dealt_with() && self.free.was_given_back();
        self.segments.hurry(self.convergence.is_hurried());
        if self.lanes.link_share().share() > 0 {
            let (segments, tracker) = (self.segments.as_ref(), self.tracker.as_ref());
            self.free.ask(source.vm, &mut source.session, (segments, tracker), round)?;
        }
        self.begin(source, Order { round, last: false, find_holes, leave: false })?;
        self.carry(source, round, Stage::PreCopy)?;
        self.await_acknowledgement(source, round)?;
        self.end(source);
        Ok(Input::RoundPlaced)
    }

    /// Begins the last round, with the guest stopped.
    pub(super) fn begin_last(
        &mut self,
        source: &mut Source<'_>,
        round: u32,
    ) -> Result<(), EngineError> {
        source.meter.begin_round(self.lanes.sent());
        self.segments.hurry(false);
        // Where digests are compared the destination must not keep what is a hole here; otherwise
        // there is no time for that.
        // What was sent is compared where there are digests of that.
        let find_holes = source.options.verify != Verify::No && self.digests.is_none();
        self.begin(source, Order { round, last: true, find_holes, leave: source.leaves })
    }

    /// Ends the last round without the pages that are left: which these are.
    pub(super) fn finish_listing(
        &mut self,
        source: &mut Source<'_>,
        round: u32,
    ) -> Result<Vec<DirtyBitmap>, EngineError> {
        self.carry(source, round, Stage::StopAndCopy)?;
        source.session.ignore_acknowledgement(round);
        self.end(source);
        source.meter.keep(self.round, self.segments.take_parts());
        source.meter.part_ended(Part::Copy);
        Ok(std::mem::take(&mut *self.left.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// The channels.
    pub(super) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// The same, when nothing is copied any more, and nothing tracked.
    pub(super) fn into_lanes(self) -> Lanes {
        self.lanes
    }

    /// Makes the connection over which pages go that somebody waits for at the destination.
    pub(super) fn connect_urgent(
        &self,
        source: &Source<'_>,
    ) -> Result<(Stream, Stream), EngineError> {
        let number = self.lanes.memory() + self.disks.len();
        let number = u8::try_from(number).map_err(|_| EngineError::Panicked("main"))?;
        let made = source.session.connect_channels(number..=number)?;
        made.into_iter().next().ok_or(EngineError::Panicked("main"))
    }

    /// Waits until the last round is on its way; where digests are compared, until it is in place.
    /// Otherwise `relay` may send what it held back: it is taken when the round is in place.
    pub(super) fn finish_last(
        &mut self,
        source: &mut Source<'_>,
        round: u32,
        relay: &StateRelay,
    ) -> Result<Input, EngineError> {
        self.carry(source, round, Stage::StopAndCopy)?;
        let verify = source.options.verify != Verify::No;
        if verify {
            self.await_acknowledgement(source, round)?;
        } else {
            source.session.ignore_acknowledgement(round);
            relay.open();
        }
        self.end(source);
        source.meter.keep(self.round, self.segments.take_parts());
        source.meter.part_ended(Part::Copy);
        Ok(if verify { Input::RoundPlaced } else { Input::RoundSent })
    }

    /// Has the channels copy what is dirty.
    fn begin(&mut self, source: &mut Source<'_>, order: Order) -> Result<(), EngineError> {
        self.lanes.link_share().begin(self.disks.len());
        self.disks.begin_round(source.vm, &self.lanes, order.round, order.last)?;
        self.tracker.begin_round();
        if order.last {
            let channels = self.lanes.memory();
            self.segments.look_for_the_last_time(self.tracker.as_ref(), channels)?;
        }
        source.meter.begin_sending();
        self.under_way = Some(order.round);
        // A channel that is gone has said why, which is found below.
        self.lanes.order_memory(order);
        Ok(())
    }

    /// Waits until what is dirty is on its way, and tells the destination.
    fn carry(
        &mut self,
        source: &mut Source<'_>,
        round: u32,
        stage: Stage,
    ) -> Result<(), EngineError> {
        let last = stage == Stage::StopAndCopy;
        let mut total = RoundMeasures { round, ..RoundMeasures::default() };
        let mut memory = self.lanes.memory();
        while memory + self.disks.under_way() > 0 {
            match self.await_channel(source, round, stage)? {
                Done::Memory(statistics) => {
                    memory -= 1;
                    total.add(&statistics);
                }
                Done::Disk(disk, statistics) => {
                    total.disk_sent += statistics.statistics.sent;
                    let lanes = &self.lanes;
                    self.disks.passed(source.vm, lanes, (disk, round, last), &statistics)?;
                }
            }
        }
        self.free.end_round(source.vm, round);
        tracing::info!(
            round,
            data_pages = total.data.0,
            zero_pages = total.zero.0,
            unchanged_pages = total.unchanged.0,
            sent_bytes = total.sent.0,
            "carried"
        );
        self.round = total;
        source.session.say(&Message::RoundEnd { round })
    }

    /// Waits until `round` is in place at the destination.
    fn await_acknowledgement(
        &mut self,
        source: &mut Source<'_>,
        round: u32,
    ) -> Result<(), EngineError> {
        let said = Instant::now();
        let what = "the acknowledgement of a round";
        let flush =
            source.session.await_message(
                source.vm,
                what,
                limits::ANSWER,
                |message| match message {
                    Message::RoundAck { round: placed, flush } if *placed == round => Some(*flush),
                    _ => None,
                },
            )?;
        source.meter.acknowledged(said.elapsed(), flush);
        Ok(())
    }

    /// The round is over, as far as it is waited for.
    fn end(&mut self, source: &mut Source<'_>) {
        self.under_way = None;
        self.round.time = source.meter.end_round();
        self.convergence.end_round(&mut self.round);
    }

    /// Waits for one channel to have carried its part of `round`; meanwhile the policy looks on,
    /// and progress is reported.
    fn await_channel(
        &mut self,
        source: &mut Source<'_>,
        round: u32,
        stage: Stage,
    ) -> Result<Done, EngineError> {
        loop {
            match source.session.next_event(source.vm, source.meter.tick())? {
                // A thread that ended without a word will never send one.
                None if self.lanes.any_ended() => {
                    let said = source.session.pending().map(Event::out_of_place);
                    return Err(said.unwrap_or(EngineError::Panicked("channel")));
                }
                None => {
                    if stage == Stage::PreCopy {
                        source.check_fate()?;
                        let (vm, meter) = (&mut *source.vm, &source.meter);
                        self.convergence.tick(vm, &mut self.disks, &mut self.lanes, meter)?;
                    }
                    self.report(source, stage, round, false);
                }
                Some(Event::RoundStatistics { round: of, result }) if of == round => {
                    return result.map(Done::Memory);
                }
                Some(Event::DiskStatistics { disk, round: of, result }) if of == round => {
                    return result.map(|statistics| Done::Disk(disk, statistics));
                }
                Some(other) => return Err(other.out_of_place()),
            }
        }
    }

    /// The policy's decision at the end of a round. `prepared`: both machines are ready for the
    /// switchover.
    pub(super) fn decide(
        &mut self,
        source: &mut Source<'_>,
        prepared: bool,
    ) -> Result<Input, EngineError> {
        let Self { convergence, disks, lanes, round, segments, .. } = self;
        let decision =
            convergence.judge(source.vm, (disks, lanes), &source.meter, round, prepared)?;
        source.meter.keep(*round, segments.take_parts());
        let number = round.round;
        self.report(source, Stage::PreCopy, number, true);
        let fits = self.convergence.fits_into_limit();
        let leaves = source.decide_post_copy(number, &decision, fits);
        match decision {
            _ if self.convergence.is_hurried() || leaves => {}
            Decision::SwitchOver => {}
            Decision::NextRound(plan) => {
                self.convergence.enforce(&plan, source.vm, &mut self.disks);
                let near = fits && self.convergence.is_near() && !self.is_urgent();
                let early = switchover::prepares_early(source.options, !self.disks.is_empty());
                if !prepared && near && early {
                    return Ok(Input::SwitchOver);
                }
                self.drain(source)?;
                return Ok(Input::NextRound);
            }
            Decision::GiveUp(advice) => return Err(EngineError::NotConverging(advice)),
        }
        // Where both are prepared the guest is stopped next. The throttle stays until it stands
        // still.
        if prepared {
            self.close(source);
        }
        Ok(Input::SwitchOver)
    }

    /// Waits until direct I/O that is in flight has landed.
    pub(super) fn drain(&self, source: &mut Source<'_>) -> Result<(), EngineError> {
        drain(source.vm, self.direct_io)
    }

    /// Whether the guest is to be stopped soon: it is held back, or the operator wants it.
    pub(super) fn is_urgent(&self) -> bool {
        self.convergence.holds_back() || self.convergence.is_hurried()
    }

    /// The guest is about to be stopped: nothing can be changed any more.
    pub(super) fn close(&mut self, source: &mut Source<'_>) {
        self.convergence.close(source.vm, &mut self.disks, &self.lanes);
    }

    /// The guest stands still.
    pub(super) fn guest_stopped(&mut self, source: &mut Source<'_>) {
        self.convergence.guest_stopped(source.vm);
    }

    /// Lets the machine save its devices, once the last of its disks is read: by then it may have
    /// let go of them.
    pub(super) fn release_state(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        if self.disks.release_when_read() {
            return Ok(());
        }
        source.vm.release_state().map_err(EngineError::Vm)
    }

    /// Compares the digests of all memory, and of the disks that the destination reads back.
    pub(super) fn compare_digests(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        self.compare(source)?;
        if self.sent_disks.is_some() {
            self.disks.verified();
        }
        Ok(())
    }

    fn compare(&self, source: &mut Source<'_>) -> Result<(), EngineError> {
        if let (Some(audited), Some((_, key))) = (&self.audited, &self.fingerprints) {
            let segments =
                std::mem::take(&mut *audited.lock().unwrap_or_else(PoisonError::into_inner));
            return self.audit(source, segments, *key);
        }
        if let Some(digests) = &self.digests {
            let own = digests.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let disks = self.take_sent_disks().into_iter();
            let disks = disks.map(|(name, mut sent)| (name, sent.digests())).collect();
            let (session, ram) = (&mut source.session, &source.ram);
            return verification::compare_sent(session, source.vm, ram, &own, disks);
        }
        let free = self.free.hints().map(Arc::as_ref);
        verification::compare(&mut source.session, source.vm, &source.ram, free)
    }

    /// What was sent of each disk, with its name; nothing where the destination does not read it
    /// back.
    fn take_sent_disks(&self) -> Vec<(String, DiskSent)> {
        let Some(told) = &self.sent_disks else { return Vec::new() };
        let mut told = std::mem::take(&mut *told.lock().unwrap_or_else(PoisonError::into_inner));
        told.sort_unstable_by_key(|(index, _)| *index);
        let names = self.disks.named().into_iter().map(|(name, _)| name);
        names.zip(told.into_iter().map(|(_, sent)| sent)).collect()
    }

    /// Compares every page of both sides with what was sent of it.
    fn audit(
        &self,
        source: &mut Source<'_>,
        mut segments: Vec<Owned>,
        key: Key,
    ) -> Result<(), EngineError> {
        segments.sort_unstable_by_key(Owned::number);
        let ram = Arc::clone(&source.ram);
        let free = self.free.hints().map(Arc::as_ref);
        let made_up = source.session.made_up();
        if made_up.is(Fault::TrustTracker) {
            let missed = look_back::look_back(&ram, &segments, &key, free)?;
            made_up.tell_struck(Fault::TrustTracker, missed.is_some());
        }
        let (names, disks): (Vec<String>, Vec<DiskSent>) =
            self.take_sent_disks().into_iter().unzip();
        let channels = self.lanes.memory();
        let auditor = Auditor { ram: &ram, key, free, channels, disks: &names };
        let mut differing = Differing::default();
        source.session.say(&Message::PrintsRequest { disks: !disks.is_empty() })?;
        let mut all: Vec<SentOf<'_>> = segments.iter().map(Owned::part).collect();
        let of_memory = all.len();
        all.extend(disks.iter().flat_map(DiskSent::parts));
        let mut next = (0, 0);
        for (number, part) in all.iter().copied().enumerate() {
            let prints = resumption::await_prints(source, part.segment, &mut next)?;
            auditor.compare_there((number, part), &prints, &mut differing);
            if number < of_memory {
                auditor.compare_memory((number, part), &mut differing)?;
            }
        }
        let readers = source.vm.moving_disks().map_or(Ok(Vec::new()), |vm| vm.read_disks());
        let mut readers = readers.map_err(EngineError::Vm)?;
        for (number, part) in all.iter().copied().enumerate().skip(of_memory) {
            source.check_fate()?;
            // Reading it all takes time, with the guest stopped.
            if let Some(event) = source.session.next_event(source.vm, Duration::ZERO)? {
                return Err(event.out_of_place());
            }
            let disk =
                readers.get_mut(part.segment.block - ram.len()).ok_or(EngineError::NoAudit)?;
            auditor.compare_disk((number, part), disk.as_mut(), &mut differing)?;
        }
        let audit = auditor.conclude(&all, &differing);
        if let Some(path) = &source.options.trace {
            auditor
                .write_trace(&all, path)
                .map_err(|error| EngineError::Trace { path: path.clone(), source: error })?;
        }
        tracing::info!(%audit, "audited");
        if audit.is_clean() {
            source.meter.audited(audit);
            Ok(())
        } else {
            Err(EngineError::Audit(Box::new(audit)))
        }
    }

    /// With the guest running at the destination: compares all memory with what was sent, where
    /// that was compared before; what shows that something was missed. Who makes up that a tracker
    /// misses something wants to know that it has, and that alone, where it was not compared.
    pub(super) fn look_back(
        &mut self,
        source: &mut Source<'_>,
    ) -> Result<Option<EngineError>, EngineError> {
        let made_up = source.session.made_up();
        let compared = self.digests.is_some() && source.options.verify == Verify::Live;
        let wanted = compared || made_up.is(Fault::TrustTracker);
        let (true, Some((_, key)), None) = (wanted, &self.fingerprints, &self.audited) else {
            return Ok(None);
        };
        let began = Instant::now();
        self.lanes.dismiss();
        let channels = self.lanes.take()?.memory;
        let segments: Vec<_> = channels.into_iter().flat_map(Channel::into_segments).collect();
        let free = self.free.hints().map(Arc::as_ref);
        let missed = look_back::look_back(&source.ram, &segments, key, free)?;
        made_up.tell_struck(Fault::TrustTracker, missed.is_some());
        if !compared {
            return Ok(None);
        }
        source.meter.looked_back(began.elapsed());
        Ok(missed)
    }

    /// Tells whoever looks how the migration stands.
    pub(super) fn report(
        &self,
        source: &mut Source<'_>,
        stage: Stage,
        round: u32,
        round_ended: bool,
    ) {
        let now = (stage, round, round_ended);
        let mut progress = self.convergence.progress(now, &source.meter, &self.disks, &self.lanes);
        progress.severed = self.outage().map(Outage::shown);
        if source.may_leave && source.options.post_copy == PostCopy::Never {
            source.could_leave = could_leave(&progress, source.could_leave.take());
        }
        progress.advice = match progress.advice.take() {
            Some(advice) if source.may_leave => Some(with_post_copy(&progress, advice)),
            None => source.could_leave.clone(),
            advice => advice,
        };
        source.handle.report(&progress);
        (source.progress)(&progress);
    }

    /// What the device state will come through.
    pub(super) fn open_state(&mut self, vm: &mut dyn SourceVm) -> Result<(), EngineError> {
        if self.state.is_none() {
            self.state = Some(vm.open_state().map_err(EngineError::Vm)?);
        }
        Ok(())
    }

    /// The same, once the destination is ready for it.
    pub(super) fn take_state(&mut self) -> Option<Box<dyn Read + Send>> {
        self.state.take()
    }

    /// Sends no more, and lets go of the disks.
    pub(super) fn stop(&mut self) {
        self.lost = None;
        self.lanes.stop();
    }

    /// What was counted, when the migration is over.
    pub(super) fn totals(&self, source: &mut Source<'_>) -> Totals {
        let governor = source.vm.brake().map(|brake| brake.governor_measures());
        let fingerprints = self.fingerprints.as_ref();
        Totals {
            sent: self.lanes.sent(),
            fingerprints: fingerprints.map_or(ByteCount::ZERO, |(all, _)| all.memory()),
            disks: self.disks.measures(),
            losses: self.convergence.losses(),
            governor: governor.unwrap_or_default(),
        }
    }
}

impl RoundMeasures {
    /// Takes in what a channel of memory did.
    fn add(&mut self, statistics: &RoundStatistics) {
        self.data += statistics.data;
        self.zero += statistics.zero;
        self.sent += statistics.sent;
        self.unchanged += statistics.unchanged;
        self.raw += statistics.raw;
        self.hinted += statistics.hinted;
    }
}

/// Adds channels of memory over `streams`, for these `segments`, in the order of their numbers.
/// Each begins with those that are its own, however they were shared before. They are taken when
/// nothing can go wrong any more that may pass.
fn add_channels(
    lanes: &mut Lanes,
    streams: Vec<(Stream, Stream)>,
    session: &Session,
    (shared, any_channel): (Shared, bool),
    segments: &mut Vec<Owned>,
) -> Result<(), EngineError> {
    let (channels, all) = (streams.len(), segments.len());
    let turns = Arc::new(Turns::new(channels, any_channel));
    // One that took long may have had to ask twice.
    let long = streams.iter().all(|(stream, _)| session.is_long(stream));
    let (streams, handles): (Vec<_>, Vec<_>) = streams.into_iter().unzip();
    // An audit tells which channel each page was sent over when it is put into a frame.
    let wires = match any_channel && long && channels > 1 && shared.audit.is_none() {
        true => {
            let scattered = session.made_up().is(Fault::Scatter);
            Wires::shared(streams, scattered).map_err(link_error(PEER))?
        }
        false => Wires::own(streams),
    };
    let wires = Arc::new(wires);
    let mut parts: Vec<Vec<Owned>> = (0..channels).map(|_| Vec::new()).collect();
    for owned in segments.drain(..) {
        parts[owned.segment().channel(channels)].push(owned);
    }
    for (number, (handle, own)) in handles.into_iter().zip(parts).enumerate() {
        let shared = (shared.clone(), &turns);
        let over = (Arc::clone(&wires), number, handle);
        lanes.add_memory(over, all, session.for_memory(), |sender| {
            Channel::new(sender, shared, own)
        })?;
    }
    Ok(())
}

/// Waits until direct I/O that is in flight has landed.
fn drain(vm: &mut dyn SourceVm, direct_io: bool) -> Result<(), EngineError> {
    match vm.direct_io() {
        Some(devices) if direct_io => devices.drain().map_err(EngineError::Vm),
        _ => Ok(()),
    }
}
