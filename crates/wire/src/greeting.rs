//! The greeting: the first bytes on every connection, in both directions.

use std::fmt;

use twox_hash::XxHash3_64;

use crate::{Version, Versions, WireError};

/// Bytes in a greeting.
pub const GREETING_LEN: usize = 40;
/// Not ASCII throughout, so that no text protocol begins like this.
const MAGIC: [u8; 8] = *b"GODWIT\x00\x1a";

/// Names one migration; drawn at random by the source.
///
/// ```
/// let session = godwit_wire::SessionId([0xab; 16]);
/// assert_eq!(session.to_string(), "ab".repeat(16));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({self})")
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// What a connection is for.
///
/// ```
/// use godwit_wire::{Greeting, Role, SessionId, Version};
///
/// let (version, session) = (Version::NEWEST, SessionId([7; 16]));
/// let greeting = Greeting { version, session, role: Role::Channel(1), attempt: 0 };
/// let received = Greeting::decode(&greeting.encode());
/// assert!(received.is_ok_and(|greeting| greeting.role == Role::Channel(1)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The conversation, the device state and the handover.
    Control,
    /// Pages of guest memory, or behind those channels, of a disk.
    Channel(u8),
    /// A source in doubt asks who runs the guest.
    Resolve,
    /// A source that has lost its connections takes the migration up again: the control connection
    /// of that attempt.
    Resume,
}

/// The greeting of a connection.
///
/// ```
/// use godwit_wire::{Greeting, Role, SessionId, Version};
///
/// let (version, session) = (Version::NEWEST, SessionId([7; 16]));
/// let greeting = Greeting { version, session, role: Role::Control, attempt: 0 };
/// let mut bytes = greeting.encode();
/// assert_eq!(Greeting::decode(&bytes), Ok(greeting));
/// bytes[20] ^= 1;
/// assert!(Greeting::decode(&bytes).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The version of the protocol that its sender speaks from here on.
    pub version: Version,
    /// Which migration.
    pub session: SessionId,
    /// What the connection is for.
    pub role: Role,
    /// To which attempt to connect it belongs: 0 for the first connections of a session, and one
    /// more each time that its source tries to take it up again. A channel counts for its own
    /// attempt only.
    pub attempt: u32,
}

impl Greeting {
    /// What a destination says to a source whose version it does not speak, before it closes: which
    /// versions it speaks.
    ///
    /// ```
    /// use godwit_wire::{Greeting, SessionId, Version};
    ///
    /// let refusal = Greeting::refusal();
    /// assert_eq!((refusal.version, refusal.session), (Version::NEWEST, SessionId([0; 16])));
    /// ```
    #[must_use]
    pub fn refusal() -> Self {
        let (version, session) = (Version::NEWEST, SessionId([0; 16]));
        Self { version, session, role: Role::Control, attempt: 0 }
    }

    /// The bytes to send.
    #[must_use]
    pub fn encode(&self) -> [u8; GREETING_LEN] {
        let (role, number) = match self.role {
            Role::Control => (0, self.version.oldest_in_greeting()),
            Role::Channel(number) => (1, number),
            Role::Resolve => (2, 0),
            Role::Resume => (3, 0),
        };
        let mut bytes = [0; GREETING_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.number().to_le_bytes());
        bytes[10] = role;
        bytes[11] = number;
        bytes[12..16].copy_from_slice(&self.attempt.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.session.0);
        let checksum = XxHash3_64::oneshot(&bytes[..32]);
        bytes[32..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads a greeting.
    ///
    /// # Errors
    /// When the bytes are no greeting, of another version, or corrupted.
    pub fn decode(bytes: &[u8; GREETING_LEN]) -> Result<Self, WireError> {
        let mut start = [0; 8];
        start.copy_from_slice(&bytes[..8]);
        if start != MAGIC {
            return Err(WireError::NotGodwit { start });
        }
        let number = u16::from_le_bytes([bytes[8], bytes[9]]);
        let Some(version) = Version::of_number(number) else {
            let theirs = versions(number, bytes[10], bytes[11]);
            return Err(WireError::Version { theirs, ours: Versions::HERE });
        };
        let mut checksum = [0; 8];
        checksum.copy_from_slice(&bytes[32..]);
        if XxHash3_64::oneshot(&bytes[..32]) != u64::from_le_bytes(checksum) {
            return Err(WireError::Checksum { what: "the greeting" });
        }
        let role = match (bytes[10], bytes[11]) {
            (0, _) => Role::Control,
            (1, number) => Role::Channel(number),
            (2, _) => Role::Resolve,
            (3, _) => Role::Resume,
            (other, _) => {
                return Err(WireError::Field {
                    what: "greeting",
                    field: "role",
                    value: other.into(),
                });
            }
        };
        let mut session = [0; 16];
        session.copy_from_slice(&bytes[16..32]);
        let attempt = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
        Ok(Self { version, session: SessionId(session), role, attempt })
    }
}

/// What the sender of a greeting of another version speaks, by the first 12 bytes of it: these are
/// the same in all versions.
fn versions(newest: u16, role: u8, oldest: u8) -> Versions {
    let oldest = u16::from(oldest);
    let told = role == 0 && oldest != 0 && oldest < newest;
    Versions { oldest: if told { oldest } else { newest }, newest }
}
