//! Frames over a connection: read, checked, and handed on as messages.
//!
//! Both ends of a control connection say every second that they are there, from a thread that does
//! nothing else. So silence means that the peer, its host or the link has stopped, whatever the
//! transport: a tunnel may stand for ever when the host behind it is gone. A side that is busy
//! (with a monitor that does not answer, or with digests of all memory) is not silent.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_tls::looks_encrypted;
use godwit_units::{ByteCount, PageBuffer};
use godwit_wire::{
    FrameHeader, FrameKind, GREETING_LEN, Greeting, HEADER_LEN, Message, WireError, barrier_aux,
};

use crate::address::Stream;
use crate::security::distrust;
use crate::{EngineError, limits, threads};

/// Who is at the other end, for error texts.
pub(crate) type Peer = &'static str;

pub(crate) fn link_error(peer: Peer) -> impl Fn(io::Error) -> EngineError {
    move |source| match source.kind() {
        // A blocking socket with a time limit reports it this way (socket(7), SO_RCVTIMEO).
        io::ErrorKind::WouldBlock => EngineError::Link {
            peer,
            source: io::Error::new(
                io::ErrorKind::TimedOut,
                "no data has passed for longer than the limit; the peer, its host or the link is \
                 stuck",
            ),
        },
        io::ErrorKind::UnexpectedEof => {
            EngineError::Link { peer, source: io::Error::new(source.kind(), "it was closed") }
        }
        _ => EngineError::Link { peer, source },
    }
}

pub(crate) fn wire_error(peer: Peer) -> impl Fn(WireError) -> EngineError {
    move |source| EngineError::Wire { peer, source }
}

/// Sends a greeting.
pub(crate) fn send_greeting(
    stream: &mut Stream,
    greeting: Greeting,
    peer: Peer,
) -> Result<(), EngineError> {
    stream.write_all(&greeting.encode()).map_err(link_error(peer))
}

/// Receives a greeting within `limit`, unless it is to `stop` meanwhile, which counts as a
/// cancellation; afterwards reads have no limit.
pub(crate) fn receive_greeting(
    stream: &mut Stream,
    peer: Peer,
    limit: Duration,
    stop: impl Fn() -> bool,
) -> Result<Greeting, EngineError> {
    let io = link_error(peer);
    let until = Instant::now() + limit;
    let mut bytes = [0; GREETING_LEN];
    let mut filled = 0;
    while filled < GREETING_LEN {
        let read = stream.read_until(&mut bytes[filled..], until, &stop);
        match read.map_err(distrust) {
            // A stranger that says little is told by what it said.
            Ok(0) if filled >= 8 => break,
            Ok(0) => return Err(io(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => filled += n,
            Err(_) if stop() => return Err(EngineError::Cancelled),
            // At a source the first read says what the destination makes of its certificate.
            Err(Ok(words)) => return Err(EngineError::Distrust(words)),
            Err(Err(error)) => return Err(io(error)),
        }
        if looks_encrypted(&bytes[..filled]) {
            return Err(EngineError::Distrust(format!(
                "the {peer} encrypts, and there are no keys here: name their directory (--keys \
                 DIR), or let both sides go without (--insecure)"
            )));
        }
        // Text protocols talk first and then wait: do not wait for 40 bytes of them.
        if filled >= 8
            && let Err(error @ WireError::NotGodwit { .. }) = Greeting::decode(&bytes)
        {
            return Err(wire_error(peer)(error));
        }
    }
    stream.set_read_limit(None).map_err(&io)?;
    Greeting::decode(&bytes).map_err(wire_error(peer))
}

/// What others see of a reader: it counts each read when it begins and when it ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pulse(Arc<AtomicU64>);

impl Pulse {
    pub(crate) fn beat(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// The read that waits for bytes, by a number that none has again; `None` while it does
    /// something else.
    pub(crate) fn waits(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|count| count % 2 == 1)
    }
}

#[derive(Debug)]
struct Watched {
    stream: Stream,
    pulse: Pulse,
}

impl Read for Watched {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.pulse.beat();
        let read = self.stream.read(buffer);
        self.pulse.beat();
        read
    }
}

/// Reads frames, checking each; one payload buffer is used for all.
#[derive(Debug)]
pub(crate) struct FrameReader {
    stream: Watched,
    peer: Peer,
    payload: PageBuffer,
}

impl FrameReader {
    pub(crate) fn new(stream: Stream, peer: Peer) -> Self {
        Self::watched(stream, peer, Pulse::default())
    }

    /// One whose `pulse` others look at.
    pub(crate) fn watched(stream: Stream, peer: Peer, pulse: Pulse) -> Self {
        Self { stream: Watched { stream, pulse }, peer, payload: PageBuffer::default() }
    }

    /// The next frame. The buffer grows to the largest frame seen, which the format limits.
    pub(crate) fn frame(&mut self) -> Result<(FrameHeader, &[u8]), EngineError> {
        let io = link_error(self.peer);
        let mut bytes = [0; HEADER_LEN];
        self.stream.read_exact(&mut bytes).map_err(&io)?;
        let header = FrameHeader::decode(&bytes).map_err(wire_error(self.peer))?;
        self.payload.fit(ByteCount(header.length as u64));
        let payload = &mut self.payload[..header.length];
        self.stream.read_exact(payload).map_err(&io)?;
        header.verify(payload).map_err(wire_error(self.peer))?;
        Ok((header, payload))
    }

    /// The next message of a control connection.
    pub(crate) fn message(&mut self) -> Result<Message, EngineError> {
        let peer = self.peer;
        let (header, payload) = self.frame()?;
        Message::decode(&header, payload).map_err(wire_error(peer))
    }
}

/// Reads the messages of a control connection in a thread of its own and hands each to `deliver`,
/// up to the error that ends the connection, or until `deliver` answers no. A peer that says
/// nothing for [`limits::LINK`] is such an error; that it is there is not handed on. While
/// `deliver` waits nothing is read, and no time counts. What the thread does to `begin` with lasts
/// as long as it does.
///
/// # Errors
/// When the kernel does not take the limit.
pub(crate) fn read_messages<B>(
    stream: Stream,
    peer: Peer,
    begin: impl FnOnce() -> Result<B, EngineError> + Send + 'static,
    mut deliver: impl FnMut(Result<Message, EngineError>) -> bool + Send + 'static,
) -> Result<(), EngineError> {
    stream.set_read_limit(Some(limits::LINK)).map_err(link_error(peer))?;
    let mut reader = FrameReader::new(stream, peer);
    let read = move || {
        let _begun = match begin() {
            Ok(begun) => begun,
            Err(error) => {
                deliver(Err(error));
                return;
            }
        };
        loop {
            let message = match reader.message() {
                Ok(Message::Alive) => continue,
                Err(EngineError::Link { source, .. })
                    if source.kind() == io::ErrorKind::TimedOut =>
                {
                    Err(EngineError::Silent { peer, limit: limits::LINK })
                }
                message => message,
            };
            let over = message.is_err();
            if !deliver(message) || over {
                return;
            }
        }
    };
    threads::start("control", read).map(drop)
}

/// Says over `control` every [`limits::ALIVE`] that this side is there, until the connection that
/// it has now is replaced or ends, or nobody else has `control` any more.
pub(crate) fn say_alive(control: &Arc<ControlWriter>) -> Result<(), EngineError> {
    let (number, control) = (control.number(), Arc::downgrade(control));
    let say = move || {
        loop {
            std::thread::sleep(limits::ALIVE);
            let Some(control) = control.upgrade() else { return };
            if !control.send_over(number, &Message::Alive) {
                return;
            }
        }
    };
    threads::start("alive", say).map(drop)
}

/// The writing end of the control connection, shared between threads.
#[derive(Debug)]
pub(crate) struct ControlWriter {
    /// The connection, and the how manyth it is.
    stream: Mutex<(u32, Stream)>,
    /// Another handle, to shut the connection down while a write holds the first.
    handle: Mutex<Stream>,
    peer: Peer,
}

impl ControlWriter {
    pub(crate) fn new(stream: Stream, peer: Peer) -> Result<Self, EngineError> {
        let handle = stream.try_clone().map_err(link_error(peer))?;
        Ok(Self { stream: Mutex::new((0, stream)), handle: Mutex::new(handle), peer })
    }

    pub(crate) fn send(&self, message: &Message) -> Result<(), EngineError> {
        let frame = message.encode();
        let (_, stream) = &mut *self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(&frame).map_err(link_error(self.peer))
    }

    /// Sends `message` if connection `number` is still the one in use, and says whether it could.
    fn send_over(&self, number: u32, message: &Message) -> bool {
        let frame = message.encode();
        let (current, stream) = &mut *self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        if *current != number {
            return false;
        }
        let sent = stream.write_all(&frame).is_ok();
        if !sent {
            // Part of it may be on its way, and nothing could follow that.
            stream.shut_down();
        }
        sent
    }

    /// The how manyth connection it has.
    fn number(&self) -> u32 {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    /// Takes another connection from now on.
    pub(crate) fn replace(&self, stream: Stream) -> Result<(), EngineError> {
        self.shut_down();
        let handle = stream.try_clone().map_err(link_error(self.peer))?;
        let (number, current) = &mut *self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        (*number, *current) = (*number + 1, stream);
        *self.handle.lock().unwrap_or_else(PoisonError::into_inner) = handle;
        Ok(())
    }

    /// Says that nothing more will come, and leaves what was said on its way.
    pub(crate) fn finish(&self) {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).shut_down_write();
    }

    /// Ends the connection, also under a write that is stuck.
    pub(crate) fn shut_down(&self) {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).shut_down();
    }
}

/// The header bytes of a barrier: the end of `round` on this channel, and of all rounds if it is
/// the `last` one.
pub(crate) fn barrier(round: u32, last: bool) -> [u8; HEADER_LEN] {
    let mut frame = [0; HEADER_LEN];
    godwit_wire::seal(&mut frame, FrameKind::Barrier, 0, barrier_aux(round, last));
    frame
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use godwit_units::PageRun;
    use godwit_wire::{Content, PageFrameBuilder};

    use super::*;

    /// What a reader makes of `frame` with one bit of byte `at` flipped.
    fn read_damaged(mut frame: Vec<u8>, at: usize) -> Result<(), EngineError> {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        frame[at] ^= 1;
        ours.write_all(&frame).unwrap();
        FrameReader::new(Stream::from(theirs), "source").frame().map(drop)
    }

    #[test]
    fn no_frame_is_handed_on_that_was_damaged_on_the_way() {
        // Mutation: `header.verify` is left out.
        let mut builder = PageFrameBuilder::new();
        let fill = |bytes: &mut [u8]| {
            bytes.fill(7);
            Ok::<(), ()>(())
        };
        builder.add(PageRun::new(1, 1), fill, |_, _| Some(Content::Data)).unwrap();
        let pages = builder.finish(0).to_vec();
        let state = Message::DeviceState(vec![7; 100]).encode();
        // A byte of a page, of device state, and of the number of a round.
        for (frame, at) in
            [(pages, HEADER_LEN + 9), (state, HEADER_LEN + 9), (barrier(3, true).to_vec(), 8)]
        {
            let error = read_damaged(frame, at).unwrap_err();
            assert!(
                matches!(error, EngineError::Wire { source: WireError::Checksum { .. }, .. }),
                "{error}"
            );
        }
    }
}
