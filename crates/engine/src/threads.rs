//! Starting threads: one that cannot be had is an error like any other.
//!
//! `std::thread::spawn` panics when the system refuses (pids.max, RLIMIT_NPROC, no memory for a
//! stack), which would end the process, perhaps with the guest stopped. A test of the code's shape
//! (`xtask`) keeps it out.

use std::thread::{Builder, JoinHandle};

use crate::EngineError;

/// Starts `run` in a thread called `name`.
pub(crate) fn start<T: Send + 'static>(
    name: &'static str,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, EngineError> {
    Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(|source| EngineError::Thread { name, source })
}
