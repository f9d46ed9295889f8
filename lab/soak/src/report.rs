//! What a soak found: rows and targets for `target/bench/soak.json`, and the table of
//! docs/reliability.md.
//!
//! Keeps two promises: the table is made of rows of one run and of nothing else; and whatever
//! failed
//! says how it is made again.

use std::collections::BTreeSet;
use std::fmt::Write;

use anyhow::Context;
use godwit_bench::report::{Better, Report, median_of, with_table};
use godwit_faults::defects::Defect;
use serde::{Deserialize, Serialize};

use crate::machine::Machine;

const PAGE: &str = "docs/reliability.md";

/// Which table of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// VMs of every kind.
    Kinds,
    /// VMs with a witness.
    Witnesses,
}

impl Part {
    /// So many moves of all VMs are worth a new table.
    #[must_use]
    pub fn worth(self) -> usize {
        if self == Self::Kinds { 500 } else { 50 }
    }

    /// The lines around it.
    fn marks(self) -> [String; 2] {
        let name = if self == Self::Kinds { "make soak" } else { "make soak SOAK=--witnesses" };
        ["begin", "end"].map(|end| format!("<!-- made by `{name}`: {end} -->\n"))
    }
}

/// What came of one move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The guest moved, unharmed, with equal digests.
    Moved,
    /// A fault struck; what had to follow did, and the guest moved behind it.
    Survived,
    /// The busy host let too little through for the downtime limit: godwit gave up, and the guest
    /// ran on at the source as if nothing had been.
    Stayed,
    /// Anything else.
    Failed,
    /// There can be no such VM here.
    Skipped,
}

/// One move.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The VM.
    pub vm: String,
    /// The number of the move among those of the VM.
    pub number: u64,
    /// How it was made.
    pub options: String,
    /// What came of it.
    pub verdict: Verdict,
    /// Whether a guest has found damage, or its kernel has.
    pub bug: bool,
    /// How long it took, checks and new VMs and all.
    pub seconds: f64,
    /// How long the guest was stopped; 0 where that is not known.
    pub downtime_ms: f64,
    /// What was wrong.
    pub evidence: String,
    /// What repeats it.
    pub repeat: String,
}

impl Row {
    /// The row as one line.
    #[must_use]
    pub fn words(&self) -> String {
        let came = match self.verdict {
            Verdict::Moved => format!("moved, stopped for {:.1} ms", self.downtime_ms),
            Verdict::Survived => "fault survived".to_owned(),
            Verdict::Stayed => "given up, stayed".to_owned(),
            Verdict::Failed if self.bug => "BUG".to_owned(),
            Verdict::Failed => "FAILED".to_owned(),
            Verdict::Skipped => "skipped".to_owned(),
        };
        format!("{} {}: {came} ({:.1} s) {}", self.vm, self.number, self.seconds, self.options)
    }
}

/// What was asked for.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The seed.
    pub seed: u64,
    /// So many moves.
    pub moves: usize,
    /// With these VMs.
    pub vms: Vec<Machine>,
    /// Under this load.
    pub load: String,
    /// What each move gets wrong on purpose, to see that the soak tells it.
    pub defect: Option<&'static Defect>,
}

/// Prints the targets and writes the figures; whether all targets were met.
///
/// # Errors
/// When they cannot be written.
pub fn finish(rows: &[Row], asked: &Asked, seconds: f64) -> anyhow::Result<bool> {
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let mut report = Report::new("soak");
    report.figure("seed", asked.seed);
    report.figure("load", asked.load.clone());
    report.figure("seconds", seconds);
    report.figure("faults_survived", count(Verdict::Survived));
    report.figure("given_up", count(Verdict::Stayed));
    report.figure("rows", serde_json::to_value(rows)?);
    let (moved, failed) = (count(Verdict::Moved), count(Verdict::Failed));
    let bugs = rows.iter().filter(|row| row.bug).count();
    let moving: Vec<&Machine> = asked
        .vms
        .iter()
        .filter(|vm| rows.iter().any(|row| row.vm == vm.name && row.verdict == Verdict::Moved))
        .collect();
    let kinds: BTreeSet<_> = moving.iter().map(|vm| vm.adapter).collect();
    let wanted: BTreeSet<_> = asked.vms.iter().map(|vm| vm.adapter).collect();
    let [higher, lower] = [Better::Higher, Better::Lower];
    report.target("moves with equal digests", moved as f64, asked.moves as f64, higher);
    report.target("VMs that moved", moving.len() as f64, asked.vms.len() as f64, higher);
    report.target("kinds of VMs that moved", kinds.len() as f64, wanted.len() as f64, higher);
    let given_up = count(Verdict::Stayed) as f64 / (moved + count(Verdict::Stayed)).max(1) as f64;
    report.target("moves given up, % of all", given_up * 100.0, 10.0, lower);
    report.target("BUGs", bugs as f64, 0.0, lower);
    report.target("moves that failed", failed as f64, 0.0, lower);
    let met = report.targets().iter().all(|target| target.met);
    report.finish()?;
    println!("{moved} moves in {:.0} min, seed {}", seconds / 60.0, asked.seed);
    if let Some(first) = rows.iter().find(|row| row.verdict == Verdict::Failed) {
        println!("first failure: {}\n    {}", first.words(), first.evidence);
        println!("    again: {}", first.repeat);
    }
    Ok(met)
}

/// Puts the table of `rows` into docs/reliability.md.
///
/// # Errors
/// When the page is not there, or has no place for it.
pub fn write_page(rows: &[Row], asked: &Asked, seconds: f64, part: Part) -> anyhow::Result<()> {
    let [begin, end] = part.marks();
    let page = std::fs::read_to_string(PAGE).with_context(|| format!("cannot read {PAGE}"))?;
    std::fs::write(PAGE, with_table(&page, &begin, &end, &table(rows, asked, seconds))?)?;
    println!("table written to {PAGE}");
    Ok(())
}

/// One line for each VM, and one for all.
fn table(rows: &[Row], asked: &Asked, seconds: f64) -> String {
    let mut table = format!(
        "Seed {}, load: {}, {:.0} minutes.\n\n\
         | VM | kind | moves | given up | faults survived | failed | BUGs | downtime, median \
         | longest |\n| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
        asked.seed,
        asked.load,
        seconds / 60.0
    );
    let mut line = |name: &str, kind: &str, of: &[&Row]| {
        let count = |verdict| of.iter().filter(|row| row.verdict == verdict).count();
        let moved: Vec<&&Row> = of.iter().filter(|row| row.verdict == Verdict::Moved).collect();
        let longest = moved.iter().map(|row| row.downtime_ms).fold(0.0, f64::max);
        let stopped = match moved.is_empty() {
            true => "– | –".to_owned(),
            false => {
                let median = median_of(moved.iter().copied(), |row| row.downtime_ms);
                format!("{median:.0} ms | {longest:.0} ms")
            }
        };
        let _ = writeln!(
            table,
            "| {name} | {kind} | {} | {} | {} | {} | {} | {stopped} |",
            moved.len(),
            count(Verdict::Stayed),
            count(Verdict::Survived),
            count(Verdict::Failed),
            of.iter().filter(|row| row.bug).count()
        );
    };
    for vm in &asked.vms {
        let own: Vec<&Row> = rows.iter().filter(|row| row.vm == vm.name).collect();
        let skipped = own.iter().any(|row| row.verdict == Verdict::Skipped);
        let kind = if skipped { "skipped: cannot run there" } else { vm.adapter.name() };
        line(vm.name, kind, &own);
    }
    line("all", "", &rows.iter().collect::<Vec<_>>());
    table
}

/// A row that tells nothing but this.
#[cfg(test)]
pub(crate) fn row_for_tests(vm: &str, verdict: Verdict) -> Row {
    Row {
        vm: vm.to_owned(),
        number: 0,
        options: String::new(),
        verdict,
        bug: false,
        seconds: 1.0,
        downtime_ms: 20.0,
        evidence: String::new(),
        repeat: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::machines;

    #[test]
    fn the_page_has_a_place_for_both_tables() {
        let page = include_str!("../../../docs/reliability.md");
        for part in [Part::Kinds, Part::Witnesses] {
            for mark in part.marks() {
                assert_eq!(page.matches(&mark).count(), 1, "{mark}");
            }
        }
    }

    #[test]
    fn the_table_tells_of_each_vm_what_failed_and_what_was_skipped() {
        let asked =
            Asked { seed: 3, moves: 9, vms: machines(), load: "none".to_owned(), defect: None };
        let rows = [
            row_for_tests("kvm-disk", Verdict::Moved),
            Row { bug: true, ..row_for_tests("kvm-disk", Verdict::Failed) },
            row_for_tests("libvirt-disk", Verdict::Skipped),
        ];
        let table = table(&rows, &asked, 60.0);
        let line = |name: &str| table.lines().find(|line| line.starts_with(&format!("| {name} ")));
        assert_eq!(
            line("kvm-disk"),
            Some("| kvm-disk | kvm | 1 | 0 | 0 | 1 | 1 | 20 ms | 20 ms |")
        );
        assert!(line("libvirt-disk").is_some_and(|line| line.contains("skipped")));
        assert_eq!(line("all"), Some("| all |  | 1 | 0 | 0 | 1 | 1 | 20 ms | 20 ms |"));
        assert!(table.starts_with("Seed 3,"));
    }
}
