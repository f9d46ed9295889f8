//! Page codecs: how the bytes of pages are made fewer, and how it is chosen whether to.
//!
//! - [`Codec`]: none, LZ4 with acceleration, zstd with level. [`CodecId`] is its number on the
//!   wire.
//! - [`Compressor`], [`Decompressor`]: one of each a channel thread. They keep contexts and
//!   buffers, so nothing is allocated per page or per frame.
//! - [`is_zero`], [`content_runs`]: zero pages, at the speed of memory.
//! - [`Chooser`]: `--compression auto`. Observations in, a codec out; no clock.
//! - [`delta`]: the XOR of two versions of a page.
//! - [`synthetic`]: memory images that anyone can make again.
//!
//! # At the source
//!
//! ```
//! use godwit_codec::{Codec, CodecId, Compressor, Decompressor, worth};
//!
//! let pages = vec![7_u8; 16 * 4096];
//! let mut compressor = Compressor::new();
//! let mut wire = vec![0; worth(pages.len())];
//! // Any number of slices, in order: here two.
//! let (first, rest) = pages.split_at(4096);
//! match compressor.compress(Codec::Lz4 { acceleration: 1 }, &[first, rest], &mut wire)? {
//!     Some(length) => wire.truncate(length), // send CodecId::Lz4 and these bytes
//!     None => {} // not worth it: send the pages as they are, CodecId::None
//! }
//!
//! // At the destination. The length of what comes out is what the run table says, never
//! // what the codec says.
//! let mut placed = vec![0; 16 * 4096];
//! Decompressor::new().decompress(CodecId::Lz4, &wire, &mut placed)?;
//! assert_eq!(placed, pages);
//! # Ok::<(), godwit_codec::CodecError>(())
//! ```
//!
//! Invariants: what comes out is exactly as long as the caller's buffer, or it is an error; nothing
//! that a peer sends can panic this code or make it allocate. What is written into the buffer
//! before an error is found is undefined, so the caller must not let a guest run on it.
//!
//! This crate is pure: no clock, thread, file or socket.

#![forbid(unsafe_code)]

mod chooser;
mod codec;
mod compress;
mod decompress;
pub mod delta;
mod error;
pub mod synthetic;
mod zero;

pub use chooser::{Batch, Chooser, SAMPLE_LEN, Sampled, Step};
pub use codec::{Codec, CodecId};
pub use compress::{Compressor, worth};
pub use decompress::Decompressor;
pub use error::{CodecError, Corruption};
pub use zero::{content_runs, is_zero};

/// Most bytes that are compressed or decompressed at once.
pub const BATCH_LIMIT: usize = 1 << 20;
/// Bytes that are compressed as one block where there are more: LZ4 has a faster table for blocks
/// of up to 64 KiB, and both input and output stay in a core's caches.
pub const BLOCK_LEN: usize = 64 << 10;
