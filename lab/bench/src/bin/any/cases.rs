//! The cases: how much memory, and how busy; and what is to be reached in each.

use godwit_bench::fixture::check_room;
use godwit_bench::report::{Better, Report};
use godwit_stamp::settings::Mode;
use godwit_testbed::{Accelerator, Backend, Godwit, GuestConfig, QemuBuild, VmConfig};
use godwit_units::ByteCount;

use crate::moves::{Contestant, Row, TABLE, median_of, medians, one_move, ratios};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// What a move takes beside the guest's memory: the guest's kernel and four processes.
const BESIDE: u64 = 384 * MIB;

/// The names of all cases.
pub(crate) const NAMES: [&str; 4] = ["idle-1", "busy-1", "full-4", "large-12"];

/// One case.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    what: &'static str,
    memory: u64,
    fill: u64,
    /// Page writes a second; `None`: it idles.
    rate: Option<u64>,
    working_set: u64,
}

pub(crate) const CASES: [Case; 4] = [
    Case {
        name: NAMES[0],
        what: "1 GiB, half of it filled, idle",
        memory: GIB,
        fill: 512 * MIB,
        rate: None,
        working_set: 128 * MIB,
    },
    Case {
        name: NAMES[1],
        what: "1 GiB, half of it filled, 2,000 pages/s over 128 MiB",
        memory: GIB,
        fill: 512 * MIB,
        rate: Some(2000),
        working_set: 128 * MIB,
    },
    Case {
        name: NAMES[2],
        what: "4 GiB, full, 20,000 pages/s over 1 GiB",
        memory: 4 * GIB,
        fill: 3712 * MIB,
        rate: Some(20_000),
        working_set: GIB,
    },
    Case {
        name: NAMES[3],
        what: "12 GiB, 9 of it filled, 2,000 pages/s over 128 MiB",
        memory: 12 * GIB,
        fill: 9 * GIB,
        rate: Some(2000),
        working_set: 128 * MIB,
    },
];

/// What runs the guest.
#[derive(Clone, Copy)]
pub(crate) struct Under {
    pub(crate) name: &'static str,
    pub(crate) accelerator: Accelerator,
}

impl Case {
    fn config(&self, build: &QemuBuild, under: Under) -> VmConfig {
        let guest = GuestConfig {
            memory: ByteCount(self.memory),
            mode: if self.rate.is_some() { Mode::Rate } else { Mode::Idle },
            rate: self.rate.unwrap_or(0),
            working_set: ByteCount(self.working_set),
            fill: ByteCount(self.fill),
            ..GuestConfig::standard()
        };
        let config = VmConfig::new(build, guest).with_backend(Backend::Anonymous);
        VmConfig { accelerator: under.accelerator, ..config }
    }

    /// At the destination godwit asks for room for all memory, whatever is filled of it.
    fn check_room(&self) -> anyhow::Result<()> {
        check_room(self.fill + self.memory, BESIDE, "cases with --only")
    }
}

/// Runs one case and enters its figures and targets into `report`.
pub(crate) fn compare(
    case: &Case,
    under: Under,
    rounds: usize,
    (build, godwit): (&QemuBuild, &Godwit),
    report: &mut Report,
) -> anyhow::Result<Vec<Row>> {
    println!("\n{}: {}, {build} under {}, {rounds} rounds", case.name, case.what, under.name);
    TABLE.print_head();
    let config = case.config(build, under);
    let mut order = Contestant::ALL;
    let mut rows = Vec::new();
    for _ in 0..rounds {
        for contestant in order {
            case.check_room()?;
            let row = one_move(contestant, (case.name, under.name), &config, godwit)?;
            TABLE.print(&row);
            rows.push(row);
        }
        order.rotate_left(1);
    }
    println!("medians:");
    let medians: Vec<Row> = Contestant::ALL.map(|who| medians(&rows, who)).to_vec();
    medians.iter().for_each(|row| TABLE.print(row));
    report.figure(&format!("{} {}", case.name, under.name), serde_json::to_value(&medians)?);
    targets(case, under, &rows, report);
    Ok(rows)
}

/// Total time and processor time at most those of multifd, downtime and the guest's loss at most
/// those of whichever way of QEMU's is best; with as many channels as are best for the figure.
fn targets(case: &Case, under: Under, rows: &[Row], report: &mut Report) {
    type Figure = (&'static str, fn(&Row) -> f64, &'static str, &'static [Contestant]);
    const FIGURES: [Figure; 4] = [
        ("total time", |row| row.figures.total_ms, "multifd", &Contestant::MULTIFD),
        ("CPU", |row| row.figures.cpu_s, "multifd", &Contestant::MULTIFD),
        ("downtime", |row| row.figures.downtime_ms, "QEMU's best", &Contestant::QEMU),
        ("guest's work lost", |row| row.lost_s, "QEMU's best", &Contestant::QEMU),
    ];
    let Under { name: under, .. } = under;
    for (what, figure, whose, rivals) in FIGURES {
        let medians = rivals.iter().map(|&who| (who, median_of(rows, who, figure)));
        // A rival without a figure leaves the target without one, and so missed.
        let best = medians.reduce(|a, b| if a.1 <= b.1 || a.1.is_nan() { a } else { b });
        let Some((rival, best)) = best else { continue };
        let ratio = median_of(rows, Contestant::Godwit, figure) / best;
        let each = ratios(rows, rival, figure);
        let name = format!("{} {under}: godwit / {whose}: {what}", case.name);
        report.target_of_rounds(name, (ratio, &each), 1.0, Better::Lower);
    }
    if case.rate.is_none() {
        let downtime = median_of(rows, Contestant::Godwit, |row| row.figures.downtime_ms);
        let name = format!("{} {under}: godwit's downtime, ms", case.name);
        report.target(name, downtime, 20.0, Better::Lower);
    }
}

/// What is to be reached in all cases together.
pub(crate) fn targets_of_all(rows: &[Row], report: &mut Report) {
    let stop = median_of(rows, Contestant::Godwit, |row| row.tracking_stop_ms);
    report.target("stop of a thread by tracking, all moves, ms", stop, 0.5, Better::Lower);
    let bugs = rows.iter().map(|row| row.figures.bugs).sum::<usize>();
    report.target("BUG lines of guests, all moves", bugs as f64, 0.0, Better::Lower);
}
