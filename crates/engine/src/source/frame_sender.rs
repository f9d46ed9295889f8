//! The sending end of a channel: builds frames of pages, compresses them or not, and puts them on
//! the link, limited and counted.
//!
//! Invariants: a frame holds pages of one RAM block or disk, in the order in which they were put
//! in; and a barrier comes behind all of them. Frames are numbered from 1, pages and barriers
//! alike, as the destination counts those that it has placed.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use godwit_codec::{Batch, Chooser, Codec, Compressor, SAMPLE_LEN, Sampled, Step, worth};
use godwit_units::{ByteCount, PageCount, PageIndex, PageRun, TypedRate};
use godwit_wire::{Added, Content, FRAME_PAGES, HEADER_LEN, PageFrameBuilder, RUN_LEN, RUNS_LIMIT};

use super::live::Live;
use super::thread_clock::{ThreadClock, processor_time};
use super::wires::Wires;
use crate::EngineError;
use crate::address::Stream;
use crate::compression::{Codecs, Compression};
use crate::handle::Own;
use crate::limiter::Limiter;
use crate::link::{barrier, link_error};

/// What a channel did in a round.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundStatistics {
    pub(super) data: PageCount,
    pub(super) zero: PageCount,
    /// Of these, pages that the guest said are free.
    pub(super) hinted: PageCount,
    /// Pages that were written and hold what was sent before.
    pub(super) unchanged: PageCount,
    /// Bytes of the data pages.
    pub(super) raw: ByteCount,
    pub(super) sent: ByteCount,
}

/// What the channel of a disk did in a round.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DiskStatistics {
    pub(super) statistics: RoundStatistics,
    /// How long it waited for the storage that it reads.
    pub(super) storage: Duration,
    /// The pass was cut short.
    pub(super) cut: bool,
    /// Another pass follows in this round.
    pub(super) goes_on: bool,
}

/// What all channels of a migration share on their way to the link.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) limiter: Arc<Limiter>,
    pub(super) live: Arc<Live>,
    /// Bytes on the wire, by all channels.
    pub(super) sent: Arc<AtomicU64>,
    /// What the destination takes.
    pub(super) codecs: Codecs,
    /// The destination is on this host.
    pub(super) same_host: bool,
}

impl Link {
    /// Puts what can be set of it in force; whether compression is another now.
    pub(super) fn set(&self, own: &Own) -> bool {
        self.limiter.set(own.max_bandwidth.map(TypedRate::rate));
        let changes = own.compression != self.live.compression();
        if changes {
            self.live.set_compression(own.compression);
        }
        changes
    }

    /// The same link for pages that somebody waits for: as they are, and without a limit.
    pub(super) fn urgent(&self) -> Self {
        Self {
            limiter: Arc::new(Limiter::new(None, 1)),
            live: Arc::new(Live::new(Compression::Fixed(Codec::None))),
            sent: Arc::clone(&self.sent),
            codecs: Codecs::NONE,
            same_host: self.same_host,
        }
    }
}

/// In which frames something went, at the latest: of each channel whose connection was used, the
/// number of the last one.
pub(super) type Carried = Vec<(usize, u64)>;

/// Pages of a frame where frames go over any connection, at the most: 256 KiB, so that what is put
/// on a slow one is soon sent.
const SHARED_FRAME: usize = 64;

/// The sending end of a channel.
pub(super) struct FrameSender {
    /// The connections, and which of them is its own.
    wires: Arc<Wires>,
    number: usize,
    link: Link,
    builder: PageFrameBuilder,
    /// The RAM block or disk that the frame being built is for, and the segment of its first page,
    /// by which the codec is chosen.
    block: u32,
    segment: usize,
    compressor: Compressor,
    chooser: Chooser,
    /// A frame with compressed pages.
    other: Vec<u8>,
    /// Runs from frame to frame.
    clock: ThreadClock,
    /// Runs while there is a budget of processor time.
    work: ThreadClock,
    statistics: RoundStatistics,
    /// Where frames go over any connection: what was sent since this was taken; and whether they do
    /// now.
    carried: Carried,
    spreads: bool,
}

impl FrameSender {
    /// A frame sender for `stream`, of a RAM or disk with `segments` segments.
    pub(super) fn new(stream: Stream, link: Link, segments: usize) -> Self {
        Self::over((Arc::new(Wires::own([stream])), 0), link, segments)
    }

    /// That of channel `number` of those that have the connections `wires`.
    pub(super) fn over((wires, number): (Arc<Wires>, usize), link: Link, segments: usize) -> Self {
        let mut chooser = Chooser::new(segments, &link.codecs.list());
        chooser.round_trip(wires.of(number).stream.connected_in());
        chooser.same_host(link.same_host);
        Self {
            wires,
            number,
            link,
            builder: PageFrameBuilder::new(),
            block: 0,
            segment: 0,
            compressor: Compressor::new(),
            chooser,
            other: vec![0; HEADER_LEN + worth(FRAME_PAGES << 12) + RUNS_LIMIT * RUN_LEN],
            clock: ThreadClock::default(),
            work: ThreadClock::default(),
            statistics: RoundStatistics::default(),
            carried: Carried::new(),
            spreads: false,
        }
    }

    /// The number of its channel.
    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Whether from here on frames may go over any connection, where there are several: that is, no
    /// page is put into two of them.
    pub(super) fn spread(&mut self, spreads: bool) {
        self.spreads = spreads;
    }

    /// In which frames there is anything that was put in since this was last asked. Where frames go
    /// over any connection, what is being built is sent: over which is known only then.
    pub(super) fn carried(&mut self) -> Result<Carried, EngineError> {
        if self.wires.are_shared() {
            self.flush()?;
            return Ok(std::mem::take(&mut self.carried));
        }
        let frames = self.wires.of(self.number).frames;
        Ok(vec![(self.number, frames + u64::from(!self.builder.is_empty()))])
    }

    /// The number of the frame that is being built, where it goes over the channel's own
    /// connection.
    pub(super) fn building(&self) -> u64 {
        self.wires.of(self.number).frames + 1
    }

    /// Whether frames go over any connection, so that a round is over only when all channels are
    /// done with it.
    pub(super) fn shares_connections(&self) -> bool {
        self.wires.are_shared()
    }

    /// Whether nothing is to be waited for any more.
    pub(super) fn is_stopped(&self) -> bool {
        self.link.limiter.is_stopped()
    }

    /// A round begins: what was before it is no measure of the link. A frame that is being built
    /// stays as it is.
    pub(super) fn begin(&mut self) {
        self.statistics = RoundStatistics::default();
        self.clock.begin();
    }

    /// What was done since the round began.
    pub(super) fn statistics(&self) -> RoundStatistics {
        self.statistics
    }

    /// Makes sure that the frame being built is for `block` and has room for `pages` more, the
    /// first of which belongs to `segment`. Returns what had to be sent for that.
    pub(super) fn frame_for(
        &mut self,
        block: u32,
        segment: usize,
        pages: usize,
    ) -> Result<ByteCount, EngineError> {
        let mut sent = ByteCount::ZERO;
        if self.block != block || self.room() < pages {
            sent = self.flush()?;
        }
        if self.builder.is_empty() {
            (self.block, self.segment) = (block, segment);
        }
        Ok(sent)
    }

    /// How many more pages the frame being built has room for.
    pub(super) fn room(&self) -> usize {
        let room = self.builder.room();
        if self.wires.are_shared() { room.saturating_sub(FRAME_PAGES - SHARED_FRAME) } else { room }
    }

    /// Names the pages of `run` as zero.
    pub(super) fn zero(&mut self, run: PageRun) {
        self.builder.zero(run);
        self.statistics.zero += run.count;
    }

    /// Of the pages named as zero, so many were named because the guest said that they are free.
    pub(super) fn count_hinted(&mut self, pages: PageCount) {
        self.statistics.hinted += pages;
    }

    /// Takes in the pages of `run` ([`PageFrameBuilder::add`]); those that `judge` leaves out hold
    /// what was sent before.
    pub(super) fn add<E>(
        &mut self,
        run: PageRun,
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
        judge: impl FnMut(PageIndex, &[u8]) -> Option<Content>,
    ) -> Result<(), E> {
        let Added { data, zero } = self.builder.add(run, read, judge)?;
        self.statistics.data += data;
        self.statistics.zero += zero;
        self.statistics.unchanged += run.count - data - zero;
        Ok(())
    }

    /// Sends the frame being built, if there is anything in it; returns how many bytes that took.
    pub(super) fn flush(&mut self) -> Result<ByteCount, EngineError> {
        if self.builder.is_empty() {
            return Ok(ByteCount::ZERO);
        }
        let segment = self.segment;
        let raw = self.builder.data().len();
        self.chooser.limit(self.link.limiter.share());
        self.chooser.idle(self.link.live.idle());
        self.chooser.budget(self.link.limiter.work_share());
        let mut codec = match self.link.live.compression() {
            Compression::Auto if raw > 0 => self.choose(segment),
            Compression::Auto => Codec::None,
            Compression::Fixed(codec) => codec,
        };
        if !self.link.codecs.contains(codec.id()) {
            codec = Codec::None;
        }
        let began = processor_time();
        let made = if codec == Codec::None || raw == 0 {
            None
        } else {
            let room = &mut self.other[HEADER_LEN..HEADER_LEN + worth(raw)];
            self.compressor.compress(codec, &[self.builder.data()], room)?
        };
        let took = processor_time().saturating_sub(began);
        let compress = if codec == Codec::None { Duration::ZERO } else { took };
        let frame = match made {
            Some(length) => {
                self.builder.finish_in(&mut self.other, length, self.block, codec.id() as u8)
            }
            None => self.builder.finish(self.block),
        };
        let length = frame.len();
        let mut rest = frame;
        let limiter = &self.link.limiter;
        let next = |rest: &[u8]| {
            let piece = limiter.piece().min(rest.len());
            limiter.take(piece);
            piece
        };
        let mut piece = next(rest);
        let (number, mut wire) = match self.spreads {
            true => self.wires.next(self.number, || limiter.is_stopped()),
            false => (self.number, self.wires.of(self.number)),
        };
        while !rest.is_empty() {
            let (now, after) = rest.split_at(piece);
            let sent = put(&mut wire.stream, now, &mut self.statistics, &self.link.sent);
            if sent.is_err() {
                // Nobody is to put a frame behind half of one.
                wire.stream.shut_down();
            }
            sent?;
            rest = after;
            piece = if rest.is_empty() { 0 } else { next(rest) };
        }
        wire.frames += 1;
        if self.wires.are_shared() {
            self.carried.retain(|(of, _)| *of != number);
            self.carried.push((number, wire.frames));
        }
        drop(wire);
        self.statistics.raw += ByteCount(raw as u64);
        let spent = self.clock.lap();
        tracing::trace!(connection = number, segment, ?codec, raw, wire = length, ?spent, "frame");
        self.chooser.queued(spent.queued, spent.cpu);
        self.chooser.batch(&Batch {
            segment,
            codec,
            raw,
            wire: length,
            compress,
            elapsed: spent.elapsed,
            cpu: spent.cpu,
        });
        self.pace();
        Ok(ByteCount(length as u64))
    }

    /// Counts what the thread has worked since it was counted last, also for what was not sent, and
    /// waits until that is within the budget, if there is one.
    pub(super) fn pace(&mut self) {
        if self.link.limiter.work_share().is_none() {
            self.work = ThreadClock::default();
        } else if self.link.limiter.worked(self.work.lap().cpu) {
            // A wait that was ordered is none for the link.
            self.clock.begin();
        }
    }

    /// Sends the barrier that ends `round`, and all rounds if it is the `last` one.
    pub(super) fn barrier(&mut self, round: u32, last: bool) -> Result<(), EngineError> {
        let mut wire = self.wires.of(self.number);
        put(&mut wire.stream, &barrier(round, last), &mut self.statistics, &self.link.sent)?;
        wire.frames += 1;
        Ok(())
    }

    /// The codec for the pages in the frame being built, after what samples are asked for.
    fn choose(&mut self, segment: usize) -> Codec {
        loop {
            let codec = match self.chooser.step(segment) {
                Step::Sample(codec) => codec,
                Step::Send(codec) => return codec,
            };
            let data = self.builder.data();
            let data = &data[..data.len().min(SAMPLE_LEN)];
            let room = &mut self.other[HEADER_LEN..HEADER_LEN + worth(data.len())];
            let began = processor_time();
            // An error shows again, and is told, when pages are compressed with it.
            let made = self.compressor.compress(codec, &[data], room).unwrap_or_default();
            let took = processor_time().saturating_sub(began);
            self.chooser.sampled(&Sampled { segment, codec, raw: data.len(), made, took });
        }
    }
}

/// Sends and counts `bytes`.
fn put(
    stream: &mut Stream,
    bytes: &[u8],
    statistics: &mut RoundStatistics,
    all: &AtomicU64,
) -> Result<(), EngineError> {
    stream.write_all(bytes).map_err(link_error("destination"))?;
    statistics.sent += ByteCount(bytes.len() as u64);
    all.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    Ok(())
}
