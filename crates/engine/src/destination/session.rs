//! The source, once one was found: the control connection to it, and the wait for what it says, for
//! the operator's wish to cancel, and for the end of the machine.
//!
//! Invariants: control connections are numbered, and what an earlier one ended with is no event.
//! Once COMMIT was seen the guest is ours: a wish to cancel and the end of the machine are not
//! heard here any more, but for a wish to end the wait for a source that was lost.

use std::cell::Cell;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use godwit_wire::{
    AbortCode, Feature, Features, Greeting, Message, QUESTION_LIMIT, Role, Secret, SessionId,
    Version,
};

use super::Notice;
use super::channel::PEER;
use super::door::{self, Credentials, Door, Return, send_back};
use super::record::Record;
use crate::address::{Listener, Stream};
use crate::cells::Cells;
use crate::link::{ControlWriter, link_error, read_messages, say_alive, send_greeting};
use crate::remainder::Known;
use crate::return_proof::{ReturnProof, prints_seed};
use crate::same_host::Landmark;
use crate::security::Security;
use crate::vm::DestinationVm;
use crate::{Cancel, EngineError, Interrupt, limits, threads};

/// Events that may wait: pieces of device state mostly, 256 KiB each at the most. While more than
/// these wait, the source's last word is not read.
const EVENTS_LIMIT: usize = 256;

/// What the source said on one of its control connections, or why it says no more.
pub(super) struct Event {
    connection: u32,
    message: Result<Message, EngineError>,
}

/// A source that was lost, and is there again.
pub(super) enum Found {
    /// It comes back for what is missing.
    Back(Return),
    /// It asks who runs the guest, by COMMIT.
    Asks,
}

pub(super) struct Session<'a> {
    id: SessionId,
    /// What its threads are confined by.
    cells: Cells,
    /// That the source speaks, and we with it.
    version: Version,
    /// What both sides have, since an offer was accepted.
    features: Features,
    /// The source is back, and has not asked for fingerprints since.
    may_ask_for_prints: bool,
    /// What an operator would call the source, and the certificate that it is shown.
    source: String,
    ours: Option<Vec<u8>>,
    cancel: &'a Cancel,
    interrupt: Interrupt,
    events: Receiver<Event>,
    events_in: SyncSender<Event>,
    /// What came next when only a packet was wanted.
    ahead: Cell<Option<Event>>,
    /// Who else comes.
    door: Door,
    control: Arc<ControlWriter>,
    connection: u32,
    began: Instant,
    /// When COMMIT was seen.
    committed: Option<Instant>,
    /// When the connections were lost that are not made again yet.
    lost: Option<Instant>,
    /// How long to be there for a source that did not hear that the guest runs here.
    linger_until: Option<Instant>,
    /// For a source on this host.
    _landmark: Option<Landmark>,
}

impl<'a> Session<'a> {
    /// Waits for a source, at most `until` then.
    pub(super) fn accept(
        listener: &Listener,
        (security, cells): (&Security, &Cells),
        until: Option<Instant>,
        cancel: &'a Cancel,
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<Self, EngineError> {
        let (Greeting { version, session: id, .. }, mut stream) = loop {
            match next_connection(listener, (security, cells), until, cancel, notice)? {
                (greeting, stream) if greeting.role == Role::Control => break (greeting, stream),
                (greeting, stream) if greeting.role == Role::Resume => {
                    let peer = stream.peer();
                    send_back(stream, greeting);
                    let words = format!("{peer} comes back for a migration that is not known here");
                    notice(&Notice::Refused(words));
                }
                _ => notice(&Notice::Refused("a connection of an unknown session".to_owned())),
            }
        };
        let began = Instant::now();
        let source = stream.peer();
        let (security, ours) = (security.clone(), security.shows().map(<[u8]>::to_vec));
        let credentials = Credentials { id, version, security, shown: stream.shown() };
        let door = Door::open(listener, credentials, &source, cells)?;
        let greeting = Greeting { version, session: id, role: Role::Control, attempt: 0 };
        send_greeting(&mut stream, greeting, PEER)?;
        let (events_in, events) = mpsc::sync_channel(EVENTS_LIMIT);
        let read = stream.try_clone().map_err(link_error(PEER))?;
        let control = Arc::new(ControlWriter::new(stream, PEER)?);
        let mut session = Self {
            id,
            cells: cells.clone(),
            version,
            features: Features::NONE,
            may_ask_for_prints: false,
            source,
            ours,
            cancel,
            interrupt: Interrupt::new(cancel),
            events,
            events_in,
            ahead: Cell::default(),
            door,
            control,
            connection: 0,
            began,
            committed: None,
            lost: None,
            linger_until: None,
            _landmark: Landmark::put_up(id),
        };
        session.listen_to(read)?;
        Ok(session)
    }

    /// The session of `record`, whose source has not come back yet.
    pub(super) fn restored(
        listener: &Listener,
        (security, cells): (&Security, &Cells),
        record: &Record,
        cancel: &'a Cancel,
    ) -> Result<Self, EngineError> {
        let (id, source) = (record.id(), record.source.clone());
        let version = record.version().ok_or(EngineError::Panicked("main"))?;
        let ours = security.shows().map(<[u8]>::to_vec);
        let (security, shown) = (security.clone(), record.shown.clone());
        let door =
            Door::open(listener, Credentials { id, version, security, shown }, &source, cells)?;
        door.taken(record.attempt);
        door.keep(record.secret());
        door.lost(true);
        let (events_in, events) = mpsc::sync_channel(EVENTS_LIMIT);
        // A connection that has ended.
        let (ended, _) = UnixStream::pair().map_err(link_error(PEER))?;
        let control = Arc::new(ControlWriter::new(Stream::from(ended), PEER)?);
        let interrupt = Interrupt::new(cancel);
        interrupt.be_patient(true);
        Ok(Self {
            id,
            cells: cells.clone(),
            version,
            features: record.features(),
            may_ask_for_prints: false,
            source,
            ours,
            cancel,
            interrupt,
            events,
            events_in,
            ahead: Cell::default(),
            door,
            control,
            connection: 0,
            began: Instant::now(),
            committed: None,
            lost: Some(Instant::now()),
            linger_until: None,
            _landmark: Landmark::put_up(id),
        })
    }

    /// The guest of a session that was restored is ours: COMMIT was seen by another godwit.
    pub(super) fn takes_over(&mut self) {
        self.committed = Some(Instant::now());
        self.interrupt.silence();
    }

    /// What both sides know the session by, where the source may come back.
    pub(super) fn known(&self) -> Option<Known> {
        self.door.secret().map(|secret| (self.id, secret))
    }

    /// The session's number.
    pub(super) fn id(&self) -> SessionId {
        self.id
    }

    /// What another godwit would know the source by, if it may come back, and this one was killed;
    /// without what is not the session's to know.
    pub(super) fn known_by(&self) -> Option<Record> {
        let secret = self.door.secret().filter(|_| self.features.contains(Feature::Restart))?;
        Some(Record {
            session: self.id.0,
            secret: secret.0,
            version: self.version.number(),
            features: self.features.0,
            source: self.source.clone(),
            shown: self.door.shown().map(<[u8]>::to_vec),
            ours: self.ours.clone(),
            attempt: 0,
            running: false,
            verified: false,
            blocks: Vec::new(),
            disks: Vec::new(),
            safe: None,
        })
    }

    /// Reads what the source says over `read` from now on.
    fn listen_to(&mut self, read: Stream) -> Result<(), EngineError> {
        say_alive(&self.control)?;
        self.connection += 1;
        self.interrupt.uses(self.connection);
        let (events, connection) = (self.events_in.clone(), self.connection);
        let (interrupt, cell) = (self.interrupt.clone(), self.cells.reader()?);
        read_messages(
            read,
            PEER,
            move || cell.enter(),
            move |message| {
                let lost = message.is_err();
                let over = matches!(message, Ok(Message::Abort { .. }));
                let told = events.send(Event { connection, message }).is_ok();
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

    /// Leaves whoever comes now to the next session.
    pub(super) fn close_door(&mut self) {
        self.door.close();
    }

    /// What its threads are confined by.
    pub(super) fn cells(&self) -> &Cells {
        &self.cells
    }

    /// Fails when one of its threads was kept from something.
    pub(super) fn unharmed(&self) -> Result<(), EngineError> {
        self.cells.tried().map_or(Ok(()), Err)
    }

    /// Who the source is, as an operator would call it.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// The version that both sides speak.
    pub(super) fn version(&self) -> Version {
        self.version
    }

    /// Why what is waited for need not be waited for any more.
    pub(super) fn ends(&self) -> Option<EngineError> {
        self.is_cancelled().then_some(EngineError::Cancelled).or_else(|| self.superseded())
    }

    /// Of the features that the source has `offered` those that the session has.
    pub(super) fn common_features(&self, offered: Features) -> Features {
        self.version.features().common(offered)
    }

    /// The offer is accepted of a source that has `offered` these features.
    pub(super) fn agree(&mut self, offered: Features) {
        self.features = self.common_features(offered);
    }

    /// Whether COMMIT was seen.
    pub(super) fn is_committed(&self) -> bool {
        self.committed.is_some()
    }

    /// Whether the session has `feature`.
    pub(super) fn has(&self, feature: Feature) -> bool {
        self.features.contains(feature)
    }

    /// The writing end of the control connection.
    pub(super) fn control(&self) -> Arc<ControlWriter> {
        Arc::clone(&self.control)
    }

    /// Since the source was found.
    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Since COMMIT was seen.
    pub(super) fn since_commit(&self) -> Duration {
        self.committed.map_or(Duration::ZERO, |at| at.elapsed())
    }

    /// Whether the operator wishes an end.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Whether the operator wished an end and was not heard, since the guest was ours by then.
    pub(super) fn was_cancelled(&self) -> bool {
        self.is_committed() && self.is_cancelled()
    }

    pub(super) fn say(&self, message: &Message) -> Result<(), EngineError> {
        self.control.send(message)
    }

    /// The next connection of the session; `None` at `until`.
    pub(super) fn next_connection(
        &self,
        until: Instant,
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<Option<(Greeting, Stream)>, EngineError> {
        // Once COMMIT was seen the guest is ours, and the operator's wish comes too late.
        let deaf = Cancel::default();
        let cancel = if self.committed.is_some() { &deaf } else { self.cancel };
        self.door.next(until, cancel, notice)
    }

    /// What the source says next, waited for as long as the link stands, or for as long as a source
    /// in doubt is waited for. `broken` tells why channels are gone, while that matters.
    pub(super) fn next_message(
        &mut self,
        vm: &dyn DestinationVm,
        notice: &mut dyn FnMut(&Notice),
        broken: impl Fn() -> Option<EngineError>,
    ) -> Result<Message, EngineError> {
        let said = self.message_until(vm, self.linger_until, notice, broken)?;
        let what = "the source's farewell";
        let message = said.ok_or(EngineError::Timeout { what, limit: limits::LINGER })?;
        if message == Message::Commit {
            self.committed = Some(Instant::now());
            self.interrupt.silence();
        }
        Ok(message)
    }

    /// The first message of the source.
    pub(super) fn first_message(
        &mut self,
        vm: &dyn DestinationVm,
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<Message, EngineError> {
        let limit = limits::GREETING;
        let said = self.message_until(vm, Some(Instant::now() + limit), notice, || None)?;
        said.ok_or(EngineError::Timeout { what: "the source", limit })
    }

    /// What a source that has asked says next, if it does by `until`.
    pub(super) fn words_until(
        &self,
        vm: &dyn DestinationVm,
        until: Instant,
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<Option<Message>, EngineError> {
        self.message_until(vm, Some(until), notice, || None)
    }

    fn message_until(
        &self,
        vm: &dyn DestinationVm,
        until: Option<Instant>,
        notice: &mut dyn FnMut(&Notice),
        broken: impl Fn() -> Option<EngineError>,
    ) -> Result<Option<Message>, EngineError> {
        loop {
            self.door.tell(notice);
            // Once COMMIT was seen the guest is ours, and the operator's wish comes too late.
            if self.cancel.is_cancelled() && self.committed.is_none() {
                return Err(EngineError::Cancelled);
            }
            let left =
                until.map_or(limits::TICK, |it| it.saturating_duration_since(Instant::now()));
            if let Some(message) = self.event(left.min(limits::TICK))? {
                return not_aborted(message).map(Some);
            }
            // Then the guest never runs here, and the source need not wait to hear it.
            if self.committed.is_none() && vm.has_ended() {
                return Err(EngineError::Ended("destination"));
            }
            self.unharmed()?;
            if let Some(error) = broken().or_else(|| self.superseded()) {
                return Err(error);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
        }
    }

    /// The source has come back over another connection while this one seemed to stand: it is lost.
    pub(super) fn superseded(&self) -> Option<EngineError> {
        let source = || io::Error::new(io::ErrorKind::ConnectionAborted, "it makes another one");
        self.door.has_return().then(|| EngineError::Link { peer: PEER, source: source() })
    }

    /// The source may come back with this secret, for as long as `limit`; zero: it may not.
    ///
    /// # Errors
    /// When it said so before.
    pub(super) fn keep(&mut self, secret: Secret, limit: Duration) -> Result<(), EngineError> {
        if self.committed.is_some() || !limit.is_zero() && !self.door.keep(secret) {
            let what = "it told its secret twice".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        }
        self.interrupt.be_patient(!limit.is_zero());
        Ok(())
    }

    /// From here on no connection is made again that is lost.
    pub(super) fn no_longer_keeps(&self) {
        self.interrupt.be_patient(false);
    }

    /// What the key of fingerprints is made of for a source that was started anew, and asks for
    /// them now, perhaps those of `disks` too.
    ///
    /// # Errors
    /// When it does not speak of that feature, or has asked already since it is back: all of
    /// memory is read each time.
    pub(super) fn prints_seed(&mut self, disks: bool) -> Result<u64, EngineError> {
        let agreed = self.features.contains(Feature::Restart)
            && (!disks || self.features.contains(Feature::DiskPrints));
        let may_ask = std::mem::take(&mut self.may_ask_for_prints);
        match self.door.secret() {
            Some(secret) if agreed && may_ask => Ok(prints_seed(self.id, secret)),
            _ => Err(out_of_place(&Message::PrintsRequest { disks })),
        }
    }

    /// Whether the source is back, and has not asked for fingerprints since.
    pub(super) fn may_ask_for_prints(&self) -> bool {
        self.may_ask_for_prints
    }

    /// Whether the source may come back.
    pub(super) fn keeps(&self) -> bool {
        self.door.secret().is_some()
    }

    /// The connections are lost; whether they were not before. The source learns that by the end of
    /// this one, and may still say that it has given up.
    pub(super) fn sever(&mut self) -> bool {
        self.control.finish();
        self.door.lost(true);
        let lost = self.lost.replace(self.lost.unwrap_or_else(Instant::now));
        lost.is_none()
    }

    /// Since the connections are lost.
    pub(super) fn lost_for(&self) -> Duration {
        self.lost.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Waits for the source to come back, `limit` long since it was lost; `None` if it does not.
    pub(super) fn await_return(
        &mut self,
        vm: &dyn DestinationVm,
        limit: Duration,
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<Option<Return>, EngineError> {
        loop {
            self.door.tell(notice);
            if self.cancel.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            if vm.has_ended() {
                return Err(EngineError::Ended("destination"));
            }
            if let Some(back) = self.door.take_return() {
                return Ok(Some(back));
            }
            if self.lost_for() >= limit {
                return Ok(None);
            }
            // What the source said before it was lost is not looked at any more, but that it has
            // given up.
            match self.event(limits::TICK / 2) {
                Ok(Some(message)) => drop(not_aborted(message)?),
                Ok(None) => {}
                Err(EngineError::Panicked(thread)) => return Err(EngineError::Panicked(thread)),
                Err(_) => std::thread::sleep(limits::TICK / 2),
            }
        }
    }

    /// Answers the source that is back, which has `placed` so many frames of the channels of
    /// attempt `of`, and makes its new connection the control connection.
    pub(super) fn answer_return(
        &mut self,
        back: Return,
        (of, placed): (u32, &[u64]),
    ) -> Result<(), EngineError> {
        let Return { mut stream, attempt, .. } = back;
        let Some(secret) = self.door.secret() else { return Err(EngineError::Panicked("door")) };
        let proof = ReturnProof { session: self.id, secret, attempt };
        let greeting = self.greeting(Role::Resume, attempt);
        send_greeting(&mut stream, greeting, PEER)?;
        let read = stream.try_clone().map_err(link_error(PEER))?;
        self.control.replace(stream)?;
        self.listen_to(read)?;
        let proof = proof.of_destination(of, placed);
        self.say(&Message::Resumed { attempt: of, placed: placed.to_vec(), proof })?;
        self.may_ask_for_prints = true;
        Ok(())
    }

    /// Our greeting on a later control connection.
    fn greeting(&self, role: Role, attempt: u32) -> Greeting {
        Greeting { version: self.version, session: self.id, role, attempt }
    }

    /// All connections stand again.
    pub(super) fn is_back(&mut self) {
        self.lost = None;
        self.door.lost(false);
    }

    /// What a long call was interrupted by, as far as something was. What the source said before
    /// it gave up is of no interest any more.
    pub(super) fn interruption(&self) -> Option<EngineError> {
        if !self.interrupt.is_raised() {
            return None;
        }
        if self.cancel.is_cancelled() {
            return Some(EngineError::Cancelled);
        }
        self.end_of_events()
    }

    /// That the source has given up, or that the control connection to it is lost, if so: it makes
    /// no other connections then that were begun by that one. What it said before is of no interest
    /// any more; of one that is there, all is left.
    pub(super) fn given_up(&self) -> Option<EngineError> {
        let over = self.interrupt.is_over().then(|| self.interruption()).flatten();
        over.or_else(|| self.interrupt.is_lost().then(|| self.end_of_events()).flatten())
    }

    /// What the source gave up by, or its connection was lost by, of all that it said.
    fn end_of_events(&self) -> Option<EngineError> {
        let events = self.ahead.take().into_iter().chain(self.events.try_iter());
        let mut events = events.filter(|it| it.connection == self.connection);
        events.find_map(|event| event.message.and_then(not_aborted).err())
    }

    /// What ends the long calls of the machine.
    pub(super) fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// What the source says within `limit`. What an earlier connection ended with is of no
    /// interest.
    fn event(&self, limit: Duration) -> Result<Option<Message>, EngineError> {
        let next = match self.ahead.take() {
            Some(event) => Ok(event),
            None => self.events.recv_timeout(limit),
        };
        match next {
            Ok(Event { connection, message }) if connection == self.connection => message.map(Some),
            Ok(_) | Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(EngineError::Panicked("control")),
        }
    }

    /// The packet for a card that is here already, if that is what comes next.
    pub(super) fn packet(&self) -> Option<Vec<u8>> {
        let next = self.ahead.take().or_else(|| self.events.try_recv().ok());
        match next {
            Some(Event { connection, message: Ok(Message::LatePacket(packet)) })
                if connection == self.connection =>
            {
                Some(packet)
            }
            other => {
                self.ahead.set(other);
                None
            }
        }
    }

    /// Has a question of our adapter answered by the source's.
    pub(super) fn ask(&self, question: &[u8]) -> Result<Vec<u8>, EngineError> {
        if question.len() > QUESTION_LIMIT {
            return Err(EngineError::Panicked("main"));
        }
        self.say(&Message::Question(question.to_vec()))?;
        let until = Instant::now() + limits::QUESTION;
        while Instant::now() < until {
            if self.cancel.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            match self.event(limits::TICK)?.map(not_aborted).transpose()? {
                Some(Message::Answer(answer)) => return Ok(answer),
                Some(other) => {
                    let what = format!("it said {:?} when it was asked a question", other.kind());
                    return Err(EngineError::Protocol { peer: PEER, what });
                }
                None => {}
            }
        }
        let what = "the source to answer a question";
        Err(EngineError::Timeout { what, limit: limits::QUESTION })
    }

    /// From now on the source is waited for, in case that it asks again.
    pub(super) fn linger(&mut self) -> Instant {
        *self.linger_until.get_or_insert_with(|| Instant::now() + limits::LINGER)
    }

    /// The same from this moment on, whatever was waited for before.
    pub(super) fn linger_anew(&mut self) {
        self.linger_until = Some(Instant::now() + limits::LINGER);
    }

    /// Waits for the source to come back and makes its new connection the control connection. The
    /// operator's wish ends the wait, also where the guest is ours by now: nothing but an answer is
    /// left to be given, and an operator can give that as well. One that came before, too late, was
    /// no wish to end this.
    pub(super) fn await_resolve(
        &mut self,
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<(), EngineError> {
        let deaf = Cancel::default();
        let cancel = if self.was_cancelled() { &deaf } else { self.cancel };
        notice(&self.awaiting_source());
        let until = self.linger();
        loop {
            let Some((greeting, stream)) = self.door.next(until, cancel, notice)? else {
                return Err(EngineError::Timeout { what: "the source", limit: limits::LINGER });
            };
            if greeting.role == Role::Resolve {
                return self.answer_asking(stream);
            }
            notice(&Notice::Refused("a connection out of place".to_owned()));
        }
    }

    /// What is told when a wait for the source begins.
    pub(super) fn awaiting_source(&self) -> Notice {
        Notice::AwaitingSource { limit: limits::LINGER, arrived: self.is_committed() }
    }

    /// Makes the connection of a source that asks the control connection.
    fn answer_asking(&mut self, mut stream: Stream) -> Result<(), EngineError> {
        send_greeting(&mut stream, self.greeting(Role::Resolve, 0), PEER)?;
        let read = stream.try_clone().map_err(link_error(PEER))?;
        self.control.replace(stream)?;
        self.listen_to(read)
    }

    /// Waits, `until` then, for the source to come back for what is missing, or for its COMMIT over
    /// a connection by which it asks. The operator's wish to end it is not heard: the guest runs.
    pub(super) fn await_either(
        &mut self,
        vm: &dyn DestinationVm,
        until: Instant,
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<Option<Found>, EngineError> {
        loop {
            self.door.tell(notice);
            if vm.has_ended() {
                return Err(EngineError::Ended("destination"));
            }
            if let Some(back) = self.door.take_return() {
                return Ok(Some(Found::Back(back)));
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            let soon = Instant::now() + limits::TICK / 4;
            match self.door.next(soon, &Cancel::default(), notice)? {
                Some((greeting, stream)) if greeting.role == Role::Resolve => {
                    self.answer_asking(stream)?;
                }
                // Nobody, or one of connections that were given up, and late.
                _ => {}
            }
            // Of a source that asks; what others have left is of no interest any more.
            match self.event(Duration::ZERO) {
                Ok(Some(Message::Commit)) => return Ok(Some(Found::Asks)),
                Ok(_) => {}
                Err(EngineError::Panicked(thread)) => return Err(EngineError::Panicked(thread)),
                Err(_) => {}
            }
        }
    }

    /// Says no more, and accepts nobody. Returns why the source gave up, if that `matters` and it
    /// says so after the link was seen to break: its channels end before its last word is read.
    pub(super) fn end(self, matters: bool) -> Option<(AbortCode, String)> {
        self.control.finish();
        drop(self.door);
        let mut ahead = self.ahead.into_inner();
        let until = Instant::now() + limits::ABORT;
        while matters && Instant::now() < until {
            match ahead.take().map_or_else(|| self.events.recv_timeout(limits::TICK), Ok) {
                Ok(Event { message: Ok(Message::Abort { code, text }), .. }) => {
                    return Some((code, text));
                }
                Ok(Event { message: Err(_), connection }) if connection == self.connection => break,
                Ok(_) | Err(_) => {}
            }
        }
        None
    }
}

/// What a message that nobody waits for means.
pub(super) fn out_of_place(message: &Message) -> EngineError {
    let what = format!("it said {:?} out of place", message.kind());
    EngineError::Protocol { peer: PEER, what }
}

fn not_aborted(message: Message) -> Result<Message, EngineError> {
    match message {
        Message::Abort { code, text } => Err(EngineError::Aborted { peer: PEER, code, text }),
        message => Ok(message),
    }
}

/// The next connection that greets as one of godwit's; others are refused.
fn next_connection(
    listener: &Listener,
    (security, cells): (&Security, &Cells),
    until: Option<Instant>,
    cancel: &Cancel,
    notice: &mut dyn FnMut(&Notice),
) -> Result<(Greeting, Stream), EngineError> {
    let began = Instant::now();
    loop {
        let accepted =
            listener.accept(until, || cancel.is_cancelled()).map_err(link_error(PEER))?;
        let Some(mut stream) = accepted else {
            if cancel.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            let limit =
                until.map_or(Duration::ZERO, |until| until.saturating_duration_since(began));
            return Err(EngineError::Timeout { what: "a connection of the source", limit });
        };
        let (cell, security, cancel) = (cells.reader()?, security.clone(), cancel.clone());
        // A thread for each: what a stranger says first is read with as few rights as the rest.
        let greeted = threads::start("greeter", move || {
            let _confined = cell.enter()?;
            door::greet(&mut stream, &security, || cancel.is_cancelled()).map(|it| (it, stream))
        })?;
        let greeted = greeted.join().map_err(|_| EngineError::Panicked("greeter"))?;
        if let Some(error) = cells.tried() {
            return Err(error);
        }
        match greeted {
            Ok(greeted) => return Ok(greeted),
            Err(EngineError::Cancelled) => return Err(EngineError::Cancelled),
            Err(error) if door::comes_back(&error) => {}
            Err(error) => notice(&Notice::Refused(error.to_string())),
        }
    }
}
