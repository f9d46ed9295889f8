//! The benchmark of disks that move along.
//!
//! Parts: `granularity`, what a round sends for each byte that the guest wrote, by the size of
//! dirty blocks; `search`, what it costs to find few dirty blocks on a large disk; `side`, Godwit
//! beside QEMU's own way on the same machines over the same link; `limit`, a guest that writes to
//! its disk faster than the link carries; `ready`, how long the end takes after a disk's last byte.
//! Keeps one promise: what is compared with QEMU is seen from outside: bytes by the link, downtime
//! by an observer, latency by the guest.

mod granularity;
mod limit;
mod ready;
mod search;
mod setup;
mod side;

use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use godwit_bench::arguments::{at_least_once, seconds};
use godwit_bench::report::Report;

const PARTS: [Part; 5] = [
    ("search", search::run),
    ("granularity", granularity::run),
    ("ready", ready::run),
    ("limit", limit::run),
    ("side", side::run),
];

/// A part: its name, and what runs it.
type Part = (&'static str, fn(&Options, &mut Report) -> anyhow::Result<()>);

/// Disks that move along, beside QEMU's own way over a slow link.
#[derive(Parser)]
pub(crate) struct Options {
    /// These parts alone
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    #[arg(value_parser = PARTS.map(|(name, _)| name))]
    only: Vec<String>,

    /// Moves of each kind; intervals of one second are 5 more
    #[arg(long, value_name = "N", default_value = "3", value_parser = at_least_once())]
    rounds: usize,

    /// When a move is cancelled as one that never ends
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    patience: Duration,

    /// What the guest writes each second in part side, in MiB
    #[arg(long, value_name = "MIB", value_delimiter = ',', default_value = "0,8,48")]
    rates: Vec<u64>,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let mut report = Report::new("disks");
    println!("{}", godwit_bench::report::machine());
    for (name, run) in PARTS {
        if options.only.is_empty() || options.only.iter().any(|only| only == name) {
            println!("\n## {name}\n");
            run(&options, &mut report).with_context(|| format!("part {name}"))?;
        }
    }
    report.finish()?;
    Ok(())
}
