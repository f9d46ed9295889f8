//! What the connection drains, seen through windows of a few MiB.
//!
//! Two things disturb the view. Socket buffers swallow the first MiBs at any speed, so those are
//! not counted. And a receiver that is slower than the link looks like a slow link, but fewer bytes
//! do not make it faster: so each codec has its own factor, learned from what the connection
//! drained under it. Until it is learned, a receiver is taken to be not much faster with a page
//! than the sender is.

use super::Batch;
use super::cost::COUNT;

/// Bytes that the buffers of both sockets may swallow.
const SLACK: usize = 4 << 20;
/// Round trips within which a connection cannot carry more than [`SLACK`], however fast the link
/// is: it begins with ten segments in flight, and doubles them with each (RFC 6928, RFC 5681).
const SLOW_START: f64 = 8.0;
/// A connection that carries so much from the start is not worth a thought.
const FAST: f64 = 1e9;
/// A window ends with so many bytes on the wire (the first few with a quarter),
const WINDOW: usize = 4 << 20;
/// or after so many seconds.
const WINDOW_SECONDS: f64 = 0.03;
/// The share of a window's time that the thread waited, from which on the link (or the receiver)
/// was the limit.
const WAITED: f64 = 0.15;
/// Bytes of pages between two probes of the link with raw pages; doubled by each that finds what
/// was known. A connection over a long way becomes faster for seconds.
const FIRST_PROBE: u64 = 64 << 20;
const LAST_PROBE: u64 = 512 << 20;
/// A link that is so many times as fast as it was known to be is looked at again soon.
const FASTER: f64 = 1.25;

/// A receiver takes so many times the sender's processor time for a page, compressing apart: it
/// checks, places and allocates it, and on a host of few processors shares them.
const RECEIVER: f64 = 6.0;

/// Windows of a codec that are compared with raw pages before them. The first still drain what the
/// buffers held.
const TRIALS: u8 = 8;
/// After so many bytes on the wire, codecs under which less was drained are tried again: another
/// channel may have had more of the link for a moment. Doubled by each time, until raw pages show
/// that it was not the codec.
const FIRST_RETRIAL: u64 = 64 << 20;
const LAST_RETRIAL: u64 = 512 << 20;
/// A codec under which this much of the rate of raw pages is drained is not worth less than they.
const ALIKE: f64 = 0.95;

/// A look at what the link can do, with raw pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    First,
    /// The first window saw a faster link: empty buffers may have swallowed those bytes.
    Second,
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    raw: [u64; COUNT],
    wire: u64,
    elapsed: f64,
    cpu: f64,
    compress: f64,
}

#[derive(Clone, Debug)]
pub(super) struct Link {
    rate: Option<f64>,
    /// What it may be at the most, by the operator's word.
    limit: Option<f64>,
    /// What it carries as it begins, until something was seen of it.
    guess: Option<f64>,
    /// Bytes, behind the slack, for which the thread did not wait as long as there was a guess.
    taken: u64,
    /// Whether two windows in a row have seen the same: until then buffers may have swallowed more
    /// than the slack.
    agreed: bool,
    /// The factor of each codec; 1: as fast as with raw pages.
    worth: [f64; COUNT],
    /// Whether that was learned.
    proved: [bool; COUNT],
    /// Bytes a second that were drained under each codec that is worth less.
    drained: [f64; COUNT],
    /// Bytes for which the thread waited since codecs were found to be worth less, and how many
    /// there are to be until they are tried again.
    since_trial: u64,
    retrial_after: u64,
    /// Seconds of processor time for a byte of pages beside compressing; NaN where unknown.
    other: [f64; COUNT],
    window: Window,
    /// Bytes on the wire that are not counted.
    slack: usize,
    probe: Option<Probe>,
    since_probe: u64,
    probe_after: u64,
    /// The codec of nearly all of the window before.
    ruled: Option<usize>,
    /// Bytes on the wire until what drains is of that codec.
    unsettled: u64,
    /// Windows in which a difference to raw pages, measured a moment ago, is the codec's and not
    /// the link's.
    fresh: [u8; COUNT],
}

impl Default for Link {
    fn default() -> Self {
        Self {
            rate: None,
            limit: None,
            guess: None,
            taken: 0,
            agreed: false,
            worth: [1.0; COUNT],
            proved: [false; COUNT],
            drained: [0.0; COUNT],
            since_trial: 0,
            retrial_after: FIRST_RETRIAL,
            other: [f64::NAN; COUNT],
            window: Window::default(),
            slack: SLACK,
            probe: None,
            since_probe: 0,
            probe_after: FIRST_PROBE,
            ruled: None,
            unsettled: 0,
            fresh: [0; COUNT],
        }
    }
}

impl Link {
    /// Bytes a second, as far as they are known or may be guessed.
    pub(super) fn rate(&self) -> Option<f64> {
        self.rate.filter(|_| self.agreed).or(self.guess)
    }

    /// Begins with a guess from the seconds of a round trip.
    pub(super) fn round_trip(&mut self, seconds: f64) {
        self.guess = Some(SLACK as f64 / (SLOW_START * seconds)).filter(|guess| *guess < FAST);
    }

    /// Begins with `limit` where there is one; without, the link has to be seen.
    pub(super) fn limit(&mut self, limit: Option<f64>) {
        if limit != self.limit {
            // What it carries is no longer what it begins with.
            self.guess = None;
            (self.limit, self.rate, self.agreed) = (limit, limit, limit.is_some());
            (self.window, self.slack, self.probe) = (Window::default(), SLACK, None);
        }
    }

    /// Whether the operator limits it.
    pub(super) fn is_limited(&self) -> bool {
        self.limit.is_some()
    }

    /// Whether raw pages are wanted, to see what the link can do.
    pub(super) fn probing(&self) -> bool {
        self.probe.is_some()
    }

    /// Seconds that the link takes for what a byte of pages becomes, where a thread of this host
    /// takes `queue` times as long as its processor time.
    pub(super) fn seconds(&self, candidate: usize, ratio: f64, queue: f64) -> f64 {
        let Some(rate) = self.rate.or(self.guess) else { return 0.0 };
        let wire = ratio / (rate * self.worth[candidate]);
        if self.proved[candidate] || self.other[0].is_nan() {
            return wire;
        }
        // A link as fast as that may be a receiver, which may be on this host.
        wire.max((RECEIVER * self.other[0] * queue).min(1.0 / rate))
    }

    /// Seconds of processor time for a byte of pages beside compressing.
    pub(super) fn other(&self, candidate: usize, ratio: f64) -> f64 {
        let (raw, own) = (self.other[0], self.other[candidate]);
        match (own.is_nan(), raw.is_nan()) {
            (false, _) => own,
            // About half of it is reading, which does not become less.
            (true, false) => raw * (0.5 + 0.5 * ratio),
            (true, true) => 0.0,
        }
    }

    pub(super) fn batch(&mut self, candidate: usize, batch: &Batch) {
        self.since_probe += batch.raw as u64;
        if self.slack > 0 {
            self.slack = self.slack.saturating_sub(batch.wire);
            return;
        }
        let window = &mut self.window;
        window.raw[candidate] += batch.raw as u64;
        window.wire += batch.wire as u64;
        window.elapsed += batch.elapsed.as_secs_f64();
        window.cpu += batch.cpu.as_secs_f64();
        window.compress += batch.compress.as_secs_f64();
        let full = if self.agreed { WINDOW } else { WINDOW / 4 };
        if window.wire >= full as u64 || (window.elapsed >= WINDOW_SECONDS && window.wire > 0) {
            let window = std::mem::take(window);
            self.close(&window);
        }
    }

    fn close(&mut self, window: &Window) {
        let total: u64 = window.raw.iter().sum();
        if total == 0 || window.elapsed <= 0.0 {
            return;
        }
        let rate = window.wire as f64 / window.elapsed;
        let waited = window.cpu < window.elapsed * (1.0 - WAITED);
        if !waited && !self.agreed && self.guess.is_some() {
            // Buffers larger than the slack, or a link that is faster than what was sent: then raw
            // pages are to tell by how much.
            self.taken += window.wire;
            if self.taken >= SLACK as u64 {
                (self.guess, self.rate, self.ruled, self.slack) = (None, None, None, SLACK);
            }
            return;
        }
        // The codec of nearly all of the window; where there is none, only the link as a whole can
        // be judged.
        let ruling = (0..COUNT).find(|c| window.raw[*c] * 10 >= total * 9);
        if let Some(ruling) = ruling {
            let other = (window.cpu - window.compress).max(0.0) / total as f64;
            blend(&mut self.other[ruling], other, 0.3);
        }
        if ruling != self.ruled {
            // What a probe found in the buffers has gone with its slack.
            let known = self.rate.is_none() || self.probing();
            self.unsettled = if known { 0 } else { 2 * SLACK as u64 };
            self.ruled = ruling;
        }
        let settled = self.unsettled == 0;
        self.unsettled = self.unsettled.saturating_sub(window.wire);
        if waited && !settled {
            // What drained is what the buffers still held, of another codec.
            return;
        }
        let before = self.rate;
        let probe = self.probe;
        let faster = probe.is_some() && before.is_some_and(|before| rate > before * FASTER);
        if faster && probe == Some(Probe::First) {
            self.probe = Some(Probe::Second);
            return;
        }
        match (ruling, before) {
            (_, None) => self.rate = Some(rate),
            (_, Some(old)) if !self.agreed => {
                self.agreed = (old * 0.8..old * 1.25).contains(&rate);
                self.rate = Some(rate);
                if self.agreed {
                    self.guess = None;
                }
                if ruling == Some(0) {
                    self.fresh = [TRIALS; COUNT];
                }
            }
            (Some(0), Some(old)) => {
                // Without waiting the link could do more: what was seen before may still hold.
                let seen = if waited || probe.is_some() { rate } else { rate.max(old) };
                // A first look may have seen buffers larger than the slack, so a fall is believed
                // at once.
                let weight = if probe.is_some() || rate * 1.5 < old { 1.0 } else { 0.5 };
                self.rate = Some(old + (seen - old) * weight);
                self.fresh = [TRIALS; COUNT];
                if waited {
                    self.reconsider();
                }
            }
            (Some(codec), Some(old)) if waited && self.fresh[codec] > 0 => {
                self.judge(codec, window.wire as f64 / total as f64, (rate, old));
            }
            (Some(codec), Some(old)) if waited => {
                self.rate = Some(old + (rate / self.worth[codec] - old) * 0.5);
            }
            (None, Some(old)) if waited => self.rate = Some(old + (rate - old) * 0.25),
            (codec, Some(old)) => {
                let worth = codec.map_or(1.0, |codec| self.worth[codec]);
                self.rate = Some(old.max(rate / worth));
            }
        }
        if probe.is_some() {
            let next = if faster { FIRST_PROBE } else { self.probe_after * 2 };
            self.probe_after = next.min(LAST_PROBE);
        }
        if waited {
            self.try_again(window.wire);
        }
        let doubtful = ruling.is_some_and(|codec| self.worth[codec] < 0.7);
        if probe.is_some() {
            (self.probe, self.since_probe) = (None, 0);
        } else if ruling == Some(0) {
            self.since_probe = 0;
        } else if self.since_probe >= self.probe_after && (!waited || doubtful) {
            self.probe = Some(Probe::First);
            // While the thread waits, buffers are full of what was sent before.
            self.slack = if waited { 2 * SLACK } else { SLACK };
        }
    }

    /// Takes in that `rate` was drained under `codec`, which made `ratio` of each byte, where it
    /// was `old` with raw pages a moment ago.
    fn judge(&mut self, codec: usize, ratio: f64, (rate, old): (f64, f64)) {
        self.fresh[codec] -= 1;
        self.proved[codec] = true;
        // Where the receiver limits, as many bytes of pages pass as before, and so fewer on the
        // wire. Where the link does, the wire is as full as before. Whichever is nearer; halfway
        // between is the root.
        if rate >= old * ratio.min(1.0).sqrt() {
            (self.worth[codec], self.rate) = (1.0, Some(rate));
            return;
        }
        if self.worth[codec] == 1.0 {
            self.since_trial = 0;
        }
        self.worth[codec] = (rate / old).max(0.02);
        self.drained[codec] = rate;
    }

    /// Compares what was drained under codecs that are worth less with the rate of raw pages, which
    /// has just been seen. Where these are as slow, it was not the codec.
    fn reconsider(&mut self) {
        let Some(rate) = self.rate else { return };
        for candidate in self.worth_less() {
            self.worth[candidate] = self.drained[candidate] / rate;
            if self.worth[candidate] > ALIKE {
                (self.worth[candidate], self.retrial_after) = (1.0, FIRST_RETRIAL);
            }
        }
    }

    /// Takes in that the thread waited for `bytes` more. After enough of them, codecs that are
    /// worth less are tried again.
    fn try_again(&mut self, bytes: u64) {
        self.since_trial += bytes;
        if self.since_trial < self.retrial_after {
            return;
        }
        if self.worth_less().next().is_some() {
            self.retrial_after = (self.retrial_after * 2).min(LAST_RETRIAL);
        }
        for candidate in self.worth_less() {
            self.worth[candidate] = 1.0;
            (self.proved[candidate], self.fresh[candidate]) = (false, TRIALS);
        }
    }

    fn worth_less(&self) -> impl Iterator<Item = usize> + use<> {
        let worth = self.worth;
        (0..COUNT).filter(move |candidate| worth[*candidate] < 1.0)
    }
}

fn blend(value: &mut f64, seen: f64, weight: f64) {
    *value = if value.is_nan() { seen } else { *value + (seen - *value) * weight };
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::cost::CANDIDATES;
    use super::*;

    /// Windows of one codec that the thread waited for.
    fn drain(link: &mut Link, candidate: usize, windows: usize, rate: f64, ratio: f64) {
        let batch = Batch {
            segment: 0,
            codec: CANDIDATES[candidate],
            raw: (WINDOW as f64 / ratio) as usize,
            wire: WINDOW,
            compress: Duration::ZERO,
            elapsed: Duration::from_secs_f64(WINDOW as f64 / rate),
            cpu: Duration::ZERO,
        };
        (0..windows).for_each(|_| link.batch(candidate, &batch));
    }

    /// A link whose raw pages were seen, and then zstd, under which less was drained: as many bytes
    /// of pages in a third of the bytes.
    fn with_slow_zstd() -> Link {
        let mut link = Link::default();
        drain(&mut link, 0, 8, 100e6, 1.0);
        drain(&mut link, 3, 2 * usize::from(TRIALS), 33e6, 0.33);
        assert!((0.3..0.4).contains(&link.worth[3]), "{:?}", link.worth);
        link
    }

    #[test]
    fn a_codec_that_is_tried_again_is_judged_again() {
        let mut link = with_slow_zstd();
        let windows = FIRST_RETRIAL as usize / WINDOW;
        // Another one is as good as raw pages.
        let retrial = |link: &mut Link, windows: usize| {
            link.since_trial = 0;
            drain(link, 1, windows - 1, 100e6, 0.6);
            assert!(link.worth[3] < 0.4 && link.proved[3], "{windows}: {:?}", link.worth);
            drain(link, 1, 1, 100e6, 0.6);
            assert!(link.worth == [1.0; COUNT] && !link.proved[3], "{windows}: {:?}", link.worth);
            drain(link, 3, 2 * usize::from(TRIALS), 33e6, 0.33);
            assert!((0.3..0.4).contains(&link.worth[3]), "{:?}", link.worth);
        };
        drain(&mut link, 1, 3, 100e6, 0.6);
        retrial(&mut link, windows);
        drain(&mut link, 1, 3, 100e6, 0.6);
        retrial(&mut link, 2 * windows);
        assert_eq!(link.retrial_after, 4 * FIRST_RETRIAL);
    }

    #[test]
    fn a_codec_is_not_blamed_where_raw_pages_go_no_faster() {
        let mut link = with_slow_zstd();
        link.retrial_after = LAST_RETRIAL;
        assert!(link.since_trial < FIRST_RETRIAL, "counted from when it was found");
        drain(&mut link, 0, 4, 100e6, 1.0);
        assert!(link.worth[3] < 0.4, "{:?}", link.worth);
        drain(&mut link, 0, 8, 33e6, 1.0);
        assert_eq!((link.worth[3], link.retrial_after), (1.0, FIRST_RETRIAL));
    }
}
