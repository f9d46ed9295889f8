//! The `godwit` command: flags and glue. What it does is in the crates below it.

#![forbid(unsafe_code)]

mod bench;
mod demo;
mod guard;
mod microvm;
mod migrate;
mod output;
mod plan;
mod process;
mod receive;
mod simulate;
mod steer;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Live-migrates running virtual machines, exactly and without losing one.
///
/// Start `godwit receive` beside the destination's VM and `godwit migrate` beside the source's. The guest moves while
/// it runs; if anything fails before the handover, it runs on at the source as if nothing had been.
///
/// Exit codes: 0 done · 1 failed, the guest is where it was · 2 wrong usage · 3 an operator is needed (the message says
/// for what) · 4 the guest of a microvm has died · 130 cancelled by Ctrl-C, the guest is where it was.
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
    /// Tell what a migration would be like, without migrating.
    Plan(plan::Arguments),
    /// Show migrations that run: progress, estimates and settings.
    Status(steer::StatusArguments),
    /// Change settings of a migration that runs.
    Set(steer::SetArguments),
    /// End the copying of a migration that runs and switch over now.
    Switchover(steer::SwitchoverArguments),
    /// Cancel a migration that runs: the guest stays where it is.
    Cancel(steer::CancelArguments),
    /// A small VM with godwit inside, for those who have no QEMU and those who write VMMs.
    #[command(subcommand)]
    Microvm(microvm::Command),
    /// Show it: two VMs on this machine, a guest that checks itself, and a migration between them.
    Demo(demo::Arguments),
    /// Simulate a migration in virtual time, with made-up guests and links under the real policy.
    Simulate(simulate::Arguments),
    /// Measure what this machine can do.
    #[command(subcommand)]
    Bench(bench::Command),
    /// Stand in for a godwit that is killed; godwit starts it by itself.
    #[command(name = godwit_qemu::GUARD_COMMAND, hide = true)]
    Guard(guard::Arguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match arguments.command {
        Command::Migrate(arguments) => migrate::run(&arguments),
        Command::Receive(arguments) => receive::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Status(arguments) => steer::status(&arguments),
        Command::Set(arguments) => steer::set(&arguments),
        Command::Switchover(arguments) => steer::switchover(&arguments),
        Command::Cancel(arguments) => steer::cancel(&arguments),
        Command::Microvm(command) => microvm::run(&command),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Simulate(arguments) => simulate::run(&arguments),
        Command::Bench(command) => bench::run(&command),
        Command::Guard(arguments) => guard::run(&arguments),
    }
}
