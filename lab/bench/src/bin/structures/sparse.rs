//! Finding dirty blocks of a disk: the multi-level bitmap against a test of every block.

use std::hint::black_box;

use godwit_bench::chart::Chart;
use godwit_bench::report::{Better, Report};
use godwit_bitmap::LayeredBitmap;
use godwit_units::{PageCount, PageIndex, PageRun};
use serde_json::json;

use crate::pattern::Pattern;
use crate::rounds::{Rounds, table_with_ratios, timed};

/// 4 TiB of disk in blocks of 64 KiB: 8 MiB of bits.
const BLOCKS: PageCount = PageCount(4 << 24);
const ROUNDS: usize = 7;

/// Empties the caches of the bitmaps: who asks for the next block to send has sent one in between.
fn cool(other: &[u64]) {
    black_box(black_box(other).iter().fold(0, |sum: u64, word| sum ^ word));
}

fn sum(all: &mut u64, run: PageRun) {
    *all = all.wrapping_add(run.start.0 ^ run.count.0 << 40);
}

fn test_every_block(words: &[u64]) -> u64 {
    let mut all = 0;
    let mut open = None;
    for block in 0..words.len() as u64 * 64 {
        let dirty = words[(block / 64) as usize] >> (block % 64) & 1 == 1;
        match open {
            None if dirty => open = Some(block),
            Some(start) if !dirty => {
                sum(&mut all, PageRun::new(start, block - start));
                open = None;
            }
            _ => {}
        }
    }
    if let Some(start) = open {
        sum(&mut all, PageRun::new(start, words.len() as u64 * 64 - start));
    }
    all
}

pub(crate) fn run(report: &mut Report) -> anyhow::Result<()> {
    let title = "Search for dirty blocks of a 4 TiB disk (64 KiB each), ms (times as fast as \
                 testing every block)";
    let other: Vec<u64> = (0..8 << 20).collect();
    let mut columns = Vec::new();
    let mut names = Vec::new();
    for share in [0.000_01, 0.000_1, 0.001, 0.01, 0.1] {
        let pattern = Pattern::Random(share);
        let flat = &pattern.bitmap(BLOCKS);
        let mut layered = LayeredBitmap::new(BLOCKS);
        flat.for_each_run(|run| {
            layered.set(run);
        });
        let layered = &layered;
        let mut rounds = Rounds::new();
        rounds.add("test of every block", || {
            cool(&other);
            timed(|| test_every_block(flat.words()))
        });
        rounds.add("multi-level, all runs", || {
            cool(&other);
            timed(|| {
                let mut all = 0;
                layered.for_each_run(|run| sum(&mut all, run));
                all
            })
        });
        rounds.add("multi-level, next run by next run", || {
            cool(&other);
            timed(|| {
                let (mut all, mut at) = (0, PageIndex(0));
                while let Some(run) = layered.next_run(at, PageCount(u64::MAX)) {
                    sum(&mut all, run);
                    at = run.end();
                }
                all
            })
        });
        rounds.add("multi-level, taking areas", || {
            let mut layered = layered.clone();
            cool(&other);
            timed(|| {
                let (mut all, mut at) = (0, PageIndex(0));
                while let Some(run) = layered.take_run(at, PageCount(u64::MAX)) {
                    sum(&mut all, run);
                    at = run.end();
                }
                all
            })
        });
        rounds.add("flat scan", || {
            cool(&other);
            timed(|| {
                let mut all = 0;
                flat.for_each_run(|run| sum(&mut all, run));
                all
            })
        });
        rounds.run(ROUNDS, 0);
        let name = pattern.name();
        let cells: Vec<(f64, f64)> =
            (0..5).map(|number| (rounds.seconds(number) * 1e3, rounds.ratio(0, number))).collect();
        let limit = match share {
            0.000_1 => Some(20.0),
            0.1 => Some(1.0),
            _ => None,
        };
        if let Some(limit) = limit {
            for (number, what) in [(1, "all runs"), (2, "next run by next run")] {
                let name = format!("sparse, {name}, {what}: times as fast as testing every block");
                report.target(name, cells[number].1, limit, Better::Higher);
            }
        }
        names = rounds.names().map(str::to_owned).collect();
        let figures: serde_json::Map<String, serde_json::Value> = names
            .iter()
            .zip(&cells)
            .map(|(name, (ms, ratio))| (name.clone(), json!({ "ms": ms, "times": ratio })))
            .collect();
        report.figure(&format!("sparse: {name}"), figures);
        columns.push((name, cells));
    }
    table_with_ratios(title, &names, &columns, 1.0);
    Chart {
        title: "Search for dirty blocks of a 4 TiB disk (64 KiB each), one thread".to_owned(),
        axis: "milliseconds".to_owned(),
        series: names,
        groups: columns
            .into_iter()
            .map(|(name, cells)| (name, cells.into_iter().map(|(ms, _)| ms).collect()))
            .collect(),
    }
    .write("structures-sparse")
}
