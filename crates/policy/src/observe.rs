//! What the engine tells the policy, and what the policy answers.
//!
//! Nothing here knows what time it is: durations come in with the observations.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use godwit_units::{ByteCount, PageCount, Rate, format_duration};

/// What was seen of one round, handed in at its end. All that is not known may be left as
/// [`Round::default`] has it.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::Round;
/// use godwit_units::{ByteCount, PageCount};
///
/// let round = Round {
///     time: Duration::from_secs(1),
///     sent: ByteCount(100 << 20),
///     remaining: PageCount(5_000),
///     memory: PageCount(100_000),
///     ..Round::default()
/// };
/// assert!(round.dirty.is_empty(), "of segments nothing is known");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Round<'a> {
    /// How long it took: from the acknowledgement of the one before, or from its own start where it
    /// is the first, to its acknowledgement.
    pub time: Duration,
    /// Of it, the time in which nothing was sent: the look and the decision before it, a wait for
    /// hints of free memory, a synchronisation that holds up sending.
    pub idle: Duration,
    /// What each further round loses in the same way: in the formula of
    /// [`downtime`](crate::downtime) it is `x`.
    pub gap: Duration,
    /// All segments are harvested at once, at the end of that time; else each just before it is
    /// sent.
    pub at_once: bool,
    /// Bytes put on the wire for memory.
    pub sent: ByteCount,
    /// Pages whose data these bytes are; zero: unknown, they are taken to be whole pages.
    pub pages: PageCount,
    /// All that the next round (or the last) has to send, delayed segments and what was never sent
    /// included.
    pub remaining: PageCount,
    /// Pages that it began with, where both machines had got ready right before it, in which time
    /// the guest wrote more than had remained. Zero: as many as had remained.
    pub began_with: PageCount,
    /// What stop-and-copy costs beside the transfer: last harvest, device state, flush of disks,
    /// handover, as far as known.
    pub fixed: Duration,
    /// From the look that `remaining` is from until the guest stands still: what is dirtied
    /// meanwhile is sent as well.
    pub lead: Duration,
    /// To the destination and back: for that long each further round waits for its
    /// acknowledgement.
    pub round_trip: Duration,
    /// What the comparison of digests adds to the downtime, where one is wanted, and of a guest
    /// that is paused what else is no transfer. It is foretold, and it does not count against the
    /// limit: nothing that is decided here makes it shorter.
    pub verification: Duration,
    /// All memory of the VM.
    pub memory: PageCount,
    /// Pages of each segment written since its last harvest (or since tracking began), by a look
    /// that clears nothing; always in the same order. Empty: unknown, and then nothing is delayed.
    pub dirty: &'a [u32],
    /// The throttle that was in force at the end of the round.
    pub throttle: f64,
    /// The guest's speed in this round, as a share of what it was before the migration, if it can
    /// be seen.
    pub guest_speed: Option<f64>,
    /// Whether the machine offers a write governor ([`Plan::dirty_rate_limit`]).
    pub can_govern: bool,
    /// What happened to disks, if disks move.
    pub disk: Option<DiskStatistics>,
}

/// What was seen of disks in one round.
///
/// ```
/// use godwit_policy::{DiskStatistics, Round};
/// use godwit_units::ByteCount;
///
/// let sent = ByteCount(64 << 20);
/// let disk = DiskStatistics { full_pass: true, sent, ..DiskStatistics::default() };
/// let round = Round { disk: Some(disk), ..Round::default() };
/// assert!(round.disk.is_some_and(|disk| disk.full_pass));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DiskStatistics {
    /// Whether a disk was still in its first, full pass at the end of the round.
    pub full_pass: bool,
    /// Bytes of disks put on the wire.
    pub sent: ByteCount,
    /// Bytes of disks dirty at the end of the round (or never sent), in whole dirty blocks.
    pub remaining: ByteCount,
    /// Bytes that the guest wrote to disks in this round, if that can be seen.
    pub written: ByteCount,
    /// How long sending waited in this round for the storage that is read, where several disks
    /// move for the one that made it wait longest.
    pub storage: Duration,
}

/// What is seen within a round, about every 100 ms.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::{Policy, Settings, Tick};
/// use godwit_units::{ByteCount, PageCount};
///
/// let mut policy = Policy::new(Settings::default());
/// policy.start(false);
/// let tick = Tick {
///     in_round: Duration::from_millis(100),
///     sent: ByteCount(10 << 20),
///     remaining: PageCount(90_000),
///     ..Tick::default()
/// };
/// assert_eq!(policy.tick(&tick), None, "the first round is not held up");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tick<'a> {
    /// Since the round began.
    pub in_round: Duration,
    /// Bytes put on the wire in this round.
    pub sent: ByteCount,
    /// All that remains to be sent now: dirty by a look that clears nothing, or never sent.
    pub remaining: PageCount,
    /// As in [`Round::dirty`], now.
    pub dirty: &'a [u32],
    /// The throttle that was in force since the last tick.
    pub throttle: f64,
    /// As in [`Round::guest_speed`], since the last tick.
    pub guest_speed: Option<f64>,
    /// As in [`Round::can_govern`].
    pub can_govern: bool,
}

/// What is to be in force until the next plan.
///
/// ```
/// use godwit_policy::{Delayed, Plan};
///
/// let plan = Plan { throttle: 0.8, delayed: Delayed::new([3]), ..Plan::default() };
/// assert!(plan.delayed.contains(3) && plan.disk_limit.is_none());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Share of time in which the processors of the guest do not run, 0.0 to 0.99. It stays in
    /// force through the preparation of the switchover, until the guest stands still.
    pub throttle: f64,
    /// The dirty-rate limit: how many clean pages the guest may make dirty each second, in segments
    /// that are harvested from now on; `None`: it is not governed. Stays in force as `throttle`
    /// does.
    pub dirty_rate_limit: Option<f64>,
    /// Segments not to be sent now.
    pub delayed: Delayed,
    /// While disks move: the parts of the link's time that memory gets for each 1024 that disks
    /// get; at 1024 both get half. What one does not use, the other may, but memory is passed over
    /// once in a round at the most. 0: no memory is sent. Below 1024 a round ends with the pass
    /// over disks, and the pass over memory goes on in the next.
    pub memory_share: u16,
    /// The most that the guest may write to all disks that move, together.
    pub disk_limit: Option<Rate>,
}

impl Default for Plan {
    /// Nothing held back.
    fn default() -> Self {
        Self {
            throttle: 0.0,
            dirty_rate_limit: None,
            delayed: Delayed::default(),
            memory_share: 1024,
            disk_limit: None,
        }
    }
}

/// A set of segments, cheap to share with the channels: a bit for each, by the index in
/// [`Round::dirty`].
///
/// ```
/// use godwit_policy::Delayed;
///
/// let delayed = Delayed::new([3, 700]);
/// assert!(delayed.contains(700) && !delayed.contains(4));
/// assert_eq!(delayed.count(), 2);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delayed(Option<Arc<[u64]>>);

impl Delayed {
    /// The segments whose indexes are given.
    #[must_use]
    pub fn new(segments: impl IntoIterator<Item = usize>) -> Self {
        let mut words = Vec::new();
        for segment in segments {
            if words.len() <= segment / 64 {
                words.resize(segment / 64 + 1, 0);
            }
            words[segment / 64] |= 1 << (segment % 64);
        }
        Self((!words.is_empty()).then(|| words.into()))
    }

    /// Whether `segment` is not to be sent now.
    #[must_use]
    pub fn contains(&self, segment: usize) -> bool {
        let word = self.0.as_ref().and_then(|words| words.get(segment / 64));
        word.is_some_and(|word| word >> (segment % 64) & 1 == 1)
    }

    /// Whether every segment may be sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// How many segments are held back.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.as_ref().map_or(0, |words| words.iter().map(|word| word.count_ones() as usize).sum())
    }
}

/// What to do next.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::{Decision, Policy, Round, Settings};
/// use godwit_units::{ByteCount, PageCount};
///
/// let mut policy = Policy::new(Settings::default());
/// policy.start(false);
/// let round = Round {
///     time: Duration::from_secs(1),
///     sent: ByteCount(100 << 20),
///     remaining: PageCount(50_000),
///     memory: PageCount(100_000),
///     ..Round::default()
/// };
/// // 195 MiB are left of 390: a further round is worth it.
/// let (decision, _) = policy.round(&round);
/// assert!(matches!(decision, Decision::NextRound(plan) if plan.throttle == 0.0));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Make another round with the guest running.
    NextRound(Plan),
    /// Stop the guest and finish. The throttle in force stays until the guest stands still.
    SwitchOver,
    /// Stop trying; the guest runs on at the source. Whatever was in force is to be released.
    GiveUp(Advice),
}

/// What the policy makes of what it has seen.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::{Policy, Round, Settings};
/// use godwit_units::{ByteCount, PageCount};
///
/// let mut policy = Policy::new(Settings::default());
/// policy.start(false);
/// let round = Round {
///     time: Duration::from_secs(1),
///     sent: ByteCount(100 << 20),
///     remaining: PageCount(51_200),
///     memory: PageCount(100_000),
///     ..Round::default()
/// };
/// let (_, estimate) = policy.round(&round);
/// assert_eq!(estimate.bandwidth.to_string(), "100MiB/s");
/// assert_eq!(estimate.expected_downtime, Some(Duration::from_secs(2)));
/// assert_eq!(estimate.limit, Duration::from_millis(300));
/// assert!(!estimate.is_near());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// Bandwidth over the recent rounds, without the time in which nothing could be sent.
    pub bandwidth: Rate,
    /// How fast pages became dirty in the last round.
    pub dirty_rate: Rate,
    /// Downtime if the guest were stopped now, verification included; `None` while the bandwidth is
    /// unknown.
    pub expected_downtime: Option<Duration>,
    /// The limit it is held against: the operator's, or more where a ceiling allows it.
    pub limit: Duration,
    /// How long until the guest runs at the destination: at least, probably, at most. `None` while
    /// that cannot be said, or when it would not finish as things are.
    pub remaining_time: Option<RemainingTime>,
    /// Set when only the operator can help now: the text says how.
    pub advice: Option<Advice>,
}

/// A switchover is near that takes no longer, with all rounds that come before it taking less.
const NEAR: Duration = Duration::from_secs(1);

impl Estimate {
    /// Whether the switchover is near: what remains fits into the limit, and is little enough that
    /// further rounds, made in search of less downtime, take seconds at the most. Both machines may
    /// get ready then.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.expected_downtime.is_some_and(|expected| expected <= self.limit.min(NEAR))
    }
}

/// A time with error bounds.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::RemainingTime;
///
/// let seconds = Duration::from_secs;
/// let time = RemainingTime { low: seconds(8), mid: seconds(10), high: seconds(15) };
/// assert!(time.low <= time.mid && time.mid <= time.high);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RemainingTime {
    /// At least.
    pub low: Duration,
    /// Probably.
    pub mid: Duration,
    /// At most.
    pub high: Duration,
}

/// Why it would not finish, and what would help.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::Advice;
/// use godwit_units::Rate;
///
/// let advice = Advice {
///     best: Duration::from_secs(1),
///     limit: Duration::from_millis(300),
///     fixed: Duration::from_millis(20),
///     dirty_rate: Rate::from_bytes_per_second(200.0 * 1_048_576.0),
///     bandwidth: Rate::from_bytes_per_second(100.0 * 1_048_576.0),
///     throttle: 0.99,
/// };
/// assert!(advice.to_string().contains("allow --downtime-limit 1.2s"));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The best expected downtime seen.
    pub best: Duration,
    /// The limit it was held against.
    pub limit: Duration,
    /// What of the downtime passes however little remains: the last harvest, device state, the
    /// flush of disks, the handover.
    pub fixed: Duration,
    /// The last estimate.
    pub dirty_rate: Rate,
    /// The bandwidth it competes with.
    pub bandwidth: Rate,
    /// The throttle that did not suffice.
    pub throttle: f64,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the guest dirties {} and the link carries {}", self.dirty_rate, self.bandwidth)?;
        if self.throttle > 0.0 {
            write!(f, ", at a throttle of {:.0} %", self.throttle * 100.0)?;
        }
        let needed = format_duration(self.best.mul_f64(1.2));
        write!(f, ": the downtime would be {} at best, ", format_duration(self.best))?;
        // Then more bandwidth or a slower guest would hardly help.
        if self.fixed > self.limit / 2 {
            let fixed = format_duration(self.fixed);
            write!(f, "{fixed} of it for device state and the handover alone, ")?;
        }
        write!(
            f,
            "above the limit of {}; allow --downtime-limit {needed}, raise --max-bandwidth, {}",
            format_duration(self.limit),
            if self.throttle > 0.0 {
                "quieten the guest or force the switchover"
            } else {
                "quieten the guest or let it be throttled"
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_segments_holds_what_was_put_into_it() {
        let some = [0, 5, 63, 64, 130, 5];
        let delayed = Delayed::new(some);
        let held: Vec<usize> = (0..1000).filter(|segment| delayed.contains(*segment)).collect();
        assert_eq!(held, [0, 5, 63, 64, 130]);
        assert_eq!((delayed.count(), delayed.is_empty()), (5, false));
        let none = Delayed::new([]);
        assert_eq!((none.count(), none.is_empty(), none.contains(0)), (0, true, false));
        assert_eq!(none, Delayed::default());
    }

    #[test]
    fn advice_says_what_was_tried_and_what_would_help() {
        let advice = Advice {
            best: Duration::from_secs(1),
            limit: Duration::from_millis(300),
            fixed: Duration::from_millis(150),
            dirty_rate: Rate::from_bytes_per_second(200.0 * 1_048_576.0),
            bandwidth: Rate::from_bytes_per_second(100.0 * 1_048_576.0),
            throttle: 0.0,
        };
        assert_eq!(
            advice.to_string(),
            "the guest dirties 200MiB/s and the link carries 100MiB/s: the downtime would be 1s at \
             best, above the limit of 300ms; allow --downtime-limit 1.2s, raise --max-bandwidth, \
             quieten the guest or let it be throttled"
        );
        assert_eq!(
            Advice { throttle: 0.99, fixed: Duration::from_millis(160), ..advice }.to_string(),
            "the guest dirties 200MiB/s and the link carries 100MiB/s, at a throttle of 99 %: the \
             downtime would be 1s at best, 160ms of it for device state and the handover alone, \
             above the limit of 300ms; allow --downtime-limit 1.2s, raise --max-bandwidth, quieten \
             the guest or force the switchover"
        );
    }
}
