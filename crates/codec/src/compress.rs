//! The compressing side: a batch of pages into a caller's buffer.
//!
//! Slices are gathered into a buffer of our own only where a block spans several. What would not
//! get smaller is given up as soon as that is certain, and the caller sends the pages as they are.

use zstd_safe::{CCtx, CParameter};

use crate::{BATCH_LIMIT, BLOCK_LEN, Codec, CodecError};

/// Set in the length of an LZ4 block that stands as it is.
pub(crate) const STORED: u32 = 1 << 31;
/// Bytes of the length before an LZ4 block.
pub(crate) const LENGTH_LEN: usize = 4;

/// How long the output buffer for `length` bytes of pages should be: an eighth shorter, as a
/// smaller saving does not pay for decompression. Pages that do not fit into it compressed are sent
/// as they are.
#[must_use]
pub const fn worth(length: usize) -> usize {
    length - length / 8
}

/// Compresses; one for each channel thread.
pub struct Compressor {
    gather: Vec<u8>,
    zstd: Option<(CCtx<'static>, i8)>,
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor")
            .field("level", &self.zstd.as_ref().map(|(_, level)| level))
            .finish()
    }
}

impl Default for Compressor {
    fn default() -> Self {
        Self::new()
    }
}

impl Compressor {
    /// A compressor; its contexts are made at their first use. (That of LZ4, 16 KiB, belongs to the
    /// thread.)
    #[must_use]
    pub fn new() -> Self {
        Self { gather: Vec::new(), zstd: None }
    }

    /// Compresses the bytes of `pages`, one after the other, into `output`; returns how many bytes
    /// that made, or `None` when they do not fit: then the contents of `output` are undefined.
    /// Shorter buffers give up sooner; see [`worth`].
    ///
    /// [`Codec::None`] always answers `None`: the caller has the bytes already.
    ///
    /// # Errors
    /// When there are more than [`BATCH_LIMIT`] bytes, the parameter is out of range, or there is
    /// no memory.
    pub fn compress(
        &mut self,
        codec: Codec,
        pages: &[&[u8]],
        output: &mut [u8],
    ) -> Result<Option<usize>, CodecError> {
        let length = pages.iter().map(|slice| slice.len()).sum();
        if length > BATCH_LIMIT {
            return Err(CodecError::TooLarge { length });
        }
        match codec.check()? {
            Codec::None => Ok(None),
            _ if length == 0 => Ok(Some(0)),
            Codec::Lz4 { acceleration } => Ok(self.lz4(acceleration, pages, output)),
            Codec::Zstd { level } => self.zstd(level, pages, length, output),
        }
    }

    /// Bytes that its buffers and contexts take.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.gather.capacity() + self.zstd.as_ref().map_or(0, |(context, _)| context.sizeof())
    }

    fn lz4(&mut self, acceleration: u16, pages: &[&[u8]], output: &mut [u8]) -> Option<usize> {
        let mut blocks = Blocks { slices: pages, taken: 0, gather: &mut self.gather };
        let mut at = 0;
        while let Some(block) = blocks.next() {
            let room = output.get_mut(at..)?;
            let (prefix, room) = room.split_at_mut_checked(LENGTH_LEN)?;
            // A block that does not shrink is stored; it may cost the batch its worth, which the
            // end of `output` tells.
            let limit = room.len().min(worth(block.len()));
            let made = lzzzz::lz4::compress(block, &mut room[..limit], acceleration.into());
            let (length, stored) = match made {
                Ok(length) => (length, 0),
                Err(_) => {
                    room.get_mut(..block.len())?.copy_from_slice(block);
                    (block.len(), STORED)
                }
            };
            prefix.copy_from_slice(&(length as u32 | stored).to_le_bytes());
            at += LENGTH_LEN + length;
        }
        Some(at)
    }

    fn zstd(
        &mut self,
        level: i8,
        pages: &[&[u8]],
        length: usize,
        output: &mut [u8],
    ) -> Result<Option<usize>, CodecError> {
        let library = |code| CodecError::Library { reason: zstd_safe::get_error_name(code) };
        let (mut context, set) = match self.zstd.take() {
            Some(there) => there,
            None => {
                let mut context = CCtx::try_create()
                    .ok_or(CodecError::Library { reason: "no memory for its context" })?;
                // Lengths are known from the run table and checksums are the frame's.
                context.set_parameter(CParameter::ContentSizeFlag(false)).map_err(library)?;
                context.set_parameter(CParameter::ChecksumFlag(false)).map_err(library)?;
                (context, 0)
            }
        };
        if set != level {
            context.set_parameter(CParameter::CompressionLevel(level.into())).map_err(library)?;
        }
        let made = match pages {
            [one] => context.compress2(output, one),
            _ => {
                self.gather.clear();
                self.gather.reserve_exact(length);
                pages.iter().for_each(|slice| self.gather.extend_from_slice(slice));
                context.compress2(output, &self.gather)
            }
        };
        self.zstd = Some((context, level));
        match made {
            Ok(length) => Ok(Some(length)),
            // ZSTD_error_dstSize_tooSmall is 70 (zstd_errors.h, "stable" since 1.3.1); errors are
            // negated codes.
            Err(code) if code == 70_usize.wrapping_neg() => Ok(None),
            Err(code) => Err(library(code)),
        }
    }
}

/// Cuts slices into blocks; a block that lies within one slice is not copied.
struct Blocks<'a, 'b> {
    slices: &'a [&'a [u8]],
    /// Bytes of the first slice that are behind us.
    taken: usize,
    gather: &'b mut Vec<u8>,
}

impl Blocks<'_, '_> {
    /// The next block; all but the last are of [`BLOCK_LEN`].
    fn next(&mut self) -> Option<&[u8]> {
        self.pass_empty();
        let first = self.slices.first()?;
        let rest = &first[self.taken..];
        if rest.len() >= BLOCK_LEN || self.slices.len() == 1 {
            let block = &rest[..rest.len().min(BLOCK_LEN)];
            self.taken += block.len();
            return Some(block);
        }
        self.gather.clear();
        self.gather.reserve_exact(BLOCK_LEN);
        while let Some(first) = self.slices.first()
            && self.gather.len() < BLOCK_LEN
        {
            let rest = &first[self.taken..];
            let part = &rest[..rest.len().min(BLOCK_LEN - self.gather.len())];
            self.gather.extend_from_slice(part);
            self.taken += part.len();
            self.pass_empty();
        }
        Some(self.gather)
    }

    fn pass_empty(&mut self) {
        while let Some((first, others)) = self.slices.split_first()
            && self.taken == first.len()
        {
            (self.slices, self.taken) = (others, 0);
        }
    }
}

#[cfg(test)]
mod tests;
