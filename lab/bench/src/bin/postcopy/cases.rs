//! The two cases, KVM and TCG: pairs of moves, and what is to be reached in each.

use anyhow::ensure;
use godwit_bench::report::{Better, Report, least, median, most};
use godwit_stamp::settings::Mode;
use godwit_testbed::{Accelerator, Backend, Godwit, GuestConfig, QemuBuild, VmConfig};
use godwit_units::ByteCount;
use serde::Serialize;
use serde_json::json;

use crate::moves::{Contestant, Measured, Pick, Row, TABLE, one_move};

/// A move that failed, or could not be measured.
#[derive(Debug, Serialize)]
pub(crate) struct Failed {
    contestant: &'static str,
    under: &'static str,
    round: usize,
    why: String,
}

/// All moves of a run.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) moves: Vec<Row>,
    pub(crate) failed: Vec<Failed>,
}

impl Tally {
    /// Moves that failed: godwit's and QEMU's.
    pub(crate) fn failures(&self) -> [usize; 2] {
        [Contestant::Godwit, Contestant::Qemu]
            .map(|who| self.failed.iter().filter(|it| it.contestant == who.name()).count())
    }

    /// Lines in which guests tell of damaged memory.
    pub(crate) fn bugs(&self) -> usize {
        self.moves.iter().map(|row| row.bugs).sum()
    }
}

/// A machine with `memory`, of which `fill` holds data and `working_set` is written as fast as may
/// be.
pub(crate) fn config(
    build: &QemuBuild,
    accelerator: Accelerator,
    [memory, fill, working_set]: [ByteCount; 3],
) -> VmConfig {
    let guest =
        GuestConfig { memory, fill, working_set, mode: Mode::Full, ..GuestConfig::standard() };
    let config = VmConfig::new(build, guest).with_backend(Backend::Anonymous);
    VmConfig { accelerator, ..config }
}

/// Moves guests like `config` by turns, godwit's with some more options, and enters figures and
/// targets into `report`.
pub(crate) fn compare(
    (under, config): (&'static str, &VmConfig),
    rounds: usize,
    by: (&Godwit, &[String]),
    tally: &mut Tally,
    report: &mut Report,
) -> anyhow::Result<()> {
    let GuestConfig { memory, fill, working_set, .. } = config.guest;
    println!(
        "\n{} under {under}: {memory}, {fill} of it filled, full speed over {working_set}, \
         {rounds} pairs",
        config.build
    );
    TABLE.print_head();
    let mut order = Contestant::ALL;
    let mut rows = Vec::new();
    for round in 1..=rounds {
        for contestant in order {
            match one_move(contestant, (under, config), round, by) {
                Ok(row) => {
                    TABLE.print(&(row.contestant.to_owned(), row.measured));
                    rows.push(row);
                }
                Err(problem) => {
                    let why = format!("{problem:#}");
                    println!("{} FAILED: {why}", contestant.name());
                    tally.failed.push(Failed { contestant: contestant.name(), under, round, why });
                }
            }
        }
        order.rotate_left(1);
    }
    let sides = [Contestant::Godwit, Contestant::Qemu].map(|who| Side::of(&rows, who));
    for side in &sides {
        let count = side.moves.len();
        ensure!(count * 2 > rounds, "{}: only {count} moves of {rounds} were measured", side.name);
        side.print();
    }
    let [godwit, qemu] = &sides;
    targets(under, godwit, qemu, report);
    let figures = sides.iter().map(|side| {
        let [medians, least, most] = [median, least, most].map(|pick| side.figures(pick));
        json!({ "contestant": side.name, "medians": medians, "least": least, "most": most })
    });
    report.figure(under, figures.collect::<Vec<_>>());
    tally.moves.extend(rows);
    Ok(())
}

/// The moves of one contestant.
struct Side {
    name: &'static str,
    moves: Vec<(usize, Measured)>,
}

impl Side {
    fn of(rows: &[Row], who: Contestant) -> Self {
        let own = rows.iter().filter(|row| row.contestant == who.name());
        Self { name: who.name(), moves: own.map(|row| (row.round, row.measured)).collect() }
    }

    fn figures(&self, pick: Pick) -> Measured {
        Measured::of(&self.moves.iter().map(|(_, it)| it).collect::<Vec<_>>(), pick)
    }

    fn print(&self) {
        println!("{}:", self.name);
        let picks: [(&str, Pick); 3] =
            [("  medians", median), ("  least", least), ("  most", most)];
        for (name, pick) in picks {
            TABLE.print(&(name.to_owned(), self.figures(pick)));
        }
    }

    fn median(&self, figure: impl Fn(&Measured) -> f64) -> f64 {
        median(&self.moves.iter().map(|(_, it)| figure(it)).collect::<Vec<_>>())
    }

    fn in_round(&self, round: usize) -> Option<&Measured> {
        self.moves.iter().find(|(number, _)| *number == round).map(|(_, it)| it)
    }
}

/// What is compared with QEMU: its name, the figure, and the limit of the ratio.
type Compared = (&'static str, fn(&Measured) -> f64, f64);

const COMPARED: [Compared; 4] = [
    ("median wait for a page", |it| it.median_us, 1.0),
    ("p99 of the waits", |it| it.p99_us, 2.0),
    ("total time", |it| it.total_ms, 1.0),
    ("work lost", |it| it.lost_s, 1.0),
];
/// The switchover, to a round trip and what the devices take.
const SWITCHOVER: f64 = 1.2;

fn targets(under: &str, godwit: &Side, qemu: &Side, report: &mut Report) {
    let needed = |it: &Measured| it.round_trip_ms + it.device_ms.unwrap_or(f64::NAN);
    let value = godwit.median(|it| it.switchover_ms) / godwit.median(needed);
    let each: Vec<f64> = godwit.moves.iter().map(|(_, it)| it.switchover_ms / needed(it)).collect();
    let name = format!("{under}: switchover / (round trip + device state)");
    enter(report, &name, value, SWITCHOVER, &each);
    for (what, figure, limit) in COMPARED {
        let value = godwit.median(figure) / qemu.median(figure);
        let pairs = godwit.moves.iter().filter_map(|(round, own)| {
            qemu.in_round(*round).map(|other| figure(own) / figure(other))
        });
        let name = format!("{under}: godwit / QEMU post-copy: {what}");
        enter(report, &name, value, limit, &pairs.collect::<Vec<_>>());
    }
}

/// A target, with the least and the most of single moves or pairs: a verdict that is within them
/// may be chance.
fn enter(report: &mut Report, name: &str, value: f64, limit: f64, each: &[f64]) {
    report.figure(&format!("{name}: least and most"), json!([least(each), most(each)]));
    report.target_of_rounds(name, (value, each), limit, Better::Lower);
}
