//! Frames: a header of 24 bytes, then the payload; one checksum over both.
//!
//! ```text
//!  0      2      4            8                        16                       24
//!  | kind | runs |   length   |           aux          |        checksum        | payload …
//! ```
//! The checksum is XXH3-64 of the payload, seeded with XXH3-64 of the first 16 bytes of the header:
//! a frame whose header was damaged fails like one whose payload was.

use twox_hash::{XxHash3_64, XxHash3_128};

use crate::WireError;

/// Bytes in a frame header.
pub const HEADER_LEN: usize = 24;
/// The longest payload of any frame: 1 MiB of pages and a run table. A header that announces more
/// is refused before anything is allocated.
pub const PAYLOAD_LIMIT: usize = (1 << 20) + (16 << 10);

/// What a frame holds. The numbers are the wire's and are never reused.
///
/// ```
/// use godwit_wire::{FrameKind, Message};
///
/// assert_eq!(Message::Commit.kind(), FrameKind::Commit);
/// assert_eq!(FrameKind::Commit as u16, 28);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[allow(missing_docs, reason = "each is documented at the message it carries")]
pub enum FrameKind {
    Pages = 1,
    Barrier = 2,
    Offer = 16,
    Accept = 17,
    Abort = 18,
    RoundEnd = 19,
    RoundAck = 20,
    Prepare = 21,
    Prepared = 22,
    DigestRequest = 23,
    Digests = 24,
    DeviceState = 25,
    DeviceStateEnd = 26,
    Ready = 27,
    Commit = 28,
    Running = 29,
    Discarded = 30,
    Farewell = 31,
    Alive = 32,
    Question = 33,
    Answer = 34,
    Inquiry = 35,
    Keep = 36,
    Resume = 37,
    Resumed = 38,
    PrintsRequest = 39,
    Prints = 40,
    Prove = 41,
    Trial = 42,
    Tried = 43,
    Missing = 44,
    Wanted = 45,
    Placed = 46,
    Facts = 47,
    LatePacket = 48,
}

impl FrameKind {
    /// Every kind there is.
    pub const ALL: [Self; 35] = [
        Self::Pages,
        Self::Barrier,
        Self::Offer,
        Self::Accept,
        Self::Abort,
        Self::RoundEnd,
        Self::RoundAck,
        Self::Prepare,
        Self::Prepared,
        Self::DigestRequest,
        Self::Digests,
        Self::DeviceState,
        Self::DeviceStateEnd,
        Self::Ready,
        Self::Commit,
        Self::Running,
        Self::Discarded,
        Self::Farewell,
        Self::Alive,
        Self::Question,
        Self::Answer,
        Self::Inquiry,
        Self::Keep,
        Self::Resume,
        Self::Resumed,
        Self::PrintsRequest,
        Self::Prints,
        Self::Prove,
        Self::Trial,
        Self::Tried,
        Self::Missing,
        Self::Wanted,
        Self::Placed,
        Self::Facts,
        Self::LatePacket,
    ];

    fn from_wire(number: u16) -> Result<Self, WireError> {
        Self::ALL
            .into_iter()
            .find(|kind| *kind as u16 == number)
            .ok_or(WireError::Kind { kind: number })
    }
}

/// The header of a frame, as received.
///
/// ```
/// use godwit_wire::{FrameHeader, FrameKind, Message, WireError};
///
/// let frame = Message::RoundEnd { round: 3 }.encode();
/// let (header, payload) = frame.split_first_chunk().expect("a header");
/// let header = FrameHeader::decode(header)?;
/// header.verify(payload)?;
/// assert_eq!((header.kind, header.aux), (FrameKind::RoundEnd, 3));
/// assert!(header.verify(b"something else").is_err());
/// # Ok::<(), WireError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the payload is.
    pub kind: FrameKind,
    /// Entries in the run table of a page frame; 0 elsewhere.
    pub runs: u16,
    /// Bytes of payload that follow, at most [`PAYLOAD_LIMIT`].
    pub length: usize,
    /// A number whose meaning depends on the kind.
    pub aux: u64,
    seed: u64,
    checksum: u64,
}

fn seed(header: &[u8]) -> u64 {
    XxHash3_64::oneshot(&header[..16])
}

impl FrameHeader {
    /// Reads a header.
    ///
    /// # Errors
    /// When the kind is unknown or the length above the limit.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, WireError> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u64_at = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let length = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]) as usize;
        if length > PAYLOAD_LIMIT {
            return Err(WireError::TooLong { length: length as u64, limit: PAYLOAD_LIMIT as u64 });
        }
        let kind = FrameKind::from_wire(u16_at(0))?;
        Ok(Self {
            kind,
            runs: u16_at(2),
            length,
            aux: u64_at(8),
            seed: seed(bytes),
            checksum: u64_at(16),
        })
    }

    /// Checks that `payload` is what was sent with this header.
    ///
    /// # Errors
    /// When length or checksum differ.
    pub fn verify(&self, payload: &[u8]) -> Result<(), WireError> {
        if payload.len() != self.length {
            return Err(WireError::Length { what: "frame" });
        }
        if XxHash3_64::oneshot_with_seed(self.seed, payload) != self.checksum {
            return Err(WireError::Checksum { what: "a frame" });
        }
        Ok(())
    }
}

/// Fills in the header of `frame`, whose first [`HEADER_LEN`] bytes are room for it and whose rest
/// is the payload.
///
/// # Panics
/// When the payload is longer than [`PAYLOAD_LIMIT`]: a mistake of the caller.
///
/// ```
/// use godwit_wire::{FrameHeader, FrameKind, HEADER_LEN, WireError, seal};
///
/// let mut frame = vec![0; HEADER_LEN];
/// frame.extend(b"device state");
/// seal(&mut frame, FrameKind::DeviceState, 0, 0);
/// let (header, payload) = frame.split_first_chunk().expect("a header");
/// let header = FrameHeader::decode(header)?;
/// header.verify(payload)?;
/// assert_eq!(header.length, 12);
/// # Ok::<(), WireError>(())
/// ```
pub fn seal(frame: &mut [u8], kind: FrameKind, runs: u16, aux: u64) {
    let (header, payload) = frame.split_at_mut(HEADER_LEN);
    assert!(payload.len() <= PAYLOAD_LIMIT, "a payload of {} bytes", payload.len());
    header[0..2].copy_from_slice(&(kind as u16).to_le_bytes());
    header[2..4].copy_from_slice(&runs.to_le_bytes());
    header[4..8].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    header[8..16].copy_from_slice(&aux.to_le_bytes());
    let checksum = XxHash3_64::oneshot_with_seed(seed(header), payload);
    header[16..24].copy_from_slice(&checksum.to_le_bytes());
}

/// In the aux of a barrier, above the round.
const LAST: u64 = 1 << 32;

/// The aux of a barrier: the end of `round`, behind which nothing comes if it is the `last` one.
///
/// ```
/// use godwit_wire::{barrier_aux, barrier_of};
///
/// assert_eq!(barrier_of(barrier_aux(7, true)), Ok((7, true)));
/// ```
#[must_use]
pub fn barrier_aux(round: u32, last: bool) -> u64 {
    u64::from(round) | if last { LAST } else { 0 }
}

/// The round that a barrier ends, and whether it is the last one.
///
/// # Errors
/// When the aux says something else as well.
///
/// ```
/// use godwit_wire::barrier_of;
///
/// assert_eq!(barrier_of(7), Ok((7, false)));
/// assert!(barrier_of(u64::MAX).is_err());
/// ```
pub fn barrier_of(aux: u64) -> Result<(u32, bool), WireError> {
    match u32::try_from(aux & !LAST) {
        Ok(round) => Ok((round, aux & LAST != 0)),
        Err(_) => Err(WireError::Field { what: "barrier", field: "aux", value: aux }),
    }
}

/// The digest that both sides compare: XXH3-128 of `bytes`.
///
/// ```
/// use godwit_wire::digest;
///
/// let (page, mut copy) = ([7; 4096], [7; 4096]);
/// assert_eq!(digest(&page), digest(&copy));
/// copy[100] ^= 1;
/// assert_ne!(digest(&page), digest(&copy));
/// ```
#[must_use]
pub fn digest(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}
