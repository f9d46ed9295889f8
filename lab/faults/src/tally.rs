//! What runs of `make defects` found: rows in `target/bench/defects.jsonl`, targets and figures in
//! `target/bench/defects.json`, and the table of docs/reliability.md.
//!
//! Keeps two promises: a row is written when its run is over, so that a run of all that is cut off
//! can be gone on with; and the table is made of rows and of nothing else, and says how many there
//! are.

use std::fmt::Write;
use std::fs::OpenOptions;
use std::io;
use std::path::Path;

use anyhow::Context;
use godwit_bench::report::{Better, Report, with_table};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::defects::{CONTROL, DEFECTS, Defect};

const ROWS: &str = "target/bench/defects.jsonl";
const PAGE: &str = "docs/reliability.md";
const BEGIN: &str = "<!-- made by `make defects`: begin -->\n";
const END: &str = "<!-- made by `make defects`: end -->\n";
/// Of a hundred runs, in so many a defect has to be found.
const FOUND: f64 = 99.0;

/// What came of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "of", rename_all = "lowercase")]
pub enum Row {
    /// A defect, or the control.
    Defect {
        /// Its name.
        name: String,
        /// Whether the guest has found it.
        guest: bool,
        /// Whether `--verify` has.
        verify: bool,
        /// Whether `--audit` has.
        audit: bool,
        /// How often before there was nothing to strike.
        idle: u32,
        /// How long it took.
        seconds: f64,
        /// What was said by who found it from outside.
        example: Option<String>,
        /// What was said and does not fit, or why the run failed.
        misfits: Vec<String>,
    },
    /// A move by QEMU itself.
    Qemu {
        /// Which QEMU.
        build: String,
        /// Whether the guest found damage, or said nothing any more.
        damaged: bool,
        /// How long it took.
        seconds: f64,
        /// What the guest said.
        evidence: Option<String>,
    },
}

/// The rows, in memory and in the file.
#[derive(Debug)]
pub struct Tally(Vec<Row>);

impl Tally {
    /// Begins with no rows or, where it is to be `added` to, with those of the runs before.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn begin(added: bool) -> anyhow::Result<Self> {
        let rows = match added {
            true => std::fs::read_to_string(ROWS).with_context(|| format!("cannot read {ROWS}"))?,
            false => String::new(),
        };
        let rows = rows.lines().map(|line| serde_json::from_str(line).context(ROWS));
        let tally = Self(rows.collect::<anyhow::Result<_>>()?);
        let directory = Path::new(ROWS).parent().context("no directory")?;
        std::fs::create_dir_all(directory)?;
        let lines = tally.0.iter().map(line).collect::<anyhow::Result<String>>()?;
        std::fs::write(ROWS, lines).with_context(|| format!("cannot write {ROWS}"))?;
        Ok(tally)
    }

    /// Adds `row`.
    ///
    /// # Errors
    /// When it cannot be kept.
    pub fn add(&mut self, row: Row) -> anyhow::Result<()> {
        let mut file = OpenOptions::new().append(true).open(ROWS)?;
        io::Write::write_all(&mut file, line(&row)?.as_bytes())?;
        self.0.push(row);
        Ok(())
    }

    /// What is known of the defect called `wanted`.
    #[must_use]
    pub fn count(&self, wanted: &str) -> Count {
        let mut count = Count::default();
        for row in &self.0 {
            let Row::Defect { name, guest, verify, audit, example, misfits, .. } = row else {
                continue;
            };
            if name == wanted {
                count.runs += 1;
                count.guest += u32::from(*guest);
                count.verify += u32::from(*verify);
                count.audit += u32::from(*audit);
                count.example = count.example.or_else(|| example.clone());
                count.misfits.extend(misfits.iter().cloned());
            }
        }
        count
    }

    /// Moves by the QEMU called `wanted`, and how many of them did damage.
    #[must_use]
    pub fn own(&self, wanted: &str) -> (u32, u32) {
        let of = |row: &&Row| matches!(row, Row::Qemu { build, .. } if build == wanted);
        let rows = self.0.iter().filter(of);
        rows.fold((0, 0), |(moves, damaged), row| {
            let harm = matches!(row, Row::Qemu { damaged: true, .. });
            (moves + 1, damaged + u32::from(harm))
        })
    }

    /// The QEMUs of which there are moves, in the order of their first ones.
    fn builds(&self) -> Vec<&str> {
        let mut builds = Vec::new();
        for row in &self.0 {
            if let Row::Qemu { build, .. } = row
                && !builds.contains(&build.as_str())
            {
                builds.push(build);
            }
        }
        builds
    }

    /// Prints the targets and writes the figures; whether all targets were met.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn finish(&self) -> anyhow::Result<bool> {
        let mut report = Report::new("defects");
        let mut figures = serde_json::Map::new();
        for defect in all() {
            let count = self.count(defect.name);
            if count.runs > 0 {
                targets(&mut report, defect, &count);
                let Count { runs, guest, verify, audit, example, misfits } = count;
                let figure = json!({ "runs": runs, "guest": guest, "verify": verify,
                    "audit": audit, "example": example, "misfits": misfits });
                figures.insert(defect.name.to_owned(), figure);
            }
        }
        report.figure("defects", figures);
        let own = |row: &&Row| matches!(row, Row::Qemu { .. });
        report.figure("own_migration", json!(self.0.iter().filter(own).collect::<Vec<_>>()));
        let met = report.targets().iter().all(|target| target.met);
        report.finish()?;
        Ok(met)
    }

    /// Puts the table into docs/reliability.md.
    ///
    /// # Errors
    /// When the page is not there, or has no place for it.
    pub fn write_page(&self) -> anyhow::Result<()> {
        let page = std::fs::read_to_string(PAGE).with_context(|| format!("cannot read {PAGE}"))?;
        std::fs::write(PAGE, with_table(&page, BEGIN, END, &self.table())?)?;
        println!("table written to {PAGE}");
        Ok(())
    }

    fn table(&self) -> String {
        let mut table = String::from("| defect | the guest | `--verify` | `--audit` |\n");
        table += "| --- | --- | --- | --- |\n";
        for defect in all() {
            table += &defect_line(defect, &self.count(defect.name));
        }
        table += "\n| QEMU's own migration, under TCG | moves | with a BUG or a dead guest |\n";
        table += "| --- | ---: | ---: |\n";
        for build in self.builds() {
            let (moves, damaged) = self.own(build);
            let _ = writeln!(table, "| {build} | {moves} | {damaged} |");
        }
        table
    }
}

/// How often a defect was found by whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// How often it was made.
    pub runs: u32,
    /// How often the guest has found it.
    pub guest: u32,
    /// How often `--verify` has.
    pub verify: u32,
    /// How often `--audit` has.
    pub audit: u32,
    example: Option<String>,
    misfits: Vec<String>,
}

/// All defects, and the control behind them.
fn all() -> impl Iterator<Item = &'static Defect> {
    DEFECTS.iter().chain([&CONTROL])
}

fn line(row: &Row) -> anyhow::Result<String> {
    Ok(serde_json::to_string(row)? + "\n")
}

/// A line of the table.
fn defect_line(defect: &Defect, Count { runs, guest, verify, audit, .. }: &Count) -> String {
    if *runs == 0 {
        return format!("| {} | not tried | | |\n", defect.what);
    }
    let of = |found: &u32, asked: bool| {
        if asked { format!("{found} of {runs}") } else { "does not look".to_owned() }
    };
    let verify = of(verify, defect.verify.is_some());
    let audit = of(audit, !defect.audit.is_empty());
    format!("| {} | {guest} of {runs} | {verify} | {audit} |\n", defect.what)
}

fn targets(report: &mut Report, defect: &Defect, count: &Count) {
    let control = defect.name == CONTROL.name;
    let limit = if control { 0.0 } else { FOUND };
    let better = if control { Better::Lower } else { Better::Higher };
    let asked = [
        ("the guest", count.guest, true),
        ("--verify", count.verify, defect.verify.is_some()),
        ("--audit", count.audit, !defect.audit.is_empty()),
    ];
    for (who, found, _) in asked.into_iter().filter(|(_, _, asked)| *asked) {
        let share = 100.0 * f64::from(found) / f64::from(count.runs.max(1));
        report.target(format!("{}: found by {who}, % of runs", defect.what), share, limit, better);
    }
    if control {
        let misfits = count.misfits.len() as f64;
        report.target("the control: what was said and does not fit", misfits, 0.0, better);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, guest: bool) -> Row {
        let (name, misfits) = (name.to_owned(), Vec::new());
        let (verify, audit, idle, seconds) = (true, true, 0, 1.0);
        Row::Defect { name, guest, verify, audit, idle, seconds, example: None, misfits }
    }

    fn own(build: &str, damaged: bool) -> Row {
        Row::Qemu { build: build.to_owned(), damaged, seconds: 1.0, evidence: None }
    }

    #[test]
    fn the_page_has_a_place_for_the_table() {
        let page = include_str!("../../../docs/reliability.md");
        for mark in [BEGIN, END] {
            assert_eq!(page.matches(mark).count(), 1, "{mark}");
        }
    }

    #[test]
    fn a_row_is_read_as_it_was_written() -> anyhow::Result<()> {
        for row in [run("skip", true), own("QEMU 10", false)] {
            let written = line(&row)?;
            assert_eq!(serde_json::from_str::<Row>(written.trim_end())?, row);
            assert_eq!(written.lines().count(), 1);
        }
        Ok(())
    }

    #[test]
    fn the_table_tells_what_was_found_what_was_missed_and_what_was_not_tried() {
        let rows = vec![run("skip", true), run("skip", false), own("QEMU 10", true)];
        let table = Tally(rows).table();
        let lines: Vec<&str> = table.lines().collect();
        let skip = "| one dirty page of the last round is skipped | 1 of 2 | 2 of 2 | 2 of 2 |";
        assert!(lines.contains(&skip), "{table}");
        assert!(
            lines.contains(&"| one bit is flipped behind the frame's checksum | not tried | | |")
        );
        assert!(lines.contains(&"| QEMU 10 | 1 | 1 |"), "{table}");
    }
}
