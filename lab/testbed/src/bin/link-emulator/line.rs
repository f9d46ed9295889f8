//! One direction of a link: when a packet arrives at the other end, if it does. Pure: times come
//! from the caller.
//!
//! A packet waits until those before it have been sent, is sent at the rate of the link, and
//! travels for the delay and some of the jitter. Keeps two promises: no packet overtakes another,
//! however much their delays differ; and from one seed the same packets are lost.

use std::time::{Duration, Instant};

use fastrand::Rng;
use godwit_testbed::Conditions;

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The queue has no room for it.
    Dropped,
    /// It was sent and does not arrive.
    Lost,
    /// It arrives at this time.
    Arrives(Instant),
}

/// The direction.
#[derive(Debug)]
pub(crate) struct Line {
    conditions: Conditions,
    random: Rng,
    /// When all that was taken so far has been sent.
    free: Option<Instant>,
    /// When the last packet arrives.
    last: Option<Instant>,
}

impl Line {
    /// An empty one whose losses follow from the conditions' seed and `number`.
    pub(crate) fn new(conditions: Conditions, number: u64) -> Self {
        let random = Rng::with_seed(conditions.seed.wrapping_mul(2).wrapping_add(number));
        Self { conditions, random, free: None, last: None }
    }

    /// How long it takes to send `bytes`.
    pub(crate) fn time_for(&self, bytes: usize) -> Duration {
        let rate = self.conditions.rate;
        rate.map_or(Duration::ZERO, |rate| {
            Duration::from_secs_f64(bytes as f64 / rate.bytes_per_second())
        })
    }

    /// Takes a packet of `bytes` at `now`.
    pub(crate) fn take(&mut self, now: Instant, bytes: usize) -> Fate {
        let begins = self.free.map_or(now, |free| free.max(now));
        if let Some(rate) = self.conditions.rate {
            let waiting = (begins - now).as_secs_f64() * rate.bytes_per_second();
            if waiting + bytes as f64 > self.conditions.queue.0 as f64 {
                return Fate::Dropped;
            }
        }
        let sent = begins + self.time_for(bytes);
        self.free = Some(sent);
        if self.conditions.loss > 0.0 && self.random.f64() < self.conditions.loss {
            return Fate::Lost;
        }
        let jitter = self.conditions.jitter.mul_f64(self.random.f64());
        let at = sent + self.conditions.delay + jitter;
        let at = self.last.map_or(at, |last| last.max(at));
        self.last = Some(at);
        Fate::Arrives(at)
    }
}

#[cfg(test)]
mod tests {
    use godwit_units::{ByteCount, Rate};

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn line(change: impl FnOnce(&mut Conditions)) -> Line {
        let mut conditions = Conditions {
            rate: Some(Rate::from_bytes_per_second(1_000_000.0)),
            delay: 10 * MS,
            queue: ByteCount(10_000),
            ..Conditions::default()
        };
        change(&mut conditions);
        Line::new(conditions, 0)
    }

    #[test]
    fn packets_are_sent_one_after_the_other_and_travel() {
        let (mut line, now) = (line(|_| {}), Instant::now());
        assert_eq!(line.take(now, 1000), Fate::Arrives(now + 11 * MS));
        assert_eq!(line.take(now, 2000), Fate::Arrives(now + 13 * MS));
        // The line has been free for a while.
        assert_eq!(line.take(now + 50 * MS, 1000), Fate::Arrives(now + 61 * MS));
    }

    #[test]
    fn what_finds_no_room_in_the_queue_is_dropped() {
        let (mut line, now) = (line(|_| {}), Instant::now());
        let fates: Vec<Fate> = (0..15).map(|_| line.take(now, 1000)).collect();
        assert_eq!(fates.iter().filter(|fate| **fate == Fate::Dropped).count(), 5);
        assert!(fates[10..].iter().all(|fate| *fate == Fate::Dropped), "{fates:?}");
        // Two of them have been sent.
        assert_ne!(line.take(now + 2 * MS, 1000), Fate::Dropped);
    }

    #[test]
    fn losses_are_as_many_as_told_and_follow_from_the_seed() {
        let lost = |seed| {
            let mut line = line(|it| (it.loss, it.seed, it.rate) = (0.1, seed, None));
            let now = Instant::now();
            (0..10_000).map(|_| line.take(now, 1000) == Fate::Lost).collect::<Vec<_>>()
        };
        let count = lost(1).iter().filter(|lost| **lost).count();
        assert!((850..1150).contains(&count), "{count}");
        assert_eq!(lost(1), lost(1));
        assert_ne!(lost(1), lost(2));
    }

    #[test]
    fn jitter_delays_and_lets_nobody_overtake() {
        let mut line = line(|it| (it.jitter, it.rate) = (5 * MS, None));
        let now = Instant::now();
        let mut arrivals = Vec::new();
        for number in 0..1000 {
            let sent = now + number * MS / 10;
            let Fate::Arrives(at) = line.take(sent, 1000) else { panic!("nothing is lost") };
            assert!(at >= sent + 10 * MS && at <= sent + 15 * MS, "{number}");
            arrivals.push(at);
        }
        assert!(arrivals.is_sorted());
        assert!(arrivals.windows(2).any(|pair| pair[1] - pair[0] > MS / 2));
    }
}
