//! One move in figures, and the table of them.

use std::time::Duration;

use crate::report;
use crate::table::{Column, Table, figure};
use serde::Serialize;
use serde_json::Value;

/// The figures of one move, all but `own_words` seen from outside.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Who made it.
    pub name: &'static str,
    /// Whether it came to an end.
    pub finished: bool,
    /// Until the guest runs on the destination with all of its memory there; of a move that was
    /// cancelled, until then.
    pub total_s: f64,
    /// The guest's gap at the switchover.
    pub downtime_ms: f64,
    /// The longest gap of all, and how exactly it is known.
    pub gap_ms: f64,
    /// See there.
    pub gap_resolution_ms: f64,
    /// On the wire.
    pub sent_mib: f64,
    /// The guest's work lost, in seconds of its work before.
    pub lost_s: f64,
    /// Under half of its speed.
    pub under_half_s: f64,
    /// And under a tenth.
    pub under_tenth_s: f64,
    /// Processor time of all but the guest's processors, both sides.
    pub cpu_s: f64,
    /// Rounds or passes.
    pub rounds: u64,
    /// Lines in which the guest tells of damaged memory.
    pub bugs: usize,
    /// The longest gap but the switchover.
    pub stall_ms: f64,
    /// What the contestant says of itself.
    pub own_words: Value,
}

/// As a number.
pub fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

/// The rows called `name`.
pub fn of<'a>(rows: &'a [Row], name: &'a str) -> impl Iterator<Item = &'a Row> {
    rows.iter().filter(move |row| row.name == name)
}

impl Row {
    /// How long the move took; one that did not finish takes for ever, whenever it was given up.
    pub fn until_done(&self) -> f64 {
        if self.finished { self.total_s } else { f64::INFINITY }
    }
}

/// The median of a figure of the rows called `name`.
pub fn median_of(rows: &[Row], name: &str, figure: impl Fn(&Row) -> f64) -> f64 {
    report::median_of(of(rows, name), figure)
}

/// The medians of the rows called `name`; finished if all are. `None` when there are no such rows.
pub fn medians(rows: &[Row], name: &'static str) -> Option<Row> {
    of(rows, name).next()?;
    let median = |figure: fn(&Row) -> f64| median_of(rows, name, figure);
    Some(Row {
        name,
        finished: of(rows, name).all(|row| row.finished),
        total_s: median(|row| row.total_s),
        downtime_ms: median(|row| row.downtime_ms),
        gap_ms: median(|row| row.gap_ms),
        gap_resolution_ms: median(|row| row.gap_resolution_ms),
        sent_mib: median(|row| row.sent_mib),
        lost_s: median(|row| row.lost_s),
        under_half_s: median(|row| row.under_half_s),
        under_tenth_s: median(|row| row.under_tenth_s),
        cpu_s: median(|row| row.cpu_s),
        rounds: median(|row| row.rounds as f64) as u64,
        bugs: of(rows, name).map(|row| row.bugs).sum(),
        stall_ms: median(|row| row.stall_ms),
        own_words: Value::Null,
    })
}

/// The table of them.
pub const TABLE: Table<Row> = Table(&[
    Column { head: "", width: 22, cell: |row| row.name.to_owned() },
    Column { head: "finished", width: 8, cell: |row| finished(row).to_owned() },
    Column { head: "total s", width: 7, cell: |row| figure(row.total_s, 2) },
    Column { head: "downtime ms", width: 11, cell: |row| figure(row.downtime_ms, 0) },
    Column { head: "gap ms", width: 8, cell: |row| figure(row.gap_ms, 0) },
    Column { head: "sent MiB", width: 8, cell: |row| figure(row.sent_mib, 0) },
    Column { head: "lost s", width: 7, cell: |row| figure(row.lost_s, 2) },
    Column { head: "<50% s", width: 7, cell: |row| figure(row.under_half_s, 2) },
    Column { head: "<10% s", width: 7, cell: |row| figure(row.under_tenth_s, 2) },
    Column { head: "CPU s", width: 6, cell: |row| figure(row.cpu_s, 2) },
    Column { head: "rounds", width: 6, cell: |row| row.rounds.to_string() },
]);

fn finished(row: &Row) -> &'static str {
    if row.finished { "yes" } else { "never" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_that_was_given_up_is_not_a_fast_one() {
        let row = |finished, total_s| Row {
            name: "governor",
            finished,
            total_s,
            downtime_ms: f64::NAN,
            gap_ms: f64::NAN,
            gap_resolution_ms: f64::NAN,
            sent_mib: 0.0,
            lost_s: 0.0,
            under_half_s: 0.0,
            under_tenth_s: 0.0,
            cpu_s: 0.0,
            rounds: 0,
            bugs: 0,
            stall_ms: 0.0,
            own_words: Value::Null,
        };
        let rows = [row(false, 2.0), row(true, 9.0), row(false, 3.0)];
        assert_eq!(median_of(&rows, "governor", Row::until_done), f64::INFINITY);
        assert_eq!(median_of(&rows[1..2], "governor", Row::until_done), 9.0);
    }
}
