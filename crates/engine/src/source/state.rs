//! Passing the device state on: from the machine's stream to the control connection, piece by piece.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use godwit_units::ByteCount;
use godwit_wire::{DEVICE_STATE_CHUNK, Message};

use super::Event;
use crate::EngineError;
use crate::link::ControlWriter;

/// The thread that passes the device state on. It ends with the stream.
pub(super) struct StatePump {
    thread: JoinHandle<()>,
}

impl StatePump {
    pub(super) fn start(
        mut stream: Box<dyn Read + Send>,
        control: Arc<ControlWriter>,
        events: Sender<Event>,
    ) -> Self {
        let thread = std::thread::spawn(move || {
            let result = pass_on(&mut stream, &control);
            let _ = events.send(Event::StatePassed(result));
        });
        Self { thread }
    }

    pub(super) fn join(self) {
        let _ = self.thread.join();
    }
}

fn pass_on(stream: &mut dyn Read, control: &ControlWriter) -> Result<ByteCount, EngineError> {
    let mut buffer = vec![0; DEVICE_STATE_CHUNK];
    let mut total = ByteCount::ZERO;
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(total),
            Ok(n) => {
                control.send(&Message::DeviceState(buffer[..n].to_vec()))?;
                total += ByteCount(n as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(EngineError::State(error)),
        }
    }
}
