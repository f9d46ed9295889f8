//! Slowing the guest from within: a thread that holds the vCPUs and lets them go, in periods of 10
//! ms and more.
//!
//! Invariant: nobody is held when the thread has ended, however it ended: whoever holds lets go
//! when dropped.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_vcpu_throttle::{Slices, become_punctual};

/// Holds all vCPUs and lets them go; lets them go when it is dropped.
pub(crate) trait Hold: Send + 'static {
    /// Has all vCPUs wait outside of the guest. Does not wait for them.
    fn hold(&self);

    /// Lets them enter the guest again.
    fn free(&self);
}

/// The thread; dropping it ends it and lets the vCPUs run.
#[derive(Debug)]
pub(crate) struct Throttle {
    /// Closed at the end.
    slices: Option<Sender<Slices>>,
    thread: Option<JoinHandle<()>>,
}

impl Throttle {
    pub(crate) fn start(vcpus: impl Hold, first: Slices) -> std::io::Result<Self> {
        let (slices, changes) = mpsc::channel();
        let run = move || {
            become_punctual();
            let mut slices = first;
            loop {
                let held = Instant::now();
                vcpus.hold();
                // New slices take effect at once.
                while let Some(left) = left(held, slices.stop) {
                    match changes.recv_timeout(left) {
                        Ok(new) => slices = new,
                        Err(RecvTimeoutError::Timeout) => {}
                        Err(RecvTimeoutError::Disconnected) => return,
                    }
                }
                vcpus.free();
                let freed = Instant::now();
                while let Some(left) = left(freed, slices.run) {
                    match changes.recv_timeout(left) {
                        Ok(new) => slices = new,
                        Err(RecvTimeoutError::Timeout) => {}
                        Err(RecvTimeoutError::Disconnected) => return,
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("throttle".to_owned()).spawn(run)?;
        Ok(Self { slices: Some(slices), thread: Some(thread) })
    }

    /// Changes the slices; whether there is still a thread that takes them.
    pub(crate) fn set(&self, slices: Slices) -> bool {
        self.slices.as_ref().is_some_and(|sender| sender.send(slices).is_ok())
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.slices = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What is left of `slice`, which began at `began`.
fn left(began: Instant, slice: Duration) -> Option<Duration> {
    slice.checked_sub(began.elapsed()).filter(|left| !left.is_zero())
}
