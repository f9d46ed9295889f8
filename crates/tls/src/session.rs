//! One connection.
//!
//! A reader and a writer share it: each holds the state of the connection only while it works on
//! bytes, never while it waits for the socket, so neither keeps the other from going on.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::connection::{Connection, Incoming, Outgoing};
use crate::error::{explain, unwilling};

/// Bytes that are encrypted at once: these and what they become stay in the nearer caches.
const WRITE: usize = 64 << 10;

/// One connection, without its socket.
pub struct Session {
    connection: Mutex<Connection>,
    /// Where the next bytes of the socket come.
    reading: Mutex<Incoming>,
    /// What is on its way to the socket; its order is that of the records.
    sending: Mutex<Outgoing>,
    peer: String,
    own: Arc<str>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("peer", &self.peer).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    pub(crate) fn new(connection: Connection, peer: &str, own: &Arc<str>) -> Self {
        Self {
            connection: Mutex::new(connection),
            reading: Mutex::new(Incoming::new()),
            sending: Mutex::default(),
            peer: peer.to_owned(),
            own: Arc::clone(own),
        }
    }

    /// Agrees with the peer at the other end of `socket` on keys, and finds out who it is. At the
    /// source, what the destination thinks of our certificate shows with the first read.
    ///
    /// # Errors
    /// What is wrong, in words; an [`io::Error`] of the socket is one of these inside.
    pub fn begin(&self, mut socket: impl Read + Write) -> io::Result<()> {
        let mut reading = lock(&self.reading);
        loop {
            let taken = self.take_in(&mut []);
            // An alert for the peer among it, which would learn nothing else.
            let flushed = self.flush(&mut socket);
            taken?;
            flushed?;
            if !lock(&self.connection).state().is_handshaking() {
                return Ok(());
            }
            match self.fill(&mut reading, &mut socket) {
                Ok(1..) => {}
                // Who did not read all of what it does not understand resets.
                Err(error) if error.kind() != io::ErrorKind::ConnectionReset => return Err(error),
                Ok(0) | Err(_) => return Err(io::Error::other(unwilling(&self.peer))),
            }
        }
    }

    /// The peer's certificate, in DER: connections of one peer show the same.
    #[must_use]
    pub fn shown(&self) -> Option<Vec<u8>> {
        let connection = lock(&self.connection);
        connection.state().peer_certificates()?.first().map(|certificate| certificate.to_vec())
    }

    /// Reads what the peer has written, as `read` does of a socket.
    ///
    /// # Errors
    /// Those of the socket, a wait that is over among them; what is not the peer's; and an end that
    /// it has not announced.
    pub fn read(&self, mut socket: impl Read, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let mut reading = lock(&self.reading);
        loop {
            let read = self.take_in(buffer)?;
            if read > 0 || lock(&self.connection).ended {
                return Ok(read);
            }
            if self.fill(&mut reading, &mut socket)? == 0 {
                return Err(self.ended());
            }
        }
    }

    /// Reads more of the socket; nothing else waits for it meanwhile.
    fn fill(&self, reading: &mut Incoming, socket: &mut impl Read) -> io::Result<usize> {
        let read = socket.read(reading.room())?;
        reading.fill(read);
        lock(&self.connection).fill(reading);
        Ok(read)
    }

    /// Decrypts what is there into `buffer`, as far as it goes.
    fn take_in(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let filled = lock(&self.connection).take_in(buffer);
        filled.map_err(|error| self.wrong(error))
    }

    fn wrong(&self, error: rustls::Error) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, explain(error, &self.peer, &self.own))
    }

    fn ended(&self) -> io::Error {
        let words =
            format!("{} ended the connection without a word, or somebody else did", self.peer);
        io::Error::new(io::ErrorKind::UnexpectedEof, words)
    }

    /// Writes a part of `bytes`, as `write` does of a socket.
    ///
    /// # Errors
    /// Those of the socket; nothing can be written after one.
    pub fn write(&self, mut socket: impl Write, bytes: &[u8]) -> io::Result<usize> {
        let part = &bytes[..bytes.len().min(WRITE)];
        let mut sending = lock(&self.sending);
        let encrypted = lock(&self.connection).encrypt(part, &mut sending);
        encrypted.map_err(|error| self.wrong(error))?;
        put(&mut sending, &mut socket)?;
        Ok(part.len())
    }

    /// Says that nothing more will come; not where a write of another thread is under way, behind
    /// which it would wait.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn finish(&self, mut socket: impl Write) -> io::Result<()> {
        let mut sending = match self.sending.try_lock() {
            Ok(sending) => sending,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let ended = lock(&self.connection).end(&mut sending);
        ended.map_err(|error| self.wrong(error))?;
        put(&mut sending, &mut socket)
    }

    /// Writes what the connection itself has to say.
    fn flush(&self, socket: &mut impl Write) -> io::Result<()> {
        let mut sending = lock(&self.sending);
        let mut connection = lock(&self.connection);
        sending.take(&mut connection.owed);
        drop(connection);
        put(&mut sending, socket)
    }
}

fn put(sending: &mut Outgoing, socket: &mut impl Write) -> io::Result<()> {
    let written = socket.write_all(sending.bytes());
    sending.clear();
    written
}
