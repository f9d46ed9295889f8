//! A governor is killed while thousands of writers wait for it: how long until all of them have
//! written, and until they are together as fast as they will be.
//!
//! Three processes: this one, one with the writers, and the governor; the last two are this program
//! again. With few writers the first question is the harder one. Thousands share the processors,
//! and the last of them would have its turn late if nobody had ever held it up; there the second
//! one is asked.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use godwit_bench::report::{Better, Report, median};
use godwit_bench::sys::Mapping;
use godwit_memory::RamBlock;
use godwit_track::{DirtyTracker, PagemapTracker, Way};
use godwit_units::{ByteCount, PAGE_SIZE, PageCount};

const ROLE: &str = "GODWIT_BENCH_ROLE";
const MEMORY: u64 = 256 << 20;
/// As many as a large guest has vCPUs, and thousands.
const WRITERS: [usize; 2] = [64, 2000];
/// How long the writers' speed is watched. Their own speed is that of the last part.
const WATCHED: Duration = Duration::from_millis(100);
const OWN_SPEED: Duration = Duration::from_millis(40);
/// Speed is judged over so many of such steps.
const STEP: Duration = Duration::from_micros(500);
const STEPS: usize = 4;
/// They are as fast as they will be when they have this share of it.
const FULL: f64 = 0.9;
/// A write that took longer, in nanoseconds, has waited.
const LONG: u64 = 1_000_000;
/// All writers have written again within this, or the bench says that they have not.
const WRITTEN_LIMIT: Duration = Duration::from_secs(20);
/// A child answers within this, which is longer than whatever it waits for itself.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

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
    /// From when to when its writes took that took longer than [`LONG`], in nanoseconds of the
    /// machine's clock.
    long: Mutex<Vec<(u64, u64)>>,
}

impl Thread {
    fn count(&self) -> u64 {
        self.writes.load(Ordering::Acquire)
    }

    /// Writes `each` pages from the `number`th such part of `memory` on, in turn.
    fn write_for_ever(&self, memory: &Mapping, number: u64, each: u64, hurry: &AtomicBool) {
        for turn in 0.. {
            let page = number * each + turn % each;
            let began = monotonic();
            self.writing.store(true, Ordering::Relaxed);
            memory.store((page * PAGE_SIZE) as usize, turn);
            self.writing.store(false, Ordering::Relaxed);
            let ended = monotonic();
            self.writes.fetch_add(1, Ordering::Release);
            if ended - began > LONG {
                self.long.lock().unwrap_or_else(PoisonError::into_inner).push((began, ended));
            } else if !hurry.load(Ordering::Relaxed) {
                // Two thousand threads that neither wait nor sleep leave nobody a processor.
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }

    /// How long after `at` the write was through that waited then.
    fn waited(&self, at: u64) -> Option<u64> {
        let long = std::mem::take(&mut *self.long.lock().unwrap_or_else(PoisonError::into_inner));
        let waited = long.into_iter().filter(|(began, ended)| *began < at && at < *ended);
        waited.map(|(_, ended)| ended - at).max()
    }
}

/// What the writers share. They hold it for as long as their process lives.
struct Writers {
    memory: Mapping,
    threads: Vec<Thread>,
    hurry: AtomicBool,
}

/// `count` threads that write. Answers each line with one: to `waiting` how many are writing; to
/// `hurry`, at once, with nothing, and from then on they write without pause for as long as they
/// are watched; to `free` and a time how much later the last of those that waited then was through,
/// once all have written again; to `speed` and a time how much later they were at full speed
/// together. Times are in nanoseconds.
///
/// The threads never end, so nobody joins them: the process ends with the first error, and they
/// with it.
fn writers(path: &Path, count: usize) -> anyhow::Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let memory = Mapping::new(&file, MEMORY as usize)?;
    let each = MEMORY / PAGE_SIZE / count as u64;
    let threads = (0..count).map(|_| Thread::default()).collect();
    let writers = Arc::new(Writers { memory, threads, hurry: AtomicBool::new(false) });
    for number in 0..count {
        let own = Arc::clone(&writers);
        let run = move || {
            own.threads[number].write_for_ever(&own.memory, number as u64, each, &own.hurry);
        };
        std::thread::Builder::new().stack_size(64 << 10).spawn(run)?;
    }
    println!("ready");
    let mut watch = None;
    for line in std::io::stdin().lines() {
        let line = line?;
        let (word, time) = line.split_once(' ').unwrap_or((&line, "0"));
        let at: u64 = time.parse()?;
        let answer = match word {
            "waiting" => {
                let writing = |thread: &&Thread| thread.writing.load(Ordering::Relaxed);
                writers.threads.iter().filter(writing).count() as u64
            }
            "hurry" => {
                let writers = Arc::clone(&writers);
                watch =
                    Some(std::thread::spawn(move || watch_speed(&writers.threads, &writers.hurry)));
                0
            }
            "speed" => {
                let watch = watch.take().context("nobody has watched the writers")?;
                let seen =
                    watch.join().map_err(|_| anyhow!("the thread that watched has panicked"))?;
                full_speed_after(&seen, at).context("the writers have not regained their speed")?
            }
            _ => {
                await_writes(&writers.threads)?;
                writers.threads.iter().filter_map(|thread| thread.waited(at)).max().unwrap_or(0)
            }
        };
        println!("{answer}");
    }
    Ok(())
}

/// Waits until each of `threads` has written twice more: the first of the two may have begun
/// before.
fn await_writes(threads: &[Thread]) -> anyhow::Result<()> {
    let before: Vec<u64> = threads.iter().map(Thread::count).collect();
    let until = Instant::now() + WRITTEN_LIMIT;
    loop {
        let waits = |(thread, before): &(&Thread, &u64)| thread.count() <= **before + 1;
        let waiting = threads.iter().zip(&before).filter(waits).count();
        if waiting == 0 {
            return Ok(());
        }
        ensure!(
            Instant::now() < until,
            "{waiting} of {} writers have not written within {WRITTEN_LIMIT:?}",
            threads.len()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Has `threads` write without pause, and looks how many writes they have made in all: when, and
/// how many.
fn watch_speed(threads: &[Thread], hurry: &AtomicBool) -> Vec<(u64, u64)> {
    // Or it would have its turn among thousands.
    godwit_vcpu_throttle::become_punctual();
    hurry.store(true, Ordering::Relaxed);
    let began = Instant::now();
    let mut seen = Vec::new();
    while began.elapsed() < WATCHED {
        seen.push((monotonic(), threads.iter().map(Thread::count).sum()));
        std::thread::sleep(STEP);
    }
    hurry.store(false, Ordering::Relaxed);
    seen
}

/// How long after `at` the writes that were `seen` are made at [`FULL`] speed, measured by what
/// came last.
fn full_speed_after(seen: &[(u64, u64)], at: u64) -> Option<u64> {
    let speed =
        |from: (u64, u64), to: (u64, u64)| (to.1 - from.1) as f64 / (to.0 - from.0).max(1) as f64;
    let last = *seen.last()?;
    let late = *seen.iter().find(|seen| seen.0 + OWN_SPEED.as_nanos() as u64 >= last.0)?;
    let own = speed(late, last);
    let windows = seen.windows(STEPS + 1).filter(|window| window[0].0 >= at);
    let full = |window: &&[(u64, u64)]| speed(window[0], window[STEPS]) >= FULL * own;
    windows.into_iter().find(full).map(|window| window[STEPS].0 - at)
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
    tracker.govern(Some(0.0))?;
    tracker.harvest(0, block[0].all(), PageCount::ZERO, &mut |_| {})?;
    println!("governing");
    std::thread::sleep(Duration::from_secs(600));
    Ok(())
}

/// A child of ours in a role.
struct Role {
    child: Child,
    stdin: ChildStdin,
    /// What it says, line by line, from a thread that reads it.
    lines: Receiver<String>,
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
        let (said, lines) = mpsc::channel();
        std::thread::spawn(move || {
            let lines = stdout.lines().map_while(Result::ok);
            lines.take_while(|line| said.send(line.clone()).is_ok()).for_each(drop);
        });
        let role = Self { child, stdin, lines };
        role.hear()?;
        Ok(role)
    }

    /// The next line. Why a child has ended it has said itself, on standard error.
    fn hear(&self) -> anyhow::Result<String> {
        match self.lines.recv_timeout(ANSWER_LIMIT) {
            Ok(line) => Ok(line.trim().to_owned()),
            Err(RecvTimeoutError::Timeout) => bail!("a process of the bench hangs"),
            Err(RecvTimeoutError::Disconnected) => bail!("a process of the bench ended early"),
        }
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
    for (watched, what) in [(false, "all free"), (true, "at full speed")] {
        let (mut times, mut waited) = (Vec::new(), Vec::new());
        for _ in 0..kills {
            let mut governor =
                Role::start(&format!("govern {} {}", path.display(), writers.child.id()))?;
            let until = Instant::now() + Duration::from_secs(5);
            let mut blocked = 0.0;
            while blocked < 0.75 * count as f64 && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(20));
                blocked = writers.ask("waiting")?;
            }
            waited.push(blocked);
            if watched {
                writers.ask("hurry")?;
            }
            let killed = monotonic();
            governor.child.kill()?;
            governor.child.wait()?;
            let question = if watched { "speed" } else { "free" };
            times.push(writers.ask(&format!("{question} {killed}"))? / 1e6);
        }
        let worst = times.iter().copied().fold(0.0, f64::max);
        println!(
            "{kills} governors killed with {:.0} writers waiting: {what} after {:.2} ms, at most \
             {worst:.2} ms",
            median(&waited),
            median(&times)
        );
        let name =
            |figure: &str| format!("killed_{count}_writers_{}_{figure}", what.replace(' ', "_"));
        report.figure(&name("waiting"), median(&waited));
        report.figure(&name("after_ms"), median(&times));
        report.figure(&name("after_ms_worst"), worst);
        if watched || count == WRITERS[0] {
            let name = format!("SIGKILL with {count} writers: {what} after, worst of {kills}, ms");
            report.target(name, worst, 10.0, Better::Lower);
        }
    }
    Ok(())
}
