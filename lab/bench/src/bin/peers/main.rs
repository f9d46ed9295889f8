//! The benchmark of peers: a grid of guests and links, and in each cell godwit beside QEMU's own
//! migration in each of its ways that fit.
//!
//! Keeps it fair: one QEMU, the same machine, the same memory back end (anonymous memory on huge
//! pages, unless the cell says otherwise) and the same work for all; a guest freshly started for
//! each move; by turns, each round begun by another; each way with the settings that QEMU's
//! documentation gives for it, a downtime limit of 300 ms and no limit of bandwidth. A move that
//! fails, or is not done by the deadline, is shown as such and counted: in every median it is one
//! that takes for ever. What is compared is seen by bystanders, the same for all. The targets were
//! fixed before any run: they are in [`verdicts`].
//!
//! ```text
//!   cells         guests, links, and who moves which over which
//!   contestants   godwit, and QEMU's ways
//!   moves         one move, and its figures
//!   rows          the raw figures, kept in target/bench/peers.jsonl
//!   verdicts      what is to be reached
//!   page          the section of docs/benchmarks.md, and its charts
//! ```

mod cells;
mod contestants;
mod moves;
mod page;
mod rows;
mod verdicts;

use std::collections::BTreeMap;
use std::io::Write;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::builder::PossibleValuesParser;
use clap::{Parser, ValueEnum};
use godwit_bench::arguments::{at_least_once, seconds};
use godwit_bench::report::{Better, Report, machine};
use godwit_bench::table::{Column, Table, figure};
use godwit_fingerprints::Key;
use godwit_testbed::{
    Conditions, EmulatedLink, Godwit, QemuBuild, end_children_on_interrupt, kvm_for,
};
use procfs::Current;
use serde_json::Value;

use cells::{CELLS, Cell};
use contestants::Contestant;
use moves::{Tools, one_move};
use rows::{Fate, Figure, Moves, Row};

/// Guests and links, and in each cell godwit beside QEMU's own migration in each of its ways.
#[derive(Parser)]
struct Options {
    /// Rounds of each cell, in each of which everybody moves a guest once
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_once())]
    rounds: usize,

    /// This cell alone, or the cells of this guest or link; more than once for several (see --list)
    #[arg(long, value_name = "CELL", hide_possible_values = true)]
    #[arg(value_parser = PossibleValuesParser::new(cells::words()))]
    only: Vec<String>,

    /// This contestant alone; more than once for several
    #[arg(long, value_name = "NAME")]
    #[arg(value_parser = PossibleValuesParser::new(Contestant::ALL.map(Contestant::name)))]
    who: Vec<String>,

    /// QEMU in which guests run, and whose own migration is the peer
    #[arg(long, value_name = "WHICH", value_enum, default_value_t = Which::Newest)]
    qemu: Which,

    /// A move that is not done by then is given up, in each cell; by default what the page says
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    deadline: Option<Duration>,

    /// No new cell begins after so many minutes
    #[arg(long, value_name = "MINUTES")]
    within: Option<u64>,

    /// Write the section of docs/benchmarks.md, from the last run of each cell
    #[arg(long)]
    page: bool,

    /// Measure nothing: with --page, write the section from what is kept
    #[arg(long)]
    kept: bool,

    /// Add rounds to the last run of each cell, which the same godwit and QEMU must have made here
    #[arg(long)]
    further: bool,

    /// List the cells, and who is in which
    #[arg(long)]
    list: bool,
}

/// Which of the QEMUs that `make qemu` unpacks.
#[derive(Clone, Copy, ValueEnum)]
enum Which {
    /// QEMU 10
    #[value(name = "10")]
    Ten,
    /// The newest that it found
    Newest,
}

impl Which {
    fn build(self) -> anyhow::Result<QemuBuild> {
        let (name, build) = match self {
            Self::Ten => ("QEMU 10", QemuBuild::unpacked()),
            Self::Newest => ("the newest QEMU", QemuBuild::newest()),
        };
        build.with_context(|| format!("{name} is missing: run `make qemu`"))
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    ensure!(!options.kept || options.page, "--kept is for --page: else there is nothing to do");
    if options.list {
        list();
        return Ok(());
    }
    if !options.kept {
        measure(&options)?;
    }
    if options.page { page::write() } else { Ok(()) }
}

fn list() {
    for cell in &CELLS {
        let who: Vec<&str> = cell.contestants.iter().map(|who| who.name()).collect();
        println!("{:<28} {}; {}", cell.name(), cell.guest.what(), cell.link.what());
        println!("{:<28} {}", "", who.join("; "));
    }
}

/// A run.
struct Run<'a> {
    options: &'a Options,
    began: Instant,
    /// As rows have it.
    date: String,
    /// What is kept of the run that this one goes on with, if it does.
    last: Vec<Row>,
    build: QemuBuild,
    godwit: Godwit,
    version: String,
    /// By which its program is known.
    print: String,
}

fn measure(options: &Options) -> anyhow::Result<()> {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    ensure!(
        enabled.is_ok_and(|text| !text.contains("[never]")),
        "this host gives no transparent huge pages: write madvise to \
         /sys/kernel/mm/transparent_hugepage/enabled"
    );
    let build = options.qemu.build()?;
    let godwit = Godwit::built()?;
    let interrupted = end_children_on_interrupt()?;
    let version = String::from_utf8(godwit.done(&["--version"])?.stdout)?.trim().to_owned();
    let program = std::fs::read(godwit.program()).context("cannot read godwit")?;
    let print = format!("{:016x}", Key::new(0).page(&program).word());
    let wanted = |cell: &&Cell| {
        options.only.is_empty() || options.only.iter().any(|word| cell.is_called(word))
    };
    let mut cells: Vec<&Cell> = CELLS.iter().filter(wanted).collect();
    let needs_kvm = cells.iter().any(|cell| cell.needs_kvm());
    if needs_kvm && !kvm_for("cells under KVM") {
        cells.retain(|cell| !cell.needs_kvm());
    }
    let mut last = if options.further { rows::latest()? } else { Vec::new() };
    last.retain(|row| cells.iter().any(|cell| cell.name() == row.cell));
    let (began, date) = (Instant::now(), date()?);
    let run = Run { options, began, date, last, build, godwit, version, print };
    let limit = EmulatedLink::create(&Conditions::default())
        .context("links are made between network namespaces, which needs root")?
        .throughput(Duration::from_millis(300), Duration::from_secs(1))?
        .in_bits();
    println!("{}, {}, {}", machine(), run.build, run.version);
    println!("the emulator of links by itself carries {limit} here");
    let mut report = Report::new("peers");
    report.figure("qemu", run.build.to_string());
    report.figure("godwit", run.version.clone());
    report.figure("run", run.date.clone());
    report.figure("rounds", options.rounds);
    report.figure("emulator_limit", limit);
    let mut all = run.last.clone();
    // Round by round, not cell by cell: what changes in an hour is in all cells alike.
    for round in 1..=options.rounds {
        for cell in &cells {
            if run.is_over() {
                break;
            }
            let rows = run.round(cell, round, &interrupted);
            all.extend(rows.with_context(|| format!("cell {}", cell.name()))?);
        }
    }
    for cell in &cells {
        print_medians(cell, &all);
        verdicts::enter(cell, &all, &mut report);
    }
    let bugs = all.iter().map(|row| row.bugs).sum::<usize>();
    report.target("BUG lines of guests, all moves", bugs as f64, 0.0, Better::Lower);
    let fates = |fate| all.iter().filter(|row| row.fate == fate).count();
    report.figure("moves", all.len());
    report.figure("moves_late", fates(Fate::Late));
    report.figure("moves_failed", fates(Fate::Failed));
    report.figure("rows", rows::PATH);
    report.finish()?;
    println!("raw figures added to {}", rows::PATH);
    Ok(())
}

/// The time by the host's clock, so that later is greater.
fn date() -> anyhow::Result<String> {
    let output = Command::new("date").args(["-u", "+%F %T"]).output().context("cannot run date")?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

impl Run<'_> {
    fn deadline(&self, cell: &Cell) -> Duration {
        self.options.deadline.unwrap_or_else(|| cell.deadline())
    }

    fn is_over(&self) -> bool {
        let limit = self.options.within.map(|minutes| Duration::from_secs(minutes * 60));
        limit.is_some_and(|limit| self.began.elapsed() >= limit)
    }

    /// One move by each contestant of `cell`; each round another one begins.
    fn round(
        &self,
        cell: &Cell,
        round: usize,
        interrupted: &AtomicBool,
    ) -> anyhow::Result<Vec<Row>> {
        let link = cell.link.create()?;
        let empty = Row {
            run: self.date.clone(),
            machine: machine(),
            qemu: self.build.to_string(),
            godwit: self.version.clone(),
            build: self.print.clone(),
            tcp: link.near().congestion_control()?,
            load: procfs::LoadAverage::current()?.one.into(),
            cell: cell.name(),
            contestant: String::new(),
            round,
            place: 0,
            fate: Fate::Failed,
            why: None,
            figures: BTreeMap::new(),
            bugs: 0,
            own_words: Value::Null,
        };
        let empty = empty.further(&self.last)?;
        let round = empty.round;
        println!(
            "\n{} ({}; {}), round {round}, deadline {} s",
            cell.name(),
            cell.guest.what(),
            cell.link.what(),
            self.deadline(cell).as_secs()
        );
        TABLE.print_head();
        let who = &self.options.who;
        let takes_part =
            |it: &&Contestant| who.is_empty() || who.iter().any(|one| one == it.name());
        let mut order: Vec<Contestant> =
            cell.contestants.iter().filter(takes_part).copied().collect();
        if let count @ 1.. = order.len() {
            order.rotate_left((round - 1) % count);
        }
        let deadline = self.deadline(cell);
        let tools = Tools { build: &self.build, godwit: &self.godwit, link: &link, deadline };
        let mut rows = Vec::new();
        for (place, &contestant) in order.iter().enumerate() {
            cell.check_room()?;
            let result = one_move(cell, contestant, tools);
            if interrupted.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            let result = result.unwrap_or_else(|problem| moves::Result::failed(&problem));
            let row = Row {
                contestant: contestant.name().to_owned(),
                place: place + 1,
                fate: result.fate,
                why: result.why,
                figures: result.figures,
                bugs: result.bugs,
                own_words: result.own_words,
                ..empty.clone()
            };
            rows::keep(&row)?;
            TABLE.print(&(row.contestant.clone(), shown(|figure| row.figure(figure))));
            if let Some(why) = &row.why {
                println!("    {why}");
            }
            let _ = std::io::stdout().flush();
            rows.push(row);
        }
        Ok(rows)
    }
}

fn print_medians(cell: &Cell, rows: &[Row]) {
    let name = cell.name();
    let contestants =
        cell.contestants.iter().map(|who| (who.name(), Moves::of(rows, &name, who.name())));
    let moved: Vec<_> = contestants.filter(|(_, moves)| moves.count() > 0).collect();
    if moved.is_empty() {
        return;
    }
    println!("\n{name}, medians:");
    TABLE.print_head();
    for (who, moves) in moved {
        TABLE.print(&(who.to_owned(), shown(|figure| moves.median(figure))));
    }
}

const SHOWN: [Figure; 11] = [
    Figure::Total,
    Figure::Downtime,
    Figure::Events,
    Figure::Stall,
    Figure::Wire,
    Figure::Cpu,
    Figure::Vcpus,
    Figure::LostBefore,
    Figure::LostDuring,
    Figure::LostAfter,
    Figure::Emulator,
];

fn shown(of: impl Fn(Figure) -> f64) -> [f64; SHOWN.len()] {
    SHOWN.map(of)
}

fn number(value: f64, digits: usize) -> String {
    if value.is_infinite() { "never".to_owned() } else { figure(value, digits) }
}

const TABLE: Table<(String, [f64; SHOWN.len()])> = Table(&[
    Column { head: "", width: 21, cell: |row| row.0.clone() },
    Column { head: "total ms", width: 8, cell: |row| number(row.1[0], 0) },
    Column { head: "downtime ms", width: 11, cell: |row| number(row.1[1], 1) },
    Column { head: "events ms", width: 9, cell: |row| number(row.1[2], 1) },
    Column { head: "stall ms", width: 8, cell: |row| number(row.1[3], 1) },
    Column { head: "wire MiB", width: 8, cell: |row| number(row.1[4], 1) },
    Column { head: "CPU s", width: 6, cell: |row| number(row.1[5], 2) },
    Column { head: "vCPUs s", width: 7, cell: |row| number(row.1[6], 2) },
    Column { head: "lost before s", width: 13, cell: |row| number(row.1[7], 2) },
    Column { head: "during", width: 6, cell: |row| number(row.1[8], 3) },
    Column { head: "after", width: 6, cell: |row| number(row.1[9], 2) },
    Column { head: "emulator s", width: 10, cell: |row| number(row.1[10], 2) },
]);
