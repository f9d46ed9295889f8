//! The link's bandwidth, from more history than one sample.

use std::collections::VecDeque;
use std::time::Duration;

use godwit_units::{ByteCount, Rate};

/// History worth keeping: a sample of 100 ms, as QEMU takes it, is noise on a shared link.
const HISTORY: Duration = Duration::from_secs(2);
/// Samples of less are dominated by fixed costs and say nothing about the link.
const SMALLEST: ByteCount = ByteCount(1 << 20);

/// Average bandwidth over the last samples that span at least two seconds (or all there are).
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::Bandwidth;
/// use godwit_units::ByteCount;
///
/// let mut bandwidth = Bandwidth::default();
/// bandwidth.observe(ByteCount(100 << 20), Duration::from_secs(1));
/// bandwidth.observe(ByteCount(300 << 20), Duration::from_secs(1));
/// assert_eq!(bandwidth.average().to_string(), "200MiB/s");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Bandwidth {
    samples: VecDeque<(ByteCount, Duration)>,
}

impl Bandwidth {
    /// Takes in that `sent` bytes took `time`. Samples under 1 MiB are passed over once there is a
    /// larger one.
    pub fn observe(&mut self, sent: ByteCount, time: Duration) {
        if sent < SMALLEST && !self.samples.is_empty() {
            return;
        }
        self.samples.push_back((sent, time));
        let mut total: Duration = self.samples.iter().map(|(_, time)| *time).sum();
        while let Some((_, oldest)) = self.samples.front().copied() {
            if total - oldest < HISTORY {
                break;
            }
            total -= oldest;
            self.samples.pop_front();
        }
    }

    /// The average; zero before the first sample.
    #[must_use]
    pub fn average(&self) -> Rate {
        let bytes: ByteCount = self.samples.iter().map(|(bytes, _)| *bytes).sum();
        let time: Duration = self.samples.iter().map(|(_, time)| *time).sum();
        bytes.per(time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn old_samples_fade() {
        let mut bandwidth = Bandwidth::default();
        assert_eq!(bandwidth.average(), Rate::ZERO);
        bandwidth.observe(ByteCount(1000 * MIB), Duration::from_secs(1));
        for _ in 0..2 {
            bandwidth.observe(ByteCount(10 * MIB), Duration::from_secs(1));
        }
        assert_eq!(bandwidth.average().to_string(), "10MiB/s");
    }

    #[test]
    fn tiny_rounds_do_not_spoil_the_average() {
        let mut bandwidth = Bandwidth::default();
        bandwidth.observe(ByteCount(1000 * MIB), Duration::from_secs(1));
        bandwidth.observe(ByteCount(4096), Duration::from_millis(10));
        assert_eq!(bandwidth.average().to_string(), "1000MiB/s");
    }
    #[test]
    fn what_is_kept_spans_two_seconds() {
        let ms = Duration::from_millis;
        let average = |newest| {
            let mut bandwidth = Bandwidth::default();
            bandwidth.observe(ByteCount(100 * MIB), ms(1000));
            bandwidth.observe(ByteCount(10 * MIB), ms(1000));
            bandwidth.observe(ByteCount(10 * MIB), ms(newest));
            bandwidth.average().bytes_per_second() / MIB as f64
        };
        // Without the oldest, two seconds are left, or not quite.
        assert_eq!(average(1000), 10.0);
        assert_eq!((average(999) * 2.999).round(), 120.0);
    }

    #[test]
    fn a_mebibyte_is_a_sample_and_a_smaller_one_only_the_first() {
        let second = Duration::from_secs(1);
        let average = |first: u64, then: u64| {
            let mut bandwidth = Bandwidth::default();
            bandwidth.observe(ByteCount(first), second);
            bandwidth.observe(ByteCount(then), second);
            bandwidth.average().bytes_per_second()
        };
        assert_eq!(average(3 * MIB, MIB), 2.0 * MIB as f64);
        assert_eq!(average(3 * MIB, MIB - 1), 3.0 * MIB as f64);
        assert_eq!(average(1000, 2000), 1000.0, "until there is a larger one");
    }
}
