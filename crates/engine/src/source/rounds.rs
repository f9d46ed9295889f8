//! Rounds of pre-copy and the last one: what channels are told, and what the policy makes of it.

use super::*;
use crate::vm::Brake;

/// Turns of the conversation while the guest is stopped: the device state and READY, COMMIT and
/// Running.
const TURNS: u32 = 2;
/// How long memory is made clean before it is sent for the first time, at the most.
pub(super) const ARMING: Duration = Duration::from_millis(500);
/// In the first moments of the first round looks come more often: what is hot is best left before
/// it is sent.
const EARLY: Duration = Duration::from_millis(300);
const EARLY_TICK: Duration = Duration::from_millis(20);
/// Of the time between two looks, the part that a look may take: with much memory they come less
/// often.
const LOOK_SHARE: u32 = 20;

/// Why a guest is not slowed down whose VMM has no [`Brake`].
const NO_BRAKE: &str = "this kind of machine cannot slow its guest down";

/// What one channel has done.
enum Part {
    Memory(RoundStatistics),
    /// Of the disk of this index.
    Disk(usize, DiskStatistics),
}

impl Source<'_> {
    pub(super) fn start_tracking(&mut self) -> Result<Option<Input>, EngineError> {
        let count = usize::from(self.options.channels);
        let all = self.options.channels.saturating_add(self.disks.len() as u8);
        let streams = (0..all).map(|number| self.connect(Role::Channel(number)));
        let mut streams = streams.collect::<Result<Vec<_>, _>>()?;
        let disk_streams = streams.split_off(count);
        let tracker = self.vm.start_tracking().map_err(EngineError::Vm)?;
        // From here on direct I/O that begins is seen to begin; what began before must be over.
        self.drain()?;
        self.measures.tracking_stop = self.vm.tracking_stop();
        let mut table = SegmentTable::new(Arc::clone(&self.ram))?;
        // Direct I/O that is in flight now must be found by the harvest before its page is sent, so
        // as to be looked at again.
        let may_arm = self.vm.was_running() && !self.direct_io;
        self.free = self.make_free_hints();
        self.was_given_back();
        // A page that counts as dirty from the start cannot be left out.
        let arms = may_arm && (self.policy.settings().delay_hot_percent > 0 || self.free.is_some());
        self.remaining = table.begin(tracker.as_ref(), arms.then_some(ARMING))?.remaining;
        let table = Arc::new(table);
        self.start_disks(disk_streams, &table)?;
        for (number, stream) in streams.into_iter().enumerate() {
            let handle = stream.try_clone().map_err(link_error(PEER))?;
            let shared = Shared {
                tracker: Arc::clone(&tracker),
                blocks: Arc::clone(&self.ram),
                table: Arc::clone(&table),
                free: self.free.clone(),
                link_share: Arc::clone(&self.link_share),
                fingerprints: self.fingerprints.clone(),
            };
            let sender = self.sender(stream, table.segments().count());
            let own = table.segments().filter(|(_, segment)| segment.channel(count) == number);
            let channel = Channel::new(sender, shared, own, self.direct_io);
            let (orders, orders_out) = mpsc::channel();
            let events = self.events_in.clone();
            let thread = threads::start("channel", move || channel.run(&orders_out, &events))?;
            self.channels.push(ChannelHandle { orders, stream: handle, thread });
        }
        self.tracker = Some(tracker);
        self.table = Some(table);
        self.measures.ram = self.ram.iter().map(|block| block.pages().bytes()).sum();
        self.measures.setup = self.started.elapsed();
        self.offer_governor();
        self.idle.begin();
        let plan = self.policy.start(!self.disks.is_empty());
        self.enforce(&plan);
        Ok(None)
    }

    /// Whether the policy may govern the guest's writes. Without fingerprints a segment that
    /// changes hands would be sent again.
    fn offer_governor(&mut self) {
        let refusal = match &self.fingerprints {
            Some(_) => match self.vm.brake() {
                Some(brake) => brake.cannot_govern(),
                None => Some(NO_BRAKE.to_owned()),
            },
            None => Some("it needs the page fingerprints".to_owned()),
        };
        self.can_govern = refusal.is_none() && self.vm.was_running();
        if let (Some(why), ThrottleMode::Governor) = (refusal, self.policy.settings().throttle) {
            self.fall_back(&why);
        }
    }

    /// The guest cannot be governed: it is throttled instead, if the operator did not forbid it.
    fn fall_back(&mut self, why: &str) {
        self.can_govern = false;
        self.warning = Some(format!(
            "the guest's writes cannot be governed: {why}; its vCPUs are throttled instead"
        ));
        if self.policy.settings().throttle == ThrottleMode::Governor {
            self.policy.change(self.handle.fall_back(ThrottleMode::Adaptive));
        }
    }

    /// The sending end of a channel for `segments` segments.
    fn sender(&self, stream: Stream, segments: usize) -> FrameSender {
        let link = Link {
            limiter: Arc::clone(&self.limiter),
            live: Arc::clone(&self.live),
            sent: Arc::clone(&self.sent),
            codecs: self.codecs,
        };
        FrameSender::new(stream, link, segments)
    }

    /// Starts tracking the disks that move along, and their channels.
    fn start_disks(
        &mut self,
        streams: Vec<Stream>,
        table: &Arc<SegmentTable>,
    ) -> Result<(), EngineError> {
        if self.disks.is_empty() {
            return Ok(());
        }
        if let Some(vm) = self.vm.moving_disks() {
            vm.start_disk_tracking().map_err(EngineError::Vm)?;
            self.disks.tracked(&vm.disk_granularity());
            self.disks.note_writes(vm);
        }
        for (index, stream) in streams.into_iter().enumerate() {
            let handle = stream.try_clone().map_err(link_error(PEER))?;
            let sender = self.sender(stream, self.disks.segments(index));
            let number = self.ram.len() + index;
            let shared = (Arc::clone(table), Arc::clone(&self.link_share));
            self.disks.start_channel(
                index,
                number,
                (handle, sender),
                shared,
                self.events_in.clone(),
            )?;
        }
        Ok(())
    }

    /// What the destination takes; what it does not is said aloud.
    pub(super) fn take_codecs(&mut self, codecs: Codecs) {
        self.codecs = codecs;
        self.measures.codecs = codecs.to_string();
        self.check_compression();
    }

    fn check_compression(&mut self) {
        let wanted = self.live.compression();
        let lacking = match wanted {
            Compression::Auto => self.codecs == Codecs::NONE,
            Compression::Fixed(codec) => !self.codecs.contains(codec.id()),
        };
        if lacking {
            self.warning = Some(format!(
                "compression={wanted}: the destination does not take it; pages are sent as they are"
            ));
        }
    }

    /// Waits until direct I/O that is in flight has landed.
    pub(super) fn drain(&mut self) -> Result<(), EngineError> {
        match self.vm.direct_io() {
            Some(devices) if self.direct_io => devices.drain().map_err(EngineError::Vm),
            _ => Ok(()),
        }
    }

    /// Has the channels copy what is dirty.
    pub(super) fn start_round(&mut self, round: u32, stage: Stage) -> Result<(), EngineError> {
        self.round_began = Instant::now();
        // What lies between the rounds belongs to the one that comes.
        self.gap = self.round_ended.map_or(Duration::ZERO, |ended| ended.elapsed());
        self.sent_before = self.sent.load(Ordering::Relaxed);
        let last = stage == Stage::StopAndCopy;
        // What a balloon gave back is a hole and was not written. The destination need not keep it,
        // and where digests are compared it must not; but when the guest is stopped otherwise,
        // there is no time for that.
        let find_holes =
            if last { self.options.verify } else { self.was_given_back() && round > 0 };
        let order = Order { round, last, find_holes };
        if let Some(table) = &self.table {
            table.hurry(!last && self.handle.wants_switch_over());
        }
        if !last {
            self.ask_for_free_pages(round)?;
        }
        self.link_share.begin(self.disks.len());
        self.unfinished = self.disks.finish(round);
        if self.unfinished == 0 {
            self.begin_disks(round, last)?;
        }
        if let Some(tracker) = &self.tracker {
            tracker.begin_round();
            if let (true, Some(table)) = (last, &self.table) {
                table.look_for_the_last_time(tracker.as_ref(), self.channels.len())?;
            }
        }
        self.waited = self.round_began.elapsed();
        for channel in &self.channels {
            // A channel that is gone has said why, which is found below.
            let _ = channel.orders.send(order);
        }
        Ok(())
    }

    /// Has the channels of disks make their passes.
    fn begin_disks(&mut self, round: u32, last: bool) -> Result<(), EngineError> {
        let passes = begin_passes(self.vm, self.disks.len())?;
        self.disks.begin(round, last, passes);
        Ok(())
    }

    /// Waits until what is dirty is copied and, where that matters, in place at the destination.
    pub(super) fn copy_round(
        &mut self,
        round: u32,
        stage: Stage,
    ) -> Result<Option<Input>, EngineError> {
        let last = stage == Stage::StopAndCopy;
        let mut total = RoundMeasures { round, ..RoundMeasures::default() };
        let (mut channels, mut disks) = (self.channels.len(), self.disks.len());
        while channels + disks > 0 {
            match self.await_channel(round, stage)? {
                Part::Memory(statistics) => {
                    channels -= 1;
                    total.data += statistics.data;
                    total.zero += statistics.zero;
                    total.sent += statistics.sent;
                    total.unchanged += statistics.unchanged;
                    total.raw += statistics.raw;
                    total.hinted += statistics.hinted;
                }
                Part::Disk(disk, statistics) => {
                    total.disk_sent += statistics.statistics.sent;
                    self.disks.passed(disk, &statistics);
                    if statistics.goes_on {
                        self.unfinished -= 1;
                        if self.unfinished == 0 {
                            self.begin_disks(round, last)?;
                        }
                        continue;
                    }
                    disks -= 1;
                    if disks == 0 && std::mem::take(&mut self.release_waits) {
                        self.vm.release_state().map_err(EngineError::Vm)?;
                    }
                }
            }
        }
        self.have_free_pages(round);
        self.say(&Message::RoundEnd { round })?;
        let waits = !last || self.options.verify;
        if waits {
            let said = Instant::now();
            let flush =
                self.await_message("the acknowledgement of a round", limits::ANSWER, |message| {
                    match message {
                        Message::RoundAck { round: placed, flush } if *placed == round => {
                            Some(*flush)
                        }
                        _ => None,
                    }
                })?;
            // The least that was seen: the destination may have had pages to place first.
            let round_trip = said.elapsed();
            self.round_trip =
                Some(self.round_trip.map_or(round_trip, |least| least.min(round_trip)));
            if !flush.is_zero() {
                self.flush = flush;
            }
        } else {
            self.unawaited = Some(round);
            if let Some(relay) = &self.relay {
                // What follows on the control connection is taken when the round is in place.
                relay.open();
            }
        }
        total.time = self.round_began.elapsed();
        self.round_ended = Some(Instant::now());
        total.throttle = self.throttle;
        total.memory_share = self.link_share.share();
        self.last_round = Some(total);
        if last {
            self.measures.round_list.push(total);
            self.measures.parts.copy = self.lap();
        }
        Ok(Some(if waits { Input::RoundPlaced } else { Input::RoundSent }))
    }

    /// Waits for one channel to have carried its part of `round`; meanwhile the policy looks on,
    /// and progress is reported.
    fn await_channel(&mut self, round: u32, stage: Stage) -> Result<Part, EngineError> {
        loop {
            let tick = if round == 0 && self.round_began.elapsed() < EARLY {
                EARLY_TICK
            } else {
                limits::TICK
            };
            match self.next_event(tick)? {
                // A thread that ended without a word will never send one.
                None if self.channels.iter().any(|channel| channel.thread.is_finished())
                    || self.disks.any_ended() =>
                {
                    match self.event(Duration::ZERO) {
                        Ok(event) => return Err(Self::out_of_place(event)),
                        Err(_) => return Err(EngineError::Panicked("channel")),
                    }
                }
                None => {
                    if stage == Stage::PreCopy {
                        self.tick()?;
                    }
                    self.report(round, stage, false);
                }
                Some(Event::RoundStatistics { round: statistics, result })
                    if statistics == round =>
                {
                    return result.map(Part::Memory);
                }
                Some(Event::DiskStatistics { disk, round: statistics, result })
                    if statistics == round =>
                {
                    return result.map(|statistics| Part::Disk(disk, statistics));
                }
                Some(other) => return Err(Self::out_of_place(other)),
            }
        }
    }

    /// Within a round: takes in what the operator changed, and lets the policy look.
    fn tick(&mut self) -> Result<(), EngineError> {
        self.check_fate()?;
        self.take_changes();
        if let Some(idle) = self.idle.look() {
            let channels = usize::from(self.options.channels.max(1)) + self.disks.len();
            self.live.set_idle(idle / channels as f64);
        }
        if let (Some(table), true) = (&self.table, self.handle.wants_switch_over()) {
            table.hurry(true);
        }
        if let Some(vm) = self.vm.moving_disks() {
            self.disks.tick(vm).map_err(EngineError::Vm)?;
        }
        let speed = self.sample_speed();
        let now = Instant::now();
        if now < self.next_look {
            return Ok(());
        }
        let look = self.look()?;
        let early = self.measures.round_list.is_empty() && self.round_began.elapsed() < EARLY;
        let tick = if early { EARLY_TICK } else { limits::TICK };
        self.next_look = now + (now.elapsed() * LOOK_SHARE).max(tick);
        self.remaining = look.remaining;
        let sent = self.sent.load(Ordering::Relaxed) - self.sent_before;
        let plan = self.policy.tick(&Tick {
            in_round: self.gap + self.round_began.elapsed(),
            sent: ByteCount(sent),
            remaining: look.remaining,
            dirty: &look.dirty,
            throttle: self.throttle,
            guest_speed: speed,
            can_govern: self.can_govern,
        });
        if let Some(plan) = plan {
            self.enforce(&plan);
        }
        Ok(())
    }

    /// The policy's decision at the end of a round.
    pub(super) fn ask_policy(&mut self) -> Result<Option<Input>, EngineError> {
        let Some(mut round) = self.last_round.take() else {
            return Err(EngineError::Panicked("main"));
        };
        self.take_changes();
        let speed = self.sample_speed();
        let verification = self.verification()?;
        let look_began = Instant::now();
        let look = self.look()?;
        let look_time = look_began.elapsed();
        let last_look = self
            .table
            .as_ref()
            .map_or(look_time, |table| table.last_look(look.spent, self.channels.len()));
        let costs = self.vm.switchover_costs();
        let round_trip = self.round_trip.unwrap_or_default();
        let fixed = last_look + costs.state + self.flush + round_trip * TURNS;
        round.remaining = look.remaining;
        let disk = match self.vm.moving_disks() {
            None => None,
            Some(vm) => {
                let disk = self.disks.end_round(vm, round.disk_sent).map_err(EngineError::Vm)?;
                (round.disk_remaining, round.disk_written) = (disk.remaining, disk.written);
                self.disk_time = round.time;
                Some(disk)
            }
        };
        let (decision, estimate) = self.policy.round(&Round {
            time: round.time + self.gap,
            idle: self.waited + self.gap,
            // What comes before the next round is mostly this look, and what else it was the last
            // time.
            gap: look_time.max(self.gap),
            sent: round.sent,
            pages: round.data,
            remaining: look.remaining,
            fixed,
            // Once both machines are ready nothing lies between.
            lead: look_time
                + costs.lead
                + if self.relay.is_some() { Duration::ZERO } else { round_trip },
            verification,
            memory: self.ram.iter().map(RamBlock::pages).sum(),
            dirty: &look.dirty,
            throttle: self.throttle,
            guest_speed: speed,
            can_govern: self.can_govern,
            disk,
            ..Round::default()
        });
        self.estimate = Some(estimate);
        self.handle.limit_has_grown(self.policy.limit_steps());
        self.remaining = look.remaining;
        self.measures.round_list.push(round);
        self.report(round.round, Stage::PreCopy, true);
        let decision =
            if self.handle.wants_switch_over() { Decision::SwitchOver } else { decision };
        match decision {
            Decision::NextRound(plan) => {
                self.enforce(&plan);
                self.drain()?;
                Ok(Some(Input::NextRound))
            }
            Decision::SwitchOver => {
                // There is a state stream once both machines are ready, and the guest is stopped
                // next.
                if self.relay.is_some() {
                    self.close_steering();
                }
                // The throttle stays until the guest stands still.
                Ok(Some(Input::SwitchOver))
            }
            Decision::GiveUp(advice) => Err(EngineError::NotConverging(advice)),
        }
    }

    /// The guest is about to be stopped: nothing can be changed any more.
    pub(super) fn close_steering(&mut self) {
        self.handle.close();
        // What was taken until just now: a limit of bandwidth still matters.
        self.take_changes();
    }

    /// How long the comparison of digests will take, where it is wanted: both sides compute them at
    /// once.
    fn verification(&mut self) -> Result<Duration, EngineError> {
        if !self.options.verify {
            return Ok(Duration::ZERO);
        }
        let page = match self.digest_of_page {
            Some(page) => page,
            None => digests::cost_of_page(&self.ram)?,
        };
        self.digest_of_page = Some(page);
        let present: PageCount = self.ram.iter().map(RamBlock::allocated).sum::<Result<_, _>>()?;
        Ok(page.mul_f64(present.0 as f64))
    }

    fn look(&self) -> Result<Look, EngineError> {
        match (&self.table, &self.tracker) {
            (Some(table), Some(tracker)) => table.look(tracker.as_ref()),
            _ => Err(EngineError::Panicked("main")),
        }
    }

    /// The guest's speed since the last sample, and its sum for the measures.
    pub(super) fn sample_speed(&mut self) -> Option<f64> {
        let governed = self.first_writes.is_some();
        let vcpu_time = self.vm.brake().and_then(|brake| brake.vcpu_time());
        let speed = self.speed.sample(Instant::now(), vcpu_time, self.throttle, governed);
        if speed.is_some() || self.throttle == 0.0 && !governed {
            self.guest_speed = speed;
        }
        speed
    }

    /// Puts in force what the operator changed since the last tick.
    fn take_changes(&mut self) {
        let Some((settings, own)) = self.handle.take_changes() else { return };
        self.limiter.set(own.max_bandwidth.map(TypedRate::rate));
        if own.compression != self.live.compression() {
            self.live.set_compression(own.compression);
            self.check_compression();
        }
        let plan = self.policy.change(settings);
        self.enforce(&plan);
    }

    /// Puts `plan` in force.
    fn enforce(&mut self, plan: &Plan) {
        if let Some(table) = &self.table {
            table.delay(plan.delayed.clone());
        }
        self.link_share.set_share(plan.memory_share);
        self.limit_disks(plan.disk_limit);
        if !self.vm.was_running() {
            return;
        }
        self.govern(plan.first_writes);
        if plan.throttle == self.throttle {
            return;
        }
        // What was consumed until now was consumed under the old one.
        self.sample_speed();
        match self.brake().and_then(|brake| brake.throttle(plan.throttle)) {
            Ok(()) => self.throttle = plan.throttle,
            Err(error) => {
                // The guest runs free; without a throttle the policy may still find a way, or gives
                // up and says why.
                self.throttle = 0.0;
                self.warning = Some(format!("the guest cannot be throttled: {error}"));
                self.policy.change(self.handle.fall_back(ThrottleMode::Off));
            }
        }
    }

    fn brake(&mut self) -> Result<&mut dyn Brake, VmError> {
        self.vm.brake().ok_or_else(|| NO_BRAKE.into())
    }

    /// Limits the guest's writes to the disks that move: by what it wrote to each of them lately,
    /// so also anew when the limit of all stays what it was.
    fn limit_disks(&mut self, limit: Option<Rate>) {
        let Some(limits) = self.disks.divide(limit, self.disk_time) else { return };
        match self.vm.moving_disks().map_or(Ok(()), |vm| vm.limit_disks(&limits)) {
            Ok(()) => self.disk_limit = limit,
            Err(error) => self.warning = Some(format!("disk writes cannot be limited: {error}")),
        }
    }

    /// Puts the governor's rate in force, or lets the guest write freely.
    fn govern(&mut self, first_writes: Option<f64>) {
        if first_writes.is_none() && self.first_writes.is_none() {
            return;
        }
        self.sample_speed();
        match self.brake().and_then(|brake| brake.govern(first_writes)) {
            Ok(()) => self.first_writes = first_writes,
            Err(error) => {
                self.first_writes = None;
                self.fall_back(&error.to_string());
            }
        }
    }
}
