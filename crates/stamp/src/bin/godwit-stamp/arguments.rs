//! The command line.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use godwit_stamp::pattern::{EXTENT, Pattern};
use godwit_units::{ByteCount, GRAMMAR, PAGE_SIZE, Rate, parse_duration};

/// Stamps memory and disks, checks them, and tells what a migration did to them.
///
/// Every sector says which run wrote it, where, when and in which version, so that each damage has
/// a name: lost write, stale version, misplaced, torn, flipped bits, zeroed. Each is told in a line
/// that begins with BUG.
///
/// Exit codes: 0 nothing found · 1 refused or failed · 2 wrong usage · 3 BUG · 130 ended by Ctrl-C,
/// nothing found until then.
#[derive(Debug, Parser)]
#[command(name = "godwit-stamp", version, max_term_width = 80, after_help = GRAMMAR)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Stamp memory and devices, then write and check them until Ctrl-C, or for a given time.
    Run(Box<RunArguments>),
    /// Look at all that a run stamped on devices or files. Nothing is written.
    Check(CheckArguments),
    /// Do what the tiny guest's init does, as an ordinary process: see docs/guest.md.
    Guest {
        /// Settings, as `godwit.mode=idle`.
        words: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// Memory to stamp and check
    #[arg(long, value_name = "SIZE", required_unless_present = "devices")]
    pub(crate) memory: Option<ByteCount>,
    /// A block device or file to overwrite, stamp and check; up to 64 times. Its data is lost
    #[arg(long = "destroy-data", value_name = "PATH")]
    pub(crate) devices: Vec<PathBuf>,
    /// Use this much of each device, from its start [default: all]
    #[arg(long, value_name = "SIZE")]
    pub(crate) span: Option<ByteCount>,
    /// A new file that takes down what fsync acknowledged, so that after a crash `check` tells lost
    /// from unfinished writes. Put it on another disk than those that are tested
    #[arg(long, value_name = "FILE")]
    pub(crate) journal: Option<PathBuf>,
    /// sequential, round-robin, stripe, scattered, random, hot-cold or zipf
    #[arg(long, value_name = "NAME", default_value = "random")]
    pub(crate) pattern: Pattern,
    /// Sizes of writes, 4KiB to 1MiB; several with commas between them are mixed
    #[arg(long = "size", value_name = "SIZE,...", default_value = "4KiB", value_delimiter = ',',
          value_parser = write_size)]
    pub(crate) sizes: Vec<u64>,
    /// Read and write past the page cache (O_DIRECT)
    #[arg(long)]
    pub(crate) direct: bool,
    /// Threads that write and check; each part of a device has one that writes it
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) workers: u16,
    /// Bytes written a second at the most, or none
    #[arg(long, value_name = "RATE", default_value = "unlimited", value_parser = limit)]
    pub(crate) rate: Limit,
    /// Bytes checked a second at the most, or none
    #[arg(long, value_name = "RATE", default_value = "unlimited", value_parser = limit)]
    pub(crate) check_rate: Limit,
    /// Write this much after the first stamps, then only check
    #[arg(long, value_name = "SIZE")]
    pub(crate) writes: Option<ByteCount>,
    /// Write for this long, then rest; checking goes on
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "rest")]
    pub(crate) work: Option<Duration>,
    /// Rest for this long, then write again
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "work")]
    pub(crate) rest: Option<Duration>,
    /// Of a hundred writes, so many discard instead (the device must support it)
    #[arg(long, value_name = "PERCENT", default_value = "0",
          value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) discard: u8,
    /// Of a hundred writes, so many have the device write zeroes instead
    #[arg(long, value_name = "PERCENT", default_value = "0",
          value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) write_zeroes: u8,
    /// Each worker calls fsync after so many writes; 0: only at the end
    #[arg(long, value_name = "N", default_value = "64")]
    pub(crate) fsync_every: u64,
    /// End after this time, with a last look at everything [default: at Ctrl-C or SIGTERM]
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration)]
    pub(crate) time: Option<Duration>,
    /// How often to tell what was done
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub(crate) report: Duration,
    /// The seed of what is random: the same makes the same writes [default: another each time]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Print the result as JSON on standard output, and everything else on standard error
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    /// The devices or files of the run, in the order in which it was given them
    #[arg(value_name = "PATH", required = true)]
    pub(crate) devices: Vec<PathBuf>,
    /// The run's journal: what fsync acknowledged must be there
    #[arg(long, value_name = "FILE")]
    pub(crate) journal: Option<PathBuf>,
    /// Read past the page cache (O_DIRECT)
    #[arg(long)]
    pub(crate) direct: bool,
    /// Print the result as JSON on standard output, and everything else on standard error
    #[arg(long)]
    pub(crate) json: bool,
}

/// How much of something there may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Limit {
    Unlimited,
    None,
    Rate(Rate),
}

fn limit(text: &str) -> Result<Limit, String> {
    match text {
        "unlimited" => Ok(Limit::Unlimited),
        "none" => Ok(Limit::None),
        _ => Rate::from_str(text)
            .map(Limit::Rate)
            .map_err(|problem| format!("{problem}, or none, or unlimited")),
    }
}

/// A size of writes, in units.
fn write_size(text: &str) -> Result<u64, String> {
    let size = ByteCount::from_str(text).map_err(|problem| problem.to_string())?;
    let units = size.0 / PAGE_SIZE;
    if !size.0.is_multiple_of(PAGE_SIZE) || !(1..=EXTENT).contains(&units) {
        return Err(format!("{size} is not possible: use a multiple of 4KiB, up to 1MiB"));
    }
    Ok(units)
}
