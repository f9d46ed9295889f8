//! Passing the device state on: from the machine's stream to the control connection, piece by
//! piece.
//!
//! Invariants: while the relay is held nothing is sent, so that no device state that was saved
//! from the stopped guest comes before the end of the last round. The destination takes both in the
//! order in which they come. And the machine's stream is read all the while: QEMU saves its devices
//! with its own lock held, and until that is done its monitor may answer nothing, not even the
//! command that had it begin.

use std::io::{self, Read};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use godwit_units::ByteCount;
use godwit_wire::{DEVICE_STATE_CHUNK, Message};

use super::session::Event;
use crate::cells::Cell;
use crate::link::ControlWriter;
use crate::{EngineError, threads};

/// What is read ahead at most, in bytes: far more than the devices of any machine without VFIO
/// have to say (some 20 KiB for each vCPU), and no burden to the host.
const READ_AHEAD: usize = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Open,
    Held,
    Ended,
}

/// What is between the reader and the sender.
struct Passage {
    flow: Flow,
    /// Read and not yet sent.
    read: Vec<u8>,
    /// How the stream ended, when it did.
    end: Option<io::Result<()>>,
}

/// What the two threads share with their owner.
struct Shared {
    passage: Mutex<Passage>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Passage> {
        self.passage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the passage is as `blocks` says.
    fn wait_while(&self, blocks: impl FnMut(&mut Passage) -> bool) -> MutexGuard<'_, Passage> {
        self.changed.wait_while(self.lock(), blocks).unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads that pass the device state on. They end with the stream.
pub(super) struct StateRelay {
    threads: [JoinHandle<()>; 2],
    shared: Arc<Shared>,
}

impl StateRelay {
    pub(super) fn start(
        mut stream: Box<dyn Read + Send>,
        control: Arc<ControlWriter>,
        (events, cell): (Sender<Event>, Cell),
    ) -> Result<Self, EngineError> {
        let passage = Passage { flow: Flow::Open, read: Vec::new(), end: None };
        let shared = Arc::new(Shared { passage: Mutex::new(passage), changed: Condvar::new() });
        let (of_reader, of_sender) = (Arc::clone(&shared), Arc::clone(&shared));
        let reader = threads::start("state-read", move || read_all(&mut stream, &of_reader))?;
        let sender = threads::start("state", move || {
            let result = cell.enter().and_then(|_| pass_on(&of_sender, &control));
            if result.is_err() {
                of_sender.lock().flow = Flow::Ended;
                of_sender.changed.notify_all();
            }
            let _ = events.send(Event::StatePassed(result));
        });
        match sender {
            Ok(sender) => Ok(Self { threads: [reader, sender], shared }),
            Err(error) => {
                shared.lock().flow = Flow::Ended;
                shared.changed.notify_all();
                Err(error)
            }
        }
    }

    /// Sends nothing from now on.
    pub(super) fn hold(&self) {
        self.set(Flow::Held);
    }

    /// Sends what was held back, and all that follows.
    pub(super) fn open(&self) {
        self.set(Flow::Open);
    }

    /// Drops what was held back.
    pub(super) fn end(&self) {
        self.set(Flow::Ended);
    }

    fn set(&self, state: Flow) {
        let mut passage = self.shared.lock();
        if passage.flow != Flow::Ended {
            passage.flow = state;
        }
        self.shared.changed.notify_all();
    }

    pub(super) fn join(self) {
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

/// Reads the stream to its end, or until nobody wants it.
fn read_all(stream: &mut dyn Read, shared: &Shared) {
    let mut buffer = vec![0; DEVICE_STATE_CHUNK];
    loop {
        let read = stream.read(&mut buffer);
        // Limited by the last round, which either opens the relay or ends the migration.
        let mut passage = shared
            .wait_while(|passage| passage.read.len() >= READ_AHEAD && passage.flow != Flow::Ended);
        if passage.flow == Flow::Ended {
            return;
        }
        match read {
            Ok(0) => passage.end = Some(Ok(())),
            Ok(count) => passage.read.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => passage.end = Some(Err(error)),
        }
        shared.changed.notify_all();
        if passage.end.is_some() {
            return;
        }
    }
}

fn pass_on(shared: &Shared, control: &ControlWriter) -> Result<ByteCount, EngineError> {
    let mut total = ByteCount::ZERO;
    loop {
        let mut passage = shared.wait_while(|passage| match passage.flow {
            Flow::Open => passage.read.is_empty() && passage.end.is_none(),
            Flow::Held => true,
            Flow::Ended => false,
        });
        if passage.flow == Flow::Ended {
            return Err(EngineError::State(io::ErrorKind::Interrupted.into()));
        }
        let read = std::mem::take(&mut passage.read);
        if read.is_empty() {
            return match passage.end.take() {
                Some(Err(error)) => Err(EngineError::State(error)),
                _ => Ok(total),
            };
        }
        shared.changed.notify_all();
        drop(passage);
        for piece in read.chunks(DEVICE_STATE_CHUNK) {
            control.send(&Message::DeviceState(piece.to_vec()))?;
            total += ByteCount(piece.len() as u64);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use godwit_confine::Rights;

    use super::*;
    use crate::address::Stream;
    use crate::link::FrameReader;

    /// No test gets near it.
    const LIMIT: Duration = Duration::from_secs(60);

    /// A relay, its machine's end and the destination's.
    fn relay() -> (StateRelay, UnixStream, UnixStream, std::sync::mpsc::Receiver<Event>) {
        let (machine, stream) = UnixStream::pair().unwrap();
        let (control, destination) = UnixStream::pair().unwrap();
        destination.set_read_timeout(Some(LIMIT)).unwrap();
        machine.set_write_timeout(Some(LIMIT)).unwrap();
        let control = ControlWriter::new(Stream::from(control), "destination").unwrap();
        let (events, ended) = channel();
        let cell = crate::cells::Cells::new(false, "the destination").unwrap().with(Rights::NONE);
        let relay = StateRelay::start(Box::new(stream), Arc::new(control), (events, cell)).unwrap();
        (relay, machine, destination, ended)
    }

    #[test]
    fn a_machine_that_is_held_back_can_say_all_it_has() {
        let (relay, mut machine, mut destination, ended) = relay();
        relay.hold();
        let state: Vec<u8> = (0..4_u32 << 20).map(|at| (at >> 8) as u8).collect();

        // Nobody reads the destination's end: this ends because the relay reads ahead.
        machine.write_all(&state).unwrap();
        drop(machine);
        destination.set_nonblocking(true).unwrap();
        let sent = destination.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(sent, Err(io::ErrorKind::WouldBlock));

        destination.set_nonblocking(false).unwrap();
        relay.open();
        let mut frames = FrameReader::new(Stream::from(destination), "source");
        let mut arrived = Vec::new();
        while arrived.len() < state.len() {
            match frames.message().unwrap() {
                Message::DeviceState(piece) => arrived.extend(piece),
                other => panic!("{other:?}"),
            }
        }
        assert!(arrived == state);
        match ended.recv_timeout(LIMIT).unwrap() {
            Event::StatePassed(passed) => assert_eq!(passed.unwrap().0, state.len() as u64),
            _ => panic!("another event"),
        }
        relay.join();
    }

    #[test]
    fn what_is_held_back_is_dropped_when_nobody_wants_it() {
        let (relay, mut machine, mut destination, ended) = relay();
        relay.hold();
        machine.write_all(&[7; 100]).unwrap();

        relay.end();
        let passed = ended.recv_timeout(LIMIT).unwrap();

        assert!(matches!(passed, Event::StatePassed(Err(EngineError::State(_)))));
        drop(machine);
        relay.join();
        assert_eq!(destination.read(&mut [0]).unwrap(), 0);
    }
}
