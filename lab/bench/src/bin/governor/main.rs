//! The benchmark of the write governor.
//!
//! Part `hold`: a Linux guest in a real QEMU that writes as fast as it can, at rates from 1,000 to
//! 50,000 pages made dirty a second, with QEMU's monitor asked all the while; and one that only
//! computes and reads. Part `own`: what an answer costs a writer, and what it costs a process of 16
//! GiB to change hands. Part `killed`: a governor is killed with thousands of writers waiting. Part
//! `moves`: guests that outrun the link, moved by Godwit with its governor and with its vCPU
//! throttle, and by QEMU. Keeps one promise: what was missed is written down as missed.

mod hold;
mod killed;
mod moves;
mod own;

use clap::Parser;
use godwit_bench::report::Report;

/// The write governor: rates held, what it costs whom, and moves of busy guests.
#[derive(Parser)]
pub(crate) struct Options {
    /// This part alone
    #[arg(long, value_name = "PART", value_parser = ["hold", "own", "killed", "moves"])]
    only: Option<String>,

    /// How often each rate and each move is repeated
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,

    /// How often a governor is killed
    #[arg(long, value_name = "N", default_value_t = 100)]
    kills: usize,
}

fn main() -> anyhow::Result<()> {
    if killed::is_role()? {
        return Ok(());
    }
    let options = Options::parse();
    let mut report = Report::new("governor");
    let wanted = |part: &str| options.only.as_ref().is_none_or(|only| only == part);
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
