//! Passing the device state on: from the machine's stream to the control connection, piece by
//! piece.
//!
//! Invariant: while the link share is held nothing is sent, so that no device state that was saved
//! from the stopped guest comes before the end of the last round. The destination takes both in the
//! order in which they come.

use std::io::{self, Read};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use godwit_units::ByteCount;
use godwit_wire::{DEVICE_STATE_CHUNK, Message};

use super::Event;
use crate::link::ControlWriter;
use crate::{EngineError, threads};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinkShare {
    Open,
    Held,
    Ended,
}

/// The thread that passes the device state on. It ends with the stream.
pub(super) struct StateRelay {
    thread: JoinHandle<()>,
    link_share: Arc<(Mutex<LinkShare>, Condvar)>,
}

impl StateRelay {
    pub(super) fn start(
        mut stream: Box<dyn Read + Send>,
        control: Arc<ControlWriter>,
        events: Sender<Event>,
    ) -> Result<Self, EngineError> {
        let link_share = Arc::new((Mutex::new(LinkShare::Open), Condvar::new()));
        let own_gate = Arc::clone(&link_share);
        let thread = threads::start("state", move || {
            let result = pass_on(&mut stream, &control, &own_gate);
            let _ = events.send(Event::StatePassed(result));
        })?;
        Ok(Self { thread, link_share })
    }

    /// Sends nothing from now on.
    pub(super) fn hold(&self) {
        self.set(LinkShare::Held);
    }

    /// Sends what was held back, and all that follows.
    pub(super) fn open(&self) {
        self.set(LinkShare::Open);
    }

    /// Drops what was held back.
    pub(super) fn end(&self) {
        self.set(LinkShare::Ended);
    }

    fn set(&self, state: LinkShare) {
        let mut link_share = self.link_share.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *link_share != LinkShare::Ended {
            *link_share = state;
        }
        self.link_share.1.notify_all();
    }

    pub(super) fn join(self) {
        let _ = self.thread.join();
    }
}

fn pass_on(
    stream: &mut dyn Read,
    control: &ControlWriter,
    (link_share, changed): &(Mutex<LinkShare>, Condvar),
) -> Result<ByteCount, EngineError> {
    let mut buffer = vec![0; DEVICE_STATE_CHUNK];
    let mut total = ByteCount::ZERO;
    loop {
        let count = match stream.read(&mut buffer) {
            Ok(0) => return Ok(total),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(EngineError::State(error)),
        };
        let state = link_share.lock().unwrap_or_else(PoisonError::into_inner);
        // Limited by the last round, which either opens the link share or ends the migration.
        let state = changed
            .wait_while(state, |link_share| *link_share == LinkShare::Held)
            .unwrap_or_else(PoisonError::into_inner);
        if *state == LinkShare::Ended {
            return Err(EngineError::State(io::ErrorKind::Interrupted.into()));
        }
        drop(state);
        control.send(&Message::DeviceState(buffer[..count].to_vec()))?;
        total += ByteCount(count as u64);
    }
}
