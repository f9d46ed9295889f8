//! From a share of time to the two slices of a period.
//!
//! Invariant: both slices of a share above zero are longer than nothing, so a throttled guest still
//! runs.

use std::time::Duration;

use crate::ThrottleError;

/// Stop and run together, up to 90 %; 100 ms at 99 %. Long against the cost of stopping (tens of
/// microseconds), short against what a guest's clock and network mind.
pub const PERIOD: Duration = Duration::from_millis(10);
/// The least that is worth letting a guest run: what it has to do for its clock and its interrupts,
/// which come at once when it runs again, takes a part of that: of 100 us nothing was left for its
/// work, of 500 us not always something. Stronger throttles have longer periods.
const LEAST_RUN: Duration = Duration::from_millis(1);
/// The largest share: what is left must suffice to answer a wish to stop.
pub const MOST: f64 = 0.99;

/// While the VMM is asked to do something, nobody may wait longer than this for a vCPU that holds a
/// lock.
const SHORT_STOP: Duration = Duration::from_micros(1500);
/// What a vCPU needs to leave the guest and to give its lock away.
const SHORT_RUN: Duration = Duration::from_micros(200);

/// How long vCPUs stand still and run within a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slices {
    /// Stopped.
    pub stop: Duration,
    /// Running.
    pub run: Duration,
}

impl Slices {
    /// The slices in which vCPUs do not run for `share` of the time; none for 0.
    ///
    /// # Errors
    /// When it is not between 0 and [`MOST`].
    pub fn of(share: f64) -> Result<Option<Self>, ThrottleError> {
        if !(0.0..=MOST).contains(&share) {
            return Err(ThrottleError::Share(share));
        }
        let period = PERIOD.max(LEAST_RUN.div_f64(1.0 - share));
        let stop = period.mul_f64(share);
        // A share so small that it comes to nothing is nothing.
        Ok((!stop.is_zero()).then(|| Self { stop, run: period.saturating_sub(stop) }))
    }

    /// About the same share in a shorter period: the VMM answers sooner. The largest shares become
    /// a little smaller.
    #[must_use]
    pub fn short(self) -> Self {
        if self.stop <= SHORT_STOP {
            return self;
        }
        let run = self.run.mul_f64(SHORT_STOP.as_secs_f64() / self.stop.as_secs_f64());
        Self { stop: SHORT_STOP, run: run.max(SHORT_RUN) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_is_divided_by_the_share() {
        let slices = |share| Slices::of(share).unwrap();
        let micros = |slices: Slices| (slices.stop.as_micros(), slices.run.as_micros());
        assert_eq!(slices(0.0), None);
        assert_eq!(slices(0.25).map(micros), Some((2500, 7500)));
        assert_eq!(slices(0.99).map(micros), Some((99_000, 1000)));
        assert_eq!(slices(0.95).map(micros), Some((19_000, 1000)));
        assert_eq!(slices(0.5).map(Slices::short).map(micros), Some((1500, 1500)));
        assert_eq!(slices(0.99).map(Slices::short).map(micros), Some((1500, 200)));
        assert_eq!(slices(0.1).map(Slices::short).map(micros), Some((1000, 9000)));
    }

    #[test]
    fn what_is_no_share_is_refused() {
        for share in [-0.01, 0.991, 1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(Slices::of(share), Err(ThrottleError::Share(_))), "{share}");
        }
    }
}
