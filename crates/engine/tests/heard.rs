//! What is heard while a machine takes its time: a wish to cancel, a peer that gives up, the end of
//! the machine.
#![allow(clippy::unwrap_used)]

mod machine;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_engine::address::{Address, Listener, Stream};
use godwit_engine::destination::{self, receive};
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::source::{Options, migrate};
use godwit_engine::vm::{Ask, DestinationVm, DiskDestination, RunError, SourceVm, VmError};
use godwit_engine::{Cancel, EngineError, Failure, Interrupt, Survivor};
use godwit_memory::RamBlock;
use godwit_policy::Settings;
use godwit_track::DirtyTracker;
use godwit_wire::AbortCode;

use machine::{Destination, Source, options};

/// How long a machine that was told to hang does so when nobody ends it. No test gets near it.
const LIMIT: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_millis(20);

/// A call that takes as long as [`LIMIT`] when nobody ends it; what happens when it begins.
struct Hang(Box<dyn FnMut() + Send>);

impl Hang {
    fn new(begins: impl FnMut() + Send + 'static) -> Self {
        Self(Box::new(begins))
    }

    fn wait(&mut self, interrupt: &Interrupt, ended: impl Fn() -> bool) -> Result<(), VmError> {
        (self.0)();
        let began = Instant::now();
        while began.elapsed() < LIMIT {
            if interrupt.is_raised() || ended() {
                return Err("it hangs".into());
            }
            std::thread::sleep(STEP);
        }
        Err("nobody ended it".into())
    }
}

/// The call that takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Answer,
    StartTracking,
    OpenState,
    Stop,
    ReleaseState,
    StateSaved,
    Compare,
    Prepare,
    FinishLoad,
}

/// What hangs where, on one side.
#[derive(Default)]
struct Slow {
    hang: Option<(Call, Hang)>,
    interrupt: Interrupt,
    /// Whether the machine has ended.
    ended: Arc<AtomicBool>,
}

impl Slow {
    fn new(hang: Option<(Call, Hang)>, ended: &Arc<AtomicBool>) -> Self {
        Self { hang, interrupt: Interrupt::default(), ended: Arc::clone(ended) }
    }

    fn enter(&mut self, call: Call) -> Result<(), VmError> {
        match &mut self.hang {
            Some((slow, hang)) if *slow == call => {
                let ended = || self.ended.load(Ordering::Relaxed);
                hang.wait(&self.interrupt, ended)
            }
            _ => Ok(()),
        }
    }
}

/// A source that hangs where it is told to.
struct SlowSource {
    source: Source,
    slow: Slow,
}

impl SourceVm for SlowSource {
    fn machine(&self) -> &'static str {
        self.source.machine()
    }

    fn heed(&mut self, interrupt: &Interrupt) {
        self.slow.interrupt = interrupt.clone();
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        self.source.ram()
    }

    fn was_running(&self) -> bool {
        self.source.was_running()
    }

    fn answer(&mut self, question: &[u8]) -> Result<Vec<u8>, VmError> {
        self.slow.enter(Call::Answer)?;
        self.source.answer(question)
    }

    fn foresee_questions(&mut self) {
        self.source.foresee_questions();
    }

    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError> {
        self.slow.enter(Call::StartTracking)?;
        self.source.start_tracking()
    }

    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError> {
        self.slow.enter(Call::OpenState)?;
        self.source.open_state()
    }

    fn stop(&mut self) -> Result<Instant, VmError> {
        self.slow.enter(Call::Stop)?;
        self.source.stop()
    }

    fn release_state(&mut self) -> Result<(), VmError> {
        self.slow.enter(Call::ReleaseState)?;
        self.source.release_state()
    }

    fn state_saved(&mut self) -> Result<(), VmError> {
        self.slow.enter(Call::StateSaved)?;
        self.source.state_saved()
    }

    fn resume(&mut self) -> Result<(), VmError> {
        assert!(!self.slow.interrupt.is_raised(), "the way back is to be taken to its end");
        self.source.resume()
    }

    fn retire(&mut self, keep: bool) -> Result<(), VmError> {
        self.source.retire(keep)
    }

    fn has_ended(&self) -> bool {
        self.slow.ended.load(Ordering::Relaxed)
    }
}

/// A destination that hangs where it is told to.
struct SlowDestination {
    destination: Destination,
    slow: Slow,
}

impl DestinationVm for SlowDestination {
    fn machine(&self) -> &'static str {
        self.destination.machine()
    }

    fn heed(&mut self, interrupt: &Interrupt) {
        self.slow.interrupt = interrupt.clone();
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        self.destination.ram()
    }

    fn compare(&mut self, ask: &mut Ask<'_>) -> Result<(), VmError> {
        self.slow.enter(Call::Compare)?;
        self.destination.compare(ask)
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        self.slow.enter(Call::Prepare)?;
        self.destination.prepare()
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        self.slow.enter(Call::FinishLoad)?;
        self.destination.finish_load()
    }

    fn run(&mut self) -> Result<(), RunError> {
        self.destination.run()
    }

    fn announce(&mut self) -> Result<(), VmError> {
        self.destination.announce()
    }

    fn discard(&mut self) -> Result<(), VmError> {
        assert!(!self.slow.interrupt.is_raised(), "it is to be discarded for certain");
        self.destination.discard()
    }

    fn disk_destination(&mut self) -> Option<&mut dyn DiskDestination> {
        self.destination.disk_destination()
    }
}

/// Who can end what.
#[derive(Clone, Default)]
struct Ends {
    source: Cancel,
    destination: Cancel,
    machine: Arc<AtomicBool>,
}

const SOURCES: [Call; 6] = [
    Call::Answer,
    Call::StartTracking,
    Call::OpenState,
    Call::Stop,
    Call::ReleaseState,
    Call::StateSaved,
];
const DESTINATIONS: [Call; 3] = [Call::Compare, Call::Prepare, Call::FinishLoad];

/// A migration in which `call` hangs, at which `then` happens; what became of both sides. The guest
/// must run at the source.
fn fail(ends: &Ends, call: Call, then: impl FnMut() + Send + 'static) -> (Failure, Failure) {
    let source = Source::start(LIMIT, Vec::new());
    let destination = Destination::of(&source);
    let hang = Some((call, Hang::new(then)));
    let (here, there) = if SOURCES.contains(&call) { (hang, None) } else { (None, hang) };
    let mut source = SlowSource { source, slow: Slow::new(here, &ends.machine) };
    let mut destination = SlowDestination { destination, slow: Slow::new(there, &Arc::default()) };
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let cancel = ends.destination.clone();
    let receiving = std::thread::spawn(move || {
        let options = destination::Options::default();
        receive(&mut destination, &listener, &options, &cancel, &mut |_| {}).unwrap_err()
    });
    let settings =
        Settings { downtime_limit: Duration::from_secs(10), patience: None, ..Settings::default() };
    let handle = MigrationHandle::new(settings, Own::default(), ends.source.clone());
    let options = Options { to, ..options(2, false) };
    let began = Instant::now();
    let failure = migrate(&mut source, &options, &handle, &mut |_| {}).unwrap_err();
    assert!(began.elapsed() < LIMIT, "it was not heard in {call:?}: {failure}");
    assert!(source.source.running.load(Ordering::Relaxed) && !source.source.retired);
    (failure, receiving.join().unwrap())
}

fn aborted(failure: &Failure) -> Option<AbortCode> {
    match failure.cause {
        EngineError::Aborted { code, .. } => Some(code),
        _ => None,
    }
}

#[test]
fn a_wish_to_cancel_is_heard_in_each_call_that_takes_long() {
    // Mutation: the machine is not given the interrupt, on either side.
    for call in SOURCES.into_iter().chain(DESTINATIONS) {
        let ends = Ends::default();
        let cancel = ends.source.clone();
        let (source, destination) = fail(&ends, call, move || cancel.cancel());
        assert!(matches!(source.cause, EngineError::Cancelled), "{call:?}: {source}");
        assert_eq!(source.survivor, Survivor::Source);
        assert_eq!(aborted(&destination), Some(AbortCode::Cancelled), "{call:?}: {destination}");
    }
}

#[test]
fn a_destination_that_gives_up_is_heard_in_each_call_that_takes_long() {
    for call in SOURCES.into_iter().chain(DESTINATIONS) {
        let ends = Ends::default();
        let cancel = ends.destination.clone();
        let (source, destination) = fail(&ends, call, move || cancel.cancel());
        assert_eq!(aborted(&source), Some(AbortCode::Cancelled), "{call:?}: {source}");
        assert_eq!(source.survivor, Survivor::Source);
        assert!(matches!(destination.cause, EngineError::Cancelled), "{call:?}: {destination}");
    }
}

#[test]
fn the_end_of_the_machine_is_heard_while_the_guest_is_being_stopped() {
    let ends = Ends::default();
    let machine = Arc::clone(&ends.machine);
    let ended = move || machine.store(true, Ordering::Relaxed);
    let (source, destination) = fail(&ends, Call::Stop, ended);
    assert_eq!(source.survivor, Survivor::Ended);
    assert_eq!(aborted(&destination), Some(AbortCode::Machine), "{destination}");
}

/// A migration to `to`, which the operator cancels after a while.
fn cancelled_while_connecting(to: Address) -> Failure {
    let mut source = Source::start(LIMIT, Vec::new());
    let cancel = Cancel::default();
    let handle = MigrationHandle::new(Settings::default(), Own::default(), cancel.clone());
    let canceller = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        cancel.cancel();
    });
    let failure = migrate(&mut source, &Options { to, ..options(2, false) }, &handle, &mut |_| {});
    canceller.join().unwrap();
    assert!(source.running.load(Ordering::Relaxed) && !source.retired);
    failure.unwrap_err()
}

#[test]
fn a_wish_to_cancel_is_heard_while_a_destination_says_nothing() {
    // Mutation: the connection is made in this thread. Then it is a greeting that did not come.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let failure = cancelled_while_connecting(to.parse().unwrap());
    assert!(matches!(failure.cause, EngineError::Cancelled), "{failure}");
}

#[test]
fn a_wish_to_cancel_is_heard_while_a_source_says_nothing() {
    // Mutation: a greeting is waited for without looking. Then waiting goes on for a source.
    let mut destination = Destination::of(&Source::start(Duration::ZERO, Vec::new()));
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let silent = Stream::connect(&to).unwrap();
    let cancel = Cancel::default();
    let wish = cancel.clone();
    let canceller = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        wish.cancel();
    });
    let mut refused = Vec::new();
    let options = destination::Options::default();
    let failure =
        receive(&mut destination, &listener, &options, &cancel, &mut |it| refused.push(it.clone()))
            .unwrap_err();
    canceller.join().unwrap();
    drop(silent);
    assert!(matches!(failure.cause, EngineError::Cancelled), "{failure}");
    assert!(refused.is_empty(), "the greeting's own limit ended it: {refused:?}");
}
