//! The lines of JSON in which a migration is told: what `godwit migrate --json` prints and what who
//! watches it is sent are the same.

use godwit_engine::report::{Measures, Progress, Severed};
use godwit_engine::{EngineError, Failure, Survivor};
use serde_json::{Value, json};

use crate::messages::Cost;

/// One look.
#[must_use]
pub fn progress(progress: &Progress) -> Value {
    with_fields_of(json!({ "event": "progress" }), serde_json::to_value(progress))
}

/// That the connections are lost, or stand again.
#[must_use]
pub fn turn(progress: &Progress) -> Value {
    match &progress.severed {
        Some(Severed { left, why, .. }) => {
            json!({ "event": "severed", "why": why, "left_ms": left.as_secs_f64() * 1e3 })
        }
        None => json!({ "event": "resumed" }),
    }
}

/// The last line of one that came to a good end.
#[must_use]
pub fn migrated(measures: &Measures, cost: Cost) -> Value {
    let Cost { cpu_ms, peak_rss_bytes: rss } = cost;
    let head = json!({ "outcome": "migrated", "cpu_ms": cpu_ms, "peak_rss_bytes": rss });
    with_fields_of(head, serde_json::to_value(measures))
}

/// The last line of one that did not.
#[must_use]
pub fn failed(failure: &Failure) -> Value {
    let outcome = match (&failure.cause, failure.survivor) {
        (_, Survivor::Unknown) => "in-doubt",
        (EngineError::Cancelled, _) => "cancelled",
        _ => "failed",
    };
    let guest = match failure.survivor {
        Survivor::Source => "source",
        Survivor::SourceStopped => "source-stopped",
        Survivor::Unknown => "unknown",
        Survivor::Destination => "destination",
        Survivor::Ended => "ended",
        Survivor::Lost => "lost",
    };
    json!({
        "outcome": outcome,
        "phase": failure.phase.to_string(),
        "guest": guest,
        "error": failure.cause.to_string(),
    })
}

/// The last line of one that was refused before anything began.
#[must_use]
pub fn refused(error: &dyn std::fmt::Display) -> Value {
    json!({ "outcome": "refused", "guest": "untouched", "error": error.to_string() })
}

fn with_fields_of(mut head: Value, of: serde_json::Result<Value>) -> Value {
    if let (Value::Object(head), Ok(Value::Object(fields))) = (&mut head, of) {
        head.extend(fields);
    }
    head
}
