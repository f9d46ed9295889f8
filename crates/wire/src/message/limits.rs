//! How much a message may carry.

use crate::frame::PAYLOAD_LIMIT;

/// RAM blocks in an offer.
pub const BLOCKS_LIMIT: usize = 1024;
/// Disks in an offer: with the channels of memory, their channels are numbered in one byte.
pub const DISKS_LIMIT: usize = 64;
/// Channels of memory.
pub const CHANNELS_LIMIT: u8 = 16;
/// Bytes in the secret of a session.
pub const SECRET_LEN: usize = 32;
/// Bytes in what proves it.
pub const PROOF_LEN: usize = 32;
/// Bytes in the name of a RAM block or a disk.
pub const NAME_LIMIT: usize = 255;
/// Bytes in the text of an abort.
pub const TEXT_LIMIT: usize = 4096;
/// Sizes of huge pages that a host tells of.
pub const HUGE_LIMIT: usize = 8;
/// Bytes in what a host tells of its processor's features.
pub const FLAGS_LIMIT: usize = 8192;
/// Bytes of one trial of the connection.
pub const TRIAL_LIMIT: usize = 256 << 10;
/// Bytes of device state in one message.
pub const DEVICE_STATE_CHUNK: usize = 256 << 10;
/// Bytes in a question of the destination.
pub const QUESTION_LIMIT: usize = 64 << 10;
/// Bytes in the answer to one.
pub const ANSWER_LIMIT: usize = 1 << 20;
/// Questions in one migration.
pub const QUESTIONS_LIMIT: usize = 4096;
/// Bytes of a packet for a card of the guest's.
pub const PACKET_LIMIT: usize = 80 << 10;
/// Digests in one message.
pub const DIGESTS_PER_MESSAGE: usize = 4096;
/// Pages of which one message has the fingerprints: those of one segment.
pub const PRINTS_PER_MESSAGE: usize = 4096;
/// Most runs of missing pages, in one message and in all of a session.
pub const MISSING_LIMIT: usize = 4096;
/// Most pages that are asked for in one message.
pub const WANTED_LIMIT: usize = 1024;

/// Channels of memory and of disks together.
pub(super) const PLACED_LIMIT: usize = CHANNELS_LIMIT as usize + DISKS_LIMIT;

const _: () = assert!(QUESTION_LIMIT <= PAYLOAD_LIMIT && ANSWER_LIMIT <= PAYLOAD_LIMIT);
const _: () =
    assert!(DEVICE_STATE_CHUNK <= PAYLOAD_LIMIT && DIGESTS_PER_MESSAGE * 16 + 16 <= PAYLOAD_LIMIT);
