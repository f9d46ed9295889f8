//! Telling the destination that it is over, without holding up the guest.
//!
//! The thread is there before the guest is stopped: when the guest is to be brought back, nothing
//! has to be had first that the system could refuse. The word goes out beside the way back and not
//! after it, since a destination that has loaded the guest may hold the locks of its disks.

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Instant;

use godwit_wire::Message;

use crate::link::ControlWriter;
use crate::{EngineError, limits, threads};

/// A thread that waits for the last word.
pub(super) struct Aborter {
    word: Sender<Message>,
    thread: JoinHandle<()>,
}

impl Aborter {
    pub(super) fn start(control: Arc<ControlWriter>) -> Result<Self, EngineError> {
        let (word, words) = mpsc::channel();
        let thread = threads::start("abort", move || {
            if let Ok(message) = words.recv() {
                let _ = control.send(&message);
            }
        })?;
        Ok(Self { word, thread })
    }

    /// Has `message` sent. Does not wait: a link that is stuck must not hold up the guest.
    pub(super) fn say(&self, message: Message) {
        let _ = self.word.send(message);
    }

    /// Waits until what was said is on its way, for [`limits::ABORT`] at the most.
    pub(super) fn end(self) {
        drop(self.word);
        let until = Instant::now() + limits::ABORT;
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(limits::TICK / 100);
        }
    }
}
