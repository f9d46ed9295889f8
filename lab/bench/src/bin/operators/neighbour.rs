//! A neighbour that has a processor for itself, while a guest of another processor leaves and
//! arrives on the host: how much of its work it loses, with `--cpus` for both godwits and without.
//!
//! Keeps one promise: all that is compared was counted by the neighbour within one move.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bench::report::{Better, Report, median};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, Godwit, GuestConfig, QemuBuild, TestVm, VmConfig, kvm_builds_for, skip,
};
use godwit_units::ByteCount;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::json;

const LIMIT: Duration = Duration::from_secs(60);
/// The guest, QEMU and, with `--cpus`, godwit are on the first, the neighbour is on the other.
const GUEST: usize = 0;
const NEIGHBOUR: usize = 1;
/// So long it is counted what the neighbour does when nothing moves.
const LEAD: Duration = Duration::from_secs(2);
/// What a neighbour may lose, in percent.
const MOST: f64 = 2.0;
/// Memory that it works on, which fits into the processor's own cache.
const WORDS: usize = 4096;

/// Measures, in so many `rounds`, what a neighbour loses.
pub(crate) fn measure(godwit: &Godwit, rounds: usize, report: &mut Report) -> anyhow::Result<()> {
    const WHAT: &str = "bench operators, a neighbour";
    let all = sched_getaffinity(None)?;
    if !all.is_set(GUEST) || !all.is_set(NEIGHBOUR) {
        skip(WHAT, format!("processors {GUEST} and {NEIGHBOUR} are not both to be had"));
        return Ok(());
    }
    let builds = kvm_builds_for(WHAT);
    let Some(build) = builds.iter().max_by_key(|build| build.version) else { return Ok(()) };
    println!("\na neighbour with a processor for itself; {build}");
    println!("{:>8} {:>9} {:>8} {:>11}", "--cpus", "move s", "lost %", "longest ms");
    let mut rows = Vec::new();
    for round in 0..rounds {
        for turn in 0..2 {
            let kept_off = (round + turn) % 2 == 0;
            let row = one_move(godwit, build, &all, kept_off)?;
            let word = if kept_off { "0" } else { "-" };
            println!("{word:>8} {:>9.2} {:>8.2} {:>11.2}", row.took, row.lost, row.longest);
            rows.push(row);
        }
    }
    let lost = |kept_off: bool| -> Vec<f64> {
        rows.iter().filter(|row| row.kept_off == kept_off).map(|row| row.lost).collect()
    };
    report.target_of_rounds(
        "% of its work that a neighbour loses while a guest leaves and arrives, with --cpus",
        (median(&lost(true)), &lost(true)),
        MOST,
        Better::Lower,
    );
    report.figure("neighbour_lost_without_cpus", median(&lost(false)));
    let told = |row: &Row| {
        json!({
            "cpus": row.kept_off,
            "move_s": row.took,
            "lost_percent": row.lost,
            "longest_ms": row.longest,
        })
    };
    report.figure("neighbours", rows.iter().map(told).collect::<Vec<_>>());
    Ok(())
}

/// What the neighbour lost in one move.
struct Row {
    kept_off: bool,
    took: f64,
    /// Percent of what it did in as long before.
    lost: f64,
    /// The longest time between two steps of its work, in ms.
    longest: f64,
}

fn one_move(
    godwit: &Godwit,
    build: &QemuBuild,
    all: &CpuSet,
    kept_off: bool,
) -> anyhow::Result<Row> {
    let guest = GuestConfig {
        memory: ByteCount(1 << 30),
        fill: ByteCount(512 << 20),
        ..GuestConfig::small(Mode::Idle).without_rest()
    };
    let config = VmConfig::new(build, guest).on_kvm().with_backend(Backend::Anonymous);
    // What is started here is where this thread is.
    sched_setaffinity(None, &only(GUEST))?;
    let started =
        TestVm::source(&config).and_then(|source| Ok((source, TestVm::destination(&config)?)));
    sched_setaffinity(None, all)?;
    let (source, destination) = started?;
    source.wait_ready(LIMIT)?;
    source.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;

    let options: &[&str] = if kept_off { &["--cpus", "0"] } else { &[] };
    let (receive, address) = godwit.receive(&destination, options)?;
    let neighbour = Neighbour::start()?;
    let before = neighbour.during(|| {
        std::thread::sleep(LEAD);
        Ok(())
    })?;
    let during = neighbour.during(|| {
        let migrate = godwit.migrate(&source, &address, options)?.wait(LIMIT)?;
        ensure!(migrate.last()["outcome"] == "migrated", "{} {}", migrate.last(), migrate.errors);
        ensure!(receive.wait(LIMIT)?.status.success(), "godwit receive failed");
        Ok(())
    })?;
    neighbour.end()?;
    Ok(Row {
        kept_off,
        took: during.time.as_secs_f64(),
        lost: (1.0 - during.rate() / before.rate()) * 100.0,
        longest: during.longest.as_secs_f64() * 1e3,
    })
}

fn only(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

/// A thread that works on a processor of its own.
struct Neighbour {
    steps: Arc<AtomicU64>,
    /// In nanoseconds.
    longest: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<()>>,
}

/// What it did in a time.
struct Work {
    steps: u64,
    time: Duration,
    longest: Duration,
}

impl Work {
    fn rate(&self) -> f64 {
        self.steps as f64 / self.time.as_secs_f64()
    }
}

impl Neighbour {
    fn start() -> anyhow::Result<Self> {
        let [steps, longest] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
        let ends = Arc::new(AtomicBool::new(false));
        let (counts, lags, is_to_end) =
            (Arc::clone(&steps), Arc::clone(&longest), Arc::clone(&ends));
        let thread = std::thread::Builder::new().name("neighbour".to_owned()).spawn(move || {
            sched_setaffinity(None, &only(NEIGHBOUR))?;
            let mut words = vec![1_u64; WORDS];
            let mut last = Instant::now();
            while !is_to_end.load(Ordering::Relaxed) {
                work(&mut words);
                let now = Instant::now();
                let lag = u64::try_from((now - last).as_nanos()).unwrap_or(u64::MAX);
                lags.fetch_max(lag, Ordering::Relaxed);
                counts.fetch_add(1, Ordering::Relaxed);
                last = now;
            }
            std::hint::black_box(words);
            Ok(())
        })?;
        Ok(Self { steps, longest, ends, thread })
    }

    /// What it does while something else is done.
    fn during(&self, other: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Work> {
        let (began, before) = (Instant::now(), self.steps.load(Ordering::Relaxed));
        self.longest.store(0, Ordering::Relaxed);
        other()?;
        let (time, after) = (began.elapsed(), self.steps.load(Ordering::Relaxed));
        ensure!(after > before, "the neighbour does nothing");
        let longest = Duration::from_nanos(self.longest.load(Ordering::Relaxed));
        Ok(Work { steps: after - before, time, longest })
    }

    fn end(self) -> anyhow::Result<()> {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("the neighbour ended in a panic")?
    }
}

/// A step: some microseconds.
fn work(words: &mut [u64]) {
    let mut last = words[0];
    for word in words {
        last ^= word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
        *word = last;
    }
}
