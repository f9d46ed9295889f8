//! The guardian's own process: waits for godwit to end, and then undoes what the record names.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, getppid, pidfd_open, setsid};

use super::late::close_descriptors;
use super::record::{self, Record};
use super::{DONE, READY, Stage};
use crate::QemuError;
use crate::destination;
use crate::disks;
use crate::left;
use crate::libvirt::sweep_images;
use crate::limits::Limits;
use crate::machine::Machine;
use crate::mark::Mark;
use crate::monitor::{BriefMonitor, DomainName, LibvirtMonitor, Monitor, Qmp, QmpError};
use crate::process::Process;
use crate::source::{ANNOUNCED, announce};
use crate::way_back;

/// How long the guest is tried to be brought back: nobody else does. A disk that hangs may come
/// back.
const PATIENCE: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_millis(100);
/// An export that ends lets go of its bitmap a moment later.
const BUSY_LIMIT: Duration = Duration::from_secs(5);
/// For a QEMU to notice that it will get no more device state.
const ITSELF_LIMIT: Duration = Duration::from_secs(1);
/// Severities of syslog(3) with LOG_DAEMON.
const NOTICE: u8 = 3 << 3 | 5;
const ALERT: u8 = 3 << 3 | 1;

/// Stands guard for process `godwit`, which is the parent of this one: standard input is the line
/// to it, standard output the monitor, unless that is at `monitor` for whoever comes, or libvirt's,
/// of the domain with this UUID at this URI. Returns when it is not needed any more, and whether
/// all is as it should be.
pub fn stand_guard(
    path: &Path,
    godwit: i32,
    domain: Option<(String, String)>,
    monitor: Option<PathBuf>,
) -> bool {
    let reach = match (domain, monitor) {
        (Some((uri, uuid)), _) => Reach::Domain(DomainName { uri, uuid }),
        (None, Some(path)) => Reach::Path(path),
        (None, None) => Reach::Output,
    };
    // Ctrl-C and the end of the terminal are godwit's to answer.
    let _ = setsid();
    // The kernel looks for somebody to kill where godwit was killed for memory just now. Lowering
    // it takes a right.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    // The lock ends with what was opened first.
    let Some((line, monitor, _locked, process)) = prepare(path, godwit, reach) else {
        return false;
    };
    if !await_end(line, process) {
        return true;
    }
    sweep_images();
    // What was written down last. Godwit removes it at an ordinary end.
    let record = match Record::open(path) {
        Ok(Some(record)) if !record.left().is_nothing() => record,
        // Whatever was to be written down has not been done.
        Ok(_) => {
            let _ = std::fs::remove_file(path);
            return true;
        }
        Err(_) => return true,
    };
    let qemu = record.pid();
    let mut words = Words { godwit, qemu };
    let stood_in = stand_in(record, monitor, &mut words);
    if let Err(error) = &stood_in {
        words.say(ALERT, &format!("{error}"));
    }
    stood_in.is_ok()
}

/// The last of them is `None` where godwit has ended by now.
type Prepared = (UnixStream, Held, File, Option<OwnedFd>);

/// How the monitor is reached.
enum Reach {
    /// It is standard output.
    Output,
    Path(PathBuf),
    Domain(DomainName),
}

/// The monitor, which godwit still uses.
enum Held {
    Socket(UnixStream),
    Path(PathBuf),
    Libvirt(Box<LibvirtMonitor>),
}

/// Everything that can fail, while godwit still waits for the answer.
fn prepare(path: &Path, godwit: i32, reach: Reach) -> Option<Prepared> {
    let line = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().ok()?);
    let monitor = match reach {
        Reach::Path(path) => Held::Path(path),
        Reach::Output => {
            let stdout = std::io::stdout().as_fd().try_clone_to_owned().ok()?;
            Held::Socket(UnixStream::from(stdout))
        }
        Reach::Domain(name) => {
            Held::Libvirt(Box::new(LibvirtMonitor::find(&name, record::qemu_of(path)?).ok()?))
        }
    };
    let held = record::hold(path).ok()?;
    let godwit = Pid::from_raw(godwit)?;
    let process = match pidfd_open(godwit, PidfdFlags::empty()) {
        // The number is that of the parent as long as the parent lives.
        Ok(process) if getppid() == Some(godwit) => Some(process),
        Ok(_) | Err(Errno::SRCH) if has_ended(record::owner(path)?) => None,
        _ => return None,
    };
    // Whoever is gone does not hear it.
    let _ = (&line).write_all(&[READY]);
    Some((line, monitor, held, process))
}

/// Whether `godwit`, whose children have another parent by now, has come to its end.
fn has_ended(godwit: Mark) -> bool {
    let until = Instant::now() + ITSELF_LIMIT;
    while godwit.is_alive() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    !godwit.is_alive()
}

/// Waits until godwit says that it is done (`false`) or has ended (`true`). The end of the line
/// alone says nothing: a godwit that panics closes it and may still use the monitor.
fn await_end(line: UnixStream, process: Option<OwnedFd>) -> bool {
    let Some(process) = process else { return true };
    let mut line = Some(line);
    loop {
        let mut fds = vec![PollFd::new(&process, PollFlags::IN)];
        fds.extend(line.iter().map(|line| PollFd::new(line, PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return true,
        }
        let ended = !fds[0].revents().is_empty();
        let spoken = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
        drop(fds);
        let mut word = [0];
        match &line {
            Some(stream) if spoken => match (&*stream).read(&mut word) {
                Ok(1) if word[0] == DONE => return false,
                _ => line = None,
            },
            _ if ended => return true,
            _ => {}
        }
    }
}

/// What the operator reads.
struct Words {
    godwit: i32,
    qemu: i32,
}

impl Words {
    /// One line, to godwit's standard error and to the system's log: the terminal may have gone
    /// with godwit.
    fn say(&self, severity: u8, text: &str) {
        let Self { godwit, qemu } = self;
        let line = format!(
            "godwit: godwit (process {godwit}) did not end by itself; QEMU (process {qemu}): {text}"
        );
        let _ = writeln!(std::io::stderr(), "{line}");
        let log = UnixDatagram::unbound().and_then(|socket| {
            socket.set_nonblocking(true)?;
            socket.send_to(format!("<{severity}>{line}").as_bytes(), "/dev/log")
        });
        let _ = log;
    }
}

/// Undoes what the record names, which goes with its QEMU.
fn stand_in(mut record: Record, monitor: Held, words: &mut Words) -> Result<(), QemuError> {
    let (process, watched) = (Process::open(record.pid()), Process::open(record.pid()));
    let undone = match (process, &watched) {
        (Ok(process), Ok(watched)) if record.names_a_living_qemu() => {
            let undone = undo_all(&mut record, process, monitor, words);
            // One that was told to end does so while it is asked.
            let patience = if undone.is_ok() { Duration::ZERO } else { ITSELF_LIMIT };
            if !watched.ends_within(patience).unwrap_or(false) {
                return undone;
            }
            record.left().unlock()
        }
        // The guest has gone with its QEMU.
        _ => record.left().unlock(),
    };
    record.left().remove_staged();
    record.remove();
    undone
}

/// Undoes what the record names in a QEMU that lives: the guest first.
fn undo_all(
    record: &mut Record,
    process: Process,
    monitor: Held,
    words: &Words,
) -> Result<(), QemuError> {
    let qmp: Box<dyn Monitor> = match monitor {
        Held::Socket(stream) => Box::new(Qmp::take_over(stream)?),
        Held::Libvirt(monitor) => monitor,
        Held::Path(path) => {
            let monitor = BriefMonitor::open(&path)?;
            let pid = monitor.peer_pid()?.as_raw_nonzero().get();
            if pid != record.pid() {
                return Err(QmpError::Closed { during: "the takeover".to_owned() }.into());
            }
            Box::new(monitor)
        }
    };
    let mut machine = Machine { qmp, pid: record.pid(), process };
    let stage = record.left().settled();
    let alone = record.left().started;
    let mut otherwise = None;
    let ended = match stage {
        Stage::Stopping => {
            let was_running = record.left().was_running;
            let ended = bring_back(&mut machine, was_running, words)?;
            if !ended {
                let limit = Limits::default().resume;
                otherwise = way_back::stays_otherwise(&mut machine, was_running, limit);
            }
            left::forget(machine.pid);
            ended
        }
        Stage::Waiting if record.left().started => {
            // Nobody else knows of it.
            destination::end(&mut machine)?;
            true
        }
        Stage::Copying | Stage::Waiting | Stage::HandingOver => false,
        Stage::Loading | Stage::Discarding if ends_by_itself(&machine) => true,
        Stage::Loading | Stage::Discarding => {
            // Only then can it never run the guest, and lets go of its disks.
            destination::end(&mut machine)?;
            true
        }
        Stage::Starting => {
            way_back::run(&mut machine, Limits::default().resume)?;
            // The guest runs; that the network learns of it a little later is no reason to stop.
            let _ = announce(&mut *machine.qmp, ANNOUNCED);
            false
        }
    };
    let undone = if ended {
        let unlocked = record.left().unlock();
        record.left().remove_staged();
        record.remove();
        unlocked
    } else {
        let rest = match stage {
            Stage::Stopping => Stage::Copying,
            Stage::Starting => Stage::Waiting,
            other => other,
        };
        // A record that cannot be written any more only makes the next godwit look again.
        // One that runs its guest is anybody's from now on.
        let _ = record.note(|left| (left.stage, left.started) = (rest, false));
        undo(&mut machine, record)
    };
    let (severity, text) = match stage {
        Stage::Waiting if alone => {
            (NOTICE, "it was started for a guest that has not come, and was ended")
        }
        // Both sides were one godwit's, and it is settled.
        Stage::HandingOver if record.left().handover.is_some() => {
            (ALERT, "the guest was handed over to the new QEMU, which has it: `quit` this one")
        }
        stage => what_became(stage),
    };
    let text = otherwise.unwrap_or(text);
    match undone {
        Ok(()) => words.say(severity, text),
        Err(error) => {
            words.say(ALERT, &format!("{text}; what was changed is not all undone: {error}"))
        }
    }
    Ok(())
}

/// Whether a QEMU that libvirt starts ends because its device state does, of which godwit's end was
/// the end; then nothing is left for libvirt to be told. Libvirt 9.0 was seen to crash when it was
/// told to destroy a domain whose restore failed at that moment.
fn ends_by_itself(machine: &Machine) -> bool {
    machine.qmp.is_libvirts() && machine.process.ends_within(ITSELF_LIMIT).unwrap_or(false)
}

/// What the operator is told of a godwit that had come to `stage`.
fn what_became(stage: Stage) -> (u8, &'static str) {
    match stage {
        Stage::Copying => (NOTICE, "the guest runs here as it did before"),
        Stage::Stopping => (NOTICE, "the guest was stopped, and was brought back as it was before"),
        Stage::HandingOver => (
            ALERT,
            "IN DOUBT: the guest was being handed over and stays stopped here; godwit recover --vm \
             VM, on both sides, tells who has it and what to do",
        ),
        Stage::Waiting => (NOTICE, "it waits for another migration"),
        Stage::Loading | Stage::Discarding => (
            NOTICE,
            "it had begun to load the guest, never ran it, and was ended: start it anew for \
             another migration",
        ),
        Stage::Starting => {
            (NOTICE, "the guest was handed over to it and runs here: `quit` the source QEMU")
        }
    }
}

/// Runs the guest again; returns whether QEMU has ended, and the guest with it.
fn bring_back(machine: &mut Machine, was_running: bool, words: &Words) -> Result<bool, QemuError> {
    let until = Instant::now() + PATIENCE;
    let mut told = false;
    loop {
        match way_back::run_again(machine, (was_running, true), Limits::default(), |_| {}) {
            Ok(()) => return Ok(false),
            Err(QemuError::Qmp(QmpError::Closed { .. })) => return Ok(true),
            Err(error) if Instant::now() >= until => return Err(error),
            Err(error) => {
                if !std::mem::replace(&mut told, true) {
                    words.say(
                        ALERT,
                        &format!("the guest is not back yet: {error}; trying on for 10 minutes"),
                    );
                }
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Undoes what can be undone wherever the guest is. All of it is tried; the first error is
/// returned.
pub(super) fn undo(machine: &mut Machine, record: &mut Record) -> Result<(), QemuError> {
    let (mut limits, settings) = (record.left().limits.clone(), record.left().settings.clone());
    let limits_undone = limits.restore(&mut *machine.qmp).map_err(QemuError::from);
    if limits_undone.is_ok() {
        let _ = record.note(|left| left.limits = limits);
    }
    let settings_undone = settings.map_or(Ok(()), |settings| settings.restore(&mut *machine.qmp));
    if settings_undone.is_ok() {
        let _ = record.note(|left| left.settings = None);
    }
    let disks_undone = match record::owner(record.path()) {
        Some(mark) if record.left().disks => remove_disks(machine, mark),
        _ => Ok(()),
    };
    if disks_undone.is_ok() {
        let _ = record.note(|left| left.disks = false);
    }
    let definition = record.left().definition.clone();
    let kept = definition.map_or(Ok(()), |definition| definition.keep());
    if kept.is_ok() {
        let _ = record.note(|left| left.definition = None);
    }
    let unlocked = record.left().unlock();
    if unlocked.is_ok() {
        let _ = record.note(|left| left.lock = None);
    }
    let closed = close_descriptors(machine, record.left());
    if closed.is_ok() {
        let _ = record.note(|left| left.fd_set = false);
    }
    if record.left().is_nothing() {
        record.remove();
    }
    let settings_undone = settings_undone.map_err(QemuError::from);
    let settings = settings_undone.and(disks_undone);
    limits_undone.and(settings).and(kept).and(unlocked).and(closed)
}

/// Removes what `mark` has added for disks.
fn remove_disks(machine: &mut Machine, mark: Mark) -> Result<(), QemuError> {
    let until = Instant::now() + BUSY_LIMIT;
    loop {
        match disks::remove(machine, |theirs| theirs == mark) {
            Err(QemuError::Qmp(QmpError::Refused { .. })) if Instant::now() < until => {
                std::thread::sleep(PAUSE);
            }
            removed => return removed,
        }
    }
}
