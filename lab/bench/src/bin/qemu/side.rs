//! The comparison: each contestant moves a guest of its own, freshly booted, under the same
//! conditions.
//!
//! Keeps it fair: same QEMU, same machines, same guest, TCP loopback, no bandwidth limit, a
//! downtime limit of 300 ms; each round starts with another contestant; a move is over when the
//! guest runs on the destination, by QEMU's own time stamp of that event. The work counted is that
//! of all threads but the guest's processors, in both QEMUs and in both godwit processes.
//!
//! The targets compare equal machines, whose RAM is a shared file. QEMU by itself does not need
//! one, and spends less with anonymous memory (large pages, and no page allocated by reading a
//! hole), so it is measured like that as well: whoever reads the table should know the rival at its
//! best. An observer finds no file there to map, so the gap of those moves is not known.

use std::time::Duration;

use anyhow::{Context, ensure};
use godwit_bench::fixture::{Fixture, Moved, Outcome};
use godwit_bench::godwit::Attempt;
use godwit_bench::report::{self, Better, Report};
use godwit_bench::table::{Column, Table, figure};
use godwit_testbed::{
    Backend, Gap, Godwit, GuestConfig, QemuBuild, Style, TestVm, VmConfig, own_migration,
};
use serde::Serialize;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);
const DOWNTIME_LIMIT: [&str; 2] = ["--downtime-limit", "300ms"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contestant {
    Plain,
    Multifd,
    Godwit,
    PlainAnonymous,
    MultifdAnonymous,
}

impl Contestant {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "QEMU plain",
            Self::Multifd => "QEMU multifd 2",
            Self::Godwit => "godwit",
            Self::PlainAnonymous => "plain, anonymous",
            Self::MultifdAnonymous => "multifd, anonymous",
        }
    }

    fn backend(self) -> Backend {
        match self {
            Self::PlainAnonymous | Self::MultifdAnonymous => Backend::Anonymous,
            Self::Plain | Self::Multifd | Self::Godwit => Backend::SharedFile,
        }
    }
}

/// The figures of one move.
#[derive(Clone, Debug, Serialize)]
struct Row {
    contestant: &'static str,
    total_ms: f64,
    /// The guest's gap at the switchover, seen from outside.
    downtime_ms: f64,
    downtime_resolution_ms: f64,
    /// The longest other gap, before or after.
    stall_ms: f64,
    /// When that gap ended, from the end of the switchover on; negative before it.
    stall_at_ms: f64,
    sent_mib: f64,
    /// Processor time of the work: source and destination side of QEMU, and godwit's processes.
    cpu_s: f64,
    cpu_source_s: f64,
    cpu_destination_s: f64,
    cpu_godwit_s: f64,
    passes: u64,
    /// What the contestant says of itself.
    own_words: Value,
    bugs: usize,
}

/// Runs the comparison and enters figures and targets into `report`.
pub(crate) fn compare(rounds: usize, with_godwit: bool, report: &mut Report) -> anyhow::Result<()> {
    let build = QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
    let godwit = with_godwit.then(Godwit::built).transpose()?;
    let mut order = vec![
        Contestant::Plain,
        Contestant::Multifd,
        Contestant::Godwit,
        Contestant::PlainAnonymous,
        Contestant::MultifdAnonymous,
    ];
    order.retain(|&contestant| with_godwit || contestant != Contestant::Godwit);
    println!(
        "{build}, 1 GiB guest, 512 MiB filled, 2,000 pages/s over 128 MiB, TCP loopback, {rounds} \
         rounds"
    );
    TABLE.print_head();
    let mut rows = Vec::new();
    for _ in 0..rounds {
        for &contestant in &order {
            let row = one_move(contestant, &build, godwit.as_ref())
                .with_context(|| format!("{} did not move the guest", contestant.name()))?;
            TABLE.print(&row);
            rows.push(row);
        }
        order.rotate_left(1);
    }
    println!("medians:");
    order.sort_by_key(|&contestant| contestant as u8);
    for &contestant in &order {
        TABLE.print(&medians(&rows, contestant));
    }
    report.figure("qemu", build.to_string());
    report.figure("rounds", rounds);
    report.figure(
        "medians",
        serde_json::to_value(order.iter().map(|&c| medians(&rows, c)).collect::<Vec<_>>())?,
    );
    report.figure("moves", serde_json::to_value(&rows)?);
    if with_godwit {
        targets(&rows, report);
    }
    let bugs = rows.iter().map(|row| row.bugs).sum::<usize>();
    report.target("BUG lines of guests, all moves", bugs as f64, 0.0, Better::Lower);
    Ok(())
}

fn targets(rows: &[Row], report: &mut Report) {
    type Figure = (&'static str, fn(&Row) -> f64);
    let figures: [Figure; 3] = [
        ("total time", |row| row.total_ms),
        ("processor time", |row| row.cpu_s),
        ("downtime", |row| row.downtime_ms),
    ];
    for rival in [Contestant::Plain, Contestant::Multifd] {
        for (what, figure) in figures {
            let ratio =
                median_of(rows, Contestant::Godwit, figure) / median_of(rows, rival, figure);
            report.target(format!("godwit / {}: {what}", rival.name()), ratio, 1.0, Better::Lower);
        }
    }
    let cpu = |who| median_of(rows, who, |row: &Row| row.cpu_s);
    let ratio = cpu(Contestant::Godwit) / cpu(Contestant::Multifd);
    report.target("godwit / multifd: processor time, at most half", ratio, 0.5, Better::Lower);
    let worst = |key: &str, side: &str| {
        let own = rows.iter().filter(|row| row.contestant == Contestant::Godwit.name());
        own.map(|row| row.own_words[side][key].as_f64().unwrap_or(f64::NAN)).fold(0.0, worse)
    };
    let stop = worst("tracking_stop_us", "migrate") / 1e3;
    report.target("godwit's tracking stop, worst, ms", stop, 2.0, Better::Lower);
    let memory = GuestConfig::standard().memory.0;
    let limit = (64 << 20) as f64 + memory as f64 / 256.0;
    for side in ["migrate", "receive"] {
        let peak = worst("peak_rss_bytes", side);
        let name = format!("godwit {side}: peak resident memory, worst, MiB");
        report.target(name, peak / MIB, limit / MIB, Better::Lower);
    }
}

/// The greater of two; a figure that is missing stays missing.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

const MIB: f64 = 1_048_576.0;

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn one_move(
    contestant: Contestant,
    build: &QemuBuild,
    godwit: Option<&Godwit>,
) -> anyhow::Result<Row> {
    let config = VmConfig::new(build, GuestConfig::standard()).with_backend(contestant.backend());
    let mut fixture = Fixture::new(config, LIMIT);
    fixture.observed = contestant.backend() == Backend::SharedFile;
    let outcome = fixture.one_move(|source, destination| {
        let by_qemu = |source: &mut TestVm, destination: &mut TestVm, style| {
            own_migration(source, destination, style, LIMIT).map(|own| Moved::by_qemu(&own))
        };
        match (contestant, godwit) {
            (Contestant::Godwit, Some(godwit)) => by_godwit(godwit, source, destination),
            (Contestant::Multifd | Contestant::MultifdAnonymous, _) => {
                by_qemu(source, destination, Style::Multifd(2))
            }
            _ => by_qemu(source, destination, Style::Plain),
        }
    })?;
    let seen = outcome.seen.switchover.is_some();
    ensure!(seen || !fixture.observed, "the guest was not seen to move");
    Ok(row(contestant, outcome))
}

/// A gap that nobody observed is not a number, and null in the report.
fn row(contestant: Contestant, outcome: Outcome) -> Row {
    let gap = |gap: Option<Gap>, figure: fn(Gap) -> Duration| {
        gap.map_or(f64::NAN, |gap| millis(figure(gap)))
    };
    let Outcome { moved, seen, cpu: [source, destination], bugs, .. } = outcome;
    Row {
        contestant: contestant.name(),
        total_ms: millis(moved.wall),
        downtime_ms: gap(seen.switchover, |gap| gap.length),
        downtime_resolution_ms: gap(seen.switchover, |gap| gap.resolution),
        stall_ms: gap(seen.stall, |gap| gap.length),
        stall_at_ms: gap(seen.stall, |gap| gap.end) - gap(seen.switchover, |gap| gap.end),
        sent_mib: moved.sent / MIB,
        cpu_s: (source + destination + moved.godwit_cpu).as_secs_f64(),
        cpu_source_s: source.as_secs_f64(),
        cpu_destination_s: destination.as_secs_f64(),
        cpu_godwit_s: moved.godwit_cpu.as_secs_f64(),
        passes: moved.rounds,
        own_words: moved.own_words,
        bugs,
    }
}

fn by_godwit(godwit: &Godwit, source: &TestVm, destination: &mut TestVm) -> anyhow::Result<Moved> {
    // The source QEMU must live on to be asked what it used.
    let options = [&DOWNTIME_LIMIT[..], &["--keep-source"]].concat();
    let attempt = Attempt::within(LIMIT, godwit, source, destination, &options)?;
    let (migrate, receive) = attempt.moved()?;
    for figure in ["sent_bytes", "rounds"] {
        migrate.last()[figure]
            .as_u64()
            .with_context(|| format!("godwit migrate names no {figure}"))?;
    }
    let own_words = json!({ "migrate": migrate.last(), "receive": receive.last() });
    Ok(Moved::by_godwit(&attempt, own_words))
}

fn of(rows: &[Row], contestant: Contestant) -> impl Iterator<Item = &Row> {
    rows.iter().filter(move |row| row.contestant == contestant.name())
}

fn median_of(rows: &[Row], contestant: Contestant, figure: impl Fn(&Row) -> f64) -> f64 {
    report::median_of(of(rows, contestant), figure)
}

fn medians(rows: &[Row], contestant: Contestant) -> Row {
    let median = |figure: fn(&Row) -> f64| median_of(rows, contestant, figure);
    Row {
        contestant: contestant.name(),
        total_ms: median(|row| row.total_ms),
        downtime_ms: median(|row| row.downtime_ms),
        downtime_resolution_ms: median(|row| row.downtime_resolution_ms),
        stall_ms: median(|row| row.stall_ms),
        stall_at_ms: median(|row| row.stall_at_ms),
        sent_mib: median(|row| row.sent_mib),
        cpu_s: median(|row| row.cpu_s),
        cpu_source_s: median(|row| row.cpu_source_s),
        cpu_destination_s: median(|row| row.cpu_destination_s),
        cpu_godwit_s: median(|row| row.cpu_godwit_s),
        passes: median(|row| row.passes as f64) as u64,
        own_words: Value::Null,
        bugs: of(rows, contestant).map(|row| row.bugs).sum(),
    }
}

const TABLE: Table<Row> = Table(&[
    Column { head: "", width: 18, cell: |row| row.contestant.to_owned() },
    Column { head: "total ms", width: 8, cell: |row| figure(row.total_ms, 0) },
    Column { head: "downtime ms", width: 13, cell: downtime },
    Column { head: "stall ms", width: 8, cell: |row| figure(row.stall_ms, 1) },
    Column { head: "sent MiB", width: 8, cell: |row| figure(row.sent_mib, 1) },
    Column { head: "passes", width: 6, cell: |row| row.passes.to_string() },
    Column { head: "CPU s src+dst+godwit", width: 20, cell: shares },
    Column { head: "= CPU", width: 6, cell: |row| figure(row.cpu_s, 2) },
]);

fn downtime(row: &Row) -> String {
    if row.downtime_ms.is_nan() {
        return figure(row.downtime_ms, 1);
    }
    format!("{:.1} ±{:.1}", row.downtime_ms, row.downtime_resolution_ms)
}

fn shares(row: &Row) -> String {
    format!("{:.2}+{:.2}+{:.2}", row.cpu_source_s, row.cpu_destination_s, row.cpu_godwit_s)
}
