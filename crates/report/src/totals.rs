//! What all migrations came to that a store has ever kept a record of: how often each outcome, and
//! how downtimes, durations and bytes are spread.
//!
//! Only the newest records are kept. What the others came to is in one file, to which each is added
//! before it goes; so the sums never get smaller, as whoever reads them again and again relies on.
//!
//! Invariant: each migration counts once, also where who adds it is killed: the file says which
//! records that may still be there are in its sums already, in the same step as the sums.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Upper bounds of downtimes, in seconds.
const DOWNTIMES: &[f64] =
    &[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];
/// Of whole migrations, in seconds.
const DURATIONS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4];
/// Of bytes on the wire: 16 MiB to 1 TiB, each four times the one before.
const BYTES: &[f64] = &[
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
    1_073_741_824.0,
    4_294_967_296.0,
    17_179_869_184.0,
    68_719_476_736.0,
    274_877_906_944.0,
    1_099_511_627_776.0,
];

/// How values are spread.
///
/// ```
/// use godwit_report::Totals;
///
/// let none = Totals::default().downtime;
/// assert_eq!((none.count, none.buckets[0]), (0, (0.001, 0)));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// Upper bounds, ascending, each with how many values are above the one before and not above
    /// it. Values above the last are in `count` alone.
    pub buckets: Vec<(f64, u64)>,
    /// How many values there are.
    pub count: u64,
    /// All of them together.
    pub sum: f64,
}

impl Distribution {
    fn within(bounds: &[f64]) -> Self {
        let buckets = bounds.iter().map(|bound| (*bound, 0)).collect();
        Self { buckets, count: 0, sum: 0.0 }
    }

    fn add(&mut self, value: f64) {
        self.place(value, 1);
        self.count += 1;
        self.sum += value;
    }

    fn place(&mut self, value: f64, times: u64) {
        if let Some((_, count)) = self.buckets.iter_mut().find(|(bound, _)| value <= *bound) {
            *count += times;
        }
    }

    /// Adds those of `other`, whose bounds may be another release's.
    fn merge(&mut self, other: &Self) {
        for (bound, count) in &other.buckets {
            self.place(*bound, *count);
        }
        self.count += other.count;
        self.sum += other.sum;
    }
}

/// What migrations came to.
///
/// ```
/// assert!(godwit_report::Totals::default().outcomes.is_empty());
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// How many ended so: `migrated`, `upgraded`, `failed`, `cancelled`, `in-doubt`.
    pub outcomes: BTreeMap<String, u64>,
    /// Downtimes of those that have moved, in seconds.
    pub downtime: Distribution,
    /// How long these took, in seconds.
    pub duration: Distribution,
    /// Bytes that these put on the wire.
    pub bytes: Distribution,
}

impl Default for Totals {
    fn default() -> Self {
        Self {
            outcomes: BTreeMap::new(),
            downtime: Distribution::within(DOWNTIMES),
            duration: Distribution::within(DURATIONS),
            bytes: Distribution::within(BYTES),
        }
    }
}

impl Totals {
    /// Adds the migration of the record at `path`; what is no whole record counts for nothing.
    pub(crate) fn add(&mut self, path: &Path) {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        let last = last.and_then(|line| serde_json::from_str::<Value>(line).ok());
        let last = last.unwrap_or_default();
        let Some(outcome) = last["outcome"].as_str() else { return };
        *self.outcomes.entry(outcome.to_owned()).or_default() += 1;
        if outcome != "migrated" {
            return;
        }
        let seconds = |key: &str| {
            let time = Duration::try_from_secs_f64(last[key].as_f64()? / 1e3).ok()?;
            Some(time.as_secs_f64())
        };
        seconds("downtime_ms").into_iter().for_each(|value| self.downtime.add(value));
        seconds("total_ms").into_iter().for_each(|value| self.duration.add(value));
        let bytes = last["sent_bytes"].as_u64();
        bytes.into_iter().for_each(|value| self.bytes.add(value as f64));
    }

    fn merge(&mut self, other: &Self) {
        for (outcome, count) in &other.outcomes {
            *self.outcomes.entry(outcome.clone()).or_default() += count;
        }
        self.downtime.merge(&other.downtime);
        self.duration.merge(&other.duration);
        self.bytes.merge(&other.bytes);
    }
}

/// What is in the file of sums.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Gone {
    totals: Totals,
    /// Records that are in the sums and may be there all the same.
    counted: BTreeSet<String>,
}

impl Gone {
    /// Adds the records that are about to go, by their names and paths, where `there` are all that
    /// there are.
    pub(crate) fn add<'a>(
        &mut self,
        records: impl Iterator<Item = (&'a str, &'a Path)>,
        there: &BTreeSet<&str>,
    ) {
        self.counted.retain(|name| there.contains(name.as_str()));
        for (name, path) in records {
            if self.counted.insert(name.to_owned()) {
                self.totals.add(path);
            }
        }
    }

    /// The sums of these and of the records that are kept.
    pub(crate) fn with<'a>(&self, kept: impl Iterator<Item = (&'a str, &'a Path)>) -> Totals {
        let mut all = Totals::default();
        all.merge(&self.totals);
        kept.filter(|(name, _)| !self.counted.contains(*name)).for_each(|(_, path)| all.add(path));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_where_they_belong_whatever_bounds_they_were_kept_in() {
        let mut old = Distribution::within(&[1.0, 3.0]);
        [0.5, 1.0, 2.0, 9.0].into_iter().for_each(|value| old.add(value));
        assert_eq!(old.buckets, [(1.0, 2), (3.0, 1)]);
        assert_eq!((old.count, old.sum), (4, 12.5));
        let mut new = Distribution::within(&[2.0, 4.0, 8.0]);
        new.merge(&old);
        assert_eq!(new.buckets, [(2.0, 2), (4.0, 1), (8.0, 0)]);
        assert_eq!((new.count, new.sum), (4, 12.5));
    }
}
