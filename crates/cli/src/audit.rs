//! `godwit audit`: `godwit migrate` that compares all of the guest before it hands it over.

use std::process::ExitCode;

use clap::Args;
use godwit_units::GRAMMAR;

use crate::migrate::{self, Move};

/// Move the guest of a VM on this host, and compare all of both sides before the handover.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR)]
pub(crate) struct Arguments {
    #[command(flatten)]
    moved: Move,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    migrate::audit(&arguments.moved)
}
