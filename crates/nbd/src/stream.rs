//! The connection itself: a unix socket or TCP, with a limit to every wait.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

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
                stream.set_write_timeout(Some(LIMIT))?;
                Ok(Self::Tcp(stream))
            }
        }
    }

    pub(crate) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
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

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) | Self::Ahead(stream, _) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
        .map_err(in_words)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
