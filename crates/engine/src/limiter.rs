//! The bandwidth limit: a token bucket that all channels share.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_units::{ByteCount, Rate};

use crate::limits;

/// Tokens that may be saved up: what the link may carry in one burst after a pause.
const BURST: Duration = Duration::from_millis(5);

/// Hands out permission to send.
#[derive(Debug)]
pub(crate) struct Limiter {
    rate: Option<Rate>,
    /// When everything permitted so far will have passed the link.
    paid_until: Mutex<Instant>,
    stopped: AtomicBool,
}

impl Limiter {
    /// A limiter for `rate`; `None` limits nothing.
    pub(crate) fn new(rate: Option<Rate>) -> Self {
        Self { rate, paid_until: Mutex::new(Instant::now()), stopped: AtomicBool::new(false) }
    }

    /// Waits until `bytes` may be sent.
    pub(crate) fn take(&self, bytes: usize) {
        let Some(cost) = self.rate.and_then(|rate| rate.time_for(ByteCount(bytes as u64))) else { return };
        let wait = {
            let mut paid_until = self.paid_until.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let now = Instant::now();
            let earliest = now.checked_sub(BURST).unwrap_or(now);
            let start = (*paid_until).max(earliest);
            *paid_until = start + cost;
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

    /// Ends all waits.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}
