//! The trackers against each other: what a harvest costs, and what being tracked costs the guest.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use godwit_bench::report::{Report, median};
use godwit_bench::table::{Column, Table, figure};
use godwit_memory::{SEGMENT_PAGES, segments};
use godwit_track::bare::{BareMachine, Wander};
use godwit_track::{DirtyTracker, LogMode, PagemapTracker};
use godwit_units::PageCount;
use serde_json::json;

use crate::Options;
use crate::machine::{Alignment, machine, some, total};

/// Entries of the dirty ring: the most that KVM has.
const RING: u32 = 65_536;

/// Whom to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    None,
    Log(LogMode),
    Ring,
    OwnPagemap,
}

const KINDS: [Kind; 5] = [
    Kind::None,
    Kind::Log(LogMode::ManualInitiallySet),
    Kind::Log(LogMode::ClearedByFetch),
    Kind::Ring,
    Kind::OwnPagemap,
];

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Log(LogMode::ClearedByFetch) => "KVM log, cleared by fetch",
            Self::Log(_) => "KVM log, manual protection",
            Self::Ring => "KVM ring",
            Self::OwnPagemap => "page tables",
        }
    }

    fn machine(self, mib: u64) -> anyhow::Result<BareMachine> {
        machine(mib, Alignment::Misaligned, (self == Self::Ring).then_some(RING))
    }

    fn start(self, machine: &BareMachine) -> anyhow::Result<Option<Box<dyn DirtyTracker>>> {
        Ok(Some(match self {
            Self::None => return Ok(None),
            Self::Log(mode) => Box::new(machine.log_tracker(mode)?),
            Self::Ring => Box::new(machine.ring_tracker()?),
            Self::OwnPagemap => {
                let mappings: Vec<_> =
                    machine.blocks().iter().map(|ram| vec![ram.mapping()]).collect();
                Box::new(PagemapTracker::start_own(&mappings)?)
            }
        }))
    }
}

/// Harvests everything as a round does: segment by segment.
fn round(tracker: &dyn DirtyTracker, machine: &BareMachine) -> anyhow::Result<u64> {
    let mut pages = 0;
    tracker.begin_round();
    for segment in segments(&machine.block_sizes()) {
        tracker.harvest(segment.block, segment.run, PageCount::ZERO, &mut |run| {
            pages += run.count.0
        })?;
    }
    Ok(pages)
}

const PERCENT: [u64; 4] = [0, 1, 10, 50];

/// A tracker, and for each share of dirty pages the harvest and the guest's time.
const HARVESTS: Table<(&str, [(f64, f64); PERCENT.len()])> = Table(&[
    Column { head: "tracker", width: 28, cell: |row| row.0.to_owned() },
    Column { head: "0 %", width: 16, cell: |row| figure(row.1[0].0, 3) },
    Column { head: "1 %", width: 16, cell: |row| both(row.1[1]) },
    Column { head: "10 %", width: 16, cell: |row| both(row.1[2]) },
    Column { head: "50 %", width: 16, cell: |row| both(row.1[3]) },
]);

fn both((harvest, write): (f64, f64)) -> String {
    format!("{harvest:.2} ({write:.2})")
}

/// What a harvest of all memory costs, at 0, 1, 10 and 50 % of dirty pages.
pub(crate) fn harvests(options: Options, report: &mut Report) -> anyhow::Result<()> {
    println!(
        "\nharvest of {} MiB in segments of {} pages, ms (and guest time to dirty a page, \
         microseconds)",
        options.mib, SEGMENT_PAGES
    );
    HARVESTS.print_head();
    for kind in KINDS.into_iter().skip(1) {
        let machine = kind.machine(options.mib)?;
        let Some(tracker) = kind.start(&machine)? else { continue };
        machine.touch(0, &(0..total(&machine) as u32).collect::<Vec<_>>())?;
        round(tracker.as_ref(), &machine)?;
        let mut row = (kind.name(), [(f64::NAN, f64::NAN); PERCENT.len()]);
        let mut figures = serde_json::Map::new();
        for (percent, cell) in PERCENT.into_iter().zip(&mut row.1) {
            let dirty = some(total(&machine), percent);
            let (mut harvests, mut writes) = (Vec::new(), Vec::new());
            for _ in 0..options.rounds {
                let began = Instant::now();
                machine.touch(0, &dirty)?;
                writes.push(began.elapsed().as_secs_f64() * 1e6 / dirty.len().max(1) as f64);
                let began = Instant::now();
                let pages = round(tracker.as_ref(), &machine)?;
                harvests.push(began.elapsed().as_secs_f64() * 1e3);
                ensure!(pages == dirty.len() as u64, "{}: {pages} of {}", kind.name(), dirty.len());
            }
            let (harvest, write) = (median(&harvests), median(&writes));
            *cell = (harvest, write);
            figures.insert(
                percent.to_string(),
                json!({ "harvest_ms": harvest, "us_per_write_fault": write }),
            );
        }
        HARVESTS.print(&row);
        report.figure(&format!("harvest, {}", kind.name()), figures);
    }
    Ok(())
}

const SPEEDS: Table<(&str, f64, f64)> = Table(&[
    Column { head: "tracker", width: 28, cell: |row| row.0.to_owned() },
    Column { head: "writes/s", width: 16, cell: |row| figure(row.1, 0) },
    Column { head: "of untracked", width: 16, cell: |row| figure(row.2 * 100.0, 1) + " %" },
]);

/// How much slower a guest is that writes at full speed, harvested twice a second.
pub(crate) fn slowdown(options: Options, report: &mut Report) -> anyhow::Result<()> {
    const TIME: Duration = Duration::from_millis(2000);
    const EVERY: Duration = Duration::from_millis(500);
    /// A part of the memory is written, so that every round finds all of it written many times.
    const PART: u64 = 16;
    let mut rates = vec![Vec::new(); KINDS.len()];
    for _ in 0..options.rounds {
        for (kind, rates) in KINDS.into_iter().zip(&mut rates) {
            let machine = kind.machine(options.mib)?;
            let pages = total(&machine);
            machine.touch(0, &(0..pages as u32).collect::<Vec<_>>())?;
            let tracker = kind.start(&machine)?;
            let how = Wander { first: 0, pages: pages / PART, seed: 1, ..Wander::default() };
            let rate = thread::scope(|scope| -> anyhow::Result<f64> {
                let vcpu = scope.spawn(|| machine.wander(0, how));
                let harvested = (|| {
                    // Into the steady state first.
                    thread::sleep(EVERY);
                    if let Some(tracker) = &tracker {
                        round(tracker.as_ref(), &machine)?;
                    }
                    let (began, before) = (Instant::now(), machine.writes(0));
                    while began.elapsed() < TIME {
                        thread::sleep(EVERY);
                        if let Some(tracker) = &tracker {
                            round(tracker.as_ref(), &machine)?;
                        }
                    }
                    Ok((machine.writes(0) - before) as f64 / began.elapsed().as_secs_f64())
                })();
                machine.halt();
                vcpu.join().map_err(|_| anyhow::anyhow!("the vCPU's thread panicked"))??;
                harvested
            })?;
            rates.push(rate);
        }
    }
    println!(
        "\na guest writing {} MiB at full speed, harvested every {} ms",
        options.mib / PART,
        EVERY.as_millis()
    );
    SPEEDS.print_head();
    let free = median(&rates[0]);
    for (kind, rates) in KINDS.into_iter().zip(&rates) {
        let rate = median(rates);
        SPEEDS.print(&(kind.name(), rate, rate / free));
        report.figure(
            &format!("speed, {}", kind.name()),
            json!({ "writes_per_s": rate, "of_free": rate / free }),
        );
    }
    Ok(())
}
