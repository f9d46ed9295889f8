//! The benchmark of the policy: guests that dirty memory faster than the link carries it.
//!
//! Part `busy`, side by side on one QEMU: a guest that writes 256 MiB as fast as it can, over a
//! link of 128 MiB/s, moved by QEMU in all of its ways and by Godwit with each of its throttles.
//! Part `hot`: a microvm that writes a tenth of its memory most of the time, moved with and without
//! delaying hot segments. Part `forecast`: ten plans, and what came of them. Keeps one promise:
//! what the guest felt is measured from outside, the same way for everybody.

mod busy;
mod forecast;
mod hot;

use std::time::Duration;

use anyhow::{Context, bail};
use godwit_bench::report::Report;

const USAGE: &str =
    "usage: policy [--rounds N] [--qemu-rounds N] [--hot-rounds N] [--forecasts N] \
     [--patience SECONDS] [--only NAME]
  --rounds N          moves by godwit for each throttle (3; 0 leaves them out)
  --qemu-rounds N     moves by QEMU in each of its ways (1; 0 leaves them out)
  --hot-rounds N      moves of the hot/cold guest, each way (3; 0 leaves them out)
  --forecasts N       1 to make the ten forecasts (1), 0 not to
  --patience SECONDS  when a move is cancelled as one that never ends (20)
  --only NAME         of the busy guest's rows, those whose name contains this";

pub(crate) struct Options {
    rounds: usize,
    qemu_rounds: usize,
    hot_rounds: usize,
    forecasts: usize,
    patience: Duration,
    only: String,
}

fn options() -> anyhow::Result<Options> {
    let mut options = Options {
        rounds: 3,
        qemu_rounds: 1,
        hot_rounds: 3,
        forecasts: 1,
        patience: Duration::from_secs(20),
        only: String::new(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().context(USAGE)?;
        let number = || value.parse::<usize>().context(USAGE);
        match argument.as_str() {
            "--rounds" => options.rounds = number()?,
            "--qemu-rounds" => options.qemu_rounds = number()?,
            "--hot-rounds" => options.hot_rounds = number()?,
            "--forecasts" => options.forecasts = number()?,
            "--patience" => options.patience = Duration::from_secs(number()? as u64),
            "--only" => options.only = value,
            _ => bail!(USAGE),
        }
    }
    Ok(options)
}

fn main() -> anyhow::Result<()> {
    let options = options()?;
    let mut report = Report::new("policy");
    if options.rounds + options.qemu_rounds > 0 {
        busy::compare(&options, &mut report)?;
    }
    if options.hot_rounds > 0 {
        hot::compare(options.hot_rounds, &mut report)?;
    }
    if options.forecasts > 0 {
        forecast::compare(&mut report)?;
    }
    report.finish()?;
    Ok(())
}
