//! The limits of bandwidth and of processor time: token buckets that all channels share.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_units::{ByteCount, Rate};

/// Tokens that may be saved up: what the link may carry in one burst after a pause.
const BURST: Duration = Duration::from_millis(5);
/// What one write may take of the link's time: with larger ones no second would be like the next.
const PIECE: Duration = Duration::from_millis(4);
/// Smaller pieces cost more than they are worth.
const LEAST_PIECE: usize = 4 << 10;

/// What of the processor time may be saved up: frames take a few milliseconds each.
const WORK_BURST: Duration = Duration::from_millis(20);

/// How long a wait goes on that nobody wants any more.
const SLICE: Duration = Duration::from_millis(10);

#[derive(Debug)]
struct Account {
    rate: Option<Rate>,
    /// When everything permitted so far will have passed the link.
    paid_until: Instant,
    /// Processors that may be at work.
    budget: Option<f64>,
    /// When the work done so far will have been within it.
    worked_until: Instant,
}

/// Hands out permission to send.
#[derive(Debug)]
pub(crate) struct Limiter {
    account: Mutex<Account>,
    stopped: AtomicBool,
    channels: AtomicUsize,
}

impl Limiter {
    /// A limiter for `rate`, shared by `channels`; `None` limits nothing.
    pub(crate) fn new(rate: Option<Rate>, channels: usize) -> Self {
        let now = Instant::now();
        let account = Account { rate, paid_until: now, budget: None, worked_until: now };
        Self {
            account: Mutex::new(account),
            stopped: AtomicBool::new(false),
            channels: AtomicUsize::new(channels.max(1)),
        }
    }

    /// Waits until `bytes` may be sent.
    pub(crate) fn take(&self, bytes: usize) {
        let start = {
            let mut account = self.account();
            let cost = account.rate.and_then(|rate| rate.time_for(ByteCount(bytes as u64)));
            let Some(cost) = cost else { return };
            let now = Instant::now();
            let earliest = now.checked_sub(BURST).unwrap_or(now);
            let start = account.paid_until.max(earliest);
            account.paid_until = start + cost;
            start
        };
        self.wait_until(start, || true);
    }

    /// Counts `work`, processor time that a channel has spent just now, and waits until all of it
    /// is within the budget; returns whether there was anything to wait for.
    pub(crate) fn worked(&self, work: Duration) -> bool {
        let (until, budget) = {
            let mut account = self.account();
            let Some(budget) = account.budget else { return false };
            let earliest = Instant::now().checked_sub(work + WORK_BURST);
            let start = earliest.map_or(account.worked_until, |it| it.max(account.worked_until));
            account.worked_until = start + work.div_f64(budget);
            (account.worked_until, budget)
        };
        // Nobody waits for a budget that is no longer in force.
        self.wait_until(until, || self.account().budget == Some(budget))
    }

    /// Waits as long as that is `wanted`; returns whether there was anything to wait for.
    fn wait_until(&self, until: Instant, wanted: impl Fn() -> bool) -> bool {
        let mut waited = false;
        // In slices: at a low rate a frame takes long, and an end must not wait for it.
        while !self.stopped.load(Ordering::Relaxed) && wanted() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            waited = true;
            std::thread::sleep(left.min(SLICE));
        }
        waited
    }

    /// Bytes to be sent at once, at the most.
    pub(crate) fn piece(&self) -> usize {
        let rate = self.account().rate;
        rate.map_or(usize::MAX, |rate| {
            ((rate.bytes_per_second() * PIECE.as_secs_f64()) as usize).max(LEAST_PIECE)
        })
    }

    /// A channel's share of the rate, in bytes a second.
    pub(crate) fn share(&self) -> Option<f64> {
        let channels = self.channels.load(Ordering::Relaxed) as f64;
        self.account().rate.map(|rate| rate.bytes_per_second() / channels)
    }

    /// The part of a processor that a channel may use, where there is a budget.
    pub(crate) fn work_share(&self) -> Option<f64> {
        let channels = self.channels.load(Ordering::Relaxed) as f64;
        self.account().budget.map(|budget| budget / channels)
    }

    /// Changes the rate, for all that is sent from now on.
    pub(crate) fn set(&self, rate: Option<Rate>) {
        self.account().rate = rate;
    }

    /// Changes the budget, percent of a processor, for all work from now on.
    pub(crate) fn set_budget(&self, percent: Option<NonZeroU32>) {
        let budget = percent.map(|percent| f64::from(percent.get()) / 100.0);
        let mut account = self.account();
        if account.budget != budget {
            // Work of before is forgotten: nobody waits long for what was set wrongly.
            (account.budget, account.worked_until) = (budget, Instant::now());
        }
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `channels` wait again, behind [`Self::stop`].
    pub(crate) fn restart(&self, channels: usize) {
        self.channels.store(channels.max(1), Ordering::Relaxed);
        self.stopped.store(false, Ordering::Relaxed);
    }

    /// Whether all waits were ended.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Ends all waits.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_and_shares_follow_the_rate() {
        let limiter = Limiter::new(None, 2);
        assert_eq!((limiter.piece(), limiter.share()), (usize::MAX, None));
        limiter.set_budget(NonZeroU32::new(30));
        assert_eq!(limiter.work_share(), Some(0.15));
        limiter.set(Some(Rate::from_bytes_per_second(12.5e6)));
        assert_eq!((limiter.piece(), limiter.share()), (50_000, Some(6.25e6)));
        limiter.set(Some(Rate::from_bytes_per_second(1000.0)));
        assert_eq!(limiter.piece(), LEAST_PIECE);
    }

    #[test]
    fn two_channels_together_keep_the_budget() {
        let limiter = Limiter::new(None, 2);
        let work = || {
            let began = Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    let work = || limiter.worked(Duration::from_millis(10));
                    scope.spawn(move || (0..10).filter(|_| work()).count());
                }
            });
            began.elapsed()
        };
        limiter.set_budget(NonZeroU32::new(100));
        // Two hundred milliseconds of work, of which the burst, and what is taken to have been done
        // before the first call, need not be waited for.
        let whole = work();
        assert!(whole >= Duration::from_millis(160), "{whole:?}");
        limiter.set_budget(NonZeroU32::new(50));
        let half = work();
        assert!(half >= Duration::from_millis(340), "{half:?}");
        limiter.set_budget(None);
        assert!(work() < whole);
    }

    #[test]
    fn nobody_waits_for_a_budget_that_was_lifted() {
        let limiter = Limiter::new(None, 1);
        limiter.set_budget(NonZeroU32::new(1));
        std::thread::scope(|scope| {
            // For a minute and a half.
            let waiting = scope.spawn(|| limiter.worked(Duration::from_secs(1)));
            let until = loop {
                let until = limiter.account().worked_until;
                if until > Instant::now() {
                    break until;
                }
                std::thread::yield_now();
            };
            limiter.set_budget(None);
            waiting.join().unwrap();
            assert!(Instant::now() < until);
        });
    }

    #[test]
    fn two_channels_together_keep_the_rate() {
        let limiter = Limiter::new(Some(Rate::from_bytes_per_second(20e6)), 2);
        let began = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..20).for_each(|_| limiter.take(100_000)));
            }
        });
        // 4 MB, of which one piece each and the burst need not be waited for.
        assert!(began.elapsed() >= Duration::from_millis(180));
    }
}
