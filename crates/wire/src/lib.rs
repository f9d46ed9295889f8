//! The wire format of a migration, as bytes; the conversation they make up is in the `protocol`
//! crate.
//!
//! The specification, with the layout of every byte, is `docs/protocol.md`. Three layers:
//!
//! - [`Greeting`]: the first 40 bytes of every connection, both ways. Says godwit, [`Version`],
//!   session, role.
//! - [`FrameHeader`]: 24 bytes before every payload, with a checksum over both.
//! - [`Message`] on the control connection, [`PageFrame`] on the data channels.
//!
//! Invariants: nothing a peer sends can panic this code or make anyone allocate more than
//! [`PAYLOAD_LIMIT`] bytes; no byte reaches a VM before the checksum of its frame was found right.
//! All integers are little-endian.

#![forbid(unsafe_code)]

mod error;
mod frame;
mod greeting;
mod message;
mod pages;
mod version;

pub use error::WireError;
pub use frame::{
    FrameHeader, FrameKind, HEADER_LEN, PAYLOAD_LIMIT, barrier_aux, barrier_of, digest, seal,
};
pub use greeting::{GREETING_LEN, Greeting, Role, SessionId};
pub use message::{
    ANSWER_LIMIT, AbortCode, BLOCKS_LIMIT, BlockOffer, CHANNELS_LIMIT, DEVICE_STATE_CHUNK,
    DIGESTS_PER_MESSAGE, DISKS_LIMIT, DiskOffer, FLAGS_LIMIT, Facts, HUGE_LIMIT, HugePages,
    MISSING_LIMIT, Message, NAME_LIMIT, Offer, PACKET_LIMIT, PRINTS_PER_MESSAGE, PROOF_LEN,
    QUESTION_LIMIT, QUESTIONS_LIMIT, SECRET_LEN, Secret, TEXT_LIMIT, TRIAL_LIMIT, WANTED_LIMIT,
};
pub use pages::{
    Added, Content, FRAME_PAGES, PageFrame, PageFrameBuilder, RUN_LEN, RUNS_LIMIT, WireRun,
};
pub use version::{Feature, Features, Version, Versions};
