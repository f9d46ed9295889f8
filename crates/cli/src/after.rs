//! `--hook-after`: a command of the operator's that is run when a migration is over.
//!
//! Invariant: whatever becomes of it, the outcome and the exit code of the migration stay what they
//! were; it has had its time when godwit ends, and what it prints is never taken for godwit's JSON.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use godwit_units::format_duration;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::say;

/// How long a command may take.
const LIMIT: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(10);

/// What is run behind a migration.
#[derive(Debug, Args)]
pub(crate) struct AfterArguments {
    /// When a migration that has begun is over, run this command by sh, with GODWIT_VM, GODWIT_TO
    /// and GODWIT_OUTCOME (migrated, failed, cancelled or in-doubt) in its environment. It has a
    /// minute, and changes no outcome: that it failed is told
    #[arg(long = "hook-after", value_name = "COMMAND")]
    command: Option<String>,
}

impl AfterArguments {
    /// Runs it, if there is one, for the migration of `vm` to `to`, which has ended so.
    pub(crate) fn run(&self, vm: &str, to: &str, outcome: &str) {
        let Some(command) = &self.command else { return };
        let told = match run(command, &[vm, to, outcome], LIMIT) {
            Ok(Some(status)) if status.success() => return,
            Ok(Some(status)) => format!("ended with {status}"),
            Ok(None) => format!("took longer than {} and was ended", format_duration(LIMIT)),
            Err(error) => format!("could not be run: {error}"),
        };
        let shown = say::line(command);
        eprintln!("godwit: the migration is over ({outcome}); --hook-after '{shown}' {told}");
    }
}

/// Runs `command`, and tells how it ended, if it did within `limit`.
fn run(
    command: &str,
    [vm, to, outcome]: &[&str; 3],
    limit: Duration,
) -> io::Result<Option<ExitStatus>> {
    let mut child = Command::new("sh")
        .args(["-c", command])
        .env("GODWIT_VM", vm)
        .env("GODWIT_TO", to)
        .env("GODWIT_OUTCOME", outcome)
        .stdin(Stdio::null())
        // Standard output is for the result.
        .stdout(io::stderr().as_fd().try_clone_to_owned()?)
        // What it starts ends with it, and Ctrl-C is for the migration.
        .process_group(0)
        .spawn()?;
    let until = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= until {
            end(&mut child);
            return Ok(None);
        }
        std::thread::sleep(LOOK);
    }
}

/// Ends it, and all that it has started in its group.
fn end(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: [&str; 3] = ["libvirt:a b", "east:7000", "migrated"];

    #[test]
    fn it_is_told_which_migration_it_was_and_how_that_ended() {
        let script = "test \"$GODWIT_VM $GODWIT_TO $GODWIT_OUTCOME\" = \
                      'libvirt:a b east:7000 migrated' || exit 3";
        let status = run(script, &WORDS, LIMIT).unwrap().unwrap();
        assert_eq!(status.code(), Some(0));
        let status = run("exit 7", &WORDS, LIMIT).unwrap().unwrap();
        assert_eq!(status.code(), Some(7));
    }

    #[test]
    fn one_that_takes_too_long_is_ended_with_all_that_it_has_started() {
        let file = std::env::temp_dir().join(format!("godwit-after-{}", std::process::id()));
        let script = format!("sleep 77 & echo $! > {}; wait", file.display());
        let ended = run(&script, &WORDS, Duration::from_millis(500)).unwrap();
        assert_eq!(ended, None);
        let pid = std::fs::read_to_string(&file).unwrap();
        let line = format!("/proc/{}/cmdline", pid.trim());
        let until = Instant::now() + Duration::from_secs(10);
        // A process that has ended and was not buried yet has no command line.
        while std::fs::read(&line).is_ok_and(|line| !line.is_empty()) {
            assert!(Instant::now() < until, "sleep goes on");
            std::thread::sleep(LOOK);
        }
        std::fs::remove_file(file).unwrap();
    }
}
