//! A governor is killed while thousands of writers wait for it: how long until all of them run.
//!
//! Three processes: this one, one with the writers, and the governor; the last two are this program again.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bench::report::{Better, Report, median};
use godwit_bench::sys::Mapping;
use godwit_memory::RamBlock;
use godwit_track::{DirtyTracker, PagemapTracker, Way};
use godwit_units::{ByteCount, PAGE_SIZE, PageCount};

const ROLE: &str = "GODWIT_BENCH_ROLE";
const MEMORY: u64 = 256 << 20;
/// As many as a large guest has vCPUs, and thousands.
const WRITERS: [usize; 2] = [64, 2000];
/// A write that took longer, in nanoseconds, has waited.
const LONG: u64 = 1_000_000;

/// Plays a role if the environment names one.
pub(crate) fn is_role() -> anyhow::Result<bool> {
    let Ok(role) = std::env::var(ROLE) else { return Ok(false) };
    let words: Vec<&str> = role.split(' ').collect();
    match words[0] {
        "writers" => writers(Path::new(words[1]), words[2].parse()?)?,
        _ => govern(Path::new(words[1]), words[2].parse()?)?,
    }
    Ok(true)
}

/// What is known of one thread of the writers.
#[derive(Default)]
struct Thread {
    writes: AtomicU64,
    /// It is about to write, or waits to.
    writing: AtomicBool,
    /// From when to when its writes took that took longer than [`LONG`], in nanoseconds of the machine's clock.
    long: Mutex<Vec<(u64, u64)>>,
}

/// `count` threads that each write their own pages in turn. To the line `waiting` it answers how many are writing, to the
/// line with a time how much later the last of those that waited then was through, once all have written again.
fn writers(path: &Path, count: usize) -> anyhow::Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let memory = Mapping::new(&file, MEMORY as usize)?;
    let each = MEMORY / PAGE_SIZE / count as u64;
    let threads: Vec<Thread> = (0..count).map(|_| Thread::default()).collect();
    std::thread::scope(|scope| -> anyhow::Result<()> {
        for (number, thread) in threads.iter().enumerate() {
            let memory = &memory;
            std::thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, move || {
                for turn in 0.. {
                    let page = number as u64 * each + turn % each;
                    let began = monotonic();
                    thread.writing.store(true, Ordering::Relaxed);
                    memory.store((page * PAGE_SIZE) as usize, turn);
                    thread.writing.store(false, Ordering::Relaxed);
                    let ended = monotonic();
                    thread.writes.fetch_add(1, Ordering::Release);
                    if ended - began > LONG {
                        thread.long.lock().unwrap_or_else(PoisonError::into_inner).push((began, ended));
                    } else {
                        // Two thousand threads that neither wait nor sleep leave nobody a processor.
                        std::thread::sleep(Duration::from_millis(100));
                    }
                }
            })?;
        }
        println!("ready");
        for line in std::io::stdin().lines() {
            let line = line?;
            if line == "waiting" {
                println!(
                    "{}",
                    threads.iter().filter(|thread| thread.writing.load(Ordering::Relaxed)).count()
                );
                continue;
            }
            let writes = |thread: &Thread| thread.writes.load(Ordering::Acquire);
            let before: Vec<u64> = threads.iter().map(writes).collect();
            while threads.iter().zip(&before).any(|(thread, before)| writes(thread) <= *before + 1) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let at: u64 = line.parse()?;
            let after = |thread: &Thread| {
                let long = std::mem::take(&mut *thread.long.lock().unwrap_or_else(PoisonError::into_inner));
                let waited = long.into_iter().filter(|(began, ended)| *began < at && at < *ended);
                waited.map(|(_, ended)| ended - at).max()
            };
            println!("{}", threads.iter().filter_map(after).max().unwrap_or(0));
        }
        std::process::exit(0)
    })
}

/// Nanoseconds of a clock that all processes share.
fn monotonic() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

fn govern(path: &Path, pid: i32) -> anyhow::Result<()> {
    let block = [RamBlock::open("mem", path, 0, ByteCount(MEMORY), false)?];
    let tracker = PagemapTracker::start(pid, &block)?;
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"))?;
    let threads: Vec<i32> =
        threads.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    tracker.prepare_governor(Way::Call, &threads)?;
    tracker.govern(Some(0.0));
    tracker.harvest(0, block[0].all(), PageCount::ZERO, &mut |_| {})?;
    println!("governing");
    std::thread::sleep(Duration::from_secs(600));
    Ok(())
}

/// A child of ours in a role.
struct Role {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Role {
    fn start(role: &str) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take().context("no stdin")?;
        let stdout = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut role = Self { child, stdin, stdout };
        role.hear()?;
        Ok(role)
    }

    fn hear(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        ensure!(self.stdout.read_line(&mut line)? > 0, "a process of the bench ended early");
        Ok(line.trim().to_owned())
    }

    fn ask(&mut self, line: &str) -> anyhow::Result<f64> {
        writeln!(self.stdin, "{line}")?;
        Ok(self.hear()?.parse()?)
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills so many governors.
pub(crate) fn run(kills: usize, report: &mut Report) -> anyhow::Result<()> {
    let path = PathBuf::from(format!("/dev/shm/godwit-bench-governor-{}", std::process::id()));
    File::create(&path)?.set_len(MEMORY)?;
    let result = WRITERS.iter().try_for_each(|writers| kill_all(kills, *writers, &path, report));
    let _ = std::fs::remove_file(&path);
    result
}

fn kill_all(kills: usize, count: usize, path: &Path, report: &mut Report) -> anyhow::Result<()> {
    let mut writers = Role::start(&format!("writers {} {count}", path.display()))?;
    let (mut times, mut waited) = (Vec::new(), Vec::new());
    for _ in 0..kills {
        let mut governor = Role::start(&format!("govern {} {}", path.display(), writers.child.id()))?;
        let until = Instant::now() + Duration::from_secs(5);
        let mut blocked = 0.0;
        while blocked < 0.75 * count as f64 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
            blocked = writers.ask("waiting")?;
        }
        waited.push(blocked);
        let killed = monotonic();
        governor.child.kill()?;
        governor.child.wait()?;
        times.push(writers.ask(&killed.to_string())? / 1e6);
    }
    let worst = times.iter().copied().fold(0.0, f64::max);
    println!(
        "{kills} governors killed with {:.0} writers waiting: all free after {:.2} ms, at most {worst:.2} ms",
        median(&waited),
        median(&times)
    );
    report.figure(&format!("killed_{count}_writers_waiting"), median(&waited));
    report.figure(&format!("killed_{count}_writers_free_after_ms"), median(&times));
    let name = format!("SIGKILL with {count} writers: all free after, worst of {kills}, ms");
    report.target(name, worst, 10.0, Better::Lower);
    Ok(())
}
