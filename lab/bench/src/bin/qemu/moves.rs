//! One guest moved again and again: does all of its memory arrive every time?
//!
//! The guest writes as fast as it can and checks itself all the while; before each handover the
//! digests of both sides' memory are compared as well. The machine that just arrived is the source
//! of the next move, so a page that was lost anywhere on the way stays in the guest for its checks
//! to find. A move that fails leaves the guest where it was, and the next destination is tried; a
//! guest that runs nowhere any more, such as QEMU 7.2's own migration leaves now and then, counts
//! as lost and ends the run.

use std::time::{Duration, Instant};

use anyhow::Context;
use godwit_bench::report::{Better, Report, median};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    BeaconPlace, Ended, Godwit, GuestConfig, Observation, Observer, QemuBuild, TestVm, VmConfig,
    builds,
};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);
/// A receiver whose migration failed ends too, soon if at all.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
/// Between moves and at the end; a second is several looks at every page, ten are one at every
/// word.
const BEATS_BETWEEN: usize = 10;
const BEATS_AT_THE_END: usize = 100;

/// Moves a guest `count` times and enters what was found into `report`.
pub(crate) fn repeat(count: usize, report: &mut Report) -> anyhow::Result<()> {
    let godwit = Godwit::built()?;
    let build = oldest()?;
    println!(
        "\n{build}, a guest writing at full speed over 128 MiB, {count} moves in a row, each with \
         --verify"
    );
    let config = VmConfig::new(&build, GuestConfig { mode: Mode::Full, ..GuestConfig::standard() });
    let mut here = TestVm::source(&config)?;
    here.wait_ready(LIMIT)?;
    let mut place = None;
    let mut tally = Tally::default();
    for number in 1..=count {
        here.wait_for_heartbeats_after(Instant::now(), BEATS_BETWEEN, LIMIT)?;
        let place = match place {
            Some(place) => place,
            None => *place.insert(BeaconPlace::find(here.ram_file())?),
        };
        let there = TestVm::destination(&config)?;
        let observer = Observer::start(place, here.ram_file(), there.ram_file())?;
        let (receive, address) = godwit.receive(&there, &[])?;
        let ended = godwit.migrate(&here, &address, &["--verify"])?.wait(LIMIT)?;
        let moved = ended.last()["outcome"] == "migrated";
        let received = receive.wait(if moved { LIMIT } else { AFTER_FAILURE });
        let alive = if moved { &there } else { &here };
        let runs = alive.wait_for_heartbeats_after(Instant::now(), 2, LIMIT);
        tally.enter(number, &ended, &observer.finish()?);
        if let Err(problem) = received {
            println!("    godwit receive: {problem:#}");
        }
        if moved {
            tally.bugs.extend(here.bugs());
            here = there;
        }
        if let Err(problem) = runs {
            println!("    the guest runs nowhere: {problem:#}");
            tally.lost += 1;
            break;
        }
    }
    if tally.lost == 0 {
        here.wait_for_heartbeats_after(Instant::now(), BEATS_AT_THE_END, LIMIT)?;
    }
    tally.bugs.extend(here.bugs());
    tally.finish(&build, report);
    Ok(())
}

fn oldest() -> anyhow::Result<QemuBuild> {
    builds()
        .into_iter()
        .min_by_key(|build| build.version)
        .context("there is no QEMU: run `make qemu`")
}

#[derive(Default)]
struct Tally {
    failed: usize,
    unverified: usize,
    on_both: usize,
    lost: usize,
    bugs: Vec<String>,
    downtimes: Vec<f64>,
    totals: Vec<f64>,
    moves: Vec<Value>,
}

impl Tally {
    fn enter(&mut self, number: usize, ended: &Ended, seen: &Observation) {
        let last = ended.last();
        let moved = last["outcome"] == "migrated";
        let verified = last["verified"] == true;
        self.failed += usize::from(!moved);
        self.unverified += usize::from(moved && !verified);
        self.on_both += usize::from(seen.ran_on_both);
        let gap = seen.switchover.map_or(f64::NAN, |gap| gap.length.as_secs_f64() * 1e3);
        if moved {
            self.downtimes.push(gap);
            self.totals.push(last["total_ms"].as_f64().unwrap_or(f64::NAN));
        }
        println!(
            "{number:>4}  {:<10} total {:>6} ms  gap {gap:>6.1} ms  rounds {:>3}  digests {}",
            last["outcome"].as_str().unwrap_or("no outcome"),
            last["total_ms"],
            last["rounds"],
            if verified { "equal" } else { "NOT EQUAL" },
        );
        if !moved {
            println!("    {}", ended.errors.trim());
        }
        self.moves.push(json!({ "guest_gap_ms": gap, "migrate": last }));
    }

    fn finish(self, build: &QemuBuild, report: &mut Report) {
        self.bugs.iter().take(20).for_each(|bug| println!("{bug}"));
        report.figure("qemu", build.to_string());
        report.figure("median_guest_gap_ms", median(&self.downtimes));
        report.figure("median_total_ms", median(&self.totals));
        report.figure("moves", self.moves);
        let none = |count: usize| count as f64;
        let name =
            |what: &str| format!("{} moves in a row: {what}", self.totals.len() + self.failed);
        report.target(name("guests lost"), none(self.lost), 0.0, Better::Lower);
        report.target(name("that failed"), none(self.failed), 0.0, Better::Lower);
        report.target(name("without equal digests"), none(self.unverified), 0.0, Better::Lower);
        report.target(name("BUG lines of the guest"), none(self.bugs.len()), 0.0, Better::Lower);
        report.target(name("with the guest on both sides"), none(self.on_both), 0.0, Better::Lower);
    }
}
