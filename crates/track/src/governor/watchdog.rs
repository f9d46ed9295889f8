//! The thread that stands in for a handler which makes no progress: no guest waits for a bug, or a
//! processor, of ours.
//!
//! It wakes everybody. Where the protection still stands they fault again, and are answered from
//! here without a limit until the handler is back. No protection is lifted that nobody asked for,
//! so no write is lost.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Shared;
use super::handler::answer;
use crate::attach::become_punctual;
use crate::uapi;

/// How long the handler may be silent.
pub(super) const PATIENCE: Duration = Duration::from_millis(50);
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Looks after the handler until it is over.
pub(super) fn run(shared: &Shared) {
    become_punctual();
    while !shared.is_over() {
        std::thread::sleep(LOOK);
        let beat = shared.beat.load(Ordering::Relaxed);
        let silent = shared.now().saturating_sub(Duration::from_millis(beat));
        if silent > PATIENCE && !stand_in(shared, beat) {
            return;
        }
    }
}

/// Answers until the handler does again. False when the process has ended.
fn stand_in(shared: &Shared, beat: u64) -> bool {
    shared.counts.takeovers.fetch_add(1, Ordering::Relaxed);
    for stretch in &shared.memory {
        if uapi::uffd_wake(shared.uffd(), stretch.start, stretch.end - stretch.start).is_err() {
            return false;
        }
    }
    while !shared.is_over() && shared.beat.load(Ordering::Relaxed) == beat {
        let mut alive = true;
        let read = uapi::uffd_read(shared.uffd(), |fault| {
            alive &= answer(shared, fault.address & !4095, 1)
        });
        if read.is_err() || !alive {
            return false;
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(LOOK.subsec_nanos()) };
        let _ = poll(&mut [PollFd::new(&shared.uffd(), PollFlags::IN)], Some(&timeout));
    }
    true
}
