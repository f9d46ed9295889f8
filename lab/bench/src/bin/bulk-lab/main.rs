//! Which way of sending and receiving uncompressed pages takes the least processor time, over
//! loopback TCP between two RAM files.
//!
//! All combinations of what the options list are run, by turns; figures are medians. The
//! source holds random bytes; the destination is a new file each time; both are compared after the
//! first run of each combination.
//!
//! `bulk-lab content`: what looking at pages costs (zero check, fingerprints), and what deltas
//! save.
//! `bulk-lab read-back`: what it costs to read back what was placed in another process.

mod content;
mod read_back;
mod ways;

use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::{Parser, Subcommand};
use godwit_bench::report::{Report, machine, median};
use serde_json::json;

use crate::ways::{RECEIVES, Receive, SENDS, Send};
use godwit_bench::sys::{self, Mapping};
use godwit_bench::table::{Column, Table, figure};

/// Streams take turns in pieces of so many bytes, as channels do.
const SEGMENT: usize = 16 << 20;

#[derive(Clone, Copy, Debug)]
struct Combination {
    send: (&'static str, Send),
    receive: (&'static str, Receive),
    streams: usize,
    frame: usize,
    buffer: usize,
}

/// One run, in seconds.
#[derive(Clone, Copy, Debug)]
struct Run {
    wall: f64,
    sender: f64,
    receiver: f64,
}

/// Ways to send and receive uncompressed pages: lists, of which all combinations are run.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    other: Option<Other>,

    /// Ways to send
    #[arg(long, value_name = "WAY", value_delimiter = ',')]
    #[arg(default_value = "buffer,mapping,sendfile,zerocopy,splice", value_parser = send)]
    send: Vec<(&'static str, Send)>,

    /// Ways to receive
    #[arg(long, value_name = "WAY", value_delimiter = ',')]
    #[arg(default_value = "mapping,populate,ahead,buffer,splice", value_parser = receive)]
    receive: Vec<(&'static str, Receive)>,

    /// How many streams
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2")]
    streams: Vec<usize>,

    /// Sizes of frames
    #[arg(long, value_name = "KIB", value_delimiter = ',', default_value = "256")]
    #[arg(value_parser = frame)]
    frames: Vec<usize>,

    /// Sizes of socket buffers; 0: the system's default
    #[arg(long, value_name = "KIB", value_delimiter = ',', default_value = "0")]
    buffers: Vec<usize>,

    /// Size of the file
    #[arg(long, value_name = "MIB", default_value = "1024", value_parser = file_size)]
    size: usize,

    /// Runs of each combination
    #[arg(long, value_name = "N", default_value_t = 5)]
    runs: usize,

    /// Where the files are
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    dir: PathBuf,
}

#[derive(Clone, Copy, Subcommand)]
enum Other {
    /// What looking at pages costs (zero check, fingerprints), and what deltas save
    Content,
    /// What it costs to read back what was placed in another process, in pieces of several sizes
    ReadBack,
}

fn send(name: &str) -> Result<(&'static str, Send), String> {
    SENDS.into_iter().find(|(known, _)| *known == name).ok_or_else(|| words(&SENDS))
}

fn receive(name: &str) -> Result<(&'static str, Receive), String> {
    RECEIVES.into_iter().find(|(known, _)| *known == name).ok_or_else(|| words(&RECEIVES))
}

fn words<T>(known: &[(&'static str, T)]) -> String {
    format!("use {}", known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "))
}

/// In bytes, from KiB.
fn frame(text: &str) -> Result<usize, String> {
    let bytes = text.parse().ok().and_then(|kib: usize| kib.checked_mul(1 << 10));
    let fits = bytes.filter(|bytes| *bytes > 0 && SEGMENT.is_multiple_of(*bytes));
    fits.ok_or_else(|| "frames must divide 16 MiB".to_owned())
}

/// In bytes, from MiB.
fn file_size(text: &str) -> Result<usize, String> {
    let bytes = text.parse().ok().and_then(|mib: usize| mib.checked_mul(1 << 20));
    let fits = bytes.filter(|bytes| *bytes > 0 && bytes.is_multiple_of(SEGMENT));
    fits.ok_or_else(|| "the size must be a multiple of 16 MiB".to_owned())
}

impl Options {
    fn combinations(&self) -> Vec<Combination> {
        let mut combinations = Vec::new();
        for &streams in &self.streams {
            for &send in &self.send {
                for &receive in &self.receive {
                    for &frame in &self.frames {
                        for &buffer in &self.buffers {
                            let buffer = buffer << 10;
                            let one = Combination { send, receive, streams, frame, buffer };
                            combinations.push(one);
                        }
                    }
                }
            }
        }
        combinations
    }
}

struct Settings {
    combinations: Vec<Combination>,
    size: usize,
    runs: usize,
    dir: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    match options.other {
        Some(Other::Content) => return content::run(),
        Some(Other::ReadBack) => return read_back::run(),
        None => {}
    }
    let combinations = options.combinations();
    let Options { size, runs, dir, .. } = options;
    let settings = Settings { combinations, size, runs, dir };
    println!("{}", machine());
    let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        .unwrap_or_default();
    println!("huge pages of shared memory: {}", huge.trim());
    let source = ram_file(&settings.dir, "source", settings.size)?;
    fill(&source, settings.size)?;
    let mut runs: Vec<Vec<Run>> = vec![Vec::new(); settings.combinations.len()];
    for round in 0..settings.runs {
        for (combination, runs) in settings.combinations.iter().zip(&mut runs) {
            let run = transfer(combination, &source, &settings, round == 0)
                .with_context(|| format!("{combination:?}"))?;
            runs.push(run);
        }
    }
    print(&settings, &runs)
}

/// A combination, its GB/s, and the processor seconds for each GiB of both ends and together.
const TABLE: Table<(Combination, f64, [f64; 3])> = Table(&[
    Column { head: "send", width: 9, cell: |row| row.0.send.0.to_owned() },
    Column { head: "receive", width: 9, cell: |row| row.0.receive.0.to_owned() },
    Column { head: "streams", width: 7, cell: |row| row.0.streams.to_string() },
    Column { head: "frame", width: 7, cell: |row| (row.0.frame >> 10).to_string() },
    Column {
        head: "buffers",
        width: 8,
        cell: |row| match row.0.buffer {
            0 => "default".to_owned(),
            buffer => (buffer >> 10).to_string(),
        },
    },
    Column { head: "GB/s", width: 8, cell: |row| figure(row.1, 2) },
    Column { head: "sender", width: 9, cell: |row| figure(row.2[0], 3) },
    Column { head: "receiver", width: 9, cell: |row| figure(row.2[1], 3) },
    Column { head: "CPU s/GiB", width: 9, cell: |row| figure(row.2[2], 3) },
]);

fn print(settings: &Settings, runs: &[Vec<Run>]) -> anyhow::Result<()> {
    let gib = settings.size as f64 / f64::from(1 << 30);
    let mut report = Report::new("bulk-lab");
    let mut rows = Vec::new();
    TABLE.print_head();
    for (combination, runs) in settings.combinations.iter().zip(runs) {
        let of = |pick: fn(&Run) -> f64| median(&runs.iter().map(pick).collect::<Vec<f64>>());
        let speed = settings.size as f64 / 1e9 / of(|run| run.wall);
        let (sender, receiver) = (of(|run| run.sender) / gib, of(|run| run.receiver) / gib);
        let both = of(|run| run.sender + run.receiver) / gib;
        let Combination { send, receive, streams, frame, buffer } = *combination;
        TABLE.print(&(*combination, speed, [sender, receiver, both]));
        rows.push(json!({
            "send": send.0, "receive": receive.0, "streams": streams,
            "frame_bytes": frame, "buffer_bytes": buffer, "gb_per_second": speed,
            "sender_cpu_s_per_gib": sender, "receiver_cpu_s_per_gib": receiver,
            "cpu_s_per_gib": both,
        }));
    }
    report.figure("rows", rows);
    report.finish()?;
    Ok(())
}

/// Moves all of `source` into a new file, once.
fn transfer(
    combination: &Combination,
    source: &File,
    settings: &Settings,
    check: bool,
) -> anyhow::Result<Run> {
    let Combination { streams, frame, .. } = *combination;
    let target = ram_file(&settings.dir, "target", settings.size)?;
    let connections =
        (0..streams).map(|_| connect(combination.buffer)).collect::<anyhow::Result<Vec<_>>>()?;
    // Mapped anew each time: a migration pays for its first look at each page, too.
    let source_map = Mapping::new(source, settings.size)?;
    let target_map = Mapping::new(&target, settings.size)?;
    if combination.receive.1 == Receive::Huge {
        target_map.advise(0, settings.size, libc::MADV_HUGEPAGE)?;
    }
    let frames: Vec<Vec<usize>> = (0..streams)
        .map(|stream| {
            (0..settings.size)
                .step_by(frame)
                .filter(|at| at / SEGMENT % streams == stream)
                .collect()
        })
        .collect();
    let ahead: Vec<AtomicUsize> = (0..streams).map(|_| AtomicUsize::new(0)).collect();
    let start = Instant::now();
    let (sender, receiver) =
        std::thread::scope(|scope| {
            let mut senders = Vec::new();
            let mut receivers = Vec::new();
            for (((out, into), frames), ahead) in connections.iter().zip(&frames).zip(&ahead) {
                let (send, receive) = (combination.send.1, combination.receive.1);
                let (source_map, target_map, target) = (&source_map, &target_map, &target);
                senders.push(scope.spawn(move || {
                    timed(|| ways::send(send, out, source, source_map, frames, frame))
                }));
                receivers.push(scope.spawn(move || {
                    timed(|| ways::receive(receive, into, target, target_map, frames, frame, ahead))
                }));
                if receive == Receive::Ahead {
                    receivers.push(scope.spawn(move || {
                        timed(|| ways::populate_ahead(target_map, frames, frame, ahead))
                    }));
                }
            }
            (sum(senders), sum(receivers))
        });
    let wall = start.elapsed().as_secs_f64();
    let run = Run { wall, sender: sender?.as_secs_f64(), receiver: receiver?.as_secs_f64() };
    if check {
        ensure!(same(source, &target, settings.size)?, "the files differ afterwards");
    }
    Ok(run)
}

/// The processor time that `work` takes.
fn timed(work: impl FnOnce() -> std::io::Result<()>) -> anyhow::Result<Duration> {
    work()?;
    Ok(sys::thread_time())
}

fn sum(
    threads: Vec<std::thread::ScopedJoinHandle<'_, anyhow::Result<Duration>>>,
) -> anyhow::Result<Duration> {
    threads
        .into_iter()
        .map(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")))
        .sum()
}

/// A pair of connected sockets: the sender's, the receiver's.
fn connect(buffer: usize) -> anyhow::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let out = TcpStream::connect(listener.local_addr()?)?;
    let (into, _) = listener.accept()?;
    out.set_nodelay(true)?;
    if buffer > 0 {
        let buffer = i32::try_from(buffer)?;
        sys::option(out.as_fd(), libc::SO_SNDBUF, buffer)?;
        sys::option(into.as_fd(), libc::SO_RCVBUF, buffer)?;
    }
    Ok((out, into))
}

/// A new file without a name in `dir`, of `size` bytes, all hole.
fn ram_file(dir: &Path, name: &str, size: usize) -> anyhow::Result<File> {
    let path = dir.join(format!("bulk-lab-{name}-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path);
    let file = file.with_context(|| format!("cannot create {}", path.display()))?;
    std::fs::remove_file(&path)?;
    file.set_len(size as u64)?;
    Ok(file)
}

/// Random bytes.
fn fill(file: &File, size: usize) -> anyhow::Result<()> {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut piece = vec![0; 1 << 20];
    for at in (0..size).step_by(piece.len()) {
        rng.fill(&mut piece);
        file.write_all_at(&piece, at as u64)?;
    }
    Ok(())
}

fn same(one: &File, other: &File, size: usize) -> anyhow::Result<bool> {
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for at in (0..size).step_by(left.len()) {
        one.read_exact_at(&mut left, at as u64)?;
        other.read_exact_at(&mut right, at as u64)?;
        if left != right {
            return Ok(false);
        }
    }
    Ok(true)
}
