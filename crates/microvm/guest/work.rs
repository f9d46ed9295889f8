//! The main loop, one for each mode, on every vCPU.
//!
//! Keeps three promises: vCPU 0 counts in the beacon without pause (idle: every 100 us or so); a
//! heartbeat for all vCPUs together is due every 100 ms; and each vCPU has a part of the buffer to
//! itself, so no page is read while it is written.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::balloon;
use crate::beacon::Beacon;
use crate::boot_block::{
    BootBlock, GENERATIONS_WINDOW, MAX_CPUS, MODE_CHURN, MODE_CRASH, MODE_FULL, MODE_IDLE,
    MODE_RATE, ORDER_HOT_COLD, ORDER_HOT_TENTH, ORDER_SEQUENTIAL, PAGES_WINDOW,
};
use crate::churn::Churn;
use crate::disk::DiskWork;
use crate::heartbeat::{Heartbeat, READY};
use crate::pace::Pace;
use crate::stamp::Page;
use crate::workload::{Bug, Order, Workload};
use crate::{PageCount, cpu, serial};

const HEARTBEAT_MICROS: u64 = 100_000;
/// Bugs that are printed with their evidence; of later ones each thousandth.
const BUGS_IN_FULL: u64 = 100;
const STEPS_FULL: u32 = 32;
const STEPS_RATE: u32 = 8;
const IDLE_SLEEP_MICROS: u32 = 100;
const IDLE_LOOKS: u32 = 8;
const DISK_MICROS: u64 = 10_000;
const BALLOON_MICROS: u64 = 1_000;

/// What one vCPU did, for the heartbeat; a cache line each.
#[repr(align(64))]
struct Done {
    writes: AtomicU64,
    checked: AtomicU64,
    bugs: AtomicU64,
}

static DONE: [Done; MAX_CPUS as usize] = [const {
    Done { writes: AtomicU64::new(0), checked: AtomicU64::new(0), bugs: AtomicU64::new(0) }
}; MAX_CPUS as usize];
static FILLED: AtomicU64 = AtomicU64::new(0);

struct Lamp(UnsafeCell<Beacon>);
// SAFETY: lit and counted by vCPU 0 only.
unsafe impl Sync for Lamp {}
static BEACON: Lamp = Lamp(UnsafeCell::new(Beacon::dark()));

/// What a vCPU does with its part of the buffer.
enum Work {
    /// Writes to pages that are all in use.
    Stamped(Workload<&'static mut [Page], &'static mut [u64]>),
    /// Frees pages and takes others.
    Churning(Churn),
}

impl Work {
    #[inline]
    fn write(&mut self) {
        match self {
            Self::Stamped(work) => work.write(),
            Self::Churning(work) => work.turn_over(),
        }
    }

    #[inline]
    fn check(&mut self) -> Option<Bug> {
        match self {
            Self::Stamped(work) => work.check(),
            Self::Churning(work) => work.check(),
        }
    }

    fn writes(&self) -> u64 {
        match self {
            Self::Stamped(work) => work.writes(),
            Self::Churning(work) => work.writes(),
        }
    }

    fn checked(&self) -> u64 {
        match self {
            Self::Stamped(work) => work.checked(),
            Self::Churning(work) => work.checked(),
        }
    }
}

struct Guest {
    number: usize,
    boot: &'static BootBlock,
    workload: Work,
    disk: Option<DiskWork>,
    next_disk: u64,
    next_balloon: u64,
    beacon: &'static Beacon,
    count: u64,
    bugs: u64,
    started: u64,
    pace: Pace,
    next_idle_look: u64,
    next_heartbeat: u64,
    last_heartbeat: u64,
    last: Heartbeat,
}

/// Works for ever.
pub fn run(number: usize, boot: &'static BootBlock) -> ! {
    let workload = part(number, boot);
    let mut guest = Guest::start(number, boot, workload);
    loop {
        match boot.mode {
            MODE_IDLE | MODE_CRASH => guest.turn_idle(),
            MODE_RATE => guest.turn_rate(),
            MODE_FULL => guest.turn_full(),
            MODE_CHURN if boot.rate == 0 => guest.turn_full(),
            MODE_CHURN => guest.turn_rate(),
            _ => panic!("mode {} is unknown", boot.mode),
        }
    }
}

/// This vCPU's part of the buffer, filled.
fn part(number: usize, boot: &BootBlock) -> Work {
    let cpus = u64::from(boot.cpus);
    let (first, end) = (boot.fill * number as u64 / cpus, boot.fill * (number as u64 + 1) / cpus);
    if first == end {
        panic!("{} pages are too few for {cpus} vCPUs", boot.fill);
    }
    let count = (end - first) as usize;
    // SAFETY: the VMM has mapped both windows to memory that nothing else uses, zeroed, which is a
    // value of either type; the parts of two vCPUs do not overlap.
    let (pages, generations) = unsafe {
        let pages = (PAGES_WINDOW as *mut Page).add(first as usize);
        let generations = (GENERATIONS_WINDOW as *mut u64).add(first as usize);
        (
            core::slice::from_raw_parts_mut(pages, count),
            core::slice::from_raw_parts_mut(generations, count),
        )
    };
    for (index, page) in (first..).zip(pages.iter_mut()) {
        *page = Page::first(index);
    }
    if number == 0 && boot.balloon != 0 {
        balloon::start(boot.balloon, boot.cpus);
    }
    FILLED.fetch_add(1, Ordering::AcqRel);
    while FILLED.load(Ordering::Acquire) < cpus {
        core::hint::spin_loop();
    }
    let order = match boot.order {
        ORDER_HOT_COLD => Order::HotCold,
        ORDER_HOT_TENTH => Order::HotTenth,
        ORDER_SEQUENTIAL => Order::Sequential,
        _ => Order::Random,
    };
    let working_set = boot.working_set.div_ceil(cpus);
    if boot.mode == MODE_CHURN {
        return Work::Churning(Churn::over(pages, generations, first, working_set));
    }
    Work::Stamped(Workload::over(pages, generations, first, PageCount(working_set)).in_order(order))
}

impl Guest {
    fn start(number: usize, boot: &'static BootBlock, workload: Work) -> Self {
        let disk = if number == 0 && boot.disk != 0 { Some(DiskWork::start()) } else { None };
        if number == 0 {
            // SAFETY: vCPU 0 alone, and before the only shared reference is made.
            unsafe { (*BEACON.0.get()).light() };
            let mode =
                ["idle", "rate", "full", "crash", "churn"].get(boot.mode as usize).unwrap_or(&"?");
            let (fill, working_set) = (boot.fill, boot.working_set);
            serial::print(format_args!(
                "{READY} mode={mode} pages={fill} working_set_pages={working_set}\n"
            ));
        }
        let cpus = u64::from(boot.cpus);
        Self {
            number,
            boot,
            workload,
            disk,
            next_disk: 0,
            next_balloon: 0,
            // SAFETY: from here on it is only shared; its counter is atomic.
            beacon: unsafe { &*BEACON.0.get() },
            count: 0,
            bugs: 0,
            started: cpu::ticks(),
            pace: Pace::new(boot.rate / cpus + u64::from((number as u64) < boot.rate % cpus), 0),
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

    fn turn_idle(&mut self) {
        cpu::sleep(IDLE_SLEEP_MICROS);
        self.count();
        let now = self.clock();
        if now >= self.next_idle_look {
            self.next_idle_look = now + 1_000;
            (0..IDLE_LOOKS).for_each(|_| self.check());
        }
        if self.boot.mode == MODE_CRASH && now > 1_000_000 {
            cpu::crash();
        }
    }

    #[inline]
    fn count(&mut self) {
        self.count += 1;
        if self.number == 0 {
            self.beacon.show(self.count);
        }
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
            serial::print(format_args!("{bug}\n"));
        }
    }

    /// Microseconds since the start; does what is due by the clock.
    fn clock(&mut self) -> u64 {
        // A vCPU's counter may be set back a little where it is loaded.
        let ticks = cpu::ticks().saturating_sub(self.started);
        let now = (u128::from(ticks) * 1000 / u128::from(self.boot.tsc_khz)) as u64;
        if now >= self.next_disk {
            self.next_disk = now + DISK_MICROS;
            if let Some(disk) = &mut self.disk {
                self.bugs += disk.turn();
            }
        }
        if now >= self.next_balloon && self.boot.balloon != 0 {
            self.next_balloon = now + BALLOON_MICROS;
            if let Work::Churning(work) = &mut self.workload {
                balloon::turn(self.number, self.boot.balloon, work);
            } else {
                balloon::turn_without_free_pages(self.number);
            }
        }
        if now >= self.next_heartbeat {
            self.heartbeat(now);
        }
        now
    }

    #[cold]
    fn heartbeat(&mut self, now: u64) {
        let done = &DONE[self.number];
        done.writes.store(self.workload.writes(), Ordering::Relaxed);
        done.checked.store(self.workload.checked(), Ordering::Relaxed);
        done.bugs.store(self.bugs, Ordering::Relaxed);
        let late = now.saturating_sub(self.next_heartbeat);
        self.next_heartbeat += HEARTBEAT_MICROS * (1 + late / HEARTBEAT_MICROS);
        if self.number != 0 {
            return;
        }
        let sum = |field: fn(&Done) -> &AtomicU64| {
            DONE.iter().map(|done| field(done).load(Ordering::Relaxed)).sum::<u64>()
        };
        let writes = sum(|done| &done.writes);
        let since = (now - self.last_heartbeat).max(1);
        self.last_heartbeat = now;
        self.last = Heartbeat {
            n: self.last.n + 1,
            count: self.count,
            writes,
            rate: (writes - self.last.writes) * 1_000_000 / since,
            checked: sum(|done| &done.checked),
            bugs: sum(|done| &done.bugs),
            t_ms: now / 1000,
        };
        serial::print(format_args!("{}\n", self.last));
    }
}
