//! A request that was sent and what has come back for it so far.

use crate::error::Errno;
use crate::protocol::Command;

/// A stretch of an export and the flags that a context gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Its first byte.
    pub offset: u64,
    /// Its length in bytes, never 0.
    pub length: u64,
    /// What the context says of it: [`HOLE`](crate::HOLE), [`ZERO`](crate::ZERO),
    /// [`DIRTY`](crate::DIRTY).
    pub flags: u32,
}

/// What a server said against a request.
#[derive(Debug)]
pub(crate) struct Complaint {
    pub(crate) errno: Errno,
    /// Where exactly, if it tells.
    pub(crate) at: Option<u64>,
    pub(crate) words: String,
}

/// One request under way.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) cookie: u64,
    pub(crate) command: Command,
    pub(crate) offset: u64,
    pub(crate) length: u32,
    /// Bytes of a read, as long as the request.
    pub(crate) data: Vec<u8>,
    /// How many of them have come.
    pub(crate) filled: usize,
    /// For a status, the stretches of each context that was agreed on, once they have come.
    pub(crate) status: Vec<Option<Vec<Stretch>>>,
    pub(crate) complaint: Option<Complaint>,
    /// Whether the last part of the answer has come.
    pub(crate) done: bool,
}

impl Pending {
    /// What is wrong with an answer that has ended without an error; nothing when it is whole.
    pub(crate) fn lack(&self) -> Option<String> {
        if self.command == Command::Read && self.filled != self.data.len() {
            return Some(format!(
                "a read of {} bytes was answered with {}",
                self.data.len(),
                self.filled
            ));
        }
        let missing = self.status.iter().any(Option::is_none);
        missing.then(|| "a status was answered without one of the contexts".to_owned())
    }
}
