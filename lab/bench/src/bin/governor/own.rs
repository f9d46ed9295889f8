//! What an answer costs a writer, and what it costs 16 GiB to change hands: in this process itself,
//! whose writer can look at the clock.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_bench::report::{Better, Report, median};
use godwit_bench::sys::Mapping;
use godwit_track::{BlockMapping, DirtyTracker, PagemapTracker};
use godwit_units::{Hva, PAGE_SIZE, PageCount, PageRun};

const SMALL: u64 = 256 << 20;
const LARGE: u64 = 16 << 30;
const WRITES: usize = 20_000;
/// Every so many bytes a page of the large memory is there.
const SPACING: u64 = 64 << 10;

struct Fixture {
    memory: Mapping,
    tracker: PagemapTracker,
    all: PageRun,
}

impl Fixture {
    fn new(size: u64) -> anyhow::Result<Self> {
        let file =
            File::from(rustix::fs::memfd_create("governed", rustix::fs::MemfdFlags::CLOEXEC)?);
        file.set_len(size)?;
        let memory = Mapping::new(&file, size as usize)?;
        let all = PageRun::new(0, size / PAGE_SIZE);
        let mapped = BlockMapping { pages: all, address: Hva(memory.address()) };
        let tracker = PagemapTracker::start_own(&[vec![mapped]])?;
        Ok(Self { memory, tracker, all })
    }

    fn harvest(&self) -> anyhow::Result<u64> {
        let mut pages = 0;
        self.tracker.harvest(0, self.all, PageCount::ZERO, &mut |run| pages += run.count.0)?;
        Ok(pages)
    }
}

/// Both parts.
pub(crate) fn run(report: &mut Report) -> anyhow::Result<()> {
    answers(report)?;
    hands(report)
}

fn answers(report: &mut Report) -> anyhow::Result<()> {
    let fixture = Fixture::new(SMALL)?;
    for page in 0..fixture.all.count.0 {
        fixture.memory.store((page * PAGE_SIZE) as usize, page);
    }
    let writer = std::thread::scope(|scope| {
        scope
            .spawn(|| -> anyhow::Result<Vec<f64>> {
                let own = rustix::thread::gettid().as_raw_nonzero().get();
                fixture.tracker.prepare_own_governor(&[own])?;
                fixture.tracker.govern(Some(f64::INFINITY))?;
                fixture.harvest()?;
                let mut times = Vec::with_capacity(WRITES);
                for number in 0..WRITES as u64 {
                    let page = number * 7919 % fixture.all.count.0;
                    let began = Instant::now();
                    fixture.memory.store((page * PAGE_SIZE) as usize, number);
                    times.push(began.elapsed().as_secs_f64() * 1e6);
                }
                Ok(times)
            })
            .join()
    });
    let mut times = writer.map_err(|_| anyhow::anyhow!("the writer panicked"))??;
    times.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!(
        "a first write that nobody delays: p50 {:.1} us, p99 {:.1} us, most {:.1} us",
        at(0.5),
        at(0.99),
        at(1.0)
    );
    report.figure("undelayed_write_us", vec![at(0.5), at(0.99), at(1.0)]);
    report.target("a first write that is not delayed: median, us", at(0.5), 100.0, Better::Lower);
    Ok(())
}

/// A writer looks at the clock all the time while 16 GiB change hands; every segment has been
/// written.
fn hands(report: &mut Report) -> anyhow::Result<()> {
    let fixture = Fixture::new(LARGE)?;
    let there = |number: u64| (number * SPACING % LARGE) as usize;
    for number in 0..LARGE / SPACING {
        fixture.memory.store(there(number), 1);
    }
    fixture.harvest()?;
    let (over, longest, writer) = (AtomicBool::new(false), AtomicU64::new(0), AtomicI32::new(0));
    let (mut gaps, mut times) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| -> anyhow::Result<()> {
        scope.spawn(|| {
            writer.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Release);
            let mut rng = fastrand::Rng::with_seed(1);
            while !over.load(Ordering::Relaxed) {
                let number = rng.u64(..);
                let began = Instant::now();
                fixture.memory.store(there(number >> 32), number);
                longest.fetch_max(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
            }
        });
        while writer.load(Ordering::Acquire) == 0 {
            std::thread::yield_now();
        }
        let result = (|| {
            fixture.tracker.prepare_own_governor(&[writer.load(Ordering::Acquire)])?;
            std::thread::sleep(Duration::from_millis(200));
            for to in [true, false, true, false, true, false] {
                fixture.tracker.govern(to.then_some(f64::INFINITY))?;
                longest.store(0, Ordering::Relaxed);
                let began = Instant::now();
                fixture.harvest()?;
                times.push(began.elapsed().as_secs_f64() * 1e3);
                gaps.push(longest.load(Ordering::Relaxed) as f64 / 1e6);
                println!(
                    "16 GiB {}: {} segments governed, {:.0} ms, longest write {:.2} ms",
                    if to { "to the governor" } else { "back" },
                    fixture.tracker.governed_segments(),
                    times[times.len() - 1],
                    gaps[gaps.len() - 1]
                );
            }
            anyhow::Ok(())
        })();
        over.store(true, Ordering::Relaxed);
        result
    })?;
    report.figure("change_of_hands_16_gib_ms", median(&times));
    let worst = gaps.iter().copied().fold(0.0, f64::max);
    report.target("16 GiB change hands: longest gap of a writer, ms", worst, 20.0, Better::Lower);
    Ok(())
}
