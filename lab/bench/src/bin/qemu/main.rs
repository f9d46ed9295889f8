//! The benchmark of the main job: a Linux guest moved between two QEMUs, by QEMU itself and by
//! Godwit.
//!
//! Part one, side by side on one QEMU: the same guest is moved by QEMU plainly, by QEMU with two
//! multifd channels and by Godwit, in turn and in a changing order. Part two, `--moves N`: a guest
//! that writes at full speed is moved again and again under the oldest QEMU here, where only godwit
//! moves it. Keeps one promise: what the guest felt is measured from outside, the same way for
//! everybody. Absolute times belong to the machine; the targets are ratios.

mod moves;
mod side;

use clap::Parser;
use godwit_bench::report::Report;

/// A Linux guest moved between two QEMUs, by QEMU itself and by Godwit.
#[derive(Parser)]
struct Options {
    /// Rounds of the comparison; 0 leaves it out
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,

    /// Then so many moves in a row of one guest at full speed
    #[arg(long, value_name = "N", default_value_t = 0)]
    moves: usize,

    /// Measure only QEMU's own migration, to look at the bench itself
    #[arg(long)]
    without_godwit: bool,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if options.rounds > 0 {
        let mut report = Report::new("qemu");
        side::compare(options.rounds, !options.without_godwit, &mut report)?;
        report.finish()?;
    }
    if options.moves > 0 {
        let mut report = Report::new("qemu-moves");
        moves::repeat(options.moves, &mut report)?;
        report.finish()?;
    }
    Ok(())
}
