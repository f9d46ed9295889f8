//! The benchmark of free memory: what it costs to move a guest that does not use all of its memory.
//!
//! Side by side: godwit with a balloon that reports free pages, godwit without one, QEMU's own
//! plain migration, and that with QEMU's own free-page hints. QEMU by itself gets anonymous memory,
//! which is the best for it: reading a hole of a file would fill it. And a microvm, whose guest
//! hints. Absolute times belong to the machine; the targets are ratios.

mod linux;
mod micro;

use anyhow::{Context, bail};
use godwit_bench::report::Report;

const USAGE: &str = "usage: free [--rounds N] [--only CASE]
  --rounds N   rounds of each case (3)
  --only CASE  idle, build, sparse, sparse-build or microvm; more than once for several";

fn main() -> anyhow::Result<()> {
    let (mut rounds, mut only) = (3, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().context(USAGE);
        match argument.as_str() {
            "--rounds" => rounds = value()?.parse().context(USAGE)?,
            "--only" => only.push(value()?),
            _ => bail!(USAGE),
        }
    }
    let wanted = |case: &str| only.is_empty() || only.iter().any(|name| name == case);
    let mut report = Report::new("free");
    report.figure("rounds", rounds);
    for case in linux::CASES.iter().filter(|case| wanted(case.name)) {
        linux::compare(case, rounds, &mut report).with_context(|| format!("case {}", case.name))?;
    }
    if wanted("microvm") {
        micro::compare(rounds.max(3), &mut report)?;
    }
    report.finish()?;
    Ok(())
}
