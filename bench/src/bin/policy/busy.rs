//! A guest that no link of 128 MiB/s can follow, moved by QEMU in all of its ways and by Godwit with each throttle.
//!
//! Keeps it fair: same QEMU, same machines, RAM in a shared file, TCP loopback, the same limit of bandwidth set on both, a
//! downtime limit of 300 ms. Work lost is what the guest did not count, against its own rate in the two seconds before
//! the move, from the start of the move to its end, downtime included. Time under half and under a tenth of that rate is
//! judged in windows of 50 ms. QEMU's moves that do not end are cancelled; their guest is used for the next.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use godwit_bench::report::{Better, Report};
use godwit_testbed::{
    BeaconPlace, Flavour, Godwit, GuestConfig, Observer, Style, TestVm, VmConfig, own_migration_within,
};
use godwit_units::{ByteCount, Rate};
use godwit_verify::settings::Mode;
use serde_json::{Value, json};

use crate::Options;
use crate::row::{Row, median_of, medians, of, print_head, print_row, seconds};

const LIMIT: Duration = Duration::from_secs(120);
const SETTLED: usize = 15;
/// The guest's rate before is that over this time.
const BEFORE: Duration = Duration::from_secs(2);
const MIB: f64 = 1_048_576.0;
const DOWNTIME_LIMIT_MS: f64 = 300.0;
const GODWIT: [&str; 5] = ["--downtime-limit", "300ms", "--max-bandwidth", "128MiB/s", "--keep-source"];

const QEMU: [(&str, Style); 7] = [
    ("QEMU plain", Style::Plain),
    ("QEMU multifd 2", Style::Multifd(2)),
    ("QEMU multifd 2, zstd", Style::Zstd),
    ("QEMU xbzrle", Style::Xbzrle),
    ("QEMU auto-converge", Style::AutoConverge),
    ("QEMU post-copy", Style::PostCopy { limited: true }),
    ("QEMU post-copy, free", Style::PostCopy { limited: false }),
];
/// QEMU's ways that are known to end, given time.
const ENDS: [Style; 3] =
    [Style::AutoConverge, Style::PostCopy { limited: true }, Style::PostCopy { limited: false }];
/// Throttle and compression. What is compared with QEMU sends pages as they are.
const THROTTLES: [(&str, &str, &str); 7] = [
    ("godwit direct", "direct", "none"),
    ("godwit staged", "staged", "none"),
    ("godwit auto-converge", "auto-converge", "none"),
    (ADAPTIVE, "adaptive", "none"),
    ("compressed, direct", "direct", "auto"),
    ("compressed, staged", "staged", "auto"),
    ("compressed, adaptive", "adaptive", "auto"),
];
const ADAPTIVE: &str = "godwit adaptive";

/// What a contestant reports of one move.
struct Moved {
    finished: bool,
    wall: Duration,
    sent: f64,
    rounds: u64,
    godwit_cpu: Duration,
    own_words: Value,
}

/// Where moves are made from: a guest that did not leave is used again.
struct Ground {
    config: VmConfig,
    source: Option<TestVm>,
}

/// Runs the comparison and enters figures and targets into `report`.
pub(crate) fn compare(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let flavour = Flavour::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
    let godwit = Godwit::built()?;
    let guest =
        GuestConfig { mode: Mode::Full, working_set: ByteCount(256 << 20), ..GuestConfig::standard() };
    let mut ground = Ground { config: VmConfig::new(&flavour, guest), source: None };
    let patience = options.patience.as_secs();
    println!(
        "{flavour}, 1 GiB guest, 512 MiB filled, writing 256 MiB as fast as it can; 128 MiB/s; never: not within {patience} s"
    );
    print_head();
    let (mut rows, mut names) = (Vec::new(), Vec::new());
    let wanted = |name: &str| name.contains(&options.only);
    for (name, style) in QEMU.into_iter().filter(|(name, _)| wanted(name)) {
        names.push(name);
        let patience = if ENDS.contains(&style) { LIMIT } else { options.patience };
        for _ in 0..options.qemu_rounds {
            let by =
                |source: &mut TestVm, destination: &mut TestVm| by_qemu(source, destination, style, patience);
            rows.push(ground.one_move(name, by).with_context(|| format!("{name} did not move the guest"))?);
        }
    }
    for round in 0..options.rounds {
        for (name, throttle, compression) in THROTTLES.into_iter().filter(|(name, ..)| wanted(name)) {
            if round == 0 {
                names.push(name);
            }
            let by = |source: &mut TestVm, destination: &mut TestVm| {
                by_godwit(&godwit, source, destination, [throttle, compression])
            };
            rows.push(ground.one_move(name, by).with_context(|| format!("{name} did not move the guest"))?);
        }
    }
    println!("medians:");
    let medians: Vec<Row> = names.iter().filter_map(|name| medians(&rows, name)).collect();
    medians.iter().for_each(print_row);
    report.figure("qemu", flavour.to_string());
    report.figure("patience_s", patience);
    report.figure("medians", serde_json::to_value(&medians)?);
    report.figure("moves", serde_json::to_value(&rows)?);
    targets(&rows, report);
    Ok(())
}

fn targets(rows: &[Row], report: &mut Report) {
    let adaptive = |figure: fn(&Row) -> f64| median_of(rows, ADAPTIVE, figure);
    let against = |rival: &str, figure: fn(&Row) -> f64| adaptive(figure) / median_of(rows, rival, figure);
    let mut below = |name: &str, value: f64, limit: f64| report.target(name, value, limit, Better::Lower);
    let total = |row: &Row| row.total_s;
    let worst = |figure: fn(&Row) -> f64| of(rows, ADAPTIVE).map(figure).fold(f64::NAN, f64::max);
    let unfinished = of(rows, ADAPTIVE).filter(|row| !row.finished).count();
    below("adaptive: moves that did not finish", unfinished as f64, 0.0);
    below("adaptive / QEMU auto-converge: total time", against("QEMU auto-converge", total), 0.25);
    below("adaptive / QEMU post-copy on that link: total time", against("QEMU post-copy", total), 1.5);
    let free = against("QEMU post-copy, free", total);
    below("adaptive / QEMU post-copy, its second half unlimited: total time", free, 1.5);
    let lost = against("QEMU auto-converge", |row| row.lost_s);
    below("adaptive / QEMU auto-converge: the guest's work lost", lost, 0.25);
    let gap = worst(|row| row.gap_ms - row.gap_resolution_ms);
    below("adaptive: longest gap but one sample, worst, ms", gap, DOWNTIME_LIMIT_MS);
    below("adaptive: under 10 % of its speed, worst, s", worst(|row| row.under_tenth_s), 3.0);
    let bugs: usize = rows.iter().map(|row| row.bugs).sum();
    below("busy guest: BUG lines, all moves", bugs as f64, 0.0);
}

impl Ground {
    fn one_move(
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
        let (seen, course) = observer.finish_with_course()?;
        ensure!(!seen.ran_on_both, "the guest ran on both sides");

        let rate = course.rate(from.saturating_sub(BEFORE), from);
        let loss = course.loss(from, from + moved.wall, rate);
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
            own_words: moved.own_words,
        };
        print_row(&row);
        if !moved.finished {
            self.source = Some(source);
        }
        Ok(row)
    }
}

fn by_qemu(
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
        own_words: json!({ "total_ms": seconds(own.total) * 1e3, "downtime_ms": seconds(own.downtime) * 1e3 }),
    })
}

fn by_godwit(
    godwit: &Godwit,
    source: &TestVm,
    destination: &mut TestVm,
    [throttle, compression]: [&str; 2],
) -> anyhow::Result<Moved> {
    let cpu_before = ended_children()?;
    let (receive, address) = godwit.receive(destination, &[])?;
    destination.qmp().forget_events();
    let began = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    let options = [&GODWIT[..], &["--throttle", throttle, "--compression", compression]].concat();
    let migrate = godwit.migrate(source, &address, &options)?.wait(LIMIT)?;
    let ended = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    let last = migrate.last();
    let finished = last["outcome"] == "migrated";
    let end = if finished {
        receive.wait(LIMIT)?;
        destination.qmp().wait_event("RESUME", LIMIT)?.emitted
    } else {
        println!("{last} {}", migrate.errors.trim());
        drop(receive);
        ended
    };
    let progress = migrate.lines.iter().filter(|line| line["event"] == "progress");
    Ok(Moved {
        finished,
        wall: end.saturating_sub(began),
        sent: last["sent_bytes"].as_f64().unwrap_or(f64::NAN),
        rounds: last["rounds"].as_u64().unwrap_or(0),
        godwit_cpu: ended_children()?.saturating_sub(cpu_before),
        own_words: json!({ "migrate": last, "progress": progress.collect::<Vec<_>>() }),
    })
}

/// Processor time of all children of this process that ended and were waited for: not godwit's word for it.
fn ended_children() -> anyhow::Result<Duration> {
    let stat = procfs::process::Process::myself()?.stat()?;
    let ticks = u64::try_from(stat.cutime + stat.cstime).context("negative processor time")?;
    Ok(Duration::from_secs_f64(ticks as f64 / procfs::ticks_per_second() as f64))
}
