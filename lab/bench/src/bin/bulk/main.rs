//! The bulk path: a machine that stands still, moved by the real engine within this process over
//! loopback TCP.
//!
//! Three parts: uncompressed pages against a plain send and receive of the same bytes;
//! `compression=auto` against each fixed choice, over links of three speeds; and how well
//! `max-bandwidth` is kept.

mod auto;
mod limit;
mod machine;
mod raw;

use anyhow::{Context, bail, ensure};
use godwit_bench::report::{Report, machine as this_machine};

const USAGE: &str = "usage: bulk [--size GIB] [--rounds N] [--only raw,auto,limit]
  --size GIB    random memory for the uncompressed part (2)
  --rounds N    rounds of that part (3)
  --only PARTS  these parts alone";
const PARTS: [&str; 3] = ["raw", "auto", "limit"];

fn main() -> anyhow::Result<()> {
    let (mut size, mut rounds, mut parts) = (2_usize, 3_usize, PARTS.join(","));
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().context(USAGE);
        match argument.as_str() {
            "--size" => size = value()?.parse().context(USAGE)?,
            "--rounds" => rounds = value()?.parse().context(USAGE)?,
            "--only" => parts = value()?,
            _ => bail!(USAGE),
        }
    }
    ensure!(size > 0 && rounds > 0 && parts.split(',').all(|part| PARTS.contains(&part)), USAGE);
    println!("{}", this_machine());
    let mut report = Report::new("bulk");
    for part in parts.split(',') {
        match part {
            "raw" => raw::run(&mut report, size << 30, rounds)?,
            "auto" => auto::run(&mut report)?,
            _ => limit::run(&mut report)?,
        }
    }
    report.finish()?;
    Ok(())
}
