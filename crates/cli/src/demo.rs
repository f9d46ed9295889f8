//! `godwit demo`.

use std::process::ExitCode;

use clap::Args;

/// x
#[derive(Debug, Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(_arguments: &Arguments) -> ExitCode {
    ExitCode::SUCCESS
}
