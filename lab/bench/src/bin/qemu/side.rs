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
use godwit_bench::figures::Figures;
use godwit_bench::fixture::{Fixture, Moved};
use godwit_bench::godwit::Attempt;
use godwit_bench::report::{self, Better, Report, most_of};
use godwit_bench::table::{Column, Table, figure};
use godwit_testbed::{
    Backend, Godwit, GuestConfig, QemuBuild, Style, TestVm, VmConfig, own_migration,
};
use serde_json::json;

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

fn targets(rows: &[Figures], report: &mut Report) {
    type Figure = (&'static str, fn(&Figures) -> f64);
    let figures: [Figure; 3] = [
        ("total time", |row| row.total_ms),
        ("processor time", |row| row.cpu_s),
        ("downtime", |row| row.downtime_ms),
    ];
    for rival in [Contestant::Plain, Contestant::Multifd] {
        for (what, figure) in figures {
            let compared = against(rows, rival, figure);
            let name = format!("godwit / {}: {what}", rival.name());
            report.target_of_rounds(name, (compared.0, &compared.1), 1.0, Better::Lower);
        }
    }
    let compared = against(rows, Contestant::Multifd, |row| row.cpu_s);
    let name = "godwit / multifd: processor time, at most half";
    report.target_of_rounds(name, (compared.0, &compared.1), 0.5, Better::Lower);
    let worst = |key: &str, side: &str| {
        let own = rows.iter().filter(|row| row.contestant == Contestant::Godwit.name());
        most_of(own, |row| row.own_words[side][key].as_f64().unwrap_or(f64::NAN))
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

const MIB: f64 = 1_048_576.0;

fn one_move(
    contestant: Contestant,
    build: &QemuBuild,
    godwit: Option<&Godwit>,
) -> anyhow::Result<Figures> {
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
    Ok(Figures::of(contestant.name(), &outcome))
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

fn of(rows: &[Figures], contestant: Contestant) -> impl Iterator<Item = &Figures> {
    rows.iter().filter(move |row| row.contestant == contestant.name())
}

fn median_of(rows: &[Figures], contestant: Contestant, figure: impl Fn(&Figures) -> f64) -> f64 {
    report::median_of(of(rows, contestant), figure)
}

/// Godwit's median beside the rival's, and the ratio of each round: in each, everybody moves once.
fn against(rows: &[Figures], rival: Contestant, figure: fn(&Figures) -> f64) -> (f64, Vec<f64>) {
    let each = of(rows, Contestant::Godwit).zip(of(rows, rival));
    let each = each.map(|(own, other)| figure(own) / figure(other)).collect();
    (median_of(rows, Contestant::Godwit, figure) / median_of(rows, rival, figure), each)
}

fn medians(rows: &[Figures], contestant: Contestant) -> Figures {
    Figures::medians(contestant.name(), rows.iter())
}

const TABLE: Table<Figures> = Table(&[
    Column { head: "", width: 18, cell: |row| row.contestant.to_owned() },
    Column { head: "total ms", width: 8, cell: |row| figure(row.total_ms, 0) },
    Column { head: "downtime ms", width: 13, cell: Figures::downtime },
    Column { head: "stall ms", width: 8, cell: |row| figure(row.stall_ms, 1) },
    Column { head: "sent MiB", width: 8, cell: |row| figure(row.sent_mib, 1) },
    Column { head: "passes", width: 6, cell: |row| row.passes.to_string() },
    Column { head: "CPU s src+dst+godwit", width: 20, cell: Figures::shares },
    Column { head: "= CPU", width: 6, cell: |row| figure(row.cpu_s, 2) },
]);
