//! The main loop, one for each mode.
//!
//! Keeps two promises: the beacon counts without pause (in idle mode every 100 µs or so), and a
//! heartbeat is due every 100 ms of guest time. Reading the clock is not free under emulation, so
//! the loops look at it every few steps.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_guest_workload::beacon::Beacon;
use godwit_guest_workload::heap::HeapWorkload;
use godwit_guest_workload::heartbeat::{Heartbeat, READY};
use godwit_guest_workload::pace::Pace;
use godwit_guest_workload::settings::{Mode, Settings};
use godwit_guest_workload::workload::Bug;
use godwit_units::{ByteCount, PAGE_SIZE, PageCount};

const HEARTBEAT_MICROS: u64 = 100_000;
/// Bugs that are printed with their evidence; of later ones each thousandth, lest the console holds
/// up the work.
const BUGS_IN_FULL: u64 = 100;
/// Steps of about a microsecond between two looks at the clock.
const STEPS_FULL: u32 = 32;
const STEPS_RATE: u32 = 8;
const IDLE_SLEEP: Duration = Duration::from_micros(100);
/// In mixed mode, how long it reads and how long it writes.
const PHASE_MICROS: u64 = 5_000;
/// In idle mode, so many looks each millisecond: 512 MiB take 16 s at a few percent of the
/// processor.
const IDLE_LOOKS: u32 = 8;

/// Works until `ending` is raised. What others have found, `disk_bugs`, goes into the heartbeat.
pub(crate) fn run(settings: &Settings, disk_bugs: &AtomicU64, ending: &AtomicBool) {
    let mut guest = Guest::start(settings, disk_bugs);
    while !ending.load(Ordering::Relaxed) {
        match settings.mode {
            Mode::Full => guest.turn_full(),
            Mode::Mixed => guest.turn_mixed(),
            Mode::Rate => guest.turn_rate(),
            Mode::Idle => guest.turn_idle(),
        }
    }
    println!(
        "GUEST ENDS writes={} checked={} bugs={}",
        guest.workload.writes(),
        guest.workload.checked(),
        guest.all_bugs()
    );
}

struct Guest<'a> {
    workload: HeapWorkload,
    disk_bugs: &'a AtomicU64,
    beacon: Box<Beacon>,
    count: u64,
    bugs: u64,
    started: Instant,
    pace: Pace,
    next_idle_look: u64,
    next_heartbeat: u64,
    last_heartbeat: u64,
    last: Heartbeat,
}

impl<'a> Guest<'a> {
    fn start(settings: &Settings, disk_bugs: &'a AtomicU64) -> Self {
        let pages = |bytes: ByteCount| PageCount(bytes.0.div_ceil(PAGE_SIZE));
        let workload = HeapWorkload::fill(pages(settings.fill), pages(settings.working_set));
        if settings.mode == Mode::Idle {
            // Without this a sleep takes 50 µs longer than asked for.
            if let Err(problem) = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1))
            {
                println!("cannot set the timer slack: {problem}");
            }
        }
        println!(
            "{READY} mode={} pages={} working_set_pages={}",
            settings.mode,
            workload.pages().0,
            workload.working_set().0
        );
        let started = Instant::now();
        let mut beacon = Box::new(Beacon::dark());
        beacon.light();
        Self {
            workload,
            disk_bugs,
            beacon,
            count: 0,
            bugs: 0,
            started,
            pace: Pace::new(settings.rate, 0),
            next_idle_look: 0,
            next_heartbeat: HEARTBEAT_MICROS,
            last_heartbeat: 0,
            last: Heartbeat { n: 0, count: 0, writes: 0, rate: 0, checked: 0, bugs: 0, t_ms: 0 },
        }
    }

    fn turn_full(&mut self) {
        for _ in 0..STEPS_FULL {
            self.workload.write();
            self.check();
            self.count();
        }
        self.clock();
    }

    fn turn_rate(&mut self) {
        for _ in 0..STEPS_RATE {
            self.check();
            self.count();
        }
        let now = self.clock();
        for _ in 0..self.pace.due(now) {
            self.workload.write();
            self.count();
        }
    }

    fn turn_mixed(&mut self) {
        let writes = (self.clock() / PHASE_MICROS).is_multiple_of(2);
        for _ in 0..STEPS_RATE {
            if writes {
                self.workload.write();
            } else {
                self.check();
            }
            self.count();
        }
    }

    fn turn_idle(&mut self) {
        std::thread::sleep(IDLE_SLEEP);
        self.count();
        let now = self.clock();
        if now >= self.next_idle_look {
            self.next_idle_look = now + 1_000;
            (0..IDLE_LOOKS).for_each(|_| self.check());
        }
    }

    #[inline]
    fn count(&mut self) {
        self.count += 1;
        self.beacon.show(self.count);
    }

    #[inline]
    fn check(&mut self) {
        if let Some(bug) = self.workload.check() {
            self.report(&bug);
        }
    }

    #[cold]
    fn report(&mut self, bug: &Bug) {
        self.bugs += 1;
        if self.bugs <= BUGS_IN_FULL || self.bugs.is_multiple_of(1000) {
            println!("{bug}");
        }
    }

    fn all_bugs(&self) -> u64 {
        self.bugs + self.disk_bugs.load(Ordering::Relaxed)
    }

    /// Microseconds since the start; prints a heartbeat when one is due.
    fn clock(&mut self) -> u64 {
        let now = self.started.elapsed().as_micros() as u64;
        if now >= self.next_heartbeat {
            self.heartbeat(now);
        }
        now
    }

    #[cold]
    fn heartbeat(&mut self, now: u64) {
        let writes = self.workload.writes();
        let since = (now - self.last_heartbeat).max(1);
        self.last_heartbeat = now;
        self.last = Heartbeat {
            n: self.last.n + 1,
            count: self.count,
            writes,
            rate: (writes - self.last.writes) * 1_000_000 / since,
            checked: self.workload.checked(),
            bugs: self.all_bugs(),
            t_ms: now / 1000,
        };
        println!("{}", self.last);
        // On time again after a stall, without printing what was missed.
        let late = now - self.next_heartbeat;
        self.next_heartbeat += HEARTBEAT_MICROS * (1 + late / HEARTBEAT_MICROS);
    }
}
