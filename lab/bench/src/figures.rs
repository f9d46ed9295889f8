//! What a move costs and what its guest feels, the same way for godwit and for QEMU.

use std::time::Duration;

use godwit_testbed::Gap;
use serde::Serialize;
use serde_json::Value;

use crate::fixture::Outcome;
use crate::report;
use crate::table::figure;

const MIB: f64 = 1_048_576.0;

/// The figures of one move. A gap that nobody observed is not a number, and null in a report.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Who moved the guest.
    pub contestant: &'static str,
    /// From the command until the guest runs on the other side.
    pub total_ms: f64,
    /// The guest's gap at the switchover, seen from outside.
    pub downtime_ms: f64,
    /// How exact that is.
    pub downtime_resolution_ms: f64,
    /// The longest other gap, before or after.
    pub stall_ms: f64,
    /// When that gap ended, from the end of the switchover on; negative before it.
    pub stall_at_ms: f64,
    /// On the wire.
    pub sent_mib: f64,
    /// Processor time of the work: both sides of QEMU, and godwit's processes.
    pub cpu_s: f64,
    /// Of that, the source QEMU's.
    pub cpu_source_s: f64,
    /// The destination QEMU's.
    pub cpu_destination_s: f64,
    /// Both godwits'.
    pub cpu_godwit_s: f64,
    /// Rounds or passes.
    pub passes: u64,
    /// What the contestant says of itself.
    pub own_words: Value,
    /// Lines in which the guest tells of damaged memory.
    pub bugs: usize,
}

impl Figures {
    /// Those of a move by `contestant`.
    #[must_use]
    pub fn of(contestant: &'static str, outcome: &Outcome) -> Self {
        let gap = |gap: Option<Gap>, figure: fn(Gap) -> Duration| {
            gap.map_or(f64::NAN, |gap| figure(gap).as_secs_f64() * 1e3)
        };
        let Outcome { moved, seen, cpu: [source, destination], bugs, .. } = outcome;
        Self {
            contestant,
            total_ms: moved.wall.as_secs_f64() * 1e3,
            downtime_ms: gap(seen.switchover, |gap| gap.length),
            downtime_resolution_ms: gap(seen.switchover, |gap| gap.resolution),
            stall_ms: gap(seen.stall, |gap| gap.length),
            stall_at_ms: gap(seen.stall, |gap| gap.end) - gap(seen.switchover, |gap| gap.end),
            sent_mib: moved.sent / MIB,
            cpu_s: (*source + *destination + moved.godwit_cpu).as_secs_f64(),
            cpu_source_s: source.as_secs_f64(),
            cpu_destination_s: destination.as_secs_f64(),
            cpu_godwit_s: moved.godwit_cpu.as_secs_f64(),
            passes: moved.rounds,
            own_words: moved.own_words.clone(),
            bugs: *bugs,
        }
    }

    /// The medians of all moves by `contestant` among `moves`; of its bugs, the sum.
    pub fn medians<'a>(
        contestant: &'static str,
        moves: impl Iterator<Item = &'a Self> + Clone,
    ) -> Self {
        let own = moves.filter(|row| row.contestant == contestant);
        let median = |figure: fn(&Self) -> f64| report::median_of(own.clone(), figure);
        Self {
            contestant,
            total_ms: median(|row| row.total_ms),
            downtime_ms: median(|row| row.downtime_ms),
            downtime_resolution_ms: median(|row| row.downtime_resolution_ms),
            stall_ms: median(|row| row.stall_ms),
            stall_at_ms: median(|row| row.stall_at_ms),
            sent_mib: median(|row| row.sent_mib),
            cpu_s: median(|row| row.cpu_s),
            cpu_source_s: median(|row| row.cpu_source_s),
            cpu_destination_s: median(|row| row.cpu_destination_s),
            cpu_godwit_s: median(|row| row.cpu_godwit_s),
            passes: median(|row| row.passes as f64) as u64,
            own_words: Value::Null,
            bugs: own.clone().map(|row| row.bugs).sum(),
        }
    }

    /// The guest's gap with its exactness, for a table.
    #[must_use]
    pub fn downtime(&self) -> String {
        if self.downtime_ms.is_nan() {
            return figure(self.downtime_ms, 1);
        }
        format!("{:.1} ±{:.1}", self.downtime_ms, self.downtime_resolution_ms)
    }

    /// Whose processor time it was, for a table.
    #[must_use]
    pub fn shares(&self) -> String {
        let Self { cpu_source_s, cpu_destination_s, cpu_godwit_s, .. } = self;
        format!("{cpu_source_s:.2}+{cpu_destination_s:.2}+{cpu_godwit_s:.2}")
    }
}
