//! The command's end of the control socket.
//!
//! [`migrate`] and [`receive`] look like the engine's own functions; the engine is in the VMM. What Ctrl-C is to the
//! engine here, the end of the sending side is there.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_block::DiskChoice;
use godwit_engine::address::Address;
use godwit_engine::destination::{Notice, Received};
use godwit_engine::measure::Measured;
use godwit_engine::report::{Measures, Progress};
use godwit_engine::source::Options;
use godwit_engine::steering::Steering;
use godwit_engine::{Cancel, EngineError, Failure, Phase, Survivor, limits};
use godwit_units::ByteCount;

use super::messages::{Answer, Cost, DiskWish, MigrateRequest, Request, Status};
use crate::MicrovmError;

/// An answer to a request that does nothing big.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Why a request came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// It was refused, or the VMM could not be asked: nothing has changed.
    #[error(transparent)]
    Refused(MicrovmError),
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
}

impl Connection {
    fn open(path: &Path, request: &Request) -> Result<Self, MicrovmError> {
        let problem = |problem: String| MicrovmError::Control { path: path.to_owned(), problem };
        let open = || {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(limits::TICK))?;
            let mut text = serde_json::to_string(request)?;
            text.push('\n');
            (&stream).write_all(text.as_bytes())?;
            Ok(Self {
                path: path.to_owned(),
                reader: BufReader::new(stream.try_clone()?),
                stream,
                text: Vec::new(),
                cancelled: false,
            })
        };
        open().map_err(|error: std::io::Error| {
            problem(format!("cannot be reached: {error}; does the machine or the migration still run?"))
        })
    }

    fn problem(&self, problem: &str) -> MicrovmError {
        MicrovmError::Control { path: self.path.clone(), problem: problem.to_owned() }
    }

    /// The next answer. Tells the VMM when `cancel` is wished.
    fn next(&mut self, cancel: &Cancel, limit: Option<Duration>) -> Result<Answer, MicrovmError> {
        let began = std::time::Instant::now();
        loop {
            match self.reader.read_until(b'\n', &mut self.text) {
                Ok(_) if self.text.ends_with(b"\n") => {
                    let answer = serde_json::from_slice(&self.text);
                    self.text.clear();
                    return answer
                        .map_err(|error| self.problem(&format!("answers what is not understood: {error}")));
                }
                Ok(_) => return Err(self.problem("was closed before it answered; did the machine end?")),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(self.problem(&error.to_string())),
            }
            if cancel.is_cancelled() && !std::mem::replace(&mut self.cancelled, true) {
                let _ = self.stream.shutdown(Shutdown::Write);
            }
            if limit.is_some_and(|limit| began.elapsed() > limit) {
                return Err(self.problem("does not answer"));
            }
        }
    }
}

/// Asks for something that is answered at once.
///
/// # Errors
/// When it is refused, or nobody answers.
pub fn ask(path: &Path, request: &Request) -> Result<Answer, MicrovmError> {
    let mut connection = Connection::open(path, request)?;
    match connection.next(&Cancel::default(), Some(ANSWER_LIMIT))? {
        Answer::Refused { error } => Err(connection.problem(&error)),
        answer => Ok(answer),
    }
}

/// What the machine is and does.
///
/// # Errors
/// When it cannot be asked.
pub fn status(path: &Path) -> Result<Status, MicrovmError> {
    match ask(path, &Request::Status)? {
        Answer::Status(status) => Ok(status),
        _ => Err(other(path)),
    }
}

fn other(path: &Path) -> MicrovmError {
    MicrovmError::Control { path: path.to_owned(), problem: "answers something else".to_owned() }
}

/// Has the machine track its guest's writes for `time`, as [`godwit_engine::measure::measure`] does.
///
/// # Errors
/// When it refuses, or tracking fails.
pub fn measure(path: &Path, time: Duration, cancel: &Cancel) -> Result<Measured, MicrovmError> {
    let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let mut connection = Connection::open(path, &Request::Measure { time_ms })?;
    match connection.next(cancel, Some(time + ANSWER_LIMIT))? {
        Answer::Measured(measured) => Ok(measured),
        Answer::Refused { error } => Err(connection.problem(&error)),
        _ => Err(other(path)),
    }
}

/// The last look at the migration under way, if there was one, and its settings.
///
/// # Errors
/// When there is none.
#[allow(clippy::type_complexity, reason = "the two parts of one answer")]
pub fn migration(path: &Path) -> Result<(Option<Box<Progress>>, Vec<(String, String)>), MicrovmError> {
    match ask(path, &Request::Progress)? {
        Answer::Migration { progress, settings } => Ok((progress, settings)),
        _ => Err(other(path)),
    }
}

/// Has the machine pause, resume or quit; or change, switch over or cancel its migration.
///
/// # Errors
/// When it refuses.
pub fn command(path: &Path, request: &Request) -> Result<(), MicrovmError> {
    ask(path, request).map(drop)
}

/// What became of the VMM is not known: it went without a last word.
fn lost(error: MicrovmError, survivor: Survivor) -> RequestError {
    let cause = EngineError::Vm(error.into());
    RequestError::Failed(Failure { phase: Phase::Handover, survivor, cause })
}

/// Has the machine at `path` move its guest away, and the disks that `disks` wishes, as [`godwit_engine::source::migrate`] does.
///
/// # Errors
/// When it refuses, or the migration fails.
pub fn migrate(
    path: &Path,
    options: &Options,
    disks: &DiskWish,
    steering: &Steering,
    progress: &mut dyn FnMut(&Progress),
) -> Result<(Measures, Cost), RequestError> {
    let request = Request::Migrate(MigrateRequest::new(options, steering.as_typed(), disks));
    let mut connection = Connection::open(path, &request).map_err(RequestError::Refused)?;
    loop {
        match connection.next(steering.cancel(), None).map_err(|error| lost(error, Survivor::Unknown))? {
            Answer::Refused { error } => return Err(RequestError::Refused(connection.problem(&error))),
            Answer::Migrated { measures, cost } => return Ok((*measures, cost)),
            Answer::Progress(look) => progress(&look),
            answer => {
                if let Some(failure) = answer.failure() {
                    return Err(RequestError::Failed(failure));
                }
            }
        }
    }
}

/// Has the machine at `path` take a guest in, as [`godwit_engine::destination::receive`] does, by the codecs that a compression
/// of this name may come to; the source may overwrite `disks`. `listening` is told where it listens.
///
/// # Errors
/// When it refuses, or the migration fails.
pub fn receive(
    path: &Path,
    listen: &Address,
    wait: Option<Duration>,
    (codecs, disks): (&str, &DiskChoice),
    cancel: &Cancel,
    listening: &mut dyn FnMut(&str),
    notice: &mut dyn FnMut(&Notice),
) -> Result<(Received, Cost), RequestError> {
    let wait_ms = wait.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
    let request = Request::Receive {
        listen: listen.to_string(),
        wait_ms,
        codecs: Some(codecs.to_owned()),
        disks: disks.to_string(),
    };
    let mut connection = Connection::open(path, &request).map_err(RequestError::Refused)?;
    loop {
        match connection.next(cancel, None).map_err(|error| lost(error, Survivor::Source))? {
            Answer::Refused { error } => return Err(RequestError::Refused(connection.problem(&error))),
            Answer::Listening { address } => listening(&address),
            Answer::Notice(line) => notice(&line.into()),
            Answer::Received {
                bytes,
                load_us,
                resume_us,
                verified,
                running,
                total_us,
                disks_to_ready_us,
                cost,
            } => {
                let received = Received {
                    bytes: ByteCount(bytes),
                    load: Duration::from_micros(load_us),
                    resume: Duration::from_micros(resume_us),
                    verified,
                    running,
                    total: Duration::from_micros(total_us),
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
