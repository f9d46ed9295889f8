//! A guest that no link of 128 MiB/s can follow, moved by QEMU in all of its ways and by Godwit
//! with each throttle.
//!
//! What is measured, and how it is kept fair: `godwit_bench::moves`.

use anyhow::Context;
use godwit_bench::moves::{LIMIT, by_godwit, by_qemu, fixture, one_move};
use godwit_bench::report::{Better, Report, most_of};
use godwit_bench::row::{Row, TABLE, median_of, medians, of};
use godwit_stamp::settings::Mode;
use godwit_testbed::{Godwit, GuestConfig, QemuBuild, Style, TestVm, VmConfig};
use godwit_units::ByteCount;

use crate::Options;

const DOWNTIME_LIMIT_MS: f64 = 300.0;

const QEMU: [(&str, Style); 7] = [
    ("QEMU plain", Style::Plain),
    ("QEMU multifd 2", Style::Multifd(2)),
    ("QEMU multifd 2, zstd", Style::Zstd(2)),
    ("QEMU xbzrle", Style::Xbzrle),
    ("QEMU auto-converge", Style::AutoConverge),
    ("QEMU post-copy", Style::PostCopy { limited: true }),
    ("QEMU post-copy, free", Style::PostCopy { limited: false }),
];
/// QEMU's ways that are known to end, given time.
const ENDS: [Style; 3] =
    [Style::AutoConverge, Style::PostCopy { limited: true }, Style::PostCopy { limited: false }];
/// Throttle and compression. What is compared with QEMU sends pages as they are.
const THROTTLES: [(&str, &str, &str); 8] = [
    ("godwit direct", "direct", "none"),
    ("godwit staged", "staged", "none"),
    ("godwit auto-converge", "auto-converge", "none"),
    (ADAPTIVE, "adaptive", "none"),
    ("godwit vcpus", "vcpus", "none"),
    ("compressed, direct", "direct", "auto"),
    ("compressed, staged", "staged", "auto"),
    ("compressed, adaptive", "adaptive", "auto"),
];
const ADAPTIVE: &str = "godwit adaptive";

/// Who moves the guest, and how.
#[derive(Clone, Copy)]
enum Mover {
    Qemu(Style),
    Godwit([&'static str; 2]),
}

/// Runs the comparison and enters figures and targets into `report`.
pub(crate) fn compare(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let build = QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
    let godwit = Godwit::built()?;
    let guest = GuestConfig {
        mode: Mode::Full,
        working_set: ByteCount(256 << 20),
        ..GuestConfig::standard()
    };
    let mut fixture = fixture(VmConfig::new(&build, guest));
    let patience = options.patience.as_secs();
    println!(
        "{build}, 1 GiB guest, 512 MiB filled, writing 256 MiB as fast as it can; 128 MiB/s; \
         never: not within {patience} s"
    );
    TABLE.print_head();
    let (mut rows, mut names) = (Vec::new(), Vec::new());
    let wanted = |name: &str| name.contains(&options.only);
    let mut plan: Vec<(&str, Mover)> =
        QEMU.into_iter()
            .map(|(name, style)| (name, Mover::Qemu(style)))
            .chain(THROTTLES.into_iter().map(|(name, throttle, compression)| {
                (name, Mover::Godwit([throttle, compression]))
            }))
            .filter(|(name, _)| wanted(name))
            .collect();
    names.extend(plan.iter().map(|(name, _)| *name));
    for round in 0..options.rounds.max(options.qemu_rounds) {
        for &(name, mover) in &plan {
            let rounds = match mover {
                Mover::Qemu(_) => options.qemu_rounds,
                Mover::Godwit(_) => options.rounds,
            };
            if round >= rounds {
                continue;
            }
            let by = |source: &mut TestVm, destination: &mut TestVm| match mover {
                Mover::Qemu(style) => {
                    let patience = if ENDS.contains(&style) { LIMIT } else { options.patience };
                    by_qemu(source, destination, style, patience)
                }
                Mover::Godwit(way) => by_godwit(&godwit, source, destination, way),
            };
            rows.push(
                one_move(&mut fixture, name, by)
                    .with_context(|| format!("{name} did not move the guest"))?,
            );
        }
        // Each round another one begins.
        if !plan.is_empty() {
            plan.rotate_left(1);
        }
    }
    println!("medians:");
    let medians: Vec<Row> = names.iter().filter_map(|name| medians(&rows, name)).collect();
    medians.iter().for_each(|row| TABLE.print(row));
    report.figure("qemu", build.to_string());
    report.figure("patience_s", patience);
    report.figure("medians", serde_json::to_value(&medians)?);
    report.figure("moves", serde_json::to_value(&rows)?);
    targets(&rows, report);
    Ok(())
}

fn targets(rows: &[Row], report: &mut Report) {
    let adaptive = |figure: fn(&Row) -> f64| median_of(rows, ADAPTIVE, figure);
    let against =
        |rival: &str, figure: fn(&Row) -> f64| adaptive(figure) / median_of(rows, rival, figure);
    let mut below =
        |name: &str, value: f64, limit: f64| report.target(name, value, limit, Better::Lower);
    let total = Row::until_done;
    let worst = |figure: fn(&Row) -> f64| most_of(of(rows, ADAPTIVE), figure);
    let unfinished = of(rows, ADAPTIVE).filter(|row| !row.finished).count();
    below("adaptive: moves that did not finish", unfinished as f64, 0.0);
    below("adaptive / QEMU auto-converge: total time", against("QEMU auto-converge", total), 0.25);
    below(
        "adaptive / QEMU post-copy on that link: total time",
        against("QEMU post-copy", total),
        1.5,
    );
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
