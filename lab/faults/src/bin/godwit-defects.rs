//! `make defects`: each deliberate defect so many times, and who found it; and QEMU's own migration
//! as a control.
//!
//! Keeps two promises: what was not found is counted, and a run that failed counts as not found;
//! and Ctrl-C ends all VMs, with what was found until then kept for `--add`.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use godwit_faults::defects::{Bench, CONTROL, DEFECTS, Defect, Found, Rig, own_moves};
use godwit_faults::tally::{Row, Tally};
use godwit_testbed::{builds_for, end_children_on_interrupt};

/// So many runs of each defect are worth a new table.
const WORTH: u32 = 100;
/// One move by QEMU itself.
const OWN_LIMIT: Duration = Duration::from_secs(60);

/// Makes deliberate defects in real moves, and counts who finds them.
#[derive(Debug, Parser)]
struct Arguments {
    /// How often each is made
    #[arg(long, default_value_t = 100)]
    times: u32,
    /// These only, by their names; none: the control; qemu: its own migration
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Moves of each QEMU's own
    #[arg(long, default_value_t = 30)]
    own_moves: u32,
    /// Add to the runs before: each is made as often as is missing
    #[arg(long)]
    add: bool,
    /// Put the table into docs/reliability.md, also when this is a part of it
    #[arg(long)]
    table: bool,
}

impl Arguments {
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }
}

/// One run of `defect`; `None` where there can be no such machines here.
fn one(defect: &Defect, rig: &mut Option<Rig>) -> anyhow::Result<Option<Found>> {
    if rig.is_none() {
        *rig = Rig::start(defect.bench)?;
    }
    rig.as_mut().map(|rig| rig.run(defect)).transpose()
}

/// Makes `defect` until there are so many runs of it, or somebody has `interrupted` it.
fn make(
    defect: &Defect,
    times: u32,
    (rig, tally): (&mut Option<Rig>, &mut Tally),
    interrupted: &AtomicBool,
) -> anyhow::Result<()> {
    while tally.count(defect.name).runs < times {
        let since = Instant::now();
        let found = match one(defect, rig) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(()),
            Err(problem) => {
                *rig = None;
                Found { misfits: vec![format!("{problem:#}")], ..Found::default() }
            }
        };
        // What was broken by whoever ends it is no finding.
        if interrupted.load(Ordering::Relaxed) {
            return Ok(());
        }
        tally.add(Row::Defect {
            name: defect.name.to_owned(),
            guest: found.guest.is_some(),
            verify: found.verify.is_some(),
            audit: found.audit.is_some(),
            idle: found.idle,
            seconds: since.elapsed().as_secs_f64(),
            example: found.audit.or(found.verify),
            misfits: found.misfits,
        })?;
        let count = tally.count(defect.name);
        println!(
            "{} {}/{times}: found by the guest {}, --verify {}, --audit {} ({:.1} s)",
            defect.name,
            count.runs,
            count.guest,
            count.verify,
            count.audit,
            since.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

/// Has each QEMU move guests by itself until there are so many moves of it.
fn make_own(times: u32, tally: &mut Tally, interrupted: &AtomicBool) -> anyhow::Result<()> {
    let mut builds = builds_for("defects");
    builds.sort_by_key(|build| build.version);
    for build in builds {
        let name = build.to_string();
        if tally.own(&name).0 >= times || interrupted.load(Ordering::Relaxed) {
            continue;
        }
        let mut since = Instant::now();
        let made = own_moves(&build, OWN_LIMIT, |own| {
            if interrupted.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let seconds = since.elapsed().as_secs_f64();
            since = Instant::now();
            let build = name.clone();
            tally.add(Row::Qemu {
                build,
                damaged: own.damaged,
                seconds,
                evidence: own.evidence,
            })?;
            let (moves, damaged) = tally.own(&name);
            println!("{name} by itself {moves}/{times}: {damaged} damaged ({seconds:.1} s)");
            Ok(moves < times)
        });
        match made {
            Err(_) if interrupted.load(Ordering::Relaxed) => {}
            made => made.with_context(|| format!("{name} by itself"))?,
        }
    }
    Ok(())
}

fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let interrupted = end_children_on_interrupt().context("no signals")?;
    let mut tally = Tally::begin(arguments.add)?;
    for bench in [Bench::Memory, Bench::Hints, Bench::Disk, Bench::Direct] {
        let mut rig = None;
        let all = DEFECTS.iter().chain([&CONTROL]).filter(|defect| defect.bench == bench);
        for defect in all.filter(|defect| arguments.wants(defect.name)) {
            if !interrupted.load(Ordering::Relaxed) {
                make(defect, arguments.times, (&mut rig, &mut tally), &interrupted)?;
            }
        }
    }
    if arguments.wants("qemu") {
        make_own(arguments.own_moves, &mut tally, &interrupted)?;
    }
    if interrupted.load(Ordering::Relaxed) {
        println!("ended by a signal; all VMs are ended");
        return Ok(ExitCode::from(130));
    }
    let met = tally.finish()?;
    if arguments.table || (arguments.only.is_empty() && arguments.times >= WORTH) {
        tally.write_page()?;
    }
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> ExitCode {
    run(&Arguments::parse()).unwrap_or_else(|problem| {
        eprintln!("{problem:#}");
        ExitCode::FAILURE
    })
}
