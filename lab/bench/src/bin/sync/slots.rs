//! As many memory slots as KVM has: made, tracked and harvested.

use std::time::Instant;

use godwit_bench::report::{Better, Report};
use godwit_track::bare::{BareMachine, Cut, Shape};
use godwit_track::{DirtyTracker, LogMode};
use godwit_units::{PageCount, PageRun};
use serde_json::json;

/// All of them; the machine needs one for itself.
const SLOTS: u64 = 32_764;

pub(crate) fn measure(report: &mut Report) -> anyhow::Result<()> {
    let pages = SLOTS - 1;
    let cut = |slot| Cut { block: 0, first: slot, pages: 1, frame: Shape::FIRST_FRAME + slot * 2 };
    let shape =
        Shape { blocks: vec![pages], slots: (0..pages).map(cut).collect(), vcpus: 1, ring: None };
    let began = Instant::now();
    let machine = BareMachine::new(&shape)?;
    let made = began.elapsed();
    let began = Instant::now();
    let tracker = machine.log_tracker(LogMode::ManualInitiallySet)?;
    let tracked = began.elapsed();
    let all = PageRun::new(0, pages);
    tracker.harvest(0, all, PageCount::ZERO, &mut |_| ())?;
    let every_second: Vec<u32> = (0..pages as u32).step_by(2).collect();
    machine.touch(0, &every_second)?;
    let began = Instant::now();
    let mut found = 0;
    tracker.harvest(0, all, PageCount::ZERO, &mut |run| found += run.count.0)?;
    let harvested = began.elapsed();
    let began = Instant::now();
    drop(tracker);
    let ended = began.elapsed();
    println!(
        "\n{SLOTS} slots: made in {:.0} ms, tracking started in {:.0} ms, half of them dirty and \
         harvested in {:.1} ms, tracking ended in {:.0} ms",
        made.as_secs_f64() * 1e3,
        tracked.as_secs_f64() * 1e3,
        harvested.as_secs_f64() * 1e3,
        ended.as_secs_f64() * 1e3,
    );
    report.figure(
        "slots",
        json!({
            "made_ms": made.as_secs_f64() * 1e3, "started_ms": tracked.as_secs_f64() * 1e3,
            "harvested_ms": harvested.as_secs_f64() * 1e3, "ended_ms": ended.as_secs_f64() * 1e3,
        }),
    );
    let missing = every_second.len() as f64 - found as f64;
    report.target(
        format!("dirty pages missed or invented in {SLOTS} slots"),
        missing.abs(),
        0.0,
        Better::Lower,
    );
    Ok(())
}
