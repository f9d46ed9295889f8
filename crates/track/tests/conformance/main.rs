//! One conformance suite for all trackers, on real vCPUs: nothing lost, nothing invented.
//!
//! A bare-metal guest on /dev/kvm and a device thread write random pages while harvests run, as in
//! a migration: a page that is reported is copied after it was reported. When all writers have
//! stopped and a last harvest is done, the copy must be the memory. RAM blocks are cut into slots
//! at pages that no word of a bitmap begins at. Skips aloud without /dev/kvm.
#![allow(clippy::unwrap_used)]

mod setup;

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use godwit_track::bare::{BareMachine, Wander, kvm_is_usable};
use godwit_track::{AsOf, DirtyTracker, TrackError, VhostLog};
use godwit_units::{ByteCount, Gpa, PAGE_SIZE, PageCount, PageIndex, PageRun};
use setup::{KINDS, Kind, Tracked};

/// Tells past the harness, which keeps what a passing test prints to itself, why nothing is tested.
fn skip(what: &str, why: &str) {
    let line = format!("\nSKIPPED {what}: {why}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

/// The kinds that can be tried here.
fn kinds(what: &str) -> Vec<Kind> {
    if !kvm_is_usable() {
        skip(
            what,
            "no usable /dev/kvm (load the kvm module, or give this user the right to open it)",
        );
        return Vec::new();
    }
    KINDS
        .into_iter()
        .filter(|kind| match kind.support() {
            Ok(()) => true,
            Err(why) => {
                skip(&format!("{what} for {kind:?}"), &why);
                false
            }
        })
        .collect()
}

fn harvest(
    tracker: &dyn DirtyTracker,
    block: usize,
    within: PageRun,
    limit: u64,
) -> (Vec<PageRun>, PageIndex) {
    let mut runs = Vec::new();
    let next = tracker.harvest(block, within, PageCount(limit), &mut |run| runs.push(run)).unwrap();
    (runs, next)
}

/// Harvests everything; the pages, each as (block, page).
fn harvest_all(tracker: &dyn DirtyTracker, machine: &BareMachine) -> BTreeSet<(usize, u64)> {
    tracker.begin_round();
    let mut pages = BTreeSet::new();
    for (block, ram) in machine.blocks().iter().enumerate() {
        let (runs, next) = harvest(tracker, block, PageRun::new(0, ram.pages().0), 0);
        assert_eq!(next.0, ram.pages().0);
        assert!(
            runs.windows(2).all(|pair| pair[0].end() < pair[1].start),
            "runs are maximal and in order"
        );
        pages.extend(
            runs.iter().flat_map(|run| (run.start.0..run.end().0).map(|page| (block, page))),
        );
    }
    pages
}

/// The number of a page, counted through all blocks, as the guest has it.
fn number(machine: &BareMachine, (block, page): (usize, u64)) -> u32 {
    let before: u64 = machine.block_sizes()[..block].iter().map(|pages| pages.0).sum();
    (before + page) as u32
}

/// A device of the VMM: writes a page of a block through its mapping, then marks it in the log.
fn device_write(machine: &BareMachine, log: &VhostLog, (block, page): (usize, u64), stamp: u64) {
    machine.blocks()[block].store(page * PAGE_SIZE + 2048, stamp);
    let address = Gpa(machine.frame(block, page).unwrap().0 * PAGE_SIZE + 2048);
    log.mark(address, ByteCount(8)).unwrap();
}

/// A copy of the guest's memory, as a destination would have it.
struct Copy<'a> {
    machine: &'a BareMachine,
    blocks: Vec<Vec<Mutex<[u8; 4096]>>>,
    copied: AtomicU64,
}

impl<'a> Copy<'a> {
    fn new(machine: &'a BareMachine) -> Self {
        let pages = |count: PageCount| (0..count.0).map(|_| Mutex::new([0; 4096])).collect();
        let blocks = machine.block_sizes().into_iter().map(pages).collect();
        Self { machine, blocks, copied: AtomicU64::new(0) }
    }

    fn take(&self, block: usize, run: PageRun) {
        for page in run.start.0..run.end().0 {
            let mut copy = self.blocks[block][page as usize].lock().unwrap();
            self.machine.blocks()[block].read(PageIndex(page), &mut *copy).unwrap();
        }
        self.copied.fetch_add(run.count.0, Ordering::Relaxed);
    }

    /// Pages that differ from the guest's.
    fn differences(&self) -> Vec<(usize, u64)> {
        let mut page = [0; 4096];
        let mut differ = Vec::new();
        for (block, copies) in self.blocks.iter().enumerate() {
            for (number, copy) in (0..).zip(copies) {
                self.machine.blocks()[block].read(PageIndex(number), &mut page).unwrap();
                if *copy.lock().unwrap() != page {
                    differ.push((block, number));
                }
            }
        }
        differ
    }
}

/// One thread's share of a round: every second segment, in pieces of `limit` pages.
fn copy_segments(tracker: &dyn DirtyTracker, copy: &Copy<'_>, thread: u64, limit: u64) {
    /// No multiple of 64, so that segments share words.
    const SEGMENT: u64 = 500;
    for (block, pages) in copy.machine.block_sizes().into_iter().enumerate() {
        for start in (thread * SEGMENT..pages.0).step_by(2 * SEGMENT as usize) {
            let end = pages.0.min(start + SEGMENT);
            let mut at = start;
            while at < end {
                let (runs, next) = harvest(tracker, block, PageRun::new(at, end - at), limit);
                assert!(runs.iter().all(|run| run.start.0 >= at && run.end() <= next));
                runs.iter().for_each(|run| copy.take(block, *run));
                at = next.0;
            }
        }
    }
}

fn round(tracker: &dyn DirtyTracker, copy: &Copy<'_>, limit: u64) {
    thread::scope(|scope| {
        scope.spawn(|| copy_segments(tracker, copy, 1, limit));
        copy_segments(tracker, copy, 0, limit);
    });
}

/// Stops all writers when dropped.
struct Halt<'a>(&'a BareMachine, &'a AtomicBool);

impl Drop for Halt<'_> {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
        self.0.halt();
    }
}

/// The block and the page in it of a page counted through all blocks.
fn place(machine: &BareMachine, mut page: u64) -> (usize, u64) {
    let mut block = 0;
    while page >= machine.blocks()[block].pages().0 {
        page -= machine.blocks()[block].pages().0;
        block += 1;
    }
    (block, page)
}

/// Migrates a machine whose vCPUs and device write all the time. They write some pages many times
/// and then leave them alone for long, so that a write that was lost stays lost and is not made up
/// for by the next. `rounds`: says when rounds begin.
fn migrate_while_writing(tracked: &Tracked, rounds: bool) {
    let Tracked { machine, tracker, log, .. } = tracked;
    let tracker = tracker.as_ref();
    let total: u64 = machine.block_sizes().iter().map(|pages| pages.0).sum();
    let copy = Copy::new(machine);
    let stop = AtomicBool::new(false);
    let stamps = AtomicU64::new(1);
    machine.go();
    let got_on = thread::scope(|scope| {
        for vcpu in 0..tracked.vcpus {
            let seed = 0x9e37_79b9_7f4a_7c15 ^ (vcpu as u64) << 40;
            let how = Wander { first: 0, pages: total, idle: 1000, window: 50, dwell: 300, seed };
            scope.spawn(move || machine.wander(vcpu, how).unwrap());
        }
        let device = scope.spawn(|| {
            let mut rng = fastrand::Rng::with_seed(1);
            while !stop.load(Ordering::Relaxed) {
                let stamp = stamps.fetch_add(1, Ordering::Relaxed);
                let page = stamp / 200 * 40 + rng.u64(..40);
                device_write(machine, log, place(machine, page % total), stamp);
                (0..500).for_each(|_| std::hint::spin_loop());
            }
        });
        // Also when an assertion fails below: else the scope would wait for them for ever.
        let halt = Halt(machine, &stop);
        // The first round sends everything.
        for (block, pages) in machine.block_sizes().into_iter().enumerate() {
            copy.take(block, PageRun::new(0, pages.0));
        }
        let began = Instant::now();
        let mut number = 0;
        let began_at: Vec<u64> = (0..tracked.vcpus).map(|vcpu| machine.writes(vcpu)).collect();
        let enough = || {
            (0..tracked.vcpus).all(|vcpu| machine.writes(vcpu) > began_at[vcpu] + 2000)
                && stamps.load(Ordering::Relaxed) > 100
                && copy.copied.load(Ordering::Relaxed) > 2 * total
        };
        // Until all writers got on, however busy this host is.
        while number < 5
            || began.elapsed() < Duration::from_millis(300)
            || !enough() && began.elapsed() < Duration::from_secs(60)
        {
            if rounds {
                tracker.begin_round();
            }
            round(tracker, &copy, [0, 7, 100][number % 3]);
            number += 1;
        }
        drop(halt);
        device.join().unwrap();
        enough()
    });
    assert!(
        got_on,
        "{:?}: a writer did not get on, or hardly anything was harvested",
        tracked.kind
    );
    if rounds {
        tracker.begin_round();
    }
    if rounds {
        // Nobody writes any more: no need to clear.
        for (block, pages) in machine.block_sizes().into_iter().enumerate() {
            tracker
                .look(block, PageRun::new(0, pages.0), AsOf::Round, &mut |run| {
                    copy.take(block, run)
                })
                .unwrap();
        }
    } else {
        round(tracker, &copy, 0);
    }
    assert_eq!(copy.differences(), [], "{:?} lost pages", tracked.kind);
}

#[test]
fn nothing_is_lost_while_one_vcpu_and_a_device_write() {
    for kind in kinds("writes of one vCPU during harvests") {
        migrate_while_writing(&kind.start(1), true);
    }
}

#[test]
fn nothing_is_lost_while_two_vcpus_and_a_device_write() {
    for kind in kinds("writes of two vCPUs during harvests") {
        migrate_while_writing(&kind.start(2), true);
    }
}

#[test]
fn nothing_is_lost_when_nobody_says_that_rounds_begin() {
    for kind in kinds("writes during harvests without rounds") {
        migrate_while_writing(&kind.start(1), false);
    }
}

#[test]
fn nothing_is_lost_by_one_tracker_after_another() {
    for kind in kinds("a second migration of the same machine") {
        let first = kind.start(1);
        migrate_while_writing(&first, true);
        let second = first.again();
        migrate_while_writing(&second, true);
    }
}

#[test]
fn nothing_is_invented() {
    for kind in kinds("exact harvests") {
        let tracked = kind.start(2);
        let Tracked { machine, tracker, log, .. } = &tracked;
        let tracker = tracker.as_ref();
        let all: Vec<u32> =
            (0..machine.block_sizes().iter().map(|pages| pages.0 as u32).sum()).collect();
        machine.touch(0, &all).unwrap();
        harvest_all(tracker, machine);
        assert_eq!(harvest_all(tracker, machine), BTreeSet::new(), "{kind:?}: nobody wrote");

        // Around the ends of blocks, slots and words; neighbours and single pages.
        let guest = [
            (0, 0),
            (0, 63),
            (0, 64),
            (0, 332),
            (0, 333),
            (0, 1000),
            (0, 3000),
            (1, 0),
            (1, 1),
            (1, 2049),
        ];
        let device = [(0, 1), (0, 999), (1, 2050), (1, 4098), (2, 0), (2, 69)];
        for (vcpu, half) in guest.chunks(5).enumerate() {
            let pages: Vec<u32> = half.iter().map(|page| number(machine, *page)).collect();
            machine.touch(vcpu, &pages).unwrap();
        }
        device.iter().for_each(|page| device_write(machine, log, *page, 7));
        let expected: BTreeSet<(usize, u64)> = guest.into_iter().chain(device).collect();
        for block in 0..3 {
            let pages = expected.iter().filter(|page| page.0 == block).count() as u64;
            let within = PageRun::new(0, machine.block_sizes()[block].0);
            assert_eq!(tracker.count(block, within).unwrap(), PageCount(pages), "{kind:?} counts");
        }
        tracker.begin_round();
        let mut seen = BTreeSet::new();
        for (block, ram) in machine.blocks().iter().enumerate() {
            let mut see =
                |run: PageRun| seen.extend((run.start.0..run.end().0).map(|page| (block, page)));
            tracker.look(block, PageRun::new(0, ram.pages().0), AsOf::Round, &mut see).unwrap();
        }
        assert_eq!(seen, expected, "{kind:?} peeks");
        assert_eq!(harvest_all(tracker, machine), expected, "{kind:?}");
        assert_eq!(harvest_all(tracker, machine), BTreeSet::new(), "{kind:?}: harvested already");
    }
}

#[test]
fn only_what_was_asked_for_is_harvested() {
    for kind in kinds("harvests of a part") {
        let tracked = kind.start(1);
        let Tracked { machine, tracker, log, .. } = &tracked;
        let tracker = tracker.as_ref();
        machine.touch(0, &[0]).unwrap();
        harvest_all(tracker, machine);

        // One word of one log, a slot's end within it, pages of both logs; asked for in three
        // parts.
        machine.touch(0, &[320, 321, 330, 332, 333, 334, 350]).unwrap();
        device_write(machine, log, (0, 331), 1);
        device_write(machine, log, (0, 360), 1);
        tracker.begin_round();
        assert_eq!(
            harvest(tracker, 0, PageRun::new(321, 11), 0).0,
            [PageRun::new(321, 1), PageRun::new(330, 2)]
        );
        // Written after the slot was fetched, and asked for in the same round or the next.
        machine.touch(0, &[340, 325]).unwrap();
        let mut later = harvest(tracker, 0, PageRun::new(332, 100), 4).0;
        tracker.begin_round();
        later.extend(harvest(tracker, 0, PageRun::new(300, 100), 0).0);
        let mut pages: Vec<u64> = later.iter().flat_map(|run| run.start.0..run.end().0).collect();
        pages.sort_unstable();
        pages.dedup();
        assert_eq!(pages, [320, 325, 332, 333, 334, 340, 350, 360], "{kind:?}");
        assert_eq!(harvest_all(tracker, machine), BTreeSet::new(), "{kind:?}");
    }
}

#[test]
fn a_harvest_stops_at_its_limit_and_goes_on_from_there() {
    for kind in kinds("limits of harvests") {
        let tracked = kind.start(1);
        let Tracked { machine, tracker, log, .. } = &tracked;
        let tracker = tracker.as_ref();
        machine.touch(0, &[0]).unwrap();
        harvest_all(tracker, machine);
        let pages: Vec<u32> = (300..360).chain(2000..2100).collect();
        machine.touch(0, &pages).unwrap();
        (310..380).for_each(|page| device_write(machine, log, (0, page), 9));

        let all = PageRun::new(0, 3001);
        tracker.begin_round();
        assert_eq!(
            harvest(tracker, 0, all, 50),
            (vec![PageRun::new(300, 50)], PageIndex(350)),
            "{kind:?}"
        );
        let rest = PageRun::new(350, 3001 - 350);
        let (runs, next) = harvest(tracker, 0, rest, 31);
        assert_eq!(runs, [PageRun::new(350, 30), PageRun::new(2000, 1)], "{kind:?}");
        assert_eq!(next, PageIndex(2001));
        let rest = PageRun::new(2001, 1000);
        assert_eq!(
            harvest(tracker, 0, rest, 1000),
            (vec![PageRun::new(2001, 99)], PageIndex(3001))
        );
    }
}

#[test]
fn a_ring_in_use_is_refused_and_free_again_after() {
    if kinds("rings in use").contains(&Kind::Ring) {
        let Tracked { machine, tracker, .. } = Kind::Ring.start(1);
        assert!(matches!(machine.ring_tracker(), Err(TrackError::RingsInUse)));
        drop(tracker);
        assert!(machine.ring_tracker().is_ok());
    }
}

#[test]
fn a_full_ring_stops_its_vcpu_only_until_it_is_emptied() {
    if kinds("full rings").contains(&Kind::Ring) {
        setup::rings_that_fill_up();
    }
}

/// The cause that this is named for: a tracker that found an overrun returned before it had reset
/// the rings, so that every KVM_RUN of the guest ended with a full ring from then on.
#[test]
fn a_guest_whose_ring_was_overrun_runs_on() {
    if kinds("overrun rings").contains(&Kind::Ring) {
        setup::a_ring_that_is_overrun();
    }
}

#[test]
fn one_clear_for_each_contiguous_chunk() {
    if kinds("the number of clears").contains(&Kind::Log(setup::BEST)) {
        setup::one_clear_for_4_mib();
    }
}

#[test]
fn all_slots_that_kvm_has() {
    if kinds("32,764 slots").contains(&Kind::Log(setup::BEST)) {
        setup::all_slots();
    }
}
