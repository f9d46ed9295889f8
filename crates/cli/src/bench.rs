//! `godwit bench`: what this machine can do, before a guest depends on it.

mod codecs;
mod contender;

use std::process::ExitCode;

use clap::Subcommand;

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Compare codecs on a memory image: time, size and speed of each, one processor.
    Codecs(codecs::Arguments),
}

pub(crate) fn run(command: &Command) -> ExitCode {
    let result = match command {
        Command::Codecs(arguments) => codecs::run(arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("godwit: {error:#}");
            ExitCode::FAILURE
        }
    }
}
