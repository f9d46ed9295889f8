//! Time that was promised to threads and that they did not get, since the host had no processor for
//! them just then.
//!
//! A slice of 100 us is shorter than what a busy host's scheduler takes to come to a thread that
//! may run. Without this a strong throttle on such a host would stop the guest altogether.
//! Invariant: what is owed is bounded, so a guest that slept does not run free for long when it
//! wakes.

use std::time::Duration;

/// The most that is made up for at once.
const MOST: Duration = Duration::from_millis(5);

/// What is owed to the thread that ran most.
#[derive(Debug, Default)]
pub(crate) struct Debt {
    before: Vec<(i32, Duration)>,
    promised: Duration,
}

impl Debt {
    /// All have stopped, with these CPU times, and will run for `slice`. Returns how much longer
    /// they are to run.
    pub(crate) fn settle(&mut self, times: Vec<(i32, Duration)>, slice: Duration) -> Duration {
        let ran = times.iter().filter_map(|(tid, now)| {
            let (_, before) = self.before.iter().find(|(other, _)| other == tid)?;
            Some(now.saturating_sub(*before))
        });
        // Of threads that are new nothing is known.
        let owed =
            ran.max().map_or(Duration::ZERO, |ran| self.promised.saturating_sub(ran).min(MOST));
        self.before = times;
        self.promised = slice + owed;
        owed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLICE: Duration = Duration::from_micros(100);

    #[test]
    fn what_was_not_given_is_given_later_within_bounds() {
        let mut debt = Debt::default();
        let at = |first: u64, second: u64| {
            vec![(1, Duration::from_micros(first)), (2, Duration::from_micros(second))]
        };
        assert_eq!(debt.settle(at(0, 0), SLICE), Duration::ZERO);
        // Neither ran; then the second did, for all that was promised, and then for half of it.
        assert_eq!(debt.settle(at(0, 0), SLICE), SLICE);
        assert_eq!(debt.settle(at(0, 200), SLICE), Duration::ZERO);
        assert_eq!(debt.settle(at(0, 250), SLICE), SLICE / 2);
        // None for a long time.
        let owed = (0..200).map(|_| debt.settle(at(0, 250), SLICE)).max();
        assert_eq!(owed, Some(MOST));
    }

    #[test]
    fn threads_that_are_new_are_owed_nothing() {
        let mut debt = Debt::default();
        debt.settle(vec![(1, Duration::ZERO)], SLICE);
        assert_eq!(debt.settle(vec![(2, Duration::ZERO)], SLICE), Duration::ZERO);
        assert_eq!(debt.settle(Vec::new(), SLICE), Duration::ZERO);
    }
}
