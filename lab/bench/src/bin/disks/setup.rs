//! Machines with a disk, and the ways to move them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bench::fixture::{Fixture, Moved, Settled};
use godwit_bench::godwit::{Attempt, Over, Terms};
use godwit_bench::report::{median, most};
use godwit_stamp::heartbeat::DiskSecond;
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    DiskImage, Godwit, GuestConfig, QemuBuild, SlowLink, TestVm, VmConfig, own_migration_with_disks,
};
use godwit_units::ByteCount;
use serde_json::{Value, json};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const LIMIT: Duration = Duration::from_secs(180);
/// The guest has been at work for so long when it is moved.
const SETTLED: Duration = Duration::from_secs(3);
pub(crate) const DISK: &str = "disk0";
/// A guest that arrived must still be well; what it says of its disk comes each second.
const AFTER: usize = 12;

/// QEMU 10.
pub(crate) fn build() -> anyhow::Result<QemuBuild> {
    QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")
}

/// An idle guest of 512 MiB, of which 256 MiB are filled, with this work for its disk.
pub(crate) fn guest(disk: DiskWork) -> GuestConfig {
    let memory = ByteCount(512 * MIB);
    GuestConfig {
        memory,
        fill: ByteCount(256 * MIB),
        disk,
        ..GuestConfig::small(Mode::Idle).without_rest()
    }
}

/// Who moves the guest, with these options if it is godwit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mover<'a> {
    Qemu,
    Godwit(&'a [&'a str]),
}

/// What came of a move. All but `own_words` is seen from outside.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct Row {
    pub(crate) finished: bool,
    pub(crate) total_s: f64,
    pub(crate) wire_mib: f64,
    pub(crate) downtime_ms: f64,
    /// What the guest wrote each second meanwhile, in MiB; of the seconds' medians of a write's
    /// time the median, and of their 99th percentiles the median and the greatest.
    pub(crate) written_mib_s: f64,
    pub(crate) median_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) worst_p99_ms: f64,
    pub(crate) bugs: usize,
    pub(crate) own_words: Value,
}

/// How a move is made.
pub(crate) struct Setup<'a> {
    pub(crate) guest: GuestConfig,
    /// Source and destination.
    pub(crate) images: [&'a DiskImage; 2],
    /// `None`: loopback, which is not slow.
    pub(crate) link: Option<&'a SlowLink>,
    pub(crate) patience: Duration,
}

impl Setup<'_> {
    /// Boots a guest, lets it work, moves it, and looks how it is.
    pub(crate) fn one_move(&self, mover: Mover<'_>) -> anyhow::Result<Row> {
        let mut fixture = self.fixture(mover)?;
        let carried = || self.link.map_or(Ok(ByteCount::ZERO), SlowLink::carried);
        let mut meanwhile = Instant::now()..Instant::now();
        let outcome = fixture.one_move(|source, destination| {
            let (began, before) = (Instant::now(), carried()?);
            let moved = self.by(mover, source, destination)?;
            meanwhile = began..Instant::now();
            let sent = (carried()?.0 - before.0) as f64;
            Ok(Moved { sent, ..moved })
        })?;
        let (moved, seen) = (outcome.moved, outcome.seen);
        let block = self.guest.disk.block.0 as f64 / MIB as f64;
        let seconds = [outcome.source.disk_seconds(), outcome.destination.disk_seconds()].concat();
        let seconds: Vec<_> = seconds
            .into_iter()
            .filter(|(at, _)| meanwhile.contains(at))
            .map(|(_, told)| told)
            .collect();
        let of = |figure: fn(&DiskSecond) -> u64| -> Vec<f64> {
            seconds.iter().map(|second| figure(second) as f64).collect()
        };
        let p99 = of(|second| second.p99_us);
        Ok(Row {
            finished: moved.finished,
            total_s: moved.wall.as_secs_f64(),
            wire_mib: moved.sent / MIB as f64,
            downtime_ms: seen.switchover.map_or(f64::NAN, |gap| gap.length.as_secs_f64() * 1e3),
            written_mib_s: median(&of(|second| second.writes))
                * block
                * f64::from(self.guest.disk.threads),
            median_ms: median(&of(|second| second.median_us)) / 1e3,
            p99_ms: median(&p99) / 1e3,
            worst_p99_ms: most(&p99) / 1e3,
            bugs: outcome.bugs,
            own_words: moved.own_words,
        })
    }

    fn fixture(&self, mover: Mover<'_>) -> anyhow::Result<Fixture> {
        let build = build()?;
        let there = self.link.map_or(Ok(build.clone()), |link| link.build(&build))?;
        let here = VmConfig::new(&build, self.guest).with_disk(DISK, self.images[0]);
        let mut there = VmConfig::new(&there, self.guest).with_disk(DISK, self.images[1]);
        if matches!(mover, Mover::Qemu) {
            there = there.with_extra(&["-S"]);
        }
        let (settled, beats_after) = (Settled::For(SETTLED), AFTER);
        Ok(Fixture { destination: there, settled, beats_after, ..Fixture::new(here, LIMIT) })
    }

    fn by(
        &self,
        mover: Mover<'_>,
        source: &mut TestVm,
        destination: &mut TestVm,
    ) -> anyhow::Result<Moved> {
        let options = match mover {
            Mover::Qemu => return self.by_qemu(source, destination),
            // The source QEMU must live on to be asked what its guest said.
            Mover::Godwit(options) => [&["--disks", "all", "--keep-source"], options].concat(),
        };
        let link = self.link.map_or(Over::Loopback, Over::Slow);
        let terms = Terms { link, patience: Some(self.patience), limit: LIMIT };
        let attempt = Attempt::under(terms, &Godwit::built()?, source, destination, &options)?;
        let migrate = &attempt.migrate;
        let last = migrate.last();
        let receive = attempt.receive.as_ref().map(|receive| receive.last().clone());
        if receive.is_none() {
            println!("{} {}", last["error"], migrate.errors.lines().last().unwrap_or_default());
        }
        let progress: Vec<_> =
            migrate.lines.iter().filter(|line| line["event"] == "progress").collect();
        let words = json!({ "migrate": last, "receive": receive, "progress": progress });
        Ok(Moved::by_godwit(&attempt, words))
    }

    fn by_qemu(&self, source: &mut TestVm, destination: &mut TestVm) -> anyhow::Result<Moved> {
        let link = self.link.context("QEMU moves over a link")?;
        let own = own_migration_with_disks(source, destination, link, &[DISK], self.patience)?;
        Ok(Moved {
            finished: own.finished,
            wall: own.wall,
            sent: f64::NAN,
            rounds: 0,
            godwit_cpu: Duration::ZERO,
            own_words: json!({
                "mirrored_s": own.mirrored.as_secs_f64(), "memory_bytes": own.memory.0,
            }),
        })
    }
}

/// Fills `image`, a raw one, from `offset` on with `length` bytes of what lies around on this
/// machine: its programs and libraries.
pub(crate) fn fill(image: &DiskImage, offset: u64, length: u64) -> anyhow::Result<()> {
    let file = File::options().write(true).open(image.path())?;
    let mut at = offset;
    let end = offset + length;
    let mut buffer = vec![0; MIB as usize];
    let mut dirs: Vec<PathBuf> = ["/usr/bin", "/usr/lib", "/usr/share"].map(PathBuf::from).into();
    dirs.reverse();
    while let Some(dir) = dirs.pop() {
        for path in entries(&dir) {
            let kind = std::fs::symlink_metadata(&path).map(|data| data.file_type());
            match kind {
                Ok(kind) if kind.is_dir() => dirs.push(path),
                Ok(kind) if kind.is_file() => {
                    let Ok(mut from) = File::open(&path) else { continue };
                    while let Ok(count @ 1..) = from.read(&mut buffer) {
                        let count = count.min((end - at) as usize);
                        file.write_all_at(&buffer[..count], at)?;
                        at += count as u64;
                        if at == end {
                            return Ok(());
                        }
                    }
                    // As in a file system, a file begins with a block.
                    at = at.next_multiple_of(4096).min(end);
                }
                _ => {}
            }
        }
    }
    println!("only {} MiB of data found, which is repeated", (at - offset) / MIB);
    repeat(&file, image.path().as_path(), offset, at, end)
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

fn repeat(file: &File, image: &Path, offset: u64, mut at: u64, end: u64) -> anyhow::Result<()> {
    ensure!(at > offset, "there is nothing to fill a disk with");
    let read = File::open(image)?;
    let mut buffer = vec![0; MIB as usize];
    let mut from = offset;
    while at < end {
        let count = (end - at).min(MIB) as usize;
        read.read_exact_at(&mut buffer[..count], from)?;
        file.write_all_at(&buffer[..count], at)?;
        (from, at) = (from + count as u64, at + count as u64);
    }
    Ok(())
}

/// Copies the data of a raw image, holes left out.
pub(crate) fn copy(from: &DiskImage, to: &DiskImage) -> anyhow::Result<()> {
    let status = std::process::Command::new("cp")
        .arg("--sparse=always")
        .args([from.path(), to.path()])
        .status()
        .context("cannot run cp")?;
    ensure!(status.success(), "cp failed");
    Ok(())
}

/// So that what takes long is seen to be under way.
pub(crate) fn told(text: &str) {
    print!("{text}");
    let _ = std::io::stdout().flush();
}
