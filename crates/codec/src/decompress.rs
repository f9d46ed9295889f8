//! The decompressing side: into a caller's buffer, exactly as many bytes as it has.

use zstd_safe::DCtx;

use crate::compress::{LENGTH_LEN, STORED};
use crate::{BATCH_LIMIT, BLOCK_LEN, CodecError, CodecId, Corruption};

/// Decompresses; one for each channel thread.
pub struct Decompressor {
    zstd: Option<DCtx<'static>>,
    scatter: Vec<u8>,
}

impl std::fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decompressor").field("zstd", &self.zstd.is_some()).finish()
    }
}

impl Default for Decompressor {
    fn default() -> Self {
        Self::new()
    }
}

impl Decompressor {
    /// A decompressor; its context is made at its first use.
    #[must_use]
    pub fn new() -> Self {
        Self { zstd: None, scatter: Vec::new() }
    }

    /// Decompresses `input` into `output` and fills it exactly. After an error the contents of
    /// `output` are undefined.
    ///
    /// `output` may be guest memory that nobody runs on: no byte beyond it is written, whatever
    /// `input` is.
    ///
    /// # Errors
    /// When `input` is not what `codec` makes of so many bytes, or `output` is longer than
    /// [`BATCH_LIMIT`].
    pub fn decompress(
        &mut self,
        codec: CodecId,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CodecError> {
        let length = output.len();
        if length > BATCH_LIMIT {
            return Err(CodecError::TooLarge { length });
        }
        let wrong =
            |found| CodecError::corrupt(codec, Corruption::Length { expected: length, found });
        match codec {
            CodecId::None if input.len() == length => output.copy_from_slice(input),
            CodecId::None => return Err(wrong(input.len())),
            _ if length == 0 && input.is_empty() => {}
            CodecId::Lz4 => lz4(input, output)?,
            CodecId::Zstd => {
                let found = self.zstd(input, output)?;
                if found != length {
                    return Err(wrong(found));
                }
            }
        }
        Ok(())
    }

    /// Decompresses `input` into the slices of `outputs`, one after the other, and fills them
    /// exactly. Where there are several it goes through a buffer of our own: better is one
    /// [`Self::decompress`] and a write of its parts.
    ///
    /// # Errors
    /// As [`Self::decompress`]; no slice is touched then unless there is but one.
    pub fn scatter(
        &mut self,
        codec: CodecId,
        input: &[u8],
        outputs: &mut [&mut [u8]],
    ) -> Result<(), CodecError> {
        if let [one] = outputs {
            return self.decompress(codec, input, one);
        }
        let length = outputs.iter().map(|slice| slice.len()).sum();
        if length > BATCH_LIMIT {
            return Err(CodecError::TooLarge { length });
        }
        let mut buffer = std::mem::take(&mut self.scatter);
        buffer.resize(buffer.len().max(length), 0);
        let result = self.decompress(codec, input, &mut buffer[..length]);
        if result.is_ok() {
            let mut rest = &buffer[..];
            for slice in outputs {
                let (part, others) = rest.split_at(slice.len());
                slice.copy_from_slice(part);
                rest = others;
            }
        }
        self.scatter = buffer;
        result
    }

    /// Bytes that its buffers and contexts take.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.scatter.capacity() + self.zstd.as_ref().map_or(0, DCtx::sizeof)
    }

    fn zstd(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, CodecError> {
        if self.zstd.is_none() {
            self.zstd = DCtx::try_create();
        }
        let Some(context) = &mut self.zstd else {
            return Err(CodecError::Library { reason: "no memory for its context" });
        };
        // One call with all of the input needs no window of the peer's choice: the output is the
        // window.
        context.decompress(output, input).map_err(|code| {
            let reason = zstd_safe::get_error_name(code);
            CodecError::corrupt(CodecId::Zstd, Corruption::Said { reason })
        })
    }
}

fn lz4(input: &[u8], output: &mut [u8]) -> Result<(), CodecError> {
    let corrupt = |corruption| CodecError::corrupt(CodecId::Lz4, corruption);
    let mut rest = input;
    for block in output.chunks_mut(BLOCK_LEN) {
        let at = input.len() - rest.len();
        let cut = || corrupt(Corruption::Cut { at });
        let (prefix, behind) = rest.split_first_chunk::<LENGTH_LEN>().ok_or_else(cut)?;
        let word = u32::from_le_bytes(*prefix);
        let length = (word & !STORED) as usize;
        let (body, behind) = behind.split_at_checked(length).ok_or_else(cut)?;
        if word & STORED != 0 {
            if length != block.len() {
                return Err(corrupt(Corruption::Length { expected: block.len(), found: length }));
            }
            block.copy_from_slice(body);
        } else {
            let found = lzzzz::lz4::decompress(body, block)
                .map_err(|_| corrupt(Corruption::Malformed { at }))?;
            if found != block.len() {
                return Err(corrupt(Corruption::Length { expected: block.len(), found }));
            }
        }
        rest = behind;
    }
    if rest.is_empty() {
        Ok(())
    } else {
        Err(corrupt(Corruption::Cut { at: input.len() - rest.len() }))
    }
}
