//! What godwit says to a QEMU and hears from it: a monitor, whatever carries it.
//!
//! A monitor takes commands in order, answers each, and tells of events in between. [`Qmp`] is one
//! over a unix socket, [`LibvirtMonitor`] one that libvirt holds; tests have one that only answers.
//!
//! ```text
//!   mod        the trait, events, and what can go wrong
//!   commands   every command that godwit gives, and what it reads of the answers
//!   events     those that nobody has taken yet
//!   qmp        the protocol over a socket
//!   libvirt    the same by way of libvirt's daemon
//!   brief      a socket that others want, too: let go of between commands
//! ```
//!
//! Invariant: every wait has a limit, and no event is lost to a wait for another one.

mod brief;
pub(crate) mod commands;
mod events;
mod libvirt;
mod qmp;

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use godwit_engine::Interrupt;
use godwit_units::format_duration;
use serde_json::{Value, json};

pub(crate) use brief::BriefMonitor;
pub(crate) use commands::Command;
pub(crate) use libvirt::{DomainName, LibvirtMonitor, is_qemu_of};
pub(crate) use qmp::GREETING_LIMIT;
pub use qmp::Qmp;

/// How long a command may take before the monitor counts as dead. QEMU answers from its main loop,
/// which a slow disk can hold up for seconds.
pub const COMMAND_LIMIT: Duration = Duration::from_secs(20);

/// How often a wait looks whether it was interrupted.
pub(crate) const STEP: Duration = Duration::from_millis(50);

/// QEMU's version: major, minor, micro; all 0 where it is not known.
pub type Version = (u64, u64, u64);

/// What went wrong between godwit and a monitor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// The socket cannot be connected to.
    #[error(
        "cannot connect to the QMP socket {}: {source}; {}",
        path.display(), connect_cure(path, source.kind())
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No greeting came.
    #[error(
        "{} does not greet as a QMP monitor: it is none, or another client is connected to it \
         (libvirt holds its own); give godwit a monitor of its own with one more -qmp option",
        path.display()
    )]
    NoGreeting {
        /// The socket.
        path: PathBuf,
    },
    /// QEMU closed the connection: it has quit or crashed.
    #[error("QEMU closed the monitor during {during}: the process has ended")]
    Closed {
        /// What was being waited for.
        during: String,
    },
    /// No answer within the limit.
    #[error("QEMU did not answer {during} within {}", format_duration(*limit))]
    Timeout {
        /// What was being waited for.
        during: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// QEMU refused the command.
    #[error("QEMU refused {command}: {description}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's error class.
        class: String,
        /// QEMU's words.
        description: String,
    },
    /// QEMU's answer lacks something, or has it in another form than its reference says.
    #[error(
        "{} answers {command} in a way that godwit does not know ({source}): \
         godwit is made for QEMU 7.2 to 11.1",
        version_words(*version)
    )]
    Unclear {
        /// The command.
        command: &'static str,
        /// QEMU's version.
        version: Version,
        /// What is missing or different.
        source: serde_json::Error,
    },
    /// Nobody waits for the answer any more.
    #[error("QEMU was not waited for any longer during {during}")]
    Interrupted {
        /// What was being waited for.
        during: String,
    },
    /// Libvirt, which holds the monitor, is gone or does not know the domain any more.
    #[error("libvirt was lost during {during}: {words}")]
    Libvirt {
        /// What was being waited for.
        during: String,
        /// Libvirt's words.
        words: String,
    },
    /// A domain's QEMU is not on this host.
    #[error(
        "the QEMU of this domain does not run on this host: run godwit where it runs, with that \
         host's own libvirt instead of {uri}"
    )]
    Elsewhere {
        /// Where libvirt was asked.
        uri: String,
    },
    /// Something that is not QMP came over the socket, or the connection failed.
    #[error("the monitor connection failed during {during}: {source}")]
    Io {
        /// What was being waited for.
        during: String,
        /// Why.
        source: io::Error,
    },
}

impl QmpError {
    /// QEMU's `error` in answer to `command`.
    fn refused(command: &str, error: &Value) -> Self {
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        let (class, description) = (text("class"), text("desc"));
        Self::Refused { command: command.to_owned(), class, description }
    }
}

/// What to do when the socket at `path` cannot be connected to.
fn connect_cure(path: &Path, kind: io::ErrorKind) -> String {
    match kind {
        io::ErrorKind::PermissionDenied => {
            "run godwit as root or as the user that runs QEMU".to_owned()
        }
        io::ErrorKind::ConnectionRefused => {
            let path = path.display();
            format!("nobody listens there: that QEMU has ended, or {path} is no monitor of it")
        }
        _ => format!("start QEMU with -qmp unix:{},server=on,wait=off", path.display()),
    }
}

fn version_words(version: Version) -> String {
    match version {
        (0, 0, 0) => "this QEMU".to_owned(),
        (major, minor, micro) => format!("QEMU {major}.{minor}.{micro}"),
    }
}

/// An event as QEMU sent it.
#[derive(Clone, Debug)]
pub struct Event {
    /// Its name, for example `STOP`.
    pub name: String,
    /// Its data, or null.
    pub data: Value,
    /// When QEMU emitted it, by the wall clock of its host.
    pub emitted: Duration,
    /// The same by this process's clock: when it was read here, less the time since it was emitted.
    pub at: Instant,
}

impl Event {
    /// One that QEMU says it emitted at that time by the wall clock, and that was read just now.
    fn emitted(name: String, data: Value, emitted: Duration) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // A clock that was set in between tells nothing.
        let lag = now.checked_sub(emitted).filter(|lag| *lag < COMMAND_LIMIT).unwrap_or_default();
        let at = Instant::now().checked_sub(lag).unwrap_or_else(Instant::now);
        Self { name, data, emitted, at }
    }
}

/// By what another process takes a monitor over.
#[derive(Debug)]
pub(crate) enum Handle {
    /// A connection, over which this process must be silent from then on.
    Socket(UnixStream),
    /// A name: libvirt serves any number of clients.
    Domain(DomainName),
    /// The socket, which is connected to anew.
    Path(PathBuf),
}

/// How long a monitor waits.
#[derive(Debug)]
pub(crate) struct Patience {
    /// For a command.
    pub(crate) limit: Duration,
    /// What ends any wait.
    pub(crate) interrupt: Interrupt,
}

impl Default for Patience {
    fn default() -> Self {
        Self { limit: COMMAND_LIMIT, interrupt: Interrupt::default() }
    }
}

/// What a wait does with an event that it comes upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The wait is over.
    Awaited,
    /// All that it says was taken in.
    TakenIn,
    /// It is kept for a later wait.
    Kept,
}

/// A command that was written and whose answer was not waited for.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) id: u64,
    pub(crate) command: String,
}

/// A connection to a QEMU that takes commands. What godwit does with one, typed commands above all,
/// are methods of `dyn Monitor`.
pub(crate) trait Monitor: std::fmt::Debug + Send {
    /// QEMU's version.
    fn version(&self) -> Version;

    /// The process at the other end.
    fn peer_pid(&self) -> Result<rustix::process::Pid, QmpError>;

    /// A handle for another process, which must be silent for as long as this one is used.
    fn handle(&self) -> io::Result<Handle>;

    /// Whether it is libvirt that holds it, and that stops, runs and ends the guest.
    fn is_libvirts(&self) -> bool {
        false
    }

    /// Whether the connection stays, and with it descriptors that QEMU holds under a name, and
    /// events that come later.
    fn is_lasting(&self) -> bool {
        true
    }

    /// How long it waits.
    fn patience(&self) -> &Patience;

    /// The same, to be changed.
    fn patience_mut(&mut self) -> &mut Patience;

    /// Writes a command without waiting for its answer, with `fd` beside it if there is one. QEMU
    /// carries commands out in the order in which they were written.
    fn queue(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Queued, QmpError>;

    /// Waits up to `limit` for the answer to a command that was queued; passes over those to
    /// earlier ones.
    fn answer(&mut self, queued: &Queued, limit: Duration) -> Result<Value, QmpError>;

    /// Takes the events that have come so far, and waits for nothing. Those that came before a
    /// failure of the connection are told first.
    fn take_events(&mut self) -> Result<Vec<Event>, QmpError>;

    /// Waits up to `limit` for the first event that is [`Seen::Awaited`], the kept ones first. The
    /// error of a wait in vain names `what`.
    fn watch(
        &mut self,
        what: &str,
        limit: Duration,
        look: &mut dyn FnMut(&Event) -> Seen,
    ) -> Result<Event, QmpError>;
}

impl dyn Monitor + '_ {
    /// Whether what QEMU is handed for later stays there as long as godwit is at work. A libvirt
    /// that is started anew closes the monitor in between, with which QEMU may let go of it.
    pub(crate) fn keeps_descriptors(&self) -> bool {
        self.is_lasting() && !self.is_libvirts()
    }

    /// How long commands are waited for.
    pub(crate) fn limit(&self) -> Duration {
        self.patience().limit
    }

    /// From now on commands are waited for so long, and no more for [`COMMAND_LIMIT`].
    pub(crate) fn set_limit(&mut self, limit: Duration) {
        self.patience_mut().limit = limit;
    }

    /// From now on a wait ends with [`QmpError::Interrupted`] within a tenth of a second once
    /// `interrupt` is raised. What QEMU was told to do it may do all the same, as after a
    /// [`QmpError::Timeout`].
    pub(crate) fn heed(&mut self, interrupt: &Interrupt) {
        self.patience_mut().interrupt = interrupt.clone();
    }

    /// Does `work` to its end, whoever gives up meanwhile: what takes back something in QEMU, or
    /// could not be taken back half done.
    pub(crate) fn uninterrupted<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let interrupt = std::mem::take(&mut self.patience_mut().interrupt);
        let done = work(self);
        self.patience_mut().interrupt = interrupt;
        done
    }

    /// Runs a command and returns what QEMU answers.
    ///
    /// # Errors
    /// [`QmpError::Refused`] with QEMU's own words, [`QmpError::Unclear`], or a failure of the
    /// connection.
    pub(crate) fn run<C: Command>(&mut self, command: &C) -> Result<C::Answer, QmpError> {
        let queued = self.start(command)?;
        let answer = self.answer(&queued, self.limit())?;
        let version = self.version();
        let unclear = |source| QmpError::Unclear { command: C::NAME, version, source };
        serde_json::from_value(answer).map_err(unclear)
    }

    /// Runs a command that QEMU need not know or may have reason to refuse; `None` where it does.
    ///
    /// # Errors
    /// As [`Self::run`], but for a refusal.
    pub(crate) fn run_if_known<C: Command>(
        &mut self,
        command: &C,
    ) -> Result<Option<C::Answer>, QmpError> {
        match self.run(command) {
            Ok(answer) => Ok(Some(answer)),
            Err(QmpError::Refused { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes a command without waiting for its answer.
    ///
    /// # Errors
    /// A failure of the connection.
    pub(crate) fn start<C: Command>(&mut self, command: &C) -> Result<Queued, QmpError> {
        let version = self.version();
        let unclear = |source| QmpError::Unclear { command: C::NAME, version, source };
        let arguments = serde_json::to_value(command).map_err(unclear)?;
        self.queue(C::NAME, arguments, None)
    }

    /// Runs `getfd`: hands `fd` to QEMU under the name `name`.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(crate) fn pass_fd(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        let queued = self.queue("getfd", json!({ "fdname": name }), Some(fd))?;
        self.answer(&queued, self.limit()).map(drop)
    }

    /// Runs `add-fd`: hands `fd` to QEMU, which opens it as `/dev/fdset/N`, where N is `set`, where
    /// a file's name is wanted.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(crate) fn add_fd(&mut self, set: i64, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        let arguments = json!({ "fdset-id": set, "opaque": "godwit" });
        let queued = self.queue("add-fd", arguments, Some(fd))?;
        self.answer(&queued, self.limit()).map(drop)
    }
}

#[cfg(test)]
pub(crate) mod stand_in;
#[cfg(test)]
mod tests;
