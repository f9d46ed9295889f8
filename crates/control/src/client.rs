//! The command's end of the control socket.
//!
//! [`migrate`] and [`receive`] look like the engine's own functions; the engine is in the VMM. What
//! Ctrl-C is to the engine here, the end of the sending side is there.
//!
//! Invariant: a guest is called in doubt only where it may have been handed over. Whoever does not
//! answer as a machine was asked for nothing, and a machine whose process ended before it told of
//! the handover took its guest along.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use godwit_engine::destination::{Fetched, Notice, Received};
use godwit_engine::handle::MigrationHandle;
use godwit_engine::measure::Measured;
use godwit_engine::report::{Measures, Progress, Stage};
use godwit_engine::security::SecurityWish;
use godwit_engine::source::Options;
use godwit_engine::{Cancel, EngineError, Failure, Phase, Survivor, limits};
use godwit_units::{ByteCount, format_duration};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, pidfd_open};

use crate::ControlError;
use crate::messages::{
    Answer, Cost, DiskWish, MigrateRequest, MigrationLook, Plugged, ReceiveRequest, Request, Status,
};

/// An answer to a request that does nothing big.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// An answer to a request for tens of thousands of memory slots, of which KVM takes one after the
/// other while vCPUs run.
const PLUG_LIMIT: Duration = Duration::from_secs(120);
/// An answer of a machine that is asked before anything else whether it is one.
const THERE_LIMIT: Duration = Duration::from_secs(5);
/// The measures of a long migration, with all its rounds, are the longest line.
const LONGEST_ANSWER: u64 = 64 << 20;
/// Between the end of a socket and that of its process.
const END_LIMIT: i64 = 5;
/// A look at a migration that is older may not be the last one that there was.
const FRESH: Duration = Duration::from_secs(2);

/// Why a request came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// It was refused, or the VMM could not be asked: nothing has changed.
    #[error(transparent)]
    Refused(ControlError),
    /// The migration failed.
    #[error("{0}")]
    Failed(Failure),
}

/// A connection to the VMM.
#[derive(Debug)]
struct Connection {
    path: PathBuf,
    stream: UnixStream,
    reader: BufReader<UnixStream>,
    text: Vec<u8>,
    cancelled: bool,
    /// The process behind the socket.
    process: Option<OwnedFd>,
    /// Whoever is there is no machine.
    stranger: bool,
}

impl Connection {
    fn open(path: &Path, request: &Request) -> Result<Self, ControlError> {
        let problem = |problem: String| ControlError::new(path, problem);
        let open = || {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(limits::TICK))?;
            let peer = rustix::net::sockopt::socket_peercred(&stream)?;
            let process = pidfd_open(peer.pid, PidfdFlags::empty()).ok();
            let mut text = serde_json::to_string(request)?;
            text.push('\n');
            (&stream).write_all(text.as_bytes())?;
            Ok(Self {
                path: path.to_owned(),
                reader: BufReader::new(stream.try_clone()?),
                stream,
                text: Vec::new(),
                cancelled: false,
                process,
                stranger: false,
            })
        };
        open().map_err(|error: std::io::Error| {
            let cure = match error.kind() {
                ErrorKind::PermissionDenied => {
                    "run godwit as root or as the user that runs the machine"
                }
                _ => "does the machine or the migration still run?",
            };
            problem(format!("cannot be reached: {error}; {cure}"))
        })
    }

    /// Whether the process behind the socket has ended, or does so now.
    fn has_ended(&self) -> bool {
        let Some(process) = &self.process else { return false };
        // A pidfd becomes readable when its process has ended (pidfd_open(2)).
        let limit = Timespec { tv_sec: END_LIMIT, tv_nsec: 0 };
        poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)).is_ok_and(|ready| ready > 0)
    }

    fn problem(&self, problem: &str) -> ControlError {
        ControlError::new(&self.path, problem)
    }

    /// The next answer. Tells the VMM when `cancel` is wished.
    fn next(&mut self, cancel: &Cancel, limit: Option<Duration>) -> Result<Answer, ControlError> {
        let began = Instant::now();
        loop {
            // A line has a limit, since whoever listens there may be anyone.
            let rest = LONGEST_ANSWER.saturating_sub(self.text.len() as u64);
            match (&mut self.reader).take(rest).read_until(b'\n', &mut self.text) {
                Ok(_) if rest == 0 => return Err(self.problem("answers more than makes sense")),
                Ok(_) if self.text.ends_with(b"\n") => {
                    let line = std::mem::take(&mut self.text);
                    let unread = match serde_json::from_slice(&line) {
                        Ok(answer) => return Ok(answer),
                        Err(error) => format!("answers what is not understood: {error}"),
                    };
                    let what = stranger(&line);
                    self.stranger = what.is_some();
                    return Err(self.problem(what.unwrap_or(&unread)));
                }
                Ok(_) => {
                    return Err(self.problem("was closed before it answered; did the machine end?"));
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(self.problem(&error.to_string())),
            }
            if cancel.is_cancelled() && !std::mem::replace(&mut self.cancelled, true) {
                // One that is killed only stops sending.
                let _ = self.stream.write_all(b"cancel\n");
                let _ = self.stream.shutdown(Shutdown::Write);
            }
            if let Some(limit) = limit.filter(|limit| began.elapsed() > *limit) {
                let limit = format_duration(limit);
                return Err(self.problem(&format!(
                    "takes connections and does not answer within {limit}: is it a microvm's \
                     --control (a QMP monitor is --vm qemu:PATH), and does its process run?"
                )));
            }
        }
    }
}

/// What is behind a socket that answers with `line`, if that is no machine.
fn stranger(line: &[u8]) -> Option<&'static str> {
    match serde_json::from_slice::<serde_json::Value>(line) {
        Ok(value) if value.get("answer").is_some() => None,
        // The greeting of QEMU's monitor (docs/interop/qmp-spec).
        Ok(value) if value.get("QMP").is_some() => {
            Some("is the QMP monitor of a QEMU, which was asked for nothing: write --vm qemu:PATH")
        }
        _ => Some("is no control socket of a microvm: give the path of its --control"),
    }
}

/// Asks for something that is answered at once.
///
/// # Errors
/// When it is refused, or nobody answers.
pub fn ask(path: &Path, request: &Request) -> Result<Answer, ControlError> {
    let mut connection = Connection::open(path, request)?;
    match connection.next(&Cancel::default(), Some(ANSWER_LIMIT))? {
        Answer::Refused { error } => Err(connection.problem(&error)),
        answer => Ok(answer),
    }
}

/// Whether a machine answers at `path`. Comes before what is waited for without a limit: a monitor
/// of a QEMU that serves somebody else takes connections, and says nothing.
fn is_there(path: &Path, cancel: &Cancel) -> Result<(), ControlError> {
    let mut connection = Connection::open(path, &Request::Status)?;
    match connection.next(cancel, Some(THERE_LIMIT))? {
        Answer::Refused { error } => Err(connection.problem(&error)),
        _ => Ok(()),
    }
}

/// What the machine is and does.
///
/// # Errors
/// When it cannot be asked.
pub fn status(path: &Path) -> Result<Status, ControlError> {
    match ask(path, &Request::Status)? {
        Answer::Status(status) => Ok(status),
        _ => Err(other(path)),
    }
}

/// Has the machine plug `size` of memory in, in `slots` memory slots.
///
/// # Errors
/// When it refuses: nothing has changed then; or does not answer in time, and may be at it still.
pub fn plug(path: &Path, size: ByteCount, slots: usize) -> Result<Plugged, ControlError> {
    plug_within(path, size, slots, PLUG_LIMIT)
}

fn plug_within(
    path: &Path,
    size: ByteCount,
    slots: usize,
    limit: Duration,
) -> Result<Plugged, ControlError> {
    let cancel = Cancel::default();
    is_there(path, &cancel)?;
    let mut connection = Connection::open(path, &Request::Plug { bytes: size.0, slots })?;
    let began = Instant::now();
    match connection.next(&cancel, Some(limit)) {
        Ok(Answer::Plugged(plugged)) => Ok(plugged),
        Ok(Answer::Refused { error }) => Err(connection.problem(&error)),
        Ok(_) => Err(other(path)),
        // To plug it in once more would give the guest twice as much.
        Err(_) if began.elapsed() > limit => Err(connection.problem(&format!(
            "has not answered within {}, and may be plugging the memory in still: ask `godwit \
             microvm status` what it has before you plug again",
            format_duration(limit)
        ))),
        Err(error) => Err(error),
    }
}

fn other(path: &Path) -> ControlError {
    ControlError::new(path, "answers something else")
}

/// Has the machine track its guest's writes for `time`, as [`godwit_engine::measure::measure`]
/// does.
///
/// # Errors
/// When it refuses, or tracking fails.
pub fn measure(path: &Path, time: Duration, cancel: &Cancel) -> Result<Measured, ControlError> {
    let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let mut connection = Connection::open(path, &Request::Measure { time_ms })?;
    match connection.next(cancel, Some(time + ANSWER_LIMIT))? {
        Answer::Measured(measured) => Ok(measured),
        Answer::Refused { error } => Err(connection.problem(&error)),
        _ => Err(other(path)),
    }
}

/// The migration under way.
///
/// # Errors
/// When there is none.
pub fn migration(path: &Path) -> Result<MigrationLook, ControlError> {
    match ask(path, &Request::Progress)? {
        Answer::Migration(look) => Ok(look),
        _ => Err(other(path)),
    }
}

/// Has the machine pause, resume or quit; or change, switch over or cancel its migration.
///
/// # Errors
/// When it refuses.
pub fn command(path: &Path, request: &Request) -> Result<(), ControlError> {
    ask(path, request).map(drop)
}

/// The machine went without a last word: what became of its guest, which was last seen in `stage`,
/// so long ago; `safe`: what had not followed was copied first.
fn lost(
    connection: &Connection,
    error: ControlError,
    (stage, ago): (Option<Stage>, Duration),
    safe: bool,
) -> RequestError {
    if connection.stranger {
        return RequestError::Refused(error);
    }
    let phase = match stage {
        None => Phase::Setup,
        Some(Stage::PreCopy) => Phase::PreCopy,
        Some(Stage::StopAndCopy) => Phase::StopAndCopy,
        Some(Stage::Handover | Stage::PostCopy) => Phase::Handover,
    };
    // That the handover begins is told before COMMIT is sent, and what was told can be read when
    // the machine has gone; but a reader that was late may have missed it.
    let kept = stage != Some(Stage::Handover) && ago < FRESH && connection.has_ended();
    let survivor = match (kept, stage) {
        // What had not followed is in the copy.
        (_, Some(Stage::PostCopy)) if connection.has_ended() && safe => Survivor::Destination,
        // It has ended with it, unless all had.
        (_, Some(Stage::PostCopy)) if connection.has_ended() => Survivor::Lost,
        (true, Some(Stage::PreCopy | Stage::StopAndCopy) | None) => Survivor::Ended,
        _ => Survivor::Unknown,
    };
    RequestError::Failed(Failure { phase, survivor, cause: EngineError::Vm(error.into()) })
}

/// Has the machine at `path` move its guest away, and the disks that `disks` wishes, as
/// [`godwit_engine::source::migrate`] does.
///
/// # Errors
/// When it refuses, or the migration fails.
pub fn migrate(
    path: &Path,
    options: &Options,
    (disks, security): (&DiskWish, &SecurityWish),
    handle: &MigrationHandle,
    progress: &mut dyn FnMut(&Progress),
) -> Result<(Measures, Cost), RequestError> {
    let request = MigrateRequest::new(options, handle.as_typed(), disks, security);
    let request = Request::Migrate(request);
    is_there(path, handle.cancel()).map_err(RequestError::Refused)?;
    let began = Instant::now();
    let mut connection = Connection::open(path, &request).map_err(RequestError::Refused)?;
    let (mut stage, mut seen) = (None, Duration::ZERO);
    loop {
        let answer = connection.next(handle.cancel(), None);
        let ago = began.elapsed().saturating_sub(seen);
        match answer.map_err(|error| {
            lost(&connection, error, (stage, ago), options.post_copy_safe.is_some())
        })? {
            Answer::Refused { error } => {
                return Err(RequestError::Refused(connection.problem(&error)));
            }
            Answer::Migrated { measures, cost } => return Ok((*measures, cost)),
            Answer::Progress(look) => {
                (stage, seen) = (Some(look.stage), look.elapsed);
                progress(&look);
            }
            answer => {
                if let Some(failure) = answer.failure() {
                    return Err(RequestError::Failed(failure));
                }
            }
        }
    }
}

/// Has the machine at `path` take a guest in, as [`godwit_engine::destination::receive`] does.
/// `listening` is told where it listens.
///
/// # Errors
/// When it refuses, or the migration fails.
pub fn receive(
    path: &Path,
    request: ReceiveRequest,
    cancel: &Cancel,
    listening: &mut dyn FnMut(&str),
    notice: &mut dyn FnMut(&Notice),
) -> Result<(Received, Cost), RequestError> {
    is_there(path, cancel).map_err(RequestError::Refused)?;
    let mut connection =
        Connection::open(path, &Request::Receive(request)).map_err(RequestError::Refused)?;
    // Whether the guest runs there and not all of its memory is known to have come.
    let mut fetches = false;
    loop {
        let answer = connection.next(cancel, None).map_err(|error| match connection.stranger {
            true => RequestError::Refused(error),
            false => {
                let cause = EngineError::Vm(error.into());
                let survivor = match fetches {
                    true if connection.has_ended() => Survivor::Lost,
                    true => Survivor::Unknown,
                    false => Survivor::Source,
                };
                RequestError::Failed(Failure { phase: Phase::Handover, survivor, cause })
            }
        });
        match answer? {
            Answer::Refused { error } => {
                return Err(RequestError::Refused(connection.problem(&error)));
            }
            Answer::Listening { address } => listening(&address),
            Answer::Notice(line) => {
                let told = line.into();
                fetches |= matches!(told, Notice::Fetching { .. });
                notice(&told);
            }
            Answer::Received {
                bytes,
                load_us,
                resume_us,
                verified,
                running,
                total_us,
                disks_to_ready_us,
                fetched,
                cost,
            } => {
                let received = Received {
                    bytes: ByteCount(bytes),
                    load: Duration::from_micros(load_us),
                    resume: Duration::from_micros(resume_us),
                    verified,
                    running,
                    total: Duration::from_micros(total_us),
                    // A microvm has no card.
                    late_packets: 0,
                    fetched: fetched.map(Fetched::from),
                    disks_to_ready: disks_to_ready_us.map(Duration::from_micros),
                };
                return Ok((received, cost));
            }
            answer => {
                if let Some(failure) = answer.failure() {
                    return Err(RequestError::Failed(failure));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_plug_that_takes_too_long_is_not_to_be_repeated_blindly() {
        let path = std::env::temp_dir().join(format!("godwit-slow-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let machine = std::thread::spawn(move || {
            let (mut first, _) = listener.accept().unwrap();
            first.write_all(b"{\"answer\":\"done\"}\n").unwrap();
            let (second, _) = listener.accept().unwrap();
            let mut request = String::new();
            BufReader::new(&second).read_line(&mut request).unwrap();
            (second, request)
        });
        let refused = plug_within(&path, ByteCount(4096), 1, Duration::from_millis(50));
        let (_second, request) = machine.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(request.contains("\"plug\""), "{request}");
        let words = refused.unwrap_err().to_string();
        assert!(
            words.contains("within 50ms") && words.contains("status` what it has before"),
            "{words}"
        );
    }

    #[test]
    fn who_takes_connections_and_says_nothing_is_refused_within_seconds() {
        // Regression: a QMP monitor that serves somebody else was waited for without a limit.
        let path = std::env::temp_dir().join(format!("godwit-silent-{}", std::process::id()));
        let silent = UnixListener::bind(&path).unwrap();
        let options = Options::new("127.0.0.1:1".parse().unwrap());
        let handle = MigrationHandle::default();
        let began = Instant::now();
        let nothing = (&DiskWish::default(), &SecurityWish::default());
        let refused = migrate(&path, &options, nothing, &handle, &mut |_| {});
        let waited = began.elapsed();
        drop(silent);
        std::fs::remove_file(&path).unwrap();
        let Err(RequestError::Refused(error)) = refused else { panic!("{refused:?}") };
        let words = error.to_string();
        assert!(
            words.contains("does not answer within 5s") && words.contains("--vm qemu:PATH"),
            "{words}"
        );
        assert!(waited < ANSWER_LIMIT, "{waited:?}");
    }
}
