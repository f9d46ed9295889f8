//! The balloon's driver: pages that the VMM wants back, statistics, hints about free pages when the
//! VMM asks for them, and reports of them all the time.
//!
//! It does what the standard allows and what is hardest on the VMM: pages are taken back and
//! written while the hint about them is in the queue, unseen (virtio 1.2, 5.5.6.5.1). vCPU 0 looks
//! for commands, tells statistics, and gives pages of its own part; each vCPU hints the pages of
//! its own. One queue serves all, one after the other.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::PAGE_SIZE;
use crate::boot_block::{BALLOON_HINTS, BALLOON_MMIO, BALLOON_REPORTING, MAX_CPUS};
use crate::churn::Churn;
use crate::virtio::{DEVICE_WRITES, Descriptor, Device, Queue, Shared};

const BALLOON: u32 = 5;
const DEVICE: Device = Device(BALLOON_MMIO);
const STATISTICS_FEATURE: u32 = 1 << 1;
const HINT_FEATURE: u32 = 1 << 3;
const REPORT_FEATURE: u32 = 1 << 5;
const TARGET: u64 = 0x100;
const ACTUAL: u64 = 0x104;
const COMMAND: u64 = 0x108;
const INFLATE: u32 = 0;
const DEFLATE: u32 = 1;
const STATISTICS: u32 = 2;
/// VIRTIO_BALLOON_S_MEMFREE and _MEMTOT (virtio 1.2, 5.5.6.4).
const MEMORY_FREE: u16 = 4;
const MEMORY: u16 = 5;
const STOP: u32 = 0;
/// Commands are from here on.
const FIRST_COMMAND: u32 = 2;
/// Pages given, hints and pieces of a report that go together.
const BATCH: usize = 128;
/// Of the pages in a batch of hints, those that are taken back before the VMM sees it.
const TAKEN_BACK: usize = 4;
/// Pages looked at for a report.
const LOOKS: usize = 8192;

static INFLATED: Queue<8> = Queue::new();
static DEFLATED: Queue<8> = Queue::new();
static TOLD: Queue<8> = Queue::new();
/// Pages in the balloon.
static GIVEN: AtomicU32 = AtomicU32::new(0);
/// The numbers of pages that are given or come back.
static FRAMES: Shared<[u32; BATCH]> = Shared(UnsafeCell::new([0; BATCH]));
/// Two statistics, ten bytes each.
static NUMBERS: Shared<[u8; 20]> = Shared(UnsafeCell::new([0; 20]));
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
    let features = bit(BALLOON_HINTS, HINT_FEATURE) | bit(BALLOON_REPORTING, REPORT_FEATURE);
    DEVICE.begin(BALLOON, STATISTICS_FEATURE | features);
    DEVICE.show(INFLATE, &INFLATED);
    DEVICE.show(DEFLATE, &DEFLATED);
    DEVICE.show(STATISTICS, &TOLD);
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

/// Gives pages, or takes them back, as the VMM wants: some at a time.
fn give(work: &mut Churn) {
    let (target, given) = (DEVICE.register(TARGET), GIVEN.load(Ordering::Relaxed));
    let inflates = target > given;
    let most = (target.abs_diff(given) as usize).min(BATCH);
    let mut pages = [0; BATCH];
    let (mut count, mut from) = (0, 0);
    while count < most {
        let Some(at) = (if inflates { work.give(from) } else { work.given(from) }) else { break };
        (pages[count], from) = (at, at + 1);
        count += 1;
    }
    if count == 0 {
        return;
    }
    let (ring, queue) = if inflates { (&INFLATED, INFLATE) } else { (&DEFLATED, DEFLATE) };
    // SAFETY: only vCPU 0 comes here, and the device has given back all that was before.
    unsafe {
        let frames = FRAMES.0.get();
        for (frame, at) in (*frames).iter_mut().zip(&pages[..count]) {
            *frame = (work.address(*at) / PAGE_SIZE) as u32;
        }
        let descriptor =
            Descriptor { address: frames as u64, len: count as u32 * 4, flags: 0, next: 0 };
        ring.describe(0, descriptor);
        ring.add(0);
        ring.carry_out(DEVICE, queue);
    }
    let given = if inflates {
        given + count as u32
    } else {
        pages[..count].iter().for_each(|at| work.get_back(*at));
        given - count as u32
    };
    GIVEN.store(given, Ordering::Relaxed);
    DEVICE.set_register(ACTUAL, given);
}

/// Tells statistics when the VMM has asked for them, which it does by giving the last ones back.
fn tell(work: &Churn) {
    // SAFETY: only vCPU 0 comes here, and the device does not have the numbers.
    unsafe {
        if !TOLD.is_given_back() {
            return;
        }
        let numbers = NUMBERS.0.get();
        let told = [(MEMORY_FREE, work.free_pages()), (MEMORY, work.pages())];
        for (bytes, (tag, pages)) in (*numbers).chunks_exact_mut(10).zip(told) {
            bytes[..2].copy_from_slice(&tag.to_le_bytes());
            bytes[2..].copy_from_slice(&(pages as u64 * PAGE_SIZE).to_le_bytes());
        }
        TOLD.describe(0, Descriptor { address: numbers as u64, len: 20, flags: 0, next: 0 });
        TOLD.add(0);
        DEVICE.notify(STATISTICS);
    }
}

/// What is due on vCPU `number`.
pub fn turn(number: usize, balloon: u64, work: &mut Churn) {
    if number == 0 {
        give(work);
        tell(work);
    }
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
    if number == 0
        && command >= FIRST_COMMAND
        && HINTED[0].swap(command, Ordering::Relaxed) != command
    {
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

/// The next run of free pages from `at` on whose guest addresses follow each other: its first page
/// and its length.
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

/// Reports some free pages. They are nobody's until the device has given the report back, which
/// this waits for.
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
