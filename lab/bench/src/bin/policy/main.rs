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

use clap::Parser;
use godwit_bench::arguments::seconds;
use godwit_bench::report::Report;

/// Guests that dirty memory faster than the link carries it: every throttle against every way of
/// QEMU's.
#[derive(Parser)]
pub(crate) struct Options {
    /// Moves by godwit for each throttle; 0 leaves them out
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,

    /// Moves by QEMU in each of its ways; 0 leaves them out
    #[arg(long, value_name = "N", default_value_t = 3)]
    qemu_rounds: usize,

    /// Moves of the hot/cold guest, each way; 0 leaves them out
    #[arg(long, value_name = "N", default_value_t = 3)]
    hot_rounds: usize,

    /// 1 to make the ten forecasts, 0 not to
    #[arg(long, value_name = "N", default_value_t = 1)]
    forecasts: usize,

    /// When a move is cancelled as one that never ends
    #[arg(long, value_name = "SECONDS", default_value = "20", value_parser = seconds)]
    patience: Duration,

    /// Of the busy guest's rows, those whose name contains this
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
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
