//! The downtime of microvms: one guest moved again and again between machines on this host, over
//! loopback.
//!
//! The machines are processes of the `godwit` command, moved as users move them. Keeps one promise:
//! what the engine says of the downtime is set beside what an observer saw in the guest's own
//! counter.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use godwit_bench::report::{Better, Report, median};
use godwit_bench::table::{Column, Table, figure};
use godwit_testbed::{BeaconPlace, Godwit, MicroVm, Movable, Observer, kvm_for};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);
const PARTS: [&str; 5] = ["drain_ms", "copy_ms", "save_ms", "load_ms", "handover_ms"];

/// Downtime of a microvm, moved again and again over loopback.
#[derive(Parser)]
struct Options {
    /// Moves in a row of one guest
    #[arg(long, value_name = "N", default_value_t = 20)]
    moves: usize,

    /// Its memory, half of which it fills
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    memory: String,

    /// What it does: idle, rate, full, hot-cold or sequential
    #[arg(long, value_name = "MODE", default_value = "idle")]
    mode: String,

    /// kvm-log, kvm-ring or pagemap
    #[arg(long, value_name = "TRACKER", default_value = "kvm-log")]
    tracker: String,
}

/// One move, in milliseconds.
struct Row {
    number: usize,
    downtime: f64,
    /// What it consists of.
    parts: [f64; PARTS.len()],
    gap: f64,
    total: f64,
}

const TABLE: Table<Row> = Table(&[
    Column { head: "move", width: 4, cell: |row| row.number.to_string() },
    Column { head: "downtime", width: 9, cell: |row| figure(row.downtime, 2) },
    Column { head: "= drain", width: 8, cell: |row| figure(row.parts[0], 2) },
    Column { head: "last pages", width: 11, cell: |row| figure(row.parts[1], 2) },
    Column { head: "save", width: 6, cell: |row| figure(row.parts[2], 2) },
    Column { head: "load", width: 6, cell: |row| figure(row.parts[3], 2) },
    Column { head: "handover", width: 9, cell: |row| figure(row.parts[4], 2) },
    Column { head: "guest's gap", width: 12, cell: |row| figure(row.gap, 2) },
    Column { head: "total", width: 8, cell: |row| figure(row.total, 1) },
]);

fn main() -> anyhow::Result<()> {
    let Options { moves, memory, mode, tracker } = Options::parse();
    if !kvm_for("bench microvm") {
        return Ok(());
    }
    let godwit = Godwit::built()?;
    let options = ["--memory", &memory, "--mode", &mode, "--tracker", &tracker];
    let mut source = MicroVm::start(&godwit, &options)?;
    source.wait_ready(LIMIT)?;
    let place = BeaconPlace::find(source.ram_file())?;
    println!("{memory} {mode} guest, {tracker}: {moves} moves over loopback, times in ms\n");
    TABLE.print_head();
    let (mut downtimes, mut gaps, mut totals, mut list) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for number in 1..=moves {
        source.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
        let destination = MicroVm::start(&godwit, &[&options[..], &["--incoming"]].concat())?;
        let observer = Observer::start(place, source.ram_file(), destination.ram_file())?;
        let (receive, address) = godwit.receive(&destination, &[])?;
        let ended = godwit.migrate(&source, &address, &[])?.wait(LIMIT)?;
        let last = ended.last();
        ensure!(last["outcome"] == "migrated", "{last} {}", ended.errors);
        receive.wait(LIMIT)?;
        destination.wait_for_heartbeats_after(Instant::now(), 1, LIMIT)?;
        let seen = observer.finish()?;
        ensure!(!seen.ran_on_both, "the guest counted on both sides");
        let gap =
            seen.switchover.context("the guest was not seen to move")?.length.as_secs_f64() * 1e3;
        let ms = |key: &str| last[key].as_f64().unwrap_or(f64::NAN);
        let parts = PARTS.map(ms);
        let (downtime, total) = (ms("downtime_ms"), ms("total_ms"));
        TABLE.print(&Row { number, downtime, parts, gap, total });
        let bugs = [source.bugs(), destination.bugs()].concat();
        ensure!(bugs.is_empty(), "{bugs:?}");
        let named = PARTS.iter().zip(parts).map(|(name, value)| ((*name).to_owned(), json!(value)));
        let mut entry: serde_json::Map<String, Value> = named.collect();
        entry.extend([
            ("downtime_ms".to_owned(), json!(downtime)),
            ("guest_gap_ms".to_owned(), json!(gap)),
        ]);
        list.push(Value::Object(entry));
        downtimes.push(downtime);
        gaps.push(gap);
        totals.push(total);
        source = destination;
    }
    let mut report = Report::new("microvm");
    report.figure("memory", memory.as_str());
    report.figure("mode", mode.as_str());
    report.figure("tracker", tracker.as_str());
    report.figure("moves", Value::Array(list));
    report.figure("total_ms_median", median(&totals));
    report.figure("guest_gap_ms_median", median(&gaps));
    println!(
        "\nmedians: downtime {:.2} ms, guest's gap {:.2} ms",
        median(&downtimes),
        median(&gaps)
    );
    if mode == "idle" {
        let name = "microvm: median downtime of an idle guest, stop to resume, ms";
        report.target(name, median(&downtimes), 10.0, Better::Lower);
    }
    report.finish()?;
    Ok(())
}
