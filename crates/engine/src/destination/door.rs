//! Who comes to the address of a destination that has found its source.
//!
//! From then on one thread accepts all connections: it hands on those of the session, and tells
//! another source at once that this destination is busy, and with whom. Without it, that source
//! would wait for a greeting that does not come, and the operators of both sides would learn
//! nothing of each other.
//!
//! Invariant: nobody is taken for a source that comes back who does not prove the session's secret,
//! and no attempt to do so is taken twice.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_units::format_duration;
use godwit_wire::{AbortCode, Greeting, Message, Role, Secret, SessionId, Version, WireError};

use super::Notice;
use super::channel::PEER;
use crate::address::{Listener, Stream};
use crate::cells::Cells;
use crate::link::{ControlWriter, FrameReader, link_error, receive_greeting, send_greeting};
use crate::return_proof::ReturnProof;
use crate::security::{BeginError, Security};
use crate::{Cancel, EngineError, limits, threads};

/// Connections of the session that may wait: those of all channels, and of a source that asks
/// again.
const OWN_LIMIT: usize = 128;

/// Notices that may wait to be told; of more, some are not.
const NOTICES_LIMIT: usize = 16;

/// Connections of strangers that stay open until others come: who closes one at once may take its
/// last words along, since what the stranger says meanwhile is not read (tcp(7): a reset overtakes
/// data).
const LEFT_OPEN: usize = 8;

/// What tells connections of a session.
#[derive(Debug)]
pub(super) struct Credentials {
    pub(super) id: SessionId,
    /// That the source speaks on all of them.
    pub(super) version: Version,
    pub(super) security: Security,
    /// The certificate that the source showed on the first of them.
    pub(super) shown: Option<Vec<u8>>,
}

/// A source that has come back, and has proven to be the session's.
#[derive(Debug)]
pub(super) struct Return {
    pub(super) stream: Stream,
    /// What its channels will be known by, and how many of memory there will be.
    pub(super) attempt: u32,
    pub(super) channels: u8,
}

/// What the door and the session tell each other of a source that may come back.
#[derive(Debug, Default)]
struct Returning {
    /// What it is known by; nobody comes back before that was told.
    secret: Option<Secret>,
    /// The attempt that was taken last.
    attempt: u32,
    /// The last one, if nobody has looked at it yet.
    back: Option<Return>,
    /// The connections are lost since then.
    lost: Option<Instant>,
}

/// The thread that accepts; it ends with this.
#[derive(Debug)]
pub(super) struct Door {
    own: Receiver<(Greeting, Stream)>,
    notices: Receiver<Notice>,
    stop: Arc<AtomicBool>,
    /// Whose greeting is being read.
    visitor: Arc<Mutex<Option<Stream>>>,
    returning: Arc<Mutex<Returning>>,
    thread: Option<JoinHandle<()>>,
    /// The certificate that the source showed.
    shown: Option<Vec<u8>>,
}

impl Door {
    /// Accepts what comes to `listener` while the session lasts that `session` tells of, whose
    /// source is called `source`.
    pub(super) fn open(
        listener: &Listener,
        session: Credentials,
        source: &str,
        cells: &Cells,
    ) -> Result<Self, EngineError> {
        let (own_in, own) = mpsc::sync_channel(OWN_LIMIT);
        let (notices_in, notices) = mpsc::sync_channel(NOTICES_LIMIT);
        let (stop, visitor) =
            (Arc::<AtomicBool>::default(), Arc::<Mutex<Option<Stream>>>::default());
        let returning = Arc::<Mutex<Returning>>::default();
        let shown = session.shown.clone();
        let keeper = Keeper {
            returning: Arc::clone(&returning),
            listener: listener.clone(),
            session,
            source: source.to_owned(),
            since: Instant::now(),
            own: own_in,
            notices: notices_in,
            stop: Arc::clone(&stop),
            visitor: Arc::clone(&visitor),
            left_open: VecDeque::new(),
        };
        let cell = cells.door()?;
        let thread = threads::start("door", move || {
            // It was tried before; a door that does not open is told as a thread that has ended.
            if let Ok(_confined) = cell.enter() {
                keeper.run();
            }
        })?;
        Ok(Self { own, notices, stop, visitor, returning, thread: Some(thread), shown })
    }

    /// From now on the source may come back, if it proves `secret`. Whether that was not told
    /// before.
    pub(super) fn keep(&self, secret: Secret) -> bool {
        lock(&self.returning).secret.replace(secret).is_none()
    }

    /// The certificate that the source showed.
    pub(super) fn shown(&self) -> Option<&[u8]> {
        self.shown.as_deref()
    }

    /// Attempts to come back up to this one were taken before.
    pub(super) fn taken(&self, attempt: u32) {
        lock(&self.returning).attempt = attempt;
    }

    /// What the source is known by when it comes back, if it may.
    pub(super) fn secret(&self) -> Option<Secret> {
        lock(&self.returning).secret
    }

    /// Whether the source has come back, and [`Self::take_return`] not been called since.
    pub(super) fn has_return(&self) -> bool {
        lock(&self.returning).back.is_some()
    }

    /// The source that has come back.
    pub(super) fn take_return(&self) -> Option<Return> {
        lock(&self.returning).back.take()
    }

    /// The connections of the session are lost, or stand again.
    pub(super) fn lost(&self, lost: bool) {
        let since = &mut lock(&self.returning).lost;
        *since = lost.then(|| since.unwrap_or_else(Instant::now));
    }

    /// The next connection of the session; `None` at `until`.
    pub(super) fn next(
        &self,
        until: Instant,
        cancel: &Cancel,
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<Option<(Greeting, Stream)>, EngineError> {
        loop {
            self.tell(notice);
            let left = until.saturating_duration_since(Instant::now());
            match self.own.recv_timeout(left.min(limits::TICK)) {
                Ok(found) => return Ok(Some(found)),
                Err(RecvTimeoutError::Disconnected) => return Err(EngineError::Panicked("door")),
                Err(RecvTimeoutError::Timeout) if cancel.is_cancelled() => {
                    return Err(EngineError::Cancelled);
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Tells who was sent away since this was called last.
    pub(super) fn tell(&self, notice: &mut dyn FnMut(&Notice)) {
        self.notices.try_iter().for_each(|told| notice(&told));
    }
}

impl Door {
    /// Accepts no more.
    pub(super) fn close(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(visitor) = &*self.visitor.lock().unwrap_or_else(PoisonError::into_inner) {
            visitor.shut_down();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.close();
    }
}

/// Encrypts a connection, where it is to be, and receives the greeting of the source at its other
/// end, unless it is to `stop` meanwhile. One of another version is told ours, and says so to its
/// operator.
pub(super) fn greet(
    stream: &mut Stream,
    security: &Security,
    stop: impl Fn() -> bool,
) -> Result<Greeting, EngineError> {
    let peer = stream.peer();
    security.begin(stream, &peer, limits::GREETING, &stop).map_err(|error| match error {
        BeginError::Engine(error) => error,
        BeginError::Link(_) if stop() => EngineError::Cancelled,
        BeginError::Link(error) => link_error(PEER)(error),
    })?;
    receive_greeting(stream, PEER, limits::GREETING, stop).inspect_err(|error| {
        if matches!(error, EngineError::Wire { source: WireError::Version { .. }, .. }) {
            let _ = send_greeting(stream, Greeting::refusal(), PEER);
        }
    })
}

/// Whether a source that was refused has a version in common with us, in which it comes back.
pub(super) fn comes_back(refused: &EngineError) -> bool {
    matches!(
        refused,
        EngineError::Wire { source: WireError::Version { theirs, .. }, .. }
            if theirs.common().is_some()
    )
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells a source that comes back to a destination that has never seen it.
pub(super) fn send_back(mut stream: Stream, greeting: Greeting) {
    let text = "it knows nothing of this migration: what had arrived is gone with the godwit \
                receive that took it in; begin anew"
        .to_owned();
    let said = send_greeting(&mut stream, greeting, PEER)
        .and_then(|()| ControlWriter::new(stream, PEER))
        .and_then(|control| control.send(&Message::Abort { code: AbortCode::Other, text }));
    // Who does not hear it tries on.
    drop(said);
}

struct Keeper {
    returning: Arc<Mutex<Returning>>,
    listener: Listener,
    session: Credentials,
    source: String,
    since: Instant,
    own: SyncSender<(Greeting, Stream)>,
    notices: SyncSender<Notice>,
    stop: Arc<AtomicBool>,
    visitor: Arc<Mutex<Option<Stream>>>,
    left_open: VecDeque<ControlWriter>,
}

impl Keeper {
    fn run(mut self) {
        while !self.stopped() {
            match self.listener.accept(None, || self.stopped()) {
                Ok(Some(stream)) => self.let_in(stream),
                Ok(None) => return,
                // Descriptors may be short for a while; what is waiting stays in the queue of the
                // kernel.
                Err(_) => std::thread::sleep(limits::TICK),
            }
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn let_in(&mut self, mut stream: Stream) {
        self.visit(stream.try_clone().ok());
        if self.stopped() {
            return;
        }
        let greeting = greet(&mut stream, &self.session.security, || self.stopped());
        if let Ok(greeting) = &greeting
            && greeting.role == Role::Resume
            && greeting.session == self.session.id
            && greeting.version == self.session.version
            && stream.shown() == self.session.shown
        {
            let refused = self.take_back(stream, greeting.attempt);
            self.visit(None);
            if let Err(refused) = refused {
                let _ = self.notices.try_send(Notice::Refused(refused));
            }
            return;
        }
        self.visit(None);
        let refused = match greeting {
            Ok(greeting)
                if greeting.session == self.session.id && stream.shown() != self.session.shown =>
            {
                let words = "a connection of the session, with another certificate than its source";
                Notice::Refused(words.to_owned())
            }
            Ok(greeting)
                if greeting.session == self.session.id
                    && greeting.version != self.session.version =>
            {
                let words = "a connection of the session, in another version of the protocol";
                Notice::Refused(words.to_owned())
            }
            Ok(greeting) if greeting.session == self.session.id => {
                // More than the session can have come from nobody that means well.
                let _ = self.own.try_send((greeting, stream));
                return;
            }
            Ok(greeting) if greeting.role == Role::Control => self.send_away(stream, greeting),
            Ok(_) => Notice::Refused("a connection of another session".to_owned()),
            Err(_) if self.stopped() => return,
            Err(error) if comes_back(&error) => return,
            Err(error) => Notice::Refused(error.to_string()),
        };
        let _ = self.notices.try_send(refused);
    }

    /// The source comes back, or somebody who knows the session's number.
    fn take_back(&self, stream: Stream, attempt: u32) -> Result<(), String> {
        let told = |error: EngineError| error.to_string();
        let read = stream.try_clone().map_err(|error| told(link_error(PEER)(error)))?;
        stream.set_read_limit(Some(limits::GREETING)).map_err(|e| told(link_error(PEER)(e)))?;
        let said = FrameReader::new(read, PEER).message().map_err(told)?;
        stream.set_read_limit(None).map_err(|error| told(link_error(PEER)(error)))?;
        let mut returning = lock(&self.returning);
        let Some(secret) = returning.secret else {
            return Err("a source that comes back, for which nothing was to be kept".to_owned());
        };
        let proof_of = ReturnProof { session: self.session.id, secret, attempt };
        match said {
            Message::Resume { channels, proof }
                if attempt > returning.attempt && proof_of.is_source(channels, &proof) =>
            {
                returning.attempt = attempt;
                // An earlier attempt was given up by the source.
                returning.back = Some(Return { stream, attempt, channels });
                Ok(())
            }
            _ => Err("a connection that does not prove the session's secret".to_owned()),
        }
    }

    fn visit(&self, stream: Option<Stream>) {
        *self.visitor.lock().unwrap_or_else(PoisonError::into_inner) = stream;
    }

    /// Another source, which is told why it cannot stay.
    fn send_away(&mut self, mut stream: Stream, greeting: Greeting) -> Notice {
        let peer = stream.peer();
        let (source, since) = (&self.source, whole_seconds(self.since.elapsed()));
        let lost = lock(&self.returning).lost.map(|lost| whole_seconds(lost.elapsed()));
        let lost = lost.map_or(String::new(), |time| {
            format!(", has lost its connections {time} ago and keeps for it what has arrived")
        });
        let text = format!(
            "it has been taking in the guest of {source} for {since}{lost}; wait for its end, or \
             start another VM and another godwit receive for this guest"
        );
        let said = send_greeting(&mut stream, greeting, PEER)
            .and_then(|()| ControlWriter::new(stream, PEER))
            .and_then(|control| {
                control.send(&Message::Abort { code: AbortCode::Busy, text })?;
                control.finish();
                Ok(control)
            });
        self.left_open.extend(said.ok());
        while self.left_open.len() > LEFT_OPEN {
            self.left_open.pop_front();
        }
        Notice::Busy { peer }
    }
}

/// Nobody wants to read that a guest has been coming for 12.3 s.
fn whole_seconds(time: Duration) -> String {
    format_duration(Duration::from_secs(time.as_secs().max(1)))
}

#[cfg(test)]
mod tests {
    use godwit_tls::{Files, Host, Keys, Side, make};

    use super::*;
    use crate::address::Address;

    #[test]
    fn a_connection_of_the_session_shows_its_sources_certificate() {
        // Mutation: who knows the session's number, from a log or a core, needs no more than any
        // certificate of the authority's.
        let dir = std::env::temp_dir().join(format!("godwit-door-{}", std::process::id()));
        let made = make(&dir, &["west", "north", "east"].map(str::to_owned), 30).unwrap();
        let keys = |number: usize, side| {
            Keys::read(&Files::in_dir(&made.hosts[number], side).unwrap()).unwrap()
        };
        let security = Security::Tls(Host::destination(&keys(2, Side::Destination), &[]).unwrap());
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let to = listener.address().unwrap();
        let id = SessionId([7; 16]);
        let call = |number| {
            let host = Host::source(&keys(number, Side::Source), "east").unwrap();
            let (version, role) = (Version::NEWEST, Role::Channel(0));
            let greeting = Greeting { version, session: id, role, attempt: 0 };
            call(&to, &Security::Tls(host), greeting)
        };

        let first = call(0);
        let mut stream = listener.accept(None, || false).unwrap().unwrap();
        greet(&mut stream, &security, || false).unwrap();
        first.join().unwrap();
        let version = Version::NEWEST;
        let credentials = Credentials { id, version, security, shown: stream.shown() };
        assert!(credentials.shown.is_some());
        let cells = Cells::new(true, "the source").unwrap();
        let door = Door::open(&listener, credentials, "west", &cells).unwrap();
        let cancel = Cancel::default();
        let mut told = Vec::new();
        let mut next = |limit: Duration| {
            let until = Instant::now() + limit;
            door.next(until, &cancel, &mut |notice| told.push(format!("{notice:?}"))).unwrap()
        };

        call(1).join().unwrap();
        assert!(next(Duration::from_secs(1)).is_none());
        call(0).join().unwrap();
        assert!(next(Duration::from_secs(20)).is_some());
        assert!(told.len() == 1 && told[0].contains("with another certificate"), "{told:?}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// A source that connects and greets.
    fn call(to: &Address, security: &Security, greeting: Greeting) -> JoinHandle<()> {
        let (to, security) = (to.clone(), security.clone());
        std::thread::spawn(move || {
            let mut stream = Stream::connect(&to).unwrap();
            let begun = security.begin(&mut stream, "east", limits::GREETING, || false);
            begun.map_err(|error| format!("{error:?}")).unwrap();
            send_greeting(&mut stream, greeting, "destination").unwrap();
        })
    }
}
