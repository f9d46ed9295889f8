//! What encryption costs: how fast pages move over one connection and over several, at a link of 10
//! Gbit/s, and how long a guest of QEMU is gone. And what a link costs that is away for a while.

mod cut;
mod downtime;
mod throughput;

use std::path::PathBuf;

use clap::Parser;
use godwit_bench::arguments::at_least_once;
use godwit_bench::report::{Report, machine};
use godwit_tls::make;

/// With keys and without.
#[derive(Parser)]
struct Options {
    /// Random memory for the parts without a guest
    #[arg(long, value_name = "GIB", default_value = "2", value_parser = at_least_once())]
    size: usize,

    /// Rounds
    #[arg(long, value_name = "N", default_value = "5", value_parser = at_least_once())]
    rounds: usize,

    /// These parts alone
    #[arg(
        long,
        value_name = "PART",
        value_delimiter = ',',
        default_value = "throughput,downtime,cut"
    )]
    #[arg(value_parser = ["throughput", "downtime", "cut"])]
    only: Vec<String>,
}

/// Keys of one host for both ends; they go with their value.
struct Keys(PathBuf);

impl Keys {
    fn make() -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("godwit-secure-{}", std::process::id()));
        make(&dir, &[HOST.to_owned()], 1)?;
        Ok(Self(dir))
    }

    fn dir(&self) -> PathBuf {
        self.0.join(HOST)
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const HOST: &str = "127.0.0.1";

fn main() -> anyhow::Result<()> {
    let Options { size, rounds, only } = Options::parse();
    println!("{}", machine());
    let mut report = Report::new("secure");
    report.figure("rounds", rounds);
    let keys = Keys::make()?;
    for part in only {
        match part.as_str() {
            "throughput" => throughput::run(&mut report, &keys.dir(), size << 30, rounds)?,
            "cut" => cut::run(&mut report, rounds)?,
            _ => downtime::run(&mut report, &keys.dir(), rounds)?,
        }
    }
    report.finish()?;
    Ok(())
}
