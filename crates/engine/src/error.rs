//! What can fail, and what a failure means for the guest.

use std::fmt;
use std::io;
use std::time::Duration;

use godwit_codec::CodecError;
use godwit_confine::{ConfineError, Tried};
use godwit_disk::DiskError;
use godwit_memory::{MemoryError, NoRoom};
use godwit_policy::Advice;
use godwit_protocol::Unexpected;
use godwit_track::TrackError;
use godwit_units::{ByteCount, PageCount, PageIndex, format_duration};
use godwit_wire::{AbortCode, WireError};

use crate::vm::VmError;

/// Why a migration ended.
///
/// ```
/// use godwit_engine::EngineError;
///
/// assert_eq!(EngineError::Cancelled.to_string(), "cancelled");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Nobody answers at the destination's address.
    #[error(
        "cannot connect to {address}: {source}; is godwit receive running there, and the port open?"
    )]
    Connect {
        /// The address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// Somebody listens there, and says nothing.
    #[error(
        "{address} takes connections and does not greet as godwit does within {}: is it the \
         address of a godwit receive, and is that not busy with another migration?",
        format_duration(*limit)
    )]
    NoGreeting {
        /// The address.
        address: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// A connection would leave this host and not be encrypted.
    #[error(
        "{address} is beyond this host, and nothing would be encrypted: give both sides keys \
         (godwit keys makes them; --keys DIR), or let both go without (--insecure)"
    )]
    Plaintext {
        /// The address.
        address: String,
    },
    /// The peer is not whom it must be, or cannot be asked for that.
    #[error("{0}")]
    Distrust(String),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection to the {peer} broke: {source}")]
    Link {
        /// `source` or `destination`.
        peer: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The connection stands, and the peer does not say that it is there.
    #[error(
        "nothing was heard of the {peer} for {}: its host, its godwit or the link has stopped",
        format_duration(*limit)
    )]
    Silent {
        /// `source` or `destination`.
        peer: &'static str,
        /// For how long.
        limit: Duration,
    },
    /// The connections broke before the guest was stopped, and were not made again in time.
    #[error(
        "{cause}; the migration could not be taken up again within {}{}",
        format_duration(*limit),
        last.as_ref().map_or(String::new(), |last| format!(" (at last: {last})"))
    )]
    Severed {
        /// How they broke.
        cause: Box<EngineError>,
        /// How long they were tried or waited for.
        limit: Duration,
        /// Why the last attempt failed, if one was made.
        last: Option<Box<EngineError>>,
    },
    /// The peer sent what is not the protocol.
    #[error("the {peer} sent something wrong: {source}")]
    Wire {
        /// `source` or `destination`.
        peer: &'static str,
        /// What.
        source: WireError,
    },
    /// The peer sent a message out of place.
    #[error("the {peer} broke the protocol: {what}")]
    Protocol {
        /// `source` or `destination`.
        peer: &'static str,
        /// What it did.
        what: String,
    },
    /// The peer gave up.
    #[error("the {peer} {}: {text}", if *code == AbortCode::Busy { "is busy" } else { "gave up" })]
    Aborted {
        /// `source` or `destination`.
        peer: &'static str,
        /// Why, for a program.
        code: AbortCode,
        /// Why, in its words.
        text: String,
    },
    /// What a godwit that was killed has left cannot be gone by.
    #[error(
        "the record of an unfinished migration, {}, is of no use: {why}; if no godwit is at \
         work at this VM remove it, and begin anew",
        path.display()
    )]
    Record {
        /// The record.
        path: std::path::PathBuf,
        /// Why.
        why: String,
    },
    /// A godwit that was killed has left a guest without all of its memory, and another one cannot
    /// go on: what was left stays, since the guest is lost without it.
    #[error(
        "a guest lacks memory that another godwit was to fetch, and this one cannot go on with it \
         ({} stays as it is): {why}",
        path.display()
    )]
    Left {
        /// What was left.
        path: std::path::PathBuf,
        /// Why.
        why: String,
    },
    /// What another godwit would go on by cannot be written down.
    #[error("cannot write down what another godwit would go on by, {}: {source}", path.display())]
    Unwritten {
        /// Where.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The godwit that began the migration was killed.
    #[error("the godwit that was at work here before was killed")]
    Killed,
    /// A thread that reads what the peer sends tried what it has no use for, and was kept from it.
    #[error(
        "what reads the bytes of {peer} was kept from {tried}, for which it has no use: they may \
         have taken it over, so nothing that came is used; report this (--unconfined keeps it \
         from nothing)"
    )]
    Confined {
        /// Whose bytes.
        peer: &'static str,
        /// The call.
        tried: Tried,
    },
    /// The threads that read what a peer sends cannot be confined.
    #[error("{0}; --unconfined goes without")]
    Confine(#[source] ConfineError),
    /// The VM has more of something than the protocol can name.
    #[error(
        "the VM has {count} {what}, and a migration takes {limit} at the most: let it have fewer"
    )]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        count: usize,
        /// The most that can be.
        limit: usize,
    },
    /// The kernel has no random numbers for this process.
    #[error(
        "no random numbers from the kernel ({0}): let whatever filters system calls allow \
         getrandom(2)"
    )]
    Random(#[source] io::Error),
    /// The VMs do not fit together.
    #[error("{0}")]
    Layout(String),
    /// What was in the guest's memory cannot be written down.
    #[error("cannot dump the guest's memory to {}: {source}", path.display())]
    Dump {
        /// Where.
        path: std::path::PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A long call ended for another reason than its own, which is told instead wherever it is
    /// known.
    #[error("it was interrupted")]
    Interrupted,
    /// A wait reached its limit.
    #[error("{what} did not come within {}", format_duration(*limit))]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// How long.
        limit: Duration,
    },
    /// The machine adapter failed.
    #[error("{0}")]
    Vm(#[source] VmError),
    /// The machine's process has ended during the migration.
    #[error("the {0} VM has ended: its log or standard error may say why")]
    Ended(&'static str),
    /// The guest ended by itself, or went on where it must not.
    #[error("{0}")]
    Befallen(String),
    /// Whether the guest runs at the destination is not known.
    #[error("it is not known whether the guest runs: {0}")]
    Uncertain(#[source] VmError),
    /// The guest could not be brought back.
    #[error("{cause}; then the guest could not be brought back: {source}")]
    NotResumed {
        /// Why it was to be brought back.
        cause: Box<EngineError>,
        /// Why it could not.
        source: VmError,
    },
    /// Guest memory could not be accessed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// There is no room for all that the guest may come to use.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// A disk could not be read or written.
    #[error("{0}")]
    Disk(#[source] DiskError),
    /// Pages could not be compressed.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// A frame of compressed pages is corrupt.
    #[error("the source sent pages that cannot be decompressed, of {of} from {page} on: {source}")]
    Corrupt {
        /// The RAM block or disk.
        of: String,
        /// The first page in the frame.
        page: PageIndex,
        /// What is wrong.
        source: CodecError,
    },
    /// Disks use direct I/O.
    #[error(
        "a disk of the VM has cache.direct=on: its data can land in guest memory unseen, which \
         only the page fingerprints find; migrate without --fingerprints off, or use \
         cache=writeback for the migration"
    )]
    DirectIo,
    /// Tracking failed.
    #[error(transparent)]
    Track(#[from] TrackError),
    /// The device state could not be passed on.
    #[error("passing the device state on failed: {0}")]
    State(#[source] io::Error),
    /// The destination's disks are read back more slowly than they were written.
    #[error(
        "what was written to the disks here is not read back after {}: the storage reads more \
         slowly than it writes; migrate without --verify, or with a lower --max-bandwidth",
        format_duration(*.0)
    )]
    ReadBack(Duration),
    /// The copy is not exact.
    #[error(
        "the copy is NOT exact: {differing} of {chunks} chunks of {size} differ, the first is \
         {place}; please report this"
    )]
    Digest {
        /// The size of a chunk.
        size: ByteCount,
        /// Chunks that differ.
        differing: u64,
        /// Chunks compared.
        chunks: u64,
        /// Where the first begins.
        place: crate::report::Place,
    },
    /// The guest was handed over, and was not sent whole.
    #[error(
        "the guest that runs at the destination is NOT an exact copy: {pages} hold here what was \
         never sent, the first in RAM block '{block}' at offset {offset:#x}; what wrote there was \
         not seen. The source is kept, stopped, to be looked at; please report this"
    )]
    Missed {
        /// How many pages.
        pages: PageCount,
        /// The block of the first.
        block: String,
        /// Its offset in the block.
        offset: u64,
    },
    /// The audit found that the copy is not exact. The guest was not handed over.
    #[error("the copy at the destination is NOT exact: {0}")]
    Audit(Box<crate::report::Audit>),
    /// An audit is wanted and cannot be made.
    #[error(
        "no audit can be made: it needs fingerprints of all that was sent (not --fingerprints off, \
         nor a migration that another godwit began), and a destination that can tell its own, of \
         disks that move along as well"
    )]
    NoAudit,
    /// The trace of an audit cannot be written.
    #[error("cannot write the trace to {path}: {source}")]
    Trace {
        /// Where it was to be.
        path: std::path::PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// What is to be done before the switchover was not done.
    #[error("what is to be done before the switchover failed: {0}")]
    Hook(String),
    /// What is left was to follow when the guest runs at the destination, and cannot.
    #[error("post-copy is not possible: {0}")]
    NoPostCopy(String),
    /// What is left of the guest's memory cannot be copied to a third place, or taken from there.
    #[error("the copy of what is left, {}: {why}", path.display())]
    Remainder {
        /// Where it is, or was to be.
        path: std::path::PathBuf,
        /// Why.
        why: String,
    },
    /// It would not finish.
    #[error("not converging: {0}")]
    NotConverging(Advice),
    /// The engine runs in another process, a VMM's, and says so.
    #[error("{0}")]
    Elsewhere(String),
    /// The operator cancelled.
    #[error("cancelled")]
    Cancelled,
    /// A thread cannot be had.
    #[error(
        "cannot start the {name} thread: {source}; raise the limit (pids.max, ulimit -u) or free \
         memory"
    )]
    Thread {
        /// What it would do.
        name: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A thread of ours ended in a panic.
    #[error("an internal error in the {0} thread (a bug in godwit)")]
    Panicked(&'static str),
}

impl EngineError {
    /// The code under which the peer is told.
    #[must_use]
    pub fn abort_code(&self) -> AbortCode {
        match self {
            Self::Layout(_) => AbortCode::Layout,
            Self::Vm(_)
            | Self::Ended(_)
            | Self::Befallen(_)
            | Self::Uncertain(_)
            | Self::NotResumed { .. }
            | Self::Disk(_) => AbortCode::Machine,
            Self::Wire { .. } | Self::Protocol { .. } => AbortCode::Protocol,
            Self::Memory(_) | Self::Track(_) | Self::NoRoom(_) => AbortCode::Memory,
            Self::State(_) => AbortCode::DeviceState,
            Self::Digest { .. } | Self::Missed { .. } | Self::Audit(_) => AbortCode::Digest,
            Self::Cancelled => AbortCode::Cancelled,
            Self::Timeout { .. } | Self::Silent { .. } | Self::Severed { .. } => AbortCode::Timeout,
            Self::NotConverging(_) => AbortCode::NotConverging,
            _ => AbortCode::Other,
        }
    }
}

impl EngineError {
    /// Whether connections are lost, which may be made again.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Self::Link { .. } | Self::Silent { .. })
    }

    /// Whether an attempt to make them again, which failed so, may be followed by one that does
    /// not: the way to the destination may be another by then.
    pub(crate) fn may_pass(&self) -> bool {
        self.is_loss()
            || matches!(
                self,
                Self::Connect { .. }
                    | Self::NoGreeting { .. }
                    | Self::Timeout { .. }
                    | Self::Wire { .. }
                    | Self::Protocol { .. }
                    | Self::Distrust(_)
            )
    }
}

impl From<Unexpected> for EngineError {
    fn from(unexpected: Unexpected) -> Self {
        Self::Protocol { peer: "peer", what: unexpected.to_string() }
    }
}

/// How far a migration had come.
///
/// ```
/// assert_eq!(godwit_engine::Phase::StopAndCopy.to_string(), "stop-and-copy");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Connecting, comparing, attaching.
    Setup,
    /// Copying while the guest runs.
    PreCopy,
    /// The guest is stopped for the last pages and the device state.
    StopAndCopy,
    /// The guest is changing hands.
    Handover,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setup => "setup",
            Self::PreCopy => "pre-copy",
            Self::StopAndCopy => "stop-and-copy",
            Self::Handover => "handover",
        })
    }
}

/// Where the guest is after a failure.
///
/// ```
/// use godwit_engine::Survivor;
///
/// /// Whether an operator has to do something.
/// fn needs_somebody(survivor: Survivor) -> bool {
///     !matches!(survivor, Survivor::Source)
/// }
/// assert!(needs_somebody(Survivor::Unknown));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survivor {
    /// At the source, as it was before.
    Source,
    /// At the source, but it could not be made to run again.
    SourceStopped,
    /// Not known here: stopped at the source, perhaps running at the destination.
    Unknown,
    /// At the destination.
    Destination,
    /// Nowhere: it ended with its VM at the source, which had not let go of it.
    Ended,
    /// Nowhere whole: it ran at the destination before all of its memory was there (post-copy), and
    /// one of both VMs has ended.
    Lost,
}

/// The answer to the operator: what went wrong, when, and where the guest is now.
///
/// ```
/// use godwit_engine::{EngineError, Failure, Phase, Survivor};
///
/// let failure = Failure {
///     phase: Phase::PreCopy,
///     survivor: Survivor::Source,
///     cause: EngineError::Cancelled,
/// };
/// assert_eq!(failure.to_string(), "cancelled (during pre-copy)");
/// ```
#[derive(Debug)]
pub struct Failure {
    /// How far it had come.
    pub phase: Phase,
    /// Where the guest is.
    pub survivor: Survivor,
    /// What went wrong.
    pub cause: EngineError,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (during {})", self.cause, self.phase)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_told_by_its_code_what_it_can_do_something_about() {
        let timeout = EngineError::Timeout { what: "an answer", limit: Duration::from_secs(1) };
        let silent = EngineError::Silent { peer: "source", limit: Duration::from_secs(1) };
        let protocol = EngineError::Protocol { peer: "source", what: "something".to_owned() };
        let size = ByteCount(1 << 20);
        let place = crate::report::Place { block: "ram".to_owned(), disk: false, offset: 0 };
        let digest = EngineError::Digest { size, differing: 1, chunks: 2, place };
        let io = || io::Error::from(io::ErrorKind::NotFound);
        for (error, code) in [
            (EngineError::Layout("differ".to_owned()), AbortCode::Layout),
            (EngineError::Ended("source"), AbortCode::Machine),
            (protocol, AbortCode::Protocol),
            (EngineError::State(io()), AbortCode::DeviceState),
            (digest, AbortCode::Digest),
            (EngineError::Cancelled, AbortCode::Cancelled),
            (timeout, AbortCode::Timeout),
            (silent, AbortCode::Timeout),
            (EngineError::Random(io()), AbortCode::Other),
        ] {
            assert_eq!(error.abort_code(), code, "{error}");
        }
    }
}
