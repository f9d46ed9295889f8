//! The main loop on the bare machine: a `MainLoop` on every vCPU, with the disk, the balloon and
//! the plugged memory that vCPU 0 sees to.
//!
//! Keeps two promises: one heartbeat speaks for all vCPUs together; and each vCPU has a part of the
//! buffer to itself, so no page is read while it is written.

use core::cell::UnsafeCell;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::balloon;
use crate::beacon::Beacon;
use crate::boot_block::{
    BootBlock, GENERATIONS_WINDOW, MAX_CPUS, MODE_CHURN, MODE_CRASH, MODE_FULL, MODE_IDLE,
    MODE_MIXED, MODE_RATE, ORDER_HOT_COLD, ORDER_HOT_TENTH, ORDER_SEQUENTIAL, PAGES_WINDOW,
};
use crate::card::Card;
use crate::churn::Churn;
use crate::disk::DiskWork;
use crate::heartbeat::READY;
use crate::main_loop::{Counts, Machine, MainLoop, Work};
use crate::plugged::Plugged;
use crate::stamp::Page;
use crate::workload::{Bug, Order, Workload};
use crate::{PageCount, cpu, serial};

const DISK_MICROS: u64 = 10_000;
const BALLOON_MICROS: u64 = 1_000;
const PLUGGED_MICROS: u64 = 1_000;
const CARD_MICROS: u64 = 200;

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
enum Part {
    /// Writes to pages that are all in use.
    Stamped(Workload<&'static mut [Page], &'static mut [u64]>),
    /// Frees pages and takes others.
    Churning(Churn),
}

impl Work for Part {
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

/// Works for ever.
pub fn run(number: usize, boot: &'static BootBlock) -> ! {
    let part = part(number, boot);
    let cpu = Cpu::start(number, boot);
    // SAFETY: it was lit, if by this vCPU then before; from here on it is only shared, and its
    // counter is atomic.
    let beacon = (number == 0).then(|| unsafe { &*BEACON.0.get() });
    let cpus = u64::from(boot.cpus);
    let rate = boot.rate / cpus + u64::from((number as u64) < boot.rate % cpus);
    let mut guest = MainLoop::new(cpu, part, beacon, rate);
    loop {
        match boot.mode {
            MODE_IDLE => {
                guest.turn_idle();
            }
            MODE_CRASH => {
                if guest.turn_idle() > 1_000_000 {
                    cpu::crash();
                }
            }
            MODE_RATE => guest.turn_rate(),
            MODE_FULL => guest.turn_full(),
            MODE_MIXED => guest.turn_mixed(),
            MODE_CHURN if boot.rate == 0 => guest.turn_full(),
            MODE_CHURN => guest.turn_rate(),
            _ => panic!("mode {} is unknown", boot.mode),
        }
    }
}

/// This vCPU's part of the buffer, filled.
fn part(number: usize, boot: &BootBlock) -> Part {
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
        return Part::Churning(Churn::over(pages, generations, first, working_set));
    }
    Part::Stamped(Workload::over(pages, generations, first, PageCount(working_set)).in_order(order))
}

/// One vCPU, and what belongs to it.
struct Cpu {
    number: usize,
    boot: &'static BootBlock,
    disk: Option<DiskWork>,
    next_disk: u64,
    next_balloon: u64,
    card: Option<Card>,
    next_card: u64,
    plugged: Plugged,
    next_plugged: u64,
    started: u64,
}

impl Cpu {
    fn start(number: usize, boot: &'static BootBlock) -> Self {
        let with_disk = number == 0 && boot.disk != 0;
        let disk = if with_disk { Some(DiskWork::start(boot.disk)) } else { None };
        let with_card = number == 0 && boot.card != 0;
        let card = if with_card { Some(Card::start(boot.card as u32)) } else { None };
        if number == 0 {
            // SAFETY: vCPU 0 alone, and before the only shared reference is made.
            unsafe { (*BEACON.0.get()).light() };
            let mode = ["idle", "rate", "full", "crash", "churn", "mixed"]
                .get(boot.mode as usize)
                .unwrap_or(&"?");
            let (fill, working_set) = (boot.fill, boot.working_set);
            serial::print(format_args!(
                "{READY} mode={mode} pages={fill} working_set_pages={working_set}\n"
            ));
        }
        Self {
            number,
            boot,
            disk,
            next_disk: 0,
            next_balloon: 0,
            card,
            next_card: 0,
            plugged: Plugged::new(),
            next_plugged: 0,
            started: cpu::ticks(),
        }
    }
}

impl Machine<Part> for Cpu {
    fn micros(&mut self) -> u64 {
        // A vCPU's counter may be set back a little where it is loaded.
        let ticks = cpu::ticks().saturating_sub(self.started);
        (u128::from(ticks) * 1000 / u128::from(self.boot.tsc_khz)) as u64
    }

    fn sleep(&mut self, micros: u32) {
        cpu::sleep(micros);
    }

    fn say(&mut self, line: fmt::Arguments<'_>) {
        serial::print(format_args!("{line}\n"));
    }

    #[inline]
    fn turn(&mut self, now: u64, part: &mut Part) -> u64 {
        let mut bugs = 0;
        if now >= self.next_disk {
            self.next_disk = now + DISK_MICROS;
            if let Some(disk) = &mut self.disk {
                bugs = disk.turn();
            }
        }
        if now >= self.next_card {
            self.next_card = now + CARD_MICROS;
            if let Some(card) = &mut self.card {
                card.turn();
            }
        }
        if now >= self.next_plugged && self.number == 0 {
            self.next_plugged = now + PLUGGED_MICROS;
            bugs += self.plugged.turn(self.boot.mode != MODE_IDLE);
        }
        if now >= self.next_balloon && self.boot.balloon != 0 {
            self.next_balloon = now + BALLOON_MICROS;
            if let Part::Churning(work) = part {
                balloon::turn(self.number, self.boot.balloon, work);
            } else {
                balloon::turn_without_free_pages(self.number);
            }
        }
        bugs
    }

    fn counts(&mut self, own: Counts) -> Option<Counts> {
        let done = &DONE[self.number];
        done.writes.store(own.writes, Ordering::Relaxed);
        done.checked.store(own.checked, Ordering::Relaxed);
        done.bugs.store(own.bugs, Ordering::Relaxed);
        let sum = |field: fn(&Done) -> &AtomicU64| {
            DONE.iter().map(|done| field(done).load(Ordering::Relaxed)).sum::<u64>()
        };
        (self.number == 0).then(|| Counts {
            writes: sum(|done| &done.writes),
            checked: sum(|done| &done.checked),
            bugs: sum(|done| &done.bugs),
        })
    }
}
