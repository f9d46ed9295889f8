//! The destination of a migration.
//!
//! [`receive`] is a loop around the state machine, as at the source. Threads: this one; one that
//! reads the control connection; one a data channel, of memory or of a disk. Messages come through
//! a queue, which is bounded: a machine that loads its state slowly slows the source down instead
//! of filling memory. They are taken in order: what follows the end of a round is looked at when
//! every channel has placed that round.

mod barriers;
mod channel;
mod disk;
mod door;
mod fault;
mod layout;
mod memory;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_codec::Decompressor;
use godwit_disk::{Disk, DiskChoice, DiskSink, NotAllowed};
use godwit_memory::RamBlock;
use godwit_protocol::destination::{Action, Input, State, step};
use godwit_units::ByteCount;
use godwit_wire::{
    AbortCode, DIGESTS_PER_MESSAGE, Greeting, Message, Offer, QUESTION_LIMIT, QUESTIONS_LIMIT,
    Role, SessionId,
};

use crate::address::{Listener, Stream};
use crate::compression::Codecs;
use crate::digests;
use crate::link::{
    ControlWriter, FrameReader, link_error, read_messages, say_alive, send_greeting,
};
use crate::vm::{DestinationVm, RunError};
use crate::{Cancel, EngineError, Failure, Phase, Survivor, limits, threads};

use barriers::Barriers;
use channel::{Channel, PEER, PageSink};
use disk::{DiskPlace, LastRound};
use door::Door;
pub use fault::Fault;
use memory::MemoryPlace;

/// Events that may wait: pieces of device state mostly, 256 KiB each at the most.
const EVENTS_LIMIT: usize = 32;

/// What the source said on one of its control connections, or why it says no more.
struct Event {
    connection: u32,
    message: Result<Message, EngineError>,
}

/// What is told while receiving.
#[derive(Clone, Debug)]
pub enum Notice {
    /// A connection was refused; waiting goes on.
    Refused(String),
    /// Another source came while one is being served, and was told so.
    Busy {
        /// Where it called from.
        peer: String,
    },
    /// A source was accepted.
    Accepted {
        /// Guest memory to come.
        ram: ByteCount,
        /// Disks that come along, and their sizes.
        disks: Vec<Disk>,
    },
    /// A round is in place.
    Round {
        /// Its number.
        round: u32,
        /// Bytes received so far.
        received: ByteCount,
    },
    /// The source was lost when all was ready; it is waited for.
    AwaitingSource {
        /// For how long.
        limit: Duration,
    },
}

/// The destination's measures of a finished migration.
#[derive(Clone, Copy, Debug, Default)]
pub struct Received {
    /// Bytes received over the data channels.
    pub bytes: ByteCount,
    /// From the end of the device state to its being loaded.
    pub load: Duration,
    /// From COMMIT to the guest running.
    pub resume: Duration,
    /// Whether digests were asked for.
    pub verified: bool,
    /// Whether the guest was started; it was not if it was paused at the source.
    pub running: bool,
    /// From the acceptance of the source to the guest running.
    pub total: Duration,
    /// From the last byte of the disks being handed to them to READY: writing it out, the last
    /// flush, and what of the device state was not loaded by then. `None` without disks.
    pub disks_to_ready: Option<Duration>,
}

/// How a guest is to be taken in.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a source is waited for; `None`: for ever.
    pub wait: Option<Duration>,
    /// Codecs that are taken.
    pub codecs: Codecs,
    /// Disks that the source may overwrite.
    pub disks: DiskChoice,
    /// Take a guest in that may come to use more memory than this host, or the control group of its
    /// VM, has left.
    pub overcommit: bool,
    /// Faults to make up, for tests.
    pub faults: Faults,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            wait: None,
            codecs: Codecs::ALL,
            disks: DiskChoice::None,
            overcommit: false,
            faults: Faults::default(),
        }
    }
}

/// Faults made up on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// A channel, by its number (those of disks behind those of memory), that places each of its
    /// frames only after this time.
    pub slow_channel: Option<(usize, Duration)>,
    /// Pages are taken over any channel.
    pub any_channel: bool,
    /// This process is killed.
    pub kill: Option<Fault>,
}

/// Takes in one guest over `listener`. Connections that do not speak the protocol are refused and
/// told of.
///
/// # Errors
/// Says what failed, when, and what became of the guest.
pub fn receive(
    vm: &mut dyn DestinationVm,
    listener: &Listener,
    options: &Options,
    cancel: &Cancel,
    notice: &mut dyn FnMut(&Notice),
) -> Result<Received, Failure> {
    let (events_in, events) = mpsc::sync_channel(EVENTS_LIMIT);
    let destination = Destination {
        ram: vm.ram(),
        vm,
        listener,
        codecs: options.codecs,
        allowed: &options.disks,
        overcommit: options.overcommit,
        faults: options.faults,
        cancel,
        notice,
        events,
        events_in,
        session: SessionId([0; 16]),
        door: None,
        control: None,
        connection: 0,
        offer: None,
        order: Arc::default(),
        disks: Vec::new(),
        open_disks: 0,
        last_round: Arc::default(),
        channels: Vec::new(),
        barriers: Arc::new(Barriers::new(0)),
        received: Arc::default(),
        round: 0,
        sink: None,
        state_piece: Vec::new(),
        cause: None,
        commit_seen: None,
        pages_complete: false,
        linger_until: None,
        accepted: Instant::now(),
        measures: Received::default(),
    };
    destination.run(options.wait)
}

struct Destination<'a> {
    vm: &'a mut dyn DestinationVm,
    ram: Arc<Vec<RamBlock>>,
    listener: &'a Listener,
    codecs: Codecs,
    /// Disks that the source may overwrite.
    allowed: &'a DiskChoice,
    overcommit: bool,
    faults: Faults,
    cancel: &'a Cancel,
    notice: &'a mut dyn FnMut(&Notice),
    events: Receiver<Event>,
    events_in: SyncSender<Event>,
    session: SessionId,
    /// Who else comes, from the moment that a source was found.
    door: Option<Door>,
    control: Option<Arc<ControlWriter>>,
    connection: u32,
    offer: Option<Offer>,
    order: Arc<Vec<usize>>,
    /// The disks that come along, until their channels have them.
    disks: Vec<(Disk, Box<dyn DiskSink>)>,
    /// The machine's disks that are open for us.
    open_disks: usize,
    last_round: Arc<LastRound>,
    channels: Vec<(Stream, JoinHandle<()>)>,
    barriers: Arc<Barriers>,
    received: Arc<AtomicU64>,
    round: u32,
    sink: Option<Box<dyn Write + Send>>,
    state_piece: Vec<u8>,
    cause: Option<(Phase, EngineError)>,
    commit_seen: Option<Instant>,
    pages_complete: bool,
    /// How long to be there for a source that did not hear that the guest runs here.
    linger_until: Option<Instant>,
    accepted: Instant,
    measures: Received,
}

impl Destination<'_> {
    fn run(mut self, wait: Option<Duration>) -> Result<Received, Failure> {
        let mut state = State::Listening;
        let mut uncertain = false;
        let mut input = match self.await_source(wait) {
            Ok(()) => Input::Offer,
            Err(error) => self.failed(state, error),
        };
        loop {
            let stepped = step(state, input).or_else(|unexpected| {
                let error = EngineError::Protocol { peer: PEER, what: unexpected.to_string() };
                let input = self.failed(state, error);
                step(state, input)
            });
            let Ok((next, actions)) = stepped else { break };
            state = next;
            let _state = tracing::info_span!("destination", ?state).entered();
            let mut follow = None;
            for action in actions {
                let _action = tracing::debug_span!("action", ?action).entered();
                match self.perform(action) {
                    Ok(input) => {
                        self.faults.kill.inspect(|fault| fault.strike_after(action));
                        follow = input.or(follow);
                    }
                    Err(error) => {
                        uncertain |= matches!(error, EngineError::Uncertain(_));
                        follow = Some(self.failed(state, error));
                        break;
                    }
                }
            }
            // Not known whether the guest runs: to say anything to the source would be a guess.
            if state.is_final() || uncertain {
                break;
            }
            input = match follow {
                Some(input) => input,
                None => self.await_peer().unwrap_or_else(|error| self.failed(state, error)),
            };
        }
        let last_words = self.shut_down();
        if state == State::Done {
            self.measures.bytes = ByteCount(self.received.load(Ordering::Relaxed));
            return Ok(self.measures);
        }
        let (phase, mut cause) =
            self.cause.take().unwrap_or((Phase::Setup, EngineError::Cancelled));
        if let (EngineError::Link { .. }, Some((code, text))) = (&cause, last_words) {
            cause = EngineError::Aborted { peer: PEER, code, text };
        }
        let survivor = if uncertain { Survivor::Unknown } else { Survivor::Source };
        Err(Failure { phase, survivor, cause })
    }

    /// Keeps the first failure, and says which input it is.
    fn failed(&mut self, state: State, error: EngineError) -> Input {
        let input = match &error {
            EngineError::Link { .. } | EngineError::Silent { .. } => Input::LinkLost,
            EngineError::Aborted { .. } => Input::Aborted,
            _ => Input::Failed,
        };
        // What kept the guest from running is what the source must hear, whatever broke before.
        if state == State::Starting {
            self.cause = None;
        }
        self.cause.get_or_insert((phase_of(state), error));
        input
    }

    /// Waits for a source whose offer fits.
    fn await_source(&mut self, wait: Option<Duration>) -> Result<(), EngineError> {
        let until = wait.map(|wait| Instant::now() + wait);
        let mut stream = loop {
            match self.next_connection(until)? {
                (greeting, stream) if greeting.role == Role::Control => {
                    self.session = greeting.session;
                    break stream;
                }
                _ => {
                    (self.notice)(&Notice::Refused("a connection of an unknown session".to_owned()))
                }
            }
        };
        self.accepted = Instant::now();
        self.door = Some(Door::open(self.listener, self.session, stream.peer())?);
        send_greeting(&mut stream, Greeting { session: self.session, role: Role::Control }, PEER)?;
        self.use_control(stream)?;
        let Message::Offer(offer) = self.next_message(limits::GREETING)? else {
            let what = "it did not begin with an offer".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        };
        let order =
            layout::fit(&offer, self.vm.machine(), &self.ram).map_err(EngineError::Layout)?;
        self.order = Arc::new(order);
        self.check_room()?;
        let disks = layout::disks(&offer).map_err(EngineError::Layout)?;
        if let (true, Some(disk)) = (self.allowed.is_none(), disks.first()) {
            // The adapter, which knows all names of a disk, need not be asked.
            return Err(EngineError::Layout(NotAllowed(disk.name.clone()).to_string()));
        }
        self.compare()?;
        let sinks = match (self.vm.disk_destination(), disks.first()) {
            (_, None) => Ok(Vec::new()),
            (Some(vm), _) => vm.open_disks(&disks, self.allowed).map_err(|error| error.to_string()),
            (None, Some(disk)) => {
                Err(format!("disk '{}' cannot be received by this kind of machine", disk.name))
            }
        };
        let sinks = sinks.map_err(EngineError::Layout)?;
        if sinks.len() != disks.len() {
            return Err(EngineError::Panicked("main"));
        }
        self.disks = disks.iter().cloned().zip(sinks).collect();
        self.open_disks = self.disks.len();
        self.measures.verified = offer.verify;
        self.offer = Some(offer);
        let ram = self.ram.iter().map(|block| block.pages().bytes()).sum();
        (self.notice)(&Notice::Accepted { ram, disks });
        Ok(())
    }

    /// Has the adapter compare the machines; whatever it asks goes to the source's adapter.
    fn compare(&mut self) -> Result<(), EngineError> {
        let Self { vm, control, events, cancel, connection, .. } = self;
        let (mut asked, mut broken) = (0, None);
        let compared = vm.compare(&mut |question| {
            asked += 1;
            let answered = match control {
                Some(control) if asked <= QUESTIONS_LIMIT && question.len() <= QUESTION_LIMIT => {
                    let sent = control.send(&Message::Question(question.to_vec()));
                    sent.and_then(|()| answer_of(events, *connection, cancel))
                }
                _ => Err(EngineError::Panicked("main")),
            };
            answered.map_err(|error| {
                let words = error.to_string();
                broken = Some(error);
                words.into()
            })
        });
        // A link that broke is that, whatever the adapter makes of it.
        match (compared, broken) {
            (_, Some(error)) => Err(error),
            (Err(error), None) => Err(EngineError::Layout(error.to_string())),
            (Ok(()), None) => Ok(()),
        }
    }

    /// Whether all memory that the guest may come to use has room here.
    fn check_room(&self) -> Result<(), EngineError> {
        godwit_memory::mounts_hold(&self.ram)?;
        if !self.overcommit {
            godwit_memory::host_holds(&self.ram, self.vm.pid())?;
        }
        Ok(())
    }

    /// The next connection that greets as one of godwit's; others are refused.
    fn next_connection(
        &mut self,
        until: Option<Instant>,
    ) -> Result<(Greeting, Stream), EngineError> {
        let began = Instant::now();
        loop {
            let cancel = self.cancel;
            let accepted =
                self.listener.accept(until, || cancel.is_cancelled()).map_err(link_error(PEER))?;
            let Some(mut stream) = accepted else {
                if self.cancel.is_cancelled() {
                    return Err(EngineError::Cancelled);
                }
                let limit =
                    until.map_or(Duration::ZERO, |until| until.saturating_duration_since(began));
                return Err(EngineError::Timeout { what: "a connection of the source", limit });
            };
            match door::greet(&mut stream) {
                Ok(greeting) => return Ok((greeting, stream)),
                Err(error) => (self.notice)(&Notice::Refused(error.to_string())),
            }
        }
    }

    /// The next connection of the session; `None` at `until`.
    fn next_of_session(
        &mut self,
        until: Instant,
    ) -> Result<Option<(Greeting, Stream)>, EngineError> {
        match &self.door {
            Some(door) => door.next(until, self.cancel, self.notice),
            None => Err(EngineError::Panicked("door")),
        }
    }

    fn use_control(&mut self, stream: Stream) -> Result<(), EngineError> {
        let read = stream.try_clone().map_err(link_error(PEER))?;
        let control = match self.control.take() {
            Some(control) => {
                control.replace(stream)?;
                control
            }
            None => Arc::new(ControlWriter::new(stream, PEER)?),
        };
        self.control = Some(Arc::clone(&control));
        say_alive(&control)?;
        self.connection += 1;
        let (events, connection) = (self.events_in.clone(), self.connection);
        read_messages(read, PEER, move |message| events.send(Event { connection, message }).is_ok())
    }

    fn say(&self, message: &Message) -> Result<(), EngineError> {
        match &self.control {
            Some(control) => control.send(message),
            None => Ok(()),
        }
    }

    /// The next event, waited for as long as the link stands; `None` at `until`.
    fn next_event(&mut self, until: Option<Instant>) -> Result<Option<Event>, EngineError> {
        loop {
            if let Some(door) = &self.door {
                door.tell(self.notice);
            }
            // Once COMMIT was seen the guest is ours, and the operator's wish comes too late.
            if self.cancel.is_cancelled() && self.commit_seen.is_none() {
                return Err(EngineError::Cancelled);
            }
            match self.events.recv_timeout(limits::TICK) {
                Ok(Event { connection, .. }) if connection != self.connection => {}
                Ok(event) => return Ok(Some(event)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(EngineError::Panicked("control"));
                }
            }
            // Then the guest never runs here, and the source need not wait to hear it.
            if self.commit_seen.is_none() && self.vm.has_ended() {
                return Err(EngineError::Ended("destination"));
            }
            // Once all pages are in place only the control connection counts.
            if let (false, Some(error)) = (self.pages_complete, self.barriers.failure()) {
                return Err(error);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
        }
    }

    /// The next message of the source within `limit`.
    fn next_message(&mut self, limit: Duration) -> Result<Message, EngineError> {
        match self.next_event(Some(Instant::now() + limit))? {
            Some(Event { message, .. }) => match message? {
                Message::Abort { code, text } => {
                    Err(EngineError::Aborted { peer: PEER, code, text })
                }
                message => Ok(message),
            },
            None => Err(EngineError::Timeout { what: "the source", limit }),
        }
    }

    /// What the source says next, as an input.
    fn await_peer(&mut self) -> Result<Input, EngineError> {
        match self.next_event(self.linger_until)? {
            Some(Event { message, .. }) => self.input_of(message?),
            None => {
                Err(EngineError::Timeout { what: "the source's farewell", limit: limits::LINGER })
            }
        }
    }

    fn input_of(&mut self, message: Message) -> Result<Input, EngineError> {
        Ok(match message {
            Message::RoundEnd { round } => {
                self.round = round;
                let cancel = self.cancel;
                self.barriers.wait(round.into(), || cancel.is_cancelled())?;
                Input::RoundEnd
            }
            Message::Prepare => Input::Prepare,
            Message::DigestRequest => Input::DigestRequest,
            Message::DeviceState(piece) => {
                self.state_piece = piece;
                Input::State
            }
            Message::DeviceStateEnd => {
                self.pages_complete = true;
                Input::StateEnd
            }
            Message::Farewell => Input::Farewell,
            Message::Commit => {
                self.commit_seen = Some(Instant::now());
                Input::Commit
            }
            Message::Abort { code, text } => {
                return Err(EngineError::Aborted { peer: PEER, code, text });
            }
            other => {
                let what = format!("it said {:?} out of place", other.kind());
                return Err(EngineError::Protocol { peer: PEER, what });
            }
        })
    }

    fn perform(&mut self, action: Action) -> Result<Option<Input>, EngineError> {
        match action {
            Action::SendAccept => {
                let offered = Codecs(self.offer.as_ref().map_or(0, |offer| offer.codecs));
                self.say(&Message::Accept { codecs: self.codecs.common(offered).0 })?;
                self.accept_channels()?;
            }
            Action::SendRoundAck => {
                // Behind the last round nobody has a sink any more.
                if self.open_disks > 0 && self.last_round.ended() == self.open_disks {
                    self.open_disks = 0;
                    if let Some(vm) = self.vm.disk_destination() {
                        vm.close_disks().map_err(EngineError::Vm)?;
                    }
                }
                let flush = self.last_round.take_flush();
                self.say(&Message::RoundAck { round: self.round, flush })?;
                let received = ByteCount(self.received.load(Ordering::Relaxed));
                (self.notice)(&Notice::Round { round: self.round, received });
            }
            Action::Prepare => {
                // Others may have filled the mount meanwhile. Soon the guest stops, and then it is
                // too late to say so.
                self.check_room()?;
                self.sink = Some(self.vm.prepare().map_err(EngineError::Vm)?);
                self.say(&Message::Prepared)?;
            }
            Action::SendDigests => self.send_digests()?,
            Action::WriteState => self.write_state()?,
            Action::FinishLoad => {
                if self.open_disks > 0 {
                    let what =
                        "it sent all device state before the last round of its disks".to_owned();
                    return Err(EngineError::Protocol { peer: PEER, what });
                }
                let began = Instant::now();
                self.sink = None;
                self.vm.finish_load().map_err(EngineError::Vm)?;
                self.measures.load = began.elapsed();
                return Ok(Some(Input::Loaded));
            }
            Action::SendReady => {
                self.say(&Message::Ready)?;
                self.measures.disks_to_ready =
                    self.last_round.disks_in_place().map(|at| at.elapsed());
            }
            Action::RunGuest => {
                if self.vm.has_ended() {
                    return Err(EngineError::Ended("destination"));
                }
                if self.offer.as_ref().is_some_and(|offer| offer.running) {
                    self.vm.taking_over().map_err(EngineError::Vm)?;
                    self.faults
                        .kill
                        .filter(|it| *it == Fault::KillBeforeRun)
                        .inspect(|it| it.strike());
                    self.vm.run().map_err(|error| match error {
                        RunError::NeverRan(error) => EngineError::Vm(error),
                        RunError::Unknown(error) => EngineError::Uncertain(error),
                    })?;
                    self.measures.running = true;
                }
                self.measures.resume = self.commit_seen.map_or(Duration::ZERO, |at| at.elapsed());
                self.measures.total = self.accepted.elapsed();
                return Ok(Some(Input::Started));
            }
            Action::SendRunning => {
                self.linger_until.get_or_insert_with(|| Instant::now() + limits::LINGER);
                let said = self.say(&Message::Running);
                // Switches learn the new place; a guest without a network card has nothing to
                // announce.
                let _ = self.vm.announce();
                said?;
            }
            Action::AwaitResolve => self.await_resolve()?,
            Action::DiscardGuest => {
                self.sink = None;
                self.close_channels();
                self.vm.discard().map_err(EngineError::Uncertain)?;
            }
            Action::SendDiscarded => {
                let message = match &self.cause {
                    Some((_, cause)) => {
                        Message::Abort { code: cause.abort_code(), text: cause.to_string() }
                    }
                    None => Message::Discarded,
                };
                // Best effort: a source that does not hear it asks, or notices that the link is
                // gone.
                let _ = self.say(&message);
            }
        }
        Ok(None)
    }

    fn accept_channels(&mut self) -> Result<(), EngineError> {
        let channels = usize::from(self.offer.as_ref().map_or(0, |offer| offer.channels));
        let all = channels + self.disks.len();
        let mut streams: Vec<Option<Stream>> = (0..all).map(|_| None).collect();
        let until = Instant::now() + limits::CONNECT;
        while streams.iter().any(Option::is_none) {
            let Some((greeting, stream)) = self.next_of_session(until)? else {
                return Err(EngineError::Timeout {
                    what: "the data channels",
                    limit: limits::CONNECT,
                });
            };
            let slot = match greeting.role {
                Role::Channel(number) => streams.get_mut(usize::from(number)),
                _ => None,
            };
            match slot {
                Some(slot) if slot.is_none() => *slot = Some(stream),
                _ => (self.notice)(&Notice::Refused(
                    "a channel that the offer does not have".to_owned(),
                )),
            }
        }
        self.barriers = Arc::new(Barriers::new(all));
        let memory = |number| -> Box<dyn PageSink> {
            Box::new(MemoryPlace {
                number,
                channels,
                blocks: Arc::clone(&self.ram),
                order: Arc::clone(&self.order),
                any_channel: self.faults.any_channel,
            })
        };
        let mut places: Vec<Box<dyn PageSink>> = (0..channels).map(memory).collect();
        for (disk, sink) in self.disks.drain(..) {
            let number = self.order.len() + places.len() - channels;
            places.push(Box::new(DiskPlace::new(number, disk, sink, Arc::clone(&self.last_round))));
        }
        for (number, (stream, place)) in streams.into_iter().flatten().zip(places).enumerate() {
            let handle = stream.try_clone().map_err(link_error(PEER))?;
            let channel = Channel {
                number,
                reader: FrameReader::new(stream, PEER),
                place,
                received: Arc::clone(&self.received),
                barriers: Arc::clone(&self.barriers),
                decompressor: Decompressor::new(),
                pages: Vec::new(),
                late: match self.faults.slow_channel {
                    Some((slow, late)) if slow == number => late,
                    _ => Duration::ZERO,
                },
            };
            self.channels.push((handle, threads::start("channel", move || channel.run())?));
        }
        Ok(())
    }

    fn write_state(&mut self) -> Result<(), EngineError> {
        let piece = std::mem::take(&mut self.state_piece);
        let Some(sink) = &mut self.sink else {
            return Err(EngineError::Protocol {
                peer: PEER,
                what: "it sent device state too early".to_owned(),
            });
        };
        sink.write_all(&piece).map_err(|error| {
            // The machine closed its end: why, it knows better.
            self.sink = None;
            self.vm.finish_load().err().map_or(EngineError::State(error), EngineError::Vm)
        })
    }

    fn send_digests(&mut self) -> Result<(), EngineError> {
        for (number, own) in self.order.iter().enumerate() {
            let block = &self.ram[*own];
            let chunks = digests::chunks(block.pages());
            for first in (0..chunks).step_by(DIGESTS_PER_MESSAGE) {
                let digests = digests::digests(
                    block,
                    first..chunks.min(first + DIGESTS_PER_MESSAGE),
                    |_, _| {},
                )?;
                self.say(&Message::Digests { block: number as u32, first: first as u32, digests })?;
            }
        }
        Ok(())
    }

    /// Waits for the source to come back and makes its new connection the control connection.
    fn await_resolve(&mut self) -> Result<(), EngineError> {
        (self.notice)(&Notice::AwaitingSource { limit: limits::LINGER });
        let until = *self.linger_until.get_or_insert_with(|| Instant::now() + limits::LINGER);
        loop {
            let Some((greeting, mut stream)) = self.next_of_session(until)? else {
                return Err(EngineError::Timeout { what: "the source", limit: limits::LINGER });
            };
            if greeting.role == Role::Resolve {
                send_greeting(
                    &mut stream,
                    Greeting { session: self.session, role: Role::Resolve },
                    PEER,
                )?;
                return self.use_control(stream);
            }
            (self.notice)(&Notice::Refused("a connection out of place".to_owned()));
        }
    }

    /// Ends all threads. Returns why the source gave up, if it said so after the link was seen to
    /// break: its channels end before its last word is read.
    fn shut_down(&mut self) -> Option<(AbortCode, String)> {
        if let Some(control) = &self.control {
            control.finish();
        }
        self.door = None;
        let mut last_words = None;
        let until = Instant::now() + limits::ABORT;
        // Nothing to wait for once all is said.
        let expects = self.control.is_some() && self.cause.is_some();
        while expects && last_words.is_none() && Instant::now() < until {
            match self.events.recv_timeout(limits::TICK) {
                Ok(Event { message: Ok(Message::Abort { code, text }), .. }) => {
                    last_words = Some((code, text));
                }
                Ok(Event { message: Err(_), connection }) if connection == self.connection => break,
                Ok(_) | Err(_) => {}
            }
        }
        self.close_channels();
        last_words
    }

    /// Ends all channels; whatever disks were open are closed.
    fn close_channels(&mut self) {
        self.disks.clear();
        for (stream, _) in &self.channels {
            stream.shut_down();
        }
        for (_, thread) in self.channels.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The source's answer to a question that was just asked.
fn answer_of(
    events: &Receiver<Event>,
    current: u32,
    cancel: &Cancel,
) -> Result<Vec<u8>, EngineError> {
    let until = Instant::now() + limits::QUESTION;
    while Instant::now() < until {
        if cancel.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        match events.recv_timeout(limits::TICK) {
            Ok(Event { connection, .. }) if connection != current => {}
            Ok(Event { message, .. }) => match message? {
                Message::Answer(answer) => return Ok(answer),
                Message::Abort { code, text } => {
                    return Err(EngineError::Aborted { peer: PEER, code, text });
                }
                other => {
                    let what = format!("it said {:?} when it was asked a question", other.kind());
                    return Err(EngineError::Protocol { peer: PEER, what });
                }
            },
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(EngineError::Panicked("control")),
        }
    }
    Err(EngineError::Timeout { what: "the source to answer a question", limit: limits::QUESTION })
}

fn phase_of(state: State) -> Phase {
    match state {
        State::Listening => Phase::Setup,
        State::Receiving => Phase::PreCopy,
        State::Prepared | State::Loading => Phase::StopAndCopy,
        State::Ready | State::Starting | State::Running | State::Done | State::Discarded => {
            Phase::Handover
        }
    }
}
