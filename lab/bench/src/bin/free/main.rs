//! The benchmark of free memory: what it costs to move a guest that does not use all of its memory.
//!
//! Side by side: godwit with a balloon that reports free pages, godwit without one, QEMU's own
//! plain migration, that with QEMU's own free-page hints, and that and multifd with the balloon
//! that godwit has. QEMU by itself gets anonymous memory, which is the best for it: reading a hole
//! of a file would fill it. And a microvm, whose guest hints. Absolute times belong to the machine;
//! the targets are ratios.

mod linux;
mod micro;

use anyhow::Context;
use clap::Parser;
use godwit_bench::report::Report;

/// What it costs to move a guest that does not use all of its memory.
#[derive(Parser)]
struct Options {
    /// Rounds of each case
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,

    /// This case alone; more than once for several
    #[arg(long, value_name = "CASE")]
    #[arg(value_parser = ["idle", "build", "sparse", "sparse-build", "microvm"])]
    only: Vec<String>,
}

fn main() -> anyhow::Result<()> {
    let Options { rounds, only } = Options::parse();
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
