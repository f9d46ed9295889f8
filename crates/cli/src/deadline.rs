//! `--finish-by`: what is done about a migration that has not ended in time.

use std::time::Duration;

use clap::ValueEnum;
use godwit_engine::report::{Progress, Stage};
use godwit_units::format_duration;

/// What is done then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnTimeout {
    /// The guest stays where it is.
    Cancel,
    /// It is stopped and moves, however long that takes.
    Force,
    /// It runs on at the destination, and what is left follows.
    Postcopy,
}

/// Sees whether time is over.
#[derive(Debug)]
pub(crate) struct Deadline {
    limit: Duration,
    then: OnTimeout,
    struck: bool,
}

impl Deadline {
    pub(crate) fn new(limit: Duration, then: OnTimeout) -> Self {
        Self { limit, then, struck: false }
    }

    /// What is to be done now, which is told once. A switchover has to begin before the end, by as
    /// much as it is expected to take; one that has begun is left alone.
    pub(crate) fn look(&mut self, progress: &Progress) -> Option<OnTimeout> {
        let ahead = match self.then {
            OnTimeout::Cancel | OnTimeout::Postcopy => Duration::ZERO,
            OnTimeout::Force => progress.expected_downtime.unwrap_or_default(),
        };
        let due = progress.stage == Stage::PreCopy && progress.elapsed + ahead >= self.limit;
        let strikes = due && !self.struck;
        self.struck |= due;
        strikes.then_some(self.then)
    }

    /// Whether the migration was cancelled for it.
    pub(crate) fn has_cancelled(&self) -> bool {
        self.struck && self.then == OnTimeout::Cancel
    }

    /// What is done now, for people.
    pub(crate) fn words(&self) -> String {
        let limit = format_duration(self.limit);
        match self.then {
            OnTimeout::Cancel => {
                format!("it has not ended within {limit} (--finish-by): cancelled")
            }
            OnTimeout::Force => {
                format!("it would not end within {limit} (--finish-by): switching over now")
            }
            OnTimeout::Postcopy => format!(
                "it has not ended within {limit} (--finish-by): switching over now, and what is \
                 left follows"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn look(at: u64, stage: &str, downtime: Option<u64>) -> Progress {
        serde_json::from_value(json!({
            "elapsed_ms": at, "stage": stage, "round": 0, "round_ended": false, "sent_bytes": 0,
            "remaining_bytes": 0, "dirty_bytes_per_second": null,
            "bandwidth_bytes_per_second": null, "expected_downtime_ms": downtime,
            "remaining_time": null, "throttle": 0.0, "guest_speed": null, "delayed_segments": 0,
            "disk_limit_bytes_per_second": null, "advice": null, "warning": null,
        }))
        .unwrap()
    }

    #[test]
    fn it_strikes_once_and_not_where_the_guest_is_stopped() {
        let mut deadline = Deadline::new(Duration::from_secs(5), OnTimeout::Cancel);
        assert_eq!(deadline.look(&look(4999, "pre-copy", Some(800))), None);
        assert_eq!(deadline.look(&look(5000, "stop-and-copy", None)), None);
        assert!(!deadline.has_cancelled());
        assert_eq!(deadline.look(&look(5000, "pre-copy", None)), Some(OnTimeout::Cancel));
        assert_eq!(deadline.look(&look(6000, "pre-copy", None)), None);
        assert!(deadline.has_cancelled() && deadline.words().contains("within 5s"));
    }

    #[test]
    fn a_switchover_begins_so_early_that_it_may_end_in_time() {
        let mut deadline = Deadline::new(Duration::from_secs(5), OnTimeout::Force);
        assert_eq!(deadline.look(&look(4100, "pre-copy", Some(800))), None);
        assert_eq!(deadline.look(&look(4200, "pre-copy", Some(800))), Some(OnTimeout::Force));
        assert_eq!(deadline.look(&look(4300, "pre-copy", Some(800))), None);
        assert!(!deadline.has_cancelled());
    }
}
