//! A data channel at the destination: one thread that reads frames and places their pages, in order.
//!
//! Invariant: a segment's pages come over its own channel only, which is checked; and no byte is placed before the
//! checksum of its frame was found right.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use godwit_codec::{CodecId, Decompressor};
use godwit_memory::{RamBlock, channel_of};
use godwit_units::{PageIndex, PageRun};
use godwit_wire::{Content, FRAME_PAGES, FrameKind, HEADER_LEN, PageFrame};

use super::barriers::Barriers;
use crate::EngineError;
use crate::link::{FrameReader, wire_error};

const PEER: &str = "source";

pub(super) struct Channel {
    pub(super) number: usize,
    pub(super) channels: usize,
    pub(super) reader: FrameReader,
    pub(super) blocks: Arc<Vec<RamBlock>>,
    /// The source's number of a block -> ours.
    pub(super) order: Arc<Vec<usize>>,
    pub(super) received: Arc<AtomicU64>,
    pub(super) barriers: Arc<Barriers>,
    pub(super) decompressor: Decompressor,
    /// The bytes of the pages of a compressed frame.
    pub(super) pages: Vec<u8>,
    /// A fault made up: frames are placed so late.
    pub(super) late: Duration,
}

impl Channel {
    /// Places pages until the connection ends.
    pub(super) fn run(mut self) {
        loop {
            match self.frame() {
                Ok(None) => {}
                Ok(Some(round)) => self.barriers.reached(self.number, round),
                Err(error) => return self.barriers.failed(error),
            }
        }
    }

    /// Takes one frame; returns the round that it ends, if it is a barrier.
    fn frame(&mut self) -> Result<Option<u64>, EngineError> {
        let (header, payload) = self.reader.frame()?;
        self.received.fetch_add((HEADER_LEN + header.length) as u64, Ordering::Relaxed);
        let broke = |what: String| EngineError::Protocol { peer: PEER, what };
        match header.kind {
            FrameKind::Barrier if header.length == 0 => return Ok(Some(header.aux)),
            FrameKind::Pages => {}
            other => return Err(broke(format!("it sent {other:?} on a data channel"))),
        }
        let frame = PageFrame::decode(&header, payload).map_err(wire_error(PEER))?;
        let own = self.order.get(frame.block as usize);
        let own = *own.ok_or_else(|| {
            broke(format!("it sent pages of RAM block {}, which it did not offer", frame.block))
        })?;
        let block = &self.blocks[own];
        if !self.late.is_zero() {
            std::thread::sleep(self.late);
        }
        let raw = if frame.codec == 0 {
            frame.data
        } else {
            let corrupt = |source| EngineError::Corrupt {
                block: block.name().to_owned(),
                page: frame.first_page(),
                source,
            };
            let codec = CodecId::from_wire(frame.codec).map_err(corrupt)?;
            self.pages.resize(FRAME_PAGES << 12, 0);
            let pages = &mut self.pages[..frame.raw_len];
            self.decompressor.decompress(codec, frame.data, pages).map_err(corrupt)?;
            pages
        };
        for (wire_run, bytes) in frame.runs(raw) {
            let run = wire_run.run;
            let source_block = frame.block as usize;
            if !belongs(source_block, run, self.number, self.channels) {
                return Err(broke(format!(
                    "it sent {} from {} over channel {}",
                    run.count, run.start, self.number
                )));
            }
            match wire_run.content {
                Content::Data => block.write(run.start, bytes)?,
                Content::Zero => block.zero(run)?,
            }
        }
        Ok(None)
    }
}

/// Whether all of `run` lies in segments of channel `number`. A run is joined over segments only where neighbours
/// share a channel, that is where there is but one.
fn belongs(block: usize, run: PageRun, number: usize, channels: usize) -> bool {
    let last = PageIndex(run.end().0 - 1);
    channels == 1
        || (channel_of(block, run.start, channels) == number
            && channel_of(block, last, channels) == number
            && run.count.0 <= godwit_memory::SEGMENT_PAGES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_must_lie_in_segments_of_its_channel() {
        let pages = godwit_memory::SEGMENT_PAGES;
        assert!(belongs(0, PageRun::new(0, pages), 0, 2));
        assert!(!belongs(0, PageRun::new(0, pages), 1, 2));
        assert!(!belongs(0, PageRun::new(pages - 1, 2), 0, 2));
        assert!(!belongs(0, PageRun::new(0, 2 * pages + 1), 0, 2));
        assert!(belongs(1, PageRun::new(0, 1), 1, 2));
        assert!(belongs(0, PageRun::new(pages - 1, 2), 0, 1));
    }
}
