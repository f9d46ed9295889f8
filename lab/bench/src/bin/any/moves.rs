//! One move, by one of the contestants, and its figures.

use std::time::Duration;

use anyhow::{Context, ensure};
use godwit_bench::figures::Figures;
use godwit_bench::fixture::{Fixture, Moved};
use godwit_bench::godwit::Attempt;
use godwit_bench::report;
use godwit_bench::table::{Column, Table, figure};
use godwit_testbed::{Godwit, Style, VmConfig, own_migration};
use serde::Serialize;
use serde_json::json;

/// The guest's own speed is that over this time before the move.
const BEFORE: Duration = Duration::from_secs(2);
/// It is looked at for so long after the move: where the host keeps page tables of its own for the
/// guest, these are filled again while it runs.
const AFTER: Duration = Duration::from_secs(5);
/// To fill 9 GiB takes minutes under TCG.
const LIMIT: Duration = Duration::from_secs(900);

/// Who moves the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contestant {
    Plain,
    Multifd2,
    Multifd4,
    Godwit,
}

impl Contestant {
    pub(crate) const ALL: [Self; 4] = [Self::Plain, Self::Multifd2, Self::Multifd4, Self::Godwit];
    pub(crate) const QEMU: [Self; 3] = [Self::Plain, Self::Multifd2, Self::Multifd4];
    pub(crate) const MULTIFD: [Self; 2] = [Self::Multifd2, Self::Multifd4];

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "QEMU plain",
            Self::Multifd2 => "QEMU multifd 2",
            Self::Multifd4 => "QEMU multifd 4",
            Self::Godwit => "godwit",
        }
    }

    /// By which of QEMU's ways; `None`: by godwit.
    fn style(self) -> Option<Style> {
        match self {
            Self::Plain => Some(Style::Plain),
            Self::Multifd2 => Some(Style::Multifd(2)),
            Self::Multifd4 => Some(Style::Multifd(4)),
            Self::Godwit => None,
        }
    }
}

/// One move of a case.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    case: &'static str,
    under: &'static str,
    #[serde(flatten)]
    pub(crate) figures: Figures,
    /// What the guest did not do from the beginning of the move to [`AFTER`] its end, in seconds of
    /// its work before.
    pub(crate) lost_s: f64,
    /// How long a thread of QEMU was stopped to start the tracking; of godwit only.
    pub(crate) tracking_stop_ms: f64,
}

/// Starts a guest like `config` for `case`, and has `contestant` move it.
pub(crate) fn one_move(
    contestant: Contestant,
    (case, under): (&'static str, &'static str),
    config: &VmConfig,
    godwit: &Godwit,
) -> anyhow::Result<Row> {
    let mut fixture = Fixture { lead: BEFORE, tail: AFTER, ..Fixture::new(config.clone(), LIMIT) };
    let outcome = fixture.one_move(|source, destination| {
        if let Some(style) = contestant.style() {
            let own = own_migration(source, destination, style, LIMIT)?;
            return Ok(Moved::by_qemu(&own));
        }
        // The source QEMU must live on to be asked what it used.
        let options = ["--downtime-limit", "300ms", "--keep-source"];
        let attempt = Attempt::within(LIMIT, godwit, source, destination, &options)?;
        let (migrate, receive) = attempt.moved()?;
        let own_words = json!({ "migrate": migrate.last(), "receive": receive.last() });
        Ok(Moved::by_godwit(&attempt, own_words))
    });
    let outcome =
        outcome.with_context(|| format!("{} did not move the guest", contestant.name()))?;
    ensure!(outcome.seen.switchover.is_some(), "the guest was not seen to move");
    let figures = Figures::of(contestant.name(), &outcome);
    let before = outcome.rate_before(BEFORE);
    let trace = outcome.trace.unwrap_or_default();
    let (from, to) = (outcome.began, outcome.began + outcome.moved.wall + AFTER);
    let loss = trace.loss(from, to, before);
    let stop = figures.own_words["migrate"]["tracking_stop_us"].as_f64();
    Ok(Row {
        case,
        under,
        figures,
        lost_s: loss.work.as_secs_f64(),
        tracking_stop_ms: stop.map_or(f64::NAN, |micros| micros / 1e3),
    })
}

fn of(rows: &[Row], contestant: Contestant) -> impl Iterator<Item = &Row> {
    rows.iter().filter(move |row| row.figures.contestant == contestant.name())
}

pub(crate) fn median_of(rows: &[Row], contestant: Contestant, figure: impl Fn(&Row) -> f64) -> f64 {
    report::median_of(of(rows, contestant), figure)
}

/// Godwit's figure beside the rival's, round by round: in each, everybody moves once.
pub(crate) fn ratios(rows: &[Row], rival: Contestant, figure: impl Fn(&Row) -> f64) -> Vec<f64> {
    let pairs = of(rows, Contestant::Godwit).zip(of(rows, rival));
    pairs.map(|(own, other)| figure(own) / figure(other)).collect()
}

pub(crate) fn medians(rows: &[Row], contestant: Contestant) -> Row {
    let median = |figure: fn(&Row) -> f64| median_of(rows, contestant, figure);
    let (case, under) = rows.first().map_or(("", ""), |row| (row.case, row.under));
    Row {
        case,
        under,
        figures: Figures::medians(contestant.name(), rows.iter().map(|row| &row.figures)),
        lost_s: median(|row| row.lost_s),
        tracking_stop_ms: median(|row| row.tracking_stop_ms),
    }
}

pub(crate) const TABLE: Table<Row> = Table(&[
    Column { head: "", width: 14, cell: |row| row.figures.contestant.to_owned() },
    Column { head: "total ms", width: 8, cell: |row| figure(row.figures.total_ms, 0) },
    Column { head: "downtime ms", width: 13, cell: |row| row.figures.downtime() },
    Column { head: "stall ms", width: 8, cell: |row| figure(row.figures.stall_ms, 1) },
    Column { head: "lost s", width: 6, cell: |row| figure(row.lost_s, 2) },
    Column { head: "sent MiB", width: 8, cell: |row| figure(row.figures.sent_mib, 1) },
    Column { head: "passes", width: 6, cell: |row| row.figures.passes.to_string() },
    Column { head: "CPU s src+dst+godwit", width: 20, cell: |row| row.figures.shares() },
    Column { head: "= CPU", width: 6, cell: |row| figure(row.figures.cpu_s, 2) },
    Column { head: "track ms", width: 8, cell: |row| figure(row.tracking_stop_ms, 2) },
]);
