//! The arithmetic of downtime.
//!
//! With bandwidth `B`, dirty rate `D`, synchronisation time `x` and transfer time `t` of one round,
//! a round in balance sends what was dirtied while the round before was synchronised and sent:
//!
//! ```text
//!   B·t = D·(x + t)     =>     t = D·x / (B − D)
//! ```
//!
//! so no downtime limit below `x + D·x/(B − D)` can be met however many rounds are made, and none
//! at all when `D ≥ B`. (From the analysis of dirty-bitmap synchronisation on the QEMU list that
//! proposed to merge fragmented clears.) Godwit harvests each segment just before it is sent, so
//! that harvests do not hold up sending. What is left of `x` is the look at all of memory that each
//! decision needs, on a link that is idle meanwhile. It is measured, and so is the last harvest,
//! with the guest stopped, which is part of the estimate.

use std::time::Duration;

use godwit_units::{ByteCount, Rate};

/// Transfer time of a round in balance, `D·x / (B − D)`; `None` when the guest dirties at least as
/// fast as the link carries.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::downtime::balanced_transfer;
/// use godwit_units::Rate;
///
/// let mib = |count: f64| Rate::from_bytes_per_second(count * 1_048_576.0);
/// let look = Duration::from_millis(10);
/// assert_eq!(balanced_transfer(mib(100.0), mib(50.0), look), Some(look));
/// assert_eq!(balanced_transfer(mib(100.0), mib(100.0), look), None);
/// ```
#[must_use]
pub fn balanced_transfer(
    bandwidth: Rate,
    dirty: Rate,
    synchronisation: Duration,
) -> Option<Duration> {
    let spare = bandwidth.bytes_per_second() - dirty.bytes_per_second();
    if spare <= 0.0 {
        return None;
    }
    let seconds = dirty.bytes_per_second() * synchronisation.as_secs_f64() / spare;
    Duration::try_from_secs_f64(seconds).ok()
}

/// The downtime if the guest were stopped now: what remains over the link, then the fixed costs
/// (last harvest, device state, flush of disks, handover). `None` before the bandwidth is known.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::downtime::expected;
/// use godwit_units::{ByteCount, Rate};
///
/// let link = Rate::from_bytes_per_second(100.0 * 1_048_576.0);
/// let fixed = Duration::from_millis(30);
/// assert_eq!(expected(ByteCount(1 << 20), link, fixed), Some(Duration::from_millis(40)));
/// assert_eq!(expected(ByteCount(1 << 20), Rate::ZERO, fixed), None);
/// ```
#[must_use]
pub fn expected(remaining: ByteCount, bandwidth: Rate, fixed: Duration) -> Option<Duration> {
    bandwidth.time_for(remaining)?.checked_add(fixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(bytes: f64) -> Rate {
        Rate::from_bytes_per_second(bytes)
    }

    #[test]
    fn the_balance_of_the_formula() {
        let (bandwidth, dirty, x) = (rate(10e9), rate(4e9), Duration::from_millis(60));
        let t = balanced_transfer(bandwidth, dirty, x).unwrap();
        assert_eq!(t, Duration::from_millis(40));
        let sent = bandwidth.bytes_per_second() * t.as_secs_f64();
        let dirtied = dirty.bytes_per_second() * (x + t).as_secs_f64();
        assert!((sent - dirtied).abs() < 1.0);
    }

    #[test]
    fn no_balance_when_the_guest_is_faster() {
        assert_eq!(balanced_transfer(rate(1e9), rate(1e9), Duration::from_millis(1)), None);
        assert_eq!(balanced_transfer(rate(1e9), rate(2e9), Duration::ZERO), None);
        assert_eq!(
            balanced_transfer(rate(1e9), Rate::ZERO, Duration::from_millis(1)),
            Some(Duration::ZERO)
        );
    }

    #[test]
    fn expected_downtime_adds_the_fixed_costs() {
        let fixed = Duration::from_millis(10);
        assert_eq!(
            expected(ByteCount(1_000_000), rate(1e8), fixed),
            Some(Duration::from_millis(20))
        );
        assert_eq!(expected(ByteCount(1), Rate::ZERO, fixed), None);
        assert_eq!(expected(ByteCount::ZERO, Rate::ZERO, fixed), Some(fixed));
    }
}
