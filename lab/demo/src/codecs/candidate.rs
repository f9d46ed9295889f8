//! The candidates of `godwit-codecs`: each compresses the same blocks of the same pages, on one
//! thread.
//!
//! Processor time counts, not the clock on the wall: on a machine with other work both would
//! measure that work, too.

use std::time::Duration;

use anyhow::Context;
use godwit_codec::{BLOCK_LEN, Codec, Compressor, Decompressor, worth};
use rustix::time::{ClockId, clock_gettime};

const PAGE: usize = 4096;
/// Bytes of pages that our own path takes at once, as a page frame holds them.
const BATCH: usize = 256 << 10;

/// Who compresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Candidate {
    /// zlib, one stream for each block of `block` bytes.
    Zlib { name: &'static str, level: u32, block: usize },
    /// Our path: scattered pages, batches, given up where it is not worth it.
    Own { name: &'static str, codec: Codec },
    /// liblz4 as it is, on blocks that lie in one piece, with room for anything: its own speed.
    Liblz4,
}

pub(crate) const ALL: [Candidate; 11] = [
    Candidate::Zlib { name: "zlib default", level: 6, block: BLOCK_LEN },
    Candidate::Zlib { name: "zlib best", level: 9, block: BLOCK_LEN },
    Candidate::Zlib { name: "zlib fastest", level: 1, block: BLOCK_LEN },
    // As migrations with zlib do it: QEMU's compression threads took one page at a time.
    Candidate::Zlib { name: "zlib fastest, by page", level: 1, block: PAGE },
    Candidate::Own { name: "lz4", codec: Codec::Lz4 { acceleration: 1 } },
    Candidate::Own { name: "lz4, acceleration 4", codec: Codec::Lz4 { acceleration: 4 } },
    Candidate::Own { name: "lz4, acceleration 8", codec: Codec::Lz4 { acceleration: 8 } },
    Candidate::Own { name: "lz4, acceleration 16", codec: Codec::Lz4 { acceleration: 16 } },
    Candidate::Own { name: "zstd 1", codec: Codec::Zstd { level: 1 } },
    Candidate::Own { name: "zstd 3", codec: Codec::Zstd { level: 3 } },
    Candidate::Liblz4,
];

/// One pass over all pages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pass {
    pub(crate) compress: Duration,
    pub(crate) decompress: Duration,
    /// Bytes that the pages became; those of batches that were given up as they are.
    pub(crate) out: usize,
}

impl Candidate {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Zlib { name, .. } | Self::Own { name, .. } => name,
            Self::Liblz4 => "liblz4 itself",
        }
    }

    /// Whether it takes minutes where the others take seconds.
    pub(crate) fn is_slow(self) -> bool {
        matches!(self, Self::Zlib { level, .. } if level > 1)
    }

    /// Compresses all of `pages` and decompresses them again, and checks that they come back.
    pub(crate) fn pass(self, pages: &[u8]) -> anyhow::Result<Pass> {
        match self {
            Self::Zlib { level, block, .. } => zlib(level, block, pages),
            Self::Own { codec, .. } => own(codec, pages),
            Self::Liblz4 => liblz4(pages),
        }
        .with_context(|| format!("{} failed", self.name()))
    }
}

/// The processor time of this thread.
fn now() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

fn check(batch: &[u8], back: &[u8]) -> anyhow::Result<()> {
    anyhow::ensure!(batch == back, "pages came back different");
    Ok(())
}

fn own(codec: Codec, pages: &[u8]) -> anyhow::Result<Pass> {
    let (mut compressor, mut decompressor) = (Compressor::new(), Decompressor::new());
    let (mut output, mut back) = (vec![0; BATCH], vec![0; BATCH]);
    let mut pass = Pass::default();
    let mut slices: Vec<&[u8]> = Vec::with_capacity(BATCH / PAGE);
    for batch in pages.chunks(BATCH) {
        slices.clear();
        slices.extend(batch.chunks(PAGE));
        let start = now();
        let made = compressor.compress(codec, &slices, &mut output[..worth(batch.len())])?;
        pass.compress += now() - start;
        pass.out += made.unwrap_or(batch.len());
        if let Some(made) = made {
            let back = &mut back[..batch.len()];
            let start = now();
            decompressor.decompress(codec.id(), &output[..made], back)?;
            pass.decompress += now() - start;
            check(batch, back)?;
        }
    }
    Ok(pass)
}

fn liblz4(pages: &[u8]) -> anyhow::Result<Pass> {
    let room = lzzzz::lz4::max_compressed_size(BLOCK_LEN);
    let (mut output, mut back) = (vec![0; BATCH / BLOCK_LEN * room], vec![0; BATCH]);
    let mut lengths = [0; BATCH / BLOCK_LEN];
    let mut pass = Pass::default();
    for batch in pages.chunks(BATCH) {
        let start = now();
        for ((block, output), length) in
            batch.chunks(BLOCK_LEN).zip(output.chunks_mut(room)).zip(&mut lengths)
        {
            *length = lzzzz::lz4::compress(block, output, 1)?;
        }
        pass.compress += now() - start;
        let back = &mut back[..batch.len()];
        let start = now();
        for ((block, output), length) in
            back.chunks_mut(BLOCK_LEN).zip(output.chunks(room)).zip(&lengths)
        {
            lzzzz::lz4::decompress(&output[..*length], block)?;
        }
        pass.decompress += now() - start;
        pass.out += lengths[..batch.len().div_ceil(BLOCK_LEN)].iter().sum::<usize>();
        check(batch, back)?;
    }
    Ok(pass)
}

fn zlib(level: u32, block: usize, pages: &[u8]) -> anyhow::Result<Pass> {
    use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
    let mut compressor = Compress::new(Compression::new(level), true);
    let mut decompressor = Decompress::new(true);
    let (mut output, mut back) = (vec![0; 2 * BLOCK_LEN], vec![0; BLOCK_LEN]);
    let mut pass = Pass::default();
    for block in pages.chunks(block) {
        let start = now();
        compressor.reset();
        let status = compressor.compress(block, &mut output, FlushCompress::Finish)?;
        pass.compress += now() - start;
        anyhow::ensure!(status == Status::StreamEnd, "a block became larger than twice its size");
        let made = compressor.total_out() as usize;
        pass.out += made.min(block.len());
        let back = &mut back[..block.len()];
        let start = now();
        decompressor.reset(true);
        decompressor.decompress(&output[..made], back, FlushDecompress::Finish)?;
        pass.decompress += now() - start;
        check(block, back)?;
    }
    Ok(pass)
}
