//! `max-bandwidth`: what passes the loopback interface, seen from outside, in any window of a
//! second and more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bench::report::{Better, Report};
use godwit_bench::still::{Ram, Way, transfer};
use godwit_bench::table::{Column, Table, figure};
use godwit_codec::synthetic::Image;
use godwit_units::Rate;
use serde_json::json;

const LOOK: Duration = Duration::from_millis(20);
const WINDOW: f64 = 1.0;

const TABLE: Table<(&str, &str, [f64; 3])> = Table(&[
    Column { head: "limit", width: 12, cell: |row| row.0.to_owned() },
    Column { head: "compression", width: 11, cell: |row| row.1.to_owned() },
    Column { head: "least", width: 9, cell: |row| figure(row.2[0], 3) },
    Column { head: "mean", width: 9, cell: |row| figure(row.2[1], 3) },
    Column { head: "most", width: 9, cell: |row| figure(row.2[2], 3) },
]);

pub(crate) fn run(report: &mut Report) -> anyhow::Result<()> {
    println!("\nmax-bandwidth: bytes a second in windows of a second and more, against the limit");
    TABLE.print_head();
    let mut rows = Vec::new();
    for (name, rate, compression, image, mib) in [
        ("100 Mbit/s", "100Mbit", "none", Image::Random, 64),
        ("100 Mbit/s", "100Mbit", "lz4", Image::TwoToOne, 96),
        ("1 Gbit/s", "1Gbit", "none", Image::Random, 512),
    ] {
        let limit: Rate = rate.parse().map_err(anyhow::Error::msg)?;
        let ram = Ram::filled(image, mib << 20)?;
        let way = Way {
            limit: Some(limit),
            compression: compression.parse().map_err(anyhow::Error::msg)?,
            ..Way::PLAIN
        };
        let seen = watch(&ram, way)?;
        let share = |from: &(f64, u64), to: &(f64, u64)| {
            (to.1 - from.1) as f64 / (to.0 - from.0) / limit.bytes_per_second()
        };
        let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
        for (at, from) in seen.iter().enumerate() {
            for to in seen[at..].iter().filter(|to| to.0 - from.0 >= WINDOW) {
                (least, most) = (least.min(share(from, to)), most.max(share(from, to)));
            }
        }
        let mean = share(&seen[0], &seen[seen.len() - 1]);
        TABLE.print(&(name, compression, [least, mean, most]));
        rows.push(json!({
            "limit": name, "compression": compression, "least": least, "mean": mean, "most": most,
        }));
        let off = (most - 1.0).max(1.0 - least) * 100.0;
        report.target(
            format!("max-bandwidth {name}, {compression}: worst window, % off"),
            off,
            5.0,
            Better::Lower,
        );
    }
    report.figure("max_bandwidth", rows);
    Ok(())
}

/// Seconds and bytes that had passed by then, from the first byte to nearly the last.
fn watch(ram: &Ram, way: Way) -> anyhow::Result<Vec<(f64, u64)>> {
    let over = AtomicBool::new(false);
    let first = passed()?;
    let (cost, seen) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let (began, mut seen) = (Instant::now(), Vec::new());
            while !over.load(Ordering::Relaxed) {
                seen.push((began.elapsed().as_secs_f64(), passed().unwrap_or(first) - first));
                std::thread::sleep(LOOK);
            }
            seen
        });
        let cost = transfer(ram, way, false);
        over.store(true, Ordering::Relaxed);
        (cost, watcher.join())
    });
    let cost = cost?;
    let mut seen = seen.map_err(|_| anyhow::anyhow!("a thread panicked"))?;
    let last = seen.last().context("it was over at once")?.1;
    ensure!(
        (last as f64) < cost.sent as f64 * 1.02 + 3e6,
        "{last} bytes passed the interface and {} are ours: something else uses it",
        cost.sent
    );
    // What comes before the first page and after the last one is not limited by the limit.
    seen.retain(|(_, bytes)| *bytes > 100_000 && *bytes < cost.sent - cost.sent / 50);
    ensure!(seen.len() > 2, "it was over too soon");
    Ok(seen)
}

/// Bytes that the loopback interface has received.
fn passed() -> anyhow::Result<u64> {
    let table = std::fs::read_to_string("/proc/net/dev")?;
    let line = table
        .lines()
        .find_map(|line| line.trim().strip_prefix("lo:"))
        .context("no loopback interface")?;
    Ok(line.split_whitespace().next().context("no figures")?.parse()?)
}
