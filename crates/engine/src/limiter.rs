//! The bandwidth limit: a token bucket that all channels share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_units::{ByteCount, Rate};

use crate::limits;

/// Tokens that may be saved up: what the link may carry in one burst after a pause.
const BURST: Duration = Duration::from_millis(5);

#[derive(Debug)]
struct Account {
    rate: Option<Rate>,
    /// When everything permitted so far will have passed the link.
    paid_until: Instant,
}

/// Hands out permission to send.
#[derive(Debug)]
pub(crate) struct Limiter {
    account: Mutex<Account>,
    stopped: AtomicBool,
}

impl Limiter {
    /// A limiter for `rate`; `None` limits nothing.
    pub(crate) fn new(rate: Option<Rate>) -> Self {
        let account = Account { rate, paid_until: Instant::now() };
        Self { account: Mutex::new(account), stopped: AtomicBool::new(false) }
    }

    /// Waits until `bytes` may be sent.
    pub(crate) fn take(&self, bytes: usize) {
        let wait = {
            let mut account = self.account();
            let cost = account.rate.and_then(|rate| rate.time_for(ByteCount(bytes as u64)));
            let Some(cost) = cost else { return };
            let now = Instant::now();
            let earliest = now.checked_sub(BURST).unwrap_or(now);
            let start = account.paid_until.max(earliest);
            account.paid_until = start + cost;
            start.saturating_duration_since(now)
        };
        // In slices: at a low rate a frame takes long, and an end must not wait for it.
        let until = Instant::now() + wait;
        while !self.stopped.load(Ordering::Relaxed) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(limits::TICK));
        }
    }

    /// Changes the rate, for all that is sent from now on.
    pub(crate) fn set(&self, rate: Option<Rate>) {
        self.account().rate = rate;
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all waits.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}
