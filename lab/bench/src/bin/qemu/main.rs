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

use anyhow::{Context, bail};
use godwit_bench::report::Report;

const USAGE: &str = "usage: qemu [--rounds N] [--moves N] [--without-godwit]
  --rounds N         rounds of the comparison (5; 0 leaves it out)
  --moves N          then so many moves in a row of one guest at full speed (0)
  --without-godwit   measure only QEMU's own migration, to look at the bench itself";

struct Options {
    rounds: usize,
    moves: usize,
    without_godwit: bool,
}

fn options() -> anyhow::Result<Options> {
    let mut options = Options { rounds: 5, moves: 0, without_godwit: false };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse().ok()).context(USAGE);
        match argument.as_str() {
            "--rounds" => options.rounds = number()?,
            "--moves" => options.moves = number()?,
            "--without-godwit" => options.without_godwit = true,
            _ => bail!(USAGE),
        }
    }
    Ok(options)
}

fn main() -> anyhow::Result<()> {
    let options = options()?;
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
