//! What a run found: rows and targets for `target/bench/faults.json`, and the table of
//! docs/reliability.md.
//!
//! Keeps two promises: the table is made of rows and of nothing else, of this run or, where it is
//! to be added to, of those before; and a cell that was not tried, or could not be, is shown as
//! such.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::OpenOptions;
use std::io;
use std::path::Path;

use anyhow::{Context, ensure};
use godwit_bench::report::{Better, Report};
use serde::{Deserialize, Serialize};

use crate::phase::Phase;
use crate::point::Point;
use crate::rig::Adapter;

/// Where the rows are put as they come, one a line: a run that is cut off has those that it made.
const ROWS: &str = "target/bench/faults.jsonl";
/// The page with the table.
const PAGE: &str = "docs/reliability.md";
const BEGIN: &str = "<!-- made by `make faults`: begin -->\n";
const END: &str = "<!-- made by `make faults`: end -->\n";

/// What came of one cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The number of the fault.
    pub point: u32,
    /// Its words, for who reads the file.
    pub fault: String,
    /// The step at which it struck.
    pub phase: String,
    /// Bytes and milliseconds behind the beginning of that step; nought unless moments are random.
    pub behind: [u64; 2],
    /// Whom it struck.
    pub adapter: String,
    /// `green`, `red`, `skipped` or `missed`: it was over before the fault could strike.
    pub verdict: String,
    /// Where the guest was in the end.
    pub came: String,
    /// What an operator had to type.
    pub typed: Vec<String>,
    /// How long it took.
    pub seconds: f64,
    /// What was wrong, or why it was skipped.
    pub evidence: String,
    /// What repeats it.
    pub repeat: String,
}

impl Row {
    fn key(&self) -> (u32, String, String, [u64; 2]) {
        (self.point, self.phase.clone(), self.adapter.clone(), self.behind)
    }
}

/// The rows of the last run, whole or not.
///
/// # Errors
/// When there are none, or they are not of this program.
pub fn last_rows() -> anyhow::Result<Vec<Row>> {
    let text = std::fs::read_to_string(ROWS).with_context(|| format!("cannot read {ROWS}"))?;
    text.lines().map(|line| serde_json::from_str(line).context(ROWS)).collect()
}

/// Begins a file of rows with `rows`.
///
/// # Errors
/// When it cannot be written.
pub fn begin(rows: &[Row]) -> anyhow::Result<()> {
    let directory = Path::new(ROWS).parent().context("no directory")?;
    std::fs::create_dir_all(directory)?;
    let lines = rows.iter().map(line).collect::<anyhow::Result<String>>()?;
    std::fs::write(ROWS, lines).with_context(|| format!("cannot write {ROWS}"))
}

/// Puts `row` behind the others.
///
/// # Errors
/// When it cannot be written.
pub fn append(row: &Row) -> anyhow::Result<()> {
    let mut file = OpenOptions::new().append(true).open(ROWS)?;
    Ok(io::Write::write_all(&mut file, line(row)?.as_bytes())?)
}

fn line(row: &Row) -> anyhow::Result<String> {
    Ok(serde_json::to_string(row)? + "\n")
}

/// `rows` with those of an earlier run that they do not replace.
#[must_use]
pub fn added(earlier: Vec<Row>, rows: Vec<Row>) -> Vec<Row> {
    let all = earlier.into_iter().chain(rows).map(|row| (row.key(), row));
    all.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// Prints the targets and writes the figures; whether all targets were met, among them that at
/// least `wanted` faults were made.
///
/// # Errors
/// When they cannot be written.
pub fn finish(rows: &[Row], seed: u64, wanted: usize) -> anyhow::Result<bool> {
    let count = |verdict: &str| rows.iter().filter(|row| row.verdict == verdict).count();
    let mut report = Report::new("faults");
    report.figure("seed", seed);
    report.figure("rows", serde_json::to_value(rows)?);
    let seconds: f64 = rows.iter().map(|row| row.seconds).sum();
    report.figure("seconds", seconds);
    for verdict in ["green", "red", "skipped", "missed"] {
        report.figure(verdict, count(verdict));
    }
    let real = count("green") + count("red");
    report.target("faults that were not survived", count("red") as f64, 0.0, Better::Lower);
    report.target("real faults made", real as f64, wanted as f64, Better::Higher);
    let met = report.targets().iter().all(|target| target.met);
    report.finish()?;
    println!(
        "{real} faults in {:.0} min, {} skipped, {} came too late",
        seconds / 60.0,
        count("skipped"),
        count("missed")
    );
    Ok(met)
}

/// Puts the table of `rows` into docs/reliability.md. Where it `keeps` what earlier runs have put
/// there, that is replaced only where there are rows, and not fewer.
///
/// # Errors
/// When the page is not there, or has no place for it.
pub fn write_page(points: &[Point], rows: &[Row], keeps: bool) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(PAGE).with_context(|| format!("cannot read {PAGE}"))?;
    let before = if keeps { cells(&text) } else { Cells::new() };
    std::fs::write(PAGE, with_table(&text, &table(points, rows, &before))?)?;
    println!("table written to {PAGE}");
    Ok(())
}

/// `page` with `table` in its place.
fn with_table(page: &str, table: &str) -> anyhow::Result<String> {
    godwit_bench::report::with_table(page, BEGIN, END, table)
}

/// What a table says of each fault, by its number, and each kind of VM.
type Cells = BTreeMap<(String, String), String>;

/// The cells of the table in `page`.
fn cells(page: &str) -> Cells {
    let inner = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect();
    let table = page.split_once(BEGIN).and_then(|(_, rest)| rest.split_once(END));
    let mut lines = table.map_or("", |(table, _)| table).lines().map(inner);
    let names: Vec<String> = lines.next().unwrap_or_default();
    let of = |line: Vec<String>| {
        let number = line.get(1).cloned().unwrap_or_default();
        let named = names.iter().cloned().zip(line).skip(4);
        named.map(move |(name, cell)| ((number.clone(), name), cell)).collect::<Vec<_>>()
    };
    lines.skip(1).flat_map(of).collect()
}

/// One line for each fault, one column for each kind of VM. Where there are no rows it is as
/// `before`.
fn table(points: &[Point], rows: &[Row], before: &Cells) -> String {
    let mut table = "| | what | befalls it |".to_owned();
    for adapter in Adapter::ALL {
        let _ = write!(table, " {adapter} |");
    }
    table += "\n| ---: | --- | --- |";
    table += &" --- |".repeat(Adapter::ALL.len());
    table.push('\n');
    for point in points {
        let _ = write!(table, "| {} | {} | {} |", point.number, point.place, point.what);
        for adapter in Adapter::ALL {
            let of = |row: &&Row| row.point == point.number && row.adapter == adapter.name();
            let own: Vec<&Row> = rows.iter().filter(of).collect();
            let place = (point.number.to_string(), adapter.name().to_owned());
            let cell = match before.get(&place) {
                Some(before) if knows_more(before, &own) => before.clone(),
                _ => summary(point, adapter, &own),
            };
            let _ = write!(table, " {cell} |");
        }
        table.push('\n');
    }
    table
}

/// Whether `before` tells of more faults than `rows`, none of which is red: of some of its steps
/// the rows are gone.
fn knows_more(before: &str, rows: &[&Row]) -> bool {
    let real = |row: &&&Row| matches!(row.verdict.as_str(), "green" | "red");
    let red = rows.iter().any(|row| row.verdict == "red");
    !red && rows.iter().filter(real).count() < told(before)
}

/// Of how many faults a cell tells.
fn told(cell: &str) -> usize {
    let (parts, _by_hand) = cell.split_once(" (").unwrap_or((cell, ""));
    parts.split(", ").filter_map(|part| part.split(' ').next()?.parse::<usize>().ok()).sum()
}

/// What came of a fault in all steps.
fn summary(point: &Point, adapter: Adapter, rows: &[&Row]) -> String {
    if !point.adapters.contains(&adapter) {
        return "–".to_owned();
    }
    let count = |verdict: &str| rows.iter().filter(|row| row.verdict == verdict).count();
    let came =
        |came: &str| rows.iter().filter(|row| row.verdict == "green" && row.came == came).count();
    let (green, red) = (count("green"), count("red"));
    if green + red == 0 {
        return if count("skipped") > 0 { "skipped" } else { "not tried" }.to_owned();
    }
    if red > 0 {
        return format!("**RED** {red} of {}", green + red);
    }
    let parts = ["stayed", "moved", "lost with its VM"].map(|name| (came(name), name));
    let parts = parts.iter().filter(|(count, _)| *count > 0);
    let parts: Vec<String> = parts.map(|(count, name)| format!("{count} {name}")).collect();
    let typed = rows.iter().filter(|row| !row.typed.is_empty()).count();
    let by_hand = if typed > 0 { format!(" ({typed} by hand)") } else { String::new() };
    format!("{}{by_hand}", parts.join(", "))
}

/// Checks that the page tells of each of `points`, in their order, and of no other.
///
/// # Errors
/// The first that it does not.
pub fn check_page(points: &[Point], page: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(page)?;
    let table = text.split_once(BEGIN).and_then(|(_, rest)| rest.split_once(END));
    let lines = table.context("there is no table")?.0.lines().skip(2);
    let begins = |line: &str| line.split('|').take(4).map(str::trim).collect::<Vec<_>>().join("|");
    let told: Vec<String> = lines.map(begins).collect();
    let is = |point: &Point| format!("|{}|{}|{}", point.number, point.place, point.what);
    let expected: Vec<String> = points.iter().map(is).collect();
    ensure!(told == expected, "run `make faults`: {told:?} instead of {expected:?}");
    Ok(())
}

/// The steps by their names.
///
/// # Errors
/// What is no step.
pub fn phase_named(name: &str) -> Result<Phase, String> {
    let found = Phase::ALL.into_iter().find(|phase| phase.name() == name);
    found.ok_or_else(|| format!("one of: {}", Phase::ALL.map(Phase::name).join(", ")))
}

/// The kinds of VMs by their names.
///
/// # Errors
/// What is none.
pub fn adapter_named(name: &str) -> Result<Adapter, String> {
    let found = Adapter::ALL.into_iter().find(|adapter| adapter.name() == name);
    found.ok_or_else(|| format!("one of: {}", Adapter::ALL.map(Adapter::name).join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::point::points;

    fn row(verdict: &str, came: &str, phase: &str) -> Row {
        Row {
            point: 1,
            fault: String::new(),
            phase: phase.to_owned(),
            behind: [0, 0],
            adapter: "kvm".to_owned(),
            verdict: verdict.to_owned(),
            came: came.to_owned(),
            typed: Vec::new(),
            seconds: 1.0,
            evidence: String::new(),
            repeat: String::new(),
        }
    }

    #[test]
    fn the_table_shows_what_is_red_not_tried_or_impossible() {
        let points = points();
        let first =
            |rows: &[Row]| table(&points, rows, &Cells::new()).lines().nth(2).unwrap().to_owned();
        let green = [row("green", "stayed", "offer"), row("green", "moved", "commit")];
        let line = first(&green);
        let expected = "| 1 | migrate | killed | 1 stayed, 1 moved | – | not";
        assert!(line.starts_with(expected), "{line}");
        let red = added(green.to_vec(), vec![row("red", "", "commit")]);
        assert!(first(&red).contains("| **RED** 1 of 2 |"), "{}", first(&red));
    }

    #[test]
    fn what_an_earlier_run_found_stays_where_this_one_has_tried_nothing() {
        let points = points();
        let earlier = table(&points, &[row("green", "moved", "commit")], &Cells::new());
        let before = cells(&format!("{BEGIN}{earlier}{END}"));
        let first = |rows: &[Row]| table(&points, rows, &before).lines().nth(2).unwrap().to_owned();
        assert!(first(&[]).contains("| 1 moved |"), "{}", first(&[]));
        let red = first(&[row("red", "", "commit")]);
        assert!(red.contains("| **RED** 1 of 1 |"), "{red}");

        // Mutation: what is tried again takes the place of all that was tried.
        let many = [row("green", "moved", "commit"), row("green", "stayed", "offer")];
        let many = table(&points, &many, &Cells::new());
        let before = cells(&format!("{BEGIN}{many}{END}"));
        let again = |rows: &[Row]| table(&points, rows, &before).lines().nth(2).unwrap().to_owned();
        let one = again(&[row("green", "stayed", "offer")]);
        assert!(one.contains("| 1 stayed, 1 moved |"), "{one}");
        assert_eq!(told("10 stayed, 2 lost with its VM (3 by hand)"), 12);
        assert_eq!((told("not tried"), told("–"), told("skipped")), (0, 0, 0));
    }

    #[test]
    fn the_table_takes_the_place_of_the_one_before() {
        let page = format!("before\n{BEGIN}old\n{END}after\n");
        let once = with_table(&page, "| new |\n").unwrap();
        assert_eq!(once, format!("before\n{BEGIN}| new |\n{END}after\n"));
        assert_eq!(with_table(&once, "| new |\n").unwrap(), once);
        assert!(with_table("nothing", "").is_err());
    }
}
