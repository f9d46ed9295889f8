//! The decision after each round: another one, switch over, or give up and say why.
//!
//! The guest is stopped when the expected downtime is within the limit *and* one more round would not bring it
//! down by much: at a local minimum of what remains, not at the first moment that is allowed.

use std::fmt;
use std::time::Duration;

use godwit_units::{ByteCount, PageCount, Rate, format_duration};

use crate::Bandwidth;
use crate::downtime;

/// A round is worth making, once within the limit, if the last one brought the remaining data down to this share.
const WORTHWHILE: f64 = 0.75;
/// Below this transfer time of the rest no further round is made: the fixed costs dominate.
const NEGLIGIBLE: Duration = Duration::from_micros(500);
/// Rounds made within the limit in search of the minimum, at the most.
const SEARCH_ROUNDS: u32 = 8;
/// An expected downtime counts as better when it is below this share of the best so far.
const PROGRESS: f64 = 0.95;

/// What the operator wants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// The downtime must not be expected to exceed this.
    pub downtime_limit: Duration,
    /// Give up when no round came closer to the limit for this long; `None`: never.
    pub patience: Option<Duration>,
}

impl Default for Config {
    /// 300 ms, and one minute without progress.
    fn default() -> Self {
        Self { downtime_limit: Duration::from_millis(300), patience: Some(Duration::from_secs(60)) }
    }
}

/// What was seen of one round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Round {
    /// How long it took, from its start to the peer's acknowledgement.
    pub time: Duration,
    /// Bytes put on the wire.
    pub sent: ByteCount,
    /// Pages dirty at its end, which the next round (or the last) has to send.
    pub remaining: PageCount,
    /// What stop-and-copy costs beside the transfer: last harvest, device state, handover, as far as known.
    pub fixed: Duration,
}

/// What the policy makes of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Bandwidth over the recent rounds.
    pub bandwidth: Rate,
    /// How fast pages became dirty in the last round.
    pub dirty_rate: Rate,
    /// Downtime if the guest were stopped now; `None` while the bandwidth is unknown.
    pub expected_downtime: Option<Duration>,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Make another round with the guest running.
    NextRound,
    /// Stop the guest and finish.
    SwitchOver,
    /// Stop trying; the guest runs on at the source.
    GiveUp(Advice),
}

/// Why it would not finish, and what would help.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The best expected downtime seen.
    pub best: Duration,
    /// The limit it was held against.
    pub limit: Duration,
    /// The last estimate.
    pub dirty_rate: Rate,
    /// The bandwidth it competes with.
    pub bandwidth: Rate,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the guest dirties {} and the link carries {}: the downtime would be {} at best, above the limit of {}; allow --downtime-limit {}, raise --max-bandwidth or quieten the guest",
            self.dirty_rate,
            self.bandwidth,
            format_duration(self.best),
            format_duration(self.limit),
            format_duration(self.best.mul_f64(1.2)),
        )
    }
}

/// The convergence policy of one migration.
#[derive(Clone, Debug)]
pub struct Policy {
    config: Config,
    bandwidth: Bandwidth,
    previous: Option<PageCount>,
    searched: u32,
    best: Option<Duration>,
    without_progress: Duration,
}

impl Policy {
    /// A policy that has seen nothing yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            bandwidth: Bandwidth::default(),
            previous: None,
            searched: 0,
            best: None,
            without_progress: Duration::ZERO,
        }
    }

    /// Takes in what was seen of a round and decides.
    pub fn round(&mut self, round: &Round) -> (Decision, Estimate) {
        self.bandwidth.observe(round.sent, round.time);
        let bandwidth = self.bandwidth.average();
        let remaining = round.remaining.bytes();
        let estimate = Estimate {
            bandwidth,
            dirty_rate: remaining.per(round.time.as_secs_f64()),
            expected_downtime: downtime::expected(remaining, bandwidth, round.fixed),
        };
        let previous = self.previous.replace(round.remaining);
        let decision = match estimate.expected_downtime {
            Some(expected) if expected <= self.config.downtime_limit => {
                self.within_limit(round, previous, expected.saturating_sub(round.fixed))
            }
            expected => self.above_limit(round, expected, &estimate),
        };
        (decision, estimate)
    }

    fn within_limit(&mut self, round: &Round, previous: Option<PageCount>, transfer: Duration) -> Decision {
        self.without_progress = Duration::ZERO;
        self.searched += 1;
        // Nothing to compare the first round with: it sent all of memory.
        let shrinks =
            previous.is_none_or(|previous| (round.remaining.0 as f64) < WORTHWHILE * previous.0 as f64);
        if shrinks && transfer > NEGLIGIBLE && self.searched <= SEARCH_ROUNDS {
            Decision::NextRound
        } else {
            Decision::SwitchOver
        }
    }

    fn above_limit(&mut self, round: &Round, expected: Option<Duration>, estimate: &Estimate) -> Decision {
        let expected = expected.unwrap_or(Duration::MAX);
        if self.best.is_none_or(|best| expected < best.mul_f64(PROGRESS)) {
            self.best = Some(expected.min(Duration::from_secs(1_000_000)));
            self.without_progress = Duration::ZERO;
        } else {
            self.without_progress += round.time;
        }
        match (self.config.patience, self.best) {
            (Some(patience), Some(best)) if self.without_progress >= patience => Decision::GiveUp(Advice {
                best,
                limit: self.config.downtime_limit,
                dirty_rate: estimate.dirty_rate,
                bandwidth: estimate.bandwidth,
            }),
            _ => Decision::NextRound,
        }
    }
}

#[cfg(test)]
mod tests;
