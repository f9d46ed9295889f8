//! Benchmark of the two structures that a synchronisation is made of: dirty bitmaps and memory
//! slots.
//!
//! `structures [scan|slots|merge|sparse]...` runs the parts named, or all. Each part prints one
//! table, draws it into docs/charts, and adds its targets to the report
//! target/bench/structures.json. Everything runs on one thread. Contenders take turns in every
//! round, so that a busy neighbour slows all of them; a time is the median over rounds, a ratio the
//! median of the ratios within each round.

mod merge;
mod pattern;
mod rounds;
mod scan;
mod slots;
mod sparse;

use clap::Parser;
use godwit_bench::report::Report;

/// A part: its name, and what runs it.
type Part = (&'static str, fn(&mut Report) -> anyhow::Result<()>);

const PARTS: [Part; 4] =
    [("scan", scan::run), ("slots", slots::run), ("merge", merge::run), ("sparse", sparse::run)];

/// Dirty bitmaps and memory slots against the limits of the machine.
#[derive(Parser)]
struct Options {
    /// These parts alone
    #[arg(value_name = "PART", value_parser = PARTS.map(|(name, _)| name))]
    parts: Vec<String>,
}

fn main() -> anyhow::Result<()> {
    let Options { parts } = Options::parse();
    let mut report = Report::new("structures");
    println!("{}", godwit_bench::report::machine());
    for (name, run) in PARTS {
        if parts.is_empty() || parts.iter().any(|part| part == name) {
            run(&mut report)?;
        }
    }
    report.finish()?;
    Ok(())
}
