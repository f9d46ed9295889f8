//! `godwit migrate`.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use godwit_engine::address::Address;
use godwit_engine::report::Measures;
use godwit_engine::source::{Fault, Options, migrate};
use godwit_policy::{Settings, ThrottleMode};
use godwit_qemu::QemuSource;
use godwit_units::{Rate, parse_duration};
use serde_json::{Value, json};

use crate::output::{self, Display, json_line};
use crate::process::{self, FAILED, cpu_time, peak_rss};
use crate::vm::VmName;

/// Move the guest of a VM on this host to where `godwit receive` listens.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The VM: qemu:PATH, where PATH is the unix socket of a QMP monitor that nobody else is connected to
    #[arg(long, value_name = "VM")]
    vm: VmName,

    /// Where `godwit receive` listens: HOST:PORT, [IPV6]:PORT or unix:PATH
    #[arg(long, value_name = "ADDR")]
    to: Address,

    /// The longest expected downtime at which the guest is stopped
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = parse_duration)]
    downtime_limit: Duration,

    /// The most that is sent, in bits (10Gbit) or bytes (128MiB/s) per second [default: all the link carries]
    #[arg(long, value_name = "RATE")]
    max_bandwidth: Option<Rate>,

    /// Give up when no round came closer to the downtime limit for this long; 0s: never
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    patience: Duration,

    /// Compare digests of all memory on both sides before the destination may run; adds to the downtime
    #[arg(long)]
    verify: bool,

    /// Connections that carry pages
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=16))]
    channels: u8,

    /// Leave the VM stopped at the source instead of ending it
    #[arg(long)]
    keep_source: bool,

    /// Print progress and result as lines of JSON on standard output
    #[arg(long)]
    json: bool,

    /// Make up a fault, for tests
    #[arg(long, hide = true)]
    fault: Option<FaultName>,
}

/// The engine's faults by name.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum FaultName {
    CutAfterCommit,
    LoseCommit,
    WrongDigest,
}

impl From<FaultName> for Fault {
    fn from(name: FaultName) -> Self {
        match name {
            FaultName::CutAfterCommit => Self::CutAfterCommit,
            FaultName::LoseCommit => Self::LoseCommit,
            FaultName::WrongDigest => Self::WrongDigest,
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let cancel = process::cancel_on_signals();
    let VmName::Qemu(path) = &arguments.vm;
    let mut vm = match QemuSource::open(path) {
        Ok(vm) => vm,
        Err(error) => {
            output::refusal(&error, arguments.json);
            return ExitCode::from(FAILED);
        }
    };
    let options = Options {
        to: arguments.to.clone(),
        policy: Settings {
            downtime_limit: arguments.downtime_limit,
            patience: Some(arguments.patience).filter(|patience| !patience.is_zero()),
            // Nothing carries a throttle out yet.
            throttle: ThrottleMode::Off,
            ..Settings::default()
        },
        max_bandwidth: arguments.max_bandwidth,
        verify: arguments.verify,
        channels: arguments.channels,
        keep_source: arguments.keep_source,
        fault: arguments.fault.map(Into::into),
    };
    let mut display = Display::new(arguments.json);
    let result = migrate(&mut vm, &options, &cancel, &mut |progress| display.progress(progress));
    display.finish();
    match result {
        Ok(measures) => {
            tell(&measures, arguments.json);
            ExitCode::SUCCESS
        }
        Err(failure) => {
            output::failure(&failure, arguments.json);
            process::exit_code(&failure)
        }
    }
}

fn tell(measures: &Measures, json: bool) {
    let (cpu_ms, rss) = (cpu_time().as_secs_f64() * 1e3, peak_rss());
    if !json {
        println!("migrated\n{}", output::measures_text(measures, cpu_ms, rss));
        return;
    }
    let mut value = json!({ "outcome": "migrated", "cpu_ms": cpu_ms, "peak_rss_bytes": rss });
    if let (Value::Object(object), Ok(Value::Object(rest))) = (&mut value, serde_json::to_value(measures)) {
        object.extend(rest);
    }
    json_line(&value);
}
