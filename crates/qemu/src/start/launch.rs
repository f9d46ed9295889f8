//! The process of a destination: which program it is, how it comes to stand on its own, and what is
//! left of those that came to nothing.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use godwit_engine::Interrupt;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, setsid};

use super::refused;
use crate::clients::is_listened_on;
use crate::mark::{Mark, leftovers};
use crate::monitor::commands::{QueryStatus, Quit};
use crate::monitor::{GREETING_LIMIT, Monitor, Qmp, STEP};
use crate::{QemuError, rank, run_directory};

/// The word of the command line that makes the program one that starts a QEMU.
pub const COMMAND: &str = "launch";
/// What it hears when the QEMU has a guardian.
const GUARDED: u8 = b'G';
/// For QEMU to open its monitor, which it does early, and may have to reserve memory before; and to
/// answer there.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Where root's destinations write what they have to say: it may be much, and the run directory is
/// in memory. Others have no such place.
const LOGS: &str = "/var/log/godwit";
/// What those that are gone have written is kept for so long.
const LOG_AGE: Duration = Duration::from_secs(7 * 24 * 3600);
/// How much of what QEMU complained of is told.
const WORDS: usize = 600;

/// Starts the program `words[0]` with the arguments that follow, in a session of its own, so that
/// neither a terminal nor the end of godwit is anything to it, once there is a guardian: standard
/// input is godwit's line, by which it says so. If that ends before, godwit has, and so does the
/// program. Returns its exit code, or 0 if it runs on.
///
/// # Errors
/// When there is no such program.
pub fn launch(words: &[String]) -> io::Result<u8> {
    // It fails only for who leads one already.
    let _ = setsid();
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    let mut child = command.args(arguments).stdin(Stdio::null()).spawn()?;
    // What it waits for runs elsewhere, and comes to no harm by its end.
    rank::put_first(child.id().cast_signed());
    let stands = is_guarded(&child).unwrap_or(false);
    if !stands {
        let _ = child.kill();
        let status = child.wait()?;
        return Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1));
    }
    Ok(0)
}

/// Waits until godwit has said that there is a guardian, or `false`: it ends, or the program does.
fn is_guarded(child: &Child) -> io::Result<bool> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let line = io::stdin();
    loop {
        let mut fds = [PollFd::new(&process, PollFlags::IN), PollFd::new(&line, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            polled => polled?,
        };
        if !fds[0].revents().is_empty() {
            return Ok(false);
        }
        if !fds[1].revents().is_empty() {
            let mut word = [0];
            return Ok(line.lock().read(&mut word)? == 1 && word[0] == GUARDED);
        }
    }
}

/// The program of this host that is called as the source's is, or what the operator named by an
/// option: a path, or a name that is on PATH.
pub(super) fn emulator(source: &str, named: Option<(&str, &Path)>) -> Result<PathBuf, QemuError> {
    let is_program = |path: &Path| {
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = |name: &Path| {
        let directories = std::env::split_paths(&path).filter(|directory| directory.is_absolute());
        directories.map(|directory| directory.join(name)).find(|path| is_program(path))
    };
    if let Some((option, path)) = named {
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let is_name = !path.as_os_str().as_encoded_bytes().contains(&b'/');
        let found = Some(whole).filter(|whole| is_program(whole));
        return found.or_else(|| on_path(path).filter(|_| is_name)).ok_or_else(|| {
            refused(format!("{option} {}: there is no such program", path.display()))
        });
    }
    let name = source.rsplit('/').next().unwrap_or_default();
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let arch = name.strip_prefix("qemu-system-");
    let known = arch.is_some_and(|arch| !arch.is_empty() && arch.chars().all(fits));
    if !known && !matches!(name, "qemu-kvm" | "kvm") {
        let name: String = name.chars().filter(|c| !c.is_control()).take(60).collect();
        return Err(refused(format!(
            "the source's program is called '{name}', which is no QEMU's name: say which to start, \
             with --emulator PATH"
        )));
    }
    on_path(Path::new(name)).ok_or_else(|| {
        refused(format!(
            "there is no {name} on this host's PATH: install it, or name one with --emulator PATH"
        ))
    })
}

/// Where a destination's monitor and log are.
#[derive(Clone, Debug)]
pub(super) struct Files {
    pub(super) monitor: PathBuf,
    pub(super) log: PathBuf,
}

impl Files {
    /// Those of this process's destination.
    pub(super) fn make() -> Result<Self, QemuError> {
        let directory = run_directory::path();
        let user = rustix::process::getuid().as_raw();
        run_directory::make(&directory, user).map_err(refused)?;
        sweep(&directory);
        let logs = match rustix::process::getuid().is_root() {
            true => PathBuf::from(LOGS),
            false => directory.clone(),
        };
        run_directory::make(&logs, user).map_err(refused)?;
        sweep_logs(&logs, &directory);
        let name = Mark::own();
        let (monitor, log) = (format!("{name}.qmp"), format!("{name}.log"));
        Ok(Self { monitor: directory.join(monitor), log: logs.join(log) })
    }

    /// Removes what a destination has left that came to nothing, but for what it has said.
    pub(super) fn remove(&self) {
        let _ = std::fs::remove_file(&self.monitor);
        if std::fs::metadata(&self.log).is_ok_and(|log| log.len() == 0) {
            let _ = std::fs::remove_file(&self.log);
        }
    }
}

/// Removes old logs of destinations that have ended: their monitors are not in `monitors` any more.
fn sweep_logs(logs: &Path, monitors: &Path) {
    for (log, stem) in leftovers(logs, ".log") {
        let ended = !monitors.join(format!("{stem}.qmp")).exists();
        let age = log.symlink_metadata().and_then(|log| log.modified()).ok();
        let age = age.and_then(|modified| modified.elapsed().ok());
        if ended && age.is_some_and(|age| age > LOG_AGE) {
            let _ = std::fs::remove_file(log);
        }
    }
}

/// Ends destinations whose godwit was killed together with its guardian, while they still waited,
/// and removes the sockets of those that have ended.
fn sweep(directory: &Path) {
    for (monitor, _) in leftovers(directory, ".qmp") {
        match Qmp::connect(&monitor) {
            Ok(mut qmp) => {
                let qmp: &mut dyn Monitor = &mut qmp;
                if qmp.run(&QueryStatus).is_ok_and(|it| it.status == "inmigrate") {
                    let _ = qmp.run(&Quit);
                }
            }
            Err(crate::monitor::QmpError::Connect { source, .. })
                if source.kind() == io::ErrorKind::ConnectionRefused =>
            {
                let _ = std::fs::remove_file(monitor);
            }
            Err(_) => {}
        }
    }
}

/// A QEMU that was started and has no guardian yet: it ends with this, or with this process.
#[derive(Debug)]
pub(super) struct Launched {
    launcher: Child,
    /// When it is to be up.
    until: Instant,
}

impl Launched {
    /// Until when its first answers may come: what is left of the time for its start, and no less
    /// than a QEMU has that runs.
    pub(super) fn answers_until(&self) -> Instant {
        self.until.max(Instant::now() + GREETING_LIMIT)
    }

    /// It has a guardian: from here on nothing is known of it here.
    ///
    /// # Errors
    /// When it has ended.
    pub(super) fn let_go(mut self) -> Result<(), QemuError> {
        let told = match &mut self.launcher.stdin {
            Some(line) => line.write_all(&[GUARDED]),
            None => Ok(()),
        };
        let failed = |source| QemuError::System { step: "letting QEMU go", source };
        told.map_err(failed)?;
        self.launcher.wait().map_err(failed)?;
        Ok(())
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        drop(self.launcher.stdin.take());
        let _ = self.launcher.wait();
    }
}

/// Starts `emulator` with `words`, by way of `godwit`, and waits for its monitor.
///
/// # Errors
/// Why it does not come up, in its own words. It has ended then.
pub(super) fn start(
    godwit: &Path,
    emulator: &Path,
    words: &[String],
    files: &Files,
    interrupt: &Interrupt,
) -> Result<Launched, QemuError> {
    let failed = |step| move |source| QemuError::System { step, source };
    let mut options = File::options();
    let log = options.append(true).create(true).mode(0o600).open(&files.log);
    let log = log.map_err(failed("making QEMU's log"))?;
    let errors = log.try_clone().map_err(failed("dup"))?;
    let _ = std::fs::remove_file(&files.monitor);
    let mut command = Command::new(godwit);
    command.arg0("godwit").arg(COMMAND).arg("--").arg(emulator).args(words);
    // Where nothing lies that a name without a directory could be.
    let directory = files.monitor.parent().unwrap_or(Path::new("/"));
    command.current_dir(directory).stdin(Stdio::piped()).stdout(log).stderr(errors);
    let launcher = command.spawn().map_err(failed("starting QEMU"))?;
    let until = Instant::now() + START_LIMIT;
    let mut launched = Launched { launcher, until };
    let why = loop {
        if is_listened_on(&files.monitor) {
            return Ok(launched);
        }
        match launched.launcher.try_wait() {
            Ok(None) => {}
            _ => break "it has ended",
        }
        if interrupt.is_raised() {
            break "it was not waited for any longer";
        }
        if Instant::now() >= until {
            break "it did not open its monitor within 30 s";
        }
        std::thread::sleep(STEP / 10);
    };
    drop(launched);
    Err(refused(format!(
        "the destination QEMU did not start ({why}): {}; its log is {}",
        last_words(&files.log),
        files.log.display()
    )))
}

/// The end of what QEMU has complained of, in a line.
pub(super) fn last_words(log: &Path) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(WORDS)..]).into_owned();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines.collect::<Vec<_>>().join("; ");
    let clean: String = line.chars().filter(|c| !c.is_control()).collect();
    if clean.is_empty() { "it says nothing".to_owned() } else { clean }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_kept_for_a_week_and_as_long_as_there_is_a_monitor() {
        let directory = std::env::temp_dir().join(format!("godwit-logs-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        // No process was ever started so late.
        let name = |number: u32| format!("godwit-{number}-{}", u64::MAX);
        let old = std::time::SystemTime::now() - 2 * LOG_AGE;
        for (number, is_old) in [(1, true), (2, true), (3, false)] {
            let file = File::create(directory.join(format!("{}.log", name(number)))).unwrap();
            if is_old {
                file.set_modified(old).unwrap();
            }
        }
        File::create(directory.join("other.log")).unwrap().set_modified(old).unwrap();
        File::create(directory.join(format!("{}.qmp", name(2)))).unwrap();
        sweep_logs(&directory, &directory);
        let there = |number| directory.join(format!("{}.log", name(number))).exists();
        assert_eq!([there(1), there(2), there(3)], [false, true, true]);
        assert!(directory.join("other.log").exists());
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn the_program_is_this_hosts_own() {
        let told = |name: &str| emulator(name, None).unwrap_err().to_string();
        for name in ["/tmp/sh", "sh", "qemu-system-", "qemu-system-../sh", "qemu-img", ""] {
            assert!(told(name).contains("--emulator PATH"), "{name}");
        }
        assert!(told("/x/qemu-system-nothing").contains("there is no qemu-system-nothing on"));
        let named = |name| emulator("qemu", Some(("--emulator", Path::new(name))));
        assert_eq!(named("/bin/sh").unwrap(), Path::new("/bin/sh"));
        assert!(named("sh").unwrap().ends_with("sh"));
        for name in ["/nowhere", "no-such-program", "./sh"] {
            let missing = named(name).unwrap_err().to_string();
            assert!(missing.contains(&format!("--emulator {name}")), "{missing}");
        }
    }
}
