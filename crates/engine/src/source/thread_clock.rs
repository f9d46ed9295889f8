//! What a thread did with its time.
//!
//! A thread that is not at work either waits for something (the link, a disk) or for a processor.
//! On a host with more to do than processors the second looks like a slow link, unless it is told
//! apart: the kernel counts it (`/proc/PID/schedstat`, the second number, in nanoseconds;
//! Documentation/scheduler/sched-stats.rst).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::thread::{Pid, gettid};

/// The clocks of the thread that began last.
#[derive(Debug, Default)]
pub(super) struct ThreadClock {
    thread: Option<Pid>,
    schedstat: Option<File>,
    last: Option<Reading>,
}

#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Instant,
    cpu: Duration,
    queued: Duration,
}

/// Of the time between two readings.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spent {
    /// All of it but what the thread waited for a processor.
    pub(super) elapsed: Duration,
    /// Its processor time. The rest it waited for something else.
    pub(super) cpu: Duration,
    /// What it waited for a processor; nothing where the kernel does not tell.
    pub(super) queued: Duration,
}

impl ThreadClock {
    /// Begins to measure the calling thread.
    pub(super) fn begin(&mut self) {
        let thread = Some(gettid());
        if self.thread != thread {
            self.thread = thread;
            // A kernel without it: the thread then waits for the link longer than it does.
            self.schedstat = File::open("/proc/thread-self/schedstat").ok();
        }
        self.last = Some(self.read());
    }

    /// What the calling thread, which began, spent since it was asked last.
    pub(super) fn lap(&mut self) -> Spent {
        debug_assert!(self.thread.is_none_or(|it| it == gettid()), "another thread began");
        let now = self.read();
        let Some(last) = self.last.replace(now) else { return Spent::default() };
        let queued = now.queued.saturating_sub(last.queued);
        Spent {
            elapsed: now.at.saturating_duration_since(last.at).saturating_sub(queued),
            cpu: now.cpu.saturating_sub(last.cpu),
            queued,
        }
    }

    fn read(&self) -> Reading {
        Reading {
            at: Instant::now(),
            cpu: processor_time(),
            queued: self.queued().unwrap_or_default(),
        }
    }

    /// How long the thread has waited for a processor, in all.
    fn queued(&self) -> Option<Duration> {
        let mut text = [0; 64];
        let length = self.schedstat.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(&text[..length]).ok()?;
        Some(Duration::from_nanos(text.split_whitespace().nth(1)?.parse().ok()?))
    }
}

/// The processor time that the calling thread has had (clock_gettime(2),
/// CLOCK_THREAD_CPUTIME_ID).
pub(super) fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_neither_works_nor_queues() {
        let mut clock = ThreadClock::default();
        assert!(clock.lap().elapsed.is_zero(), "it has not begun");
        clock.begin();
        std::thread::sleep(Duration::from_millis(30));
        let slept = clock.lap();
        assert!(
            slept.elapsed + clock.queued().unwrap_or_default() >= Duration::from_millis(30),
            "{slept:?}"
        );
        assert!(slept.cpu < Duration::from_millis(10), "{slept:?}");
    }

    #[test]
    fn waiting_for_a_processor_is_told_apart() {
        if !std::path::Path::new("/proc/thread-self/schedstat").exists() {
            // Not eprintln: the test harness would hold that back.
            let words =
                "\nSKIPPED waiting_for_a_processor_is_told_apart: this kernel does not count it\n";
            let _ = std::io::Write::write_all(&mut std::io::stderr(), words.as_bytes());
            return;
        }
        // More threads than there are processors.
        let count = 3 * std::thread::available_parallelism().map_or(8, std::num::NonZero::get);
        let queued = std::thread::scope(|scope| {
            let busy = || {
                let mut clock = ThreadClock::default();
                // Mutation: the clock goes on with the thread in which it began first.
                std::thread::scope(|scope| scope.spawn(|| clock.begin()).join().unwrap());
                clock.begin();
                let began = Instant::now();
                while began.elapsed() < Duration::from_millis(200) {
                    std::hint::spin_loop();
                }
                let (all, spent) = (began.elapsed(), clock.lap());
                // It did nothing but work: what it did not get of a processor it queued for one.
                assert!(spent.elapsed <= spent.cpu + all / 4, "{spent:?} of {all:?}");
                all.saturating_sub(spent.elapsed)
            };
            let threads: Vec<_> = (0..count).map(|_| scope.spawn(busy)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<Duration>()
        });
        assert!(queued > Duration::from_millis(100), "{queued:?}");
    }
}
