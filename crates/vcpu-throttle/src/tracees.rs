//! The traced threads: all stopped, all continued, all let go.
//!
//! Invariants: no signal is lost, each is delivered when its thread runs on; a thread that is
//! stopped with its whole process stays so; nobody is waited for without a limit, since a thread
//! may be in a wait of the kernel that nothing interrupts. Such a thread does not run either, and
//! stops on its way out.

use std::io;
use std::time::{Duration, Instant};

use crate::ThrottleError;
use crate::sys::{self, Seen};
use crate::time::thread_time;

/// To let go of a running thread it has to stop for a moment. What does not is let go when the
/// tracer ends.
const RELEASE_LIMIT: Duration = Duration::from_millis(100);
/// Threads whose time is asked for in every period, at the most.
const SOME: usize = 8;
/// Between two looks at threads that are about to stop: about what it takes them.
pub(crate) const SOON: Duration = Duration::from_micros(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It runs as far as is known, or was told to stop and has not yet.
    Loose,
    /// Stopped by us. The signal waits to be delivered, 0 for none.
    Held(libc::c_int),
    /// Stopped with its process, by someone else.
    Listening,
}

#[derive(Debug)]
struct Tracee {
    tid: i32,
    state: State,
}

/// Threads of one process, traced by the calling thread; dropping lets go of them.
#[derive(Debug)]
pub(crate) struct Tracees {
    pid: i32,
    threads: Vec<Tracee>,
}

impl Tracees {
    /// No threads.
    pub(crate) fn none(pid: i32) -> Self {
        Self { pid, threads: Vec::new() }
    }

    /// Becomes the tracer of `tids`, all or none. They run on.
    pub(crate) fn seize(pid: i32, tids: &[i32]) -> Result<Self, ThrottleError> {
        let mut tracees = Self::none(pid);
        for &tid in tids {
            // The number of another process's thread would be a mistake that stops a stranger.
            if sys::tracer_of(pid, tid).is_none() {
                continue;
            }
            match sys::seize(tid) {
                Ok(()) => tracees.threads.push(Tracee { tid, state: State::Loose }),
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                    match sys::tracer_of(pid, tid) {
                        // It has ended in between.
                        None => {}
                        Some(0) => return Err(ThrottleError::NotPermitted { pid }),
                        Some(tracer) => return Err(ThrottleError::Traced { pid, tid, tracer }),
                    }
                }
                Err(source) => {
                    return Err(ThrottleError::System { pid, step: "PTRACE_SEIZE", source });
                }
            }
        }
        tracees.check_alive()?;
        Ok(tracees)
    }

    /// Fails when no thread is left.
    pub(crate) fn check_alive(&self) -> Result<(), ThrottleError> {
        if self.threads.is_empty() { Err(ThrottleError::Gone { pid: self.pid }) } else { Ok(()) }
    }

    /// Tells all that run to stop.
    pub(crate) fn interrupt(&self) -> Result<(), ThrottleError> {
        let loose = self.threads.iter().filter(|thread| thread.state == State::Loose);
        loose
            .map(|thread| sys::interrupt(thread.tid))
            .try_for_each(unless_gone)
            .map_err(self.failed("PTRACE_INTERRUPT"))
    }

    /// Whether all have stopped, by us or with their process.
    pub(crate) fn all_stopped(&self) -> bool {
        self.threads.iter().all(|thread| thread.state != State::Loose)
    }

    /// The CPU time of the first few threads, which stand for all; of one that runs it may be older
    /// than now.
    pub(crate) fn times(&self) -> Vec<(i32, Duration)> {
        let some = self.threads.iter().take(SOME);
        some.filter_map(|thread| Some((thread.tid, thread_time(self.pid, thread.tid)?))).collect()
    }

    /// Takes note of what happened to the threads. One that has stopped is held if that is wanted,
    /// and else goes on. Whether anything had happened.
    pub(crate) fn look(&mut self, hold: bool) -> Result<bool, ThrottleError> {
        let pid = self.pid;
        let failed = |step| move |source| ThrottleError::System { pid, step, source };
        let mut news = false;
        let mut ended = Vec::new();
        for thread in
            self.threads.iter_mut().filter(|thread| !matches!(thread.state, State::Held(_)))
        {
            let seen = sys::peek(thread.tid).map_err(failed("waitid"))?;
            let signal = match seen {
                Seen::Nothing => continue,
                Seen::Ended => {
                    ended.push(thread.tid);
                    continue;
                }
                Seen::GroupStop => {
                    thread.state = State::Listening;
                    unless_gone(sys::listen(thread.tid)).map_err(failed("PTRACE_LISTEN"))?;
                    continue;
                }
                Seen::Trap => 0,
                Seen::Signal(signal) => signal,
            };
            news = true;
            // Any stop is as good as the one that was asked for, and cancels that (kernel/signal.c,
            // ptrace_stop: "any trap clears pending STOP trap"). So a thread that stops for a
            // signal is held there, with the signal.
            thread.state = if hold { State::Held(signal) } else { State::Loose };
            if !hold {
                unless_gone(sys::go_on(thread.tid, signal)).map_err(failed("PTRACE_CONT"))?;
            }
        }
        ended.iter().for_each(|&tid| sys::reap(tid));
        self.threads.retain(|thread| !ended.contains(&thread.tid));
        Ok(news)
    }

    /// Lets all run on that are held.
    pub(crate) fn go_on(&mut self) -> Result<(), ThrottleError> {
        let mut result = Ok(());
        for thread in &mut self.threads {
            if let State::Held(signal) = thread.state {
                thread.state = State::Loose;
                // One that fails must not keep the others.
                result = result.and(unless_gone(sys::go_on(thread.tid, signal)));
            }
        }
        result.map_err(self.failed("PTRACE_CONT"))
    }

    /// Lets go of all. Those that are held go at once, the others when they have stopped for a
    /// moment.
    fn release(&mut self) {
        self.threads.retain(|thread| match thread.state {
            State::Held(signal) => sys::detach(thread.tid, signal).is_err(),
            State::Loose | State::Listening => true,
        });
        let until = Instant::now() + RELEASE_LIMIT;
        for thread in &self.threads {
            // A thread that is stopped with its process tells so once more.
            let _ = sys::interrupt(thread.tid);
        }
        loop {
            self.threads.retain(|thread| match sys::peek(thread.tid) {
                Ok(Seen::Nothing) => true,
                Ok(Seen::Trap | Seen::GroupStop) => sys::detach(thread.tid, 0).is_err(),
                Ok(Seen::Signal(signal)) => sys::detach(thread.tid, signal).is_err(),
                Ok(Seen::Ended) => {
                    sys::reap(thread.tid);
                    false
                }
                Err(_) => false,
            });
            if self.threads.is_empty() || Instant::now() > until {
                return;
            }
            std::thread::sleep(SOON);
        }
    }

    fn failed(&self, step: &'static str) -> impl Fn(io::Error) -> ThrottleError + use<> {
        let pid = self.pid;
        move |source| ThrottleError::System { pid, step, source }
    }
}

impl Drop for Tracees {
    fn drop(&mut self) {
        self.release();
    }
}

/// A thread that has been killed is no failure: the next look finds out.
fn unless_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        other => other,
    }
}
