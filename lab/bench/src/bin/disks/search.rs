//! Finding the few dirty blocks of a large disk: 1 TiB in blocks of 64 KiB, one of ten thousand
//! dirty.

use std::hint::black_box;
use std::time::Instant;

use godwit_bench::report::{Better, Report, median};
use godwit_bench::sys::thread_time;
use godwit_bench::table::{Column, Table, figure};
use godwit_bitmap::{DirtyBitmap, LayeredBitmap};
use godwit_units::{PageCount, PageIndex, PageRun};
use serde_json::json;

use crate::Options;

const BLOCKS: PageCount = PageCount(1 << 24);
/// One of so many is dirty.
const SPARSE: u64 = 10_000;
const ROUNDS: usize = 15;

/// All runs, one after the other, as a round asks for them: each when the one before was read.
/// Returns how many, and a sum that shows that they are the same.
fn walk(mut next: impl FnMut(u64) -> Option<PageRun>) -> (u64, u64) {
    let (mut at, mut count, mut sum) = (0, 0, 0_u64);
    while let Some(run) = next(at) {
        at = run.end().0;
        count += 1;
        sum = sum.wrapping_mul(31).wrapping_add(run.start.0 ^ run.count.0 << 40);
    }
    (count, sum)
}

fn one_by_one(bitmap: &DirtyBitmap, from: u64) -> Option<PageRun> {
    let words = bitmap.words();
    let dirty = |block: u64| words[(block / 64) as usize] >> (block % 64) & 1 == 1;
    let start = (from..BLOCKS.0).find(|block| dirty(*block))?;
    let end = (start..BLOCKS.0).find(|block| !dirty(*block)).unwrap_or(BLOCKS.0);
    Some(PageRun::new(start, end - start))
}

/// Milliseconds of processor time.
fn cost(f: impl FnOnce() -> (u64, u64)) -> (f64, (u64, u64)) {
    let before = thread_time();
    let found = black_box(f());
    ((thread_time() - before).as_secs_f64() * 1e3, found)
}

const TABLE: Table<(&str, f64, f64)> = Table(&[
    Column { head: "", width: 34, cell: |row| row.0.to_owned() },
    Column { head: "CPU ms", width: 10, cell: |row| figure(row.1, 3) },
    Column { head: "saved %", width: 10, cell: |row| figure(row.2, 2) },
]);

pub(crate) fn run(_: &Options, report: &mut Report) -> anyhow::Result<()> {
    let mut flat = DirtyBitmap::new(BLOCKS);
    let mut layered = LayeredBitmap::new(BLOCKS);
    let mut rng = fastrand::Rng::with_seed(1);
    for _ in 0..BLOCKS.0 / SPARSE {
        let run = PageRun::new(rng.u64(..BLOCKS.0), 1);
        flat.set(run);
        layered.set(run);
    }
    let other: Vec<u64> = (0..8 << 20).collect();
    // What was read in between has taken the caches.
    let cool = || black_box(black_box(&other).iter().fold(0, |sum: u64, word| sum ^ word));
    let mut costs: [Vec<f64>; 3] = Default::default();
    let began = Instant::now();
    for _ in 0..ROUNDS {
        let ways: [&dyn Fn(u64) -> Option<PageRun>; 3] =
            [&|at| one_by_one(&flat, at), &|at| flat.next_run(PageIndex(at)), &|at| {
                layered.next_run(PageIndex(at), PageCount(u64::MAX))
            }];
        let mut agreed = None;
        for (costs, way) in costs.iter_mut().zip(ways) {
            cool();
            let (cost, found) = cost(|| walk(way));
            costs.push(cost);
            anyhow::ensure!(
                *agreed.get_or_insert(found) == found,
                "the searches do not find the same"
            );
        }
    }
    let [each, next, layers] = costs.map(|costs| median(&costs));
    println!(
        "1 TiB in blocks of 64 KiB, {} dirty; medians of {ROUNDS}, {:?}",
        flat.count(),
        began.elapsed()
    );
    TABLE.print_head();
    let saved = |cost: f64| (1.0 - cost / each) * 100.0;
    for (name, cost) in [
        ("each block tested", each),
        ("next run, flat (QEMU)", next),
        ("next run, layered (microvm)", layers),
    ] {
        TABLE.print(&(name, cost, saved(cost)));
    }
    report.figure(
        "search",
        json!({ "each_ms": each, "flat_ms": next, "layered_ms": layers,
            "dirty_blocks": flat.count().0 }),
    );
    for (name, cost) in [("flat", next), ("layered", layers)] {
        report.target(
            format!("search, {name}: processor time saved, %"),
            saved(cost),
            60.0,
            Better::Higher,
        );
        let goal = format!("search, {name}: processor time saved, % (goal)");
        report.target(goal, saved(cost), 95.0, Better::Higher);
    }
    Ok(())
}
