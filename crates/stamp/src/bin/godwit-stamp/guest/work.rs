//! The main loop under Linux: [`MainLoop`] with the clock and the console of a process.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_stamp::beacon::Beacon;
use godwit_stamp::heap::HeapWorkload;
use godwit_stamp::heartbeat::READY;
use godwit_stamp::main_loop::{Counts, Machine, MainLoop};
use godwit_stamp::settings::{Mode, Settings};
use godwit_units::{ByteCount, PAGE_SIZE, PageCount};

/// Works until `ending` is raised. What others have found, `disk_bugs`, goes into the heartbeat.
pub(super) fn run(settings: &Settings, disk_bugs: &AtomicU64, ending: &AtomicBool) {
    let pages = |bytes: ByteCount| PageCount(bytes.0.div_ceil(PAGE_SIZE));
    let workload = HeapWorkload::fill(pages(settings.fill), pages(settings.working_set));
    let workload = workload.in_order(settings.order);
    if settings.mode == Mode::Idle || settings.checks.is_some() {
        // Without this a sleep takes 50 µs longer than asked for.
        if let Err(problem) = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1)) {
            say!("cannot set the timer slack: {problem}");
        }
    }
    say!(
        "{READY} mode={} pages={} working_set_pages={}",
        settings.mode,
        workload.pages().0,
        workload.working_set().0
    );
    let process = Process { started: Instant::now(), disk_bugs };
    let mut beacon = Box::new(Beacon::dark());
    beacon.light();
    let guest = MainLoop::new(process, workload, Some(&beacon), settings.rate);
    let mut guest = guest.with_checks(settings.checks);
    while !ending.load(Ordering::Relaxed) {
        match settings.mode {
            Mode::Full => guest.turn_full(),
            Mode::Mixed => guest.turn_mixed(),
            Mode::Rate => guest.turn_rate(),
            Mode::Idle => {
                guest.turn_idle();
            }
        }
    }
    let Counts { writes, checked, bugs } = process.with_disks(guest.done());
    say!("GUEST ENDS writes={writes} checked={checked} bugs={bugs}");
}

/// A process of Linux.
#[derive(Clone, Copy)]
struct Process<'a> {
    started: Instant,
    disk_bugs: &'a AtomicU64,
}

impl Process<'_> {
    fn with_disks(self, own: Counts) -> Counts {
        Counts { bugs: own.bugs + self.disk_bugs.load(Ordering::Relaxed), ..own }
    }
}

impl Machine<HeapWorkload> for Process<'_> {
    fn micros(&mut self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    fn sleep(&mut self, micros: u32) {
        std::thread::sleep(Duration::from_micros(micros.into()));
    }

    fn say(&mut self, line: fmt::Arguments<'_>) {
        say!("{line}");
    }

    fn counts(&mut self, own: Counts) -> Option<Counts> {
        Some(self.with_disks(own))
    }
}
