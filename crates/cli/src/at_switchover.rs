//! `--hook-before`, `--hook-at` and `--hook-after`: commands of the operator's that are run around
//! the switchover, for a network or a load balancer that has to follow the guest.
//!
//! Each waits in a shell of its own from before this process gives up rights, so it has those that
//! the operator has, and costs the guest no more than a line in a pipe.
//!
//! Invariant: a shell whose command is never wanted ends with this process, however that ends; a
//! command has had its time when godwit ends; what it prints is never taken for godwit's JSON; and
//! only `--hook-before` has a say in what becomes of the migration.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Args;
use godwit_engine::report::{Progress, Stage};
use godwit_engine::source::BeforeSwitchover;
use godwit_qemu::Identity;
use godwit_units::format_duration;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::say;

/// How long a command may take.
const LIMIT: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(10);
/// Waits for three lines: the guest's name, its addresses, and how the migration has ended, or
/// nothing.
const WAIT: &str = "IFS= read -r name && IFS= read -r macs && IFS= read -r outcome || exit 0
export GODWIT_NAME=\"$name\" GODWIT_MACS=\"$macs\"
[ -z \"$outcome\" ] || export GODWIT_OUTCOME=\"$outcome\"
exec sh -c \"$1\" </dev/null";

/// What is run around the switchover.
#[derive(Debug, Args)]
pub(crate) struct HookArguments {
    /// Before the guest is stopped, run this command by sh, with GODWIT_VM, GODWIT_TO, GODWIT_NAME,
    /// GODWIT_MACS and GODWIT_HOOK (before) in its environment, while the guest runs. It has a
    /// minute; where it fails the guest stays
    #[arg(long = "hook-before", value_name = "COMMAND")]
    before: Option<String>,

    /// As soon as the guest is stopped, run this command (GODWIT_HOOK: at). Nothing waits for it
    /// but the end of godwit, and it changes no outcome
    #[arg(long = "hook-at", value_name = "COMMAND")]
    at: Option<String>,

    /// When a migration that has begun is over, run this command (GODWIT_HOOK: after), with
    /// GODWIT_OUTCOME (migrated, failed, cancelled or in-doubt). It changes no outcome
    #[arg(long = "hook-after", value_name = "COMMAND")]
    after: Option<String>,
}

/// Who the guest is, once the VM was asked. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guest(Arc<OnceLock<Identity>>);

impl Guest {
    /// From now on commands are told.
    pub(crate) fn is(&self, identity: Identity) {
        let _ = self.0.set(identity);
    }

    /// Two lines; of what is not known they are empty.
    fn lines(&self) -> String {
        let Identity { name, macs } = self.0.get().cloned().unwrap_or_default();
        format!("{}\n{}\n", say::line(name), macs.join(","))
    }
}

/// The commands, each in a shell that waits.
#[derive(Debug)]
pub(crate) struct Hooks {
    guest: Guest,
    before: Option<Arc<Hook>>,
    at: Option<Arc<Hook>>,
    /// It has been told to begin.
    at_runs: Option<JoinHandle<()>>,
    after: Option<Hook>,
    over: Arc<AtomicBool>,
}

impl Hooks {
    /// Has the shells wait, for the migration of `vm` to `to`; before rights are given up.
    ///
    /// # Errors
    /// When one cannot be started.
    pub(crate) fn new(arguments: &HookArguments, vm: &str, to: &str) -> io::Result<Self> {
        let guest = Guest::default();
        let hook = |name: &'static str, command: &Option<String>| {
            let hook = |command: &String| Hook::new(name, command, (vm, to), &guest);
            command.as_ref().map(hook).transpose()
        };
        Ok(Self {
            before: hook("before", &arguments.before)?.map(Arc::new),
            at: hook("at", &arguments.at)?.map(Arc::new),
            at_runs: None,
            after: hook("after", &arguments.after)?,
            over: Arc::default(),
            guest,
        })
    }

    /// Who is to be told who the guest is, if anybody wants to know: asking takes time.
    pub(crate) fn guest(&self) -> Option<Guest> {
        let any = self.before.is_some() || self.at.is_some() || self.after.is_some();
        any.then(|| self.guest.clone())
    }

    /// What the engine does before it stops the guest.
    pub(crate) fn before(&self) -> Option<BeforeSwitchover> {
        let (hook, over) = (Arc::clone(self.before.as_ref()?), Arc::clone(&self.over));
        Some(BeforeSwitchover::new(move || hook.run("", || over.load(Ordering::SeqCst))))
    }

    /// Looks whether the guest is stopped by now.
    pub(crate) fn look(&mut self, progress: &Progress) {
        if progress.stage == Stage::PreCopy {
            return;
        }
        let Some(hook) = self.at.take() else { return };
        // The shell has its line before the thread is there.
        hook.begin("");
        let run = move || {
            if let Err(why) = hook.wait(|| false) {
                eprintln!("godwit: {why}");
            }
        };
        self.at_runs = std::thread::Builder::new().name("hook".to_owned()).spawn(run).ok();
    }

    /// The migration is over: ends what is under way of `--hook-before`, and gives the one at the
    /// switchover its time. Then, where the migration has begun and so has an `outcome`, runs the
    /// last one.
    pub(crate) fn end(mut self, outcome: Option<&str>) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(at) = self.at_runs.take() {
            let _ = at.join();
        }
        if let (Some(after), Some(outcome)) = (self.after.take(), outcome)
            && let Err(why) = after.run(outcome, || false)
        {
            eprintln!("godwit: the migration is over ({outcome}); {why}");
        }
    }
}

impl Drop for Hooks {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // Whoever is at it notices, and ends it.
        let until = Instant::now() + Duration::from_secs(1);
        while self.before.as_ref().is_some_and(|before| before.is_under_way())
            && Instant::now() < until
        {
            std::thread::sleep(LOOK);
        }
    }
}

/// One command.
#[derive(Debug)]
struct Hook {
    name: &'static str,
    command: String,
    guest: Guest,
    shell: Mutex<Shell>,
}

/// Its shell.
#[derive(Debug)]
struct Shell {
    child: Child,
    begun: bool,
    /// How it ended.
    ended: Option<ExitStatus>,
}

impl Hook {
    fn new(
        name: &'static str,
        command: &str,
        (vm, to): (&str, &str),
        guest: &Guest,
    ) -> io::Result<Self> {
        let child = Command::new("sh")
            .args(["-c", WAIT, "godwit-hook", command])
            .env("GODWIT_VM", vm)
            .env("GODWIT_TO", to)
            .env("GODWIT_HOOK", name)
            .env_remove("GODWIT_OUTCOME")
            .stdin(Stdio::piped())
            // Standard output is for the result.
            .stdout(io::stderr().as_fd().try_clone_to_owned()?)
            // What it starts ends with it, and Ctrl-C is for the migration.
            .process_group(0)
            .spawn()
            .map_err(|error| io::Error::other(format!("--hook-{name}: no shell: {error}")))?;
        let shell = Mutex::new(Shell { child, begun: false, ended: None });
        Ok(Self { name, command: command.to_owned(), guest: guest.clone(), shell })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Shell> {
        self.shell.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the shell to run the command; again it is not told.
    fn begin(&self, outcome: &str) {
        let mut shell = self.lock();
        shell.begun = true;
        if let Some(mut stdin) = shell.child.stdin.take() {
            // A shell that is gone is found to have ended.
            let _ = writeln!(stdin, "{}{outcome}", self.guest.lines());
        }
    }

    /// Begins, and waits for its end, unless it `stops` before. Where connections were lost while
    /// it ran it is not run once more: it was done.
    fn run(&self, outcome: &str, stops: impl Fn() -> bool) -> Result<(), String> {
        self.begin(outcome);
        self.wait(stops)
    }

    fn is_under_way(&self) -> bool {
        let shell = self.lock();
        shell.begun && shell.ended.is_none()
    }

    fn wait(&self, stops: impl Fn() -> bool) -> Result<(), String> {
        let until = Instant::now() + LIMIT;
        let told = loop {
            let mut shell = self.lock();
            if shell.ended.is_none() {
                shell.ended = shell.child.try_wait().unwrap_or_default();
            }
            match shell.ended {
                Some(status) if status.success() => return Ok(()),
                Some(status) => break format!("ended with {status}"),
                None if stops() => {
                    shell.end();
                    return Err("the migration is over".to_owned());
                }
                None if Instant::now() >= until => {
                    shell.end();
                    break format!("took longer than {} and was ended", format_duration(LIMIT));
                }
                None => {}
            }
            drop(shell);
            std::thread::sleep(LOOK);
        };
        Err(format!("--hook-{} '{}' {told}", self.name, say::line(&self.command)))
    }
}

impl Shell {
    /// Ends it, and all that it has started in its group.
    fn end(&mut self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        self.ended = self.child.wait().ok();
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // One that was never told to begin ends when its line does not come.
        drop(self.child.stdin.take());
        if self.ended.is_none() {
            if self.begun {
                self.end();
            } else {
                let _ = self.child.wait();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn hook(name: &'static str, command: &str) -> Hook {
        Hook::new(name, command, ("libvirt:a b", "east:7000"), &Guest::default()).unwrap()
    }

    fn file(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("godwit-hook-{name}-{}", std::process::id()))
    }

    #[test]
    fn it_is_told_which_migration_it_was_and_how_that_ended() {
        let script = "test \"$GODWIT_HOOK $GODWIT_VM $GODWIT_TO $GODWIT_OUTCOME\" = \
                      'after libvirt:a b east:7000 migrated' || exit 3";
        hook("after", script).run("migrated", || false).unwrap();
        let script = "test -z \"${GODWIT_OUTCOME+set}\" || exit 3";
        hook("before", script).run("", || false).unwrap();
        let why = hook("before", "exit 7").run("", || false).unwrap_err();
        assert_eq!(why, "--hook-before 'exit 7' ended with exit status: 7");
    }

    #[test]
    fn it_is_told_who_the_guest_is_once_the_vm_was_asked() {
        // Mutations: the addresses are left out; a name is run, or ends the line.
        let guest = Guest::default();
        let told = |expected: &str| {
            let script = format!("test \"$GODWIT_NAME|$GODWIT_MACS\" = '{expected}' || exit 3");
            Hook::new("before", &script, ("qemu:/a", "east:7000"), &guest).unwrap()
        };
        let (empty, known) =
            (told("|"), told("a $(exit 9)\\u000ab|52:54:00:00:00:01,52:54:00:00:00:02"));
        empty.run("", || false).unwrap();
        let macs = ["52:54:00:00:00:01", "52:54:00:00:00:02"].map(str::to_owned).to_vec();
        guest.is(Identity { name: "a $(exit 9)\nb".to_owned(), macs });
        known.run("", || false).unwrap();
    }

    #[test]
    fn one_that_is_never_wanted_does_nothing_and_is_gone() {
        // Mutation: the shell runs its command when its input ends.
        let file = file("unwanted");
        let pid = {
            let unwanted = hook("at", &format!("touch {}", file.display()));
            let shell = unwanted.lock();
            shell.child.id()
        };
        assert!(!file.exists());
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn one_that_is_stopped_is_ended_with_all_that_it_has_started_and_is_run_once() {
        let file = file("stopped");
        let script = format!("sleep 77 & echo $! >> {}; wait", file.display());
        let long = hook("before", &script);
        let began = Instant::now();
        let wrote = || std::fs::read_to_string(&file).is_ok_and(|text| text.ends_with('\n'));
        let why = long.run("", || wrote() || began.elapsed() > LIMIT).unwrap_err();
        assert_eq!(why, "the migration is over");
        assert!(long.run("", || false).is_err(), "it has ended");
        let pids = std::fs::read_to_string(&file).unwrap();
        assert_eq!(pids.lines().count(), 1);
        let line = format!("/proc/{}/cmdline", pids.trim());
        let until = Instant::now() + Duration::from_secs(10);
        // A process that has ended and was not buried yet has no command line.
        while std::fs::read(&line).is_ok_and(|line| !line.is_empty()) {
            assert!(Instant::now() < until, "sleep goes on");
            std::thread::sleep(LOOK);
        }
        std::fs::remove_file(file).unwrap();
    }
}
