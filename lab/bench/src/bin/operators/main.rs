//! What operators see of godwit, in figures: a host that is emptied within its budget and its
//! forecast, a neighbour that does not notice, a help that fits on a screen, a report that is one
//! small file, upgrades; and what was measured elsewhere, if it is named.
//!
//! Keeps one promise: what was not measured is not in the report.

mod neighbour;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use godwit_bench::report::{Better, Report, median};
use godwit_bench::upgrades;
use godwit_testbed::{Godwit, MicroVm, Movable, kvm_for, skip};
use serde_json::{Value, json};

const VMS: usize = 8;
const HOSTS: [&str; 2] = ["east", "west"];
const LIMIT: Duration = Duration::from_secs(300);
/// A terminal shows so many lines where a window fills the screen of a laptop.
const SCREEN: f64 = 40.0;
/// Over so long the rate is looked at for its peaks.
const WINDOW: Duration = Duration::from_secs(1);
const SAMPLE: Duration = Duration::from_millis(50);

/// What operators see of godwit, in figures.
#[derive(Parser)]
struct Options {
    /// What all moves together may send, in MiB a second
    #[arg(long, value_name = "MIB", default_value_t = 100)]
    budget: u64,

    /// How much of its memory each of the eight guests has filled, in MiB; it has a third more
    #[arg(long, value_name = "MIB", default_value_t = 384)]
    fill: u64,

    /// Evacuations; the one in the middle counts
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,

    /// Moves beside a neighbour that has a processor for itself, with --cpus and without
    #[arg(long, value_name = "N", default_value_t = 5)]
    neighbours: usize,

    /// Upgrades of each guest
    #[arg(long, value_name = "N", default_value_t = 6)]
    upgrades: usize,

    /// Sizes of guests that are upgraded, in GiB
    #[arg(long, value_name = "GIB,...", value_delimiter = ',', default_value = "1,8,16")]
    sizes: Vec<u64>,

    /// How much of its memory a guest that is upgraded fills at most, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    upgrade_fill: u64,

    /// Seconds from a fresh clone to the first finished migration (`make demo`), as measured by
    /// hand
    #[arg(long, value_name = "SECONDS")]
    fresh_clone: Option<f64>,

    /// What `make faults-coordinators` wrote
    #[arg(long, value_name = "FILE", default_value = "target/bench/coordinators.json")]
    kills: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    ensure!(options.rounds > 0, "--rounds: at least 1");
    let godwit = Godwit::built()?;
    let mut report = Report::new("operators");
    match options.fresh_clone {
        Some(seconds) => report.target(
            "fresh clone to first finished migration, builds included: seconds",
            seconds,
            300.0,
            Better::Lower,
        ),
        None => skip("fresh clone to first finished migration", "name it by --fresh-clone SECONDS"),
    }
    help(&godwit, &mut report)?;
    if kvm_for("bench operators, evacuation") {
        evacuations(&godwit, &options, &mut report)?;
    }
    kills(&options.kills, &mut report);
    neighbour::measure(&godwit, options.neighbours, &mut report)?;
    upgrades::measure_all(&mut report, options.upgrades, &options.sizes, options.upgrade_fill)?;
    report.finish()?;
    Ok(())
}

fn help(godwit: &Godwit, report: &mut Report) -> anyhow::Result<()> {
    let output = godwit.run(&["--help"])?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.success() && text.contains("migrate"), "{text}");
    let lines = text.lines().count();
    let columns = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    println!("godwit --help: {lines} lines of at most {columns} columns");
    report.target("godwit --help on one screen: lines", lines as f64, SCREEN, Better::Lower);
    report.target("godwit --help on one screen: columns", columns as f64, 80.0, Better::Lower);
    Ok(())
}

/// What was killed, as the test that did it wrote it down.
fn kills(path: &Path, report: &mut Report) {
    let written = std::fs::read_to_string(path).ok();
    let written = written.and_then(|text| serde_json::from_str::<Value>(&text).ok());
    match written {
        Some(written) => {
            let moments = written["moments"].as_f64().unwrap_or(f64::NAN);
            report.target(
                "moments at which a coordinator was killed or stopped, no VM moved twice or lost",
                moments,
                100.0,
                Better::Higher,
            );
            report.figure("coordinators", written);
        }
        None => skip(
            "killed coordinators",
            format!("run make faults-coordinators ({})", path.display()),
        ),
    }
}

/// Guests, and machines that wait for them at both destinations.
struct World {
    sources: Vec<MicroVm>,
    destinations: Vec<[MicroVm; 2]>,
    directory: PathBuf,
    name: String,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl World {
    fn new(godwit: &Godwit, fill: u64, round: usize) -> anyhow::Result<Self> {
        let name = format!("b{}-{round}", std::process::id());
        let directory = std::env::temp_dir().join(format!("godwit-bench-operators-{name}"));
        std::fs::create_dir_all(&directory)?;
        let (memory, filled) = (format!("{}MiB", fill / 3 * 4), format!("{fill}MiB"));
        let machine = ["--memory", &memory, "--mode", "idle", "--fill", &filled];
        let waiting = || MicroVm::start(godwit, &[&machine[..], &["--incoming"]].concat());
        let sources = (0..VMS).map(|_| MicroVm::start(godwit, &machine));
        let sources = sources.collect::<anyhow::Result<Vec<_>>>()?;
        let destinations = (0..VMS).map(|_| Ok([waiting()?, waiting()?]));
        let destinations = destinations.collect::<anyhow::Result<Vec<_>>>()?;
        for source in &sources {
            source.wait_ready(LIMIT)?;
            source.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
        }
        let world = Self { sources, destinations, directory, name };
        let program = godwit.program().display().to_string();
        let receive = |vm: &MicroVm| {
            json!({ "start": [
                program, "receive", "--vm", vm.vm_name(), "--listen", "127.0.0.1:0", "--json",
            ] })
        };
        let vm = |at: usize| {
            json!({
                "name": format!("vm{at}"),
                "vm": world.sources[at].vm_name(),
                "memory": memory,
                "data": filled,
                "to": {
                    "east": receive(&world.destinations[at][0]),
                    "west": receive(&world.destinations[at][1]),
                },
            })
        };
        let host = |name: &&str| json!({ "name": name, "memory": "64GiB", "at_once": 4 });
        let list = json!({
            "destination": HOSTS.iter().map(host).collect::<Vec<_>>(),
            "vm": (0..VMS).map(vm).collect::<Vec<_>>(),
        });
        std::fs::write(world.directory.join("list.json"), list.to_string())?;
        Ok(world)
    }
}

/// One evacuation: how long it took and was forecast to, and what went over the network.
struct Row {
    took: f64,
    forecast: f64,
    /// Bytes a second over all of it, and the most in a window.
    mean: f64,
    peak: f64,
    bytes: u64,
    report_bytes: u64,
}

fn evacuations(godwit: &Godwit, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let budget = (options.budget << 20) as f64;
    println!("\n{VMS} guests with {} MiB each, {} MiB/s", options.fill, options.budget);
    println!(
        "{:>8} {:>9} {:>9} {:>10} {:>10}",
        "took s", "forecast", "= more %", "mean MiB/s", "peak MiB/s"
    );
    let mut rows = Vec::new();
    for round in 0..options.rounds {
        let row = evacuate(godwit, options, round)?;
        println!(
            "{:>8.2} {:>9.2} {:>9.1} {:>10.2} {:>10.2}",
            row.took,
            row.forecast,
            (row.took / row.forecast - 1.0) * 100.0,
            row.mean / f64::from(1 << 20),
            row.peak / f64::from(1 << 20)
        );
        rows.push(row);
    }
    let middle = |of: &dyn Fn(&Row) -> f64| median(&rows.iter().map(of).collect::<Vec<_>>());
    let most = |of: &dyn Fn(&Row) -> f64| rows.iter().map(of).fold(0.0, f64::max);
    report.target(
        "evacuation of 8 VMs: % by which a second of it exceeds the budget, the most",
        most(&|row| (row.peak / budget - 1.0) * 100.0),
        5.0,
        Better::Lower,
    );
    report.target(
        "evacuation of 8 VMs: % of the budget that it does not use, the median",
        middle(&|row| (1.0 - row.mean / budget) * 100.0),
        5.0,
        Better::Lower,
    );
    report.target(
        "evacuation of 8 VMs: % between the forecast and the time it took, the median",
        middle(&|row| (row.took / row.forecast - 1.0).abs() * 100.0),
        10.0,
        Better::Lower,
    );
    report.target(
        "report of one migration: KiB",
        most(&|row| row.report_bytes as f64 / 1024.0),
        500.0,
        Better::Lower,
    );
    let of = |row: &Row| {
        json!({
            "took_s": row.took,
            "forecast_s": row.forecast,
            "bytes": row.bytes,
            "mean_bytes_per_second": row.mean,
            "peak_bytes_per_second": row.peak,
            "report_bytes": row.report_bytes,
        })
    };
    report.figure("budget_bytes_per_second", budget);
    report.figure("filled_bytes", options.fill << 20);
    report.figure("evacuations", rows.iter().map(of).collect::<Vec<_>>());
    Ok(())
}

/// What has been sent over loopback: all moves, and the little that is said beside them.
fn sent() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/sys/class/net/lo/statistics/tx_bytes")?;
    Ok(text.trim().parse()?)
}

fn evacuate(godwit: &Godwit, options: &Options, round: usize) -> anyhow::Result<Row> {
    let world = World::new(godwit, options.fill, round)?;
    let ended = Arc::new(AtomicBool::new(false));
    let ending = Arc::clone(&ended);
    let watch = std::thread::spawn(move || -> anyhow::Result<Vec<(Instant, u64)>> {
        let mut samples = vec![(Instant::now(), sent()?)];
        while !ending.load(Ordering::Relaxed) {
            std::thread::sleep(SAMPLE);
            samples.push((Instant::now(), sent()?));
        }
        Ok(samples)
    });
    let output = Command::new(godwit.program())
        .arg("evacuate")
        .arg(world.directory.join("list.json"))
        .args(["--json", "--name", &world.name, "--state-dir"])
        .arg(&world.directory)
        .args(["--bandwidth", &format!("{}MiB/s", options.budget), "--at-once", "4"])
        .args(["--", "--compression", "none"])
        .env("XDG_STATE_HOME", world.directory.join("state"))
        .stdin(Stdio::null())
        .output()?;
    ended.store(true, Ordering::Relaxed);
    let samples = watch.join().ok().context("the watch ended in a panic")??;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().context("it said nothing")?;
    let last: Value = serde_json::from_str(last)?;
    ensure!(last["moved"] == VMS, "{last} {}", String::from_utf8_lossy(&output.stderr));
    let seconds = |key: &str| last[key].as_f64().with_context(|| format!("no {key}: {last}"));
    let (took, forecast) = (seconds("took_seconds")?, seconds("forecast_seconds")?);
    let bytes = samples[samples.len() - 1].1 - samples[0].1;
    Ok(Row {
        took,
        forecast,
        mean: bytes as f64 / took,
        peak: peak(&samples),
        bytes,
        report_bytes: page(godwit, &world)?,
    })
}

/// The most bytes a second in any window.
fn peak(samples: &[(Instant, u64)]) -> f64 {
    let rate = |at: usize| {
        let (from, before) = samples[at];
        let end = samples[at..].iter().find(|(time, _)| *time >= from + WINDOW)?;
        Some((end.1 - before) as f64 / (end.0 - from).as_secs_f64())
    };
    (0..samples.len()).filter_map(rate).fold(0.0, f64::max)
}

/// How large the report of one of the moves is, which needs nothing else.
fn page(godwit: &Godwit, world: &World) -> anyhow::Result<u64> {
    let moves = world.directory.join(&world.name).join("moves");
    let said = moves.join("vm0.1.jsonl").display().to_string();
    let output = godwit.run(&["report", &said, "--out", "-"])?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for elsewhere in ["src=\"http", "href=\"http", "url(http", "@import"] {
        ensure!(!text.contains(elsewhere), "the report needs the network: {elsewhere}");
    }
    Ok(text.len() as u64)
}
