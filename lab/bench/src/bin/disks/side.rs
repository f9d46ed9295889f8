//! Godwit beside QEMU's own way, on the same machines over the same link.
//!
//! Source and destination are joined by a pair of virtual interfaces with a token bucket of 100
//! MiB/s each way, which all connections share: mirror and memory of QEMU's, all channels of
//! Godwit's. Bytes are those that the interface counted, both ways, headers and all.

use anyhow::Context;
use godwit_bench::report::{Better, Report, median_of};
use godwit_bench::table::{Column, Table, figure};
use godwit_stamp::settings::DiskWork;
use godwit_testbed::{DiskImage, SlowLink};
use godwit_units::{ByteCount, Rate};
use serde_json::json;

use crate::Options;
use crate::setup::{MIB, Mover, Row, Setup, copy, fill, guest};

const LINK_MIB: u64 = 100;
const SIZE: u64 = 2048 * MIB;
/// The part that the guest writes; behind the data.
const SPAN: u64 = 512 * MIB;

const MOVERS: [(&str, Mover<'static>); 3] = [
    (QEMU, Mover::Qemu),
    (GODWIT, Mover::Godwit(&[])),
    ("godwit, uncompressed", Mover::Godwit(&["--compression", "none"])),
];
const QEMU: &str = "QEMU: mirror, migrate";
const GODWIT: &str = "godwit --disks all";

pub(crate) fn run(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let link = SlowLink::create(Rate::from_bytes_per_second((LINK_MIB * MIB) as f64))
        .context("part `side` needs root, and the tools ip and tc")?;
    // The guest writes from the start of its disk on.
    let data = DiskImage::create("raw", ByteCount(SIZE))?;
    fill(&data, SIZE / 2, SIZE / 2)?;
    println!(
        "a link of {LINK_MIB} MiB/s; 512 MiB of RAM, 256 MiB of it filled; 2 GiB of disk, 1 GiB of \
         it data"
    );
    TABLE.print_head();
    let mut figures = Vec::new();
    for rate in &options.rates {
        let mut moves: Vec<Vec<Row>> = vec![Vec::new(); MOVERS.len()];
        for _ in 0..options.rounds {
            for ((name, mover), moves) in MOVERS.iter().zip(&mut moves) {
                // What never ends once is not waited for again.
                if moves.iter().any(|moved| !moved.finished) {
                    continue;
                }
                let moved = one_move(&link, &data, *rate, *mover, options)
                    .with_context(|| (*name).to_owned())?;
                TABLE.print(&Line { name, rate: *rate, moves: vec![moved.clone()] });
                moves.push(moved);
            }
        }
        println!("medians:");
        for ((name, _), moves) in MOVERS.iter().zip(&moves) {
            TABLE.print(&Line { name, rate: *rate, moves: moves.clone() });
            figures.push(json!({ "name": name, "write_mib_s": rate, "moves": moves }));
        }
        targets(*rate, &moves[0], &moves[1], report);
    }
    report.figure("side", figures);
    Ok(())
}

fn targets(rate: u64, qemu: &[Row], godwit: &[Row], report: &mut Report) {
    let place = if rate == 0 { "idle".to_owned() } else { format!("{rate} MiB/s of 8 KiB") };
    let unfinished = godwit.iter().filter(|moved| !moved.finished).count();
    report.target(
        format!("side, {place}: godwit's moves that did not finish"),
        unfinished as f64,
        0.0,
        Better::Lower,
    );
    let bugs: usize = qemu.iter().chain(godwit).map(|moved| moved.bugs).sum();
    report.target(format!("side, {place}: BUG lines"), bugs as f64, 0.0, Better::Lower);
    type Figure = (&'static str, fn(&Row) -> f64, f64);
    let figures: [Figure; 3] = [
        ("bytes on the link", |moved| moved.wire_mib, 0.8),
        ("total time", |moved| moved.total_s, 1.0),
        ("downtime", |moved| moved.downtime_ms, 1.0),
    ];
    for (what, figure, limit) in figures {
        let of = |moves: &[Row]| median_of(moves, figure);
        // QEMU did not get there: it has no downtime, and used this much in vain.
        if qemu.iter().all(|moved| moved.finished) || what != "downtime" {
            report.target(
                format!("side, {place}, godwit / QEMU: {what}"),
                of(godwit) / of(qemu),
                limit,
                Better::Lower,
            );
        }
    }
}

fn one_move(
    link: &SlowLink,
    data: &DiskImage,
    rate: u64,
    mover: Mover<'_>,
    options: &Options,
) -> anyhow::Result<Row> {
    let images =
        [DiskImage::create("raw", ByteCount(SIZE))?, DiskImage::create("raw", ByteCount(SIZE))?];
    copy(data, &images[0])?;
    let work = DiskWork {
        write: rate * MIB,
        block: ByteCount(8 << 10),
        span: ByteCount(SPAN),
        ..DiskWork::default()
    };
    let setup = Setup {
        guest: guest(work),
        images: [&images[0], &images[1]],
        link: Some(link),
        patience: options.patience,
    };
    setup.one_move(mover)
}

/// Moves of one kind, which are shown by their medians.
struct Line {
    name: &'static str,
    rate: u64,
    moves: Vec<Row>,
}

impl Line {
    fn of(&self, figure: fn(&Row) -> f64) -> f64 {
        median_of(&self.moves, figure)
    }
}

const TABLE: Table<Line> = Table(&[
    Column { head: "", width: 22, cell: |line| line.name.to_owned() },
    Column { head: "write", width: 7, cell: |line| line.rate.to_string() },
    Column { head: "total s", width: 8, cell: |line| figure(line.of(|row| row.total_s), 1) },
    Column { head: "wire MiB", width: 9, cell: |line| figure(line.of(|row| row.wire_mib), 0) },
    Column { head: "down ms", width: 9, cell: |line| figure(line.of(|row| row.downtime_ms), 1) },
    Column {
        head: "wrote MiB/s",
        width: 11,
        cell: |line| figure(line.of(|row| row.written_mib_s), 1),
    },
    Column { head: "median, p99", width: 12, cell: latencies },
    Column { head: "worst", width: 8, cell: |line| figure(line.of(|row| row.worst_p99_ms), 1) },
    Column { head: "mirror s", width: 9, cell: mirrored },
]);

fn latencies(line: &Line) -> String {
    let (median, p99) = (line.of(|row| row.median_ms), line.of(|row| row.p99_ms));
    format!("{}, {}", figure(median, 1), figure(p99, 1))
}

/// How long QEMU's mirror took until it had caught up; said too of a move that never ended.
fn mirrored(line: &Line) -> String {
    let seconds = line.of(|row| row.own_words["mirrored_s"].as_f64().unwrap_or(f64::NAN));
    let never = if line.moves.iter().all(|row| row.finished) { "" } else { " (never)" };
    format!("{}{never}", figure(seconds, 1))
}
