//! Starting threads: one that cannot be had is an error like any other.
//!
//! `std::thread::spawn` panics when the system refuses (pids.max, RLIMIT_NPROC, no memory for a
//! stack), which would end the process, perhaps with the guest stopped. A test of the code's shape
//! (`xtask`) keeps it out.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::{Builder, JoinHandle};

use godwit_units::parse_ranges;
use rustix::process::{Pid, getpriority_process, setpriority_process};
use rustix::thread::gettid;

use crate::EngineError;

/// How much nicer a thread is whose work nobody waits for, than one for which a guest stands still:
/// it gets about a third of the processor that both want (sched(7), setpriority(2)).
const NICER: i32 = 5;
/// The least priority.
const LEAST: i32 = 19;

/// How many threads work at once, at the most; one, where the system does not say.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// How many processors the host has, also those that this process keeps off; one, where the system
/// does not say.
pub(crate) fn processors_of_the_host() -> usize {
    // As cputopology.rst of Linux has it.
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online");
    online.ok().and_then(|ranges| count(&ranges)).unwrap_or(1)
}

fn count(ranges: &str) -> Option<usize> {
    let ranges = parse_ranges(ranges.trim()).ok()?;
    Some(ranges.into_iter().map(Iterator::count).sum())
}

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

/// A thread that may come to do what nobody waits for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Number(Arc<AtomicI32>);

impl Number {
    /// Of the calling thread.
    pub(crate) fn set(&self) {
        self.0.store(gettid().as_raw_nonzero().get(), Ordering::SeqCst);
    }

    /// From here on it yields to others of this host. That it may not is no reason to stop.
    pub(crate) fn yields(&self) {
        if let Some(thread) = Pid::from_raw(self.0.load(Ordering::SeqCst)) {
            yield_by(Some(thread));
        }
    }
}

/// From here on the calling thread yields to others of this host.
pub(crate) fn yields() {
    yield_by(None);
}

/// Linux has a priority for each thread (setpriority(2), "C library/kernel differences").
fn yield_by(thread: Option<Pid>) {
    let nicer = getpriority_process(thread).map(|now| (now + NICER).min(LEAST));
    if let Err(error) = nicer.and_then(|nicer| setpriority_process(thread, nicer)) {
        tracing::debug!(%error, "a thread goes on as it is");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_thread_yields_and_no_other_does() {
        // Mutation: the process yields.
        let before = getpriority_process(None).unwrap();
        let (number, (told, hears)) = (Number::default(), mpsc::channel::<()>());
        let (numbered, set) = mpsc::channel();
        let own = number.clone();
        let thread = start("yields", move || {
            own.set();
            numbered.send(()).unwrap();
            hears.recv().unwrap();
            getpriority_process(None).unwrap()
        });
        set.recv().unwrap();
        number.yields();
        told.send(()).unwrap();
        assert_eq!(thread.unwrap().join().unwrap(), (before + NICER).min(LEAST));
        assert_eq!(getpriority_process(None).unwrap(), before);
        // One that has not begun is left alone.
        Number::default().yields();
        assert_eq!(getpriority_process(None).unwrap(), before);
    }

    #[test]
    fn processors_are_counted_by_ranges() {
        for (ranges, many) in
            [("0\n", Some(1)), ("0-3,8\n", Some(5)), ("0-1,4-127", Some(126)), ("", None)]
        {
            assert_eq!(count(ranges), many, "{ranges}");
        }
        assert_eq!(count("3-0"), None);
        assert!(processors_of_the_host() >= processors());
    }
}
