//! The control connection to the destination, and whatever is waited for: what the destination
//! says, what our own threads report, the operator's wish to cancel, and the end of the machine.
//!
//! Invariants: control connections are numbered, and what an earlier one ended with is no event.
//! Messages of the destination take a place each in a queue of limited length; all that our threads
//! report is one event for each order. From COMMIT on a wish to cancel is not heard, and from the
//! last piece of device state on the machine may end.

use std::io::{self, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_confine::Rights;
use godwit_units::{ByteCount, PageIndex};
use godwit_wire::{
    AbortCode, Features, Greeting, Message, Role, Secret, SessionId, Version, Versions, WireError,
};

use super::PEER;
use super::abort::Aborter;
use super::fault::{Fault, MadeUp};
use super::frame_sender::{DiskStatistics, RoundStatistics};
use super::random::{new_secret, new_session};
use super::record::Record;
use crate::address::{Address, Stream};
use crate::cells::{Cell, Cells};
use crate::link::{
    ControlWriter, link_error, read_messages, receive_greeting, say_alive, send_greeting,
};
use crate::return_proof::{FORGOTTEN, ReturnProof};
use crate::security::{BeginError, Security};
use crate::vm::SourceVm;
use crate::{Cancel, EngineError, Interrupt, limits, threads};

/// Messages of the destination that may wait to be looked at. All it says unasked is a few; digests
/// of 1 TiB are 256.
const PEERS_LIMIT: usize = 256;
/// Time for a test to do something in between.
const HOLD: Duration = Duration::from_secs(4);
/// From this round trip on a way is long: hosts that are nearer are of one place, and a connection
/// between them has its full rate at once.
const LONG_WAY: Duration = Duration::from_millis(5);
/// Between two attempts to connect again.
const RETRY: Duration = Duration::from_millis(200);

/// Pages of a block that the destination waits for.
pub(super) type Wanted = (u32, Vec<PageIndex>);

/// What the threads report.
pub(super) enum Event {
    /// The destination said something, or can no longer. It took one of [`PEERS_LIMIT`] places.
    Peer { connection: u32, message: Result<Message, EngineError> },
    /// A channel has carried its part of a round, barrier included.
    RoundStatistics { round: u32, result: Result<RoundStatistics, EngineError> },
    /// The channel of a disk has carried its part of a round, barrier included.
    DiskStatistics { disk: usize, round: u32, result: Result<DiskStatistics, EngineError> },
    /// Pages that are missing at the destination cannot be sent any more.
    Served { attempt: u32, error: EngineError },
    /// The device state has been passed on to its end.
    StatePassed(Result<ByteCount, EngineError>),
}

impl Event {
    /// What an event that nobody waits for means.
    pub(super) fn out_of_place(self) -> EngineError {
        match self {
            Self::Peer { message: Ok(Message::Abort { code, text }), .. } => {
                EngineError::Aborted { peer: PEER, code, text }
            }
            Self::Peer { message: Err(error), .. } => error,
            Self::Peer { message: Ok(message), .. } => EngineError::Protocol {
                peer: PEER,
                what: format!("it said {:?} out of place", message.kind()),
            },
            Self::RoundStatistics { result: Err(error), .. }
            | Self::DiskStatistics { result: Err(error), .. }
            | Self::Served { error, .. }
            | Self::StatePassed(Err(error)) => error,
            Self::StatePassed(Ok(_)) => EngineError::State(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "it ended too early",
            )),
            Self::RoundStatistics { .. } | Self::DiskStatistics { .. } => {
                EngineError::Panicked("channel")
            }
        }
    }
}

/// Why the destination has discarded the guest, if it told.
pub(super) type Reason = Option<(AbortCode, String)>;

/// What a source in doubt found.
pub(super) enum Resolved {
    /// The answer was here already.
    Running,
    Discarded(Reason),
    /// A new connection stands, over which to ask.
    Reconnected,
}

/// The control connection, once it was made.
struct Control {
    writer: Arc<ControlWriter>,
    aborter: Aborter,
}

pub(super) struct Session {
    call: Call,
    cells: Cells,
    cancel: Cancel,
    interrupt: Interrupt,
    made_up: MadeUp,
    /// What the threads report. All but the destination report once for each order, so only its
    /// messages are limited.
    events: Receiver<Event>,
    events_in: Sender<Event>,
    /// Who reads the destination takes a place here for each message, and waits for one; who looks
    /// at it gives it back.
    places: Receiver<()>,
    places_in: SyncSender<()>,
    control: Option<Control>,
    /// The way to the destination is a long one.
    long_way: bool,
    /// Where pages go that the destination asks for, as soon as it may: past all other events.
    wanted: Arc<Mutex<Option<SyncSender<Wanted>>>>,
    /// Numbers the control connections.
    connection: u32,
    /// The control connection of this number was seen to end.
    ended: bool,
    /// By what the destination knows us again, and the attempt whose connections are in use.
    secret: Secret,
    attempt: u32,
    /// The round whose acknowledgement nobody waits for.
    unawaited: Option<u32>,
    /// The machine has saved all its state, which is on its way.
    state_saved: bool,
    /// COMMIT was sent, or part of it.
    committed: bool,
    /// How long a source in doubt tries to ask; or until the operator has enough of it, where the
    /// guest may run without all of its memory.
    resolve_until: Option<Instant>,
    never_gives_up: bool,
}

impl Session {
    /// A session with the destination at `to`, which is not connected to yet.
    pub(super) fn new(
        to: &Address,
        (security, cells): (&Security, &Cells),
        cancel: &Cancel,
        made_up: MadeUp,
    ) -> io::Result<Self> {
        let (events_in, events) = mpsc::channel();
        let (places_in, places) = mpsc::sync_channel(PEERS_LIMIT);
        Ok(Self {
            call: Call {
                to: to.clone(),
                id: new_session()?,
                version: Version::NEWEST,
                security: security.clone(),
                shown: None,
                attempt: 0,
            },
            cells: cells.clone(),
            cancel: cancel.clone(),
            interrupt: Interrupt::new(cancel),
            made_up,
            events,
            events_in,
            places,
            places_in,
            control: None,
            long_way: false,
            wanted: Arc::default(),
            connection: 0,
            ended: false,
            secret: new_secret()?,
            attempt: 0,
            unawaited: None,
            state_saved: false,
            committed: false,
            resolve_until: None,
            never_gives_up: false,
        })
    }

    /// Makes the control connection, in the newest version that both sides speak; how long the
    /// destination's host took to take it, and the destination to answer the greeting.
    pub(super) fn connect(&mut self) -> Result<(Duration, Duration), EngineError> {
        let stream = self.dial_control().or_else(|error| match error {
            // Who does not speak our version has told its own, and closed: nothing has begun.
            EngineError::Wire { source: WireError::Version { theirs, .. }, .. } => {
                self.call.version = theirs.common().ok_or(error)?;
                self.dial_control()
            }
            error => Err(error),
        })?;
        self.call.shown = stream.shown();
        let times = (stream.connected_in(), stream.greeted_in());
        self.use_control(stream)?;
        Ok(times)
    }

    /// The version that both sides speak.
    pub(super) fn version(&self) -> Version {
        self.call.version
    }

    /// Of the features that were `offered` those that the destination has `accepted`.
    ///
    /// # Errors
    /// When it accepted another one.
    pub(super) fn accepted(
        &self,
        offered: Features,
        accepted: Features,
    ) -> Result<Features, EngineError> {
        if accepted.is_within(offered.common(self.version().features())) {
            return Ok(accepted);
        }
        let what = format!("it accepted features that were not offered ({:#x})", accepted.0);
        Err(EngineError::Protocol { peer: PEER, what })
    }

    /// Makes the connections of the data channels with these `numbers`, all at once: one after the
    /// other each would take a round trip, and two where they are encrypted. Each is had twice, as
    /// one is to end it by.
    pub(super) fn connect_channels(
        &self,
        numbers: impl Iterator<Item = u8>,
    ) -> Result<Vec<(Stream, Stream)>, EngineError> {
        let begun = numbers.map(|number| self.dial_aside(Role::Channel(number), None));
        let begun = begun.collect::<Result<Vec<_>, _>>()?;
        let made = begun.iter().map(|dialled| {
            let stream = self.heed(dialled)?;
            stream.be_patient().map_err(link_error(PEER))?;
            let handle = stream.try_clone().map_err(link_error(PEER))?;
            Ok((stream, handle))
        });
        made.collect()
    }

    /// Makes the control connection: a name server and a host that do not answer take long.
    fn dial_control(&self) -> Result<Stream, EngineError> {
        self.heed(&self.dial_aside(Role::Control, None)?)
    }

    /// Waits for a connection that was begun, unless something is more urgent.
    fn heed(&self, dialled: &Dialled) -> Result<Stream, EngineError> {
        loop {
            match dialled.recv_timeout(limits::TICK / 2) {
                Ok(stream) => return stream,
                Err(RecvTimeoutError::Timeout) if !self.interrupt.is_raised() => {}
                Err(RecvTimeoutError::Timeout) => return Err(EngineError::Interrupted),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(EngineError::Panicked("connect"));
                }
            }
        }
    }

    /// Begins a new connection as [`Call::dial`] makes it, with `first` behind the greeting, in a
    /// thread that is left behind when nobody waits any more.
    fn dial_aside(&self, role: Role, first: Option<Message>) -> Result<Dialled, EngineError> {
        let (call, interrupt) = (self.call.clone(), self.interrupt.clone());
        let (dialled, wait) = mpsc::channel();
        // Who was given up must not take the destination's place for a source.
        let stop = move || interrupt.is_raised();
        // A socket of another user's is reached by the first, a port below 1024 by the other.
        let cell = self.cells.with(Rights::FILES | Rights::PORTS);
        let dial = move || {
            let made = cell.enter().and_then(|_| call.dial(role, first.as_ref(), stop));
            drop(dialled.send(made));
        };
        threads::start("connect", dial)?;
        Ok(wait)
    }

    /// Goes on with the session of `record`, whose destination is not connected to yet.
    pub(super) fn restore(&mut self, record: &Record) -> Result<(), EngineError> {
        let call = &mut self.call;
        (call.id, call.shown, call.attempt) = (record.id(), record.shown(), record.attempt());
        call.version = record.version().ok_or(EngineError::Panicked("main"))?;
        (self.secret, self.attempt) = (record.secret(), record.attempt());
        Ok(())
    }

    /// COMMIT was or may have been sent by another godwit; who has enough of asking need not wait.
    pub(super) fn takes_over(&mut self) {
        self.committed = true;
        self.interrupt.silence();
        (self.never_gives_up, self.resolve_until) = (true, Some(Instant::now()));
    }

    /// The session's number.
    pub(super) fn id(&self) -> SessionId {
        self.call.id
    }

    /// By what the destination knows the session's source, and the certificate that it showed.
    pub(super) fn known_by(&self) -> ((SessionId, Secret, Version), Option<Vec<u8>>) {
        ((self.call.id, self.secret, self.call.version), self.call.shown.clone())
    }

    /// Has the destination keep what arrives for us, should the connections be lost.
    pub(super) fn ask_to_keep(&self) -> Result<(), EngineError> {
        self.say(&Message::Keep(self.secret))
    }

    /// The connections are lost. Where the control connection is not known to have ended, the
    /// destination may have given up, and its reason is on the way: waits for that.
    ///
    /// # Errors
    /// That reason, and whatever ends a migration from outside.
    pub(super) fn sever(&mut self, vm: &dyn SourceVm) -> Result<(), EngineError> {
        let until = Instant::now() + limits::WORDS;
        while !self.ended && Instant::now() < until {
            match self.next_event(vm, limits::TICK)? {
                Some(event @ Event::Peer { message: Ok(Message::Abort { .. }), .. })
                | Some(event @ Event::StatePassed(_)) => return Err(event.out_of_place()),
                _ => {}
            }
        }
        self.cut();
        // What it still ends with is of no interest.
        self.connection += 1;
        self.interrupt.uses(self.connection);
        Ok(())
    }

    /// Forgets what the channels have reported: they have ended.
    pub(super) fn forget_reports(&mut self) {
        while self.pending().is_some() {}
    }

    /// Begins another attempt to take the session up again, with so many channels of memory, at
    /// `to`.
    pub(super) fn begin_return(
        &mut self,
        to: &Address,
        channels: u8,
    ) -> Result<Dialled, EngineError> {
        self.call.to = to.clone();
        self.call.attempt += 1;
        let proof = self.return_proof().of_source(channels);
        self.dial_aside(Role::Resume, Some(Message::Resume { channels, proof }))
    }

    /// Makes `stream`, over which the destination has answered, the control connection; how many
    /// frames of each channel it has placed, if it was not started anew.
    pub(super) fn finish_return(
        &mut self,
        vm: &dyn SourceVm,
        stream: Stream,
    ) -> Result<Option<Vec<u64>>, EngineError> {
        self.use_control(stream)?;
        let what = "the destination to say what it has";
        let (of, placed, proof) =
            self.await_message(vm, what, limits::RESUME, |message| match message {
                Message::Resumed { attempt, placed, proof } => {
                    Some((*attempt, placed.clone(), *proof))
                }
                _ => None,
            })?;
        if !self.return_proof().is_destination(of, &placed, &proof) {
            let words = format!("who answers at {} does not know this migration", self.call.to);
            return Err(EngineError::Distrust(words));
        }
        let ours = std::mem::replace(&mut self.attempt, self.call.attempt);
        // Of connections that it never came to read it has placed nothing.
        Ok((of != FORGOTTEN).then(|| if of == ours { placed } else { Vec::new() }))
    }

    fn return_proof(&self) -> ReturnProof {
        let Call { id, attempt, .. } = self.call;
        ReturnProof { session: id, secret: self.secret, attempt }
    }

    /// Makes `stream` the control connection, with a thread that reads it.
    fn use_control(&mut self, stream: Stream) -> Result<(), EngineError> {
        self.long_way = self.is_long(&stream);
        let read = stream.try_clone().map_err(link_error(PEER))?;
        let writer = match &self.control {
            Some(control) => {
                control.writer.replace(stream)?;
                Arc::clone(&control.writer)
            }
            None => {
                let writer = Arc::new(ControlWriter::new(stream, PEER)?);
                let aborter = Aborter::start(Arc::clone(&writer))?;
                self.control = Some(Control { writer: Arc::clone(&writer), aborter });
                writer
            }
        };
        say_alive(&writer)?;
        self.connection += 1;
        self.ended = false;
        self.interrupt.uses(self.connection);
        let (events, places, connection) =
            (self.events_in.clone(), self.places_in.clone(), self.connection);
        let (interrupt, cells, cell) =
            (self.interrupt.clone(), self.cells.clone(), self.cells.reader()?);
        let wanted = Arc::clone(&self.wanted);
        read_messages(
            read,
            PEER,
            move || cell.enter(),
            move |message| {
                let message = cells.tried().map_or(message, Err);
                if let Ok(Message::Wanted { block, pages }) = &message {
                    let wanted = wanted.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    if let Some(wanted) = wanted {
                        // Waits while much is asked for. Who cannot answer any more has said why.
                        let _ = wanted.send((*block, pages.clone()));
                        return true;
                    }
                }
                let lost = message.is_err();
                let over = matches!(message, Ok(Message::Abort { .. }));
                let told = places.send(()).is_ok()
                    && events.send(Event::Peer { connection, message }).is_ok();
                if over {
                    interrupt.raise();
                }
                if lost {
                    interrupt.lost(connection);
                }
                told
            },
        )
    }

    /// From here on the destination may ask for pages, which go to `wanted`.
    pub(super) fn hand_wanted(&self, wanted: SyncSender<Wanted>) {
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = Some(wanted);
    }

    /// What a channel of memory reports by, and what it may do: the kernel asks for that at each
    /// read, where memory is in another user's process.
    pub(super) fn for_memory(&self) -> (Sender<Event>, Cell) {
        (self.reports(), self.cells.with(Rights::TRACE))
    }

    /// The same of a disk's channel: the server's socket, which is connected to anew, may be
    /// another user's.
    pub(super) fn for_disk(&self) -> (Sender<Event>, Cell) {
        (self.reports(), self.cells.with(Rights::FILES))
    }

    /// The same of who passes device state on.
    pub(super) fn for_state(&self) -> (Sender<Event>, Cell) {
        (self.reports(), self.cells.with(Rights::NONE))
    }

    /// The writing end of the control connection.
    pub(super) fn control(&self) -> Result<&Arc<ControlWriter>, EngineError> {
        let control = self.control.as_ref().map(|control| &control.writer);
        control.ok_or_else(|| EngineError::Protocol {
            peer: PEER,
            what: "it was never connected".to_owned(),
        })
    }

    /// Where our threads report.
    pub(super) fn reports(&self) -> Sender<Event> {
        self.events_in.clone()
    }

    pub(super) fn say(&self, message: &Message) -> Result<(), EngineError> {
        self.control()?.send(message)
    }

    /// The next event of any kind, within `limit`.
    fn event(&mut self, limit: Duration) -> Result<Event, RecvTimeoutError> {
        let event = self.events.recv_timeout(limit);
        if matches!(event, Ok(Event::Peer { .. })) {
            let _ = self.places.try_recv();
        }
        event
    }

    /// An event that is there already.
    pub(super) fn pending(&mut self) -> Option<Event> {
        self.event(Duration::ZERO).ok()
    }

    /// The next event, within `limit`. Notices a cancellation, which an event may wait behind,
    /// before COMMIT, and the end of the machine `vm`.
    pub(super) fn next_event(
        &mut self,
        vm: &dyn SourceVm,
        limit: Duration,
    ) -> Result<Option<Event>, EngineError> {
        if self.cancel.is_cancelled() && !self.committed {
            return Err(EngineError::Cancelled);
        }
        // Once all of it is on its way, the guest can live on without its machine here.
        if !self.state_saved && vm.has_ended() {
            return Err(EngineError::Ended("source"));
        }
        match self.event(limit) {
            // What an earlier control connection ended with is of no interest.
            Ok(Event::Peer { connection, .. }) if connection != self.connection => Ok(None),
            Ok(Event::Peer { message: Ok(Message::RoundAck { round, .. }), .. })
                if self.unawaited == Some(round) =>
            {
                Ok(None)
            }
            Ok(event) => {
                self.ended |= matches!(event, Event::Peer { message: Err(_), .. });
                Ok(Some(event))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(EngineError::Panicked("control")),
        }
    }

    /// Waits up to `limit` for the event that `wanted` takes; it gives any other back.
    fn await_event<T>(
        &mut self,
        vm: &dyn SourceVm,
        (what, limit): (&'static str, Duration),
        mut wanted: impl FnMut(Event) -> Result<T, Event>,
    ) -> Result<T, EngineError> {
        let until = Instant::now() + limit;
        loop {
            match self.next_event(vm, limits::TICK.min(limit))? {
                Some(event) => return wanted(event).map_err(Event::out_of_place),
                None if Instant::now() >= until => {
                    return Err(EngineError::Timeout { what, limit });
                }
                None => {}
            }
        }
    }

    /// Waits up to `limit` for the message that `wanted` takes.
    pub(super) fn await_message<T>(
        &mut self,
        vm: &dyn SourceVm,
        what: &'static str,
        limit: Duration,
        mut wanted: impl FnMut(&Message) -> Option<T>,
    ) -> Result<T, EngineError> {
        self.await_event(vm, (what, limit), |event| match &event {
            Event::Peer { message: Ok(message), .. } => wanted(message).ok_or(event),
            _ => Err(event),
        })
    }

    /// Waits until the device state has been passed on; returns how much it was.
    pub(super) fn await_state(&mut self, vm: &dyn SourceVm) -> Result<ByteCount, EngineError> {
        let limit = ("the device state", limits::ANSWER);
        self.await_event(vm, limit, |event| match event {
            Event::StatePassed(Ok(bytes)) => Ok(bytes),
            other => Err(other),
        })
    }

    /// Waits for `time` and expects nothing.
    pub(super) fn pause(&mut self, vm: &dyn SourceVm, time: Duration) -> Result<(), EngineError> {
        self.next_event(vm, time)?.map_or(Ok(()), |event| Err(event.out_of_place()))
    }

    /// What a long call was interrupted by, as far as something was. Waits for nothing. What else
    /// was reported is of no interest any more: the migration has failed.
    pub(super) fn interruption(&mut self, vm: &dyn SourceVm) -> Option<EngineError> {
        if !self.interrupt.is_raised() {
            return None;
        }
        if self.cancel.is_cancelled() {
            return Some(EngineError::Cancelled);
        }
        if vm.has_ended() {
            return Some(EngineError::Ended("source"));
        }
        while let Some(event) = self.pending() {
            match event {
                Event::Peer { connection, .. } if connection != self.connection => {}
                Event::Peer { message: Err(_), .. } => {
                    self.ended = true;
                    return Some(event.out_of_place());
                }
                Event::Peer { message: Ok(Message::Abort { .. }), .. } => {
                    return Some(event.out_of_place());
                }
                _ => {}
            }
        }
        None
    }

    /// What ends the long calls of the machine.
    pub(super) fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Whether the way to the destination is a long one, as far as it was connected to.
    pub(super) fn is_long_way(&self) -> bool {
        self.long_way
    }

    /// Whether the way that `stream` was connected over is a long one.
    pub(super) fn is_long(&self, stream: &Stream) -> bool {
        let made_up = self.made_up.is(Fault::LongWay) || self.made_up.is(Fault::Scatter);
        made_up || stream.connected_in() >= LONG_WAY
    }

    pub(super) fn made_up(&self) -> MadeUp {
        self.made_up
    }

    /// Where this fault is to be made up: stays for [`HOLD`], or until something goes wrong.
    pub(super) fn hold(&mut self, vm: &dyn SourceVm, fault: Fault) -> Result<(), EngineError> {
        let until = Instant::now() + HOLD;
        while self.made_up.is(fault) && Instant::now() < until {
            self.pause(vm, limits::TICK)?;
        }
        Ok(())
    }

    /// Nobody waits for the acknowledgement of this round.
    pub(super) fn ignore_acknowledgement(&mut self, round: u32) {
        self.unawaited = Some(round);
    }

    /// All that the machine has saved is on its way.
    pub(super) fn state_is_saved(&mut self) {
        self.state_saved = true;
    }

    /// Whether COMMIT was sent, or part of it.
    pub(super) fn is_committed(&self) -> bool {
        self.committed
    }

    /// Sends COMMIT.
    pub(super) fn commit(&mut self) -> Result<(), EngineError> {
        // From here on, whatever happens, the guest is not ours: not even when sending fails, for
        // part of it may have arrived.
        self.committed = true;
        self.interrupt.silence();
        let first = self.resolve_until.is_none();
        if first && self.made_up.is(Fault::LoseCommit) {
            self.cut();
        }
        self.say(&Message::Commit)?;
        if first && self.made_up.is(Fault::CutAfterCommit) {
            self.cut();
        }
        Ok(())
    }

    /// Connects to the destination again, to ask who runs the guest.
    pub(super) fn resolve(&mut self) -> Result<Resolved, EngineError> {
        let until = *self.resolve_until.get_or_insert_with(|| Instant::now() + limits::RESOLVE);
        // The answer may be here already, behind what went wrong. Then the old connection must end:
        // as long as it stands, the destination waits there and takes no other.
        while let Some(event) = self.pending() {
            match event {
                Event::Peer { message: Ok(Message::Running), .. } => {
                    return Ok(Resolved::Running);
                }
                Event::Peer { message: Ok(Message::Discarded), .. } => {
                    return Ok(Resolved::Discarded(None));
                }
                Event::Peer { message: Ok(Message::Abort { code, text }), .. } => {
                    return Ok(Resolved::Discarded(Some((code, text))));
                }
                _ => {}
            }
        }
        self.cut();
        loop {
            match self.call.dial(Role::Resolve, None, || false) {
                Ok(stream) => {
                    self.use_control(stream)?;
                    return Ok(Resolved::Reconnected);
                }
                Err(error) if Instant::now() >= until && self.has_tried_enough() => {
                    return Err(error);
                }
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }

    /// A source in doubt is to try for as long as nobody has enough of it.
    pub(super) fn never_give_up(&mut self) {
        self.never_gives_up = true;
    }

    /// Whether a source in doubt has tried for long enough.
    pub(super) fn has_tried_enough(&self) -> bool {
        let tries = self.never_gives_up && !self.cancel.is_cancelled();
        !tries && self.resolve_until.is_some_and(|until| Instant::now() >= until)
    }

    /// Tells the destination that it need not wait for questions. Without this word it stays for
    /// [`limits::LINGER`], so where the link broke just now, a new connection is tried.
    pub(super) fn say_farewell(&mut self) {
        if self.made_up.is(Fault::LoseFarewell) {
            self.cut();
        }
        if self.say(&Message::Farewell).is_err()
            && self
                .call
                .dial(Role::Resolve, None, || false)
                .and_then(|stream| self.use_control(stream))
                .is_ok()
        {
            let _ = self.say(&Message::Farewell);
        }
    }

    /// Tells the destination that it is over and why. Does not wait.
    pub(super) fn abort(&self, cause: &EngineError) {
        if let Some(control) = &self.control {
            let text = cause.to_string();
            control.aborter.say(Message::Abort { code: cause.abort_code(), text });
        }
    }

    /// A channel has broken, perhaps since the destination gave up: its reason is on the way or
    /// already here. The guest runs again by now, so there is time to wait for it, as long as the
    /// destination can still speak.
    pub(super) fn last_words(&mut self) -> Option<EngineError> {
        let until = Instant::now() + limits::WORDS;
        while !self.committed && !self.ended && Instant::now() < until {
            match self.event(limits::TICK) {
                Ok(Event::Peer { message: Ok(Message::Abort { code, text }), .. }) => {
                    return Some(EngineError::Aborted { peer: PEER, code, text });
                }
                Ok(Event::Peer { message: Err(_), connection })
                    if connection == self.connection =>
                {
                    return None;
                }
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        None
    }

    /// Breaks the control connection.
    pub(super) fn cut(&self) {
        if let Some(control) = &self.control {
            control.writer.shut_down();
        }
    }

    /// Ends the connection, when what was said last is on its way.
    pub(super) fn end(&mut self) {
        if let Some(control) = self.control.take() {
            control.aborter.end();
            control.writer.shut_down();
        }
    }
}

/// What every connection of a session is made by.
#[derive(Clone)]
struct Call {
    to: Address,
    id: SessionId,
    /// That is spoken on all of them.
    version: Version,
    security: Security,
    /// The certificate that the destination showed on the first of them.
    shown: Option<Vec<u8>>,
    /// Which attempt to connect this is.
    attempt: u32,
}

/// Where a connection comes that is being made.
pub(super) type Dialled = Receiver<Result<Stream, EngineError>>;

impl Call {
    /// A new connection to the destination, which has answered the greeting, and what comes `first`
    /// behind it; a data channel is not answered.
    fn dial(
        &self,
        role: Role,
        first: Option<&Message>,
        stop: impl Fn() -> bool,
    ) -> Result<Stream, EngineError> {
        let address = || self.to.to_string();
        let limit = match role {
            Role::Control => limits::FIRST_GREETING,
            Role::Resume => limits::RESUME,
            // The destination lets in one after the other, and waits for all of them for as long.
            Role::Channel(_) => limits::CONNECT,
            Role::Resolve => limits::GREETING,
        };
        let silent = |source: &io::Error| {
            role == Role::Control
                && matches!(source.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
        };
        let within = match role {
            Role::Resume => limits::RETRY_CONNECT,
            Role::Control | Role::Channel(_) | Role::Resolve => limits::CONNECT,
        };
        let mut stream = Stream::connect_within(&self.to, within)
            .map_err(|source| EngineError::Connect { address: address(), source })?;
        if stop() {
            return Err(EngineError::Interrupted);
        }
        let begun = self.security.begin(&mut stream, &address(), limit, &stop);
        begun.map_err(|error| match error {
            BeginError::Engine(error) => error,
            BeginError::Link(_) if stop() => EngineError::Cancelled,
            BeginError::Link(source) if silent(&source) => {
                EngineError::NoGreeting { address: address(), limit }
            }
            BeginError::Link(source) => link_error(PEER)(source),
        })?;
        if self.shown.is_some() && stream.shown() != self.shown {
            let words = format!("another host than before answers at {}", self.to);
            return Err(EngineError::Distrust(words));
        }
        let Self { version, id: session, attempt, .. } = *self;
        let greeting = Greeting { version, session, role, attempt };
        let greeted = Instant::now();
        send_greeting(&mut stream, greeting, PEER)?;
        if let Some(first) = first {
            stream.write_all(&first.encode()).map_err(link_error(PEER))?;
        }
        if matches!(role, Role::Channel(_)) {
            return Ok(stream);
        }
        let greeting =
            receive_greeting(&mut stream, PEER, limit, stop).map_err(|error| match error {
                EngineError::Link { source, .. } if silent(&source) => {
                    EngineError::NoGreeting { address: address(), limit }
                }
                error => error,
            })?;
        if greeting.version != version {
            let number = greeting.version.number();
            let theirs = Versions { oldest: number, newest: number };
            let source = WireError::Version { theirs, ours: Versions::HERE };
            return Err(EngineError::Wire { peer: PEER, source });
        }
        if greeting.session != session {
            let what =
                "it answered for another session: it is busy with another migration".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        }
        stream.note_greeting(greeted.elapsed());
        Ok(stream)
    }
}
