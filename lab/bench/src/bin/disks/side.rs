//! Godwit beside QEMU's own way, on the same machines over the same link.
//!
//! Source and destination are joined by a pair of virtual interfaces with a token bucket of 100
//! MiB/s each way, which all connections share: mirror and memory of QEMU's, all channels of
//! Godwit's. Bytes are those that the interface counted, both ways, headers and all.

use anyhow::Context;
use godwit_bench::report::{Better, Report, median};
use godwit_guest_workload::settings::DiskWork;
use godwit_testbed::{DiskImage, SlowLink};
use godwit_units::{ByteCount, Rate};
use serde_json::json;

use crate::Options;
use crate::fixture::{Fixture, MIB, Moved, Mover, copy, fill, guest};

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
    println!(
        "{:<22} {:>7} {:>8} {:>9} {:>9} {:>11} {:>12} {:>8} {:>9}",
        "",
        "write",
        "total s",
        "wire MiB",
        "down ms",
        "wrote MiB/s",
        "median, p99",
        "worst",
        "mirror s"
    );
    let mut figures = Vec::new();
    for rate in &options.rates {
        let mut moves: Vec<Vec<Moved>> = vec![Vec::new(); MOVERS.len()];
        for _ in 0..options.rounds {
            for ((name, mover), moves) in MOVERS.iter().zip(&mut moves) {
                // What never ends once is not waited for again.
                if moves.iter().any(|moved| !moved.finished) {
                    continue;
                }
                let moved = one_move(&link, &data, *rate, *mover, options)
                    .with_context(|| (*name).to_owned())?;
                print_row(name, *rate, std::slice::from_ref(&moved));
                moves.push(moved);
            }
        }
        println!("medians:");
        for ((name, _), moves) in MOVERS.iter().zip(&moves) {
            print_row(name, *rate, moves);
            figures.push(json!({ "name": name, "write_mib_s": rate, "moves": moves }));
        }
        targets(*rate, &moves[0], &moves[1], report);
    }
    report.figure("side", figures);
    Ok(())
}

fn targets(rate: u64, qemu: &[Moved], godwit: &[Moved], report: &mut Report) {
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
    type Figure = (&'static str, fn(&Moved) -> f64, f64);
    let figures: [Figure; 3] = [
        ("bytes on the link", |moved| moved.wire_mib, 0.8),
        ("total time", |moved| moved.total_s, 1.0),
        ("downtime", |moved| moved.downtime_ms, 1.0),
    ];
    for (what, figure, limit) in figures {
        let of = |moves: &[Moved]| median(&moves.iter().map(figure).collect::<Vec<_>>());
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
) -> anyhow::Result<Moved> {
    let images =
        [DiskImage::create("raw", ByteCount(SIZE))?, DiskImage::create("raw", ByteCount(SIZE))?];
    copy(data, &images[0])?;
    let work = DiskWork {
        write: rate * MIB,
        block: ByteCount(8 << 10),
        span: ByteCount(SPAN),
        ..DiskWork::default()
    };
    let fixture = Fixture {
        guest: guest(work),
        images: [&images[0], &images[1]],
        link: Some(link),
        patience: options.patience,
    };
    fixture.one_move(mover)
}

fn print_row(name: &str, rate: u64, moves: &[Moved]) {
    let of = |figure: fn(&Moved) -> f64| median(&moves.iter().map(figure).collect::<Vec<_>>());
    let known = |value: f64| if value.is_nan() { "-".to_owned() } else { format!("{value:.1}") };
    let never = if moves.iter().all(|moved| moved.finished) { "" } else { " (never)" };
    println!(
        "{name:<22} {rate:>7} {:>8.1} {:>9.0} {:>9} {:>11} {:>12} {:>8} {:>9}{never}",
        of(|moved| moved.total_s),
        of(|moved| moved.wire_mib),
        known(of(|moved| moved.downtime_ms)),
        known(of(|moved| moved.written_mib_s)),
        format!("{}, {}", known(of(|moved| moved.median_ms)), known(of(|moved| moved.p99_ms))),
        known(of(|moved| moved.worst_p99_ms)),
        known(of(|moved| moved.own_words["mirrored_s"].as_f64().unwrap_or(f64::NAN))),
    );
}
