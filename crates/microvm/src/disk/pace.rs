//! The limit of what the guest may write to its disk: a request is answered when its bytes are paid
//! for.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use godwit_units::{ByteCount, Rate};

#[derive(Debug, Default)]
struct Account {
    rate: Option<Rate>,
    paid_until: Option<Instant>,
}

/// The limit; none at first.
#[derive(Debug, Default)]
pub(super) struct Pace {
    account: Mutex<Account>,
    changed: Condvar,
}

impl Pace {
    /// Sets another limit, for whoever waits as well.
    pub(super) fn set(&self, rate: Option<Rate>) {
        let mut account = self.account.lock().unwrap_or_else(PoisonError::into_inner);
        account.rate = rate;
        account.paid_until = None;
        self.changed.notify_all();
    }

    /// Waits until `bytes` are paid for.
    pub(super) fn pay(&self, bytes: u64) {
        let mut account = self.account.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(cost) = account.rate.and_then(|rate| rate.time_for(ByteCount(bytes))) else {
            return;
        };
        let now = Instant::now();
        let until = account.paid_until.map_or(now, |paid| paid.max(now)) + cost;
        account.paid_until = Some(until);
        // Gone when the limit was changed meanwhile.
        while account.paid_until.is_some() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            account =
                self.changed.wait_timeout(account, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_written_is_paid_for() {
        let pace = Pace::default();
        pace.pay(u64::MAX);
        pace.set(Some(Rate::from_bytes_per_second(10e6)));
        let began = Instant::now();
        (0..10).for_each(|_| pace.pay(100_000));
        assert!(began.elapsed() >= Duration::from_millis(100));
    }

    #[test]
    fn whoever_waits_goes_on_when_the_limit_is_lifted() {
        let pace = Arc::new(Pace::default());
        pace.set(Some(Rate::from_bytes_per_second(1.0)));
        let waiting = Arc::clone(&pace);
        // Without the lift it would wait for a day.
        let thread = std::thread::spawn(move || waiting.pay(86_400));
        while pace.account.lock().unwrap().paid_until.is_none() {
            std::thread::yield_now();
        }
        pace.set(None);
        thread.join().unwrap();
    }
}
