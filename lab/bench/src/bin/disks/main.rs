//! The benchmark of disks that move along.
//!
//! Parts: `granularity`, what a round sends for each byte that the guest wrote, by the size of
//! dirty blocks; `search`, what it costs to find few dirty blocks on a large disk; `side`, Godwit
//! beside QEMU's own way on the same machines over the same link; `limit`, a guest that writes to
//! its disk faster than the link carries; `ready`, how long the end takes after a disk's last byte.
//! Keeps one promise: what is compared with QEMU is seen from outside: bytes by the link, downtime
//! by an observer, latency by the guest.

mod fixture;
mod granularity;
mod limit;
mod ready;
mod search;
mod side;

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use godwit_bench::report::Report;

const USAGE: &str =
    "usage: disks [--only PART[,PART]...] [--rounds N] [--patience SECONDS] [--rates MIB[,MIB]...]
  --only PART         granularity, search, side, limit, ready (all of them)
  --rounds N          moves of each kind (3), intervals of one second (5 more)
  --patience SECONDS  when a move is cancelled as one that never ends (60)
  --rates MIB,...     what the guest writes each second in part side, in MiB (0,8,48)";

const PARTS: [Part; 5] = [
    ("search", search::run),
    ("granularity", granularity::run),
    ("ready", ready::run),
    ("limit", limit::run),
    ("side", side::run),
];

/// A part: its name, and what runs it.
type Part = (&'static str, fn(&Options, &mut Report) -> anyhow::Result<()>);

pub(crate) struct Options {
    only: Vec<String>,
    rounds: usize,
    patience: Duration,
    rates: Vec<u64>,
}

fn options() -> anyhow::Result<Options> {
    let mut options = Options {
        only: Vec::new(),
        rounds: 3,
        patience: Duration::from_secs(60),
        rates: vec![0, 8, 48],
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().context(USAGE)?;
        match argument.as_str() {
            "--only" => options.only = value.split(',').map(str::to_owned).collect(),
            "--rounds" => options.rounds = value.parse().context(USAGE)?,
            "--patience" => options.patience = Duration::from_secs(value.parse().context(USAGE)?),
            "--rates" => {
                options.rates =
                    value.split(',').map(str::parse).collect::<Result<_, _>>().context(USAGE)?;
            }
            _ => bail!(USAGE),
        }
    }
    let known = |only: &String| PARTS.iter().any(|(name, _)| name == only);
    ensure!(options.only.iter().all(known) && options.rounds > 0, USAGE);
    Ok(options)
}

fn main() -> anyhow::Result<()> {
    let options = options()?;
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
