//! `godwit guard`: the process that stands in for a `godwit` that is killed. Started by godwit
//! itself, never by hand.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::process::{self, OPERATOR};

/// Stand in for a godwit that is killed.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The record of what godwit has changed
    record: PathBuf,

    /// The process of that godwit
    godwit: i32,

    /// Where libvirt has the domain, if it has one
    #[arg(requires = "uuid")]
    uri: Option<String>,

    /// The domain's UUID
    uuid: Option<String>,

    /// The monitor, where that is connected to anew
    #[arg(long, conflicts_with = "uri")]
    monitor: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    // Ctrl-C, a hangup and a polite end are godwit's to answer; this process ends when that one
    // does.
    let _ = process::cancel_on_signals();
    let domain = arguments.uri.clone().zip(arguments.uuid.clone());
    match godwit_qemu::stand_guard(
        &arguments.record,
        arguments.godwit,
        domain,
        arguments.monitor.clone(),
    ) {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(OPERATOR),
    }
}
