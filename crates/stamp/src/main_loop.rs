//! The guest's main loop, a turn for each mode: under Linux and on the bare machine, whose
//! differences are a [`Machine`] each.
//!
//! Keeps two promises: the beacon counts without pause (when it idles, every 100 µs or so; when it
//! rests between checks, every 2 ms), and a heartbeat is due every 100 ms of guest time. Reading
//! the clock is not free under emulation, so the loops look at it every few steps.

use core::fmt;
use core::ops::DerefMut;

use crate::beacon::Beacon;
use crate::heartbeat::Heartbeat;
use crate::pace::Pace;
use crate::stamp::Page;
use crate::workload::{Bug, Workload};

const HEARTBEAT_MICROS: u64 = 100_000;
/// Bugs that are printed with their evidence; of later ones each thousandth, lest the console holds
/// up the work.
const BUGS_IN_FULL: u64 = 100;
/// Steps of about a microsecond between two looks at the clock.
const STEPS_FULL: u32 = 32;
const STEPS_RATE: u32 = 8;
const IDLE_SLEEP_MICROS: u32 = 100;
/// Where it is told how many checks are enough, how long it rests between them.
const REST_MICROS: u32 = 2_000;
/// In mixed mode, how long it reads and how long it writes.
const PHASE_MICROS: u64 = 5_000;
/// When it idles, so many looks each millisecond: 512 MiB take 16 s at a few percent of the
/// processor.
const IDLE_LOOKS: u32 = 8;

/// What is written and checked.
pub trait Work {
    /// Writes something.
    fn write(&mut self);

    /// Looks at something that was written; what is wrong with it.
    fn check(&mut self) -> Option<Bug>;

    /// Writes so far.
    fn writes(&self) -> u64;

    /// Looks so far.
    fn checked(&self) -> u64;
}

impl<P: DerefMut<Target = [Page]>, G: DerefMut<Target = [u64]>> Work for Workload<P, G> {
    #[inline]
    fn write(&mut self) {
        self.write();
    }

    #[inline]
    fn check(&mut self) -> Option<Bug> {
        self.check()
    }

    fn writes(&self) -> u64 {
        self.writes()
    }

    fn checked(&self) -> u64 {
        self.checked()
    }
}

/// What was done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Writes.
    pub writes: u64,
    /// Looks.
    pub checked: u64,
    /// Bugs found.
    pub bugs: u64,
}

/// What the loop runs on: its clock, its console, and what else is to be done there.
pub trait Machine<W> {
    /// Microseconds since the start.
    fn micros(&mut self) -> u64;

    /// Sleeps for about so many microseconds.
    fn sleep(&mut self, micros: u32);

    /// Prints a line.
    fn say(&mut self, line: fmt::Arguments<'_>);

    /// Does what else is due at `now`; bugs found by that.
    fn turn(&mut self, _now: u64, _work: &mut W) -> u64 {
        0
    }

    /// What a heartbeat says: what this loop did, `own`, with what others did beside it. `None`:
    /// the heartbeat is theirs.
    fn counts(&mut self, own: Counts) -> Option<Counts> {
        Some(own)
    }
}

/// The loop: its owner calls the turn of its mode for ever.
#[derive(Debug)]
pub struct MainLoop<'a, M, W> {
    machine: M,
    work: W,
    /// Where it counts, if it is the one that does.
    beacon: Option<&'a Beacon>,
    count: u64,
    bugs: u64,
    pace: Pace,
    /// Its checks, where it is not to check without pause.
    checks: Option<Pace>,
    next_idle_look: u64,
    next_heartbeat: u64,
    last_heartbeat: u64,
    last: Heartbeat,
}

impl<'a, M: Machine<W>, W: Work> MainLoop<'a, M, W> {
    /// One that writes `rate` times a second where that is its mode, and counts in `beacon`.
    pub fn new(machine: M, work: W, beacon: Option<&'a Beacon>, rate: u64) -> Self {
        Self {
            machine,
            work,
            beacon,
            count: 0,
            bugs: 0,
            pace: Pace::new(rate, 0),
            checks: None,
            next_idle_look: 0,
            next_heartbeat: HEARTBEAT_MICROS,
            last_heartbeat: 0,
            last: Heartbeat { n: 0, count: 0, writes: 0, rate: 0, checked: 0, bugs: 0, t_ms: 0 },
        }
    }

    /// The same that checks so many times a second, and rests between, where it writes at its rate
    /// or is idle.
    #[must_use]
    pub fn with_checks(mut self, per_second: Option<u64>) -> Self {
        self.checks = per_second.map(|checks| Pace::new(checks, 0));
        self
    }

    /// What it has done.
    pub fn done(&self) -> Counts {
        let (writes, checked) = (self.work.writes(), self.work.checked());
        Counts { writes, checked, bugs: self.bugs }
    }

    /// Writes and checks as fast as it can.
    pub fn turn_full(&mut self) {
        for _ in 0..STEPS_FULL {
            self.work.write();
            self.check();
            self.count();
        }
        self.clock();
    }

    /// Writes at its rate, and checks as fast as it can, or as often as it is told.
    pub fn turn_rate(&mut self) {
        let now = if self.checks.is_some() {
            self.rest(REST_MICROS)
        } else {
            for _ in 0..STEPS_RATE {
                self.check();
                self.count();
            }
            self.clock()
        };
        for _ in 0..self.pace.due(now) {
            self.work.write();
            self.count();
        }
    }

    /// Writes for a while, and checks for as long.
    pub fn turn_mixed(&mut self) {
        let writes = (self.clock() / PHASE_MICROS).is_multiple_of(2);
        for _ in 0..STEPS_RATE {
            if writes {
                self.work.write();
            } else {
                self.check();
            }
            self.count();
        }
    }

    /// Sleeps, and checks a little, or as often as it is told; microseconds since the start.
    pub fn turn_idle(&mut self) -> u64 {
        if self.checks.is_some() {
            return self.rest(REST_MICROS);
        }
        let now = self.rest(IDLE_SLEEP_MICROS);
        if now >= self.next_idle_look {
            self.next_idle_look = now + 1_000;
            (0..IDLE_LOOKS).for_each(|_| self.check());
        }
        now
    }

    /// Sleeps, and makes those checks that are due by then where it is told how many are enough;
    /// microseconds since the start.
    fn rest(&mut self, micros: u32) -> u64 {
        self.machine.sleep(micros);
        self.count();
        let now = self.clock();
        for _ in 0..self.checks.as_mut().map_or(0, |pace| pace.due(now)) {
            self.check();
            self.count();
        }
        now
    }

    #[inline]
    fn count(&mut self) {
        self.count += 1;
        if let Some(beacon) = self.beacon {
            beacon.show(self.count);
        }
    }

    #[inline]
    fn check(&mut self) {
        if let Some(bug) = self.work.check() {
            self.report(&bug);
        }
    }

    #[cold]
    fn report(&mut self, bug: &Bug) {
        self.bugs += 1;
        if self.bugs <= BUGS_IN_FULL || self.bugs.is_multiple_of(1000) {
            self.machine.say(format_args!("{bug}"));
        }
    }

    /// Microseconds since the start; does what is due by then.
    fn clock(&mut self) -> u64 {
        let now = self.machine.micros();
        self.bugs += self.machine.turn(now, &mut self.work);
        if now >= self.next_heartbeat {
            self.heartbeat(now);
        }
        now
    }

    #[cold]
    fn heartbeat(&mut self, now: u64) {
        // On time again after a stall, without printing what was missed.
        let late = now - self.next_heartbeat;
        self.next_heartbeat += HEARTBEAT_MICROS * (1 + late / HEARTBEAT_MICROS);
        let Some(Counts { writes, checked, bugs }) = self.machine.counts(self.done()) else {
            return;
        };
        let since = (now - self.last_heartbeat).max(1);
        self.last_heartbeat = now;
        self.last = Heartbeat {
            n: self.last.n + 1,
            count: self.count,
            writes,
            rate: (writes - self.last.writes) * 1_000_000 / since,
            checked,
            bugs,
            t_ms: now / 1000,
        };
        self.machine.say(format_args!("{}", self.last));
    }
}

#[cfg(test)]
mod tests {
    use core::cell::{Cell, RefCell};

    use super::*;
    use crate::stamp::Fault;

    /// A machine whose time is set by hand, and goes on by itself only while it sleeps.
    #[derive(Default)]
    struct Stand {
        now: Cell<u64>,
        said: RefCell<Vec<String>>,
        /// Bugs that others have found.
        others: Cell<u64>,
        silent: bool,
    }

    impl<W> Machine<W> for &Stand {
        fn micros(&mut self) -> u64 {
            self.now.get()
        }

        fn sleep(&mut self, micros: u32) {
            self.now.set(self.now.get() + u64::from(micros));
        }

        fn say(&mut self, line: fmt::Arguments<'_>) {
            self.said.borrow_mut().push(line.to_string());
        }

        fn counts(&mut self, own: Counts) -> Option<Counts> {
            let bugs = own.bugs + self.others.get();
            (!self.silent).then_some(Counts { bugs, ..own })
        }
    }

    impl Stand {
        fn heartbeats(&self) -> Vec<Heartbeat> {
            self.said.borrow().iter().filter_map(|line| line.parse().ok()).collect()
        }
    }

    /// Each look finds a bug if it is told so.
    #[derive(Default)]
    struct Counted(Counts, bool);

    impl Work for Counted {
        fn write(&mut self) {
            self.0.writes += 1;
        }

        fn check(&mut self) -> Option<Bug> {
            self.0.checked += 1;
            let fault = Fault::Zeroed;
            self.1.then_some(Bug { page: 1, generation: 0, fault, stamps: [[0; 3]; 3] })
        }

        fn writes(&self) -> u64 {
            self.0.writes
        }

        fn checked(&self) -> u64 {
            self.0.checked
        }
    }

    #[test]
    fn an_idle_guest_counts_and_its_heart_beats_ten_times_a_second() {
        let (stand, beacon) = (Stand::default(), Beacon::dark());
        let mut guest = MainLoop::new(&stand, Counted::default(), Some(&beacon), 0);
        while guest.turn_idle() < 1_000_000 {}
        let beats = stand.heartbeats();
        assert_eq!(
            beats.iter().map(|beat| beat.n).collect::<Vec<_>>(),
            (1..=10).collect::<Vec<_>>()
        );
        assert_eq!(beats[9].t_ms, 1000);
        assert_eq!((beats[9].count, beats[9].writes), (10_000, 0));
        assert!((7_900..=8_000).contains(&beats[9].checked), "{}", beats[9].checked);
    }

    #[test]
    fn a_guest_at_a_rate_keeps_to_it_and_tells_of_it() {
        let stand = Stand::default();
        let mut guest = MainLoop::new(&stand, Counted::default(), None, 2000);
        for micros in (0..=1_000_000).step_by(10) {
            stand.now.set(micros);
            guest.turn_rate();
        }
        let beats = stand.heartbeats();
        assert_eq!(beats.len(), 10);
        assert!(beats.iter().all(|beat| beat.rate.abs_diff(2000) <= 10), "{beats:?}");
        assert_eq!(guest.done().writes, 2000);
    }

    #[test]
    fn a_guest_that_is_told_so_checks_at_a_rate_as_well_and_rests_between() {
        let stand = Stand::default();
        let guest = MainLoop::new(&stand, Counted::default(), None, 2000);
        let (mut guest, mut turns) = (guest.with_checks(Some(20_000)), 0);
        while stand.now.get() < 1_000_000 {
            guest.turn_rate();
            turns += 1;
        }
        let Counts { writes, checked, .. } = guest.done();
        assert_eq!((turns, writes, checked), (500, 2000, 20_000));
        while guest.turn_idle() < 2_000_000 {}
        assert_eq!(guest.done(), Counts { writes, checked: 2 * checked, bugs: 0 });
    }

    #[test]
    fn a_mixed_guest_writes_half_of_the_time() {
        let stand = Stand::default();
        let mut guest = MainLoop::new(&stand, Counted::default(), None, 0);
        for micros in (0..20_000).step_by(10) {
            stand.now.set(micros);
            guest.turn_mixed();
        }
        let done = guest.done();
        assert_eq!((done.writes, done.checked), (8_000, 8_000));
    }

    #[test]
    fn after_a_stall_the_heart_beats_once_and_is_on_time_again() {
        let stand = Stand::default();
        let mut guest = MainLoop::new(&stand, Counted::default(), None, 0);
        for millis in [50, 100, 3_170, 3_180, 3_199, 3_200] {
            stand.now.set(millis * 1000);
            guest.turn_full();
        }
        let at: Vec<u64> = stand.heartbeats().iter().map(|beat| beat.t_ms).collect();
        assert_eq!(at, [100, 3170, 3200]);
    }

    #[test]
    fn the_first_bugs_are_printed_and_all_are_counted_with_those_of_others() {
        let stand = Stand { others: Cell::new(5), ..Stand::default() };
        let mut guest = MainLoop::new(&stand, Counted(Counts::default(), true), None, 0);
        for _ in 0..1024 / STEPS_FULL {
            guest.turn_full();
        }
        stand.now.set(100_000);
        guest.turn_full();
        let bugs = stand.said.borrow().iter().filter(|line| line.starts_with("BUG")).count();
        assert_eq!(bugs, 101, "a hundred, and the thousandth");
        assert_eq!(stand.heartbeats()[0].bugs, 1024 + u64::from(STEPS_FULL) + 5);
    }

    #[test]
    fn who_has_no_heartbeat_of_its_own_says_nothing() {
        let stand = Stand { silent: true, ..Stand::default() };
        let mut guest = MainLoop::new(&stand, Counted::default(), None, 0);
        while guest.turn_idle() < 1_000_000 {}
        assert!(stand.said.borrow().is_empty());
    }
}
