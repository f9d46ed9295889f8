//! The `godwit` command: flags and glue. What it does is in the crates below it.

#![forbid(unsafe_code)]

mod bench;
mod demo;
mod migrate;
mod output;
mod process;
mod receive;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Live-migrates running virtual machines, exactly and without losing one.
///
/// Start `godwit receive` beside the destination's VM and `godwit migrate` beside the source's. The guest moves while
/// it runs; if anything fails before the handover, it runs on at the source as if nothing had been.
///
/// Exit codes: 0 done · 1 failed, the guest is where it was · 2 wrong usage · 3 an operator is needed (the message says
/// for what) · 130 cancelled by Ctrl-C, the guest is where it was.
#[derive(Debug, Parser)]
#[command(name = "godwit", version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Move the guest of a VM on this host to where `godwit receive` listens.
    Migrate(migrate::Arguments),
    /// Take a guest into a VM on this host that waits for one.
    Receive(receive::Arguments),
    /// Show it: two QEMUs on this machine, a Linux guest that checks itself, and a migration between them.
    Demo(demo::Arguments),
    /// Measure what this machine can do.
    #[command(subcommand)]
    Bench(bench::Command),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match arguments.command {
        Command::Migrate(arguments) => migrate::run(&arguments),
        Command::Receive(arguments) => receive::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Bench(command) => bench::run(&command),
    }
}
