//! When a coordinator counts as gone: its lease is renewed again and again, and whoever waits for
//! it sees by its own clock how long that has not happened. No two clocks are compared.

use std::time::Duration;

/// What one who waits has seen of a lease.
///
/// ```
/// use std::time::Duration;
/// use godwit_evacuate::Silence;
///
/// let mut silence = Silence::of(Duration::from_secs(5));
/// assert!(!silence.see(7, Duration::from_secs(100)));
/// assert!(!silence.see(8, Duration::from_secs(104)), "it was renewed");
/// assert!(silence.see(8, Duration::from_secs(109)));
/// ```
#[derive(Clone, Debug)]
pub struct Silence {
    limit: Duration,
    seen: Option<(u64, Duration)>,
}

impl Silence {
    /// One that lasts for `limit`.
    #[must_use]
    pub fn of(limit: Duration) -> Self {
        Self { limit, seen: None }
    }

    /// The lease is at `revision`, `now` by our clock. Whether it has been so for too long.
    pub fn see(&mut self, revision: u64, now: Duration) -> bool {
        match self.seen {
            Some((known, since)) if known == revision => now.saturating_sub(since) >= self.limit,
            _ => {
                self.seen = Some((revision, now));
                false
            }
        }
    }

    /// A time in which the lease could not be seen does not count: whoever has it could not renew
    /// it either.
    pub fn forget(&mut self) {
        self.seen = None;
    }
}
