//! How long a guest stands still while the QEMU under it changes, by the size of its memory; for
//! `bench-upgrade` and `bench-operators`.
//!
//! Guests go to and fro between two versions of QEMU, or between two processes of one where there
//! is no other. The times are those that godwit tells. Keeps one promise: a size for which there is
//! no memory is not measured, and that is said.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Ended, Godwit, GuestConfig, QemuBuild, StartedVm, TestVm, VmConfig, builds_for, skip,
};
use godwit_units::ByteCount;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::report::{Better, Report, median};
use crate::table::{Column, Table, figure};

const LIMIT: Duration = Duration::from_secs(300);
const PARTS: [&str; 6] =
    ["downtime_ms", "drain_ms", "copy_ms", "save_ms", "load_ms", "handover_ms"];
/// The most that a guest may stand still, whatever its size.
const MOST_MS: f64 = 50.0;
/// For both QEMUs, and the kernel's own.
const SPARE: u64 = 1 << 30;

/// Upgrades a guest of each of `sizes`, in GiB, which has filled `fill` MiB at most, `rounds` times
/// and puts the figures and targets into `report`.
///
/// # Errors
/// When an upgrade fails, or there was no memory for any size.
pub fn measure_all(
    report: &mut Report,
    rounds: usize,
    sizes: &[u64],
    fill: u64,
) -> anyhow::Result<()> {
    ensure!(rounds > 0, "--rounds: at least 1");
    let builds = builds_for("bench upgrade");
    let old = builds.iter().min_by_key(|build| build.version).context("no QEMU")?;
    let new = builds.iter().max_by_key(|build| build.version).context("no QEMU")?;
    let mut measured = false;
    println!("between {old} and {new}, ms");
    TABLE.print_head();
    for &size in sizes {
        let fill = ByteCount((fill << 20).min((size << 30) / 4 * 3));
        if let Some(why) = short_of(fill)? {
            skip(&format!("{size} GiB"), why);
            continue;
        }
        let list = measure((old, new), ByteCount(size << 30), fill, rounds)?;
        let downtimes: Vec<f64> = list.iter().filter_map(|it| it["downtime_ms"].as_f64()).collect();
        let middle = median(&downtimes);
        let name = format!("an idle guest of {size} GiB: ms that it stands still, the median");
        report.target(name, middle, MOST_MS, Better::Lower);
        report.figure(&format!("{size}_gib"), json!({ "filled_bytes": fill.0, "upgrades": list }));
        measured = true;
    }
    ensure!(measured, "there was no memory for any size");
    Ok(())
}

/// One upgrade.
struct Row {
    size: ByteCount,
    version: String,
    parts: [f64; PARTS.len()],
}

const TABLE: Table<Row> = Table(&[
    Column { head: "guest", width: 8, cell: |row| row.size.to_string() },
    Column { head: "to", width: 8, cell: |row| row.version.clone() },
    Column { head: "downtime", width: 9, cell: |row| figure(row.parts[0], 1) },
    Column { head: "= drain", width: 7, cell: |row| figure(row.parts[1], 1) },
    Column { head: "copy", width: 6, cell: |row| figure(row.parts[2], 1) },
    Column { head: "save", width: 6, cell: |row| figure(row.parts[3], 1) },
    Column { head: "load", width: 6, cell: |row| figure(row.parts[4], 1) },
    Column { head: "handover", width: 8, cell: |row| figure(row.parts[5], 1) },
]);

/// Why there is no memory for a guest that fills this much.
fn short_of(fill: ByteCount) -> anyhow::Result<Option<String>> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let free = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let free = free.context("the kernel does not tell how much memory is free")? << 10;
    let shared = rustix::fs::statvfs("/dev/shm")?;
    let shared = shared.f_bavail * shared.f_frsize;
    let wanted = fill.0 + SPARE;
    Ok((free.min(shared) < wanted).then(|| {
        let (wanted, free, shared) = (ByteCount(wanted), ByteCount(free), ByteCount(shared));
        format!("{wanted} of memory are needed; {free} are free, and {shared} in /dev/shm")
    }))
}

/// A process that ends with this.
struct Guest(i32);

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.0) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

fn measure(
    (old, new): (&QemuBuild, &QemuBuild),
    size: ByteCount,
    fill: ByteCount,
    rounds: usize,
) -> anyhow::Result<Vec<Value>> {
    let guest = GuestConfig { memory: size, fill, ..GuestConfig::small(Mode::Idle).without_rest() };
    let vm = TestVm::source(&VmConfig::new(old, guest))?;
    vm.wait_ready(LIMIT)?;
    vm.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
    let godwit = Godwit::built()?;
    let name = format!("qemu:{}", vm.qmp_socket().display());
    let (mut guest, mut list) = (None, Vec::new());
    for round in 0..rounds {
        let to = if round % 2 == 0 { new } else { old };
        let upgrade = godwit.upgrade(&name, &["--program", &to.program.display().to_string()])?;
        let started = StartedVm::of(&upgrade, LIMIT)?;
        let before = guest.replace(Guest(started.pid));
        let Ended { status, errors, lines } = upgrade.wait(LIMIT)?;
        let row = lines.last().cloned().unwrap_or_default();
        ensure!(status.success() && row["outcome"] == "upgraded", "{row} {errors}");
        ensure!(row["raw_bytes"] == 0, "memory was moved: {row}");
        // It has ended; of an upgrade that fails both are ended here.
        drop(before);
        started.await_beats(2, LIMIT)?;
        let of = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        let version = row["version"].as_str().unwrap_or_default().to_owned();
        TABLE.print(&Row { size, version: version.clone(), parts: PARTS.map(of) });
        let mut told = serde_json::Map::from_iter([("version".to_owned(), json!(version))]);
        told.extend(PARTS.map(|key| (key.to_owned(), row[key].clone())));
        list.push(Value::Object(told));
    }
    Ok(list)
}
