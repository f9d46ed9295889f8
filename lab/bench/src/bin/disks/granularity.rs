//! What a round of a second sends for each byte that the guest wrote, by the size of dirty blocks.
//!
//! All sizes are counted at the same time, by bitmaps of QEMU on the same node, so they saw the
//! same writes. The guest writes whole blocks at multiples of their size, so nothing is added for
//! writes that begin within one. The limits for 64 KiB are published figures of another product's
//! round of a second at the same rate; what they were measured over is not told, so there are two
//! spans here.

use std::time::Duration;

use anyhow::{Context, ensure};
use godwit_bench::report::{Better, Report, median};
use godwit_bench::table::{Column, Table, figure};
use godwit_disk::{Writes, granularity_for};
use godwit_stamp::settings::DiskWork;
use godwit_testbed::{DiskImage, TestVm, VmConfig};
use godwit_units::ByteCount;
use serde_json::{Value, json};

use crate::Options;
use crate::setup::{DISK, LIMIT, MIB, build, guest};

/// Bytes that the guest writes each second.
const RATE: u64 = 2_000_000;
/// Sizes of writes in KiB, and what was published for dirty blocks of 64 KiB.
const PUBLISHED: [(u64, f64); 7] =
    [(4, 14.5), (8, 7.6), (16, 3.6), (32, 1.9), (64, 1.0), (128, 1.0), (256, 1.0)];
/// For what an interval of a second may mean.
const ALLOWANCE: f64 = 1.05;
const SPANS: [u64; 2] = [1024 * MIB, 64 * MIB];
const FIXED: [u64; 3] = [MIB, 64 << 10, 4 << 10];

/// The size of writes in KiB, dirty bytes for each size of block, and the size chosen in KiB.
const TABLE: Table<(u64, [f64; 4], u64)> = Table(&[
    Column { head: "write", width: 8, cell: |row| format!("{} K", row.0) },
    Column { head: "1 MiB", width: 8, cell: |row| figure(row.1[0], 1) },
    Column { head: "64 KiB", width: 8, cell: |row| figure(row.1[1], 2) },
    Column { head: "4 KiB", width: 8, cell: |row| figure(row.1[2], 2) },
    Column { head: "auto (size)", width: 16, cell: |row| format!("{:.2} ({} K)", row.1[3], row.2) },
]);

pub(crate) fn run(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let mut figures = Vec::new();
    for span in SPANS {
        println!("over {} MiB, dirty bytes in a second for each written:", span / MIB);
        TABLE.print_head();
        for (block, published) in PUBLISHED {
            let row = row(block << 10, span, options.rounds + 5)?;
            let [large, medium, small, auto] = row.times;
            let chosen = row.chosen >> 10;
            TABLE.print(&(block, row.times, chosen));
            figures.push(json!({
                "span_mib": span / MIB, "write_kib": block, "1MiB": large, "64KiB": medium,
                "4KiB": small, "auto": auto, "auto_kib": chosen,
            }));
            let place = format!("{block} KiB over {} MiB", span / MIB);
            let name = format!("granularity 64 KiB, {place}: dirty for each written");
            report.target(name, medium, published * ALLOWANCE, Better::Lower);
            report.target(format!("granularity auto, {place}"), auto, 2.0, Better::Lower);
        }
    }
    report.figure("granularity", figures);
    Ok(())
}

/// Dirty bytes for each written: of [`FIXED`], and of what godwit would choose.
struct Row {
    times: [f64; 4],
    chosen: u64,
}

fn row(block: u64, span: u64, intervals: usize) -> anyhow::Result<Row> {
    let image = DiskImage::create("raw", ByteCount(1024 * MIB))?;
    let work = DiskWork {
        write: RATE,
        block: ByteCount(block),
        span: ByteCount(span),
        ..DiskWork::default()
    };
    let mut vm = TestVm::source(&VmConfig::new(&build()?, guest(work)).with_disk(DISK, &image))?;
    vm.wait_ready(LIMIT)?;
    std::thread::sleep(Duration::from_secs(2));
    // As `godwit migrate` does: two looks, half a second apart.
    let before = writes(&mut vm)?;
    std::thread::sleep(Duration::from_millis(500));
    let chosen = granularity_for(writes(&mut vm)?.recent(before)).0;

    let sizes = [FIXED[0], FIXED[1], FIXED[2], chosen];
    for (place, size) in sizes.into_iter().enumerate() {
        let bitmap = json!({ "node": DISK, "name": name(place), "granularity": size });
        vm.qmp().execute("block-dirty-bitmap-add", bitmap)?;
    }
    let mut times: [Vec<f64>; 4] = Default::default();
    for _ in 0..intervals {
        let clear = |place: usize| {
            let data = json!({ "node": DISK, "name": name(place) });
            json!({ "type": "block-dirty-bitmap-clear", "data": data })
        };
        vm.qmp()
            .execute("transaction", json!({ "actions": (0..4).map(clear).collect::<Vec<_>>() }))?;
        let before = writes(&mut vm)?;
        std::thread::sleep(Duration::from_secs(1));
        let written = writes(&mut vm)?.bytes.saturating_sub(before.bytes).0 as f64;
        let nodes = vm.qmp().execute("query-named-block-nodes", json!({ "flat": true }))?;
        ensure!(written > 0.0, "the guest does not write");
        for (place, times) in times.iter_mut().enumerate() {
            times.push(dirty(&nodes, place)? as f64 / written);
        }
    }
    ensure!(vm.bugs().is_empty(), "{:?}", vm.bugs());
    Ok(Row { times: times.map(|times| median(&times)), chosen })
}

fn name(place: usize) -> String {
    format!("count{place}")
}

fn writes(vm: &mut TestVm) -> anyhow::Result<Writes> {
    let stats = vm.qmp().execute("query-blockstats", Value::Null)?;
    let device = stats.as_array().into_iter().flatten().find(|device| device["node-name"] == DISK);
    let number = |key: &str| device.and_then(|device| device["stats"][key].as_u64());
    let bytes = number("wr_bytes").context("QEMU does not tell what was written")?;
    Ok(Writes { bytes: ByteCount(bytes), operations: number("wr_operations").unwrap_or(0) })
}

/// Bytes that the bitmap counts as dirty.
fn dirty(nodes: &Value, place: usize) -> anyhow::Result<u64> {
    let bitmaps =
        nodes.as_array().into_iter().flatten().filter_map(|node| node["dirty-bitmaps"].as_array());
    let mut bitmaps = bitmaps.flatten();
    let found = bitmaps.find(|bitmap| bitmap["name"] == name(place).as_str());
    found.and_then(|bitmap| bitmap["count"].as_u64()).context("a bitmap is gone")
}
