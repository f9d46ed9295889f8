//! The state of one connection: what the library makes of records, and records of what is to be
//! sent. It knows no socket.

use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, UnbufferedStatus, WriteTraffic,
};
use rustls::{CommonState, Error};

/// One end of a connection.
pub(crate) enum End {
    Source(UnbufferedClientConnection),
    Destination(UnbufferedServerConnection),
}

/// Room in front of what is read, for what is left of a record.
const FRONT: usize = 17 << 10;
/// Bytes that are asked of the socket at once, which stay in the nearer caches.
const READ: usize = 64 << 10;

/// Bytes of the peer's.
pub(crate) struct Incoming {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Incoming {
    pub(crate) fn new() -> Self {
        Self { bytes: vec![0; FRONT + READ], start: FRONT, end: FRONT }
    }

    /// Where more is to be read, of which [`Self::fill`] is told.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[FRONT..]
    }

    /// `read` bytes are there.
    pub(crate) fn fill(&mut self, read: usize) {
        (self.start, self.end) = (FRONT, FRONT + read);
    }

    /// Puts `front` before what is there.
    fn prepend(&mut self, front: &[u8]) {
        if front.len() > self.start {
            // A message of the handshake that is in many records.
            let bytes = [front, &self.bytes[self.start..self.end]].concat();
            (self.start, self.end) = (0, bytes.len());
            self.bytes = bytes;
            return;
        }
        self.start -= front.len();
        self.bytes[self.start..][..front.len()].copy_from_slice(front);
    }
}

/// Bytes for the peer. What is emptied keeps its length in memory: to clear a vector and to make it
/// longer again would write a zero over each byte first.
#[derive(Default)]
pub(crate) struct Outgoing {
    bytes: Vec<u8>,
    end: usize,
}

impl Outgoing {
    /// What is to be sent.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.end]
    }

    pub(crate) fn clear(&mut self) {
        self.end = 0;
    }

    /// Moves what is in `other` behind what is here.
    pub(crate) fn take(&mut self, other: &mut Self) {
        let needed = self.end + other.end;
        if self.bytes.len() < needed {
            self.bytes.resize(needed, 0);
        }
        self.bytes[self.end..needed].copy_from_slice(other.bytes());
        self.end = needed;
        other.clear();
    }

    /// Has `put` write behind what is here: how much it was, or how much room it needs.
    fn append(
        &mut self,
        mut put: impl FnMut(&mut [u8]) -> Result<usize, Option<usize>>,
    ) -> Result<(), Error> {
        loop {
            match put(&mut self.bytes[self.end..]) {
                Ok(written) => {
                    self.end += written;
                    return Ok(());
                }
                Err(Some(required)) if required > self.bytes.len() - self.end => {
                    self.bytes.resize(self.end + required, 0);
                }
                Err(_) => return Err(Error::EncryptError),
            }
        }
    }
}

/// A connection, with what was decrypted and not fetched yet, and what it has to send by itself.
pub(crate) struct Connection {
    end: End,
    /// What the library has not done with; it holds places in it, so it is always given this.
    incoming: Incoming,
    rest: Vec<u8>,
    /// How much of that was fetched.
    fetched: usize,
    pub(crate) owed: Outgoing,
    /// The peer has said that it will say no more.
    pub(crate) ended: bool,
    /// What went wrong; the library is asked no more then.
    failed: Option<Error>,
}

/// What is to be sent.
enum Wish<'a> {
    Nothing,
    Payload(&'a [u8]),
    End,
}

/// How a step has ended.
enum Step {
    /// There may be more to do with what is there.
    Again,
    /// It waits for the peer.
    Idle,
    /// What was wished is done.
    Done,
    Ended,
}

/// Where payload goes.
struct Payload<'a> {
    buffer: &'a mut [u8],
    filled: usize,
    /// What does not fit.
    rest: &'a mut Vec<u8>,
}

impl Payload<'_> {
    fn take(&mut self, bytes: &[u8]) {
        let part = bytes.len().min(self.buffer.len() - self.filled);
        self.buffer[self.filled..][..part].copy_from_slice(&bytes[..part]);
        self.filled += part;
        self.rest.extend_from_slice(&bytes[part..]);
    }
}

impl Connection {
    pub(crate) fn new(end: End) -> Self {
        Self {
            end,
            incoming: Incoming::new(),
            rest: Vec::new(),
            fetched: 0,
            owed: Outgoing::default(),
            ended: false,
            failed: None,
        }
    }

    /// Takes over what was read into `more`, behind what is here; gives a buffer back for the next
    /// read.
    pub(crate) fn fill(&mut self, more: &mut Incoming) {
        let Incoming { bytes, start, end } = &self.incoming;
        more.prepend(&bytes[*start..*end]);
        std::mem::swap(&mut self.incoming, more);
        more.bytes.resize(FRONT + READ, 0);
    }

    pub(crate) fn state(&self) -> &CommonState {
        match &self.end {
            End::Source(connection) => connection,
            End::Destination(connection) => connection,
        }
    }

    /// Takes in records, until `buffer` is full or all whole ones are in; how much of it was
    /// filled.
    pub(crate) fn take_in(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let ready = &self.rest[self.fetched..];
        if !ready.is_empty() {
            let part = ready.len().min(buffer.len());
            buffer[..part].copy_from_slice(&ready[..part]);
            self.fetched += part;
            if self.fetched == self.rest.len() {
                (self.rest, self.fetched) = (std::mem::take(&mut self.rest), 0);
                self.rest.clear();
            }
            return Ok(part);
        }
        let Self { end, incoming, rest, owed, .. } = self;
        let mut payload = Payload { buffer, filled: 0, rest };
        while !self.ended && (payload.filled < payload.buffer.len() || payload.buffer.is_empty()) {
            match step(end, incoming, &Wish::Nothing, &mut payload, owed) {
                Ok(Step::Again) => {}
                Ok(Step::Idle | Step::Done) => break,
                Ok(Step::Ended) => self.ended = true,
                Err(error) => {
                    // The alert for the peer, if it has one.
                    let _ = step(end, incoming, &Wish::Nothing, &mut payload, owed);
                    self.failed = Some(error.clone());
                    return Err(error);
                }
            }
        }
        Ok(payload.filled)
    }

    /// Encrypts `bytes` behind what is in `outgoing`.
    pub(crate) fn encrypt(&mut self, bytes: &[u8], outgoing: &mut Outgoing) -> Result<(), Error> {
        if bytes.is_empty() { Ok(()) } else { self.send(&Wish::Payload(bytes), outgoing) }
    }

    /// Puts the word that nothing more will come behind what is in `outgoing`.
    pub(crate) fn end(&mut self, outgoing: &mut Outgoing) -> Result<(), Error> {
        self.send(&Wish::End, outgoing)
    }

    fn send(&mut self, wish: &Wish<'_>, outgoing: &mut Outgoing) -> Result<(), Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        outgoing.take(&mut self.owed);
        let mut payload = Payload { buffer: &mut [], filled: 0, rest: &mut self.rest };
        loop {
            match step(&mut self.end, &mut self.incoming, wish, &mut payload, outgoing)? {
                Step::Again => {}
                Step::Done => return Ok(()),
                Step::Ended => self.ended = true,
                Step::Idle => return Err(Error::HandshakeNotComplete),
            }
        }
    }
}

/// One step of `end`.
fn step(
    end: &mut End,
    incoming: &mut Incoming,
    wish: &Wish<'_>,
    payload: &mut Payload<'_>,
    outgoing: &mut Outgoing,
) -> Result<Step, Error> {
    let unread = &mut incoming.bytes[incoming.start..incoming.end];
    let (done, step) = match end {
        End::Source(connection) => {
            handle(connection.process_tls_records(unread), wish, payload, outgoing)
        }
        End::Destination(connection) => {
            handle(connection.process_tls_records(unread), wish, payload, outgoing)
        }
    };
    incoming.start += done;
    step
}

/// What a state asks for; how many bytes of the peer's are done with, too.
fn handle<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    wish: &Wish<'_>,
    payload: &mut Payload<'_>,
    outgoing: &mut Outgoing,
) -> (usize, Result<Step, Error>) {
    let mut done = status.discard;
    let state = match status.state {
        Ok(state) => state,
        Err(error) => return (done, Err(error)),
    };
    let step = match state {
        ConnectionState::ReadTraffic(mut traffic) => loop {
            match traffic.next_record() {
                Some(Ok(record)) => {
                    done += record.discard;
                    payload.take(record.payload);
                }
                Some(Err(error)) => break Err(error),
                None => break Ok(Step::Again),
            }
        },
        ConnectionState::EncodeTlsData(mut data) => {
            let encoded = outgoing.append(|room| match data.encode(room) {
                Err(EncodeError::InsufficientSize(error)) => Err(Some(error.required_size)),
                encoded => encoded.map_err(|_| None),
            });
            encoded.map(|()| Step::Again)
        }
        ConnectionState::TransmitTlsData(sent) => {
            // It goes out before anything else that is encrypted.
            sent.done();
            Ok(Step::Again)
        }
        ConnectionState::WriteTraffic(traffic) => write(traffic, wish, outgoing),
        ConnectionState::PeerClosed | ConnectionState::Closed => Ok(Step::Ended),
        ConnectionState::BlockedHandshake => Ok(Step::Idle),
        _ => Err(Error::General("a state that is not known".to_owned())),
    };
    (done, step)
}

fn write<Data>(
    mut traffic: WriteTraffic<'_, Data>,
    wish: &Wish<'_>,
    outgoing: &mut Outgoing,
) -> Result<Step, Error> {
    let room_for = |result| match result {
        Err(EncryptError::InsufficientSize(error)) => Err(Some(error.required_size)),
        encrypted => encrypted.map_err(|_| None),
    };
    match wish {
        Wish::Nothing => return Ok(Step::Idle),
        Wish::Payload(bytes) => outgoing.append(|room| room_for(traffic.encrypt(bytes, room)))?,
        Wish::End => outgoing.append(|room| room_for(traffic.queue_close_notify(room)))?,
    }
    Ok(Step::Done)
}
