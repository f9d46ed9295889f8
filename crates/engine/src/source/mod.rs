//! The source of a migration.
//!
//! [`migrate`] is a loop around the state machine: each action is carried out, waits for what it needs, and yields
//! the next input. Whatever fails becomes the input `Failed`, and the machine says what that means.
//!
//! Threads: this one; one that reads the control connection; one a data channel; one that passes the device state
//! on. They all report through one queue of events.

mod channel;
mod state;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_memory::{RamBlock, Segment, segments};
use godwit_policy::{Decision, Estimate, Policy, Round, Settings};
use godwit_protocol::source::{Action, Input, State, step};
use godwit_track::DirtyTracker;
use godwit_units::{ByteCount, PageCount, Rate};
use godwit_wire::{BlockOffer, Greeting, Message, Offer, Role, SessionId};

use crate::address::{Address, Stream};
use crate::digests::{self, CHUNK_PAGES};
use crate::limiter::Limiter;
use crate::link::{ControlWriter, link_error, read_messages, receive_greeting, send_greeting};
use crate::report::{Measures, Progress, RoundMeasures, Stage};
use crate::vm::{SourceVm, VmError};
use crate::{Cancel, EngineError, Failure, Phase, Survivor, limits};

use channel::{Carried, Channel, Counters, Order};
use state::StatePump;

const PEER: &str = "destination";

/// How a migration is to be made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the destination listens.
    pub to: Address,
    /// When to switch over and when to give up.
    pub policy: Settings,
    /// The most that may be sent; `None`: as fast as the link.
    pub max_bandwidth: Option<Rate>,
    /// Compare digests of all memory before the destination may run.
    pub verify: bool,
    /// Data channels, at least 1.
    pub channels: u8,
    /// Leave the VM stopped at the source instead of ending it.
    pub keep_source: bool,
    /// A fault to make up, for tests.
    pub fault: Option<Fault>,
}

/// Faults made up on purpose, where nothing outside could make them at the right moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Break the control connection just after COMMIT was sent: it arrives, its answer does not.
    CutAfterCommit = 1,
    /// Break the control connection just before COMMIT is sent: it never arrives.
    LoseCommit = 2,
    /// Flip a bit in the source's digest of the first chunk.
    WrongDigest = 3,
}

/// What the threads report.
enum Event {
    /// The destination said something, or can no longer.
    Peer { connection: u32, message: Result<Message, EngineError> },
    /// A channel has carried its part of a round, barrier included.
    Carried { round: u32, result: Result<Carried, EngineError> },
    /// The device state has been passed on to its end.
    StatePassed(Result<ByteCount, EngineError>),
}

/// Moves the guest of `vm` to the destination at `options.to`.
///
/// `progress` is called at the end of each round and every [`limits::TICK`] in between.
///
/// # Errors
/// Says what failed, when, and where the guest is. Before the handover it is where it was, as it was.
pub fn migrate(
    vm: &mut dyn SourceVm,
    options: &Options,
    cancel: &Cancel,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Measures, Failure> {
    let (events_in, events) = mpsc::channel();
    let started = Instant::now();
    let source = Source {
        ram: vm.ram(),
        vm,
        options,
        cancel,
        progress,
        started,
        events,
        events_in,
        session: new_session(),
        control: None,
        connection: 0,
        channels: Vec::new(),
        counters: Arc::default(),
        limiter: Arc::new(Limiter::new(options.max_bandwidth)),
        tracker: None,
        pump: None,
        unawaited: None,
        policy: Policy::new(options.policy),
        estimate: None,
        remaining: PageCount::ZERO,
        round_began: started,
        last_round: None,
        stopped_at: None,
        mark: started,
        resolve_until: None,
        commit_sent: false,
        cause: None,
        resume_failed: None,
        abort: None,
        measures: Measures { channels: options.channels.into(), ..Measures::default() },
    };
    source.run()
}

fn new_session() -> SessionId {
    use std::io::Read;
    let mut bytes = [0; 16];
    // /dev/urandom is always there and never short (random(4)); should it not be, time and pid still tell sessions apart.
    let filled = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    if filled.is_err() {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        bytes = (now.as_nanos() ^ u128::from(std::process::id()) << 96).to_le_bytes();
    }
    SessionId(bytes)
}

struct ChannelHandle {
    orders: Sender<Order>,
    stream: Stream,
    thread: JoinHandle<()>,
}

struct Source<'a> {
    vm: &'a mut dyn SourceVm,
    ram: Arc<Vec<RamBlock>>,
    options: &'a Options,
    cancel: &'a Cancel,
    progress: &'a mut dyn FnMut(&Progress),
    started: Instant,
    events: Receiver<Event>,
    events_in: Sender<Event>,
    session: SessionId,
    control: Option<Arc<ControlWriter>>,
    /// Numbers the control connections, so that the end of an old one is not taken for that of a new one.
    connection: u32,
    channels: Vec<ChannelHandle>,
    counters: Arc<Counters>,
    limiter: Arc<Limiter>,
    tracker: Option<Arc<dyn DirtyTracker>>,
    pump: Option<StatePump>,
    /// The round whose acknowledgement nobody waits for.
    unawaited: Option<u32>,
    policy: Policy,
    estimate: Option<Estimate>,
    remaining: PageCount,
    round_began: Instant,
    last_round: Option<RoundMeasures>,
    stopped_at: Option<Instant>,
    /// When the current part of the downtime began.
    mark: Instant,
    resolve_until: Option<Instant>,
    commit_sent: bool,
    /// The first failure, and when it was.
    cause: Option<(Phase, EngineError)>,
    /// What kept the guest from being resumed or retired.
    resume_failed: Option<VmError>,
    abort: Option<JoinHandle<()>>,
    measures: Measures,
}

impl Source<'_> {
    fn run(mut self) -> Result<Measures, Failure> {
        let verify = self.options.verify;
        let mut state = State::Idle;
        let mut input = Input::Start;
        while !state.is_final() {
            let stepped = step(state, input, verify).or_else(|unexpected| {
                self.note(state, unexpected.into());
                step(state, Input::Failed, verify)
            });
            let Ok((next, actions)) = stepped else { break };
            state = next;
            match self.perform_all(state, &actions) {
                Ok(next) => input = next,
                Err(error) => {
                    self.note(state, error);
                    input = Input::Failed;
                    if state == State::InDoubt
                        && self.resolve_until.is_some_and(|until| Instant::now() >= until)
                    {
                        break;
                    }
                }
            }
        }
        self.shut_down();
        let survivor = match (state, &self.resume_failed) {
            (State::Done, None) => return Ok(self.measures),
            (State::Done, Some(_)) => Survivor::Destination,
            (State::Cancelled, None) => Survivor::Source,
            (State::Cancelled, Some(_)) => Survivor::SourceStopped,
            _ => Survivor::Unknown,
        };
        let (phase, cause) = match (self.cause.take(), self.resume_failed.take()) {
            (None, Some(source)) => (Phase::Handover, EngineError::Vm(source)),
            (Some((phase, cause)), Some(source)) => {
                let cause = Box::new(self.peers_words(cause));
                (phase, EngineError::NotResumed { cause, source })
            }
            (Some((phase, cause)), None) => (phase, self.peers_words(cause)),
            (None, None) => (Phase::Setup, EngineError::Cancelled),
        };
        Err(Failure { phase, survivor, cause })
    }

    /// Keeps the first failure, which is the cause of those that follow.
    fn note(&mut self, state: State, error: EngineError) {
        self.cause.get_or_insert((phase_of(state), error));
    }

    /// When the link broke since the destination gave up, its reason is on the way or already here, behind what the
    /// channels noticed first. The guest runs again by now, so there is time to look.
    fn peers_words(&self, cause: EngineError) -> EngineError {
        if matches!(cause, EngineError::Link { .. }) {
            while let Ok(event) = self.events.recv_timeout(limits::TICK * 3) {
                if let Event::Peer { message: Ok(Message::Abort { code, text }), .. } = event {
                    return EngineError::Aborted { peer: PEER, code, text };
                }
            }
        }
        cause
    }

    /// Carries out `actions`; returns the next input, which the destination gives if no action does.
    fn perform_all(&mut self, state: State, actions: &[Action]) -> Result<Input, EngineError> {
        let mut follow = None;
        for action in actions {
            follow = self.perform(*action)?.or(follow);
        }
        match follow {
            Some(input) => Ok(input),
            None if state.is_final() => Ok(Input::Failed),
            None => self.await_peer(state),
        }
    }

    /// Carries out one action; returns the input it leads to, if it knows one.
    fn perform(&mut self, action: Action) -> Result<Option<Input>, EngineError> {
        match action {
            Action::SendOffer => self.connect_and_offer(),
            Action::StartTracking => self.start_tracking(),
            Action::CopyRound(round) => {
                self.start_round(round, Stage::PreCopy);
                self.copy_round(round, Stage::PreCopy)
            }
            Action::StartLastRound(round) => {
                self.start_round(round, Stage::StopAndCopy);
                Ok(None)
            }
            Action::AskPolicy => self.ask_policy(),
            Action::SendPrepare => self.prepare(),
            Action::StopGuest => self.stop_guest(),
            Action::CopyLastRound(round) => self.copy_round(round, Stage::StopAndCopy),
            Action::CompareDigests => self.compare_digests(),
            Action::ReleaseState => self.release_state(),
            Action::FinishState => self.finish_state(),
            Action::SendCommit => self.commit(),
            Action::Resolve => self.resolve(),
            Action::SendFarewell => {
                self.finish_measures();
                // Should it get lost, the destination waits for a while in vain.
                let _ = self.say(&Message::Farewell);
                Ok(None)
            }
            Action::RetireGuest => {
                if let Err(error) = self.vm.retire(self.options.keep_source) {
                    self.resume_failed = Some(error);
                }
                Ok(None)
            }
            Action::SendAbort => {
                self.abort();
                Ok(None)
            }
            Action::ResumeGuest => {
                self.resume();
                Ok(None)
            }
        }
    }

    fn connect_and_offer(&mut self) -> Result<Option<Input>, EngineError> {
        let address = &self.options.to;
        let mut stream = Stream::connect(address)
            .map_err(|source| EngineError::Connect { address: address.to_string(), source })?;
        self.greet(&mut stream, Role::Control)?;
        self.use_control(stream)?;
        let blocks = self.ram.iter();
        let blocks =
            blocks.map(|block| BlockOffer { name: block.name().to_owned(), pages: block.pages() }).collect();
        self.say(&Message::Offer(Offer {
            channels: self.options.channels,
            verify: self.options.verify,
            running: self.vm.was_running(),
            machine: self.vm.machine().to_owned(),
            blocks,
        }))?;
        Ok(None)
    }

    /// Greets the destination on a new connection and checks that it answers as one.
    fn greet(&self, stream: &mut Stream, role: Role) -> Result<(), EngineError> {
        send_greeting(stream, Greeting { session: self.session, role }, PEER)?;
        let answer = receive_greeting(stream, PEER)?;
        if answer.session != self.session {
            let what = "it answered for another session: it is busy with another migration".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        }
        Ok(())
    }

    /// Makes `stream` the control connection, with a thread that reads it.
    fn use_control(&mut self, stream: Stream) -> Result<(), EngineError> {
        let read = stream.try_clone().map_err(link_error(PEER))?;
        match &self.control {
            Some(control) => control.replace(stream)?,
            None => self.control = Some(Arc::new(ControlWriter::new(stream, PEER)?)),
        }
        self.connection += 1;
        let (events, connection) = (self.events_in.clone(), self.connection);
        read_messages(read, PEER, move |message| events.send(Event::Peer { connection, message }).is_ok());
        Ok(())
    }

    fn say(&self, message: &Message) -> Result<(), EngineError> {
        match &self.control {
            Some(control) => control.send(message),
            None => Err(EngineError::Protocol { peer: PEER, what: "it was never connected".to_owned() }),
        }
    }

    fn start_tracking(&mut self) -> Result<Option<Input>, EngineError> {
        let count = usize::from(self.options.channels);
        let mut streams = Vec::new();
        for number in 0..self.options.channels {
            let address = &self.options.to;
            let mut stream = Stream::connect(address)
                .map_err(|source| EngineError::Connect { address: address.to_string(), source })?;
            send_greeting(
                &mut stream,
                Greeting { session: self.session, role: Role::Channel(number) },
                PEER,
            )?;
            streams.push(stream);
        }
        let tracker = self.vm.start_tracking().map_err(EngineError::Vm)?;
        self.measures.tracking_stop = self.vm.tracking_stop();
        let sizes: Vec<PageCount> = self.ram.iter().map(RamBlock::pages).collect();
        let limiter = Arc::clone(&self.limiter);
        for (number, stream) in streams.into_iter().enumerate() {
            let own: Vec<Segment> = segments(&sizes).filter(|s| s.channel(count) == number).collect();
            let handle = stream.try_clone().map_err(link_error(PEER))?;
            let channel = Channel::new(
                stream,
                Arc::clone(&tracker),
                Arc::clone(&self.ram),
                Arc::clone(&limiter),
                Arc::clone(&self.counters),
                own,
                self.options.verify,
            );
            let (orders, orders_out) = mpsc::channel();
            let events = self.events_in.clone();
            let thread = std::thread::spawn(move || channel.run(&orders_out, &events));
            self.channels.push(ChannelHandle { orders, stream: handle, thread });
        }
        self.tracker = Some(tracker);
        self.measures.ram = sizes.iter().map(|pages| pages.bytes()).sum();
        self.measures.setup = self.started.elapsed();
        self.remaining = sizes.iter().copied().sum();
        Ok(None)
    }

    /// Has the channels copy what is dirty.
    fn start_round(&mut self, round: u32, stage: Stage) {
        self.round_began = Instant::now();
        self.counters.pages.store(0, Ordering::Relaxed);
        let last = stage == Stage::StopAndCopy;
        let find_holes = last && self.options.verify;
        let order = Order { round, everything: round == 0, last, find_holes };
        for channel in &self.channels {
            // A channel that is gone has said why, which is found below.
            let _ = channel.orders.send(order);
        }
    }

    /// Waits until what is dirty is copied and, where that matters, in place at the destination.
    fn copy_round(&mut self, round: u32, stage: Stage) -> Result<Option<Input>, EngineError> {
        let last = stage == Stage::StopAndCopy;
        let mut total = RoundMeasures { round, ..RoundMeasures::default() };
        for _ in 0..self.channels.len() {
            let carried = self.await_carried(round, stage)?;
            total.data += carried.data;
            total.zero += carried.zero;
            total.sent += carried.sent;
        }
        self.say(&Message::RoundEnd { round })?;
        let waits = !last || self.options.verify;
        if waits {
            self.await_message("the acknowledgement of a round", limits::ANSWER, |message| {
                (*message == Message::RoundAck { round }).then_some(())
            })?;
        } else {
            self.unawaited = Some(round);
            if let Some(pump) = &self.pump {
                // What follows on the control connection is taken when the round is in place.
                pump.open();
            }
        }
        total.time = self.round_began.elapsed();
        self.last_round = Some(total);
        if last {
            self.measures.round_list.push(total);
            let part = self.lap();
            self.measures.parts.copy += part;
        }
        Ok(Some(if waits { Input::RoundPlaced } else { Input::RoundSent }))
    }

    /// Waits for one channel to have carried its part of `round`, reporting progress meanwhile.
    fn await_carried(&mut self, round: u32, stage: Stage) -> Result<Carried, EngineError> {
        loop {
            match self.next_event(limits::TICK)? {
                // A thread that ended without a word will never send one.
                None if self.channels.iter().any(|channel| channel.thread.is_finished()) => {
                    match self.events.try_recv() {
                        Ok(event) => return Err(Self::out_of_place(event)),
                        Err(_) => return Err(EngineError::Panicked("channel")),
                    }
                }
                None => self.report(round, stage, false),
                Some(Event::Carried { round: carried, result }) if carried == round => return result,
                Some(other) => return Err(Self::out_of_place(other)),
            }
        }
    }

    /// The next event, within `limit`. Notices a cancellation, which an event may wait behind, before COMMIT.
    fn next_event(&self, limit: Duration) -> Result<Option<Event>, EngineError> {
        if self.cancel.is_cancelled() && !self.commit_sent {
            return Err(EngineError::Cancelled);
        }
        match self.events.recv_timeout(limit) {
            // What an earlier control connection ended with is of no interest.
            Ok(Event::Peer { connection, .. }) if connection != self.connection => Ok(None),
            Ok(Event::Peer { message: Ok(Message::RoundAck { round }), .. })
                if self.unawaited == Some(round) =>
            {
                Ok(None)
            }
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(EngineError::Panicked("control")),
        }
    }

    /// What an event that nobody waits for means.
    fn out_of_place(event: Event) -> EngineError {
        match event {
            Event::Peer { message: Ok(Message::Abort { code, text }), .. } => {
                EngineError::Aborted { peer: PEER, code, text }
            }
            Event::Peer { message: Err(error), .. } => error,
            Event::Peer { message: Ok(message), .. } => EngineError::Protocol {
                peer: PEER,
                what: format!("it said {:?} out of place", message.kind()),
            },
            Event::Carried { result: Err(error), .. } | Event::StatePassed(Err(error)) => error,
            Event::StatePassed(Ok(_)) => EngineError::State(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                "it ended too early",
            )),
            Event::Carried { .. } => EngineError::Panicked("channel"),
        }
    }

    /// Waits up to `limit` for the message that `wanted` takes.
    fn await_message<T>(
        &self,
        what: &'static str,
        limit: Duration,
        mut wanted: impl FnMut(&Message) -> Option<T>,
    ) -> Result<T, EngineError> {
        let until = Instant::now() + limit;
        loop {
            match self.next_event(limits::TICK.min(limit))? {
                Some(Event::Peer { message: Ok(message), connection }) => match wanted(&message) {
                    Some(taken) => return Ok(taken),
                    None => return Err(Self::out_of_place(Event::Peer { message: Ok(message), connection })),
                },
                Some(other) => return Err(Self::out_of_place(other)),
                None if Instant::now() >= until => return Err(EngineError::Timeout { what, limit }),
                None => {}
            }
        }
    }

    /// In states that only the destination can end: what it says next.
    fn await_peer(&mut self, state: State) -> Result<Input, EngineError> {
        let (what, limit) = match state {
            State::Negotiating => ("the destination to accept", limits::ANSWER),
            State::AwaitingReady => ("the destination to load the device state", limits::ANSWER),
            _ => ("the destination to run the guest", limits::RUNNING),
        };
        let committed = self.commit_sent;
        let input = self.await_message(what, limit, |message| match message {
            Message::Accept => Some(Input::Accepted),
            Message::Ready => Some(Input::Ready),
            Message::Running => Some(Input::Running),
            // A destination that aborts has discarded the guest; after COMMIT that is all that matters.
            Message::Discarded | Message::Abort { .. } if committed => Some(Input::Discarded),
            _ => None,
        })?;
        match input {
            Input::Ready => self.measures.parts.load = self.lap(),
            Input::Running => self.measures.parts.handover = self.lap(),
            Input::Discarded => {
                let what = "it could not run the guest and has discarded it".to_owned();
                self.note(state, EngineError::Protocol { peer: PEER, what });
            }
            _ => {}
        }
        Ok(input)
    }

    fn ask_policy(&mut self) -> Result<Option<Input>, EngineError> {
        let Some(mut round) = self.last_round.take() else {
            return Err(EngineError::Panicked("main"));
        };
        let harvest_began = Instant::now();
        let dirty = self.count_dirty()?;
        // The last harvest costs what this count costs; device state and handover are measured only once, so
        // they are taken to be what they are on the machines where this was built.
        let fixed = harvest_began.elapsed() + Duration::from_millis(15);
        round.remaining = dirty;
        let (decision, estimate) = self.policy.round(&Round {
            time: round.time,
            sent: round.sent,
            remaining: dirty,
            fixed,
            ..Round::default()
        });
        self.estimate = Some(estimate);
        self.remaining = dirty;
        self.measures.round_list.push(round);
        self.report(round.round, Stage::PreCopy, true);
        match decision {
            Decision::NextRound(_) => Ok(Some(Input::NextRound)),
            Decision::SwitchOver => Ok(Some(Input::SwitchOver)),
            Decision::GiveUp(advice) => Err(EngineError::NotConverging(advice)),
        }
    }

    fn count_dirty(&self) -> Result<PageCount, EngineError> {
        let Some(tracker) = &self.tracker else { return Ok(PageCount::ZERO) };
        let mut dirty = PageCount::ZERO;
        for (number, block) in self.ram.iter().enumerate() {
            dirty += tracker.count(number, block.all())?;
        }
        Ok(dirty)
    }

    /// Gets both machines ready, so that as little as possible is left to do when the guest is stopped.
    fn prepare(&mut self) -> Result<Option<Input>, EngineError> {
        self.say(&Message::Prepare)?;
        let stream = self.vm.open_state().map_err(EngineError::Vm)?;
        self.await_message("the destination to get ready", limits::ANSWER, |message| {
            (*message == Message::Prepared).then_some(())
        })?;
        let Some(control) = &self.control else { return Err(EngineError::Panicked("control")) };
        self.pump = Some(StatePump::start(stream, Arc::clone(control), self.events_in.clone()));
        Ok(Some(Input::Prepared))
    }

    fn stop_guest(&mut self) -> Result<Option<Input>, EngineError> {
        let stopped = self.vm.stop().map_err(EngineError::Vm)?;
        self.stopped_at = Some(stopped);
        self.mark = stopped;
        self.measures.tracked = stopped.saturating_duration_since(self.started + self.measures.setup);
        self.measures.parts.drain = self.lap();
        Ok(Some(Input::GuestStopped))
    }

    fn compare_digests(&mut self) -> Result<Option<Input>, EngineError> {
        self.say(&Message::DigestRequest)?;
        let mut own = Vec::new();
        for block in self.ram.iter() {
            own.push(digests::digests(block, 0..digests::chunks(block.pages()))?);
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
                self.await_message("the destination's digests", limits::ANSWER, |message| match message {
                    Message::Digests { block, first, digests } => Some((*block, *first, digests.clone())),
                    _ => None,
                })?;
            let fits = (block as usize, first as usize) == next
                && !theirs.is_empty()
                && next.1 + theirs.len() <= own[next.0].len();
            if !fits {
                let what = "it sent digests that nobody asked for".to_owned();
                return Err(EngineError::Protocol { peer: PEER, what });
            }
            for (chunk, digest) in theirs.iter().enumerate().map(|(i, digest)| (next.1 + i, digest)) {
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
        let part = self.lap();
        self.measures.parts.verify += part;
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

    /// Lets the machine save its devices. Unless digests were compared and all pages are in place by now, what it
    /// saves is held back until the last round has ended.
    fn release_state(&mut self) -> Result<Option<Input>, EngineError> {
        if let (Some(pump), false) = (&self.pump, self.options.verify) {
            pump.hold();
        }
        self.vm.release_state().map_err(EngineError::Vm)?;
        Ok(None)
    }

    fn finish_state(&mut self) -> Result<Option<Input>, EngineError> {
        self.report(self.last_number(), Stage::Handover, false);
        let until = Instant::now() + limits::ANSWER;
        let bytes = loop {
            match self.next_event(limits::TICK)? {
                Some(Event::StatePassed(result)) => break result?,
                Some(other) => return Err(Self::out_of_place(other)),
                None if Instant::now() >= until => {
                    return Err(EngineError::Timeout { what: "the device state", limit: limits::ANSWER });
                }
                None => {}
            }
        };
        self.measures.device_state = bytes;
        self.vm.state_saved().map_err(EngineError::Vm)?;
        // Guest memory is not looked at again: QEMU's own migration, too, sends the last of RAM before it saves devices,
        // so saving them must not write it (qemu_savevm_state_complete_precopy).
        self.say(&Message::DeviceStateEnd)?;
        self.measures.parts.save = self.lap();
        Ok(Some(Input::StateSent))
    }

    fn commit(&mut self) -> Result<Option<Input>, EngineError> {
        // From here on, whatever happens, the guest is not ours: not even when sending fails, for part of it may
        // have arrived.
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
    fn resolve(&mut self) -> Result<Option<Input>, EngineError> {
        let until = *self.resolve_until.get_or_insert_with(|| Instant::now() + limits::RESOLVE);
        // The answer may be here already, behind what went wrong. Then the old connection must end: as long as it
        // stands, the destination waits there and takes no other.
        while let Ok(event) = self.events.try_recv() {
            match event {
                Event::Peer { message: Ok(Message::Running), .. } => return Ok(Some(Input::Running)),
                Event::Peer { message: Ok(Message::Discarded | Message::Abort { .. }), .. } => {
                    return Ok(Some(Input::Discarded));
                }
                _ => {}
            }
        }
        self.cut();
        loop {
            let connected = Stream::connect(&self.options.to)
                .map_err(|source| EngineError::Connect { address: self.options.to.to_string(), source })
                .and_then(|mut stream| self.greet(&mut stream, Role::Resolve).map(|()| stream));
            match connected {
                Ok(stream) => {
                    self.use_control(stream)?;
                    return Ok(Some(Input::Reconnected));
                }
                Err(error) if Instant::now() >= until => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    /// Breaks the control connection.
    fn cut(&self) {
        if let Some(control) = &self.control {
            control.shut_down();
        }
    }

    /// Tells the destination, in a thread of its own: a link that is stuck must not hold up the guest.
    fn abort(&mut self) {
        let (Some(control), Some((_, cause))) = (self.control.clone(), &self.cause) else { return };
        let message = Message::Abort { code: cause.abort_code(), text: cause.to_string() };
        self.abort = Some(std::thread::spawn(move || {
            let _ = control.send(&message);
        }));
    }

    fn resume(&mut self) {
        if let Err(error) = self.vm.resume() {
            self.resume_failed = Some(error);
        }
    }

    /// Ends all threads, and with the last clone of the tracker the tracking.
    fn shut_down(&mut self) {
        self.limiter.stop();
        if let Some(pump) = &self.pump {
            pump.end();
        }
        for channel in self.channels.drain(..) {
            drop(channel.orders);
            channel.stream.shut_down();
            let _ = channel.thread.join();
        }
        self.tracker = None;
        if let Some(abort) = self.abort.take() {
            let until = Instant::now() + limits::ABORT;
            while !abort.is_finished() && Instant::now() < until {
                std::thread::sleep(limits::TICK / 20);
            }
        }
        self.cut();
        if let Some(pump) = self.pump.take() {
            pump.join();
        }
    }

    fn last_number(&self) -> u32 {
        self.measures.round_list.last().map_or(0, |round| round.round)
    }

    /// The time since the last part of the downtime ended.
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let part = now.saturating_duration_since(self.mark);
        self.mark = now;
        part
    }

    fn finish_measures(&mut self) {
        let now = Instant::now();
        self.measures.total = now - self.started;
        self.measures.downtime =
            self.stopped_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.measures.rounds = self.measures.round_list.len();
        let pages = ByteCount(self.counters.sent.load(Ordering::Relaxed));
        self.measures.sent = pages + self.measures.device_state;
    }

    fn report(&mut self, round: u32, stage: Stage, round_ended: bool) {
        let done = PageCount(self.counters.pages.load(Ordering::Relaxed)).bytes();
        let remaining = self.remaining.bytes();
        // Within the first round everything dealt with is off the list; later rounds walk all memory to find little.
        let remaining = if round == 0 && !round_ended { remaining.saturating_sub(done) } else { remaining };
        (self.progress)(&Progress {
            elapsed: self.started.elapsed(),
            stage,
            round,
            round_ended,
            sent: ByteCount(self.counters.sent.load(Ordering::Relaxed)),
            remaining,
            dirty_rate: self.estimate.as_ref().map(|estimate| estimate.dirty_rate),
            bandwidth: self.estimate.as_ref().map(|estimate| estimate.bandwidth),
            expected_downtime: self.estimate.as_ref().and_then(|estimate| estimate.expected_downtime),
        });
    }
}

fn phase_of(state: State) -> Phase {
    match state {
        State::Idle | State::Negotiating => Phase::Setup,
        State::PreCopy { .. } | State::Preparing { .. } => Phase::PreCopy,
        State::Stopping { .. }
        | State::StopAndCopy
        | State::Verifying
        | State::SavingState
        | State::AwaitingReady
        | State::Cancelled => Phase::StopAndCopy,
        State::Handover | State::InDoubt | State::Done => Phase::Handover,
    }
}
