//! The thread that answers: takes messages, asks the queue, lifts protection.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use godwit_units::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Shared;
use super::queue::{Grant, Queue};
use super::writers::{Writer, Writers};
use crate::attach::become_punctual;
use crate::uapi;

/// The handler shows that it is alive at least this often.
const BEAT: Duration = Duration::from_millis(10);
/// A wait shorter than this is not one for the rate.
const AT_ONCE: Duration = Duration::from_micros(20);

/// Answers until it is over or the process has ended.
pub(super) fn run(shared: &Shared) {
    become_punctual();
    let mut writers = Writers::default();
    let mut queue = Queue::new();
    let (mut generation, mut rate) = (u64::MAX, f64::INFINITY);
    while !shared.is_over() {
        shared.beat.store(shared.now().as_millis() as u64, Ordering::Relaxed);
        #[cfg(feature = "test-hooks")]
        std::thread::sleep(Duration::from_millis(shared.stall.swap(0, Ordering::Relaxed)));
        let given = shared.generation.load(Ordering::Acquire);
        if given != generation {
            generation = given;
            let vcpus = shared.vcpus.lock().unwrap_or_else(PoisonError::into_inner).clone();
            writers = Writers::new(shared.pid, &vcpus);
        }
        let wanted = f64::from_bits(shared.rate.load(Ordering::Relaxed));
        if wanted != rate {
            rate = wanted;
            queue.set_rate(rate, shared.now());
        }
        if !take(shared, &mut writers, &mut queue) {
            return;
        }
        while let Some(grant) = queue.next(shared.now(), |address| shared.room(address)) {
            count(shared, grant);
            if !answer(shared, grant.address, grant.pages) {
                return;
            }
        }
        sleep(shared, queue.pause(shared.now()).unwrap_or(BEAT).min(BEAT));
    }
    // Who still waits is woken when the descriptor is closed.
}

/// Takes all messages: what the machine itself wants it gets at once. False when the process has
/// ended.
fn take(shared: &Shared, writers: &mut Writers, queue: &mut Queue) -> bool {
    let mut alive = true;
    loop {
        let read = uapi::uffd_read(shared.uffd(), |fault| {
            let address = fault.address & !(PAGE_SIZE - 1);
            match writers.of(fault.thread) {
                Writer::Guest(writer) => queue.push(writer, address, shared.now()),
                Writer::Machine => {
                    shared.counts.others.fetch_add(1, Ordering::Relaxed);
                    alive &= answer(shared, address, 1);
                }
            }
        });
        match read {
            Ok(true) => {}
            Ok(false) => return alive,
            Err(_) => return false,
        }
    }
}

/// Lifts the protection of `pages` from `address` on and wakes who waits there. False when the
/// process has ended.
pub(super) fn answer(shared: &Shared, address: u64, pages: u64) -> bool {
    let lift = |pages| uapi::uffd_write_protect(shared.uffd(), address, pages * PAGE_SIZE, false);
    let lifted = lift(pages).or_else(|error| if pages > 1 { lift(1) } else { Err(error) });
    match lifted {
        Ok(()) => true,
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => false,
        // The page is not the governor's any more: whoever took it back has woken all who waited.
        // To wake nobody does no harm, and who is not helped by it comes back with a new message.
        Err(_) => uapi::uffd_wake(shared.uffd(), address, PAGE_SIZE).is_ok() || !gone(shared),
    }
}

fn gone(shared: &Shared) -> bool {
    let error = uapi::uffd_read(shared.uffd(), |_| {}).err();
    error.as_ref().and_then(io::Error::raw_os_error) == Some(libc::ESRCH)
}

fn count(shared: &Shared, grant: Grant) {
    let counts = &shared.counts;
    counts.dirtied.fetch_add(grant.pages, Ordering::Relaxed);
    if grant.waited > AT_ONCE {
        let waited = grant.waited.as_nanos() as u64;
        counts.delayed.fetch_add(1, Ordering::Relaxed);
        counts.waited.fetch_add(waited, Ordering::Relaxed);
        counts.longest.fetch_max(waited, Ordering::Relaxed);
    }
}

/// Sleeps for `time` at the most, or until there is a message or an order.
fn sleep(shared: &Shared, time: Duration) {
    let timeout = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    let uffd = shared.uffd();
    let mut wanted = [PollFd::new(&uffd, PollFlags::IN), PollFd::new(&shared.bell, PollFlags::IN)];
    let _ = poll(&mut wanted, Some(&timeout));
    if wanted[1].revents().contains(PollFlags::IN) {
        let _ = rustix::io::read(&shared.bell, &mut [0; 8]);
    }
}
