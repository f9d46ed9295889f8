//! A look at a large memory: by one thread, and by as many as there are processors.
//!
//! The memory is a sparse file, of which one page in each 2 MiB holds data: the page tables are all
//! there, and they are what a look goes through. They take 2 MiB for each GiB, and the data as
//! much.

use std::fs::File;
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use godwit_bench::report::{Report, median};
use godwit_bench::sys::Mapping;
use godwit_track::{AsOf, BlockMapping, DirtyTracker, PagemapTracker};
use godwit_units::{ByteCount, Hva, PAGE_SIZE, PageCount, PageRun};
use serde_json::json;

use crate::Options;

const TABLE: u64 = 2 << 20;

struct Sparse(PathBuf);

impl Drop for Sparse {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(crate) fn measure(options: Options, report: &mut Report) -> anyhow::Result<()> {
    if options.large == 0 {
        return Ok(());
    }
    let size = options.large << 30;
    let sparse =
        Sparse(PathBuf::from(format!("/dev/shm/godwit-bench-large-{}", std::process::id())));
    let file = File::options().read(true).write(true).create_new(true).open(&sparse.0)?;
    file.set_len(size)?;
    let memory = Mapping::new(&file, size as usize)?;
    for offset in (0..size).step_by(TABLE as usize) {
        memory.store(offset as usize, 1);
    }
    let pages = PageCount(size / PAGE_SIZE);
    let mapping = BlockMapping { address: Hva(memory.address()), pages: PageRun::new(0, pages.0) };
    let tracker = PagemapTracker::start_own(&[vec![mapping]])?;
    tracker.harvest(0, PageRun::new(0, pages.0), PageCount::ZERO, &mut |_| {})?;
    let processors = thread::available_parallelism().map_or(1, usize::from);
    println!("\na look at {} of sparse memory, page tables filled", ByteCount(size));
    for threads in [1, processors.min(16)] {
        let mut times = Vec::new();
        for _ in 0..options.rounds {
            let part = pages.0.div_ceil(threads as u64);
            let began = Instant::now();
            thread::scope(|scope| {
                let look = |number: u64| {
                    let first = number * part;
                    let run = PageRun::new(first, part.min(pages.0 - first));
                    tracker.look(0, run, AsOf::Now, &mut |_| {})
                };
                let parts: Vec<_> =
                    (0..threads as u64).map(|number| scope.spawn(move || look(number))).collect();
                parts.into_iter().try_for_each(|part| match part.join() {
                    Ok(looked) => looked.map_err(anyhow::Error::from),
                    Err(_) => Err(anyhow::anyhow!("a thread that looked has panicked")),
                })
            })?;
            times.push(began.elapsed().as_secs_f64() * 1e3);
        }
        let time = median(&times);
        println!(
            "{threads:>3} threads: {time:>8.1} ms, {:.3} ms for each GiB",
            time / options.large as f64
        );
        report.figure(
            &format!("look_at_large_{threads}"),
            json!({ "gib": options.large, "ms": time, "ms_per_gib": time / options.large as f64 }),
        );
    }
    Ok(())
}
