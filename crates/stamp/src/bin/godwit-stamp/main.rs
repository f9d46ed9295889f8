//! The program `godwit-stamp`: stamps memory and disks and checks them, as an ordinary process or
//! service of any guest, and as the init of a small guest that does nothing else.
//!
//! Flags and glue: what a stamp is and what a difference means is the library's.

#![forbid(unsafe_code)]

#[macro_use]
mod say;
mod arguments;
mod check;
mod device;
mod guest;
mod journal;
mod report;
mod run;

use std::process::ExitCode;

use clap::Parser;

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    if std::process::id() == 1 || guest::is_job() {
        return guest::run(None);
    }
    let outcome = match Arguments::parse().command {
        Command::Run(arguments) => run::run(&arguments).map_err(|problem| problem.to_string()),
        Command::Check(arguments) => {
            check::check(&arguments).map_err(|problem| problem.to_string())
        }
        Command::Guest { words } => return guest::run(Some(&words.join(" "))),
    };
    match outcome {
        Ok(outcome) => outcome.exit_code(),
        Err(problem) => {
            tell!("godwit-stamp: {problem}");
            ExitCode::FAILURE
        }
    }
}
