//! Hint against write against harvest: every interleaving, and every outcome that the memory model
//! allows.
//!
//! One page. The guest frees it, hints it, takes it back at once and writes to it; the device hears
//! of the hint at any time; the engine deals with the page once or twice while that goes on, and
//! once more when the guest stands still. The words are those of `godwit-bitmap`, whose one file
//! with atomics is compiled a second time with loom's. Each of the three conditions at the head of
//! the crate has a test that drops it and in which loom finds the lost page.

use loom::sync::Arc;
use loom::thread;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
}

#[allow(dead_code)]
#[path = "../../bitmap/src/atomic/words.rs"]
mod words;

use sync::{AtomicU64, Ordering};
use words::SharedWords;

const COMMAND: u64 = 2;

/// Which condition is dropped.
#[derive(Clone, Copy, PartialEq)]
enum Dropped {
    Nothing,
    /// The harvest that follows is not looked at.
    HarvestDecides,
    /// The command id is issued before tracking has begun anew.
    TrackedBeforeAsked,
    /// Hints are looked at each time.
    FirstTimeOnly,
}

struct World {
    /// What the guest has in the page; 0: nothing that it needs.
    content: AtomicU64,
    /// The destination's page.
    copy: AtomicU64,
    tracker: SharedWords,
    hinted: SharedWords,
    /// free_page_hint_cmd_id.
    command: AtomicU64,
    /// The command id that stands before the hint in the queue, with one added; 0: the queue is
    /// empty.
    queue: AtomicU64,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            content: AtomicU64::new(0),
            copy: AtomicU64::new(99),
            tracker: SharedWords::new(1),
            hinted: SharedWords::new(1),
            command: AtomicU64::new(0),
            queue: AtomicU64::new(0),
        })
    }

    fn write(&self, value: u64) {
        self.content.store(value, Ordering::Relaxed);
        self.tracker.set(0, 1);
    }

    /// The guest: the page is free, so it is hinted, taken back and written at once.
    fn guest(&self) {
        let command = self.command.load(Ordering::Acquire);
        self.queue.store(command + 1, Ordering::Release);
        self.write(1);
    }

    /// The device looks at its queue.
    fn device(&self) {
        let queued = self.queue.load(Ordering::Acquire);
        if queued > 0 && queued - 1 == COMMAND && self.command.load(Ordering::Acquire) == COMMAND {
            self.hinted.set(0, 1);
        }
    }

    /// The engine deals with the page: all of memory if `everything`, or what is dirty.
    fn deal(&self, everything: bool, looks_at_hints: bool, dropped: Dropped) {
        let hinted = looks_at_hints && self.hinted.take(0, 1) != 0;
        let dirty = self.tracker.take(0, 1) != 0;
        if hinted && (!dirty || dropped == Dropped::HarvestDecides) {
            // Named as zero.
            self.copy.store(0, Ordering::Relaxed);
        } else if everything || dirty {
            self.copy.store(self.content.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// One migration; `put_off`: the segment is dealt with twice as a whole before the guest is
    /// stopped.
    fn migrate(dropped: Dropped, put_off: bool) {
        let world = Self::new();
        let ask = || world.command.store(COMMAND, Ordering::Release);
        let spawn = |deed: fn(&Self)| {
            let world = Arc::clone(&world);
            thread::spawn(move || deed(&world))
        };
        let early = (dropped == Dropped::TrackedBeforeAsked).then(|| {
            ask();
            (spawn(Self::guest), spawn(Self::device))
        });
        // Tracking begins anew: what was written before counts as known.
        world.tracker.take(0, 1);
        let (guest, device) = early.unwrap_or_else(|| {
            ask();
            (spawn(Self::guest), spawn(Self::device))
        });
        world.deal(true, true, dropped);
        if put_off {
            world.deal(true, dropped == Dropped::FirstTimeOnly, dropped);
        }
        guest.join().expect("the guest does not panic");
        device.join().expect("the device does not panic");
        world.deal(false, false, dropped);
        let content = world.content.load(Ordering::Relaxed);
        assert_eq!(content, world.copy.load(Ordering::Relaxed), "lost");
    }
}

#[test]
fn no_live_page_is_left_out() {
    loom::model(|| World::migrate(Dropped::Nothing, false));
}

#[test]
fn nor_when_its_segment_is_put_off() {
    loom::model(|| World::migrate(Dropped::Nothing, true));
}

#[test]
#[should_panic(expected = "lost")]
fn a_hint_that_the_harvest_contradicts_loses_a_page() {
    loom::model(|| World::migrate(Dropped::HarvestDecides, false));
}

#[test]
#[should_panic(expected = "lost")]
fn a_command_that_comes_before_tracking_loses_a_page() {
    loom::model(|| World::migrate(Dropped::TrackedBeforeAsked, false));
}

#[test]
#[should_panic(expected = "lost")]
fn a_second_look_at_hints_loses_a_page() {
    loom::model(|| World::migrate(Dropped::FirstTimeOnly, true));
}
