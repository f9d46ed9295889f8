//! What goes wrong between client and server.

use std::fmt;
use std::io;

/// An error number as the protocol carries it (proto, "Error values"): those of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub u32);

impl Errno {
    /// The server is about to go away.
    pub const SHUTDOWN: Self = Self(108);
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            1 => "EPERM",
            5 => "EIO, an input/output error",
            12 => "ENOMEM",
            22 => "EINVAL",
            28 => "ENOSPC, no space left",
            75 => "EOVERFLOW",
            95 => "ENOTSUP",
            108 => "ESHUTDOWN, the server is ending",
            number => return write!(f, "error {number}"),
        };
        f.write_str(name)
    }
}

/// Why an export cannot be used, or a request failed. Each names the export.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdError {
    /// Nobody listens there.
    #[error("cannot connect to the NBD server at {address} for export '{export}': {source}")]
    Connect {
        /// Which export was wanted.
        export: String,
        /// Where.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The server refused something that is needed.
    #[error("the NBD server refuses {what} for export '{export}': {words}")]
    Refused {
        /// Which export was wanted.
        export: String,
        /// What was asked for.
        what: &'static str,
        /// The server's words, or the number of its answer.
        words: String,
    },
    /// The server cannot do something that is needed.
    #[error("export '{export}': {what}")]
    Unfit {
        /// The export.
        export: String,
        /// What it lacks.
        what: String,
    },
    /// What came is not the protocol.
    #[error("the NBD server of export '{export}' breaks the protocol: {what}")]
    Protocol {
        /// The export.
        export: String,
        /// What it did.
        what: String,
    },
    /// The connection failed.
    #[error(
        "the connection to the NBD server of export '{export}' failed during {during}: {source}"
    )]
    Io {
        /// The export.
        export: String,
        /// What was being done.
        during: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The server could not do what was asked.
    #[error(
        "export '{export}': cannot {command} {length} bytes at offset {offset:#x}: {errno}{}",
        Words(.words)
    )]
    Failed {
        /// The export.
        export: String,
        /// What was asked.
        command: &'static str,
        /// From which byte on; the exact one where the server tells.
        offset: u64,
        /// How many bytes were asked for.
        length: u64,
        /// Why.
        errno: Errno,
        /// The server's words, if it has any.
        words: String,
    },
}

impl NbdError {
    /// Whether the connection is at fault, so that another one may do better. A server that is
    /// there and says nothing would be as silent on the next one.
    #[must_use]
    pub fn is_of_connection(&self) -> bool {
        match self {
            Self::Io { source, .. } if source.kind() == io::ErrorKind::TimedOut => false,
            Self::Connect { .. } | Self::Io { .. } | Self::Protocol { .. } => true,
            Self::Failed { errno, .. } => *errno == Errno::SHUTDOWN,
            Self::Refused { .. } | Self::Unfit { .. } => false,
        }
    }
}

struct Words<'a>(&'a str);

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " ({})", self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_server_is_not_asked_again_over_another_connection() {
        // A destination would wait twice for storage that hangs, and its source gives up before.
        let broken = |kind: io::ErrorKind| NbdError::Io {
            export: "d".to_owned(),
            during: "write",
            source: kind.into(),
        };
        assert!(!broken(io::ErrorKind::TimedOut).is_of_connection());
        assert!(broken(io::ErrorKind::UnexpectedEof).is_of_connection());
        assert!(broken(io::ErrorKind::BrokenPipe).is_of_connection());
    }
}
