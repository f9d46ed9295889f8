//! From the decision to switch over to the end: the guest is stopped, its last pages and its state
//! follow, and it is handed over; or it is brought back.

use super::*;

impl Source<'_> {
    /// Gets both machines ready, so that as little as possible is left to do when the guest is
    /// stopped.
    pub(super) fn prepare(&mut self) -> Result<Option<Input>, EngineError> {
        self.say(&Message::Prepare)?;
        let stream = self.vm.open_state().map_err(EngineError::Vm)?;
        self.await_message("the destination to get ready", limits::ANSWER, |message| {
            (*message == Message::Prepared).then_some(())
        })?;
        let Some(control) = &self.control else { return Err(EngineError::Panicked("control")) };
        self.relay = Some(StateRelay::start(stream, Arc::clone(control), self.events_in.clone())?);
        // A guest that stands still has written nothing meanwhile, one that is held back need not
        // be so for longer, and who wants it stopped now need not wait for disks.
        let held_back = self.throttle > 0.0 || self.first_writes.is_some();
        if held_back || self.handle.wants_switch_over() || !self.vm.was_running() {
            self.close_steering();
            return Ok(Some(Input::PreparedInHaste));
        }
        self.drain()?;
        Ok(Some(Input::Prepared))
    }

    pub(super) fn stop_guest(&mut self) -> Result<Option<Input>, EngineError> {
        let stopped = self.vm.stop().map_err(EngineError::Vm)?;
        self.stopped_at = Some(stopped);
        self.mark = stopped;
        self.measures.tracked =
            stopped.saturating_duration_since(self.started + self.measures.setup);
        self.measures.parts.drain = self.lap();
        self.sample_speed();
        (self.throttle, self.first_writes, self.guest_speed) = (0.0, None, None);
        self.hold(Fault::HoldStopped)?;
        Ok(Some(Input::GuestStopped))
    }

    pub(super) fn compare_digests(&mut self) -> Result<Option<Input>, EngineError> {
        self.say(&Message::DigestRequest)?;
        let mut own = Vec::new();
        for (number, block) in self.ram.iter().enumerate() {
            // What was left out is zero at the destination, so it has to count as zero here.
            let zeroed = |run, zero: &mut dyn FnMut(PageIndex)| {
                if let Some(hints) = &self.free {
                    hints.skipped(number, run, zero);
                }
            };
            own.push(digests::digests(block, 0..digests::chunks(block.pages()), zeroed)?);
        }
        if self.options.fault == Some(Fault::WrongDigest) {
            own[0][0] ^= 1;
        }
        let expected: u64 = own.iter().map(|digests| digests.len() as u64).sum();
        let mut first_difference = None;
        let (mut seen, mut differing) = (0, 0);
        // The destination sends them in order, so that each is seen once.
        let mut next = (0usize, 0usize);
        while seen < expected {
            let (block, first, theirs) =
                self.await_message("the destination's digests", limits::ANSWER, |message| {
                    match message {
                        Message::Digests { block, first, digests } => {
                            Some((*block, *first, digests.clone()))
                        }
                        _ => None,
                    }
                })?;
            let fits = (block as usize, first as usize) == next
                && !theirs.is_empty()
                && next.1 + theirs.len() <= own[next.0].len();
            if !fits {
                let what = "it sent digests that nobody asked for".to_owned();
                return Err(EngineError::Protocol { peer: PEER, what });
            }
            for (chunk, digest) in theirs.iter().enumerate().map(|(i, digest)| (next.1 + i, digest))
            {
                if own[next.0][chunk] != *digest {
                    differing += 1;
                    first_difference.get_or_insert((next.0, chunk));
                }
            }
            seen += theirs.len() as u64;
            next.1 += theirs.len();
            while next.0 < own.len() && next.1 == own[next.0].len() {
                next = (next.0 + 1, 0);
            }
        }
        self.measures.parts.verify = self.lap();
        if let Some((block, chunk)) = first_difference {
            return Err(EngineError::Digest {
                differing,
                chunks: expected,
                block: self.ram[block].name().to_owned(),
                offset: PageCount(chunk as u64 * CHUNK_PAGES).bytes().0,
            });
        }
        self.measures.verified = true;
        Ok(Some(Input::DigestsEqual))
    }

    /// Lets the machine save its devices. Unless digests were compared and all pages are in place
    /// by now, what it saves is held back until the last round has ended.
    pub(super) fn release_state(&mut self) -> Result<Option<Input>, EngineError> {
        if let (Some(relay), false) = (&self.relay, self.options.verify) {
            relay.hold();
        }
        // A machine that has saved its state may have let go of its disks, so the last of them must
        // be read by then.
        self.release_waits = !self.disks.is_empty() && !self.options.verify;
        if !self.release_waits {
            self.vm.release_state().map_err(EngineError::Vm)?;
        }
        Ok(None)
    }

    pub(super) fn finish_state(&mut self) -> Result<Option<Input>, EngineError> {
        self.report(self.last_number(), Stage::Handover, false);
        let until = Instant::now() + limits::ANSWER;
        let bytes = loop {
            match self.next_event(limits::TICK)? {
                Some(Event::StatePassed(result)) => break result?,
                Some(other) => return Err(Self::out_of_place(other)),
                None if Instant::now() >= until => {
                    return Err(EngineError::Timeout {
                        what: "the device state",
                        limit: limits::ANSWER,
                    });
                }
                None => {}
            }
        };
        self.measures.device_state = bytes;
        self.vm.state_saved().map_err(EngineError::Vm)?;
        self.state_saved = true;
        // Guest memory is not looked at again: QEMU's own migration, too, sends the last of RAM
        // before it saves devices, so saving them must not write it
        // (qemu_savevm_state_complete_precopy).
        self.say(&Message::DeviceStateEnd)?;
        self.measures.parts.save = self.lap();
        Ok(Some(Input::StateSent))
    }

    pub(super) fn commit(&mut self) -> Result<Option<Input>, EngineError> {
        // From here on, whatever happens, the guest is not ours: not even when sending fails, for
        // part of it may have arrived.
        self.commit_sent = true;
        let fault = self.options.fault.filter(|_| self.resolve_until.is_none());
        if fault == Some(Fault::LoseCommit) {
            self.cut();
        }
        self.say(&Message::Commit)?;
        if fault == Some(Fault::CutAfterCommit) {
            self.cut();
        }
        Ok(None)
    }

    /// Connects to the destination again, to ask who runs the guest.
    pub(super) fn resolve(&mut self) -> Result<Option<Input>, EngineError> {
        let until = *self.resolve_until.get_or_insert_with(|| Instant::now() + limits::RESOLVE);
        // The answer may be here already, behind what went wrong. Then the old connection must end:
        // as long as it stands, the destination waits there and takes no other.
        while let Ok(event) = self.event(Duration::ZERO) {
            match event {
                Event::Peer { message: Ok(Message::Running), .. } => {
                    return Ok(Some(Input::Running));
                }
                Event::Peer { message: Ok(Message::Discarded), .. } => {
                    self.was_discarded(None);
                    return Ok(Some(Input::Discarded));
                }
                Event::Peer { message: Ok(Message::Abort { code, text }), .. } => {
                    self.was_discarded(Some((code, text)));
                    return Ok(Some(Input::Discarded));
                }
                _ => {}
            }
        }
        self.cut();
        loop {
            match self.connect(Role::Resolve) {
                Ok(stream) => {
                    self.use_control(stream)?;
                    return Ok(Some(Input::Reconnected));
                }
                Err(error) if Instant::now() >= until => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    /// Tells the destination that it need not wait for questions. Without this word it stays for
    /// [`limits::LINGER`], so where the link broke just now, a new connection is tried.
    pub(super) fn say_farewell(&mut self) {
        if self.options.fault == Some(Fault::LoseFarewell) {
            self.cut();
        }
        if self.say(&Message::Farewell).is_err()
            && self.connect(Role::Resolve).and_then(|stream| self.use_control(stream)).is_ok()
        {
            let _ = self.say(&Message::Farewell);
        }
    }

    /// Breaks the control connection.
    pub(super) fn cut(&self) {
        if let Some(control) = &self.control {
            control.shut_down();
        }
    }

    /// Tells the destination.
    pub(super) fn abort(&mut self) {
        if let (Some(aborter), Some((_, cause))) = (&self.aborter, &self.cause) {
            aborter.say(Message::Abort { code: cause.abort_code(), text: cause.to_string() });
        }
    }

    pub(super) fn resume(&mut self) {
        // The migration is over. Whoever still reads disks must be gone before the machine takes
        // their tracking away.
        self.limiter.stop();
        self.link_share.close();
        self.disks.stop();
        if let Err(error) = self.vm.resume() {
            self.resume_failed = Some(error);
        }
    }

    /// Ends all threads, and with the last clone of the tracker the tracking.
    pub(super) fn shut_down(&mut self) {
        self.limiter.stop();
        self.link_share.close();
        if let Some(relay) = &self.relay {
            relay.end();
        }
        for channel in self.channels.drain(..) {
            drop(channel.orders);
            channel.stream.shut_down();
            let _ = channel.thread.join();
        }
        self.disks.join();
        self.tracker = None;
        if let Some(aborter) = self.aborter.take() {
            aborter.end();
        }
        self.cut();
        if let Some(relay) = self.relay.take() {
            relay.join();
        }
    }

    pub(super) fn finish_measures(&mut self) {
        let now = Instant::now();
        self.measures.total = now - self.started;
        self.measures.downtime =
            self.stopped_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.measures.rounds = self.measures.round_list.len();
        self.measures.raw = self.measures.round_list.iter().map(|round| round.raw).sum();
        self.measures.unchanged =
            self.measures.round_list.iter().map(|round| round.unchanged).sum();
        self.measures.hinted = self.measures.round_list.iter().map(|round| round.hinted).sum();
        self.measures.fingerprints = self
            .fingerprints
            .as_ref()
            .map_or(ByteCount::ZERO, |(fingerprints, _)| fingerprints.memory());
        self.measures.disks = self.disks.measures();
        let losses = self.speed.losses();
        self.measures.throttled = losses.throttled;
        self.measures.lost = losses.lost;
        self.measures.under_half = losses.under_half;
        self.measures.under_tenth = losses.under_tenth;
        let governor = self.vm.brake().map(|brake| brake.governor_measures()).unwrap_or_default();
        self.measures.first_writes_delayed = governor.delayed;
        self.measures.vcpus_waited = governor.waited;
        self.measures.longest_wait = governor.longest_wait;
        let pages = ByteCount(self.sent.load(Ordering::Relaxed));
        self.measures.sent = pages + self.measures.device_state;
    }

    /// The time since the last part of the downtime ended.
    pub(super) fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let part = now.saturating_duration_since(self.mark);
        self.mark = now;
        part
    }
}
