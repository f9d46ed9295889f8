//! Connections that are lost: for how long they are tried for, and when the next attempt is due.
//!
//! Attempts come soon at first, since most losses are short, then a little more seldom: a link that
//! is back should not wait for us.

use std::time::{Duration, Instant};

use crate::report::Severed;
use crate::{EngineError, limits};

/// One outage.
#[derive(Debug)]
pub(super) struct Outage {
    began: Instant,
    limit: Duration,
    cause: EngineError,
    attempts: u32,
    last: Option<EngineError>,
}

impl Outage {
    /// One that begins now with `cause`, and ends within `limit` or for good.
    pub(super) fn new(cause: EngineError, limit: Duration) -> Self {
        Self { began: Instant::now(), limit, cause, attempts: 0, last: None }
    }

    /// Since it began.
    pub(super) fn time(&self) -> Duration {
        self.began.elapsed()
    }

    /// Whether there is no time left.
    pub(super) fn is_over(&self) -> bool {
        self.time() >= self.limit
    }

    /// An attempt is due; returns how long to wait before it.
    pub(super) fn next_attempt(&mut self) -> Duration {
        let doublings = self.attempts.min(16);
        self.attempts += 1;
        (limits::FIRST_RETRY * 2u32.pow(doublings)).min(limits::LAST_RETRY)
    }

    /// The attempt has failed.
    pub(super) fn failed(&mut self, error: EngineError) {
        tracing::info!(attempt = self.attempts, %error, "not taken up again yet");
        self.last = Some(error);
    }

    /// It did not end in time.
    pub(super) fn into_error(self) -> EngineError {
        let Self { cause, limit, last, .. } = self;
        EngineError::Severed { cause: Box::new(cause), limit, last: last.map(Box::new) }
    }

    /// What an operator sees of it.
    pub(super) fn shown(&self) -> Severed {
        Severed {
            since: self.time(),
            left: self.limit.saturating_sub(self.time()),
            attempts: self.attempts,
            why: self.last.as_ref().unwrap_or(&self.cause).to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_come_soon_and_never_much_more_seldom() {
        let mut outage = Outage::new(EngineError::Cancelled, Duration::from_secs(60));
        let pauses: Vec<u128> = (0..40).map(|_| outage.next_attempt().as_millis()).collect();
        assert_eq!(pauses[..5], [50, 100, 100, 100, 100]);
        assert_eq!(pauses[39], 100);
    }

    #[test]
    fn it_ends_in_time_and_says_why_it_began_and_what_was_tried_last() {
        let lost = EngineError::Silent { peer: "destination", limit: limits::LINK };
        let mut outage = Outage::new(lost, Duration::ZERO);
        assert!(outage.is_over());
        assert!(outage.shown().why.contains("nothing was heard"));
        let _ = outage.next_attempt();
        outage.failed(EngineError::Interrupted);
        assert_eq!((outage.shown().attempts, outage.shown().why), (1, "it was interrupted".into()));
        let error = outage.into_error().to_string();
        assert!(
            error.starts_with("nothing was heard of the destination for 10s")
                && error.ends_with("taken up again within 0s (at last: it was interrupted)"),
            "{error}"
        );
    }
}
