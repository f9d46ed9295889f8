//! `godwit completions` and `godwit man`: what a shell and `man` know of the command, made from the
//! same definitions as `--help`. What is hidden from help is hidden from both.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;

use crate::process::{FAILED, USAGE};

/// Print what makes a shell complete godwit's commands, options and settings.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArguments {
    /// The shell: for bash, `source <(godwit completions bash)`
    shell: Shell,
}

/// Print a page of the manual: `godwit man | man -l -`.
#[derive(Debug, Args)]
pub(crate) struct ManArguments {
    /// The command, such as migrate or microvm run [default: the page of godwit itself]
    command: Vec<String>,

    /// Write the pages of all commands into this directory instead, as godwit-migrate.1 and so on
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    into: Option<PathBuf>,
}

pub(crate) fn completions(arguments: &CompletionsArguments, command: Command) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(arguments.shell, &mut visible(&command), "godwit", &mut text);
    print!("{}", String::from_utf8_lossy(&text));
    ExitCode::SUCCESS
}

pub(crate) fn man(arguments: &ManArguments, command: Command) -> ExitCode {
    let mut command = visible(&command);
    command.build();
    if let Some(dir) = &arguments.into {
        return match write_pages(&command, dir) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("godwit: cannot write the pages into {}: {error}", dir.display());
                ExitCode::from(FAILED)
            }
        };
    }
    let found =
        arguments.command.iter().try_fold(&command, |command, name| command.find_subcommand(name));
    let Some(found) = found else {
        let name = arguments.command.join(" ");
        eprintln!("godwit: there is no command '{name}': `godwit --help` lists them");
        return ExitCode::from(USAGE);
    };
    let mut text = Vec::new();
    if let Err(error) = clap_mangen::Man::new(found.clone()).render(&mut text) {
        eprintln!("godwit: the page cannot be made: {error}");
        return ExitCode::from(FAILED);
    }
    print!("{}", String::from_utf8_lossy(&text));
    ExitCode::SUCCESS
}

/// The page of `command`, and those of all commands below it.
fn write_pages(command: &Command, dir: &Path) -> io::Result<()> {
    let page = clap_mangen::Man::new(command.clone());
    let mut text = Vec::new();
    page.render(&mut text)?;
    std::fs::write(dir.join(page.get_filename()), text)?;
    // What `help` says is on these pages.
    let mut below = command.get_subcommands().filter(|command| command.get_name() != "help");
    below.try_for_each(|command| write_pages(command, dir))
}

/// `command` without its hidden options and commands, of which completions would tell.
fn visible(command: &Command) -> Command {
    let mut copy = Command::new(command.get_name().to_owned());
    copy = copy.args(command.get_arguments().filter(|argument| !argument.is_hide_set()));
    copy =
        copy.subcommands(command.get_subcommands().filter(|one| !one.is_hide_set()).map(visible));
    if let Some(version) = command.get_version() {
        copy = copy.version(version.to_owned());
    }
    if let Some(about) = command.get_about() {
        copy = copy.about(about.clone());
    }
    if let Some(about) = command.get_long_about() {
        copy = copy.long_about(about.clone());
    }
    if let Some(help) = command.get_after_help() {
        copy = copy.after_help(help.clone());
    }
    copy
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use godwit_engine::handle::all_settings;

    use super::*;
    use crate::Arguments;

    #[test]
    fn shells_know_the_settings_and_nothing_that_is_hidden() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(
                shell,
                &mut visible(&Arguments::command()),
                "godwit",
                &mut text,
            );
            let text = String::from_utf8(text).unwrap();
            for about in all_settings() {
                assert!(text.contains(about.name), "{shell}: {}", about.name);
            }
            assert!(text.contains("auto-converge"), "{shell}: the words of a setting");
            for hidden in ["-fault", "-l fault", "slow-channel", "in for a godwit that is killed"] {
                assert!(!text.contains(hidden), "{shell}: {hidden}");
            }
        }
    }

    #[test]
    fn the_manual_has_a_page_for_each_command() {
        let mut command = visible(&Arguments::command());
        command.build();
        let page = |command: &Command| {
            let mut text = Vec::new();
            clap_mangen::Man::new(command.clone()).render(&mut text).unwrap();
            String::from_utf8(text).unwrap()
        };
        assert!(page(&command).contains("SUBCOMMANDS"));
        let set = page(command.find_subcommand("set").unwrap());
        assert!(set.contains("godwit\\-set 1") || set.contains("godwit-set 1"), "{set}");
        for about in all_settings() {
            let escaped = about.name.replace('-', "\\-");
            assert!(set.contains(about.name) || set.contains(&escaped), "{}", about.name);
        }
        let migrate = page(command.find_subcommand("migrate").unwrap());
        assert!(!migrate.contains("fault\\fR") && migrate.contains("downtime"), "{migrate}");
    }

    #[test]
    fn the_pages_of_all_commands_are_written() {
        let dir = std::env::temp_dir().join(format!("godwit-man-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let mut command = visible(&Arguments::command());
        command.build();
        write_pages(&command, &dir).unwrap();
        let mut commands = vec!["godwit".to_owned()];
        let mut left: Vec<(String, &Command)> = vec![("godwit".to_owned(), &command)];
        while let Some((name, command)) = left.pop() {
            for one in command.get_subcommands().filter(|one| one.get_name() != "help") {
                let name = format!("{name}-{}", one.get_name());
                commands.push(name.clone());
                left.push((name, one));
            }
        }
        for name in &commands {
            let text = std::fs::read_to_string(dir.join(format!("{name}.1"))).unwrap();
            assert!(text.contains("SYNOPSIS"), "{name}");
        }
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), commands.len());
        assert!(commands.iter().any(|name| name == "godwit-microvm-run"), "{commands:?}");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
