//! The VMM's end of the control socket, and who may run the guest.
//!
//! Invariant: [`State`] says whose the guest is, and every change of it happens under one lock.
//! Only a machine in the state `Here` is resumed on request; one whose guest has gone never runs it
//! again; and of two requests that would change the state one is refused.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_control::asked::Asked;
use godwit_control::events;
use godwit_control::messages::{
    Answer, Cost, MigrateRequest, Plugged, ReceiveRequest, Request, Status,
};
use godwit_control::steer::{Socket, bind, steer};
use godwit_control::watch::{LAST_WORDS, Watched};
use godwit_engine::address::{Address, Listener};
use godwit_engine::compression::Compression;
use godwit_engine::handle::MigrationHandle;
use godwit_engine::measure::measure;
use godwit_engine::report::Stage;
use godwit_engine::{Cancel, Survivor, destination, source};
use godwit_units::{ByteCount, PAGE_SIZE, PageCount};

use crate::destination::MicrovmDestination;
use crate::source::MicrovmSource;
use crate::{Machine, MachineEvent, MicrovmError};

/// Requests are short.
const LONGEST_REQUEST: u64 = 64 << 10;
/// To who asks about a migration where there is none.
const NO_MIGRATION: &str = "its guest does not migrate";
/// To who wants something meanwhile.
const PLUGGING: &str = "it is given more memory just now: wait until that is done";
/// To who has plugged memory in that the guest will not use.
const UNTOLD: &str = "the guest does not know of it: its list of plugged blocks or its page \
                      tables, which are in its own memory, make no sense";
/// To who would end a machine that has a part of a guest's memory.
const IN_TWO_PLACES: &str = "memory of its guest is still to come from one machine to the other, \
                             and the guest is lost if one of them ends: wait until it has, or \
                             end it with --force";
/// A client that does not read for so long is given up; the migration goes on.
const WRITE_LIMIT: Duration = Duration::from_secs(5);
/// Who asks has that long to write the request.
const READ_LIMIT: Duration = Duration::from_secs(5);

/// Whose the guest is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Ours, running or paused.
    Here,
    /// Nobody's: this machine waits for one.
    Incoming,
    /// Ours, on its way out.
    Leaving,
    /// On its way in.
    Arriving,
    /// As before; memory is being plugged in.
    Plugging,
    /// Elsewhere: it never runs here again.
    Gone,
    /// Stopped here, and perhaps running elsewhere: it runs here again only by force.
    InDoubt,
    /// Nowhere whole: it ran at the destination before all of its memory was there, and one of both
    /// machines has ended.
    Lost,
}

/// What a machine is served with.
#[derive(Debug)]
struct Host {
    machine: Arc<Machine>,
    state: Mutex<State>,
    events: Sender<MachineEvent>,
    /// The migration under way, and those who watch it.
    migration: Mutex<Option<(MigrationHandle, Watched)>>,
    /// Conversations that move a guest.
    moving: AtomicUsize,
}

/// A machine that is served; not any more when this is dropped.
#[derive(Debug)]
pub struct Served {
    _socket: Socket,
    host: Arc<Host>,
}

impl Served {
    /// Lets whoever moves the guest say what became of it, to the other side and to who asked, when
    /// the machine has ended ([`Machine::set_ended`]): for up to `limit`.
    pub fn settle(&self, limit: Duration) {
        let until = Instant::now() + limit;
        while self.host.moving.load(Ordering::SeqCst) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Serves `machine` at `path` in threads of its own. `events` is told when the machine is to end.
///
/// # Errors
/// When the socket cannot be made.
pub fn serve(
    machine: &Arc<Machine>,
    state: State,
    path: &Path,
    events: &Sender<MachineEvent>,
) -> Result<Served, MicrovmError> {
    let (listener, socket) = bind(path)?;
    let host = Host {
        machine: Arc::clone(machine),
        state: Mutex::new(state),
        events: events.clone(),
        migration: Mutex::default(),
        moving: AtomicUsize::new(0),
    };
    let host = Arc::new(host);
    let serving = Arc::clone(&host);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let host = Arc::clone(&serving);
            std::thread::spawn(move || host.converse(stream));
        }
    });
    Ok(Served { _socket: socket, host })
}

/// While a guest is moved.
struct Moving<'a>(&'a AtomicUsize);

impl<'a> Moving<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// While memory is plugged in. The state before comes back however that ends.
struct Plugging<'a> {
    state: &'a Mutex<State>,
    before: State,
}

impl Drop for Plugging<'_> {
    fn drop(&mut self) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = self.before;
    }
}

/// One connection's sending side.
struct Line(Mutex<UnixStream>);

impl Line {
    fn say(&self, answer: &Answer) {
        let Ok(mut text) = serde_json::to_string(answer) else { return };
        text.push('\n');
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if stream.write_all(text.as_bytes()).is_err() {
            // Nobody listens any more, or not for long. Half a line must not be followed by
            // another; the other direction stays open, as its end has a meaning of its own.
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
}

impl Host {
    fn converse(&self, stream: UnixStream) {
        let _ = stream.set_write_timeout(Some(WRITE_LIMIT));
        let _ = stream.set_read_timeout(Some(READ_LIMIT));
        let Ok(reading) = stream.try_clone() else { return };
        let mut reader = BufReader::new(std::io::Read::take(reading, LONGEST_REQUEST));
        let line = Arc::new(Line(Mutex::new(stream)));
        let mut text = String::new();
        if !matches!(reader.read_line(&mut text), Ok(1..)) {
            return;
        }
        // What follows is only heard the end of.
        let _ = reader.get_ref().get_ref().set_read_timeout(None);
        let asked = match Asked::read(text.as_bytes()) {
            Ok(asked) => asked,
            Err(error) => return line.say(&refused(error)),
        };
        let answer = match asked.request.clone() {
            Request::Status => Answer::Status(self.status()),
            Request::Pause => self.pause(),
            Request::Resume { force } => self.resume(force),
            Request::Balloon { bytes } => self.set_balloon(ByteCount(bytes)),
            Request::Plug { bytes, slots } => self.plug(ByteCount(bytes), slots),
            Request::Quit { force: false } if self.is_in_two_places() => {
                refused(IN_TWO_PLACES.to_owned())
            }
            Request::Quit { .. } => {
                line.say(&Answer::Done);
                let _ = self.events.send(MachineEvent::Quit);
                return;
            }
            Request::Measure { time_ms } => self.measure(time_ms, reader),
            Request::Migrate(request) => return self.migrate(&request, &line, reader),
            request @ (Request::Progress
            | Request::Set { .. }
            | Request::Redirect { .. }
            | Request::SwitchOver { .. }
            | Request::Cancel) => match &*self.migration() {
                Some((handle, _)) => asked.answered(steer(handle, &request)),
                None => refused(NO_MIGRATION.to_owned()),
            },
            Request::Watch => {
                let watched = self.migration().as_ref().map(|(_, watched)| watched.clone());
                let stream = line.0.lock().unwrap_or_else(PoisonError::into_inner);
                let told = watched.map(|watched| watched.tell(&stream));
                drop(stream);
                match told.unwrap_or_else(|| Err(NO_MIGRATION.to_owned())) {
                    Ok(()) => return,
                    Err(error) => refused(error),
                }
            }
            Request::Receive(request) => {
                return self.receive(&request, &line, reader);
            }
        };
        line.say(&answer);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn migration(&self) -> MutexGuard<'_, Option<(MigrationHandle, Watched)>> {
        self.migration.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes from `from` to `to`, or says what stands against it.
    fn take(&self, from: State, to: State) -> Result<(), MicrovmError> {
        let mut state = self.state();
        if *state == from {
            *state = to;
            return Ok(());
        }
        let (state, cure) = match *state {
            State::Here => ("running a guest of its own", "start the machine with --incoming"),
            State::Incoming => ("waiting for a guest", "are source and destination exchanged?"),
            State::Leaving | State::Arriving => ("migrating", "wait for that, or cancel it"),
            State::Plugging => ("given more memory just now", "wait until that is done"),
            State::Gone => {
                ("left by its guest", "the guest runs elsewhere; end this machine with quit")
            }
            State::InDoubt => (
                "in doubt whether its guest has left",
                "if the guest runs at the destination, end this machine with quit; if not, it \
                 runs on here by resume --force",
            ),
            State::Lost => (
                "left with a part of a guest",
                "the guest is lost, since it ran before all of its memory had followed; end this \
                 machine with quit",
            ),
        };
        Err(MicrovmError::WrongState { state, cure })
    }

    /// How far the guest is on its way out.
    fn stage(&self) -> Option<Stage> {
        self.migration().as_ref()?.0.progress().map(|progress| progress.stage)
    }

    /// Whether the guest has left this machine, and some of its memory is only here; or runs in
    /// this one without all of it.
    fn is_in_two_places(&self) -> bool {
        let now = *self.state();
        match now {
            State::Leaving => self.stage() == Some(Stage::PostCopy),
            State::Arriving => self.machine.ram().lacks_pages(),
            _ => false,
        }
    }

    fn status(&self) -> Status {
        let machine = &self.machine;
        let now = *self.state();
        let state = match now {
            State::Leaving if self.is_in_two_places() => "follows",
            State::Arriving if machine.is_running() && self.is_in_two_places() => "lacks-pages",
            State::Here | State::Arriving if machine.is_running() => "running",
            State::Here => "paused",
            State::Incoming => "incoming",
            State::Leaving => "leaving",
            State::Arriving => "arriving",
            State::Plugging => "plugging",
            State::Gone => "gone",
            State::InDoubt => "in-doubt",
            State::Lost => "lost",
        };
        let blocks = machine.ram().blocks();
        Status {
            state: state.to_owned(),
            pid: std::process::id(),
            vcpu_threads: machine.vcpu_threads().to_vec(),
            ram: blocks
                .iter()
                .map(|block| (block.name().to_owned(), block.pages().bytes().0))
                .collect(),
            ram_files: machine.ram().paths(),
            slots: machine.slots().len(),
            tracker: machine.tracking(),
            // Who looks at the guest's queues writes to its memory, which has to be all here, and
            // its own.
            balloon: match now {
                State::Here | State::Plugging => machine.balloon(),
                State::Leaving if machine.is_running() => machine.balloon(),
                _ => None,
            },
        }
    }

    fn pause(&self) -> Answer {
        let state = self.state();
        match *state {
            State::Here => self
                .machine
                .stop()
                .map_or_else(|error| refused(error.to_string()), |_| Answer::Done),
            State::Plugging => refused(PLUGGING.to_owned()),
            _ => refused("there is no guest of its own to pause, or it migrates".to_owned()),
        }
    }

    /// By `force` also where it is in doubt: somebody has seen that the guest does not run
    /// elsewhere.
    fn resume(&self, force: bool) -> Answer {
        let mut state = self.state();
        match *state {
            State::Here => {
                self.machine.run();
                Answer::Done
            }
            State::Gone => {
                refused("the guest has gone elsewhere: it must not run twice".to_owned())
            }
            State::InDoubt if force => {
                *state = State::Here;
                self.machine.run();
                Answer::Done
            }
            State::Lost => refused(
                "the guest is lost: a part of its memory is here, and a part in a machine that has \
                 ended"
                    .to_owned(),
            ),
            State::InDoubt => refused(
                "the guest perhaps runs at the destination, and must not run twice: look there \
                 (godwit microvm status: running, or lacks-pages, say that it does), end that \
                 machine if the guest does not run in it, and then resume this one with --force"
                    .to_owned(),
            ),
            State::Plugging => refused(PLUGGING.to_owned()),
            _ => refused("there is no guest of its own to resume, or it migrates".to_owned()),
        }
    }

    fn set_balloon(&self, size: ByteCount) -> Answer {
        let memory: ByteCount =
            self.machine.ram().blocks().iter().map(|ram| ram.pages().bytes()).sum();
        if size > memory {
            return refused(format!("the guest has {memory}, and cannot give {size}"));
        }
        match *self.state() {
            State::Here => {}
            State::Plugging => return refused(PLUGGING.to_owned()),
            _ => return refused("there is no guest of its own to ask, or it migrates".to_owned()),
        }
        match self.machine.set_balloon(PageCount(size.0 / PAGE_SIZE)) {
            true => Answer::Done,
            false => refused(
                "the machine has no balloon: start it with --balloon hints or reporting".to_owned(),
            ),
        }
    }

    /// Not during a migration or a measurement: both sides have agreed on blocks by then, and a
    /// tracker knows those that there were at its start. Neither begins before the end.
    fn plug(&self, size: ByteCount, slots: usize) -> Answer {
        let before = *self.state();
        let taken = match before {
            State::Here | State::Incoming => self.take(before, State::Plugging),
            _ => self.take(State::Here, State::Plugging),
        };
        if let Err(error) = taken {
            return refused(error.to_string());
        }
        let _plugging = Plugging { state: &self.state, before };
        let block = match self.machine.plug(size, slots) {
            Ok(block) => block,
            Err(error) => return refused(error.to_string()),
        };
        // A guest that is to come was told of its memory where it comes from.
        let told = before == State::Incoming || self.machine.tell(&block);
        Answer::Plugged(Plugged {
            block: block.name,
            gpa: block.gpa,
            bytes: block.size.0,
            slots: self.machine.slots().len(),
            warning: (!told).then(|| UNTOLD.to_owned()),
        })
    }

    fn measure(&self, time_ms: u64, reader: impl BufRead + Send + 'static) -> Answer {
        if let Err(error) = self.take(State::Here, State::Leaving) {
            return refused(error.to_string());
        }
        let cancel = Cancel::default();
        cancel_at_end(reader, cancel.clone(), |_| true);
        let mut vm = MicrovmSource::new(&self.machine);
        let measured = measure(&mut vm, Duration::from_millis(time_ms), &cancel);
        *self.state() = State::Here;
        measured.map_or_else(|error| refused(error.to_string()), Answer::Measured)
    }

    fn migrate(
        &self,
        request: &MigrateRequest,
        line: &Arc<Line>,
        reader: impl BufRead + Send + 'static,
    ) {
        let options = match request.options() {
            Ok(options) => options,
            Err(error) => return line.say(&refused(error)),
        };
        let disks = match request.disks() {
            Ok(disks) => disks,
            Err(error) => return line.say(&refused(error)),
        };
        let cancel = Cancel::default();
        let handle = match MigrationHandle::typed(request.settings.clone(), cancel.clone()) {
            Ok(handle) => handle,
            Err(error) => return line.say(&refused(error.to_string())),
        };
        if let Err(error) = self.take(State::Here, State::Leaving) {
            return line.say(&refused(error.to_string()));
        }
        let vm = MicrovmSource::new(&self.machine).with_disks(&disks.choice, disks.granularity);
        let mut vm = match vm {
            Ok(vm) => vm,
            Err(error) => {
                *self.state() = State::Here;
                return line.say(&refused(error.to_string()));
            }
        };
        let _moving = Moving::begin(&self.moving);
        let watched = Watched::default();
        *self.migration() = Some((handle.clone(), watched.clone()));
        let seen = handle.clone();
        // Who only leaves when the guest is handed over gives nothing up by that: there is nobody
        // else who could serve its pages, or find out where it runs.
        cancel_at_end(reader, cancel, move |_| {
            let stage = seen.progress().map(|progress| progress.stage);
            !matches!(stage, Some(Stage::Handover | Stage::PostCopy))
        });
        let meter = Meter::start(&self.machine);
        let result = source::migrate(&mut vm, &options, &handle, &mut |progress| {
            watched.see(progress);
            line.say(&progress.into());
        });
        *self.state() = match result.as_ref().map_err(|failure| failure.survivor) {
            Ok(_) | Err(Survivor::Destination) => State::Gone,
            Err(Survivor::Unknown) => State::InDoubt,
            Err(Survivor::Lost) => State::Lost,
            Err(_) => State::Here,
        };
        *self.migration() = None;
        let moved = result.is_ok();
        line.say(&match result {
            Ok(measures) => {
                let cost = meter.read(&self.machine);
                watched.end(events::migrated(&measures, cost));
                Answer::Migrated { measures: Box::new(measures), cost }
            }
            Err(failure) => {
                watched.end(events::failed(&failure));
                Answer::from(&failure)
            }
        });
        watched.settle(LAST_WORDS);
        if moved && !options.keep_source {
            let _ = self.events.send(MachineEvent::Quit);
        }
    }

    fn receive(
        &self,
        request: &ReceiveRequest,
        line: &Arc<Line>,
        reader: impl BufRead + Send + 'static,
    ) {
        let listen = &request.listen;
        let codecs = match request.codecs.as_deref().unwrap_or("auto").parse::<Compression>() {
            Ok(compression) => compression.codecs(),
            Err(error) => return line.say(&refused(format!("\"codecs\": {error}"))),
        };
        let disks = match request.disks.parse() {
            Ok(disks) => disks,
            Err(error) => return line.say(&refused(format!("\"disks\": {error}"))),
        };
        let listening = listen
            .parse::<Address>()
            .map_err(|error| format!("\"listen\" {listen:?}: {error}"))
            .and_then(|address| {
                let security = request.security.destination(&address);
                let security = security.map_err(|error| error.to_string())?;
                let listener = Listener::bind(&address);
                listener
                    .and_then(|listener| listener.address().map(|at| (listener, at, security)))
                    .map_err(|error| format!("cannot listen on {listen}: {error}"))
            });
        let (listener, address, security) = match listening {
            Ok(listening) => listening,
            Err(error) => return line.say(&refused(error)),
        };
        if let Err(error) = self.take(State::Incoming, State::Arriving) {
            return line.say(&refused(error.to_string()));
        }
        let _moving = Moving::begin(&self.moving);
        line.say(&Answer::Listening { address: address.to_string() });
        let cancel = Cancel::default();
        // Who runs a guest already and waits for its source does so also when nobody listens.
        let machine = Arc::clone(&self.machine);
        cancel_at_end(reader, cancel.clone(), move |asked| asked || !machine.is_running());
        let meter = Meter::start(&self.machine);
        let mut vm = MicrovmDestination::new(&self.machine);
        #[allow(clippy::needless_update, reason = "there are more in a build with test hooks")]
        let options = destination::Options {
            wait: request.wait_ms.map(Duration::from_millis),
            security,
            codecs,
            disks,
            overcommit: request.overcommit,
            reconnect: Duration::from_millis(request.reconnect_ms),
            dump: request.dump.clone(),
            post_copy_safe: request.postcopy_safe.clone(),
            confined: !request.unconfined && godwit_confine::is_available(),
            ..destination::Options::default()
        };
        let result = destination::receive(&mut vm, &listener, &options, &cancel, &mut |notice| {
            line.say(&notice.into());
        });
        *self.state() = match &result {
            Ok(_) => State::Here,
            Err(failure) if failure.survivor == Survivor::Unknown => State::Gone,
            Err(failure) if failure.survivor == Survivor::Lost => State::Lost,
            Err(_) => State::Incoming,
        };
        line.say(&match result {
            Ok(received) => Answer::received(&received, meter.read(&self.machine)),
            Err(failure) => Answer::from(&failure),
        });
    }
}

fn refused(error: String) -> Answer {
    Answer::Refused { error }
}

/// Cancels when the other side stops sending, if that `may` be then, of one that has asked for it
/// by a line or has only gone.
fn cancel_at_end(
    mut reader: impl BufRead + Send + 'static,
    cancel: Cancel,
    may: impl FnOnce(bool) -> bool + Send + 'static,
) {
    std::thread::spawn(move || {
        let (mut line, mut asked) = (String::new(), false);
        while matches!(reader.read_line(&mut line), Ok(1..)) {
            asked |= line.trim() == "cancel";
            line.clear();
        }
        if may(asked) {
            cancel.cancel();
        }
    });
}

/// Takes the CPU time of a migration: that of the process without that of its vCPUs.
struct Meter {
    began: Duration,
}

impl Meter {
    fn start(machine: &Machine) -> Self {
        Self { began: own_time(machine) }
    }

    fn read(&self, machine: &Machine) -> Cost {
        let cpu = own_time(machine).saturating_sub(self.began);
        Cost { cpu_ms: cpu.as_secs_f64() * 1e3, peak_rss_bytes: own_memory() }
    }
}

fn own_time(machine: &Machine) -> Duration {
    let process = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let process =
        Duration::new(process.tv_sec.unsigned_abs(), process.tv_nsec.unsigned_abs() as u32);
    process.saturating_sub(machine.vcpu_time().unwrap_or_default())
}

/// Resident memory that is not the guest's: `RssAnon` and `RssFile` of proc(5); the guest's is
/// `RssShmem`.
fn own_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    (field("RssAnon:") + field("RssFile:")) * 1024
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_plug_that_panics_leaves_the_machine_as_it_was() {
        for before in [State::Here, State::Incoming] {
            let state = Mutex::new(State::Plugging);
            let panics = || {
                let _plugging = Plugging { state: &state, before };
                panic!("on the way");
            };
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
            assert_eq!(*state.lock().unwrap(), before);
        }
    }
}
