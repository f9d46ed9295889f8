//! What can be wrong with received bytes.

use crate::Versions;

/// Why received bytes are not what the format says.
///
/// ```
/// use godwit_wire::{GREETING_LEN, Greeting, WireError};
///
/// let mut stranger = [0; GREETING_LEN];
/// stranger[..8].copy_from_slice(b"SSH-2.0-");
/// let refused = Greeting::decode(&stranger);
/// assert_eq!(refused, Err(WireError::NotGodwit { start: *b"SSH-2.0-" }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The connection does not start with the greeting.
    #[error(
        "the peer does not speak godwit's protocol (it began with \"{}\"): is this the address of \
         a godwit receive?",
        start.escape_ascii()
    )]
    NotGodwit {
        /// Its first bytes.
        start: [u8; 8],
    },
    /// The peer speaks another version.
    #[error(
        "the peer speaks {theirs} of the protocol and this godwit {ours}: install the same release \
         on both hosts, or releases that have a version in common"
    )]
    Version {
        /// The peer's versions.
        theirs: Versions,
        /// The versions here.
        ours: Versions,
    },
    /// The checksum of the greeting or of a frame does not match.
    #[error(
        "a checksum does not match in {what}: the connection corrupts data, or the peer is not \
         what it claims to be"
    )]
    Checksum {
        /// What was being read.
        what: &'static str,
    },
    /// A frame of an unknown kind.
    #[error("a frame of the unknown kind {kind:#x}")]
    Kind {
        /// The kind.
        kind: u16,
    },
    /// A frame announces more than the limit.
    #[error("a frame of {length} bytes, where {limit} is the limit")]
    TooLong {
        /// The announced length.
        length: u64,
        /// The limit.
        limit: u64,
    },
    /// A payload ends early or goes on after its end.
    #[error("the payload of a {what} has the wrong length")]
    Length {
        /// Which message.
        what: &'static str,
    },
    /// A name that is not UTF-8, or has control characters.
    #[error("a name in a {what} is not UTF-8, or has control characters in it")]
    Name {
        /// Which message.
        what: &'static str,
    },
    /// A field has a value it cannot have.
    #[error("the field {field} of a {what} has the impossible value {value}")]
    Field {
        /// Which message.
        what: &'static str,
        /// Which field.
        field: &'static str,
        /// The value.
        value: u64,
    },
}
