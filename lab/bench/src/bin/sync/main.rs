//! The benchmark of dirty synchronisation on real KVM: what one pass over the logs costs, and what
//! tracking costs the guest.
//!
//! Part one (requirement A3): the same guest memory in aligned and in misaligned blocks, its parts
//! timed, with one clear for each contiguous chunk against one clear a page. Part two: the trackers
//! against each other. Part three: as many memory slots as KVM has. Part four: a look at a large,
//! sparse memory, by one thread and by several. The guest is a bare-metal program on /dev/kvm.
//! Keeps one promise: everything that is compared is measured on the same memory with the same
//! pages dirty, in turn. Absolute times belong to the machine; the targets are ratios and counts.

mod large;
mod machine;
mod parts;
mod slots;
mod trackers;

use anyhow::bail;
use clap::{Parser, ValueEnum};
use godwit_bench::arguments::at_least_once;
use godwit_bench::report::Report;

/// Dirty-bitmap synchronisation on real KVM, and the trackers against each other.
#[derive(Clone, Copy, Debug, Parser)]
struct Options {
    /// This part alone
    #[arg(long, value_name = "PART")]
    only: Option<Part>,

    /// Guest memory in MiB, a multiple of 64
    #[arg(long, value_name = "N", default_value = "1024", value_parser = mib)]
    mib: u64,

    /// Repetitions of each figure
    #[arg(long, value_name = "N", default_value = "5", value_parser = at_least_once())]
    rounds: usize,

    /// GiB of the sparse memory that is looked at by several threads; 0: none
    #[arg(long, value_name = "N", default_value_t = 64)]
    large: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// What is about logs and trackers
    Logs,
    /// The large memory
    Large,
}

fn mib(text: &str) -> Result<u64, String> {
    let size = text.parse().ok().filter(|size: &u64| *size >= 64 && size.is_multiple_of(64));
    size.ok_or_else(|| "use a multiple of 64".to_owned())
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let logs = options.only != Some(Part::Large);
    if logs && !godwit_track::bare::kvm_is_usable() {
        bail!("no usable /dev/kvm: load the kvm module, or give this user the right to open it");
    }
    let mut report = Report::new("sync");
    report.figure("mib", options.mib);
    report.figure("rounds", options.rounds);
    if logs {
        parts::measure(options, &mut report)?;
        trackers::harvests(options, &mut report)?;
        trackers::slowdown(options, &mut report)?;
        slots::measure(&mut report)?;
    }
    if options.only != Some(Part::Logs) {
        large::measure(options, &mut report)?;
    }
    report.finish()?;
    Ok(())
}
