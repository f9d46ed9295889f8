//! Connections that are lost: for how long they are tried for, and when the next attempt is due.
//!
//! Attempts follow each other soon: a link that is back should not wait for us, and one that
//! refuses costs next to nothing.

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
    told: Option<Instant>,
}

impl Outage {
    /// One that begins now with `cause`, and ends within `limit` or for good.
    pub(super) fn new(cause: EngineError, limit: Duration) -> Self {
        Self { began: Instant::now(), limit, cause, attempts: 0, last: None, told: None }
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
        self.attempts += 1;
        limits::RETRY
    }

    /// Whether an operator is to be told how it stands: every [`limits::TICK`], though attempts
    /// come more often.
    pub(super) fn is_to_be_told(&mut self) -> bool {
        let due = self.told.is_none_or(|told| told.elapsed() >= limits::TICK);
        self.told = if due { Some(Instant::now()) } else { self.told };
        due
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
    fn it_is_told_of_at_once_and_not_at_every_attempt() {
        let mut outage = Outage::new(EngineError::Cancelled, Duration::from_secs(60));
        let told = (0..100).filter(|_| outage.is_to_be_told()).count();
        assert!(outage.next_attempt() < limits::TICK && (1..100).contains(&told), "{told}");
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
