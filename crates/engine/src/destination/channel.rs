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
    /// Another: pages are taken over any channel.
    pub(super) any_channel: bool,
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
            if !self.any_channel && !belongs(source_block, run, self.number, self.channels) {
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
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use godwit_units::{PAGE_SIZE, PageCount};
    use godwit_wire::PageFrameBuilder;

    use super::*;
    use crate::address::Stream;

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

    fn block() -> Arc<Vec<RamBlock>> {
        Arc::new(vec![RamBlock::anonymous("ram", PageCount(4)).unwrap()])
    }

    /// Channel `number` of `channels`, which reads from `stream`.
    fn channel(
        number: usize,
        channels: usize,
        stream: UnixStream,
        blocks: &Arc<Vec<RamBlock>>,
        barriers: &Arc<Barriers>,
    ) -> Channel {
        Channel {
            number,
            channels,
            reader: FrameReader::new(Stream::Unix(stream), PEER),
            blocks: Arc::clone(blocks),
            order: Arc::new(vec![0]),
            received: Arc::default(),
            barriers: Arc::clone(barriers),
            decompressor: Decompressor::new(),
            pages: Vec::new(),
            late: Duration::ZERO,
            any_channel: false,
        }
    }

    /// Sends page 1, which belongs to channel 0, twice: first the old version over `first`, then the new one over `second`.
    /// Channel 0 is late. Returns what the page holds in the end, and the error of a channel, if there was one.
    fn race(first: usize, second: usize, any_channel: bool) -> (u8, Option<EngineError>) {
        let blocks = block();
        let barriers = Arc::new(Barriers::new(2));
        let mut sending = Vec::new();
        let mut threads = Vec::new();
        for number in 0..2 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            sending.push(ours);
            let mut channel = channel(number, 2, theirs, &blocks, &barriers);
            channel.late = Duration::from_millis(if number == 0 { 400 } else { 0 });
            channel.any_channel = any_channel;
            threads.push(std::thread::spawn(move || channel.run()));
        }
        let mut builder = PageFrameBuilder::new();
        for (channel, version) in [(first, 1), (second, 2)] {
            let fill = |bytes: &mut [u8]| {
                bytes.fill(version);
                Ok::<(), ()>(())
            };
            builder.add(PageRun::new(1, 1), fill, |_, _| Some(Content::Data)).unwrap();
            sending[channel].write_all(builder.finish(0)).unwrap();
        }
        // The channels end when there is nothing more to read; that is an error, too, behind any other.
        drop(sending);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let mut bytes = [0; PAGE_SIZE as usize];
        blocks[0].read(PageIndex(1), &mut bytes).unwrap();
        let failure = barriers.failure().filter(|error| matches!(error, EngineError::Protocol { .. }));
        (bytes[0], failure)
    }

    #[test]
    fn an_old_page_lands_on_a_newer_one_only_where_the_mapping_is_broken() {
        // As it is: one channel, in order, however late it is.
        let (version, failure) = race(0, 0, false);
        assert!(failure.is_none());
        assert_eq!(version, 2);
        // The newer one comes over another channel: it is refused, and the migration with it.
        let (_, failure) = race(0, 1, false);
        assert!(failure.unwrap().to_string().contains("over channel 1"));
        // With the check broken on purpose the old version stays.
        let (version, failure) = race(0, 1, true);
        assert!(failure.is_none());
        assert_eq!(version, 1);
    }

    #[test]
    fn a_corrupt_compressed_frame_names_block_and_page() {
        let blocks = block();
        let barriers = Arc::new(Barriers::new(1));
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let channel = channel(0, 1, theirs, &blocks, &barriers);
        let thread = std::thread::spawn(move || channel.run());
        let mut builder = PageFrameBuilder::new();
        builder.zero(PageRun::new(2, 1));
        builder
            .add(
                PageRun::new(3, 1),
                |bytes| {
                    bytes.fill(7);
                    Ok::<(), ()>(())
                },
                |_, _| Some(Content::Data),
            )
            .unwrap();
        // The frame's checksum is right; what the codec finds is not what it makes.
        let mut other = vec![0x55; HEADER_LEN + 40 + 512 * 16];
        ours.write_all(builder.finish_in(&mut other, 40, 0, CodecId::Lz4 as u8)).unwrap();
        thread.join().unwrap();
        let error = barriers.failure().unwrap().to_string();
        assert!(error.contains("RAM block 'ram'") && error.contains("page 2"), "{error}");
        let mut bytes = [1; PAGE_SIZE as usize];
        blocks[0].read(PageIndex(3), &mut bytes).unwrap();
        assert_eq!(bytes, [0; PAGE_SIZE as usize], "nothing was placed");
    }
}
