//! What is heard while a machine takes its time: a wish to cancel, a peer that gives up, the end of
//! the machine.
#![allow(clippy::unwrap_used)]

mod machine;

use std::io::{Read, Write};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use godwit_engine::address::Listener;
use godwit_engine::destination::{self, receive};
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::source::{Options, migrate};
use godwit_engine::vm::{Ask, DestinationVm, DiskDestination, RunError, SourceVm, VmError};
use godwit_engine::{Cancel, EngineError, Failure, Survivor};
use godwit_memory::RamBlock;
use godwit_policy::Settings;
use godwit_track::DirtyTracker;
use godwit_wire::AbortCode;

use machine::{Destination, Source, options};

/// How long a machine that was told to hang does so when nobody ends it. No test gets near it.
const LIMIT: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_millis(20);

/// Pending for as long as [`LIMIT`]; what happens when it is asked first.
struct Hang {
    since: Option<Instant>,
    begins: Box<dyn FnMut() + Send>,
}

impl Hang {
    fn new(begins: impl FnMut() + Send + 'static) -> Self {
        Self { since: None, begins: Box::new(begins) }
    }

    fn poll<T>(&mut self) -> Result<Poll<T>, VmError> {
        let since = *self.since.get_or_insert_with(|| {
            (self.begins)();
            Instant::now()
        });
        std::thread::sleep(STEP);
        if since.elapsed() < LIMIT { Ok(Poll::Pending) } else { Err("nobody ended it".into()) }
    }
}

/// A source whose guest does not stop, where it is told to hang.
struct SlowSource {
    source: Source,
    hang: Option<Hang>,
    ended: Arc<Mutex<bool>>,
}

impl SourceVm for SlowSource {
    fn machine(&self) -> &'static str {
        self.source.machine()
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        self.source.ram()
    }

    fn was_running(&self) -> bool {
        self.source.was_running()
    }

    fn answer(&mut self, question: &[u8]) -> Result<Vec<u8>, VmError> {
        self.source.answer(question)
    }

    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError> {
        self.source.start_tracking()
    }

    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError> {
        self.source.open_state()
    }

    fn stop(&mut self) -> Result<Instant, VmError> {
        self.source.stop()
    }

    fn poll_stop(&mut self) -> Result<Poll<Instant>, VmError> {
        match &mut self.hang {
            Some(hang) => hang.poll(),
            None => self.stop().map(Poll::Ready),
        }
    }

    fn release_state(&mut self) -> Result<(), VmError> {
        self.source.release_state()
    }

    fn state_saved(&mut self) -> Result<(), VmError> {
        self.source.state_saved()
    }

    fn resume(&mut self) -> Result<(), VmError> {
        self.source.resume()
    }

    fn retire(&mut self, keep: bool) -> Result<(), VmError> {
        self.source.retire(keep)
    }

    fn has_ended(&self) -> bool {
        *self.ended.lock().unwrap()
    }
}

/// A destination that does not end loading, where it is told to hang.
struct SlowDestination {
    destination: Destination,
    hang: Option<Hang>,
}

impl DestinationVm for SlowDestination {
    fn machine(&self) -> &'static str {
        self.destination.machine()
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        self.destination.ram()
    }

    fn compare(&mut self, ask: &mut Ask<'_>) -> Result<(), VmError> {
        self.destination.compare(ask)
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        self.destination.prepare()
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        self.destination.finish_load()
    }

    fn poll_load(&mut self) -> Result<Poll<()>, VmError> {
        match &mut self.hang {
            Some(hang) => hang.poll(),
            None => self.finish_load().map(Poll::Ready),
        }
    }

    fn run(&mut self) -> Result<(), RunError> {
        self.destination.run()
    }

    fn announce(&mut self) -> Result<(), VmError> {
        self.destination.announce()
    }

    fn discard(&mut self) -> Result<(), VmError> {
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
    machine: Arc<Mutex<bool>>,
}

/// A migration in which one machine hangs; what became of both sides. The guest must run at the
/// source.
fn fail(ends: &Ends, stop: Option<Hang>, load: Option<Hang>) -> (Failure, Failure) {
    let source = Source::start(LIMIT, Vec::new());
    let destination = Destination::of(&source);
    let mut source = SlowSource { source, hang: stop, ended: Arc::clone(&ends.machine) };
    let mut destination = SlowDestination { destination, hang: load };
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
    assert!(began.elapsed() < LIMIT, "it was not heard: {failure}");
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
fn a_wish_to_cancel_is_heard_while_the_guest_is_being_stopped() {
    // Mutation: `heed` is left out of the wait for the stop.
    let ends = Ends::default();
    let cancel = ends.source.clone();
    let (source, destination) = fail(&ends, Some(Hang::new(move || cancel.cancel())), None);
    assert!(matches!(source.cause, EngineError::Cancelled), "{source}");
    assert_eq!(source.survivor, Survivor::Source);
    assert_eq!(aborted(&destination), Some(AbortCode::Cancelled), "{destination}");
}

#[test]
fn a_destination_that_gives_up_is_heard_while_the_guest_is_being_stopped() {
    let ends = Ends::default();
    let cancel = ends.destination.clone();
    let (source, destination) = fail(&ends, Some(Hang::new(move || cancel.cancel())), None);
    assert_eq!(aborted(&source), Some(AbortCode::Cancelled), "{source}");
    assert_eq!(source.survivor, Survivor::Source);
    assert!(matches!(destination.cause, EngineError::Cancelled), "{destination}");
}

#[test]
fn the_end_of_the_machine_is_heard_while_the_guest_is_being_stopped() {
    let ends = Ends::default();
    let machine = Arc::clone(&ends.machine);
    let hang = Hang::new(move || *machine.lock().unwrap() = true);
    let (source, destination) = fail(&ends, Some(hang), None);
    assert!(matches!(source.cause, EngineError::Ended("source")), "{source}");
    assert_eq!(source.survivor, Survivor::Ended);
    assert_eq!(aborted(&destination), Some(AbortCode::Machine), "{destination}");
}

#[test]
fn a_wish_to_cancel_is_heard_while_the_state_is_loaded() {
    // Mutation: `heed` is left out of the wait for the load.
    let ends = Ends::default();
    let cancel = ends.destination.clone();
    let (source, destination) = fail(&ends, None, Some(Hang::new(move || cancel.cancel())));
    assert!(matches!(destination.cause, EngineError::Cancelled), "{destination}");
    assert_eq!(aborted(&source), Some(AbortCode::Cancelled), "{source}");
    assert_eq!(source.survivor, Survivor::Source);
}

#[test]
fn a_source_that_gives_up_is_heard_while_the_state_is_loaded() {
    let ends = Ends::default();
    let cancel = ends.source.clone();
    let (source, destination) = fail(&ends, None, Some(Hang::new(move || cancel.cancel())));
    assert!(matches!(source.cause, EngineError::Cancelled), "{source}");
    assert_eq!(source.survivor, Survivor::Source);
    assert_eq!(aborted(&destination), Some(AbortCode::Cancelled), "{destination}");
}
