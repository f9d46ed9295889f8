//! What it costs to have a move proven: a large guest on KVM, without --verify, with it, with the
//! arrival alone proven, and with all memory read while the guest is stopped.

use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Parser;
use godwit_bench::arguments::at_least_once;
use godwit_bench::figures::Figures;
use godwit_bench::fixture::{Fixture, Moved};
use godwit_bench::godwit::Attempt;
use godwit_bench::report::{Better, Report, machine, median};
use godwit_bench::table::{Column, Table, figure};
use godwit_stamp::settings::Mode;
use godwit_testbed::{Accelerator, Backend, Godwit, GuestConfig, QemuBuild, VmConfig};
use godwit_units::ByteCount;
use serde::Serialize;

const LIMIT: Duration = Duration::from_secs(300);
const MIB: u64 = 1 << 20;

/// A guest of QEMU 10 on KVM that writes a little.
#[derive(Parser)]
struct Options {
    /// The guest's memory
    #[arg(long, value_name = "MIB", default_value = "12288", value_parser = at_least_once())]
    memory: usize,

    /// Of it, what holds data that no two pages share
    #[arg(long, value_name = "MIB", default_value = "9216", value_parser = at_least_once())]
    fill: usize,

    /// Rounds
    #[arg(long, value_name = "N", default_value = "5", value_parser = at_least_once())]
    rounds: usize,
}

/// One move.
#[derive(Serialize)]
struct Row {
    verify: &'static str,
    total_ms: f64,
    downtime_ms: f64,
    verify_ms: f64,
    look_back_ms: f64,
    cpu_s: f64,
}

const TABLE: Table<Row> = Table(&[
    Column { head: "verify", width: 8, cell: |row| row.verify.to_owned() },
    Column { head: "total ms", width: 8, cell: |row| figure(row.total_ms, 0) },
    Column { head: "downtime ms", width: 11, cell: |row| figure(row.downtime_ms, 1) },
    Column { head: "of it proof", width: 11, cell: |row| figure(row.verify_ms, 1) },
    Column { head: "look back", width: 9, cell: |row| figure(row.look_back_ms, 0) },
    Column { head: "CPU s", width: 7, cell: |row| figure(row.cpu_s, 2) },
]);

/// The ways, and what asks for each.
const WAYS: [(&str, &str); 4] = [
    ("no", "--verify=no"),
    ("live", "--verify"),
    ("arrival", "--verify=arrival"),
    ("stopped", "--verify=stopped"),
];

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    println!("{}", machine());
    let build = QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
    let guest = GuestConfig {
        memory: ByteCount(options.memory as u64 * MIB),
        fill: ByteCount(options.fill as u64 * MIB),
        mode: Mode::Rate,
        rate: 2000,
        working_set: ByteCount(64 * MIB),
        ..GuestConfig::standard()
    };
    let config = VmConfig::new(&build, guest).with_backend(Backend::Anonymous);
    let config = VmConfig { accelerator: Accelerator::Kvm, ..config };
    let godwit = Godwit::built()?;
    println!(
        "{} MiB, {} MiB filled, 2,000 pages/s over 64 MiB, {build} under KVM, medians of {}",
        options.memory, options.fill, options.rounds
    );
    TABLE.print_head();
    let mut rows = Vec::new();
    for round in 0..options.rounds {
        for turn in 0..WAYS.len() {
            let row = one_move(&config, &godwit, WAYS[(round + turn) % WAYS.len()])?;
            TABLE.print(&row);
            rows.push(row);
        }
    }
    let of = |verify: &str, figure: fn(&Row) -> f64| {
        median(&rows.iter().filter(|row| row.verify == verify).map(figure).collect::<Vec<_>>())
    };
    let mut report = Report::new("proof");
    report.figure("rounds", options.rounds);
    for (verify, option) in &WAYS[1..3] {
        let more = of(verify, |row| row.downtime_ms) - of("no", |row| row.downtime_ms);
        report.target(format!("{option}: ms more of downtime"), more, 10.0, Better::Lower);
        let more = of(verify, |row| row.cpu_s) / of("no", |row| row.cpu_s) - 1.0;
        let name = format!("{option}: % more processor time");
        report.target(&name, more * 100.0, 15.0, Better::Lower);
    }
    let more = of("stopped", |row| row.downtime_ms) - of("no", |row| row.downtime_ms);
    report.figure("stopped: ms more of downtime", more);
    report.figure("moves", serde_json::to_value(rows)?);
    report.finish()?;
    Ok(())
}

fn one_move(
    config: &VmConfig,
    godwit: &Godwit,
    (verify, option): (&'static str, &str),
) -> anyhow::Result<Row> {
    let mut fixture = Fixture::new(config.clone(), LIMIT);
    let outcome = fixture.one_move(|source, destination| {
        // The source QEMU must live on to be asked what it used.
        let options = ["--keep-source", option];
        let attempt = Attempt::within(LIMIT, godwit, source, destination, &options)?;
        attempt.moved()?;
        let last = attempt.migrate.last().clone();
        ensure!(last["verified"] == (verify != "no"), "{last}");
        Ok(Moved::by_godwit(&attempt, last))
    })?;
    let figures = Figures::of("godwit", &outcome);
    ensure!(figures.bugs == 0, "the guest's memory is damaged");
    let own = |name: &str| figures.own_words[name].as_f64().unwrap_or(0.0);
    Ok(Row {
        verify,
        total_ms: own("total_ms"),
        downtime_ms: figures.downtime_ms,
        verify_ms: own("verify_ms"),
        look_back_ms: own("look_back_ms"),
        cpu_s: figures.cpu_s,
    })
}
