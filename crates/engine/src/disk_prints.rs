//! What the disks at the destination hold, as a source that was started anew learns it: a
//! fingerprint of each piece of 64 KiB.
//!
//! Invariant: a piece counts as held only if all of its bytes were read at the destination behind
//! the last write there, and nothing was sent of it since. So it is left out of the pass over the
//! whole disk alone, which comes before anything else is sent.

use godwit_disk::{Content, DiskReader};
use godwit_fingerprints::Key;
use godwit_memory::SEGMENT_PAGES;
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};

use crate::EngineError;

/// Pages of a piece. Its 8 bytes make 128 MiB for a disk of 1 TiB, which both sides can afford.
const PIECE_PAGES: u64 = 16;
/// Pages that are read at once, at the most ([`DiskReader::read`]).
pub(crate) const READ_PAGES: u64 = 256;
/// The word for a piece of which it is not known what it holds: no fingerprint is 0.
const UNKNOWN: u64 = 0;

/// Reads all of a disk of `pages` by `reader`, and calls `tell` with the fingerprints of the pieces
/// of each segment, in order; with none for a segment of zeros. Without a reader nothing is known.
///
/// # Errors
/// When the disk cannot be read, or `tell` fails.
pub(crate) fn tell(
    reader: Option<Box<dyn DiskReader>>,
    pages: PageCount,
    key: &Key,
    mut tell: impl FnMut(u32, Vec<u64>) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let segments = pages.0.div_ceil(SEGMENT_PAGES);
    let Some(mut reader) = reader else {
        for segment in 0..segments {
            tell(segment as u32, vec![UNKNOWN; pieces(segment_run(segment, pages)) as usize])?;
        }
        return Ok(());
    };
    let mut bytes = Vec::new();
    for segment in 0..segments {
        let run = segment_run(segment, pages);
        bytes.clear();
        bytes.resize(run.count.bytes().0 as usize, 0);
        let mut has_data = false;
        for extent in reader.extents(run).map_err(EngineError::Disk)? {
            if extent.content == Content::Zero {
                continue;
            }
            has_data = true;
            for part in parts(extent.run, READ_PAGES) {
                let start = ((part.start.0 - run.start.0) * PAGE_SIZE) as usize;
                let bytes = &mut bytes[start..start + part.count.bytes().0 as usize];
                reader.read(&[part], bytes).map_err(EngineError::Disk)?;
            }
        }
        let prints = bytes.chunks((PIECE_PAGES * PAGE_SIZE) as usize).filter(|_| has_data);
        tell(segment as u32, prints.map(|piece| key.page(piece).word()).collect())?;
    }
    Ok(())
}

/// `run` in parts of at most so many pages.
pub(crate) fn parts(run: PageRun, most: u64) -> impl Iterator<Item = PageRun> {
    let (start, end) = (run.start.0, run.end().0);
    (start..end).step_by(most as usize).map(move |at| PageRun::new(at, most.min(end - at)))
}

/// `run` in parts that lie within a segment each.
pub(crate) fn within_segments(run: PageRun) -> impl Iterator<Item = PageRun> {
    let border = run.start.0.next_multiple_of(SEGMENT_PAGES).min(run.end().0);
    let first = PageRun::new(run.start.0, border - run.start.0);
    let rest = PageRun::new(border, run.end().0 - border);
    parts(first, SEGMENT_PAGES).chain(parts(rest, SEGMENT_PAGES))
}

fn segment_run(segment: u64, pages: PageCount) -> PageRun {
    let start = segment * SEGMENT_PAGES;
    PageRun::new(start, SEGMENT_PAGES.min(pages.0.saturating_sub(start)))
}

fn pieces(run: PageRun) -> u64 {
    run.count.0.div_ceil(PIECE_PAGES)
}

/// What a disk at the destination holds, as the source was told.
#[derive(Debug)]
pub(crate) struct Held {
    pages: PageCount,
    key: Key,
    /// The fingerprints of each segment's pieces; none: zeros.
    segments: Vec<Box<[u64]>>,
}

/// Pieces of a run, at most [`READ_PAGES`] long, that the destination holds as they are here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Same {
    first: u64,
    pieces: u32,
}

impl Same {
    /// Whether `page` is in one of them.
    pub(crate) fn has(self, page: PageIndex) -> bool {
        let piece = (page.0 / PIECE_PAGES).checked_sub(self.first);
        piece.is_some_and(|piece| piece < 32 && self.pieces >> piece & 1 == 1)
    }
}

impl Held {
    /// Nothing of a disk of `pages` yet.
    pub(crate) fn new(pages: PageCount, key: Key) -> Self {
        Self { pages, key, segments: Vec::new() }
    }

    /// Segments that were not told yet.
    pub(crate) fn is_incomplete(&self) -> bool {
        (self.segments.len() as u64) < self.pages.0.div_ceil(SEGMENT_PAGES)
    }

    /// The number of the next segment.
    pub(crate) fn next_segment(&self) -> u32 {
        self.segments.len() as u32
    }

    /// Takes in the fingerprints of the next segment; false where these cannot be of it.
    #[must_use]
    pub(crate) fn add(&mut self, prints: Vec<u64>) -> bool {
        let run = segment_run(self.segments.len() as u64, self.pages);
        let fits = prints.is_empty() || prints.len() as u64 == pieces(run);
        self.segments.push(prints.into_boxed_slice());
        fits
    }

    /// Which pieces of `run`, whose bytes are these, need not be sent.
    pub(crate) fn same(&self, run: PageRun, bytes: &[u8]) -> Same {
        let first = run.start.0.div_ceil(PIECE_PAGES);
        let mut same = Same { first, pieces: 0 };
        for index in 0..32 {
            let start = (first + index) * PIECE_PAGES;
            let end = (start + PIECE_PAGES).min(self.pages.0);
            if start >= end || end > run.end().0 {
                break;
            }
            let from = ((start - run.start.0) * PAGE_SIZE) as usize;
            let to = ((end - run.start.0) * PAGE_SIZE) as usize;
            let piece = bytes.get(from..to).unwrap_or_default();
            same.pieces |= u32::from(self.holds(start, piece)) << index;
        }
        same
    }

    /// Whether the piece that begins with the page `start` holds `bytes`.
    fn holds(&self, start: u64, bytes: &[u8]) -> bool {
        match self.segments.get((start / SEGMENT_PAGES) as usize) {
            None => false,
            Some(prints) if prints.is_empty() => godwit_codec::is_zero(bytes),
            Some(prints) => {
                let index = start % SEGMENT_PAGES / PIECE_PAGES;
                prints.get(index as usize) == Some(&self.key.page(bytes).word())
            }
        }
    }
}

#[cfg(test)]
mod tests;
