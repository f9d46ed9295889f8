//! The balloon's driver: hints about free pages when the VMM asks for them, and reports of them all the time.
//!
//! It does what the standard allows and what is hardest on the VMM: pages are taken back and written while the hint about them is in the queue,
//! unseen (virtio 1.2, 5.5.6.5.1). vCPU 0 looks for commands; each vCPU hints the pages of its own part. One queue serves all, one after the other.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::PAGE_SIZE;
use crate::boot_block::{BALLOON_HINTS, BALLOON_MMIO, BALLOON_REPORTING, MAX_CPUS};
use crate::churn::Churn;
use crate::virtio::{DEVICE_WRITES, Descriptor, Device, Queue, Shared};

const BALLOON: u32 = 5;
const DEVICE: Device = Device(BALLOON_MMIO);
const HINT_FEATURE: u32 = 1 << 3;
const REPORT_FEATURE: u32 = 1 << 5;
const COMMAND: u64 = 0x108;
const STOP: u32 = 0;
/// Commands are from here on.
const FIRST_COMMAND: u32 = 2;
/// Hints and pieces of a report that go together.
const BATCH: usize = 128;
/// Of the pages in a batch of hints, those that are taken back before the VMM sees it.
const TAKEN_BACK: usize = 4;
/// Pages looked at for a report.
const LOOKS: usize = 8192;

static HINTS: Queue<256> = Queue::new();
static REPORTS: Queue<256> = Queue::new();
static HELD: AtomicBool = AtomicBool::new(false);
/// The words that commands are sent in.
static WORDS: Shared<[u32; 2]> = Shared(UnsafeCell::new([0; 2]));
/// The command that vCPU 0 has answered.
static ANSWERED: AtomicU32 = AtomicU32::new(STOP);
/// vCPUs that have yet to hint under it.
static TO_HINT: AtomicU32 = AtomicU32::new(0);
/// What each vCPU has hinted under last.
static HINTED: [AtomicU32; MAX_CPUS as usize] = [const { AtomicU32::new(STOP) }; MAX_CPUS as usize];
static CPUS: AtomicU32 = AtomicU32::new(0);

/// Brings the device up; before any vCPU works.
pub fn start(balloon: u64, cpus: u32) {
    let bit = |which, feature| if balloon & which != 0 { feature } else { 0 };
    DEVICE.begin(BALLOON, bit(BALLOON_HINTS, HINT_FEATURE) | bit(BALLOON_REPORTING, REPORT_FEATURE));
    if balloon & BALLOON_HINTS != 0 {
        DEVICE.show(hint_queue(), &HINTS);
    }
    if balloon & BALLOON_REPORTING != 0 {
        DEVICE.show(report_queue(balloon), &REPORTS);
    }
    DEVICE.ready();
    CPUS.store(cpus, Ordering::Release);
}

fn hint_queue() -> u32 {
    3
}

/// Queues of features that are not there do not count.
fn report_queue(balloon: u64) -> u32 {
    if balloon & BALLOON_HINTS != 0 { 4 } else { 3 }
}

/// Runs `f` while no other vCPU does.
fn alone(f: impl FnOnce()) {
    while HELD.swap(true, Ordering::Acquire) {
        core::hint::spin_loop();
    }
    f();
    HELD.store(false, Ordering::Release);
}

/// What is due on vCPU `number`.
pub fn turn(number: usize, balloon: u64, work: &mut Churn) {
    if balloon & BALLOON_HINTS != 0 {
        answer(number);
        let command = ANSWERED.load(Ordering::Acquire);
        if command >= FIRST_COMMAND && HINTED[number].swap(command, Ordering::Relaxed) != command {
            hint(work);
            if TO_HINT.fetch_sub(1, Ordering::AcqRel) == 1 {
                send(STOP, 1);
            }
        }
    }
    if balloon & BALLOON_REPORTING != 0 {
        report(balloon, work);
    }
}

/// The same on one that has no free pages to tell of.
pub fn turn_without_free_pages(number: usize) {
    answer(number);
    let command = ANSWERED.load(Ordering::Acquire);
    if number == 0 && command >= FIRST_COMMAND && HINTED[0].swap(command, Ordering::Relaxed) != command {
        TO_HINT.store(0, Ordering::Release);
        send(STOP, 1);
    }
}

/// vCPU 0 answers a new command.
fn answer(number: usize) {
    if number != 0 || TO_HINT.load(Ordering::Acquire) != 0 {
        return;
    }
    let command = DEVICE.register(COMMAND);
    if command == ANSWERED.load(Ordering::Relaxed) {
        return;
    }
    if command >= FIRST_COMMAND {
        send(command, 0);
        TO_HINT.store(CPUS.load(Ordering::Acquire), Ordering::Release);
    }
    ANSWERED.store(command, Ordering::Release);
}

/// Sends a command in one of the two words.
fn send(command: u32, word: usize) {
    alone(|| {
        // SAFETY: alone; the device reads the word before `carry_out` returns.
        unsafe {
            (*WORDS.0.get())[word] = command;
            let address = (&raw const (*WORDS.0.get())[word]) as u64;
            HINTS.describe(0, Descriptor { address, len: 4, flags: 0, next: 0 });
            HINTS.add(0);
            HINTS.carry_out(DEVICE, hint_queue());
        }
    });
}

/// Hints all free pages of this part.
fn hint(work: &mut Churn) {
    let mut at = 0;
    while at < work.pages() {
        alone(|| {
            let mut batch = 0;
            let mut first = [0; TAKEN_BACK];
            while batch < BATCH && at < work.pages() {
                let Some((start, count)) = next_run(work, &mut at) else { break };
                if batch < TAKEN_BACK {
                    first[batch] = start;
                }
                let len = (count as u64 * PAGE_SIZE) as u32;
                let descriptor =
                    Descriptor { address: work.address(start), len, flags: DEVICE_WRITES, next: 0 };
                // SAFETY: alone, and the device has given back all of the batch before.
                unsafe {
                    HINTS.describe(batch as u16, descriptor);
                    HINTS.add(batch as u16);
                }
                batch += 1;
            }
            for page in &first[..batch.min(TAKEN_BACK)] {
                work.take_back(*page);
            }
            // SAFETY: alone.
            unsafe { HINTS.carry_out(DEVICE, hint_queue()) };
            // And again when the device has seen it.
            if batch > TAKEN_BACK {
                work.turn_over();
            }
        });
    }
}

/// The next run of free pages from `at` on whose guest addresses follow each other: its first page and its length.
fn next_run(work: &Churn, at: &mut usize) -> Option<(usize, usize)> {
    while *at < work.pages() && !work.is_free(*at) {
        *at += 1;
    }
    let start = *at;
    if start == work.pages() {
        return None;
    }
    let address = work.address(start);
    *at += 1;
    while *at < work.pages()
        && work.is_free(*at)
        && work.address(*at) == address + (*at - start) as u64 * PAGE_SIZE
    {
        *at += 1;
    }
    Some((start, *at - start))
}

/// Reports some free pages. They are nobody's until the device has given the report back, which this waits for.
fn report(balloon: u64, work: &mut Churn) {
    let (mut looks, mut count) = (LOOKS, 0);
    let mut pages = [0; BATCH];
    while count < BATCH {
        let Some(at) = work.next_unreported(&mut looks) else { break };
        pages[count] = at;
        count += 1;
    }
    if count == 0 {
        return;
    }
    alone(|| {
        // SAFETY: alone, and the device has given back the report before.
        unsafe {
            for (number, at) in pages[..count].iter().enumerate() {
                let last = number + 1 == count;
                let flags = if last { DEVICE_WRITES } else { DEVICE_WRITES | crate::virtio::NEXT };
                let address = work.address(*at);
                let descriptor =
                    Descriptor { address, len: PAGE_SIZE as u32, flags, next: number as u16 + 1 };
                REPORTS.describe(number as u16, descriptor);
            }
            REPORTS.add(0);
            REPORTS.carry_out(DEVICE, report_queue(balloon));
        }
    });
    for at in &pages[..count] {
        work.mark_reported(*at);
    }
}
