//! Frames on their way from the builder to the link: compressed or not, limited, counted.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use godwit_codec::{Batch, Chooser, Codec, Compressor, Plan, SAMPLE_LEN, Sampled, worth};
use godwit_units::ByteCount;
use godwit_wire::{FRAME_PAGES, HEADER_LEN, PageFrameBuilder, RUN_LEN, RUNS_LIMIT};

use super::channel::{Counters, RoundStatistics};
use super::live::Live;
use super::thread_clock::ThreadClock;
use crate::EngineError;
use crate::address::Stream;
use crate::compression::{Codecs, Compression};
use crate::limiter::Limiter;
use crate::link::link_error;

/// The sending end of a channel.
pub(super) struct FrameSender {
    stream: Stream,
    limiter: Arc<Limiter>,
    counters: Arc<Counters>,
    live: Arc<Live>,
    codecs: Codecs,
    compressor: Compressor,
    chooser: Chooser,
    /// A frame with compressed pages.
    other: Vec<u8>,
    /// Runs from frame to frame.
    clock: ThreadClock,
}

impl FrameSender {
    /// A frame sender for `stream`, of a VM with `segments` segments, to a destination that takes
    /// `codecs`.
    pub(super) fn new(
        stream: Stream,
        limiter: Arc<Limiter>,
        counters: Arc<Counters>,
        live: Arc<Live>,
        segments: usize,
        codecs: Codecs,
    ) -> Self {
        Self {
            stream,
            limiter,
            counters,
            live,
            codecs,
            compressor: Compressor::new(),
            chooser: Chooser::new(segments, &codecs.list()),
            other: vec![0; HEADER_LEN + worth(FRAME_PAGES << 12) + RUNS_LIMIT * RUN_LEN],
            clock: ThreadClock::default(),
        }
    }

    /// A round begins: what was before it is no measure of the link.
    pub(super) fn begin(&mut self) {
        self.clock.begin();
    }

    /// Sends what `builder` holds, pages of RAM block `block` of which the first belongs to
    /// `segment`.
    pub(super) fn send(
        &mut self,
        builder: &mut PageFrameBuilder,
        block: u32,
        segment: usize,
        statistics: &mut RoundStatistics,
    ) -> Result<(), EngineError> {
        let raw = builder.data().len();
        self.chooser.limit(self.limiter.share());
        self.chooser.idle(self.live.idle());
        let mut codec = match self.live.compression() {
            Compression::Auto if raw > 0 => self.choose(builder, segment),
            Compression::Auto => Codec::None,
            Compression::Fixed(codec) => codec,
        };
        if !self.codecs.contains(codec.id()) {
            codec = Codec::None;
        }
        let began = Instant::now();
        let made = if codec == Codec::None || raw == 0 {
            None
        } else {
            let room = &mut self.other[HEADER_LEN..HEADER_LEN + worth(raw)];
            self.compressor.compress(codec, &[builder.data()], room)?
        };
        let compress = if codec == Codec::None { Duration::ZERO } else { began.elapsed() };
        let frame = match made {
            Some(length) => builder.finish_in(&mut self.other, length, block, codec.id() as u8),
            None => builder.finish(block),
        };
        let length = frame.len();
        let mut rest = frame;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(self.limiter.piece().min(rest.len()));
            self.limiter.take(piece.len());
            put(&mut self.stream, piece, statistics, &self.counters)?;
            rest = after;
        }
        statistics.raw += ByteCount(raw as u64);
        let spent = self.clock.lap();
        self.chooser.batch(&Batch {
            segment,
            codec,
            raw,
            wire: length,
            compress,
            elapsed: spent.elapsed,
            cpu: spent.cpu,
        });
        Ok(())
    }

    /// Sends what is no page frame.
    pub(super) fn put(
        &mut self,
        bytes: &[u8],
        statistics: &mut RoundStatistics,
    ) -> Result<(), EngineError> {
        put(&mut self.stream, bytes, statistics, &self.counters)
    }

    /// The codec for the pages in `builder`, after what samples are asked for.
    fn choose(&mut self, builder: &PageFrameBuilder, segment: usize) -> Codec {
        loop {
            let codec = match self.chooser.plan(segment) {
                Plan::Sample(codec) => codec,
                Plan::Send(codec) => return codec,
            };
            let data = builder.data();
            let data = &data[..data.len().min(SAMPLE_LEN)];
            let room = &mut self.other[HEADER_LEN..HEADER_LEN + worth(data.len())];
            let began = Instant::now();
            // An error shows again, and is told, when pages are compressed with it.
            let made = self.compressor.compress(codec, &[data], room).unwrap_or_default();
            let took = began.elapsed();
            self.chooser.sampled(&Sampled { segment, codec, raw: data.len(), made, took });
        }
    }
}

/// Sends and counts `bytes`.
fn put(
    stream: &mut Stream,
    bytes: &[u8],
    statistics: &mut RoundStatistics,
    counters: &Counters,
) -> Result<(), EngineError> {
    stream.write_all(bytes).map_err(link_error("destination"))?;
    statistics.sent += ByteCount(bytes.len() as u64);
    counters.sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    Ok(())
}
