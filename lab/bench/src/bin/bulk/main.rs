//! The bulk path: a machine that stands still, moved by the real engine within this process over
//! loopback TCP.
//!
//! Three parts: uncompressed pages against a plain send and receive of the same bytes;
//! `compression=auto` against each fixed choice, over links of three speeds; and how well
//! `max-bandwidth` is kept.

mod auto;
mod limit;
mod raw;

use clap::Parser;
use godwit_bench::arguments::at_least_once;
use godwit_bench::report::{Report, machine as this_machine};

/// What a page costs on its way: uncompressed, compressed, limited.
#[derive(Parser)]
struct Options {
    /// Random memory for the uncompressed part
    #[arg(long, value_name = "GIB", default_value = "2", value_parser = at_least_once())]
    size: usize,

    /// Rounds of that part
    #[arg(long, value_name = "N", default_value = "3", value_parser = at_least_once())]
    rounds: usize,

    /// These parts alone
    #[arg(long, value_name = "PART", value_delimiter = ',', default_value = "raw,auto,limit")]
    #[arg(value_parser = ["raw", "auto", "limit"])]
    only: Vec<String>,
}

fn main() -> anyhow::Result<()> {
    let Options { size, rounds, only } = Options::parse();
    println!("{}", this_machine());
    let mut report = Report::new("bulk");
    for part in only {
        match part.as_str() {
            "raw" => raw::run(&mut report, size << 30, rounds)?,
            "auto" => auto::run(&mut report)?,
            _ => limit::run(&mut report)?,
        }
    }
    report.finish()?;
    Ok(())
}
