//! Guests that outrun the link, moved by Godwit with its governor and with its vCPU throttle, and
//! by QEMU.
//!
//! One writes 256 MiB at random as fast as it can. The others read half of the time: *mixed* by the
//! clock, 5 ms each, so that it reads on while its writes are held up; *paced* writes so many pages
//! a second, which it makes up for before it reads on.

use anyhow::Context;
use godwit_bench::moves::{LIMIT, by_godwit, by_qemu, fixture, one_move};
use godwit_bench::report::{Better, Report, most_of};
use godwit_bench::row::{Row, TABLE, median_of, medians, of};
use godwit_stamp::settings::Mode;
use godwit_testbed::{Godwit, GuestConfig, QemuBuild, Style, TestVm, VmConfig};
use godwit_units::ByteCount;

const GOVERNOR: &str = "governor, full speed";
const VCPUS: &str = "vcpus, full speed";
const POST_COPY: &str = "QEMU post-copy";
const MIXED: &str = "governor, mixed";
const MIXED_VCPUS: &str = "vcpus, mixed";
const MIXED_QEMU: &str = "auto-converge, mixed";
const PACED: &str = "governor, paced";
const PACED_QEMU: &str = "auto-converge, paced";
/// Writes a second that take half of the time of a guest at full speed here.
const HALF: u64 = 375_000;

/// Runs the comparison and enters figures and targets into `report`.
pub(crate) fn run(rounds: usize, report: &mut Report) -> anyhow::Result<()> {
    let build = QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
    let godwit = Godwit::built()?;
    let full = GuestConfig {
        mode: Mode::Full,
        working_set: ByteCount(256 << 20),
        ..GuestConfig::standard()
    };
    let mixed = GuestConfig { mode: Mode::Mixed, ..full };
    let paced = GuestConfig { mode: Mode::Rate, rate: HALF, ..full };
    let plan = [
        (GOVERNOR, full, Some("governor")),
        (VCPUS, full, Some("vcpus")),
        (POST_COPY, full, None),
        (MIXED, mixed, Some("governor")),
        (MIXED_VCPUS, mixed, Some("vcpus")),
        (MIXED_QEMU, mixed, None),
        (PACED, paced, Some("governor")),
        (PACED_QEMU, paced, None),
    ];
    TABLE.print_head();
    let mut rows = Vec::new();
    for round in 0..rounds {
        // Each round another one begins, and everybody moves as often.
        for at in 0..plan.len() {
            let (name, guest, throttle) = plan[(at + round) % plan.len()];
            let by = |source: &mut TestVm, destination: &mut TestVm| match throttle {
                Some(throttle) => by_godwit(&godwit, source, destination, [throttle, "none"]),
                None if name == POST_COPY => {
                    by_qemu(source, destination, Style::PostCopy { limited: true }, LIMIT)
                }
                None => by_qemu(source, destination, Style::AutoConverge, LIMIT),
            };
            let mut fixture = fixture(VmConfig::new(&build, guest));
            rows.push(
                one_move(&mut fixture, name, by)
                    .with_context(|| format!("{name} did not move the guest"))?,
            );
        }
    }
    println!("medians:");
    let medians: Vec<Row> = plan.iter().filter_map(|(name, ..)| medians(&rows, name)).collect();
    medians.iter().for_each(|row| TABLE.print(row));
    report.figure("medians", serde_json::to_value(&medians)?);
    report.figure("moves", serde_json::to_value(&rows)?);
    targets(&rows, report);
    Ok(())
}

/// Work lost, in seconds. Under a tenth of its speed a guest loses at least nine tenths of the
/// time; a loss below that says that the guest was disturbed before the move, in the time that it
/// is compared with.
fn lost(row: &Row) -> f64 {
    row.lost_s.max(0.9 * row.under_tenth_s)
}

fn targets(rows: &[Row], report: &mut Report) {
    let mut ratio = |name: &str, [own, other]: [&str; 2], figure: fn(&Row) -> f64, limit: f64| {
        let value = median_of(rows, own, figure) / median_of(rows, other, figure);
        let pairs = of(rows, own).zip(of(rows, other));
        let each: Vec<f64> = pairs.map(|(own, other)| figure(own) / figure(other)).collect();
        report.target_of_rounds(name, (value, &each), limit, Better::Lower);
    };
    let name = "full speed: governor / QEMU post-copy: total time";
    ratio(name, [GOVERNOR, POST_COPY], Row::until_done, 1.2);
    let name = "full speed: governor / vCPU throttle: work lost";
    ratio(name, [GOVERNOR, VCPUS], lost, 1.0 / 3.0);
    ratio("mixed: governor / QEMU auto-converge: work lost", [MIXED, MIXED_QEMU], lost, 0.1);
    ratio("paced: governor / QEMU auto-converge: work lost", [PACED, PACED_QEMU], lost, 0.1);
    let mut below =
        |name: &str, value: f64, limit: f64| report.target(name, value, limit, Better::Lower);
    let own = |row: &&Row| [GOVERNOR, MIXED, PACED].contains(&row.name);
    let unfinished = rows.iter().filter(own).filter(|row| !row.finished).count();
    below("moves under the governor that did not finish", unfinished as f64, 0.0);
    let stall = most_of(of(rows, GOVERNOR), |row| row.stall_ms);
    below("full speed: longest gap before the switchover, worst, ms", stall, 50.0);
    let bugs: usize = rows.iter().map(|row| row.bugs).sum();
    below("BUG lines, all moves", bugs as f64, 0.0);
}
