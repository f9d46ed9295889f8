//! The benchmark of domains between two libvirt daemons: moved by godwit, and by libvirt itself
//! with one connection and with two (QEMU's multifd).
//!
//! Keeps it fair: the same two daemons and one domain, which goes to and fro, so that all move the
//! same guest in turns; each round begins with another contestant; one QEMU, anonymous memory, TCP
//! loopback, no bandwidth limit. A move takes from the start of the command to its end. The guest's
//! downtime is from QEMU's own STOP at the source to QEMU's own RESUME at the destination, by the
//! one clock of the machine, as libvirt passes these events on. The targets are ratios against the
//! better of libvirt's two, figure by figure.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use godwit_bench::arguments::at_least_once;
use godwit_bench::report::{Better, Report, least, median_of};
use godwit_bench::table::{Column, Table, figure};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Godwit, GuestConfig, LibvirtGuest, LibvirtHost, QemuBuild, QemuEvents, libvirt_for,
};
use godwit_units::ByteCount;
use serde::Serialize;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(180);
/// For an event to come through libvirt.
const EVENT_LIMIT: Duration = Duration::from_secs(10);
/// The names of the cases, and page writes a second.
const CASES: [(&str, Option<u64>); 2] = [("idle", None), ("busy", Some(2000))];

/// Domains between two libvirt daemons, by godwit and by libvirt itself.
#[derive(Parser)]
struct Options {
    /// Rounds of each case
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_once())]
    rounds: usize,

    /// This case alone
    #[arg(long, value_name = "CASE", value_parser = CASES.map(|(name, _)| name))]
    only: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contestant {
    Libvirt,
    LibvirtParallel,
    Godwit,
}

impl Contestant {
    const ALL: [Self; 3] = [Self::Libvirt, Self::LibvirtParallel, Self::Godwit];

    fn name(self) -> &'static str {
        match self {
            Self::Libvirt => "virsh migrate --live",
            Self::LibvirtParallel => "… --parallel-connections 2",
            Self::Godwit => "godwit",
        }
    }
}

/// One move.
#[derive(Clone, Debug, Serialize)]
struct Row {
    case: &'static str,
    contestant: &'static str,
    total_ms: f64,
    downtime_ms: f64,
}

const TABLE: Table<Row> = Table(&[
    Column { head: "", width: 28, cell: |row| row.contestant.to_owned() },
    Column { head: "total ms", width: 9, cell: |row| figure(row.total_ms, 0) },
    Column { head: "downtime ms", width: 11, cell: |row| figure(row.downtime_ms, 1) },
]);

/// A host, and what is heard of its QEMUs.
struct Side {
    host: LibvirtHost,
    events: QemuEvents,
}

impl Side {
    fn start() -> anyhow::Result<Self> {
        let host = LibvirtHost::start()?;
        let events = host.watch()?;
        Ok(Self { host, events })
    }

    /// When `event` came, which has not come before `after`.
    fn await_event(&self, event: &str, after: Duration) -> anyhow::Result<Duration> {
        let until = Instant::now() + EVENT_LIMIT;
        loop {
            if let Some(at) = self.events.last(event)?.filter(|at| *at > after) {
                return Ok(at);
            }
            ensure!(Instant::now() < until, "QEMU's {event} was not heard of");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn wall_clock() -> anyhow::Result<Duration> {
    Ok(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?)
}

/// Has `contestant` move the domain `name`, and returns how long that and the guest's gap took.
fn one_move(
    contestant: Contestant,
    name: &str,
    (from, to): (&Side, &Side),
    godwit: &Godwit,
) -> anyhow::Result<(Duration, Duration)> {
    let after = wall_clock()?;
    let began = match contestant {
        Contestant::Libvirt => {
            let began = Instant::now();
            from.host.migrate(name, &to.host, &[])?;
            began
        }
        Contestant::LibvirtParallel => {
            let began = Instant::now();
            from.host.migrate(name, &to.host, &["--parallel", "--parallel-connections", "2"])?;
            began
        }
        Contestant::Godwit => {
            let (receive, address) = godwit.receive_named(&to.host.vm_name(), &[])?;
            let began = Instant::now();
            let migrate = godwit.migrate_named(&from.host.domain(name), &address, &[])?;
            let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
            ensure!(migrate.last()["outcome"] == "migrated", "{}", migrate.errors);
            ensure!(receive.last()["outcome"] == "running", "{}", receive.errors);
            began
        }
    };
    let total = began.elapsed();
    let (stopped, ran) = (from.await_event("STOP", after)?, to.await_event("RESUME", after)?);
    ensure!(ran > stopped, "the guest ran on both sides");
    ensure!(to.host.state(name)? == "running", "it does not run at the destination");
    Ok((total, ran - stopped))
}

fn compare(
    (case, rate): (&'static str, Option<u64>),
    rounds: usize,
    (build, godwit): (&QemuBuild, &Godwit),
) -> anyhow::Result<Vec<Row>> {
    println!("\n{case}: 1 GiB, half of it filled, {build}, {rounds} rounds");
    TABLE.print_head();
    let guest = GuestConfig {
        memory: ByteCount(1024 * MIB),
        mode: if rate.is_some() { Mode::Rate } else { Mode::Idle },
        rate: rate.unwrap_or(0),
        working_set: ByteCount(128 * MIB),
        fill: ByteCount(512 * MIB),
        ..GuestConfig::standard()
    };
    let guest = LibvirtGuest::new(build, &guest, "")?;
    let (mut from, mut to) = (Side::start()?, Side::start()?);
    guest.create_on(&from.host)?;
    guest.await_beats(15, LIMIT)?;
    let mut order = Contestant::ALL;
    let mut rows = Vec::new();
    for _ in 0..rounds {
        for contestant in order {
            let moved = one_move(contestant, guest.name(), (&from, &to), godwit);
            let (total, gap) =
                moved.with_context(|| format!("{} did not move it", contestant.name()))?;
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            let (contestant, total_ms, downtime_ms) = (contestant.name(), ms(total), ms(gap));
            let row = Row { case, contestant, total_ms, downtime_ms };
            TABLE.print(&row);
            rows.push(row);
            std::mem::swap(&mut from, &mut to);
            guest.await_beats(3, LIMIT)?;
            ensure!(guest.bugs().is_empty(), "{:?}", guest.bugs());
        }
        order.rotate_left(1);
    }
    Ok(rows)
}

fn median(rows: &[Row], contestant: Contestant, figure: fn(&Row) -> f64) -> f64 {
    median_of(rows.iter().filter(|row| row.contestant == contestant.name()), figure)
}

fn targets(case: &'static str, rows: &[Row], report: &mut Report) {
    println!("medians:");
    for contestant in Contestant::ALL {
        let median = |figure: fn(&Row) -> f64| median(rows, contestant, figure);
        let (total_ms, downtime_ms) = (median(|row| row.total_ms), median(|row| row.downtime_ms));
        TABLE.print(&Row { case, contestant: contestant.name(), total_ms, downtime_ms });
    }
    type Figure = (&'static str, fn(&Row) -> f64);
    let figures: [Figure; 2] =
        [("total time", |row| row.total_ms), ("downtime", |row| row.downtime_ms)];
    for (what, figure) in figures {
        let best = least(
            &[Contestant::Libvirt, Contestant::LibvirtParallel]
                .map(|rival| median(rows, rival, figure)),
        );
        let ratio = median(rows, Contestant::Godwit, figure) / best;
        let name = format!("{case}: godwit / libvirt's best: {what}");
        report.target(name, ratio, 1.0, Better::Lower);
    }
    if case == "idle" {
        let downtime = median(rows, Contestant::Godwit, |row| row.downtime_ms);
        report.target("idle: godwit's downtime, ms", downtime, 30.0, Better::Lower);
    }
}

fn main() -> anyhow::Result<()> {
    let Options { rounds, only } = Options::parse();
    ensure!(libvirt_for("bench-managers"), "there is no libvirt");
    // Debian's, which libvirt starts without more ado.
    let build = QemuBuild::installed().context("QEMU is not installed: run `make qemu`")?;
    let godwit = Godwit::built()?;
    let mut report = Report::new("managers");
    report.figure("qemu", build.to_string());
    report.figure("rounds", rounds);
    let mut all = Vec::new();
    for case in CASES.into_iter().filter(|case| only.as_deref().is_none_or(|only| only == case.0)) {
        let rows = compare(case, rounds, (&build, &godwit))?;
        targets(case.0, &rows, &mut report);
        all.extend(rows);
    }
    report.figure("moves", serde_json::to_value(&all)?);
    report.finish()?;
    Ok(())
}
