//! Replies of the transmission phase, simple and structured, sorted to the requests that they
//! answer.
//!
//! Nothing is allocated by a length that a server names: data goes into the buffer of its request,
//! and everything else has a limit.

use std::collections::VecDeque;
use std::io::{self, BufReader, Read};

use crate::error::Errno;
use crate::pending::{Complaint, Pending, Stretch};
use crate::protocol::{
    CHUNK_DATA, CHUNK_ERROR, CHUNK_ERROR_AT, CHUNK_HOLE, CHUNK_NONE, CHUNK_STATUS, Command, DONE,
    SIMPLE_REPLY, STRING_MAX, STRUCTURED_REPLY,
};
use crate::stream::Stream;

/// Stretches taken of one answer; QEMU sends at most 1 MiB of them
/// (`NBD_MAX_BLOCK_STATUS_EXTENTS`).
const STRETCHES_MAX: u32 = 1 << 18;

/// Why a reply could not be taken.
#[derive(Debug)]
pub(crate) enum Bad {
    Io(io::Error),
    Protocol(String),
}

impl From<io::Error> for Bad {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn wrong<T>(what: impl Into<String>) -> Result<T, Bad> {
    Err(Bad::Protocol(what.into()))
}

/// Reads one reply, or one chunk of one, and adds it to the request it belongs to.
pub(crate) fn take_one(
    stream: &mut BufReader<Stream>,
    pending: &mut VecDeque<Pending>,
    contexts: &[u32],
) -> Result<(), Bad> {
    match u32::from_be_bytes(array(stream)?) {
        SIMPLE_REPLY => simple(stream, pending),
        STRUCTURED_REPLY => Chunk::read(stream)?.apply(stream, pending, contexts),
        magic => wrong(format!("a reply begins with {magic:#x}")),
    }
}

fn array<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn find(pending: &mut VecDeque<Pending>, cookie: u64) -> Result<&mut Pending, Bad> {
    let found = pending.iter_mut().find(|pending| pending.cookie == cookie && !pending.done);
    found.ok_or_else(|| Bad::Protocol("it answers a request that was not made".to_owned()))
}

fn simple(stream: &mut BufReader<Stream>, pending: &mut VecDeque<Pending>) -> Result<(), Bad> {
    let errno = Errno(u32::from_be_bytes(array(stream)?));
    let request = find(pending, u64::from_be_bytes(array(stream)?))?;
    if errno.0 != 0 {
        request.complaint = Some(Complaint { errno, at: None, words: String::new() });
    } else if matches!(request.command, Command::Read | Command::BlockStatus) {
        // With structured replies agreed on, there is no other answer to these (proto, "Simple
        // reply message").
        return wrong(format!("a simple reply to a request to {}", request.command.name()));
    }
    request.done = true;
    Ok(())
}

/// The head of a structured reply's chunk.
struct Chunk {
    flags: u16,
    kind: u16,
    cookie: u64,
    length: u32,
}

impl Chunk {
    fn read(stream: &mut BufReader<Stream>) -> Result<Self, Bad> {
        let flags = u16::from_be_bytes(array(stream)?);
        let kind = u16::from_be_bytes(array(stream)?);
        let cookie = u64::from_be_bytes(array(stream)?);
        let length = u32::from_be_bytes(array(stream)?);
        Ok(Self { flags, kind, cookie, length })
    }

    fn apply(
        &self,
        stream: &mut BufReader<Stream>,
        pending: &mut VecDeque<Pending>,
        contexts: &[u32],
    ) -> Result<(), Bad> {
        let request = find(pending, self.cookie)?;
        match (self.kind, request.command) {
            (CHUNK_NONE, _) if self.length == 0 && self.flags & DONE != 0 => {}
            (CHUNK_DATA, Command::Read) if self.length > 8 => self.data(stream, request)?,
            (CHUNK_HOLE, Command::Read) if self.length == 12 => hole(stream, request)?,
            (CHUNK_STATUS, Command::BlockStatus) => self.status(stream, request, contexts)?,
            (kind, _) if kind & CHUNK_ERROR != 0 => self.complaint(stream, request)?,
            (kind, command) => {
                return wrong(format!(
                    "a chunk of kind {kind} and {} bytes for a request to {}",
                    self.length,
                    command.name()
                ));
            }
        }
        request.done = self.flags & DONE != 0;
        Ok(())
    }

    fn data(&self, stream: &mut BufReader<Stream>, request: &mut Pending) -> Result<(), Bad> {
        let offset = u64::from_be_bytes(array(stream)?);
        let part = part(request, offset, self.length - 8)?;
        stream.read_exact(part)?;
        Ok(())
    }

    fn status(
        &self,
        stream: &mut BufReader<Stream>,
        request: &mut Pending,
        contexts: &[u32],
    ) -> Result<(), Bad> {
        let count = self.length.saturating_sub(4) / 8;
        if count == 0 || count > STRETCHES_MAX || self.length % 8 != 4 {
            return wrong(format!("a status of {} bytes", self.length));
        }
        let number = u32::from_be_bytes(array(stream)?);
        let place = contexts.iter().position(|context| *context == number);
        let place = place.filter(|place| request.status[*place].is_none());
        let Some(place) = place else { return wrong("a status of a context that is not expected") };
        let end = request.offset + u64::from(request.length);
        let (mut at, mut stretches) = (request.offset, Vec::new());
        for _ in 0..count {
            let length = u64::from(u32::from_be_bytes(array(stream)?));
            let flags = u32::from_be_bytes(array(stream)?);
            // The last one may go beyond what was asked for (proto, "NBD_REPLY_TYPE_BLOCK_STATUS");
            // none may come after it.
            if length == 0 || at >= end {
                return wrong("a status with a stretch of no length or beyond its request");
            }
            let length = length.min(end - at);
            stretches.push(Stretch { offset: at, length, flags });
            at += length;
        }
        request.status[place] = Some(stretches);
        Ok(())
    }

    fn complaint(&self, stream: &mut BufReader<Stream>, request: &mut Pending) -> Result<(), Bad> {
        if self.length < 6 || self.length > STRING_MAX + 14 {
            return wrong(format!("an error of {} bytes", self.length));
        }
        let mut payload = vec![0; self.length as usize];
        stream.read_exact(&mut payload)?;
        let (errno, rest) = payload.split_at(4);
        let (length, rest) = rest.split_at(2);
        let number =
            |bytes: &[u8]| bytes.iter().fold(0, |all: u64, byte| all << 8 | u64::from(*byte));
        let errno = Errno(number(errno) as u32);
        let length = number(length) as usize;
        if length > rest.len() || errno.0 == 0 {
            return wrong("an error whose message is longer than itself, or without a number");
        }
        let (words, rest) = rest.split_at(length);
        let at = (self.kind == CHUNK_ERROR_AT && rest.len() == 8).then(|| number(rest));
        // The first complaint is the cause of those that follow.
        request.complaint.get_or_insert(Complaint {
            errno,
            at,
            words: String::from_utf8_lossy(words).into_owned(),
        });
        Ok(())
    }
}

fn hole(stream: &mut BufReader<Stream>, request: &mut Pending) -> Result<(), Bad> {
    let offset = u64::from_be_bytes(array(stream)?);
    let length = u32::from_be_bytes(array(stream)?);
    part(request, offset, length)?.fill(0);
    Ok(())
}

/// The part of a read's buffer that a chunk fills.
fn part(request: &mut Pending, offset: u64, length: u32) -> Result<&mut [u8], Bad> {
    let length = length as usize;
    let start = offset.checked_sub(request.offset).and_then(|start| usize::try_from(start).ok());
    let room = request.data.len() - request.filled;
    let part = start.filter(|_| length > 0 && length <= room).and_then(|start| {
        let end = start.checked_add(length)?;
        request.data.get_mut(start..end)
    });
    match part {
        Some(part) => {
            request.filled += length;
            Ok(part)
        }
        None => wrong(format!("a read is answered with {length} bytes at offset {offset:#x}")),
    }
}
