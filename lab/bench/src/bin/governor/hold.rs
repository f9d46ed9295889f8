//! A guest in QEMU under the governor: whether the rate is held, what it costs the monitor, and
//! what a guest loses that does not write.
//!
//! All of memory is harvested four times a second, so that pages become clean again. A guest's
//! speed is what its counter says, read from its memory from outside.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use godwit_bench::report::{Better, Report, median};
use godwit_memory::RamBlock;
use godwit_stamp::settings::Mode;
use godwit_testbed::{BeaconPlace, GuestConfig, Observer, QemuBuild, TestVm, VmConfig};
use godwit_track::{DirtyTracker, GovernorMeasures, PagemapTracker, Way};
use godwit_units::{ByteCount, PageCount, PageRun};
use godwit_vcpu_throttle::VcpuThrottle;
use serde_json::json;

use crate::Options;

const LIMIT: Duration = Duration::from_secs(120);
const HARVEST: Duration = Duration::from_millis(250);
const TIME: Duration = Duration::from_secs(2);
const RATES: [f64; 6] = [1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0];
const MEMORY: u64 = 1 << 30;

/// A guest and its tracker.
struct Fixture {
    vm: TestVm,
    tracker: PagemapTracker,
    all: PageRun,
}

impl Fixture {
    fn new(guest: GuestConfig, cpus: u32) -> anyhow::Result<Self> {
        let build = QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
        let vm = TestVm::source(&VmConfig { cpus, ..VmConfig::new(&build, guest) })?;
        vm.wait_ready(LIMIT)?;
        vm.wait_for_heartbeats_after(Instant::now(), 10, LIMIT)?;
        let block = RamBlock::open("mem", vm.ram_file(), 0, guest.memory, false)?;
        let all = block.all();
        let tracker = PagemapTracker::start(vm.pid(), &[block])?;
        tracker.prepare_governor(Way::Call, vm.vcpu_threads())?;
        Ok(Self { vm, tracker, all })
    }

    /// Runs for a while with all of memory harvested again and again; what the governor did, and
    /// how long a monitor takes to answer, in milliseconds.
    fn under(
        &mut self,
        rate: f64,
        time: Duration,
    ) -> anyhow::Result<(f64, GovernorMeasures, Vec<f64>)> {
        let Self { vm, tracker, all } = self;
        tracker.govern(Some(rate))?;
        let over = AtomicBool::new(false);
        let harvest = || tracker.harvest(0, *all, PageCount::ZERO, &mut |_| {});
        harvest()?;
        std::thread::scope(|scope| {
            let harvester = scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::thread::sleep(HARVEST);
                    harvest()?;
                }
                anyhow::Ok(())
            });
            std::thread::sleep(Duration::from_millis(200));
            let (began, before) = (Instant::now(), tracker.governor_measures());
            let mut answers = Vec::new();
            while began.elapsed() < time {
                let asked = Instant::now();
                vm.status()?;
                answers.push(asked.elapsed().as_secs_f64() * 1e3);
                std::thread::sleep(Duration::from_micros(3300));
            }
            let (took, after) = (began.elapsed().as_secs_f64(), tracker.governor_measures());
            over.store(true, Ordering::Relaxed);
            harvester.join().map_err(|_| anyhow::anyhow!("the harvester panicked"))??;
            let measures = GovernorMeasures {
                dirtied: after.dirtied - before.dirtied,
                delayed: after.delayed - before.delayed,
                waited: after.waited.saturating_sub(before.waited),
                others: after.others - before.others,
                ..after
            };
            Ok((measures.dirtied as f64 / took, measures, answers))
        })
    }

    /// How far the guest counts in a second.
    fn speed(&self) -> anyhow::Result<f64> {
        let place = BeaconPlace::find(self.vm.ram_file())?;
        let observer = Observer::start(place, self.vm.ram_file(), self.vm.ram_file())?;
        std::thread::sleep(TIME);
        let to = observer.started().elapsed();
        let (_, trace) = observer.finish_with_course()?;
        Ok(trace.rate(Duration::from_millis(100), to.saturating_sub(Duration::from_millis(100))))
    }

    /// The same while all of its memory is harvested every [`HARVEST`].
    fn speed_while_harvested(&self) -> anyhow::Result<f64> {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::thread::sleep(HARVEST);
                    let _ = self.tracker.harvest(0, self.all, PageCount::ZERO, &mut |_| {});
                }
            });
            let speed = self.speed();
            over.store(true, Ordering::Relaxed);
            speed
        })
    }
}

fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let at = ((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1));
    values.get(at).copied().unwrap_or(f64::NAN)
}

/// Both parts.
pub(crate) fn run(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    rates(options, report)?;
    readers(options.rounds, report)
}

fn rates(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let guest = GuestConfig {
        memory: ByteCount(MEMORY),
        mode: Mode::Full,
        working_set: ByteCount(256 << 20),
        fill: ByteCount(256 << 20),
        ..GuestConfig::standard()
    };
    println!(
        "{:>9} {:>9} {:>7} {:>9} {:>11} {:>10} {:>10} {:>8}",
        "rate", "held", "ratio", "delayed", "longest ms", "QMP p50 ms", "QMP p99 ms", "others"
    );
    let mut fixture = Fixture::new(guest, 1)?;
    let (mut rows, mut all_answers, mut free) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        free.push(fixture.under(f64::INFINITY, TIME)?.0);
    }
    let free = median(&free);
    println!("{:>9} {free:>9.0}", "no limit");
    let mut worst: f64 = 0.0;
    for rate in RATES {
        let mut held = Vec::new();
        let mut answers = Vec::new();
        let mut last = GovernorMeasures::default();
        for _ in 0..options.rounds {
            let (seen, measures, mut times) = fixture.under(rate, TIME)?;
            held.push(seen);
            answers.append(&mut times);
            last = measures;
        }
        let held = median(&held);
        let (p50, p99) = (percentile(&mut answers, 0.5), percentile(&mut answers, 0.99));
        println!(
            "{rate:>9.0} {held:>9.0} {:>7.3} {:>9} {:>11.2} {p50:>10.2} {p99:>10.2} {:>8}",
            held / rate,
            last.delayed,
            last.longest_wait.as_secs_f64() * 1e3,
            last.others
        );
        // What the guest cannot write, nobody can hold.
        if rate < 0.95 * free {
            worst = worst.max((held / rate - 1.0).abs());
        }
        rows.push(json!({ "rate": rate, "held": held, "qmp_p50_ms": p50, "qmp_p99_ms": p99 }));
        all_answers.append(&mut answers);
    }
    report.figure("unlimited_pages_dirtied_per_second", free);
    report.figure("rates", rows);
    report.target("rate held: largest deviation", worst, 0.05, Better::Lower);
    report.target(
        "QMP under the governor: p99, ms",
        percentile(&mut all_answers, 0.99),
        10.0,
        Better::Lower,
    );
    Ok(())
}

fn readers(rounds: usize, report: &mut Report) -> anyhow::Result<()> {
    let guest = GuestConfig { mode: Mode::Rate, rate: 0, ..GuestConfig::standard() };
    let fixture = Fixture::new(guest, 1)?;
    let (mut free, mut governed) = (Vec::new(), Vec::new());
    // By turns, as the speed of an emulated guest drifts.
    for _ in 0..rounds {
        free.push(fixture.speed()?);
        fixture.tracker.govern(Some(2000.0))?;
        governed.push(fixture.speed_while_harvested()?);
        println!("{:?}", fixture.tracker.governor_measures());
        fixture.tracker.govern(None)?;
        fixture.tracker.harvest(0, fixture.all, PageCount::ZERO, &mut |_| {})?;
    }
    let (free, governed) = (median(&free), median(&governed));
    let mut throttle = VcpuThrottle::new(fixture.vm.pid(), fixture.vm.vcpu_threads());
    throttle.set(0.9)?;
    let throttled = fixture.speed()?;
    throttle.set(0.0)?;
    println!(
        "a guest that reads and computes: {:.1} % under the governor, {:.1} % under a vCPU \
         throttle of 90 %",
        governed / free * 100.0,
        throttled / free * 100.0
    );
    report.figure("reader_speed_under_vcpu_throttle_90", throttled / free);
    report.target(
        "a guest that reads and computes, at 2,000: speed",
        governed / free,
        0.97,
        Better::Higher,
    );
    Ok(())
}
