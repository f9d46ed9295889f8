//! The guardian: what brings the guest back when godwit itself is gone.
//!
//! A godwit that is killed while the guest is stopped cannot run it again, and what it has set in
//! QEMU stays set. So a second process stands beside it, which does nothing as long as godwit
//! lives. It is the same program, started anew, and holds a handle of the monitor's connection
//! (QEMU takes one client at a time; where libvirt has it, a connection of its own to libvirt, made
//! in advance), a line to godwit and the record: no memory of the guest, no
//! userfaultfd, no tracee, no connection to the other side.
//!
//! ```text
//!   record      what has been changed in QEMU, written down before it is changed
//!   guardian    the other process
//!   late        both were killed: the next godwit here undoes what the record names
//!   recover     nobody knows who has the guest, or is left to run it: the operator settles it
//! ```
//!
//! Invariant: everything that godwit changes in QEMU is in the record, or bears its mark, before it
//! is changed; that COMMIT may go out is in the record before its first byte is sent. After that
//! the guardian never runs the guest.

mod guardian;
mod late;
mod record;
mod recover;

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub use guardian::stand_guard;
pub(crate) use late::{clear, cure};
pub(crate) use record::{Left, Stage};
pub(crate) use recover::stage_of;
pub use recover::{Known, Recovery, known_of};

use godwit_engine::Interrupt;
use godwit_libvirt::Domain;

use crate::machine::Machine;
use crate::monitor::{BriefMonitor, DomainName, Handle, LibvirtMonitor, Qmp, QmpError};
use crate::run_directory;
use crate::{QemuError, clients};
pub(crate) use record::in_work;
use record::{Record, at_work, stage_at_work};

/// The word of the command line that makes the program a guardian.
pub const COMMAND: &str = "guard";
/// What the guardian says when it is ready, and godwit when it is not needed any more.
const READY: u8 = b'R';
const DONE: u8 = b'D';
/// To load the program and to end, on a busy host.
const START_LIMIT: Duration = Duration::from_secs(30);
const END_LIMIT: Duration = Duration::from_secs(2);

/// A guardian is done within a second, unless QEMU hangs.
const GUARDIAN_LIMIT: Duration = Duration::from_secs(30);

/// Connects to the monitor at `path`. Waits for the guardian of a godwit that was killed, if it
/// has it.
pub(crate) fn connect(path: &Path) -> Result<Machine, QemuError> {
    let until = Instant::now() + GUARDIAN_LIMIT;
    let mut gone = None;
    let qmp = Qmp::connect_patiently(path, |pid| {
        gone = at_work(pid);
        gone.is_some() && Instant::now() < until
    });
    let qmp = qmp.map_err(|error| match (error, gone) {
        (QmpError::NoGreeting { .. }, Some(pid)) => QemuError::OtherGuardian { pid },
        (error @ QmpError::NoGreeting { .. }, None) => match clients::of_monitor(path) {
            Some(client) => QemuError::MonitorBusy { path: path.to_owned(), client },
            None => error.into(),
        },
        (error, _) => error.into(),
    })?;
    Machine::behind(Box::new(qmp))
}

/// Connects to the monitor of a QEMU that this process has started, whose answers may come until
/// then: nobody else knows of it.
pub(crate) fn connect_started(
    path: &Path,
    until: Instant,
    interrupt: &Interrupt,
) -> Result<Machine, QemuError> {
    Machine::behind(Box::new(Qmp::connect_until(path, until, interrupt)?))
}

/// The machine of a domain that runs, by the monitor that libvirt holds. Waits for the guardian of
/// a godwit that was killed, and refuses to be the second that is at work: libvirt would let both.
pub(crate) fn connect_domain(domain: &Domain) -> Result<Machine, QemuError> {
    alone(Machine::behind(Box::new(LibvirtMonitor::open(domain)?))?)
}

/// The machine behind a monitor that others want as well, in the same way.
pub(crate) fn connect_briefly(path: &Path) -> Result<Machine, QemuError> {
    alone(Machine::behind(Box::new(BriefMonitor::open(path)?))?)
}

/// Waits for the guardian of a godwit that was killed, if it is at work on the QEMU `pid`.
fn await_guardian(pid: i32) -> Result<(), QemuError> {
    await_guardian_unless(pid, || false)
}

/// The same until `enough` is known.
fn await_guardian_unless(pid: i32, enough: impl Fn() -> bool) -> Result<(), QemuError> {
    let until = Instant::now() + GUARDIAN_LIMIT;
    while let Some(godwit) = at_work(pid).filter(|_| !enough()) {
        if Instant::now() >= until {
            return Err(QemuError::OtherGuardian { pid: godwit });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// How far the godwits had come that are gone, of the QEMU `pid`, once their guardians have done
/// what changes that: one that is about to run the guest may wait for long.
pub(crate) fn settled_stage(pid: i32) -> Result<Option<Stage>, QemuError> {
    let starting = || stage_at_work(pid) == Some(Stage::Starting);
    await_guardian_unless(pid, starting)?;
    Ok(if starting() { Some(Stage::Starting) } else { stage_of(pid) })
}

/// The machine, once no other godwit is at work on it, whose guardian is waited for.
fn alone(machine: Machine) -> Result<Machine, QemuError> {
    await_guardian(machine.pid)?;
    match in_work(machine.pid) {
        Some(pid) => Err(QemuError::DomainBusy { pid }),
        None => Ok(machine),
    }
}

/// Godwit's side: the record, and the process that reads it if need be.
#[derive(Debug)]
pub(crate) struct Guard {
    program: PathBuf,
    record: Record,
    guardian: Guardian,
}

#[derive(Debug)]
struct Guardian {
    child: Child,
    line: UnixStream,
}

impl Guard {
    /// Starts a guardian by `program` for what is `left` so far.
    pub(crate) fn start(program: &Path, machine: &Machine, left: Left) -> Result<Self, QemuError> {
        let path = Record::place(machine.pid).map_err(unwritable)?;
        // The guardian makes the file, so that there is none but while somebody would remove it.
        let begun = Guardian::start(program, &path, machine)
            .map_err(|source| QemuError::Guardian { source })
            .and_then(|mut guardian| match Record::begin(&path, machine.pid, left) {
                Ok(record) => Ok((record, guardian)),
                Err(error) => {
                    guardian.end();
                    Err(unwritable(error))
                }
            });
        match begun {
            Ok((record, guardian)) => Ok(Self { program: program.to_owned(), record, guardian }),
            Err(error) => {
                let _ = std::fs::remove_file(path);
                Err(error)
            }
        }
    }

    /// Writes down what is about to be done, or was undone.
    pub(crate) fn note(&mut self, change: impl FnOnce(&mut Left)) -> Result<(), QemuError> {
        self.record.note(change).map_err(unwritable)
    }

    /// Makes sure that there is a guardian; somebody may have ended it.
    pub(crate) fn renew(&mut self, machine: &Machine) -> Result<(), QemuError> {
        if matches!(self.guardian.child.try_wait(), Ok(None)) {
            return Ok(());
        }
        // A guardian would make an empty one in its place.
        if self.record.is_gone() {
            return Err(unwritable(io::ErrorKind::NotFound.into()));
        }
        self.guardian = Guardian::start(&self.program, self.record.path(), machine)
            .map_err(|source| QemuError::Guardian { source })?;
        Ok(())
    }
}

fn unwritable(source: io::Error) -> QemuError {
    QemuError::Record { path: run_directory::path(), source }
}

/// A read that ends by its time limit says EAGAIN (socket(7), SO_RCVTIMEO), as fork(2) does where
/// there is no process to be had.
fn start_error(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    }
}

impl Guardian {
    fn start(program: &Path, record: &Path, machine: &Machine) -> io::Result<Self> {
        let (line, theirs) = UnixStream::pair()?;
        let mut command = Command::new(program);
        command.arg0("godwit").arg(COMMAND);
        command.arg(record).arg(std::process::id().to_string());
        match machine.qmp.handle()? {
            Handle::Socket(monitor) => command.stdout(Stdio::from(OwnedFd::from(monitor))),
            Handle::Path(path) => command.arg("--monitor").arg(path).stdout(Stdio::null()),
            Handle::Domain(DomainName { uri, uuid }) => {
                command.arg(uri).arg(uuid).stdout(Stdio::null())
            }
        };
        // Nothing but these three descriptors passes on: the others are closed when a program is
        // loaded (O_CLOEXEC).
        let stdin = Stdio::from(OwnedFd::from(theirs));
        let child = command.current_dir("/").stdin(stdin).spawn()?;
        let mut guardian = Self { child, line };
        let mut word = [0];
        let ready = guardian.line.set_read_timeout(Some(START_LIMIT));
        match ready.and_then(|()| guardian.line.read_exact(&mut word)) {
            Ok(()) if word[0] == READY => Ok(guardian),
            failed => {
                let _ = guardian.child.kill();
                let _ = guardian.child.wait();
                Err(failed.err().map_or_else(|| io::ErrorKind::InvalidData.into(), start_error))
            }
        }
    }

    fn end(&mut self) {
        let _ = self.line.write_all(&[DONE]);
        let until = Instant::now() + END_LIMIT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Guard {
    /// Ordinarily nothing is left by now, or the operator was told of it. A panic is what the
    /// guardian is for.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        // While the guardian lives: a kill between the two would leave what nobody removes.
        if self.record.left().is_nothing() {
            self.record.remove();
        }
        self.guardian.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guardian_that_is_slow_is_not_told_as_a_lack_of_processes() {
        let (mut line, _theirs) = UnixStream::pair().unwrap();
        line.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let slow = line.read_exact(&mut [0]).unwrap_err();
        let told = QemuError::Guardian { source: start_error(slow) }.to_string();
        assert!(told.contains("overloaded") && !told.contains("pids.max"), "{told}");
        let none = io::Error::from_raw_os_error(rustix::io::Errno::AGAIN.raw_os_error());
        let told = QemuError::Guardian { source: none }.to_string();
        assert!(told.contains("pids.max"), "{told}");
    }
}
