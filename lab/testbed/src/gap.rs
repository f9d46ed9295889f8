//! From samples of the two counters to the guest's gaps. Pure: times come from the caller.
//!
//! The same page exists twice: on the source, where the guest counts, and on the destination, where
//! older copies of it arrive until the guest counts there. The counter only grows, so the greater
//! of the two is the guest's. Keeps one promise: a gap is stated with what was really seen of it,
//! namely that the guest stood still at least from the first sample that showed its last count to
//! the last sample that showed the same, and at most one sampling interval more at either end. An
//! observer that was held up itself thus widens the bounds; it does not invent a gap.

use std::time::Duration;

/// A time in which the guest did not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// From the first sample with the last count before the gap to the first sample with a count
    /// after it: the best estimate, right to within [`Self::resolution`] either way.
    pub length: Duration,
    /// For so long the guest certainly stood still.
    pub at_least: Duration,
    /// It certainly did not stand still for longer.
    pub at_most: Duration,
    /// The longer of the two sampling intervals at its ends.
    pub resolution: Duration,
    /// When it ended, counted like the samples' times.
    pub end: Duration,
}

/// What an observer saw of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// The gap from the last count on the source to the first on the destination, if the guest went
    /// there.
    pub switchover: Option<Gap>,
    /// The longest other gap, before or after.
    pub stall: Option<Gap>,
    /// The source counted after the destination had: two guests from one.
    pub ran_on_both: bool,
    /// Samples taken.
    pub samples: u64,
    /// The longest time between two samples.
    pub longest_interval: Duration,
    /// How far the guest counted while it was observed.
    pub counted: u64,
}

impl Observation {
    /// The longest gap of all.
    #[must_use]
    pub fn longest(&self) -> Option<Gap> {
        [self.switchover, self.stall].into_iter().flatten().max_by_key(|gap| gap.at_least)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
}

/// The first sample that showed a count, and the sample before that one.
#[derive(Clone, Copy, Debug)]
struct Progress {
    before: Duration,
    at: Duration,
    on: Side,
}

/// Takes samples in the order of their times.
#[derive(Clone, Debug, Default)]
pub(crate) struct GapFinder {
    latest: Option<Latest>,
    seen: Observation,
}

#[derive(Clone, Copy, Debug)]
struct Latest {
    at: Duration,
    count: u64,
    progress: Progress,
    /// The source's last count, once the destination has counted further.
    left_behind: Option<u64>,
}

impl GapFinder {
    /// A sample taken at `at`. The destination must have been read before the source: then a copy
    /// that arrives meanwhile cannot be ahead of it.
    pub(crate) fn sample(&mut self, at: Duration, source: u64, destination: Option<u64>) {
        let ahead = destination.filter(|&count| count > source);
        let (count, on) = ahead.map_or((source, Side::Source), |count| (count, Side::Destination));
        self.seen.samples += 1;
        let Some(latest) = &mut self.latest else {
            let progress = Progress { before: at, at, on };
            self.latest = Some(Latest { at, count, progress, left_behind: ahead.map(|_| source) });
            return;
        };
        self.seen.longest_interval = self.seen.longest_interval.max(at.saturating_sub(latest.at));
        match latest.left_behind {
            Some(left) if source > left => self.seen.ran_on_both = true,
            None if on == Side::Destination => latest.left_behind = Some(source),
            _ => {}
        }
        if count > latest.count {
            let last = latest.progress;
            let gap = Gap {
                length: at.saturating_sub(last.at),
                at_least: latest.at.saturating_sub(last.at),
                at_most: at.saturating_sub(last.before),
                resolution: at.saturating_sub(latest.at).max(last.at.saturating_sub(last.before)),
                end: at,
            };
            self.seen.counted += count - latest.count;
            latest.progress = Progress { before: latest.at, at, on };
            latest.count = count;
            if (last.on, on) == (Side::Source, Side::Destination) {
                self.seen.switchover = Some(gap);
            } else if self.seen.stall.is_none_or(|longest| gap.at_least > longest.at_least) {
                self.seen.stall = Some(gap);
            }
        }
        latest.at = at;
    }

    /// What was seen.
    pub(crate) fn observation(&self) -> Observation {
        self.seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    fn observe(samples: &[(u64, u64, Option<u64>)]) -> Observation {
        let mut finder = GapFinder::default();
        samples
            .iter()
            .for_each(|&(at, source, destination)| finder.sample(us(at), source, destination));
        finder.observation()
    }

    #[test]
    fn the_switchover_is_between_the_last_count_here_and_the_first_there() {
        let seen = observe(&[
            (0, 10, None),
            (100, 20, None),
            (200, 30, Some(15)),
            (300, 35, Some(30)),
            (400, 35, Some(35)),
            (500, 35, Some(35)),
            (600, 35, Some(36)),
            (700, 35, Some(50)),
        ]);
        let gap = seen.switchover.unwrap();
        assert_eq!((gap.length, gap.at_least, gap.at_most), (us(300), us(200), us(400)));
        assert_eq!((gap.resolution, gap.end), (us(100), us(600)));
        assert_eq!(seen.stall.unwrap().at_least, us(0));
        assert_eq!(seen.longest(), seen.switchover);
        assert!(!seen.ran_on_both);
        assert_eq!((seen.samples, seen.counted), (8, 40));
    }

    #[test]
    fn a_stall_on_the_source_is_no_switchover() {
        let seen = observe(&[
            (0, 10, None),
            (100, 20, None),
            (200, 20, None),
            (5000, 20, None),
            (5100, 30, None),
        ]);
        assert_eq!(seen.switchover, None);
        let stall = seen.stall.unwrap();
        assert_eq!((stall.at_least, stall.length, stall.at_most), (us(4900), us(5000), us(5100)));
        assert_eq!(seen.longest_interval, us(4800));
    }

    #[test]
    fn an_observer_held_up_invents_no_gap() {
        let seen = observe(&[(0, 10, None), (100, 20, None), (9000, 30, None), (9100, 31, None)]);
        assert_eq!(seen.stall.unwrap().at_least, us(0));
        assert_eq!(seen.longest_interval, us(8900));
    }

    #[test]
    fn two_guests_from_one_are_told() {
        let moved = [(0, 10, None), (100, 20, Some(25)), (200, 20, Some(30)), (300, 21, Some(40))];
        assert!(!observe(&moved[..3]).ran_on_both);
        assert!(observe(&moved).ran_on_both);
    }
}
