//! A guest whose writes to its disk are more than the link carries: with and without the limit of
//! writes.

use std::time::Duration;

use godwit_bench::report::{Better, Report, median};
use godwit_stamp::settings::DiskWork;
use godwit_testbed::DiskImage;
use godwit_units::ByteCount;
use serde_json::{Value, json};

use crate::Options;
use crate::setup::{MIB, Mover, Setup, guest};

/// With a limit it must be over by then.
const PATIENCE: Duration = Duration::from_secs(300);

pub(crate) fn run(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let work = DiskWork {
        write: 30 * MIB,
        block: ByteCount(64 << 10),
        span: ByteCount(512 * MIB),
        ..DiskWork::default()
    };
    println!(
        "QEMU, 512 MiB of RAM, 512 MiB of disk; 64 KiB written at random at 30 MiB/s; \
         --max-bandwidth 20MiB/s, no compression"
    );
    let mut figures = Vec::new();
    let ways = [
        ("off", "disk-limit=off", options.patience.max(Duration::from_secs(60))),
        ("auto", "disk-limit=auto", PATIENCE),
    ];
    for (name, setting, patience) in ways {
        let rounds = if name == "off" { 1 } else { options.rounds };
        let (mut times, mut unfinished) = (Vec::new(), 0);
        for _ in 0..rounds {
            let size = ByteCount(512 * MIB);
            let images = [DiskImage::create("raw", size)?, DiskImage::create("raw", size)?];
            let setup = Setup {
                guest: guest(work),
                images: [&images[0], &images[1]],
                link: None,
                patience,
            };
            let options = [
                "--max-bandwidth",
                "20MiB/s",
                "--compression",
                "none",
                "--patience",
                "30s",
                "--set",
                setting,
            ];
            let moved = setup.one_move(Mover::Godwit(&options))?;
            let limits = limits(&moved.own_words["progress"]);
            let last = limits
                .last()
                .map_or("none".to_owned(), |(_, limit)| format!("{:.1} MiB/s", limit / MIB as f64));
            println!(
                "disk-limit={name}: {} after {:.1} s, written {:.1} MiB/s, p99 {:.1} ms (worst \
                 {:.1}), downtime {:.0} ms, limits {}, the last {last}",
                if moved.finished { "finished" } else { "not finished" },
                moved.total_s,
                moved.written_mib_s,
                moved.p99_ms,
                moved.worst_p99_ms,
                moved.downtime_ms,
                limits.len()
            );
            unfinished += usize::from(!moved.finished);
            times.push(moved.total_s);
            let rounds = &moved.own_words["migrate"]["round_list"];
            figures.push(json!({
                "disk_limit": name, "finished": moved.finished, "total_s": moved.total_s,
                "limits": limits, "written_mib_s": moved.written_mib_s, "p99_ms": moved.p99_ms,
                "downtime_ms": moved.downtime_ms, "rounds": rounds,
            }));
            anyhow::ensure!(moved.bugs == 0, "the guest's memory or disk is damaged");
        }
        if name == "off" {
            report.target(
                "limit off: moves that finished",
                (rounds - unfinished) as f64,
                0.0,
                Better::Lower,
            );
        } else {
            report.target(
                "limit auto: moves that did not finish",
                unfinished as f64,
                0.0,
                Better::Lower,
            );
            report.figure("limit_auto_s", median(&times));
        }
    }
    report.figure("limit", figures);
    Ok(())
}

/// The limits that were in force one after the other, and since when, in milliseconds.
fn limits(progress: &Value) -> Vec<(f64, f64)> {
    let mut limits: Vec<(f64, f64)> = Vec::new();
    for line in progress.as_array().into_iter().flatten() {
        let Some(limit) = line["disk_limit_bytes_per_second"].as_f64() else { continue };
        if limits.last().is_none_or(|(_, last)| *last != limit) {
            limits.push((line["elapsed_ms"].as_f64().unwrap_or(f64::NAN), limit));
        }
    }
    limits
}
