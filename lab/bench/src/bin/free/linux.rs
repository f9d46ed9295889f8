//! A Linux guest under QEMU, idle or at work like that of a build.
//!
//! Each move has a guest of its own, freshly booted, that was left alone for the same time before
//! it moves.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bench::fixture::{Fixture, Moved, Settled};
use godwit_bench::godwit::Attempt;
use godwit_bench::report::{Better, Report, median_of};
use godwit_bench::table::{Column, Table, figure};
use godwit_stamp::heartbeat::BUILD;
use godwit_stamp::settings::{BuildWork, Mode};
use godwit_testbed::{
    Backend, Godwit, GuestConfig, Movable, QemuBuild, Style, TestVm, VmConfig, own_migration,
};
use godwit_units::ByteCount;
use serde::Serialize;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(300);
/// Linux reports free pages two seconds after they became free, a few blocks at a time.
const SETTLING: Duration = Duration::from_secs(12);
const GIB: u64 = 1 << 30;
const MIB: f64 = 1_048_576.0;

/// A guest, and how much faster than QEMU's plain migration it should move.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    memory: u64,
    build: BuildWork,
    /// Of the time of QEMU's plain migration, the share that must be saved.
    saved: f64,
}

pub(crate) const CASES: [Case; 4] = [
    Case { name: "idle", memory: 8 * GIB, build: NOTHING, saved: 0.79 },
    Case { name: "build", memory: 8 * GIB, build: BUILDING, saved: 0.50 },
    Case { name: "sparse", memory: 128 * GIB, build: NOTHING, saved: 0.87 },
    Case { name: "sparse-build", memory: 128 * GIB, build: BUILDING_ONLY, saved: 0.84 },
];
const NOTHING: BuildWork = BuildWork { jobs: 0, past: ByteCount(0) };
/// Two processes at a time, in a guest that has used 3 GiB before.
const BUILDING: BuildWork = BuildWork { jobs: 2, past: ByteCount(3 * GIB) };
const BUILDING_ONLY: BuildWork = BuildWork { jobs: 2, past: ByteCount(0) };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contestant {
    Skipping,
    Without,
    Plain,
    Hints,
    Reporting,
    MultifdReporting,
}

const ALL: [Contestant; 6] = [
    Contestant::Skipping,
    Contestant::Without,
    Contestant::Plain,
    Contestant::Hints,
    Contestant::Reporting,
    Contestant::MultifdReporting,
];
/// QEMU's ways that know what is free, as godwit does with a balloon.
const INFORMED: [Contestant; 3] =
    [Contestant::Hints, Contestant::Reporting, Contestant::MultifdReporting];
/// A balloon that reports free pages, the same for whoever moves the guest.
const REPORTING: [&str; 2] = ["-device", "virtio-balloon-pci,free-page-reporting=on"];

impl Contestant {
    fn name(self) -> &'static str {
        match self {
            Self::Skipping => "godwit, reporting",
            Self::Without => "godwit, no balloon",
            Self::Plain => "QEMU plain",
            Self::Hints => "QEMU free-page-hint",
            Self::Reporting => "QEMU, reporting",
            Self::MultifdReporting => "QEMU mfd 2, reporting",
        }
    }

    fn config(self, build: &QemuBuild, case: &Case) -> VmConfig {
        let guest = GuestConfig {
            memory: ByteCount(case.memory),
            build: case.build,
            working_set: ByteCount(4 << 20),
            fill: ByteCount(16 << 20),
            ..GuestConfig::small(Mode::Idle).without_rest()
        };
        let config = VmConfig::new(build, guest);
        match self {
            Self::Skipping => config.with_extra(&REPORTING),
            Self::Without => config,
            Self::Plain => config.with_backend(Backend::Anonymous),
            Self::Reporting | Self::MultifdReporting => {
                config.with_backend(Backend::Anonymous).with_extra(&REPORTING)
            }
            Self::Hints => config.with_backend(Backend::Anonymous).with_extra(&[
                "-object",
                "iothread,id=hints",
                "-device",
                "virtio-balloon-pci,free-page-hint=on,iothread=hints",
            ]),
        }
    }
}

/// The figures of one move.
#[derive(Clone, Debug, Serialize)]
struct Row {
    case: &'static str,
    contestant: &'static str,
    total_ms: f64,
    sent_mib: f64,
    /// Guest memory that the host holds, before the move at the source and after it at the
    /// destination.
    held_source_mib: f64,
    held_destination_mib: f64,
    /// The most memory of godwit's processes.
    godwit_mib: f64,
    /// Page tables of the two QEMUs after the move.
    tables_source_mib: f64,
    tables_destination_mib: f64,
    /// Pages that the guest's jobs filled a second before the move.
    work: f64,
    bugs: usize,
    /// What godwit says of the move.
    own_words: Value,
}

pub(crate) fn compare(case: &Case, rounds: usize, report: &mut Report) -> anyhow::Result<()> {
    let build = QemuBuild::unpacked()
        .or_else(QemuBuild::installed)
        .context("there is no QEMU: run `make qemu`")?;
    let godwit = Godwit::built()?;
    println!(
        "\n{}: {} guest, {build}, TCP loopback, {rounds} rounds",
        case.name,
        ByteCount(case.memory)
    );
    TABLE.print_head();
    let mut order = ALL.to_vec();
    let mut rows = Vec::new();
    for _ in 0..rounds {
        for &contestant in &order {
            let row = one_move(contestant, case, &build, &godwit)
                .with_context(|| format!("{} did not move the guest", contestant.name()))?;
            TABLE.print(&row);
            rows.push(row);
        }
        order.rotate_left(1);
    }
    let of = |contestant: Contestant, figure: fn(&Row) -> f64| {
        median_of(rows.iter().filter(|row| row.contestant == contestant.name()), figure)
    };
    let total = |contestant| of(contestant, |row| row.total_ms);
    println!("medians of the total time:");
    for contestant in ALL {
        println!("{:<21} {:>9.0} ms", contestant.name(), total(contestant));
    }
    report.target(
        format!("{}: total time saved against QEMU plain, %", case.name),
        (1.0 - total(Contestant::Skipping) / total(Contestant::Plain)) * 100.0,
        case.saved * 100.0,
        Better::Higher,
    );
    let ratios = |other: Contestant| {
        let rows = |who: Contestant| rows.iter().filter(move |row| row.contestant == who.name());
        let pairs = rows(Contestant::Skipping).zip(rows(other));
        pairs.map(|(own, other)| own.total_ms / other.total_ms).collect::<Vec<_>>()
    };
    let best = INFORMED.into_iter().min_by(|a, b| total(*a).total_cmp(&total(*b)));
    if let Some(best) = best {
        let name = format!("{}: total time / {}", case.name, best.name());
        let value = total(Contestant::Skipping) / total(best);
        report.target_of_rounds(name, (value, &ratios(best)), 1.0, Better::Lower);
    }
    if case.build.jobs > 0 {
        let work = |contestant| of(contestant, |row| row.work);
        let slower = (1.0 - work(Contestant::Skipping) / work(Contestant::Without)) * 100.0;
        report.target(
            format!("{}: work slower with reporting, %", case.name),
            slower,
            1.0,
            Better::Lower,
        );
    }
    let bugs: usize = rows.iter().map(|row| row.bugs).sum();
    report.target(format!("{}: BUG lines of guests", case.name), bugs as f64, 0.0, Better::Lower);
    report.figure(case.name, serde_json::to_value(&rows)?);
    Ok(())
}

fn one_move(
    contestant: Contestant,
    case: &Case,
    build: &QemuBuild,
    godwit: &Godwit,
) -> anyhow::Result<Row> {
    let mut fixture = Fixture::new(contestant.config(build, case), LIMIT);
    (fixture.settled, fixture.observed) = (Settled::For(Duration::ZERO), false);
    let (mut work, mut held_source, mut godwit_memory) = (f64::NAN, f64::NAN, 0.0);
    let outcome = fixture.one_move(|source, destination| {
        let began = Instant::now();
        let before = done(source);
        std::thread::sleep(SETTLING.saturating_sub(began.elapsed()));
        let after = done(source);
        work = (after.0 - before.0) / (after.1 - before.1).max(1e-3);
        held_source = held(source)?;
        match contestant {
            Contestant::Skipping | Contestant::Without => {
                let options = ["--downtime-limit", "300ms", "--keep-source"];
                let attempt = Attempt::within(LIMIT, godwit, source, destination, &options)?;
                let (migrate, receive) = attempt.moved()?;
                let peak = |value: &Value| value["peak_rss_bytes"].as_f64().unwrap_or(f64::NAN);
                godwit_memory = peak(migrate.last()).max(peak(receive.last()));
                Ok(Moved::by_godwit(&attempt, migrate.last().clone()))
            }
            own => {
                let style = match own {
                    Contestant::MultifdReporting => Style::Multifd(2),
                    _ => Style::Plain,
                };
                let own = own_migration(source, destination, style, LIMIT)?;
                Ok(Moved { own_words: Value::Null, ..Moved::by_qemu(&own) })
            }
        }
    })?;
    let (moved, source, mut destination) = (outcome.moved, outcome.source, outcome.destination);
    ensure!(destination.status()? == "running", "the guest does not run");
    Ok(Row {
        case: case.name,
        contestant: contestant.name(),
        total_ms: moved.wall.as_secs_f64() * 1e3,
        sent_mib: moved.sent / MIB,
        held_source_mib: held_source,
        held_destination_mib: held(&destination)?,
        godwit_mib: godwit_memory / MIB,
        tables_source_mib: status(&source, "VmPTE:")?,
        tables_destination_mib: status(&destination, "VmPTE:")?,
        work,
        bugs: outcome.bugs,
        own_words: moved.own_words,
    })
}

/// Pages that the guest's jobs have filled, and when it said so, in seconds.
fn done(vm: &TestVm) -> (f64, f64) {
    let lines = vm.console_lines();
    let line = lines.iter().rev().find(|line| line.starts_with(BUILD) && line.ends_with('.'));
    let number = |key: &str| {
        let word = line?.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        word?.parse::<f64>().ok()
    };
    (number("pages").unwrap_or(0.0), number("t_ms").unwrap_or(0.0) / 1e3)
}

/// Guest memory that the host holds for `vm`, in MiB: what its RAM file takes, or QEMU's anonymous
/// memory.
fn held(vm: &TestVm) -> anyhow::Result<f64> {
    match vm.config().backend {
        Backend::SharedFile => Ok(Movable::held(vm)?.0 as f64 / MIB),
        _ => status(vm, "RssAnon:"),
    }
}

/// A field of /proc/PID/status that is a size (proc(5)), in MiB.
fn status(vm: &TestVm, field: &str) -> anyhow::Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{}/status", vm.pid()))?;
    let kib = text.lines().find_map(|line| line.strip_prefix(field)?.trim().strip_suffix("kB"));
    Ok(kib.and_then(|kib| kib.trim().parse::<f64>().ok()).map_or(f64::NAN, |kib| kib / 1024.0))
}

const TABLE: Table<Row> = Table(&[
    Column { head: "", width: 21, cell: |row| row.contestant.to_owned() },
    Column { head: "total ms", width: 9, cell: |row| figure(row.total_ms, 0) },
    Column { head: "sent MiB", width: 9, cell: |row| figure(row.sent_mib, 1) },
    Column { head: "held MiB s+d", width: 15, cell: held_by_both },
    Column { head: "godwit MiB", width: 10, cell: |row| figure(row.godwit_mib, 1) },
    Column { head: "tables MiB s+d", width: 17, cell: tables },
    Column { head: "pages/s", width: 12, cell: |row| figure(row.work, 0) },
]);

fn held_by_both(row: &Row) -> String {
    format!("{:.0}+{:.0}", row.held_source_mib, row.held_destination_mib)
}

fn tables(row: &Row) -> String {
    format!("{:.1}+{:.1}", row.tables_source_mib, row.tables_destination_mib)
}
