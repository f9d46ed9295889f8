//! What the steps of a move cost by the size of the guest: measured up to a terabyte, and what that
//! comes to at twelve.
//!
//! Guests run on KVM in memory of QEMU's own and write 2,000 pages a second. A *sparse* one has 1
//! GiB for its program, and modules of memory for the rest, which nobody has touched: that is all
//! that a host of 24 GiB can show of large ones. A *full* one has used three quarters of what it
//! has: what it costs to look at memory that is there.
//!
//! Keeps two promises: what is said of a size that was not measured is a straight line through the
//! medians of those that were, which is printed; and a size for which there is no memory is skipped
//! aloud.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use godwit_bench::arguments::at_least_once;
use godwit_bench::fixture::{check_room, warm_up_bytes};
use godwit_bench::growth::Line;
use godwit_bench::report::{Better, Report, median_of};
use godwit_bench::table::{Column, Table, figure};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, Godwit, GuestConfig, QemuBuild, TestVm, VmConfig, kvm_builds_for, skip,
};
use godwit_units::ByteCount;
use serde::Serialize;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);
const GIB: u64 = 1 << 30;
const MIB: f64 = 1_048_576.0;
/// What is said of sizes that no host here has, in GiB.
const AFAR: [u64; 3] = [1 << 10, 4 << 10, 12 << 10];
/// What the stopped phase may cost each channel for each GiB.
const STOPPED_US: f64 = 60.0;
/// The most memory that a godwit may take for each GiB of its guest: a 1024th.
const MOST_MIB: f64 = 1.0;
/// For what else runs.
const BESIDE: u64 = 2 * GIB;
/// KVM has so much for each 4 KiB of memory that the guest could use, where the processor does not
/// translate by itself (`struct kvm_rmap_head`, arch/x86/include/asm/kvm_host.h).
const KVM_FOR_A_PAGE: u64 = 8;

/// What the steps of a move cost by the size of the guest.
#[derive(Parser)]
struct Options {
    /// Moves of each guest
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_once())]
    rounds: usize,

    /// Sizes of guests that have touched next to nothing, in GiB; two at least, the smallest first
    #[arg(long, value_name = "GIB,...", value_delimiter = ',', default_value = "2,16,128,1024")]
    sparse: Vec<u64>,

    /// Sizes of guests that have used three quarters of it, in GiB, the smallest first
    #[arg(long, value_name = "GIB,...", value_delimiter = ',', default_value = "1,4,8")]
    full: Vec<u64>,
}

/// One move.
#[derive(Clone, Debug, Serialize)]
struct Row {
    kind: &'static str,
    gib: u64,
    channels: f64,
    setup_ms: f64,
    first_round_ms: f64,
    total_ms: f64,
    downtime_ms: f64,
    copy_ms: f64,
    cpu_ms: f64,
    source_mib: f64,
    destination_mib: f64,
}

type Figure = (&'static str, fn(&Row) -> f64);

/// What may grow with the size of a guest.
const FIGURES: [Figure; 7] = [
    ("start, ms", |row| row.setup_ms),
    ("first round, ms", |row| row.first_round_ms),
    ("whole move, ms", |row| row.total_ms),
    ("stopped, ms", |row| row.downtime_ms),
    ("CPU of both godwits, ms", |row| row.cpu_ms),
    ("memory of the source's godwit, MiB", |row| row.source_mib),
    ("memory of the destination's godwit, MiB", |row| row.destination_mib),
];

const TABLE: Table<Row> = Table(&[
    Column { head: "guest", width: 18, cell: |row| format!("{} {} GiB", row.kind, row.gib) },
    Column { head: "start", width: 7, cell: |row| figure(row.setup_ms, 0) },
    Column { head: "1st round", width: 9, cell: |row| figure(row.first_round_ms, 0) },
    Column { head: "whole", width: 7, cell: |row| figure(row.total_ms, 0) },
    Column { head: "stopped", width: 7, cell: |row| figure(row.downtime_ms, 1) },
    Column { head: "of it copy", width: 10, cell: |row| figure(row.copy_ms, 1) },
    Column { head: "CPU", width: 6, cell: |row| figure(row.cpu_ms, 0) },
    Column { head: "source MiB", width: 10, cell: |row| figure(row.source_mib, 0) },
    Column { head: "dest. MiB", width: 9, cell: |row| figure(row.destination_mib, 0) },
]);

/// A machine whose guest has `memory` and fills `fill` of it.
fn machine(build: &QemuBuild, memory: u64, fill: u64) -> VmConfig {
    let guest = GuestConfig {
        memory: ByteCount(memory),
        mode: Mode::Rate,
        working_set: ByteCount(64 << 20),
        fill: ByteCount(fill),
        ..GuestConfig::standard()
    };
    VmConfig::new(build, guest).on_kvm().with_backend(Backend::Anonymous)
}

/// One of `gib` GiB whose guest has touched next to nothing.
fn sparse(build: &QemuBuild, gib: u64) -> VmConfig {
    machine(build, GIB, GIB / 4).with_modules(ByteCount((gib - 1) * GIB))
}

/// One of `gib` GiB whose guest has used three quarters of it.
fn full(build: &QemuBuild, gib: u64) -> VmConfig {
    machine(build, gib * GIB, gib * GIB / 4 * 3)
}

fn one_move(
    (kind, gib): (&'static str, u64),
    config: &VmConfig,
    godwit: &Godwit,
) -> anyhow::Result<Row> {
    let mut source = TestVm::source(config)?;
    let destination = TestVm::destination(config)?;
    source.wait_ready(LIMIT)?;
    source.wait_for_heartbeats_after(Instant::now(), 15, LIMIT)?;
    warm_up_bytes(config.guest.fill.0 / 2 * 3)?;
    // Nobody is to use what both sides have together.
    let (receive, address) = godwit.receive(&destination, &["--overcommit"])?;
    let migrate = godwit.migrate(&source, &address, &[])?.wait(LIMIT)?;
    let receive = receive.wait(LIMIT)?;
    let last = migrate.last();
    ensure!(last["outcome"] == "migrated", "{last} {}", migrate.errors.trim());
    destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
    ensure!(destination.bugs().is_empty(), "{:?}", destination.bugs());
    source.kill();
    let number = |of: &Value| of.as_f64().unwrap_or(f64::NAN);
    let row = Row {
        kind,
        gib,
        channels: number(&last["channels"]),
        setup_ms: number(&last["setup_ms"]),
        first_round_ms: number(&last["round_list"][0]["ms"]),
        total_ms: number(&last["total_ms"]),
        downtime_ms: number(&last["downtime_ms"]),
        copy_ms: number(&last["copy_ms"]),
        cpu_ms: number(&last["cpu_ms"]) + number(&receive.last()["cpu_ms"]),
        source_mib: number(&last["peak_rss_bytes"]) / MIB,
        destination_mib: number(&receive.last()["peak_rss_bytes"]) / MIB,
    };
    TABLE.print(&row);
    Ok(row)
}

/// Why a guest that takes `bytes` on each side, and `gib` GiB if it had all that it could, cannot
/// be measured here.
fn short_of(bytes: u64, gib: u64) -> Option<String> {
    let of_kvm = gib * GIB / 4096 * KVM_FOR_A_PAGE;
    check_room(2 * (bytes + of_kvm), BESIDE, "others").err().map(|error| error.to_string())
}

fn medians(rows: &[Row], of: fn(&Row) -> f64) -> Vec<(f64, f64)> {
    let mut sizes: Vec<u64> = rows.iter().map(|row| row.gib).collect();
    sizes.dedup();
    let median = |gib: u64| median_of(rows.iter().filter(|row| row.gib == gib), of);
    sizes.into_iter().map(|gib| (gib as f64, median(gib))).collect()
}

/// Prints each figure's line, with what it comes to afar, and puts them into `report`.
fn lines(rows: &[Row], report: &mut Report) {
    println!("\nmedians of sparse guests, on a line: base + GiB x slope");
    for (name, of) in FIGURES {
        let line = Line::through(&medians(rows, of));
        let afar = AFAR.map(|gib| {
            let size = ByteCount(gib * GIB);
            format!("{size}: {:.3} + {gib} x {:.5} = {:.1}", line.base, line.slope, {
                line.at(gib as f64)
            })
        });
        println!("{name}: {}", afar.join("; "));
        report.figure(name, json!({ "base": line.base, "slope": line.slope }));
    }
}

/// A figure of the line through `rows`: of their medians, and of each round alone.
fn of_line(rows: &[Row], of: fn(&Row) -> f64, value: &dyn Fn(Line) -> f64) -> (f64, Vec<f64>) {
    let rounds = rows.iter().filter(|row| row.gib == rows[0].gib).count();
    let of_round = |round: usize| {
        let rows = rows.iter().skip(round).step_by(rounds);
        value(Line::through(&rows.map(|row| (row.gib as f64, of(row))).collect::<Vec<_>>()))
    };
    (value(Line::through(&medians(rows, of))), (0..rounds).map(of_round).collect())
}

fn grows(rows: &[Row]) -> bool {
    rows.last().is_some_and(|row| row.gib > rows[0].gib)
}

/// What the last round costs while the guest stands still, where there are two sizes. Nothing else
/// of the stopped phase knows how much memory there is.
fn target_of_stop(rows: &[Row], report: &mut Report) {
    if !grows(rows) {
        return;
    }
    let channels = median_of(rows, |row| row.channels);
    let (value, each) = of_line(rows, |row| row.copy_ms, &|line| line.slope * 1e3 * channels);
    let name = format!("{} guests, last round: µs for each GiB and channel", rows[0].kind);
    report.target_of_rounds(name, (value, &each), STOPPED_US, Better::Lower);
}

/// What is said of the largest guest afar.
fn targets_afar(rows: &[Row], report: &mut Report) {
    let last = AFAR[AFAR.len() - 1];
    let size = ByteCount(last * GIB);
    let mut target = |name: &str, of: fn(&Row) -> f64, limit, value: &dyn Fn(f64) -> f64| {
        let (value, each) = of_line(rows, of, &|line| value(line.at(last as f64)));
        report.target_of_rounds(
            format!("sparse {size}: {name}"),
            (value, &each),
            limit,
            Better::Lower,
        );
    };
    target("start, s", |row| row.setup_ms, 1.0, &|ms| ms / 1e3);
    let for_a_gib = |mib: f64| mib / last as f64;
    target("source's godwit, MiB for each GiB", |row| row.source_mib, MOST_MIB, &for_a_gib);
    target("destination's godwit, likewise", |row| row.destination_mib, MOST_MIB, &for_a_gib);
}

fn main() -> anyhow::Result<()> {
    let Options { rounds, sparse: sparse_sizes, full: full_sizes } = Options::parse();
    let ascends = |sizes: &[u64]| sizes.is_sorted_by(|a, b| a < b);
    ensure!(
        sparse_sizes.len() > 1 && sparse_sizes[0] > 1 && ascends(&sparse_sizes),
        "--sparse: at least two sizes from 2 GiB on, the smallest first"
    );
    ensure!(
        full_sizes.first() != Some(&0) && ascends(&full_sizes),
        "--full: sizes from 1 GiB on, the smallest first"
    );
    let builds = kvm_builds_for("bench scale");
    let build = builds.iter().max_by_key(|build| build.version).context("no QEMU or no KVM")?;
    let godwit = Godwit::built()?;
    let mut report = Report::new("scale");
    report.figure("qemu", build.to_string());
    report.figure("rounds", rounds);
    println!("{build} on KVM, memory of QEMU's own, ms, {rounds} rounds");
    TABLE.print_head();
    let (mut all, mut skipped) = (Vec::new(), 0);
    let mut measure = |kind, gib, config: &VmConfig, taken| -> anyhow::Result<Vec<Row>> {
        if let Some(why) = short_of(taken, gib) {
            skipped += 1;
            skip(&format!("{kind} {gib} GiB"), why);
            return Ok(Vec::new());
        }
        (0..rounds).map(|_| one_move((kind, gib), config, &godwit)).collect()
    };
    for gib in sparse_sizes {
        all.extend(measure("sparse", gib, &sparse(build, gib), GIB)?);
    }
    ensure!(grows(&all), "there was no memory for two sizes");
    let mut of_full = Vec::new();
    for gib in full_sizes {
        of_full.extend(measure("full", gib, &full(build, gib), gib * GIB)?);
    }
    lines(&all, &mut report);
    target_of_stop(&all, &mut report);
    target_of_stop(&of_full, &mut report);
    targets_afar(&all, &mut report);
    all.extend(of_full);
    report.figure("skipped", skipped);
    report.figure("moves", serde_json::to_value(&all)?);
    report.finish()?;
    Ok(())
}
