//! `godwit launch`: the process that becomes a QEMU of its own. Started by godwit itself, never by
//! hand.

use std::process::ExitCode;

use clap::Args;

use crate::process::FAILED;

/// Become a program in a session of its own.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The program and its arguments
    #[arg(required = true, last = true)]
    words: Vec<String>,
}

/// Runs the command, which returns only where it fails.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let error = godwit_qemu::launch(&arguments.words);
    eprintln!("godwit: cannot run {}: {error}", arguments.words[0]);
    ExitCode::from(FAILED)
}
