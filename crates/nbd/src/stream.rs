//! The connection itself: a unix socket or TCP, with a limit to every wait.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::ahead::Ahead;

/// Without a byte for that long the server counts as dead. A request may wait for a slow disk.
const LIMIT: Duration = Duration::from_secs(60);

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// TCP: `HOST:PORT`.
    Tcp(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    /// The same, read ahead.
    Ahead(UnixStream, Ahead),
    Tcp(TcpStream),
}

impl Stream {
    pub(crate) fn connect(address: &Address) -> io::Result<Self> {
        match address {
            Address::Unix(path) => Self::unix(UnixStream::connect(path)?),
            Address::Tcp(address) => {
                let stream = TcpStream::connect(address)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(LIMIT))?;
                Ok(Self::Tcp(stream))
            }
        }
    }

    pub(crate) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(Self::Unix(stream))
    }
}

impl Stream {
    /// Reads ahead from now on what comes over a unix socket; TCP has buffers of its own.
    pub(crate) fn read_ahead(&mut self) -> io::Result<()> {
        if let Self::Unix(stream) = self {
            let (ahead, writer) = (Ahead::start(stream)?, stream.try_clone()?);
            *self = Self::Ahead(writer, ahead);
        }
        Ok(())
    }
}

/// A read that ran into the limit says so; "temporarily unavailable" would tell nobody anything.
fn in_words(error: io::Error) -> io::Error {
    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
        return io::Error::new(io::ErrorKind::TimedOut, format!("silence for {LIMIT:?}"));
    }
    error
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(bytes),
            Self::Ahead(_, ahead) => ahead.read(bytes, LIMIT),
            Self::Tcp(stream) => stream.read(bytes),
        }
        .map_err(in_words)
    }
}

/// Writes what the peer has room for, and waits for room no longer than `limit`.
///
/// A send timeout of the socket would not do: a write that has room for some of its bytes then
/// waits the whole limit for the others and returns a count, so that a silence is noticed after
/// twice as long (unix(7), tcp(7); `sock_alloc_send_pskb` and `sk_stream_wait_memory` of the
/// kernel).
fn write_within(stream: impl AsFd, bytes: &[u8], limit: Duration) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let until = Instant::now() + limit;
    loop {
        match send(&stream, bytes, flags) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            sent => return sent.map_err(io::Error::from),
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&stream, PollFlags::OUT)], Some(&left)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) | Self::Ahead(stream, _) => write_within(stream, bytes, LIMIT),
            Self::Tcp(stream) => write_within(stream, bytes, LIMIT),
        }
        .map_err(in_words)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_write_waits_for_no_more_than_the_peer_has_room_for() {
        let (client, server) = UnixStream::pair().unwrap();
        let bytes = vec![1; 4 << 20];

        // More than there is room for: with a limit of an hour it must not wait for the rest.
        let sent = write_within(&client, &bytes, Duration::from_secs(3600)).unwrap();

        assert!(0 < sent && sent < bytes.len(), "{sent} bytes");
        let mut rest = &bytes[sent..];
        let error = loop {
            match write_within(&client, rest, Duration::from_millis(50)) {
                Ok(sent) => rest = &rest[sent..],
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(!rest.is_empty());
        drop(server);
        let error = write_within(&client, rest, Duration::from_secs(3600)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
