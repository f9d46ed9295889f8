//! A monitor over a unix socket: QMP.
//!
//! Protocol: QEMU's `docs/interop/qmp-spec`. A monitor answers one client at a time and leaves a
//! second one waiting for the greeting, so a greeting that does not come is its own error.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use godwit_engine::Interrupt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};

use super::events::EventQueue;
use super::{
    COMMAND_LIMIT, Event, Handle, Monitor, Patience, QmpError, Queued, STEP, Seen, Version,
};

/// For the greeting of a QEMU that runs.
pub(crate) const GREETING_LIMIT: Duration = Duration::from_secs(5);
/// The longest line taken from a monitor; `query-*` answers of large machines stay far below.
const LINE_LIMIT: usize = 16 << 20;

/// A connection to a QMP monitor, past the greeting.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    buffer: Vec<u8>,
    /// Bytes at the beginning of `buffer` that hold no end of a line.
    searched: usize,
    events: EventQueue,
    next_id: u64,
    version: Version,
    patience: Patience,
    /// What comes may still be answers to somebody else, or the rest of one.
    taken_over: bool,
}

impl Qmp {
    /// Connects to the monitor at `path` and leaves its capabilities-negotiation mode.
    ///
    /// # Errors
    /// When nobody listens there, no greeting comes within 5 s, or what listens is no monitor.
    pub fn connect(path: &Path) -> Result<Self, QmpError> {
        Self::connect_patiently(path, |_| false)
    }

    /// The same, but when no greeting comes, `wait` is asked, with the number of the process behind
    /// the monitor, whether to wait once more as long.
    pub(crate) fn connect_patiently(
        path: &Path,
        wait: impl FnMut(i32) -> bool,
    ) -> Result<Self, QmpError> {
        Self::greeted(path, Instant::now() + GREETING_LIMIT, &Interrupt::default(), wait)
    }

    /// The same with a QEMU that has just been started, and may be slow on a busy host: its
    /// greeting and its first answer may come until then. Nobody waits once `interrupt` is raised.
    pub(crate) fn connect_until(
        path: &Path,
        until: Instant,
        interrupt: &Interrupt,
    ) -> Result<Self, QmpError> {
        Self::greeted(path, until, interrupt, |_| false)
    }

    fn greeted(
        path: &Path,
        mut until: Instant,
        interrupt: &Interrupt,
        mut wait: impl FnMut(i32) -> bool,
    ) -> Result<Self, QmpError> {
        let stream = UnixStream::connect(path)
            .map_err(|source| QmpError::Connect { path: path.to_owned(), source })?;
        let mut qmp = Self::over(stream);
        qmp.patience.interrupt = interrupt.clone();
        let peer = qmp.peer_pid()?.as_raw_nonzero().get();
        let greeting = loop {
            match qmp.read_message("the greeting", until) {
                Ok(greeting) => break greeting,
                // Not over a new connection: this one stays in QEMU's short queue until QEMU takes
                // it (listen(2)).
                Err(QmpError::Timeout { .. }) if wait(peer) => {
                    until = Instant::now() + GREETING_LIMIT;
                }
                Err(error @ QmpError::Interrupted { .. }) => return Err(error),
                Err(_) => return Err(QmpError::NoGreeting { path: path.to_owned() }),
            }
        };
        let number = |part: &str| greeting["QMP"]["version"]["qemu"][part].as_u64();
        qmp.version = match (number("major"), number("minor"), number("micro")) {
            (Some(major), Some(minor), Some(micro)) => (major, minor, micro),
            _ => return Err(QmpError::NoGreeting { path: path.to_owned() }),
        };
        let queued = qmp.write("qmp_capabilities", Value::Null, None)?;
        let left = until.saturating_duration_since(Instant::now());
        qmp.read_answer(&queued, left.max(COMMAND_LIMIT))?;
        Ok(qmp)
    }

    /// Goes on with a connection that is past the greeting.
    pub(crate) fn over(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
            searched: 0,
            events: EventQueue::default(),
            next_id: 0,
            version: (0, 0, 0),
            patience: Patience::default(),
            taken_over: false,
        }
    }

    /// Goes on with the connection of a process that has ended, perhaps within a command or an
    /// answer. Its [`Self::version`] is not known.
    ///
    /// # Errors
    /// When the connection is gone.
    pub(crate) fn take_over(stream: UnixStream) -> Result<Self, QmpError> {
        let mut qmp = Self::over(stream);
        // Far from the numbers that the other one gave.
        qmp.next_id = 1 << 32;
        qmp.taken_over = true;
        let lost = |_| QmpError::Closed { during: "the takeover".to_owned() };
        qmp.stream.set_write_timeout(Some(COMMAND_LIMIT)).map_err(lost)?;
        // A byte that occurs in no UTF-8 is an error wherever QEMU's parser is, a string included,
        // and resets it; the end of the line ends its search for the next token
        // (qobject/json-lexer.c, IN_RECOVERY).
        qmp.stream.write_all(b"\xff\n").map_err(lost)?;
        Ok(qmp)
    }

    /// QEMU's version: major, minor, micro.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The process at the other end: the one that opened the socket for listening (`SO_PEERCRED`,
    /// unix(7)).
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn peer_pid(&self) -> Result<rustix::process::Pid, QmpError> {
        rustix::net::sockopt::socket_peercred(&self.stream)
            .map(|credentials| credentials.pid)
            .map_err(|errno| QmpError::Io {
                during: "SO_PEERCRED".to_owned(),
                source: errno.into(),
            })
    }

    /// Runs `command` with `arguments` (null for none) and returns its answer as it came.
    ///
    /// # Errors
    /// [`QmpError::Refused`] with QEMU's own words, or a failure of the connection.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let queued = self.write(command, arguments, None)?;
        self.read_answer(&queued, self.patience.limit)
    }

    fn write(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Queued, QmpError> {
        self.next_id += 1;
        let id = self.next_id;
        let mut request = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        tracing::trace!(command, "asked");
        let line = format!("{request}\n");
        let io = |source: io::Error| match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                QmpError::Closed { during: command.to_owned() }
            }
            _ => QmpError::Io { during: command.to_owned(), source },
        };
        self.stream.set_write_timeout(Some(self.patience.limit)).map_err(io)?;
        match fd {
            None => self.stream.write_all(line.as_bytes()).map_err(io)?,
            Some(fd) => {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                let fds = [fd];
                control.push(SendAncillaryMessage::ScmRights(&fds));
                let sent = rustix::net::sendmsg(
                    &self.stream,
                    &[IoSlice::new(line.as_bytes())],
                    &mut control,
                    SendFlags::NOSIGNAL,
                )
                .map_err(|errno| io(errno.into()))?;
                self.stream.write_all(&line.as_bytes()[sent..]).map_err(io)?;
            }
        }
        Ok(Queued { id, command: command.to_owned() })
    }

    fn read_answer(&mut self, queued: &Queued, limit: Duration) -> Result<Value, QmpError> {
        let Queued { id, command } = queued;
        let deadline = Instant::now() + limit;
        loop {
            let message = match self.read_message(command, deadline) {
                Ok(message) => message,
                Err(QmpError::Io { source, .. })
                    if self.taken_over && source.kind() == io::ErrorKind::InvalidData =>
                {
                    continue;
                }
                Err(QmpError::Timeout { during, .. }) => {
                    return Err(QmpError::Timeout { during, limit });
                }
                Err(error) => return Err(error),
            };
            // The answer to what was cut off, and to the byte that ended it.
            if self.taken_over && message.get("error").is_some() && message.get("id").is_none() {
                continue;
            }
            // A late answer to a command that was given up on.
            if message.get("event").is_none()
                && message["id"].as_u64().is_some_and(|theirs| theirs != *id)
            {
                continue;
            }
            self.taken_over &= message["id"] != *id;
            if let Some(error) = message.get("error") {
                tracing::trace!(command, %error, "refused");
                return Err(QmpError::refused(command, error));
            }
            if message["id"] == *id {
                tracing::trace!(command, "answered");
                return Ok(message["return"].clone());
            }
            self.keep_event(&message);
        }
    }

    /// Takes the events that have come so far. Reads what QEMU has sent by now, and waits for
    /// nothing.
    ///
    /// # Errors
    /// A failure of the connection; events that came before it are told first.
    pub fn take_events(&mut self) -> Result<Vec<Event>, QmpError> {
        loop {
            while let Some(message) = self.next_line("an event")? {
                // The late answer to a command that was given up on is no event, and is dropped.
                self.keep_event(&message);
            }
            let mut fds = [PollFd::new(&self.stream, PollFlags::IN)];
            match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
                Ok(0) | Err(Errno::INTR) => return Ok(self.events.take()),
                Ok(_) => {}
                Err(errno) => {
                    return Err(QmpError::Io {
                        during: "an event".to_owned(),
                        source: errno.into(),
                    });
                }
            }
            match self.read_more("an event", COMMAND_LIMIT) {
                Ok(_) => {}
                // What came before the end is told first.
                Err(_) if !self.events.is_empty() => return Ok(self.events.take()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Forgets the events that were read so far, so that a wait that follows sees only new ones.
    pub fn forget_events(&mut self) {
        self.events.take();
    }

    /// Waits up to `limit` for the first event for which `wanted` answers yes; others are kept for
    /// later waits.
    ///
    /// # Errors
    /// [`QmpError::Timeout`] naming `what`, or a failure of the connection.
    pub fn wait_event_where(
        &mut self,
        what: &str,
        limit: Duration,
        mut wanted: impl FnMut(&Event) -> bool,
    ) -> Result<Event, QmpError> {
        let mut look = |event: &Event| if wanted(event) { Seen::Awaited } else { Seen::Kept };
        self.watch_events(what, limit, &mut look)
    }

    /// Waits up to `limit` for an event called `name`; others are kept for later waits.
    ///
    /// # Errors
    /// As [`Self::wait_event_where`].
    pub fn wait_event(&mut self, name: &str, limit: Duration) -> Result<Event, QmpError> {
        self.wait_event_where(name, limit, |event| event.name == name)
    }

    fn watch_events(
        &mut self,
        what: &str,
        limit: Duration,
        look: &mut dyn FnMut(&Event) -> Seen,
    ) -> Result<Event, QmpError> {
        let deadline = Instant::now() + limit;
        self.events.begin_wait();
        loop {
            if let Some(event) = self.events.find(look) {
                return Ok(event);
            }
            match self.read_message(what, deadline) {
                Ok(message) => self.keep_event(&message),
                Err(QmpError::Timeout { during, .. }) => {
                    return Err(QmpError::Timeout { during, limit });
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Keeps a message that is an event.
    fn keep_event(&mut self, message: &Value) {
        let Some(name) = message["event"].as_str() else { return };
        let stamp = &message["timestamp"];
        let seconds = Duration::from_secs(stamp["seconds"].as_u64().unwrap_or(0));
        let micros = Duration::from_micros(stamp["microseconds"].as_u64().unwrap_or(0));
        // Whatever the stamp says: a time that no clock shows counts as one that was set.
        let emitted = seconds.saturating_add(micros);
        self.events.push(Event::emitted(name.to_owned(), message["data"].clone(), emitted));
    }

    fn read_message(&mut self, during: &str, deadline: Instant) -> Result<Value, QmpError> {
        let started = Instant::now();
        loop {
            if let Some(message) = self.next_line(during)? {
                return Ok(message);
            }
            if self.patience.interrupt.is_raised() {
                return Err(QmpError::Interrupted { during: during.to_owned() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let limit = deadline.duration_since(started);
                return Err(QmpError::Timeout { during: during.to_owned(), limit });
            }
            self.read_more(during, left.min(STEP))?;
        }
    }

    /// The first whole line of what was read and not looked at yet.
    fn next_line(&mut self, during: &str) -> Result<Option<Value>, QmpError> {
        let invalid = |kind, text: &str| QmpError::Io {
            during: during.to_owned(),
            source: io::Error::new(kind, text.to_owned()),
        };
        if let Some(at) = self.buffer[self.searched..].iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=self.searched + at).collect();
            self.searched = 0;
            let message = serde_json::from_slice(&line);
            return message
                .map(Some)
                .map_err(|_| invalid(io::ErrorKind::InvalidData, "a line that is not JSON"));
        }
        self.searched = self.buffer.len();
        if self.searched > LINE_LIMIT {
            return Err(invalid(io::ErrorKind::FileTooLarge, "a line of more than 16 MiB"));
        }
        Ok(None)
    }

    /// Reads what there is, and waits up to `limit` for it; `false` when nothing came.
    fn read_more(&mut self, during: &str, limit: Duration) -> Result<bool, QmpError> {
        let io = |source| QmpError::Io { during: during.to_owned(), source };
        self.stream.set_read_timeout(Some(limit)).map_err(io)?;
        let mut chunk = [0; 16384];
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(QmpError::Closed { during: during.to_owned() }),
            Ok(n) => {
                self.buffer.extend_from_slice(&chunk[..n]);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                Err(QmpError::Closed { during: during.to_owned() })
            }
            Err(error) => Err(io(error)),
        }
    }
}

impl Monitor for Qmp {
    fn version(&self) -> Version {
        self.version
    }

    fn peer_pid(&self) -> Result<rustix::process::Pid, QmpError> {
        Self::peer_pid(self)
    }

    fn handle(&self) -> io::Result<Handle> {
        self.stream.try_clone().map(Handle::Socket)
    }

    fn patience(&self) -> &Patience {
        &self.patience
    }

    fn patience_mut(&mut self) -> &mut Patience {
        &mut self.patience
    }

    /// QEMU carries out commands in the order in which they were written, also those that reach it
    /// while its main loop stands still, as long as this connection stands: it forgets them when
    /// the connection ends before (`monitor_qmp_event` in `monitor/qmp.c`). The descriptor goes
    /// with the bytes (SCM_RIGHTS, as libvirt does it).
    fn queue(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Queued, QmpError> {
        self.write(command, arguments, fd)
    }

    fn answer(&mut self, queued: &Queued, limit: Duration) -> Result<Value, QmpError> {
        self.read_answer(queued, limit)
    }

    fn take_events(&mut self) -> Result<Vec<Event>, QmpError> {
        Self::take_events(self)
    }

    fn watch(
        &mut self,
        what: &str,
        limit: Duration,
        look: &mut dyn FnMut(&Event) -> Seen,
    ) -> Result<Event, QmpError> {
        self.watch_events(what, limit, look)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use godwit_engine::Cancel;

    use super::*;

    /// A peer that plays `script`: sends each line, reading one command line before each but the
    /// first.
    fn peer(script: &'static [&'static str]) -> (PathBuf, std::thread::JoinHandle<()>) {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("godwit-qmp-{}-{number}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut byte = [0];
            for (i, line) in script.iter().enumerate() {
                while i > 0 && stream.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {}
                stream.write_all(line.as_bytes()).unwrap();
            }
        });
        (path, thread)
    }

    const GREETING: &str =
        "{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 22, \"minor\": 2, \"major\": 7}}}}\r\n";

    #[test]
    fn answers_and_events_are_told_apart() {
        let (path, thread) = peer(&[
            GREETING,
            "{\"return\": {}, \"id\": 1}\n",
            "{\"event\": \"STOP\", \"timestamp\": {\"seconds\": 5, \"microseconds\": 7}}\n\
             {\"return\": {\"status\": \"paused\"}, \"id\": 2}\n",
        ]);
        let mut qmp = Qmp::connect(&path).unwrap();
        assert_eq!(qmp.version(), (7, 2, 22));
        assert_eq!(qmp.execute("query-status", Value::Null).unwrap()["status"], "paused");
        let event = qmp.wait_event("STOP", Duration::from_secs(1)).unwrap();
        assert_eq!(event.emitted, Duration::new(5, 7000));
        thread.join().unwrap();
        assert!(matches!(qmp.execute("stop", Value::Null), Err(QmpError::Closed { .. })));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_connection_is_taken_over_within_an_answer() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        // The rest of an answer, an answer, an event, the answer to what was cut off.
        let before = "n\": {}, \"id\": 6}\r\n{\"return\": {}, \"id\": 7}\n{\"event\": \"STOP\"}\n\
            {\"error\": {\"class\": \"GenericError\", \"desc\": \"JSON parse error\"}}\n";
        theirs.write_all(before.as_bytes()).unwrap();
        theirs.write_all(b"{\"return\": 5, \"id\": 4294967297}\n").unwrap();
        let mut qmp = Qmp::take_over(ours).unwrap();
        assert_eq!(qmp.execute("migrate_cancel", Value::Null).unwrap(), 5);
        let mut sent = [0; 256];
        let count = theirs.read(&mut sent).unwrap();
        assert_eq!(sent[..2], *b"\xff\n");
        assert!(sent[2..count].starts_with(b"{") && sent[..count].ends_with(b"\n"));
        // From here on nothing is forgiven.
        theirs.write_all(b"garbage\n").unwrap();
        assert!(matches!(qmp.execute("cont", Value::Null), Err(QmpError::Io { .. })));
    }

    #[test]
    fn a_refusal_carries_qemus_words() {
        let (path, thread) = peer(&[
            GREETING,
            "{\"return\": {}, \"id\": 1}\n",
            "{\"id\": 2, \"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\n",
        ]);
        let mut qmp = Qmp::connect(&path).unwrap();
        let error = qmp.execute("cont", Value::Null).unwrap_err();
        assert_eq!(error.to_string(), "QEMU refused cont: no");
        thread.join().unwrap();
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn what_is_no_monitor_is_told() {
        let (path, thread) = peer(&["SSH-2.0-OpenSSH_9.2\n"]);
        assert!(matches!(Qmp::connect(&path), Err(QmpError::NoGreeting { .. })));
        thread.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Qmp::connect(&path), Err(QmpError::Connect { .. })));
    }

    #[test]
    fn a_greeting_is_waited_for_as_long_as_the_caller_says_or_until_nobody_waits() {
        // Mutation: the limit is one for all. Nobody accepts, as QEMU does while it is starting.
        let path = std::env::temp_dir().join(format!("godwit-qmp-late-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let began = Instant::now();
        let brief = Qmp::connect_until(&path, began + STEP, &Interrupt::default());
        assert!(matches!(brief, Err(QmpError::NoGreeting { .. })), "{brief:?}");
        assert!(began.elapsed() < GREETING_LIMIT);
        let nobody = Cancel::default();
        nobody.cancel();
        let nobody = Interrupt::new(&nobody);
        let late = Instant::now() + Duration::from_secs(3600);
        let given_up = Qmp::connect_until(&path, late, &nobody);
        assert!(matches!(given_up, Err(QmpError::Interrupted { .. })), "{given_up:?}");
        drop(listener);
        std::fs::remove_file(path).unwrap();
    }
}
