//! The raw figures: one row for each move, whatever became of it, kept in
//! `target/bench/peers.jsonl`.
//!
//! Keeps two promises: a move that did not finish stays in every median, as one that takes for
//! ever; and a figure that was not measured is not a number, never a small one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use godwit_bench::report::{least, median, most};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Where rows are kept, of all runs.
pub(crate) const PATH: &str = "target/bench/peers.jsonl";

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Figure {
    /// From the command until the guest runs at the destination with all of its memory there, ms.
    Total,
    /// The guest's gap at the switchover, seen from outside, ms.
    Downtime,
    /// How exactly that is known, ms.
    DowntimeResolution,
    /// From the stop of the guest to its start, by the events of both QEMUs, ms.
    Events,
    /// The guest's longest other gap, ms.
    Stall,
    /// Bytes that the link carried, both ways, MiB.
    Wire,
    /// What the contestant says that it sent, MiB.
    Told,
    /// Processor time of all threads but the guest's processors, both sides, s.
    Cpu,
    /// Of it, godwit's.
    CpuGodwit,
    /// Processor time of the guest's processors while it moved, both sides, s.
    Vcpus,
    /// Processor time of the emulator, s.
    Emulator,
    /// The guest's work lost until it was stopped, in seconds of its work before.
    LostBefore,
    /// While it moved from the one to the other.
    LostDuring,
    /// From then to five seconds after the end.
    LostAfter,
    /// All of it.
    Lost,
    /// Rounds or passes.
    Passes,
}

/// What became of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fate {
    /// The guest is there.
    Moved,
    /// It was not done by the deadline.
    Late,
    /// It failed.
    Failed,
}

/// One move.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// When the run began, which all of its rows have in common.
    pub(crate) run: String,
    pub(crate) machine: String,
    pub(crate) qemu: String,
    pub(crate) godwit: String,
    /// By which one godwit is known from another with the same number.
    #[serde(default)]
    pub(crate) build: String,
    /// TCP's congestion control at the link.
    #[serde(default)]
    pub(crate) tcp: String,
    /// The host's load average before the round.
    #[serde(default)]
    pub(crate) load: f64,
    pub(crate) cell: String,
    pub(crate) contestant: String,
    pub(crate) round: usize,
    /// Its place in the round.
    pub(crate) place: usize,
    pub(crate) fate: Fate,
    /// Why it was not moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) why: Option<String>,
    /// Those that were measured.
    pub(crate) figures: BTreeMap<Figure, f64>,
    /// Lines in which the guest tells of damaged memory.
    pub(crate) bugs: usize,
    /// What the contestant says of itself.
    pub(crate) own_words: Value,
}

impl Row {
    /// A figure of this move. Of one that did not finish each is without end.
    pub(crate) fn figure(&self, figure: Figure) -> f64 {
        match self.fate {
            Fate::Moved => self.figures.get(&figure).copied().unwrap_or(f64::NAN),
            Fate::Late | Fate::Failed => f64::INFINITY,
        }
    }

    /// The same as one of the `last` run of its cell, if there is one, behind the rounds of that.
    ///
    /// # Errors
    /// Where anything else moved guests in those, or on another machine.
    pub(crate) fn further(mut self, last: &[Self]) -> anyhow::Result<Self> {
        let mut behind = 0;
        for row in last.iter().filter(|row| row.cell == self.cell) {
            let same = [
                (&row.machine, &self.machine),
                (&row.qemu, &self.qemu),
                (&row.godwit, &self.godwit),
                (&row.build, &self.build),
                (&row.tcp, &self.tcp),
            ];
            if let Some((theirs, ours)) = same.into_iter().find(|(theirs, ours)| theirs != ours) {
                bail!(
                    "the last run of {} is of {theirs:?}, and this one of {ours:?}: without \
                     --further it begins anew",
                    self.cell
                );
            }
            self.run.clone_from(&row.run);
            behind = behind.max(row.round);
        }
        self.round += behind;
        Ok(self)
    }
}

/// Adds rows to the file.
pub(crate) fn keep(row: &Row) -> anyhow::Result<()> {
    let path = Path::new(PATH);
    std::fs::create_dir_all(path.parent().unwrap_or(path))?;
    let mut file =
        File::options().create(true).append(true).open(path).with_context(|| PATH.to_owned())?;
    writeln!(file, "{}", serde_json::to_string(row)?).with_context(|| PATH.to_owned())
}

/// All rows of the file; of each cell those of its last run.
pub(crate) fn latest() -> anyhow::Result<Vec<Row>> {
    let text = std::fs::read_to_string(PATH).with_context(|| {
        format!(
            "there are no figures in {PATH} yet: run `make bench-peers`, or unpack those of \
             docs/raw/peers.jsonl.gz"
        )
    })?;
    let parse = |(number, line): (usize, &str)| {
        serde_json::from_str(line).with_context(|| format!("{PATH}, line {}", number + 1))
    };
    Ok(of_last_runs(text.lines().enumerate().map(parse).collect::<anyhow::Result<_>>()?))
}

fn of_last_runs(mut rows: Vec<Row>) -> Vec<Row> {
    let mut last = BTreeMap::<String, String>::new();
    for row in &rows {
        let run = last.entry(row.cell.clone()).or_default();
        *run = run.clone().max(row.run.clone());
    }
    rows.retain(|row| last.get(&row.cell) == Some(&row.run));
    rows
}

/// The moves of one cell by one contestant.
pub(crate) struct Moves<'a>(Vec<&'a Row>);

impl<'a> Moves<'a> {
    pub(crate) fn of(rows: &'a [Row], cell: &str, contestant: &str) -> Self {
        let own = |row: &&Row| row.cell == cell && row.contestant == contestant;
        Self(rows.iter().filter(own).collect())
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn finished(&self) -> usize {
        self.0.iter().filter(|row| row.fate == Fate::Moved).count()
    }

    /// Why moves did not finish, each reason once.
    pub(crate) fn reasons(&self) -> Vec<&'a str> {
        let mut reasons: Vec<&str> = self.0.iter().filter_map(|row| row.why.as_deref()).collect();
        reasons.sort_unstable();
        reasons.dedup();
        reasons
    }

    fn each(&self, figure: Figure) -> Vec<f64> {
        self.0.iter().map(|row| row.figure(figure)).collect()
    }

    pub(crate) fn median(&self, figure: Figure) -> f64 {
        median(&self.each(figure))
    }

    /// The least and the most.
    pub(crate) fn spread(&self, figure: Figure) -> [f64; 2] {
        let each = self.each(figure);
        [least(&each), most(&each)]
    }

    /// What each round comes to beside another contestant's: their [`ratio`], say.
    pub(crate) fn beside(
        &self,
        other: &Self,
        figure: Figure,
        what: fn(f64, f64) -> f64,
    ) -> Vec<f64> {
        let rounds = self.0.iter().map(|own| {
            let other = other.0.iter().find(|other| other.round == own.round);
            what(own.figure(figure), other.map_or(f64::NAN, |other| other.figure(figure)))
        });
        rounds.collect()
    }
}

/// Of two figures; who does not finish has lost against who does, and there is nothing to tell
/// between two who do not.
pub(crate) fn ratio(own: f64, other: f64) -> f64 {
    match (own.is_infinite(), other.is_infinite()) {
        (true, true) => f64::NAN,
        (false, true) if own.is_finite() => 0.0,
        _ => own / other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(run: &str, contestant: &str, round: usize, total: Option<f64>) -> Row {
        let word = str::to_owned;
        Row {
            run: word(run),
            machine: String::new(),
            qemu: String::new(),
            godwit: String::new(),
            build: String::new(),
            tcp: String::new(),
            load: 0.0,
            cell: word("idle/loop"),
            contestant: word(contestant),
            round,
            place: 1,
            fate: if total.is_some() { Fate::Moved } else { Fate::Late },
            why: total.is_none().then(|| word("not done within 30 s")),
            figures: total.into_iter().map(|total| (Figure::Total, total)).collect(),
            bugs: 0,
            own_words: Value::Null,
        }
    }

    #[test]
    fn a_move_that_did_not_finish_is_in_the_median_and_never_a_fast_one() {
        let totals = [None, Some(100.0), None];
        let rows: Vec<Row> =
            totals.into_iter().enumerate().map(|(at, it)| row("1", "a", at, it)).collect();
        let moves = Moves::of(&rows, "idle/loop", "a");
        assert_eq!((moves.count(), moves.finished()), (3, 1));
        assert_eq!(moves.median(Figure::Total), f64::INFINITY);
        assert_eq!(moves.spread(Figure::Total), [100.0, f64::INFINITY]);
        assert_eq!(moves.reasons(), ["not done within 30 s"]);
        // What was not measured is not a number.
        assert!(Moves::of(&rows[1..2], "idle/loop", "a").median(Figure::Cpu).is_nan());
    }

    #[test]
    fn who_does_not_finish_has_lost() {
        assert_eq!(ratio(1.0, 2.0), 0.5);
        assert_eq!(ratio(f64::INFINITY, 2.0), f64::INFINITY);
        assert_eq!(ratio(2.0, f64::INFINITY), 0.0);
        assert!(ratio(f64::INFINITY, f64::INFINITY).is_nan());
        assert!(ratio(f64::NAN, f64::INFINITY).is_nan() && ratio(1.0, f64::NAN).is_nan());
    }

    #[test]
    fn ratios_are_of_the_same_rounds() {
        let rows = [
            row("1", "a", 1, Some(10.0)),
            row("1", "b", 2, Some(40.0)),
            row("1", "a", 2, Some(20.0)),
            row("1", "b", 1, Some(10.0)),
            row("1", "a", 3, Some(20.0)),
        ];
        let [a, b] = ["a", "b"].map(|who| Moves::of(&rows, "idle/loop", who));
        let ratios = a.beside(&b, Figure::Total, ratio);
        assert_eq!(ratios[..2], [1.0, 0.5]);
        assert!(ratios[2].is_nan(), "it has no other");
    }

    #[test]
    fn further_rounds_are_numbered_behind_those_of_the_same_run() {
        let last = [row("1", "a", 1, Some(10.0)), row("1", "a", 2, None)];
        let ours = row("2", "a", 2, None);
        let further = |row: &Row, last: &[Row]| {
            row.clone().further(last).map(|row| (row.run, row.round)).map_err(|it| it.to_string())
        };
        assert_eq!(further(&ours, &last), Ok(("1".to_owned(), 4)));
        assert_eq!(further(&ours, &[]), Ok(("2".to_owned(), 2)));
        let elsewhere = Row { cell: "speed/loop".to_owned(), ..ours.clone() };
        assert_eq!(further(&elsewhere, &last), Ok(("2".to_owned(), 2)));
        let other = Row { build: "another".to_owned(), ..ours };
        let refusal = further(&other, &last).unwrap_err();
        assert!(refusal.contains("idle/loop") && refusal.contains("another"), "{refusal}");
    }

    #[test]
    fn rows_are_kept_as_they_are_and_the_last_run_of_a_cell_counts() {
        let rows = [row("1", "a", 1, Some(10.0)), row("2", "a", 1, None)];
        let text: Vec<String> =
            rows.iter().map(|row| serde_json::to_string(row).unwrap()).collect();
        let read: Vec<Row> = text.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(read[0].figure(Figure::Total), 10.0);
        assert!(read[0].figure(Figure::Cpu).is_nan());
        assert_eq!(read[1].figure(Figure::Total), f64::INFINITY);
        let last = of_last_runs(read);
        assert_eq!(last.iter().map(|row| row.run.as_str()).collect::<Vec<_>>(), ["2"]);
    }
}
