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

use anyhow::{Context, bail};
use godwit_bench::report::Report;

const USAGE: &str = "usage: sync [--only logs|large] [--mib N] [--rounds N]
  --only PART  the parts about logs and trackers, or the large memory
  --mib N      guest memory in MiB, a multiple of 64 (1024)
  --rounds N   repetitions of each figure (5)
  --large N    GiB of the sparse memory that is looked at by several threads; 0: none (64)";

/// What is measured, and how often.
#[derive(Clone, Copy, Debug)]
struct Options {
    logs: bool,
    mib: u64,
    rounds: usize,
    large: u64,
}

fn options() -> anyhow::Result<Options> {
    let mut options = Options { logs: true, mib: 1024, rounds: 5, large: 64 };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--only" {
            match arguments.next().as_deref() {
                Some("logs") => options.large = 0,
                Some("large") => options.logs = false,
                _ => bail!(USAGE),
            }
            continue;
        }
        let value = arguments.next().and_then(|text| text.parse::<u64>().ok()).context(USAGE)?;
        match argument.as_str() {
            "--mib" if value >= 64 && value.is_multiple_of(64) => options.mib = value,
            "--large" => options.large = value,
            "--rounds" if value >= 1 => options.rounds = value as usize,
            _ => bail!(USAGE),
        }
    }
    Ok(options)
}

fn main() -> anyhow::Result<()> {
    let options = options()?;
    if options.logs && !godwit_track::bare::kvm_is_usable() {
        bail!("no usable /dev/kvm: load the kvm module, or give this user the right to open it");
    }
    let mut report = Report::new("sync");
    report.figure("mib", options.mib);
    report.figure("rounds", options.rounds);
    if options.logs {
        parts::measure(options, &mut report)?;
        trackers::harvests(options, &mut report)?;
        trackers::slowdown(options, &mut report)?;
        slots::measure(&mut report)?;
    }
    large::measure(options, &mut report)?;
    report.finish()?;
    Ok(())
}
