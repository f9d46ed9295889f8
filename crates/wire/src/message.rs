//! Messages of the control connection: one frame each.
//!
//! ```text
//!   limits    how much a message may carry
//!   offer     what a source offers
//!   facts     what a host tells of itself
//!   encode    messages to bytes
//!   decode    bytes to messages
//!   text      texts and numbers within them
//! ```

mod decode;
mod encode;
mod facts;
mod limits;
mod offer;
mod text;

use std::time::Duration;

use godwit_units::{PageIndex, PageRun};

use crate::Features;
use crate::frame::FrameKind;

pub use facts::{Facts, HugePages};
pub use limits::{
    ANSWER_LIMIT, BLOCKS_LIMIT, CHANNELS_LIMIT, DEVICE_STATE_CHUNK, DIGESTS_PER_MESSAGE,
    DISKS_LIMIT, FLAGS_LIMIT, HUGE_LIMIT, MISSING_LIMIT, NAME_LIMIT, PACKET_LIMIT,
    PRINTS_PER_MESSAGE, PROOF_LEN, QUESTION_LIMIT, QUESTIONS_LIMIT, SECRET_LEN, TEXT_LIMIT,
    TRIAL_LIMIT, WANTED_LIMIT,
};
pub use offer::{BlockOffer, DiskOffer, Offer};

/// Why a side gave up; the numbers are the wire's.
///
/// ```
/// use godwit_wire::{AbortCode, Message};
///
/// let text = "the VMs have different sizes".to_owned();
/// let frame = Message::Abort { code: AbortCode::Layout, text }.encode();
/// assert_eq!(frame[8], AbortCode::Layout as u8);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum AbortCode {
    /// The VMs do not fit together.
    Layout = 1,
    /// The VM at this side cannot take part.
    Machine = 2,
    /// The peer sent what it must not send.
    Protocol = 3,
    /// Guest memory could not be read or written.
    Memory = 4,
    /// The device state could not be saved or loaded.
    DeviceState = 5,
    /// The digests differ.
    Digest = 6,
    /// The operator cancelled.
    Cancelled = 7,
    /// A wait reached its limit.
    Timeout = 8,
    /// Policy gave up: the migration would not finish.
    NotConverging = 9,
    /// Something else.
    Other = 10,
    /// The destination has another guest to take in.
    Busy = 11,
}

impl AbortCode {
    /// Every code there is.
    pub const ALL: [Self; 11] = [
        Self::Layout,
        Self::Machine,
        Self::Protocol,
        Self::Memory,
        Self::DeviceState,
        Self::Digest,
        Self::Cancelled,
        Self::Timeout,
        Self::NotConverging,
        Self::Other,
        Self::Busy,
    ];
}

/// The secret of a session, by which its source is known when it comes back.
///
/// ```
/// let secret = godwit_wire::Secret([7; godwit_wire::SECRET_LEN]);
/// assert_eq!(format!("{secret:?}"), "Secret", "it is shown to nobody");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; SECRET_LEN]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// A message of the control connection. S: sent by the source, D: by the destination.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_wire::{FrameHeader, Message, WireError};
///
/// let said = Message::RoundAck { round: 3, flush: Duration::from_millis(2) };
/// let frame = said.encode();
/// let (header, payload) = frame.split_first_chunk().expect("a header");
/// let header = FrameHeader::decode(header)?;
/// header.verify(payload)?;
/// assert_eq!(Message::decode(&header, payload)?, said);
/// # Ok::<(), WireError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// S: what will be sent.
    Offer(Offer),
    /// D: the offer fits, go on.
    Accept {
        /// Of the codecs in the offer, those that it takes.
        codecs: u32,
        /// Of the features in the offer, those that it has, too: the session has these.
        features: Features,
    },
    /// Both: the sender gives up; the guest stays where it may run.
    Abort {
        /// Why, for a program.
        code: AbortCode,
        /// Why, for a person.
        text: String,
    },
    /// S: every channel has carried all of this round, up to its barrier.
    RoundEnd {
        /// The round, counted from 0.
        round: u32,
    },
    /// D: every page of the round is in place.
    RoundAck {
        /// The round.
        round: u32,
        /// How long the last flush of a disk took, in whole microseconds; zero where none was made
        /// since the acknowledgement before.
        flush: Duration,
    },
    /// S: the guest will stop soon; be ready for device state.
    Prepare,
    /// D: ready for device state.
    Prepared,
    /// S: send digests of all RAM blocks.
    DigestRequest,
    /// D: digests of consecutive chunks of a RAM block.
    Digests {
        /// The RAM block.
        block: u32,
        /// The first chunk.
        first: u32,
        /// One XXH3-128 a chunk.
        digests: Vec<u128>,
    },
    /// S: a piece of the device state, in order.
    DeviceState(Vec<u8>),
    /// S: the device state is complete.
    DeviceStateEnd,
    /// D: all is written, checked and loaded; the guest is stopped and can run here.
    Ready,
    /// S: the guest is yours. The source never runs it again unless told [`Message::Discarded`].
    Commit,
    /// D: the guest runs here.
    Running,
    /// D: the guest does not run here and never will.
    Discarded,
    /// S: heard; nothing will be asked any more.
    Farewell,
    /// Both: the sender is there. Said every now and then, in every state, so that silence means
    /// something.
    Alive,
    /// D: a question about the machine, in the words of its kind. Only between the offer and the
    /// answer to it.
    Question(Vec<u8>),
    /// S: the answer.
    Answer(Vec<u8>),
    /// S: would this be accepted? In the place of an offer: the answer is that to an offer, and
    /// ends the session.
    Inquiry(Offer),
    /// S: keep what arrives when the connections are lost, for a source that proves this secret.
    /// Behind Accept, once.
    Keep(Secret),
    /// S: the first message of a connection of the role resume. All other connections of the
    /// session are given up.
    Resume {
        /// How many channels of memory there will be from now on.
        channels: u8,
        /// That the sender has the secret.
        proof: [u8; PROOF_LEN],
    },
    /// D: the answer. Whatever still came over the connections before is in place or thrown away.
    Resumed {
        /// The attempt whose channels the counts are of.
        attempt: u32,
        /// How many frames of each channel are in place, barriers included; those of memory first.
        placed: Vec<u64>,
        /// That the sender has the secret.
        proof: [u8; PROOF_LEN],
    },
    /// S: behind Resumed and the channels' greetings, what do you hold of every page? From a source
    /// that was started anew and knows nothing of it. Only with
    /// [`Feature::Restart`](crate::Feature::Restart).
    PrintsRequest {
        /// And of every disk that moves along? Only with
        /// [`Feature::DiskPrints`](crate::Feature::DiskPrints), or of what was read back with
        /// [`Feature::DiskProof`](crate::Feature::DiskProof).
        disks: bool,
    },
    /// D: the fingerprints of the pages of one segment, in order; none where all are zero. Of a
    /// disk one for each 16 pages, or, of one that was read back for an audit, one for each page.
    Prints {
        /// The RAM block or disk.
        block: u32,
        /// The segment, counted from 0 in its block.
        segment: u32,
        /// XXH3-64 under a seed that both sides make of the session's secret; 1 where that is 0.
        /// 0: what a disk holds there is not known.
        prints: Vec<u64>,
    },
    /// S: bytes that mean nothing, sent for the time that they take. Only behind an inquiry that
    /// was accepted, with [`Feature::Trial`](crate::Feature::Trial).
    Trial(Vec<u8>),
    /// D: all that came of [`Trial`](Self::Trial)s so far.
    Tried {
        /// Their bytes.
        bytes: u64,
        /// The time at the destination, in nanoseconds since 1970.
        clock: u64,
    },
    /// D: what its host has. Before the answer to an inquiry of a source that has
    /// [`Feature::Facts`](crate::Feature::Facts).
    Facts(Facts),
    /// S: behind Commit, a packet that came for a card of the guest's while it stood still: a
    /// `struct virtio_net_hdr` of 10 bytes (linux/virtio_net.h), little-endian, and an Ethernet
    /// frame. Only with [`Feature::LatePackets`](crate::Feature::LatePackets).
    LatePacket(Vec<u8>),
    /// S: read back what is placed, and answer the request for digests with those of fingerprints
    /// that are made with this seed. Only with [`Feature::Proof`](crate::Feature::Proof).
    Prove {
        /// The seed.
        seed: u64,
    },
    /// S: pages of a RAM block that are still to come when the guest runs at the destination, in
    /// order and apart from each other. Behind the end of the last round, and before the first
    /// piece of device state. Only with [`Feature::PostCopy`](crate::Feature::PostCopy).
    Missing {
        /// The RAM block.
        block: u32,
        /// Nothing else is missing.
        last: bool,
        /// The pages.
        runs: Vec<PageRun>,
    },
    /// D: somebody waits for these of the missing pages.
    Wanted {
        /// The RAM block.
        block: u32,
        /// The pages.
        pages: Vec<PageIndex>,
    },
    /// D: every missing page is in place, and the source is needed no more.
    Placed,
}

impl Message {
    /// The kind of frame that carries it.
    #[must_use]
    pub fn kind(&self) -> FrameKind {
        match self {
            Self::Offer(_) => FrameKind::Offer,
            Self::Accept { .. } => FrameKind::Accept,
            Self::Abort { .. } => FrameKind::Abort,
            Self::RoundEnd { .. } => FrameKind::RoundEnd,
            Self::RoundAck { .. } => FrameKind::RoundAck,
            Self::Prepare => FrameKind::Prepare,
            Self::Prepared => FrameKind::Prepared,
            Self::DigestRequest => FrameKind::DigestRequest,
            Self::Digests { .. } => FrameKind::Digests,
            Self::DeviceState(_) => FrameKind::DeviceState,
            Self::DeviceStateEnd => FrameKind::DeviceStateEnd,
            Self::Ready => FrameKind::Ready,
            Self::Commit => FrameKind::Commit,
            Self::Running => FrameKind::Running,
            Self::Discarded => FrameKind::Discarded,
            Self::Farewell => FrameKind::Farewell,
            Self::Alive => FrameKind::Alive,
            Self::Question(_) => FrameKind::Question,
            Self::Answer(_) => FrameKind::Answer,
            Self::Inquiry(_) => FrameKind::Inquiry,
            Self::Keep(_) => FrameKind::Keep,
            Self::Resume { .. } => FrameKind::Resume,
            Self::Resumed { .. } => FrameKind::Resumed,
            Self::PrintsRequest { .. } => FrameKind::PrintsRequest,
            Self::Missing { .. } => FrameKind::Missing,
            Self::Wanted { .. } => FrameKind::Wanted,
            Self::Placed => FrameKind::Placed,
            Self::Prints { .. } => FrameKind::Prints,
            Self::Prove { .. } => FrameKind::Prove,
            Self::Trial(_) => FrameKind::Trial,
            Self::Tried { .. } => FrameKind::Tried,
            Self::Facts(_) => FrameKind::Facts,
            Self::LatePacket(_) => FrameKind::LatePacket,
        }
    }
}
