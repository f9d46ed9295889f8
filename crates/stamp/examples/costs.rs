//! `make bench-stamp`: what stamping and checking cost a processor, of the sectors alone and of the
//! whole program.
//!
//! Keeps one promise: costs are processor time, taken by the kernel, so a machine that is busy with
//! other things makes them little worse. The figures are in `target/bench/stamp.json`.

use std::hint::black_box;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use godwit_stamp::sector::{Stamp, Unit};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

/// More than any cache holds.
const UNITS: u64 = 65_536;
const PASSES: usize = 7;
const GIB: f64 = (1_u64 << 30) as f64;
/// When the program has stamped its memory, and for how long it is looked at then.
const BEGUN: Duration = Duration::from_secs(3);
const LOOKED_AT: Duration = Duration::from_secs(10);
/// Clock ticks a second in /proc (sysconf(3), _SC_CLK_TCK), the same on all of Linux's ABIs.
const TICKS: f64 = 100.0;

type Problem = Box<dyn std::error::Error>;

/// Processor time of this thread, in seconds.
fn processor() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The least processor time that `pass` takes, in seconds.
fn least(mut pass: impl FnMut(u64)) -> f64 {
    let times = (1..=PASSES as u64).map(|number| {
        let before = processor();
        pass(number);
        processor() - before
    });
    times.fold(f64::INFINITY, f64::min)
}

fn stamp(unit: u64, generation: u64) -> Stamp {
    Stamp {
        run: 7,
        device: 1,
        writer: 0,
        zeroes: false,
        sector: unit * 8,
        generation,
        nanos: 1,
        first: unit * 8,
        sectors: 8,
        span: UNITS,
    }
}

/// Seconds of a processor for 256 MiB: to stamp them, and to check them.
fn sectors() -> (f64, f64) {
    let mut memory = vec![Unit::ZERO; UNITS as usize];
    let written = least(|generation| {
        for (unit, at) in memory.iter_mut().zip(0..) {
            unit.stamp(&stamp(at, generation));
        }
    });
    let last = PASSES as u64;
    let checked = least(|_| {
        let right = memory.iter().zip(0..).all(|(unit, at)| unit.matches(7, 1, at, last));
        assert!(black_box(right), "a stamp is not what was written");
    });
    (written, checked)
}

/// Processor time of all children that have ended, in seconds (proc(5): cutime, cstime).
fn of_children() -> Result<f64, Problem> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, rest) = stat.rsplit_once(')').ok_or("no end of the name")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = |at: usize| -> Result<f64, Problem> {
        Ok(fields.get(at).ok_or("too few fields")?.parse()?)
    };
    Ok((ticks(13)? + ticks(14)?) / TICKS)
}

/// The program, which was built beside this one.
fn beside() -> Result<PathBuf, Problem> {
    let own = std::env::current_exe()?;
    Ok(own.ancestors().nth(2).ok_or("no directory")?.join("godwit-stamp"))
}

/// Runs the program with `options`: processor time, and what it says of itself.
fn program(options: &[&str]) -> Result<(f64, Value), Problem> {
    let beside = beside()?;
    let before = of_children()?;
    let output = Command::new(&beside).args(["run", "--json"]).args(options).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}", beside.display(), said.trim()).into());
    }
    Ok((of_children()? - before, serde_json::from_slice(&output.stdout)?))
}

/// Processor time of all threads of process `pid` so far, in seconds (proc(5), schedstat: the first
/// word is nanoseconds on a processor).
fn of_threads(pid: u32) -> Result<f64, Problem> {
    let mut nanos = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        nanos += text.split_whitespace().next().ok_or("no time")?.parse::<u64>()?;
    }
    Ok(nanos as f64 / 1e9)
}

/// The share of a processor that the program takes with `options`, once it has begun: what the
/// beginning costs differs by more than this from one run to the next.
fn idle(options: &[&str]) -> Result<f64, Problem> {
    let beside = beside()?;
    let mut command = Command::new(&beside);
    command.args(["run", "--json", "--for", "15s"]).args(options);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    std::thread::sleep(BEGUN);
    let (since, before) = (Instant::now(), of_threads(child.id()));
    std::thread::sleep(LOOKED_AT);
    let (time, after) = (since.elapsed(), of_threads(child.id()));
    let ended = child.wait()?;
    if !ended.success() {
        return Err(format!("{}: {ended}", beside.display()).into());
    }
    Ok((after? - before?) / time.as_secs_f64())
}

fn number(told: &Value, key: &str) -> Result<f64, Problem> {
    Ok(told[key].as_f64().ok_or_else(|| format!("no {key} in {told}"))?)
}

fn run() -> Result<bool, Problem> {
    let size = (UNITS * 4096) as f64;
    let (written, checked) = sectors();
    // What a run costs beside checking is what a short one costs.
    let only_checks = ["--memory", "512MiB", "--rate", "none", "--for"];
    let (short, told_short) = program(&[&only_checks[..], &["10ms"]].concat())?;
    let (long, told_long) = program(&[&only_checks[..], &["6s"]].concat())?;
    let more = number(&told_long, "checked_bytes")? - number(&told_short, "checked_bytes")?;
    let whole = (long - short) / (more / GIB);
    // As a guest that is mostly left alone has it.
    let share = idle(&["--memory", "512MiB", "--rate", "none", "--check-rate", "128MiB/s"])?;

    let target = |name: &str, value: f64, limit: f64, lower: bool| {
        let met = if lower { value <= limit } else { value >= limit };
        let better = if lower { "lower" } else { "higher" };
        println!(
            "{name:<66} {value:>9.2} {better} than {limit}: {}",
            if met { "met" } else { "MISSED" }
        );
        json!({ "name": name, "value": value, "limit": limit, "better": better, "met": met })
    };
    let targets = [
        target("stamping, GB/s of a core", size / written / 1e9, 2.0, false),
        target(
            "checking sectors, % of a core for each GiB/s",
            checked / size * GIB * 100.0,
            10.0,
            true,
        ),
        target("the program checking, % of a core for each GiB/s", whole * 100.0, 10.0, true),
        target("checking 128 MiB/s while idle, % of a core", share * 100.0, 3.0, true),
    ];
    let met = targets.iter().all(|target| target["met"] == true);
    let report = json!({ "name": "stamp", "targets": targets, "program_checked_bytes": more });
    std::fs::create_dir_all("target/bench")?;
    std::fs::write("target/bench/stamp.json", format!("{report:#}\n"))?;
    println!("figures written to target/bench/stamp.json");
    Ok(met)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}
