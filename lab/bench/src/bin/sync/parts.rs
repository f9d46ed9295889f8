//! The parts of one synchronisation: fetch from KVM, device log, merge into blocks and clear;
//! merged clears against one clear a page.
//!
//! "One clear a page" is what QEMU did for misaligned blocks: for each page of the range, dirty or
//! not, one `KVM_CLEAR_DIRTY_LOG` with one bit (here by one listener; QEMU's two made two). The
//! merging of bits beside it is left out, in its favour.

use std::time::Instant;

use anyhow::ensure;
use godwit_bench::report::{Better, Report, median};
use godwit_bench::table::{Column, Table, figure};
use godwit_memory::{FIRST_HARVEST, NEXT_HARVEST, segments};
use godwit_track::bare::BareMachine;
use godwit_track::{DirtyTracker, LogMode, VhostLog, VhostLogTracker, clear_dirty_log};
use godwit_units::{ByteCount, Gpa, PAGE_SIZE, PageCount, PageRun};
use serde_json::json;

use crate::Options;
use crate::machine::{Alignment, machine, some, total};

/// Milliseconds of each part of one synchronisation.
#[derive(Clone, Debug, Default)]
struct Parts {
    fetch: Vec<f64>,
    device: Vec<f64>,
    merged: Vec<f64>,
    per_page: Vec<f64>,
    merged_clears: u64,
    per_page_clears: u64,
}

impl Parts {
    fn whole(&self, clears: &[f64]) -> f64 {
        median(&self.fetch) + median(&self.device) + median(clears)
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn blocks(machine: &BareMachine) -> Vec<(usize, PageRun)> {
    machine.block_sizes().iter().map(|pages| PageRun::new(0, pages.0)).enumerate().collect()
}

fn harvest_all(tracker: &dyn DirtyTracker, machine: &BareMachine) -> anyhow::Result<u64> {
    let mut pages = 0;
    for (block, all) in blocks(machine) {
        tracker.harvest(block, all, PageCount::ZERO, &mut |run| pages += run.count.0)?;
    }
    Ok(pages)
}

/// One clear for each page of every slot; how many that were.
fn clear_page_by_page(machine: &BareMachine) -> anyhow::Result<u64> {
    let mut clears = 0;
    for slot in machine.slots() {
        for page in 0..slot.pages.0 {
            // A clear begins at a multiple of 64 and covers 64 pages, or the rest of the slot.
            let first = page & !63;
            let pages = (slot.pages.0 - first).min(64) as u32;
            clear_dirty_log(machine.vm(), slot.id, first, pages, &[1 << (page % 64)])?;
            clears += 1;
        }
    }
    Ok(clears)
}

fn one_setting(options: Options, alignment: Alignment, percent: u64) -> anyhow::Result<Parts> {
    let machine = machine(options.mib, alignment, None)?;
    let total = total(&machine);
    let dirty = some(total, percent);
    let frames = machine.slots().iter().map(|slot| slot.gfn.0 + slot.pages.0).max().unwrap_or(0);
    let log = VhostLog::new(PageCount(frames))?;
    let device = VhostLogTracker::start(&log, &machine.block_sizes(), machine.slots())?;
    let tracker = machine.log_tracker(LogMode::ManualInitiallySet)?;
    machine.touch(0, &(0..total as u32).collect::<Vec<_>>())?;
    tracker.begin_round();
    harvest_all(&tracker, &machine)?;
    let mut parts = Parts::default();
    for round in 0..options.rounds * 2 {
        machine.touch(0, &dirty)?;
        for slot in machine.slots() {
            for page in (0..slot.pages.0).step_by(50) {
                log.mark(Gpa((slot.gfn.0 + page) * PAGE_SIZE), ByteCount(512))?;
            }
        }
        tracker.begin_round();
        let began = Instant::now();
        let mut counted = 0;
        for (block, all) in blocks(&machine) {
            counted += tracker.count(block, all)?.0;
        }
        parts.fetch.push(milliseconds(began));
        ensure!(counted == dirty.len() as u64, "{counted} pages dirty of {}", dirty.len());
        let began = Instant::now();
        harvest_all(&device, &machine)?;
        parts.device.push(milliseconds(began));
        if round % 2 == 0 {
            let before = tracker.calls().clears;
            let began = Instant::now();
            let harvested = harvest_all(&tracker, &machine)?;
            parts.merged.push(milliseconds(began));
            ensure!(harvested == counted, "{harvested} pages harvested of {counted}");
            parts.merged_clears = tracker.calls().clears - before;
        } else {
            let began = Instant::now();
            parts.per_page_clears = clear_page_by_page(&machine)?;
            parts.per_page.push(milliseconds(began));
        }
    }
    Ok(parts)
}

/// Clears for 4 MiB of misaligned dirty memory: merged, and one a page.
fn clears_for_4_mib() -> anyhow::Result<u64> {
    let machine = machine(64, Alignment::Misaligned, None)?;
    let tracker = machine.log_tracker(LogMode::ManualInitiallySet)?;
    harvest_all(&tracker, &machine)?;
    machine.touch(0, &(1000..1000 + 1024).collect::<Vec<_>>())?;
    let before = tracker.calls().clears;
    let harvested = harvest_all(&tracker, &machine)?;
    ensure!(harvested == 1024, "{harvested} pages of 1,024");
    Ok(tracker.calls().clears - before)
}

/// Clears of one round of a migration with so much dirty, for each GiB: harvested as the engine's
/// channels do it. With `first` as in the first round, in which all is sent.
fn clears_of_a_round(options: Options, percent: u64, first: bool) -> anyhow::Result<f64> {
    let machine = machine(options.mib, Alignment::Misaligned, None)?;
    let tracker = machine.log_tracker(LogMode::ManualInitiallySet)?;
    machine.touch(0, &(0..total(&machine) as u32).collect::<Vec<_>>())?;
    tracker.begin_round();
    harvest_all(&tracker, &machine)?;
    let dirty = some(total(&machine), percent);
    machine.touch(0, &dirty)?;
    tracker.begin_round();
    let (before, mut pages) = (tracker.calls().clears, 0);
    for segment in segments(&machine.block_sizes()) {
        let mut at = segment.run.start;
        while at < segment.run.end() {
            let mut rest = PageRun::new(at.0, segment.run.end().0 - at.0);
            if first {
                rest.count = rest.count.min(FIRST_HARVEST);
            }
            at = tracker
                .harvest(segment.block, rest, NEXT_HARVEST, &mut |run| pages += run.count.0)?;
        }
    }
    ensure!(pages == dirty.len() as u64, "{pages} pages harvested of {}", dirty.len());
    Ok((tracker.calls().clears - before) as f64 / (options.mib as f64 / 1024.0))
}

/// By the share that is dirty.
const CLEARS: Table<(&str, [f64; 3])> = Table(&[
    Column { head: "", width: 24, cell: |row| row.0.to_owned() },
    Column { head: "1 %", width: 8, cell: |row| figure(row.1[0], 0) },
    Column { head: "10 %", width: 8, cell: |row| figure(row.1[1], 0) },
    Column { head: "100 %", width: 8, cell: |row| figure(row.1[2], 0) },
]);

/// What a migration makes of it: its channels share memory segment by segment, and each clears its
/// own.
fn clears_of_a_migration(options: Options, report: &mut Report) -> anyhow::Result<()> {
    println!("\nclears of one round of a migration, for each GiB");
    CLEARS.print_head();
    for (first, name) in [(true, "the first round"), (false, "each further round")] {
        let [one, ten, all] =
            [1, 10, 100].map(|percent| clears_of_a_round(options, percent, first));
        let (one, ten, all) = (one?, ten?, all?);
        CLEARS.print(&(name, [one, ten, all]));
        let key = format!("clears_a_gib_{}", if first { "first" } else { "next" });
        report.figure(&key, json!({ "1": one, "10": ten, "100": all }));
        if !first {
            // One for each segment, and one more where a segment lies in two slots.
            report.target("clears of a further round, for each GiB", all, 68.0, Better::Lower);
        }
    }
    Ok(())
}

/// How blocks lie, how much is dirty, and what was measured.
const PARTS: Table<(Alignment, u64, Parts)> = Table(&[
    Column { head: "blocks", width: 12, cell: |row| row.0.name().to_owned() },
    Column { head: "dirty", width: 6, cell: |row| format!("{} %", row.1) },
    Column { head: "from KVM", width: 8, cell: |row| figure(median(&row.2.fetch), 2) },
    Column { head: "devices", width: 8, cell: |row| figure(median(&row.2.device), 2) },
    Column { head: "merge + clear", width: 14, cell: |row| figure(median(&row.2.merged), 2) },
    Column { head: "clears", width: 8, cell: |row| row.2.merged_clears.to_string() },
    Column { head: "clear by page", width: 16, cell: |row| figure(median(&row.2.per_page), 1) },
    Column { head: "clears", width: 8, cell: |row| row.2.per_page_clears.to_string() },
    Column { head: "whole", width: 8, cell: |row| figure(row.2.whole(&row.2.merged), 2) },
    Column { head: "by page", width: 8, cell: |row| figure(row.2.whole(&row.2.per_page), 1) },
]);

pub(crate) fn measure(options: Options, report: &mut Report) -> anyhow::Result<()> {
    let clears = clears_for_4_mib()?;
    println!("clears for 4 MiB of misaligned dirty memory: {clears} (one a page: 1024)");
    report.figure("clears_for_4_mib", json!({ "merged": clears, "per_page": 1024 }));
    report.target("clears for 4 MiB of misaligned dirty memory", clears as f64, 1.0, Better::Lower);
    clears_of_a_migration(options, report)?;
    println!("\nparts of one synchronisation of {} MiB, ms", options.mib);
    PARTS.print_head();
    for percent in [10, 50] {
        let mut settings = Vec::new();
        for alignment in [Alignment::Aligned, Alignment::Misaligned] {
            let parts = one_setting(options, alignment, percent)?;
            let (merged, per_page) = (median(&parts.merged), median(&parts.per_page));
            let (whole, whole_per_page) =
                (parts.whole(&parts.merged), parts.whole(&parts.per_page));
            PARTS.print(&(alignment, percent, parts.clone()));
            report.figure(
                &format!("parts_{}_{percent}", alignment.name()),
                json!({
                    "fetch_ms": median(&parts.fetch), "device_ms": median(&parts.device),
                    "merged_ms": merged, "merged_clears": parts.merged_clears,
                    "per_page_ms": per_page, "per_page_clears": parts.per_page_clears,
                    "whole_ms": whole, "whole_per_page_ms": whole_per_page,
                }),
            );
            settings.push((merged, per_page, whole, whole_per_page));
        }
        let [(aligned, ..), (merged, per_page, whole, whole_per_page)] = settings[..] else {
            continue;
        };
        let at = format!("misaligned, {percent} % dirty");
        report.target(
            format!("{at}: part faster than one clear a page, x"),
            per_page / merged,
            40.0,
            Better::Higher,
        );
        report.target(
            format!("{at}: part against aligned, x"),
            merged / aligned,
            1.5,
            Better::Lower,
        );
        report.target(
            format!("{at}: whole synchronisation faster, x"),
            whole_per_page / whole,
            5.0,
            Better::Higher,
        );
    }
    Ok(())
}
