//! What a migration tells while it runs, and its measures at the end.
//!
//! The measures are the six by which a migration is judged: set-up time, total time, total data, downtime, loss
//! of guest performance (how long it was tracked; how slow it was only an observer of the guest can tell), and the
//! resources used.

use std::time::Duration;

use godwit_units::{ByteCount, PageCount, Rate};
use serde::{Deserialize, Serialize};

/// What is going on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// A round of pre-copy.
    PreCopy,
    /// The guest is stopped.
    StopAndCopy,
    /// The destination loads and takes over.
    Handover,
}

/// A look at a migration in progress.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Since the start.
    pub elapsed: Duration,
    /// What is going on.
    pub stage: Stage,
    /// The round, counted from 0.
    pub round: u32,
    /// Whether the round has just ended: the estimates below are new.
    pub round_ended: bool,
    /// Bytes put on the wire so far.
    pub sent: ByteCount,
    /// What is still to be sent, as far as known.
    pub remaining: ByteCount,
    /// How fast the guest dirties memory, from the last round.
    pub dirty_rate: Option<Rate>,
    /// How fast the link carries.
    pub bandwidth: Option<Rate>,
    /// Downtime if the guest were stopped now.
    pub expected_downtime: Option<Duration>,
}

/// One round as it was.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RoundMeasures {
    /// Its number.
    pub round: u32,
    /// From its start to the acknowledgement that all is in place.
    #[serde(rename = "ms", with = "milliseconds")]
    pub time: Duration,
    /// Pages whose bytes were sent.
    #[serde(rename = "data_pages", with = "pages")]
    pub data: PageCount,
    /// Pages that were only named, being zero.
    #[serde(rename = "zero_pages", with = "pages")]
    pub zero: PageCount,
    /// Bytes put on the wire.
    #[serde(rename = "sent_bytes", with = "bytes")]
    pub sent: ByteCount,
    /// Pages dirty at its end.
    #[serde(rename = "remaining_pages", with = "pages")]
    pub remaining: PageCount,
}

/// Where the downtime went.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct DowntimeParts {
    /// From the stop of the vCPUs until all devices were drained.
    #[serde(rename = "drain_ms", with = "milliseconds")]
    pub drain: Duration,
    /// Last harvest, copy and acknowledgement.
    #[serde(rename = "copy_ms", with = "milliseconds")]
    pub copy: Duration,
    /// Comparing digests (with --verify).
    #[serde(rename = "verify_ms", with = "milliseconds")]
    pub verify: Duration,
    /// Saving and sending the device state.
    #[serde(rename = "save_ms", with = "milliseconds")]
    pub save: Duration,
    /// Waiting for the destination to have loaded it.
    #[serde(rename = "load_ms", with = "milliseconds")]
    pub load: Duration,
    /// From COMMIT to the word that the guest runs.
    #[serde(rename = "handover_ms", with = "milliseconds")]
    pub handover: Duration,
}

/// The measures of a finished migration, as the source saw it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measures {
    /// Connecting, comparing and starting to track.
    #[serde(rename = "setup_ms", with = "milliseconds")]
    pub setup: Duration,
    /// From the start to the word that the guest runs.
    #[serde(rename = "total_ms", with = "milliseconds")]
    pub total: Duration,
    /// vCPU stop at the source to the word that they run at the destination.
    #[serde(rename = "downtime_ms", with = "milliseconds")]
    pub downtime: Duration,
    /// Where it went.
    #[serde(flatten)]
    pub parts: DowntimeParts,
    /// How long the guest ran with its writes tracked.
    #[serde(rename = "tracked_ms", with = "milliseconds")]
    pub tracked: Duration,
    /// How long a thread of the machine was stopped to start tracking.
    #[serde(rename = "tracking_stop_us", with = "microseconds")]
    pub tracking_stop: Duration,
    /// Bytes put on the wire, frames and device state included.
    #[serde(rename = "sent_bytes", with = "bytes")]
    pub sent: ByteCount,
    /// Of these, device state.
    #[serde(rename = "device_state_bytes", with = "bytes")]
    pub device_state: ByteCount,
    /// Guest memory, of which holes and zero pages were not sent.
    #[serde(rename = "ram_bytes", with = "bytes")]
    pub ram: ByteCount,
    /// Rounds, the last one (guest stopped) included.
    pub rounds: usize,
    /// Each of them.
    pub round_list: Vec<RoundMeasures>,
    /// Whether the digests of both sides were compared and found equal.
    pub verified: bool,
    /// Data channels used.
    pub channels: usize,
}

/// Durations as milliseconds, to the microsecond; both ways, since a VMM with the engine inside reports to the command.
mod milliseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64((time.as_secs_f64() * 1e6).round() / 1e3)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let milliseconds = f64::deserialize(deserializer)?;
        let micros = (milliseconds * 1e3).round();
        Duration::try_from_secs_f64(micros / 1e6).map_err(serde::de::Error::custom)
    }
}

/// Durations as whole microseconds.
mod microseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(time.as_micros() as u64)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_micros)
    }
}

/// Byte counts as numbers.
mod bytes {
    use godwit_units::ByteCount;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(count: &ByteCount, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(count.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ByteCount, D::Error> {
        u64::deserialize(deserializer).map(ByteCount)
    }
}

/// Page counts as numbers.
mod pages {
    use godwit_units::PageCount;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(count: &PageCount, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(count.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PageCount, D::Error> {
        u64::deserialize(deserializer).map(PageCount)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_survive_being_told() {
        let measures = Measures {
            downtime: Duration::from_micros(4321),
            tracking_stop: Duration::from_micros(7),
            sent: ByteCount(99),
            parts: DowntimeParts { load: Duration::from_micros(17), ..DowntimeParts::default() },
            round_list: vec![RoundMeasures { zero: PageCount(3), ..RoundMeasures::default() }],
            verified: true,
            ..Measures::default()
        };
        let text = serde_json::to_string(&measures).unwrap();
        let back: Measures = serde_json::from_str(&text).unwrap();
        assert_eq!(format!("{back:?}"), format!("{measures:?}"));
    }
}
