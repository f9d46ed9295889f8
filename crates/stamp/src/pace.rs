//! When the next write is due.
//!
//! Keeps one promise: over any stretch without a stall the number of writes is the rate times the
//! time, and after a stall (the guest stood still, or its host was busy) at most
//! [`Pace::CATCH_UP_MICROS`] worth of writes is made up for, so that a pause does not turn into a
//! burst. Reading the clock is left to the caller.

/// Spreads writes evenly over time.
#[derive(Clone, Debug)]
pub struct Pace {
    per_second: u64,
    since_micros: u64,
    done: u64,
}

impl Pace {
    /// The longest stall that is made up for.
    pub const CATCH_UP_MICROS: u64 = 50_000;

    /// `per_second` writes a second from `now_micros` on.
    #[must_use]
    pub fn new(per_second: u64, now_micros: u64) -> Self {
        Self { per_second, since_micros: now_micros, done: 0 }
    }

    /// How many writes are due at `now_micros`; they count as done.
    pub fn due(&mut self, now_micros: u64) -> u64 {
        let elapsed = now_micros.saturating_sub(self.since_micros);
        let wanted = elapsed * self.per_second / 1_000_000;
        let due = wanted.saturating_sub(self.done);
        let most = (Self::CATCH_UP_MICROS * self.per_second / 1_000_000).max(1);
        self.done += due;
        // A fresh start each second keeps the products small; on a whole second no fraction is
        // lost.
        if elapsed >= 1_000_000 {
            let seconds = elapsed / 1_000_000;
            self.since_micros += seconds * 1_000_000;
            self.done -= seconds * self.per_second;
        }
        due.min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_follow_the_rate() {
        let mut pace = Pace::new(2000, 500);
        let total: u64 = (0..100_000).map(|step| pace.due(500 + step * 37)).sum();
        assert_eq!(total, 99_999 * 37 * 2000 / 1_000_000);
    }

    #[test]
    fn a_stall_does_not_turn_into_a_burst() {
        let mut pace = Pace::new(2000, 0);
        assert_eq!(pace.due(1_000), 2);
        assert_eq!(pace.due(3_001_000), 100);
        assert_eq!(pace.due(3_002_000), 2);
    }

    #[test]
    fn a_rate_of_zero_never_writes() {
        let mut pace = Pace::new(0, 0);
        assert_eq!(pace.due(10_000_000), 0);
    }
}
