//! A link that is away for ten seconds in the middle of a move, and the same move without that.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bench::figures::Figures;
use godwit_bench::fixture::{Fixture, Moved, warm_up_bytes};
use godwit_bench::report::{Better, Report, median};
use godwit_bench::table::{Column, Table, figure};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Accelerator, Backend, Godwit, GuestConfig, Link, QemuBuild, TestVm, VmConfig,
};
use godwit_units::ByteCount;
use serde::Serialize;
use serde_json::Value;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(300);
/// How often a move that says nothing is made once more.
const REPEATS: u32 = 3;
/// How long the link is away.
const AWAY: Duration = Duration::from_secs(10);
/// Sent when it goes: half of the guest.
const HALF: u64 = 2048 * MIB;

/// One move.
#[derive(Serialize)]
struct Row {
    cut: bool,
    total_ms: f64,
    downtime_ms: f64,
    sent_mib: f64,
    sent_again_mib: f64,
    rounds: u64,
    /// How long godwit took the connections for lost.
    severed_ms: f64,
}

const TABLE: Table<Row> = Table(&[
    Column { head: "", width: 8, cell: |row| if row.cut { "cut" } else { "whole" }.to_owned() },
    Column { head: "total ms", width: 8, cell: |row| figure(row.total_ms, 0) },
    Column { head: "severed", width: 8, cell: |row| figure(row.severed_ms, 0) },
    Column { head: "downtime ms", width: 11, cell: |row| figure(row.downtime_ms, 1) },
    Column { head: "sent MiB", width: 8, cell: |row| figure(row.sent_mib, 1) },
    Column { head: "again MiB", width: 9, cell: |row| figure(row.sent_again_mib, 1) },
    Column { head: "rounds", width: 6, cell: |row| row.rounds.to_string() },
]);

pub(crate) fn run(report: &mut Report, rounds: usize) -> anyhow::Result<()> {
    let build = QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
    let guest = GuestConfig {
        memory: ByteCount(4096 * MIB),
        fill: ByteCount(3712 * MIB),
        mode: Mode::Rate,
        rate: 2000,
        working_set: ByteCount(128 * MIB),
        ..GuestConfig::standard()
    };
    let config = VmConfig::new(&build, guest).with_backend(Backend::Anonymous);
    let config = VmConfig { accelerator: Accelerator::Kvm, ..config };
    let godwit = Godwit::built()?;
    println!("\n4 GiB, full, 2,000 pages/s over 128 MiB, {build} under KVM, medians of {rounds}");
    TABLE.print_head();
    let mut rows = Vec::new();
    for round in 0..rounds {
        for turn in 0..2 {
            let row = measured(&config, &godwit, (round + turn) % 2 == 1)?;
            TABLE.print(&row);
            rows.push(row);
        }
    }
    let of = |cut: bool, figure: fn(&Row) -> f64| {
        median(&rows.iter().filter(|row| row.cut == cut).map(figure).collect::<Vec<_>>())
    };
    let more = |figure: fn(&Row) -> f64| of(true, figure) - of(false, figure);
    let time = more(|row| row.total_ms) / 1e3;
    report.target("10 s cut: s that it costs", time, AWAY.as_secs_f64(), Better::Lower);
    let bytes = more(|row| row.sent_mib) / of(false, |row| row.sent_mib) * 100.0;
    report.target("10 s cut: % of bytes that it costs", bytes, 5.0, Better::Lower);
    let downtime = more(|row| row.downtime_ms);
    report.target("10 s cut: ms of downtime that it costs", downtime, 3.0, Better::Lower);
    report.figure("cut", serde_json::to_value(rows)?);
    Ok(())
}

/// The hypervisor beneath may be slow to give memory for longer than the cut lasts. Such a move
/// says nothing, and is made once more.
fn measured(config: &VmConfig, godwit: &Godwit, cut: bool) -> anyhow::Result<Row> {
    for _ in 0..REPEATS {
        match one_move(config, godwit, cut) {
            Err(error) if error.is::<TooLong>() => println!("{error}: once more"),
            row => return row,
        }
    }
    one_move(config, godwit, cut)
}

fn one_move(config: &VmConfig, godwit: &Godwit, cut: bool) -> anyhow::Result<Row> {
    let mut fixture = Fixture::new(config.clone(), LIMIT);
    let outcome =
        fixture.one_move(|source, destination| through(godwit, source, destination, cut))?;
    let figures = Figures::of("godwit", &outcome);
    ensure!(figures.bugs == 0, "the guest's memory is damaged");
    let last = &figures.own_words;
    let again = last["sent_again_bytes"].as_f64().unwrap_or(0.0);
    ensure!(!cut || last["resumptions"] == 1, "it was not taken up again once: {last}");
    Ok(Row {
        cut,
        total_ms: figures.total_ms,
        downtime_ms: figures.downtime_ms,
        sent_mib: figures.sent_mib,
        sent_again_mib: again / MIB as f64,
        rounds: figures.passes,
        severed_ms: last["severed_ms"].as_f64().unwrap_or(0.0),
    })
}

/// Why a cut move counts for nothing.
#[derive(Debug, thiserror::Error)]
#[error("to touch memory took longer than the cut was to last: is something else running?")]
struct TooLong;

/// Both kinds of move go through the relay.
fn through(
    godwit: &Godwit,
    source: &TestVm,
    destination: &TestVm,
    cut: bool,
) -> anyhow::Result<Moved> {
    let (receive, address) = godwit.receive(destination, &["--reconnect", "60s"])?;
    let link = Link::to(&address)?;
    // Compression would choose anew in each move, which alone makes their bytes differ by 15 %. The
    // source QEMU must live on to be asked what it used.
    let options = ["--reconnect", "60s", "--compression", "none", "--keep-source"];
    let migrate = godwit.migrate(source, link.address(), &options)?;
    if cut {
        let half = |line: &Value| line["sent_bytes"].as_u64() > Some(HALF);
        let line = migrate.wait_for("half", LIMIT, half)?;
        ensure!(line["outcome"].is_null(), "it had ended before it was cut: {line}");
        away(&link)?;
    }
    let migrate = migrate.wait(LIMIT)?;
    let last = migrate.last().clone();
    ensure!(last["outcome"] == "migrated", "{last} {}", migrate.errors.trim());
    receive.wait(LIMIT)?;
    let total = last["total_ms"].as_f64().context("no total")?;
    Ok(Moved {
        finished: true,
        wall: Duration::from_secs_f64(total / 1e3),
        sent: last["sent_bytes"].as_f64().context("no bytes")?,
        rounds: last["rounds"].as_u64().context("no rounds")?,
        godwit_cpu: Duration::ZERO,
        own_words: last,
    })
}

/// Cuts `link` for [`AWAY`]. What the guest still needs at the destination is touched meanwhile, as
/// it was before the move, over and over: the hypervisor beneath takes back what is free within
/// seconds.
fn away(link: &Link) -> anyhow::Result<()> {
    let began = Instant::now();
    link.cut();
    let mut last = Duration::ZERO;
    while began.elapsed() + last < AWAY {
        let one = Instant::now();
        warm_up_bytes(HALF * 3 / 2)?;
        last = one.elapsed();
    }
    ensure!(began.elapsed() < AWAY, TooLong);
    std::thread::sleep(AWAY.saturating_sub(began.elapsed()));
    link.mend();
    Ok(())
}
