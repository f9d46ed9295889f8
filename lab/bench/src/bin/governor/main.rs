//! The benchmark of the write governor.
//!
//! Part `hold`: a Linux guest in a real QEMU that writes as fast as it can, at rates from 1,000 to
//! 50,000 first writes a second, with QEMU's monitor asked all the while; and one that only
//! computes and reads. Part `own`: what an answer costs a writer, and what it costs a process of 16
//! GiB to change hands. Part `killed`: a governor is killed with thousands of writers waiting. Part
//! `moves`: guests that outrun the link, moved by Godwit with its governor and with its vCPU
//! throttle, and by QEMU. Keeps one promise: what was missed is written down as missed.

mod hold;
mod killed;
mod moves;
mod own;

use anyhow::{Context, bail};
use godwit_bench::report::Report;

const USAGE: &str = "usage: governor [--only hold|own|killed|moves] [--rounds N] [--kills N]
  --only PART  that part only
  --rounds N   how often each rate and each move is repeated (3)
  --kills N    how often a governor is killed (100)";

pub(crate) struct Options {
    only: String,
    rounds: usize,
    kills: usize,
}

fn options() -> anyhow::Result<Options> {
    let mut options = Options { only: String::new(), rounds: 3, kills: 100 };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().context(USAGE)?;
        match argument.as_str() {
            "--only" => options.only = value,
            "--rounds" => options.rounds = value.parse().context(USAGE)?,
            "--kills" => options.kills = value.parse().context(USAGE)?,
            _ => bail!(USAGE),
        }
    }
    Ok(options)
}

fn main() -> anyhow::Result<()> {
    if killed::is_role()? {
        return Ok(());
    }
    let options = options()?;
    let mut report = Report::new("governor");
    let wanted = |part: &str| options.only.is_empty() || options.only == part;
    if wanted("hold") {
        hold::run(&options, &mut report)?;
    }
    if wanted("own") {
        own::run(&mut report)?;
    }
    if wanted("killed") {
        killed::run(options.kills, &mut report)?;
    }
    if wanted("moves") {
        moves::run(options.rounds, &mut report)?;
    }
    report.finish()?;
    Ok(())
}
