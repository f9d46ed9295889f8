//! How long a guest stands still while the QEMU under it changes, by the size of its memory.

use clap::Parser;
use godwit_bench::report::Report;
use godwit_bench::upgrades;

/// How long a guest stands still while the QEMU under it changes.
#[derive(Parser)]
struct Options {
    /// Upgrades of each guest
    #[arg(long, value_name = "N", default_value_t = 6)]
    rounds: usize,

    /// Sizes of guests, in GiB
    #[arg(long, value_name = "GIB,...", value_delimiter = ',', default_value = "1,8,16")]
    sizes: Vec<u64>,

    /// How much of its memory a guest fills at most, in MiB; at most three quarters of it
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    fill: u64,
}

fn main() -> anyhow::Result<()> {
    let Options { rounds, sizes, fill } = Options::parse();
    let mut report = Report::new("upgrade");
    report.figure("rounds", rounds);
    upgrades::measure_all(&mut report, rounds, &sizes, fill)?;
    report.finish()?;
    Ok(())
}
