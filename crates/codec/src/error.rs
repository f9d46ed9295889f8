//! What can be wrong with a codec's name, parameter or input.

use crate::{Codec, CodecId};

/// An error of this crate. Whoever knows adds the RAM block and the page.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// A peer named a codec that there is not.
    #[error("there is no codec of number {number}")]
    Unknown {
        /// Its number.
        number: u8,
    },
    /// An operator named a codec that there is not.
    #[error("there is no codec '{text}': use none, lz4, lz4:ACCELERATION, zstd or zstd:LEVEL")]
    Name {
        /// What was written.
        text: String,
    },
    /// A parameter is out of range.
    #[error(
        "{codec} is out of range: lz4 takes an acceleration of 1 to 1000, zstd a level of -50 to \
         19 and not 0"
    )]
    Parameter {
        /// The codec with it.
        codec: Codec,
    },
    /// Input is not what the codec makes, or not of these pages.
    #[error("corrupt {codec} data: {corruption}")]
    Corrupt {
        /// The codec.
        codec: CodecId,
        /// What is wrong.
        corruption: Corruption,
    },
    /// More than [`crate::BATCH_LIMIT`] at once: a mistake of the caller, or a lie of the peer.
    #[error(
        "{length} bytes of pages at once are more than the limit of {} bytes",
        crate::BATCH_LIMIT
    )]
    TooLarge {
        /// The bytes.
        length: usize,
    },
    /// The library failed for a reason of its own: no memory.
    #[error("zstd failed: {reason}")]
    Library {
        /// What it said.
        reason: &'static str,
    },
}

/// What is wrong with compressed input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Corruption {
    /// It makes fewer or more bytes than the pages have.
    #[error("it holds {found} bytes where the pages have {expected}")]
    Length {
        /// Bytes of the pages.
        expected: usize,
        /// Bytes that came out.
        found: usize,
    },
    /// It ends within a block, or goes on after the last.
    #[error("it is cut short or too long: its block at byte {at} does not fit")]
    Cut {
        /// Where the block starts.
        at: usize,
    },
    /// A block is not of the codec's format, or makes more bytes than the pages have left.
    #[error("its block at byte {at} is malformed")]
    Malformed {
        /// Where the block starts.
        at: usize,
    },
    /// The library says what is wrong.
    #[error("{reason}")]
    Said {
        /// What it said.
        reason: &'static str,
    },
}
