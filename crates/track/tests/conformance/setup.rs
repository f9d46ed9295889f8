//! The trackers under test, each on a machine of its own.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_track::bare::{BareMachine, Cut, Shape, Wander};
use godwit_track::{
    DirtyTracker, LogMode, PagemapTracker, TrackError, UnionTracker, VhostLog, VhostLogTracker,
    kernel_support,
};
use godwit_units::{PageCount, PageRun};

pub(crate) const BEST: LogMode = LogMode::ManualInitiallySet;

/// What is tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// KVM's dirty log, with a device log.
    Log(LogMode),
    /// KVM's dirty ring, with a device log.
    Ring,
    /// The page tables of this process, which see vCPUs and devices.
    OwnPagemap,
    /// The same, governed without a limit.
    Governed,
}

pub(crate) const KINDS: [Kind; 6] = [
    Kind::Log(LogMode::ManualInitiallySet),
    Kind::Log(LogMode::Manual),
    Kind::Log(LogMode::ClearedByFetch),
    Kind::Ring,
    Kind::OwnPagemap,
    Kind::Governed,
];

/// A machine with its tracker.
pub(crate) struct Tracked {
    // Before the machine whose slots it logs.
    pub(crate) tracker: Box<dyn DirtyTracker>,
    pub(crate) log: Arc<VhostLog>,
    pub(crate) machine: Arc<BareMachine>,
    pub(crate) vcpus: usize,
    pub(crate) kind: Kind,
}

/// Three blocks in nine slots, none of which but the first of each block begins where a word
/// begins, at frames that do not either, out of order and with gaps.
fn shape(vcpus: usize, ring: Option<u32>) -> Shape {
    let cut =
        |block, first, pages, frame| Cut { block, first, pages, frame: Shape::FIRST_FRAME + frame };
    let slots = vec![
        cut(2, 0, 70, 20_000),
        cut(0, 0, 333, 5),
        cut(0, 333, 667, 338),
        cut(0, 1000, 1500, 10_001),
        cut(0, 2500, 501, 1_005),
        cut(1, 0, 1, 3_000),
        cut(1, 1, 2049, 3_001),
        cut(1, 2050, 47, 30_063),
        cut(1, 2097, 2002, 6_000),
    ];
    Shape { blocks: vec![3001, 4099, 70], slots, vcpus, ring }
}

pub(crate) fn nothing() -> Box<dyn DirtyTracker> {
    Box::new(UnionTracker::new(&[], Vec::new()))
}

impl Kind {
    /// Whether this kernel has what it takes.
    pub(crate) fn support(self) -> Result<(), String> {
        match self {
            Self::Log(mode) => {
                let machine =
                    BareMachine::new(&shape(1, None)).map_err(|error| error.to_string())?;
                let offered = LogMode::offered(machine.vm());
                let rank = |mode| {
                    [LogMode::ClearedByFetch, LogMode::Manual, BEST].iter().position(|m| *m == mode)
                };
                if rank(mode) <= rank(offered) { Ok(()) } else { Err(format!("only {offered}")) }
            }
            Self::Ring => {
                BareMachine::new(&shape(1, Some(1024))).map(drop).map_err(|error| error.to_string())
            }
            Self::OwnPagemap => kernel_support().map_err(|error| error.to_string()),
            Self::Governed => {
                kernel_support().map_err(|error| error.to_string())?;
                let tracker = PagemapTracker::start_own(&[]).map_err(|error| error.to_string())?;
                tracker.prepare_own_governor(&[]).map_err(|error| error.to_string())
            }
        }
    }

    /// A machine with `vcpus` vCPUs, tracked.
    pub(crate) fn start(self, vcpus: usize) -> Tracked {
        let ring = (self == Self::Ring).then_some(16_384);
        let machine = Arc::new(BareMachine::new(&shape(vcpus, ring)).unwrap());
        let log = VhostLog::new(PageCount(Shape::FIRST_FRAME + 40_000)).unwrap();
        Tracked { tracker: nothing(), log, machine, vcpus, kind: self }.again()
    }
}

impl Tracked {
    /// The same machine with a new tracker.
    pub(crate) fn again(self) -> Self {
        let Self { tracker, log, machine, vcpus, kind } = self;
        drop(tracker);
        let (blocks, slots) = (machine.block_sizes(), machine.slots());
        let device = VhostLogTracker::start(&log, &blocks, slots).unwrap();
        let with_device =
            |tracker| Box::new(UnionTracker::new(&blocks, vec![tracker, Box::new(device)]));
        let tracker: Box<dyn DirtyTracker> = match kind {
            Kind::Log(mode) => with_device(Box::new(machine.log_tracker(mode).unwrap())),
            Kind::Ring => with_device(Box::new(machine.ring_tracker().unwrap())),
            Kind::OwnPagemap => {
                let mappings: Vec<_> =
                    machine.blocks().iter().map(|ram| vec![ram.mapping()]).collect();
                Box::new(PagemapTracker::start_own(&mappings).unwrap())
            }
            Kind::Governed => {
                let mappings: Vec<_> =
                    machine.blocks().iter().map(|ram| vec![ram.mapping()]).collect();
                let tracker = PagemapTracker::start_own(&mappings).unwrap();
                // Nobody is known to be a vCPU: all are answered at once.
                tracker.prepare_own_governor(&[]).unwrap();
                tracker.govern(Some(f64::INFINITY)).unwrap();
                Box::new(tracker)
            }
        };
        Self { tracker, log, machine, vcpus, kind }
    }
}

/// 4 MiB of dirty memory, at a page where no word begins: one clear.
pub(crate) fn one_clear_for_4_mib() {
    let slots = vec![
        Cut { block: 0, first: 0, pages: 37, frame: Shape::FIRST_FRAME + 7 },
        Cut { block: 0, first: 37, pages: 1963, frame: Shape::FIRST_FRAME + 5001 },
    ];
    let machine =
        BareMachine::new(&Shape { blocks: vec![2000], slots, vcpus: 1, ring: None }).unwrap();
    let tracker = machine.log_tracker(BEST).unwrap();
    let all = PageRun::new(0, 2000);
    tracker.harvest(0, all, PageCount(0), &mut |_| ()).unwrap();
    let pages: Vec<u32> = (500..1524).collect();
    machine.touch(0, &pages).unwrap();
    let before = tracker.calls();
    let mut runs = Vec::new();
    tracker.harvest(0, all, PageCount(0), &mut |run| runs.push(run)).unwrap();
    assert_eq!(runs, [PageRun::new(500, 1024)]);
    assert_eq!(tracker.calls().clears - before.clears, 1);
    tracker
        .harvest(0, all, PageCount(0), &mut |run| panic!("{run:?} was harvested before"))
        .unwrap();
    assert_eq!(tracker.calls().clears - before.clears, 1, "a clean log needs no clear");
}

/// A list of pages several times as long as the ring: the vCPU stops, the ring is emptied, and it
/// goes on.
pub(crate) fn rings_that_fill_up() {
    let machine = Arc::new(BareMachine::new(&shape(1, Some(1024))).unwrap());
    let tracker = machine.ring_tracker().unwrap();
    let pages: Vec<u32> = (0..7000).rev().collect();
    for _ in 0..5 {
        machine.touch(0, &pages).unwrap();
        let mut found = 0;
        for (block, pages) in machine.block_sizes().into_iter().enumerate() {
            let all = PageRun::new(0, pages.0);
            tracker.harvest(block, all, PageCount(0), &mut |run| found += run.count.0).unwrap();
        }
        assert_eq!(found, 7000);
    }
}

/// A vCPU overruns its ring; the tracker says so, and the guest runs at full speed under it and
/// after it.
pub(crate) fn a_ring_that_is_overrun() {
    const PAGES: u64 = 16_384;
    let slots = vec![Cut { block: 0, first: 0, pages: PAGES, frame: Shape::FIRST_FRAME }];
    let shape = Shape { blocks: vec![PAGES], slots, vcpus: 1, ring: Some(1024) };
    let machine = Arc::new(BareMachine::new(&shape).unwrap());
    let tracker = machine.ring_tracker().unwrap();
    let all = PageRun::new(0, PAGES);
    let harvest = || tracker.harvest(0, all, PageCount(0), &mut |_| {});
    for burst in 0..4 {
        machine.burst(0, burst * 4000, 4000).unwrap();
    }
    if harvest().is_ok() {
        crate::skip("a ring that is overrun", "this KVM stops a vCPU before its ring is full");
        return;
    }
    let write_on = |while_writing: &dyn Fn()| {
        let before = machine.writes(0);
        machine.go();
        let ended = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let how = Wander { pages: PAGES, seed: 7, ..Wander::default() };
                machine.wander(0, how)
            });
            let began = Instant::now();
            while machine.writes(0) < before + 20_000
                && began.elapsed() < Duration::from_secs(30)
                && !writer.is_finished()
            {
                while_writing();
            }
            machine.halt();
            writer.join().unwrap()
        });
        ended.unwrap();
        machine.writes(0) - before
    };
    // Nobody harvests: the vCPU empties its ring by itself. Then harvests in between, each with the
    // same error.
    assert!(write_on(&|| std::thread::yield_now()) >= 20_000);
    let fails = || assert!(matches!(harvest(), Err(TrackError::RingOverrun { vcpu: 0 })));
    assert!(write_on(&|| fails()) >= 20_000);
    drop(tracker);
    assert!(write_on(&|| std::thread::yield_now()) >= 20_000);
    assert!(matches!(machine.ring_tracker(), Err(TrackError::RingOverrun { vcpu: 0 })));
}

/// As many slots as KVM has, but for the machine's own.
pub(crate) fn all_slots() {
    const SLOTS: u64 = 32_763;
    // Two pages each, in two blocks; every other frame is left out, so that no two can be taken for
    // one.
    let slots = (0..SLOTS).map(|slot| Cut {
        block: (slot % 2) as u32,
        first: slot / 2 * 2,
        pages: 2,
        frame: Shape::FIRST_FRAME + slot * 3,
    });
    let pages = |block: u64| (SLOTS - block).div_ceil(2) * 2;
    let shape =
        Shape { blocks: vec![pages(0), pages(1)], slots: slots.collect(), vcpus: 1, ring: None };
    let began = Instant::now();
    let machine = BareMachine::new(&shape).unwrap();
    let made = began.elapsed();
    let tracker = machine.log_tracker(BEST).unwrap();
    let started = began.elapsed();
    let harvest = |block: usize| {
        let mut found = Vec::new();
        let within = PageRun::new(0, pages(block as u64));
        tracker.harvest(block, within, PageCount(0), &mut |run| found.push(run)).unwrap();
        found
    };
    (0..2).for_each(|block| drop(harvest(block)));
    machine.touch(0, &[0, 3, 4, 5, 16_000, 32_763, 32_764, 40_000, 65_525]).unwrap();
    let before = began.elapsed();
    let first =
        [(0, 1), (3, 3), (16_000, 1), (32_763, 1)].map(|(start, count)| PageRun::new(start, count));
    let second = [(0, 1), (7236, 1), (32_761, 1)].map(|(start, count)| PageRun::new(start, count));
    assert_eq!(harvest(0), first);
    assert_eq!(harvest(1), second);
    let took = began.elapsed() - before;
    drop(tracker);
    println!(
        "32,764 slots: made in {made:?}, tracked after {:?}, harvested in {took:?}, all over after \
         {:?}",
        started - made,
        began.elapsed()
    );
}
