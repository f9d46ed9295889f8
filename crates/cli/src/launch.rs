//! `godwit launch`: the process that starts a QEMU, and ends it if godwit ends before there is a
//! guardian. Started by godwit itself, never by hand.

use std::process::ExitCode;

use clap::Args;

use crate::process::FAILED;

/// Start a program in a session of its own.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The program and its arguments
    #[arg(required = true, last = true)]
    words: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    match godwit_qemu::launch(&arguments.words) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("godwit: cannot run {}: {error}", arguments.words[0]);
            ExitCode::from(FAILED)
        }
    }
}
