//! `make faults`: every fault at every step with every kind of VM, or so many at random moments.
//!
//! Keeps two promises: what was red says how it is made again; and Ctrl-C ends all VMs, with what
//! was found until then kept for `--add`.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::Context;
use clap::Parser;
use godwit_faults::cell::{self, Moment};
use godwit_faults::phase::Phase;
use godwit_faults::point::{Point, points};
use godwit_faults::report::{self, Row, adapter_named, phase_named};
use godwit_faults::rig::{Adapter, Rig};
use godwit_testbed::end_children_on_interrupt;

/// Makes faults, and looks what comes of them.
#[derive(Debug, Parser)]
struct Arguments {
    /// These faults only, by their numbers
    #[arg(long, value_delimiter = ',')]
    only: Vec<u32>,
    /// With this kind of VM only
    #[arg(long, value_parser = adapter_named, value_delimiter = ',')]
    adapter: Vec<Adapter>,
    /// At this step only
    #[arg(long, value_parser = phase_named, value_delimiter = ',')]
    phase: Vec<Phase>,
    /// So many of them at random moments, instead of each at each step
    #[arg(long, value_name = "COUNT")]
    random: Option<usize>,
    /// What chance begins with
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// So many kinds of VMs at a time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Add to the rows of the run before, where they are not made anew
    #[arg(long)]
    add: bool,
    /// Put the table into docs/reliability.md, also when this is a part of it
    #[arg(long)]
    table: bool,
}

/// What is to be done.
struct Cell {
    adapter: Adapter,
    point: usize,
    moment: Moment,
    seed: u64,
}

impl Arguments {
    fn is_whole(&self) -> bool {
        self.only.is_empty() && self.adapter.is_empty() && self.phase.is_empty()
    }

    /// All cells that were asked for.
    fn cells(&self, points: &[Point]) -> Vec<Cell> {
        let mut cells = Vec::new();
        for adapter in Adapter::ALL.into_iter().filter(|it| all_or(&self.adapter, it)) {
            for (number, point) in points.iter().enumerate() {
                let phases = point.phases.iter().filter(|it| point.can_strike(adapter, **it));
                let phases = phases.filter(|it| all_or(&self.phase, it));
                let wanted = all_or(&self.only, &point.number);
                cells.extend(phases.filter(|_| wanted).map(|phase| Cell {
                    adapter,
                    point: number,
                    moment: Moment::at(*phase),
                    seed: self.seed,
                }));
            }
        }
        let Some(count) = self.random else { return cells };
        let mut rng = fastrand::Rng::with_seed(self.seed);
        let drawn = (0..count).filter_map(|_| {
            let seed = rng.u64(..1 << 32);
            let cell = cells.get(rng.usize(..cells.len().max(1)))?;
            let moment = Moment::random(cell.moment.phase, &mut fastrand::Rng::with_seed(seed));
            Some(Cell { adapter: cell.adapter, point: cell.point, moment, seed })
        });
        drawn.collect()
    }
}

fn all_or<T: PartialEq>(some: &[T], one: &T) -> bool {
    some.is_empty() || some.contains(one)
}

/// Runs all cells of one kind of VM, until somebody has `interrupted` it.
fn run_all(
    points: &[Point],
    cells: &[&Cell],
    random: bool,
    interrupted: &AtomicBool,
    done: &dyn Fn(Row),
) {
    let mut rig: Option<Box<dyn Rig>> = None;
    for cell in cells {
        if interrupted.load(Ordering::Relaxed) {
            return;
        }
        let point = &points[cell.point];
        let since = Instant::now();
        let mut row = row(cell, point, random);
        if rig.is_none() {
            rig = match cell.adapter.rig() {
                Ok(made) => made,
                Err(problem) => {
                    (row.verdict, row.evidence) = ("red".to_owned(), format!("{problem:#}"));
                    done(row);
                    continue;
                }
            };
        }
        let Some(vms) = &mut rig else {
            (row.verdict, row.evidence) = ("skipped".to_owned(), "no such VMs here".to_owned());
            done(row);
            continue;
        };
        let mut rng = fastrand::Rng::with_seed(cell.seed);
        match cell::run(vms.as_mut(), point, cell.moment, &mut rng) {
            Ok(verdict) => {
                let word = if verdict.struck { "green" } else { "missed" };
                (row.verdict, row.came) = (word.to_owned(), verdict.came.name().to_owned());
                row.typed = verdict.typed;
                if verdict.came == cell::Came::Lost {
                    rig = None;
                }
            }
            Err(problem) => {
                (row.verdict, row.evidence) = ("red".to_owned(), format!("{problem:#}"));
                rig = None;
            }
        }
        row.seconds = since.elapsed().as_secs_f64();
        // Nothing is wrong with a move whose processes were ended.
        if !interrupted.load(Ordering::Relaxed) {
            done(row);
        }
    }
}

fn row(cell: &Cell, point: &Point, random: bool) -> Row {
    let (adapter, phase) = (cell.adapter.name(), cell.moment.phase.name());
    let only = format!("--only {} --adapter {adapter} --phase {phase}", point.number);
    let at = if random { " --random 1" } else { "" };
    Row {
        point: point.number,
        fault: format!("{} {}", point.place, point.what),
        phase: phase.to_owned(),
        behind: [cell.moment.bytes as u64, cell.moment.delay.as_millis() as u64],
        adapter: adapter.to_owned(),
        verdict: String::new(),
        came: String::new(),
        typed: Vec::new(),
        seconds: 0.0,
        evidence: String::new(),
        repeat: format!("make faults FAULTS='{only}{at} --seed {}'", cell.seed),
    }
}

fn tell(number: usize, of: usize, row: &Row) {
    let typed = if row.typed.is_empty() { "" } else { ", by hand" };
    let [bytes, delay] = row.behind;
    let behind = if row.behind == [0, 0] { String::new() } else { format!("+{bytes}B+{delay}ms") };
    println!(
        "[{number}/{of}] {:>14} {:>2} {} at {}{behind}: {} {}{typed} ({:.1} s)",
        row.adapter, row.point, row.fault, row.phase, row.verdict, row.came, row.seconds
    );
    if row.verdict == "red" {
        println!("    {}\n    again: {}", row.evidence, row.repeat);
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let points = points();
    let cells = arguments.cells(&points);
    let earlier = if arguments.add { report::last_rows() } else { Ok(Vec::new()) };
    let earlier = earlier.and_then(|rows| report::begin(&rows).map(|()| rows));
    let signals = end_children_on_interrupt().context("no signals");
    let (earlier, interrupted) = match earlier.and_then(|rows| Ok((rows, signals?))) {
        Ok(begun) => begun,
        Err(problem) => {
            eprintln!("{problem:#}");
            return ExitCode::FAILURE;
        }
    };
    let (rows, begun) = (Mutex::new(Vec::new()), AtomicUsize::new(0));
    let done = |row: Row| {
        let Ok(mut rows) = rows.lock() else { return };
        if let Err(problem) = report::append(&row) {
            eprintln!("the row is not kept: {problem:#}");
        }
        rows.push(row);
        tell(rows.len(), cells.len(), &rows[rows.len() - 1]);
    };
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.max(1) {
            scope.spawn(|| {
                while let Some(adapter) = Adapter::ALL.get(begun.fetch_add(1, Ordering::Relaxed)) {
                    let own: Vec<&Cell> =
                        cells.iter().filter(|cell| cell.adapter == *adapter).collect();
                    run_all(&points, &own, arguments.random.is_some(), &interrupted, &done);
                }
            });
        }
    });
    if interrupted.load(Ordering::Relaxed) {
        println!("ended by a signal; all VMs are ended");
        return ExitCode::from(130);
    }
    let rows = report::added(earlier, rows.into_inner().unwrap_or_default());
    // At a random moment it may all be over.
    let wanted = arguments.random.map_or(1, |count| (count * 3 / 4).clamp(1, 1000));
    let written = report::finish(&rows, arguments.seed, wanted).and_then(|met| {
        if arguments.table || (arguments.is_whole() && arguments.random.is_none()) {
            report::write_page(&points, &rows, arguments.add)?;
        }
        Ok(met)
    });
    match written {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            eprintln!("{problem:#}");
            ExitCode::FAILURE
        }
    }
}
