//! Work like that of a build: processes that come, fill memory of their own, check it, and go. What
//! they leave is free memory with old content.
//!
//! Keeps one promise: a job that finds its memory changed says BUG and is counted. Each job is a
//! process, so its memory goes back to the kernel page by page when it ends, as that of a compiler
//! does.

use std::error::Error;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_stamp::heartbeat::{BUG, BUILD, FAILED};
use godwit_stamp::settings::BuildWork;
use godwit_stamp::stamp::{Page, mix};
use godwit_units::{ByteCount, PAGE_SIZE};

/// The first argument of a process that is a job.
pub(super) const JOB: &str = "job";
/// Pages of a job: 1 to 32 MiB.
const SMALLEST: u64 = 256;
const LARGEST: u64 = 8192;
const REPORT: Duration = Duration::from_secs(1);

/// Does a job, if that is what this process is for.
pub(super) fn job() -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next()? != JOB {
        return None;
    }
    let mut number = || arguments.next()?.parse().ok();
    let (seed, pages): (u64, u64) = (number()?, number()?);
    let first = seed & 0xffff_ffff;
    let mut memory: Vec<Page> = (first..first + pages).map(Page::first).collect();
    for (index, page) in (first..).zip(&mut memory).step_by(3) {
        page.restamp(index, 1);
    }
    let mut code = ExitCode::SUCCESS;
    for (at, (index, page)) in (first..).zip(&memory).enumerate() {
        if let Err(fault) = page.inspect(index, u64::from(at.is_multiple_of(3))) {
            say!("{BUG} job page={index} found={fault}");
            code = ExitCode::FAILURE;
        }
    }
    Some(code)
}

/// Leaves the past behind and starts the jobs. `bugs` counts what they find.
pub(super) fn start(work: &BuildWork, bugs: &Arc<AtomicU64>) -> Result<(), Box<dyn Error>> {
    if work.past > ByteCount::ZERO && !run(1, work.past.0 / PAGE_SIZE)? {
        bugs.fetch_add(1, Ordering::Relaxed);
    }
    let done = Arc::new(Done::default());
    for slot in 0..u64::from(work.jobs) {
        let (done, bugs) = (Arc::clone(&done), Arc::clone(bugs));
        std::thread::spawn(move || {
            let mut seed = mix(slot + 2);
            loop {
                seed = mix(seed);
                let pages = SMALLEST + (seed >> 32) % (LARGEST - SMALLEST);
                match run(seed, pages) {
                    Ok(true) => {}
                    Ok(false) => drop(bugs.fetch_add(1, Ordering::Relaxed)),
                    Err(problem) => return say!("{FAILED} {problem}"),
                }
                done.jobs.fetch_add(1, Ordering::Relaxed);
                done.pages.fetch_add(pages, Ordering::Relaxed);
            }
        });
    }
    if work.jobs > 0 {
        std::thread::spawn(move || report(&done));
    }
    Ok(())
}

#[derive(Debug, Default)]
struct Done {
    jobs: AtomicU64,
    pages: AtomicU64,
}

/// Says each second what was done.
fn report(done: &Done) {
    let started = Instant::now();
    loop {
        std::thread::sleep(REPORT);
        let (jobs, pages) = (done.jobs.load(Ordering::Relaxed), done.pages.load(Ordering::Relaxed));
        say!("{BUILD} jobs={jobs} pages={pages} t_ms={} .", started.elapsed().as_millis());
    }
}

/// Runs a job to its end; whether it found its memory as it should be.
fn run(seed: u64, pages: u64) -> Result<bool, Box<dyn Error>> {
    let mut command = Command::new("/proc/self/exe");
    let status = command.args([JOB, &seed.to_string(), &pages.to_string()]).status();
    Ok(status.map_err(|problem| format!("a job cannot be run: {problem}"))?.success())
}
