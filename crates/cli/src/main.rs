//! The `godwit` command: flags and glue. What it does is in the crates below it.

#![forbid(unsafe_code)]

// For its macros: what is printed with them never ends the process.
#[macro_use]
extern crate godwit_terminal;

mod at_switchover;
mod audit;
mod deadline;
mod doctor;
mod evacuate;
mod guard;
#[cfg(feature = "test-hooks")]
mod hooks;
mod host;
mod keys;
mod launch;
mod list;
mod log;
mod metrics;
mod microvm;
mod migrate;
mod otlp;
mod plan;
mod processors;
mod receive;
mod records;
mod recover;
mod report;
mod rights;
mod run_directory;
mod security;
mod settings;
mod shell;
mod simulate;
mod steer;
mod under_way;
mod upgrade;
mod vm;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use godwit_terminal::{layout, output, process, say};
use godwit_units::GRAMMAR;
use tracing_subscriber::filter::Targets;

/// What stands below the list of commands. With that it fits on one screen.
const BELOW: &str = "\
Until the handover a failure leaves the guest at its source. Exit codes: 0 done;
1 failed; 2 usage; 3 operator needed; 4 microvm's guest died; 130 Ctrl-C.
";

/// Live-migrates running virtual machines, exactly and without losing one.
#[derive(Debug, Parser)]
#[command(name = "godwit", version, max_term_width = 80)]
#[command(after_help = format!("{BELOW}{GRAMMAR}"))]
struct Arguments {
    /// Tell steps: off, error, warn, info, debug or trace
    #[arg(long, global = true, value_name = "LEVEL", default_value = "off",
          hide_default_value = true, value_parser = log::filter)]
    log: Targets,
    /// Tell them as text or as lines of json
    #[arg(
        long,
        global = true,
        value_name = "FORMAT",
        value_enum,
        default_value = "text",
        hide_default_value = true,
        hide_possible_values = true
    )]
    log_format: log::Format,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Move the guest of a VM here to where `godwit receive` listens.
    Migrate(migrate::Arguments),
    /// Take a guest into a VM here that waits for one: start this first.
    Receive(receive::Arguments),
    /// Migrate, and compare all of both sides before the handover.
    ///
    /// For who hunts a bug: `godwit migrate --audit`. The guest stands still at its source while
    /// each page of both sides, of memory and of the disks that move along, is compared with what
    /// was sent of it, for as long as both need to read all of that. Four questions are answered
    /// apart: did memory arrive as it was sent, did the disks, was everything sent, and did it
    /// arrive in order. Where a page differs, the first is explained and the guest stays.
    Audit(audit::Arguments),
    /// Change the QEMU under a guest that goes on, on this host.
    Upgrade(upgrade::Arguments),
    /// Show the VMs of this host, and whether they could move.
    List(list::Arguments),
    /// Try what migrations need, and say what to do where it fails.
    Doctor(doctor::Arguments),
    /// Tell what a migration would be like, without migrating.
    Plan(plan::Arguments),
    /// Empty this host: move its VMs to where there is room.
    Evacuate(evacuate::Arguments),
    /// Ask the godwitd of a host: its room, VMs, destinations.
    #[command(subcommand)]
    Host(host::Command),
    /// Show migrations that run: progress, estimates and settings.
    Status(steer::StatusArguments),
    /// Change settings of a migration that runs.
    Set(steer::SetArguments),
    /// Make lost connections of a migration by another way.
    Redirect(steer::RedirectArguments),
    /// End the copying of a migration that runs and switch over now.
    Switchover(steer::SwitchoverArguments),
    /// Cancel a migration that runs: the guest stays where it is.
    Cancel(steer::CancelArguments),
    /// Show a migration that was made, in one HTML file.
    Report(report::Arguments),
    /// Print what Prometheus collects of migrations.
    Metrics(metrics::Arguments),
    /// Tell who has the guest when nobody knows, and settle it.
    Recover(recover::Arguments),
    /// A small VM with godwit inside.
    #[command(subcommand)]
    Microvm(microvm::Command),
    /// Make keys by which hosts know each other and encrypt.
    Keys(keys::Arguments),
    /// Simulate migrations of made-up guests over made-up links.
    Simulate(simulate::Arguments),
    /// Print what makes a shell complete commands and options.
    Completions(shell::CompletionsArguments),
    /// Print a page of the manual: `godwit man | man -l -`.
    Man(shell::ManArguments),
    /// Stand in for a godwit that is killed; godwit starts it by itself.
    #[command(name = godwit_qemu::GUARD_COMMAND, hide = true)]
    Guard(guard::Arguments),
    /// Be the process on which `godwit doctor` tries things; godwit starts it by itself.
    #[command(name = godwit_doctor::COMMAND, hide = true)]
    DoctorSubject,
    /// Become a QEMU in a session of its own; godwit starts it by itself.
    #[command(name = godwit_qemu::LAUNCH_COMMAND, hide = true)]
    Launch(launch::Arguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if matches!(
        arguments.command,
        Command::Plan(_)
            | Command::List(_)
            | Command::Doctor(_)
            | Command::Status(_)
            | Command::Report(_)
            | Command::Metrics(_)
            | Command::Simulate(_)
            | Command::Completions(_)
            | Command::Man(_)
    ) {
        say::ends_quietly();
    }
    log::start(arguments.log, arguments.log_format);
    match arguments.command {
        Command::Migrate(arguments) => migrate::run(&arguments),
        Command::Receive(arguments) => receive::run(&arguments),
        Command::Audit(arguments) => audit::run(&arguments),
        Command::Upgrade(arguments) => upgrade::run(&arguments),
        Command::List(arguments) => list::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Evacuate(arguments) => evacuate::run(&arguments),
        Command::Host(command) => host::run(&command),
        Command::Status(arguments) => steer::status(&arguments),
        Command::Set(arguments) => steer::set(&arguments),
        Command::Redirect(arguments) => steer::redirect(&arguments),
        Command::Switchover(arguments) => steer::switchover(&arguments),
        Command::Cancel(arguments) => steer::cancel(&arguments),
        Command::Recover(arguments) => recover::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Metrics(arguments) => metrics::run(&arguments),
        Command::Microvm(command) => microvm::run(&command),
        Command::Keys(arguments) => keys::run(&arguments),
        Command::Simulate(arguments) => simulate::run(&arguments),
        Command::Completions(arguments) => shell::completions(&arguments, Arguments::command()),
        Command::Man(arguments) => shell::man(&arguments, Arguments::command()),
        Command::Guard(arguments) => guard::run(&arguments),
        Command::DoctorSubject => doctor::subject(),
        Command::Launch(arguments) => launch::run(&arguments),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> String {
        let error = Arguments::try_parse_from(line.split(' ')).unwrap_err();
        error.render().to_string()
    }

    #[cfg(not(feature = "test-hooks"))]
    #[test]
    fn what_ships_has_no_option_for_tests() {
        for (line, option) in [
            ("godwit migrate --vm qemu:/x --to h:1 --fault wrong-digest", "--fault"),
            ("godwit receive --vm qemu:/x --listen h:1 --fault kill-after-run", "--fault"),
            ("godwit receive --vm qemu:/x --listen h:1 --slow-channel 1:1s", "--slow-channel"),
        ] {
            let text = refused(line);
            assert!(text.contains(&format!("unexpected argument '{option}' found")), "{text}");
        }
        for command in Arguments::command().get_subcommands() {
            // What one godwit tells another, on the host whose VMs it moves, is for no test.
            let of_tests =
                |argument: &&clap::Arg| argument.is_hide_set() && argument.get_id() != "hands";
            let hidden = command.get_arguments().find(of_tests);
            assert!(hidden.is_none(), "{}: {hidden:?}", command.get_name());
        }
    }

    #[test]
    fn help_fits_80_columns_and_says_how_units_are_written() {
        for line in [
            "godwit --help",
            "godwit migrate --help",
            "godwit audit --help",
            "godwit receive --help",
            "godwit plan --help",
            "godwit set --help",
            "godwit simulate --help",
            "godwit microvm run --help",
        ] {
            let text = refused(line);
            let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= 80, "{line}: {widest} columns: {text}");
            assert!(text.contains("docs/units.md"), "{line}");
        }
    }

    #[test]
    fn the_help_of_all_is_on_one_screen() {
        let text = refused("godwit --help");
        assert!(text.lines().count() <= 40, "{} lines: {text}", text.lines().count());
        for word in ["evacuate", "audit", "--log", "Exit codes", "Units", "Until the handover"] {
            assert!(text.contains(word), "no {word}: {text}");
        }
    }

    #[test]
    fn an_audit_takes_what_a_migration_takes_but_for_what_it_excludes() {
        let options = |name: &str| -> Vec<String> {
            let command = Arguments::command();
            let found = command.find_subcommand(name).unwrap().get_arguments();
            let mut names: Vec<String> =
                found.filter_map(|argument| argument.get_long().map(str::to_owned)).collect();
            names.sort();
            names
        };
        let excluded = ["verify", "audit", "postcopy", "postcopy-safe", "state-dir"];
        let mut migrate = options("migrate");
        migrate.retain(|option| !excluded.contains(&option.as_str()));
        assert_eq!(options("audit"), migrate);
        for (line, words) in [
            ("godwit audit --vm qemu:/x --to h:1 --verify", "unexpected argument '--verify'"),
            ("godwit audit --to h:1 --trace x", "--vm <VM>"),
            ("godwit migrate --vm qemu:/x --to h:1 --trace x", "--audit"),
            ("godwit migrate --vm qemu:/x --to h:1 --audit --verify", "cannot be used with"),
            ("godwit migrate --vm qemu:/x --to h:1 --audit --postcopy now", "cannot be used with"),
        ] {
            let text = refused(line);
            assert!(text.contains(words), "{line}: {text}");
        }
        for line in [
            "godwit audit --vm qemu:/x --to h:1 --trace x",
            "godwit migrate --vm qemu:/x --to h:1 --audit --trace x",
        ] {
            assert!(Arguments::try_parse_from(line.split(' ')).is_ok(), "{line}");
        }
        let help = refused("godwit audit --help").split_whitespace().collect::<Vec<_>>().join(" ");
        for words in ["who hunts a bug", "stands still at its source", "the guest stays"] {
            assert!(help.contains(words), "{words}: {help}");
        }
    }

    #[test]
    fn ambiguous_values_are_refused_with_both_readings() {
        for (line, words) in [
            (
                "godwit migrate --vm qemu:/x --to h:1 --max-bandwidth 1G",
                "1Gbit (119MiB/s) or 1GiB/s (8.59Gbit)",
            ),
            ("godwit migrate --vm qemu:/x --to h:1 --patience 5m", "write 5min or 5ms"),
            ("godwit receive --vm qemu:/x --listen h:1 --wait 60", "write 60ms or 60s"),
            ("godwit plan --vm qemu:/x --link 10", "10Mbit (1.19MiB/s) or 10MiB/s (83.9Mbit)"),
            ("godwit microvm run --memory 512", "write 512MiB or 512B"),
        ] {
            let text = refused(line);
            assert!(
                text.contains(words) && text.lines().next().unwrap().contains("ambiguous"),
                "{text}"
            );
        }
    }
}
