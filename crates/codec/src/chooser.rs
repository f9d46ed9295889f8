//! `--compression auto`: which codec the next batch of a segment is sent with.
//!
//! One [`Chooser`] for each channel thread. For each codec `c` it estimates what a byte of pages
//! costs in time:
//!
//! ```text
//!  time(c) = max( (compress(c) + other(c)) × queue,  ratio(c) / (link × worth(c)) )
//! ```
//!
//! *Compress* is processor time by codec and ratio, *other* the rest of the thread's (reading,
//! sending), *queue* how many times as long that takes because the thread has to wait for a
//! processor, *ratio* belongs to the segment, *link* is what the connection really drained while
//! the thread waited for it. *Worth* corrects the link for a codec under which it drains less: then
//! it is the receiver that limits, and fewer bytes do not help. The smallest time wins; where no
//! processor is idle, processor time counts twice.
//!
//! Ratios are learned from *samples*: [`SAMPLE_LEN`] bytes of a batch are compressed and thrown
//! away, but only if the codec could win with a ratio as good as may be hoped for, and before the
//! batch itself is sent: frames are large, and the first of a segment would be a sixteenth of it.
//! Each segment remembers its ratios. Samples of a segment that stays as it is become rare. A
//! segment that does not compress is thus bypassed at next to no cost.
//!
//! The link is learned from raw pages at the start, and from every window in which the thread
//! waited. Unless there is a limit, which is believed until seen otherwise, or a round trip so long
//! that the connection begins slowly whatever the link is: then pages are compressed until the
//! thread was seen not to wait. Where both sides are on one host nothing is compressed, but under a
//! limit.
//!
//! While the thread is busy compressing, the link could be faster than anyone sees; so now and then
//! a few MiB are sent raw. And what looked like a slow receiver may have been another channel that
//! had more of the link; so codecs that were worth less are tried again.

mod cost;
mod link;

use std::time::Duration;

use self::cost::{CANDIDATES, COUNT, Costs};
use self::link::Link;
use crate::{Codec, CodecId};

/// Bytes of a batch that a sample compresses (or all of the batch, where it is smaller).
pub const SAMPLE_LEN: usize = 16 << 10;
/// Batches of a segment between two looks at whether it still compresses as it did; doubled each
/// time that it does.
const FIRST_PERIOD: u16 = 16;
const LAST_PERIOD: u16 = 1024;
/// A codec must be better than the one in use by so much. Less is noise.
const MARGIN: f64 = 0.97;

/// What to do with the next batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Compress the first [`SAMPLE_LEN`] bytes of it with this codec, tell [`Chooser::sampled`],
    /// forget the result, and ask again. It comes for each codec once at the most before the batch
    /// is sent.
    Sample(Codec),
    /// Send it with this codec; raw if it turns out not to fit into [`crate::worth`].
    Send(Codec),
}

/// What became of a sample.
#[derive(Clone, Copy, Debug)]
pub struct Sampled {
    /// The segment, by its number.
    pub segment: usize,
    /// The codec that was asked for.
    pub codec: Codec,
    /// Bytes that were compressed.
    pub raw: usize,
    /// Bytes that they became; `None` where they did not fit into [`crate::worth`].
    pub made: Option<usize>,
    /// The processor time that it took.
    pub took: Duration,
}

/// What became of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// The segment, by its number.
    pub segment: usize,
    /// The codec that was tried.
    pub codec: Codec,
    /// Bytes of its pages: those that are not zero.
    pub raw: usize,
    /// Bytes that went to the link, frame and all; those of the pages as they are, where
    /// compression was given up.
    pub wire: usize,
    /// The processor time that compressing took, whether or not it was of use.
    pub compress: Duration,
    /// From the end of the batch before (or the start of the round) to the end of this one, samples
    /// among it; less the time that the thread waited for a processor, if that is known.
    pub elapsed: Duration,
    /// The thread's processor time in `elapsed` (`CLOCK_THREAD_CPUTIME_ID`): what is missing, it
    /// waited.
    pub cpu: Duration,
}

/// What a segment is like, as far as it is known.
#[derive(Clone, Copy, Debug)]
struct Segment {
    /// Bytes made for each byte, by candidate; NaN where never tried.
    ratio: [f32; COUNT],
    /// Candidates, by bit, whose ratio may be looked at again.
    stale: u8,
    /// Batches until all are stale again.
    due: u16,
    period: u16,
}

impl Segment {
    const NEW: Self =
        Self { ratio: [f32::NAN; COUNT], stale: u8::MAX, due: FIRST_PERIOD, period: FIRST_PERIOD };

    fn known(&self, candidate: usize) -> Option<f64> {
        let ratio = self.ratio[candidate];
        (!ratio.is_nan()).then_some(ratio.into())
    }

    /// The best ratio that one may hope for, from what is known of this segment.
    fn hope(&self, candidate: usize) -> f64 {
        if let Some(ratio) = self.known(candidate) {
            return ratio * 0.85;
        }
        let others =
            (1..COUNT).filter_map(|other| Some(self.known(other)? * cost::hope(candidate, other)));
        // The worst of the hopes: each of them is an honest bound.
        others.fold(0.02, f64::max)
    }

    fn learn(&mut self, candidate: usize, ratio: f64, weight: f32) {
        let ratio = ratio as f32;
        let old = &mut self.ratio[candidate];
        let changed = old.is_nan() || (*old - ratio).abs() > 0.1;
        *old = if old.is_nan() { ratio } else { *old + (ratio - *old) * weight };
        self.stale &= !(1 << candidate);
        if weight == 1.0 && !changed {
            self.period = (self.period * 2).min(LAST_PERIOD);
        } else if weight == 1.0 {
            self.period = FIRST_PERIOD;
        }
    }

    fn pass(&mut self) {
        self.due = self.due.saturating_sub(1);
        if self.due == 0 {
            (self.stale, self.due) = (u8::MAX, self.period);
        }
    }
}

/// Chooses codecs; see the module's page.
#[derive(Debug)]
pub struct Chooser {
    segments: Vec<Segment>,
    allowed: [bool; COUNT],
    costs: Costs,
    link: Link,
    /// The destination is on this host: nothing but memory lies between.
    same_host: bool,
    /// Processors that idle, shared among channels.
    idle: f64,
    /// The part of a processor that the channel may use.
    budget: f64,
    queue: Queue,
    last: usize,
}

/// How long the thread waited for a processor, and what it had of one: the newest weighs most.
#[derive(Clone, Copy, Debug, Default)]
struct Queue {
    waited: f64,
    had: f64,
}

impl Queue {
    /// Of what was seen before so much is kept.
    const KEPT: f64 = 0.8;

    fn add(&mut self, waited: Duration, had: Duration) {
        self.waited = self.waited * Self::KEPT + waited.as_secs_f64();
        self.had = self.had * Self::KEPT + had.as_secs_f64();
    }

    /// How many times as long as its processor time work takes.
    fn factor(&self) -> f64 {
        if self.had > 0.0 { 1.0 + self.waited / self.had } else { 1.0 }
    }
}

impl Chooser {
    /// For `segments` segments, numbered from 0 (those of one channel, or all: each takes 32
    /// bytes), and the codecs that both sides know.
    #[must_use]
    pub fn new(segments: usize, known: &[CodecId]) -> Self {
        Self {
            segments: vec![Segment::NEW; segments],
            allowed: CANDIDATES.map(|codec| codec == Codec::None || known.contains(&codec.id())),
            costs: Costs::default(),
            link: Link::default(),
            same_host: false,
            idle: 1.0,
            budget: 1.0,
            queue: Queue::default(),
            last: 0,
        }
    }

    /// What to do with the next batch of `segment`.
    ///
    /// # Panics
    /// When there is no such segment: a mistake of the caller.
    pub fn step(&mut self, segment: usize) -> Step {
        if self.link.rate().is_none() || self.same_host && !self.link.is_limited() {
            self.segments[segment].pass();
            return Step::Send(Codec::None);
        }
        let known = self.segments[segment];
        let (mut best, mut least) = (0, self.price(0, 1.0));
        for candidate in 1..COUNT {
            let (true, Some(ratio)) = (self.allowed[candidate], known.known(candidate)) else {
                continue;
            };
            let bonus = if candidate == self.last { MARGIN } else { 1.0 };
            let price = self.price(candidate, ratio) * bonus;
            if price < least * if best == 0 { MARGIN } else { 1.0 } {
                (best, least) = (candidate, price);
            }
        }
        let mut sample = None;
        let mut promise = least * MARGIN;
        for (candidate, codec) in CANDIDATES.into_iter().enumerate().skip(1) {
            if !self.allowed[candidate] || candidate == best || known.stale & (1 << candidate) == 0
            {
                continue;
            }
            let price = self.price(candidate, known.hope(candidate));
            if price < promise {
                (sample, promise) = (Some(codec), price);
            }
        }
        if let Some(codec) = sample {
            return Step::Sample(codec);
        }
        self.segments[segment].pass();
        if self.link.probing() {
            best = 0;
        } else {
            self.last = best;
        }
        Step::Send(CANDIDATES[best])
    }

    /// Takes in what became of a sample.
    pub fn sampled(&mut self, sample: &Sampled) {
        let Some(candidate) = cost::position(sample.codec) else { return };
        if sample.raw == 0 {
            // There is nothing to learn, and nothing to ask for again.
            self.segments[sample.segment].stale &= !(1 << candidate);
            return;
        }
        let ratio = sample.made.map_or(1.0, |made| made as f64 / sample.raw as f64);
        self.segments[sample.segment].learn(candidate, ratio, 1.0);
        self.costs.observe(candidate, ratio, sample.took.as_secs_f64() / sample.raw as f64);
    }

    /// Takes in what became of a batch.
    pub fn batch(&mut self, batch: &Batch) {
        let Some(candidate) = cost::position(batch.codec) else { return };
        if batch.raw > 0 && candidate > 0 {
            let ratio = (batch.wire as f64 / batch.raw as f64).min(1.0);
            self.segments[batch.segment].learn(candidate, ratio, 0.25);
            self.costs.observe(candidate, ratio, batch.compress.as_secs_f64() / batch.raw as f64);
        }
        self.link.batch(candidate, batch);
    }

    /// Takes in how many processors of this host idle, divided by the number of channels; look
    /// every second or so. Until it is told, there is one.
    pub fn idle(&mut self, processors: f64) {
        self.idle = processors;
    }

    /// Takes in how long the channel's thread has waited for a processor beside the time `had` that
    /// it had of one, with each batch. Until it is told, it does not wait.
    ///
    /// ```
    /// use std::time::Duration;
    /// use godwit_codec::{Chooser, CodecId};
    ///
    /// let mut chooser = Chooser::new(1, &CodecId::ALL);
    /// // Others have half of the processor: all work takes twice as long.
    /// chooser.queued(Duration::from_millis(3), Duration::from_millis(3));
    /// ```
    pub fn queued(&mut self, waited: Duration, had: Duration) {
        self.queue.add(waited, had);
    }

    /// Takes in which part of a processor the channel may use, by the operator's word; `None`: as
    /// much as it wants. Work then takes longer than its processor time.
    pub fn budget(&mut self, processors: Option<f64>) {
        self.budget = processors.map_or(1.0, |part| part.clamp(1e-3, 1.0));
    }

    /// Takes in how many bytes a second the connection may drain, by the operator's word; `None`:
    /// all that it can. A link known to be slow need not be looked at with raw pages first. It may
    /// be slower still, which is found out.
    pub fn limit(&mut self, bytes_per_second: Option<f64>) {
        self.link.limit(bytes_per_second);
    }

    /// Takes in how long a round trip over the connection takes, before the first batch.
    ///
    /// ```
    /// use std::time::Duration;
    /// use godwit_codec::{Chooser, Codec, CodecId, Step};
    ///
    /// let mut chooser = Chooser::new(1, &CodecId::ALL);
    /// chooser.round_trip(Duration::from_micros(100));
    /// assert_eq!(chooser.step(0), Step::Send(Codec::None));
    /// chooser.round_trip(Duration::from_millis(40));
    /// assert!(matches!(chooser.step(0), Step::Sample(_)));
    /// ```
    pub fn round_trip(&mut self, round_trip: Duration) {
        self.link.round_trip(round_trip.as_secs_f64());
    }

    /// Takes in whether the destination is on this host. Then what looks like a slow link is a
    /// receiver that waits for a processor, and nothing is compressed but under a
    /// [`limit`](Self::limit).
    ///
    /// ```
    /// use std::time::Duration;
    /// use godwit_codec::{Chooser, Codec, CodecId, Step};
    ///
    /// let mut chooser = Chooser::new(1, &CodecId::ALL);
    /// chooser.round_trip(Duration::from_millis(40));
    /// chooser.same_host(true);
    /// assert_eq!(chooser.step(0), Step::Send(Codec::None));
    /// chooser.limit(Some(1e6));
    /// assert!(matches!(chooser.step(0), Step::Sample(_)));
    /// ```
    pub fn same_host(&mut self, same: bool) {
        self.same_host = same;
    }

    /// Bytes a second that the connection drains, as far as is known.
    #[must_use]
    pub fn link_rate(&self) -> Option<f64> {
        self.link.rate()
    }

    /// Seconds for a byte of pages with `candidate` at `ratio`.
    fn price(&self, candidate: usize, ratio: f64) -> f64 {
        let compress = if candidate == 0 { 0.0 } else { self.costs.estimate(candidate, ratio) };
        let cpu = (compress + self.link.other(candidate, ratio)) / self.budget;
        let queue = self.queue.factor();
        let link = self.link.seconds(candidate, ratio, queue);
        // Below half an idle processor the guest, or the other side on this host, pays for what we
        // take.
        let crowd = (1.0 - 2.0 * self.idle).clamp(0.0, 1.0);
        // A hundredth of the processor time: where two take the same time, the one that works less.
        (cpu * queue).max(link) + cpu * crowd.max(0.01)
    }
}

#[cfg(test)]
mod tests;
