//! One move of a guest over a slow link, by Godwit or by QEMU, as it is seen from outside.
//!
//! Keeps it fair: same QEMU, same machines, RAM in a shared file, TCP loopback, the same limit of
//! bandwidth set on both, a downtime limit of 300 ms. Work lost is what the guest did not count,
//! against its own rate in the two seconds before the move, from the start of the move to its end,
//! downtime included. Time under half and under a tenth of that rate is judged in windows of 50 ms.
//! QEMU's moves that do not end are cancelled; their guest is used for the next.

use std::time::{Duration, Instant};

use anyhow::ensure;
use godwit_testbed::{
    BeaconPlace, Godwit, Observer, Style, TestVm, VmConfig, own_migration_within,
};
use godwit_units::Rate;
use serde_json::{Value, json};

use crate::godwit::Attempt;
use crate::row::{Row, print_row, seconds};

/// No move takes longer.
pub const LIMIT: Duration = Duration::from_secs(120);
const SETTLED: usize = 15;
/// The guest's rate before is that over this time.
const BEFORE: Duration = Duration::from_secs(2);
const MIB: f64 = 1_048_576.0;
/// How Godwit is told.
const GODWIT: [&str; 5] =
    ["--downtime-limit", "300ms", "--max-bandwidth", "128MiB/s", "--keep-source"];

/// What a contestant reports of one move.
pub struct Moved {
    /// Whether it came to an end.
    pub finished: bool,
    /// From the command until the guest runs on the other side with all of its memory there, or
    /// until it was cancelled.
    pub wall: Duration,
    /// Bytes on the wire.
    pub sent: f64,
    /// Rounds or passes.
    pub rounds: u64,
    /// Processor time of godwit, both sides.
    pub godwit_cpu: Duration,
    /// What it says of itself.
    pub own_words: Value,
}

/// Where moves are made from: a guest that did not leave is used again.
pub struct Fixture {
    config: VmConfig,
    source: Option<TestVm>,
}

impl Fixture {
    /// For machines like `config`.
    pub fn new(config: VmConfig) -> Self {
        Self { config, source: None }
    }

    /// One move, called `name`, made by `by`.
    pub fn one_move(
        &mut self,
        name: &'static str,
        by: impl FnOnce(&mut TestVm, &mut TestVm) -> anyhow::Result<Moved>,
    ) -> anyhow::Result<Row> {
        let mut source = match self.source.take() {
            Some(source) => source,
            None => TestVm::source(&self.config)?,
        };
        let mut destination = TestVm::destination(&self.config)?;
        source.wait_ready(LIMIT)?;
        source.wait_for_heartbeats_after(Instant::now(), SETTLED, LIMIT)?;
        let place = BeaconPlace::find(source.ram_file())?;
        let observer = Observer::start(place, source.ram_file(), destination.ram_file())?;
        std::thread::sleep(BEFORE);

        let before = (source.cpu_time()?, destination.cpu_time()?);
        let from = observer.started().elapsed();
        let moved = by(&mut source, &mut destination)?;
        let after = (source.cpu_time()?, destination.cpu_time()?);
        let here = if moved.finished { &destination } else { &source };
        here.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        let (seen, trace) = observer.finish_with_course()?;
        ensure!(!seen.ran_on_both, "the guest ran on both sides");

        let rate = trace.rate(from.saturating_sub(BEFORE), from);
        let loss = trace.loss(from, from + moved.wall, rate);
        let millis = |time: Duration| seconds(time) * 1e3;
        let longest = seen.longest();
        let used = (after.0 - before.0).others + (after.1 - before.1).others + moved.godwit_cpu;
        let bugs = [source.bugs(), destination.bugs()].concat();
        bugs.iter().for_each(|bug| println!("{bug}"));
        let row = Row {
            name,
            finished: moved.finished,
            total_s: seconds(moved.wall),
            downtime_ms: seen.switchover.map_or(f64::NAN, |gap| millis(gap.length)),
            gap_ms: longest.map_or(f64::NAN, |gap| millis(gap.length)),
            gap_resolution_ms: longest.map_or(f64::NAN, |gap| millis(gap.resolution)),
            sent_mib: moved.sent / MIB,
            lost_s: seconds(loss.work),
            under_half_s: seconds(loss.under_half),
            under_tenth_s: seconds(loss.under_tenth),
            cpu_s: seconds(used),
            rounds: moved.rounds,
            bugs: bugs.len(),
            stall_ms: seen.stall.map_or(0.0, |gap| millis(gap.length)),
            own_words: moved.own_words,
        };
        print_row(&row);
        if !moved.finished {
            self.source = Some(source);
        }
        Ok(row)
    }
}

/// By QEMU, in one of its ways; cancelled when that is not done within `patience`.
pub fn by_qemu(
    source: &mut TestVm,
    destination: &mut TestVm,
    style: Style,
    patience: Duration,
) -> anyhow::Result<Moved> {
    let link = Rate::from_bytes_per_second(128.0 * MIB);
    let own = own_migration_within(source, destination, style, Some(link), patience)?;
    Ok(Moved {
        finished: own.finished,
        wall: own.wall,
        sent: own.sent.0 as f64,
        rounds: own.passes,
        godwit_cpu: Duration::ZERO,
        own_words: json!({
            "total_ms": seconds(own.total) * 1e3, "downtime_ms": seconds(own.downtime) * 1e3,
        }),
    })
}

/// By Godwit, with a throttle and a compression.
pub fn by_godwit(
    godwit: &Godwit,
    source: &TestVm,
    destination: &mut TestVm,
    [throttle, compression]: [&str; 2],
) -> anyhow::Result<Moved> {
    let options = [&GODWIT[..], &["--throttle", throttle, "--compression", compression]].concat();
    let attempt = Attempt::within(LIMIT, godwit, source, destination, &options)?;
    let migrate = &attempt.migrate;
    let last = migrate.last();
    let finished = attempt.receive.is_some();
    if !finished {
        println!("{last} {}", migrate.errors.trim());
    }
    let progress = migrate.lines.iter().filter(|line| line["event"] == "progress");
    Ok(Moved {
        finished,
        wall: attempt.wall,
        sent: last["sent_bytes"].as_f64().unwrap_or(f64::NAN),
        rounds: last["rounds"].as_u64().unwrap_or(0),
        godwit_cpu: attempt.cpu,
        own_words: json!({ "migrate": last, "progress": progress.collect::<Vec<_>>() }),
    })
}
