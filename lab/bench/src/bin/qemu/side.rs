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

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bench::godwit::Attempt;
use godwit_bench::report::{Better, Report, median};
use godwit_testbed::{
    Backend, BeaconPlace, Gap, Godwit, GuestConfig, Observation, Observer, QemuBuild, Style,
    TestVm, VmConfig, own_migration,
};
use serde::Serialize;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);
/// After so many heartbeats the guest's kernel has done what it does only once.
const SETTLED: usize = 15;
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

/// What a contestant reports of one move.
struct Moved {
    wall: Duration,
    sent_bytes: u64,
    passes: u64,
    godwit_cpu: Duration,
    own_words: Value,
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
    print_head();
    let mut rows = Vec::new();
    for _ in 0..rounds {
        for &contestant in &order {
            let row = one_move(contestant, &build, godwit.as_ref())
                .with_context(|| format!("{} did not move the guest", contestant.name()))?;
            print_row(&row);
            rows.push(row);
        }
        order.rotate_left(1);
    }
    println!("medians:");
    order.sort_by_key(|&contestant| contestant as u8);
    for &contestant in &order {
        print_row(&medians(&rows, contestant));
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
    let mut source = TestVm::source(&config)?;
    let mut destination = TestVm::destination(&config)?;
    source.wait_ready(LIMIT)?;
    source.wait_for_heartbeats_after(Instant::now(), SETTLED, LIMIT)?;
    let observer = match contestant.backend() {
        Backend::SharedFile => {
            let place = BeaconPlace::find(source.ram_file())?;
            Some(Observer::start(place, source.ram_file(), destination.ram_file())?)
        }
        _ => None,
    };

    let before = (source.cpu_time()?, destination.cpu_time()?);
    let moved = match (contestant, godwit) {
        (Contestant::Godwit, Some(godwit)) => by_godwit(godwit, &source, &mut destination)?,
        (Contestant::Multifd | Contestant::MultifdAnonymous, _) => {
            by_qemu(&mut source, &mut destination, Style::Multifd(2))?
        }
        _ => by_qemu(&mut source, &mut destination, Style::Plain)?,
    };
    let after = (source.cpu_time()?, destination.cpu_time()?);
    destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
    let seen = observer.map(Observer::finish).transpose()?;
    if let Some(seen) = &seen {
        ensure!(!seen.ran_on_both, "the guest ran on both sides");
        ensure!(seen.switchover.is_some(), "the guest was not seen to move");
    }
    let (at_source, at_destination) = ((after.0 - before.0).others, (after.1 - before.1).others);
    let bugs = [source.bugs(), destination.bugs()].concat();
    bugs.iter().for_each(|bug| println!("{bug}"));
    Ok(row(contestant, &moved, &seen.unwrap_or_default(), [at_source, at_destination], bugs.len()))
}

/// A gap that nobody observed is not a number, and null in the report.
fn row(
    contestant: Contestant,
    moved: &Moved,
    seen: &Observation,
    [source, destination]: [Duration; 2],
    bugs: usize,
) -> Row {
    let gap = |gap: Option<Gap>, figure: fn(Gap) -> Duration| {
        gap.map_or(f64::NAN, |gap| millis(figure(gap)))
    };
    Row {
        contestant: contestant.name(),
        total_ms: millis(moved.wall),
        downtime_ms: gap(seen.switchover, |gap| gap.length),
        downtime_resolution_ms: gap(seen.switchover, |gap| gap.resolution),
        stall_ms: gap(seen.stall, |gap| gap.length),
        stall_at_ms: gap(seen.stall, |gap| gap.end) - gap(seen.switchover, |gap| gap.end),
        sent_mib: moved.sent_bytes as f64 / MIB,
        cpu_s: (source + destination + moved.godwit_cpu).as_secs_f64(),
        cpu_source_s: source.as_secs_f64(),
        cpu_destination_s: destination.as_secs_f64(),
        cpu_godwit_s: moved.godwit_cpu.as_secs_f64(),
        passes: moved.passes,
        own_words: moved.own_words.clone(),
        bugs,
    }
}

fn by_qemu(source: &mut TestVm, destination: &mut TestVm, style: Style) -> anyhow::Result<Moved> {
    let own = own_migration(source, destination, style, LIMIT)?;
    Ok(Moved {
        wall: own.wall,
        sent_bytes: own.sent.0,
        passes: own.passes,
        godwit_cpu: Duration::ZERO,
        own_words: json!({ "total_ms": millis(own.total), "downtime_ms": millis(own.downtime) }),
    })
}

fn by_godwit(godwit: &Godwit, source: &TestVm, destination: &mut TestVm) -> anyhow::Result<Moved> {
    // The source QEMU must live on to be asked what it used.
    let options = [&DOWNTIME_LIMIT[..], &["--keep-source"]].concat();
    let attempt = Attempt::within(LIMIT, godwit, source, destination, &options)?;
    let (migrate, receive) = attempt.moved()?;
    let last = migrate.last();
    Ok(Moved {
        wall: attempt.wall,
        sent_bytes: last["sent_bytes"].as_u64().context("godwit migrate names no sent_bytes")?,
        passes: last["rounds"].as_u64().context("godwit migrate names no rounds")?,
        godwit_cpu: attempt.cpu,
        own_words: json!({ "migrate": last, "receive": receive.last() }),
    })
}

fn of(rows: &[Row], contestant: Contestant) -> impl Iterator<Item = &Row> {
    rows.iter().filter(move |row| row.contestant == contestant.name())
}

fn median_of(rows: &[Row], contestant: Contestant, figure: impl Fn(&Row) -> f64) -> f64 {
    median(&of(rows, contestant).map(figure).collect::<Vec<_>>())
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

fn print_head() {
    println!(
        "{:<18} {:>8} {:>13} {:>8} {:>8} {:>6} {:>20} {:>6}",
        "",
        "total ms",
        "downtime ms",
        "stall ms",
        "sent MiB",
        "passes",
        "CPU s src+dst+godwit",
        "= CPU"
    );
}

fn print_row(row: &Row) {
    let known = |figure: f64, text: String| if figure.is_nan() { "-".to_owned() } else { text };
    let downtime = known(
        row.downtime_ms,
        format!("{:.1} ±{:.1}", row.downtime_ms, row.downtime_resolution_ms),
    );
    let stall = known(row.stall_ms, format!("{:.1}", row.stall_ms));
    let parts =
        format!("{:.2}+{:.2}+{:.2}", row.cpu_source_s, row.cpu_destination_s, row.cpu_godwit_s);
    println!(
        "{:<18} {:>8.0} {downtime:>13} {stall:>8} {:>8.1} {:>6} {parts:>20} {:>6.2}",
        row.contestant, row.total_ms, row.sent_mib, row.passes, row.cpu_s
    );
}
