//! One move in figures, and the table of them.

use std::time::Duration;

use crate::report::median;
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

/// The median of a figure of the rows called `name`.
pub fn median_of(rows: &[Row], name: &str, figure: impl Fn(&Row) -> f64) -> f64 {
    median(&of(rows, name).map(figure).collect::<Vec<_>>())
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

/// The head of the table.
pub fn print_head() {
    println!(
        "{:<22} {:>8} {:>7} {:>11} {:>8} {:>8} {:>7} {:>7} {:>7} {:>6} {:>6}",
        "",
        "finished",
        "total s",
        "downtime ms",
        "gap ms",
        "sent MiB",
        "lost s",
        "<50% s",
        "<10% s",
        "CPU s",
        "rounds"
    );
}

/// A line of it.
pub fn print_row(row: &Row) {
    let known = |figure: f64| if figure.is_nan() { "-".to_owned() } else { format!("{figure:.0}") };
    println!(
        "{:<22} {:>8} {:>7.2} {:>11} {:>8} {:>8.0} {:>7.2} {:>7.2} {:>7.2} {:>6.2} {:>6}",
        row.name,
        if row.finished { "yes" } else { "never" },
        row.total_s,
        known(row.downtime_ms),
        known(row.gap_ms),
        row.sent_mib,
        row.lost_s,
        row.under_half_s,
        row.under_tenth_s,
        row.cpu_s,
        row.rounds
    );
}
