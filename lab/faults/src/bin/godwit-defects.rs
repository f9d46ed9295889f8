//! `make defects`: each deliberate defect so many times, and who found it; and QEMU's own migration
//! as a control.
//!
//! Keeps two promises: what was not found is counted, and a run that failed counts as not found;
//! and Ctrl-C ends all VMs.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use godwit_bench::report::{Better, Report};
use godwit_faults::defects::{Bench, CONTROL, DEFECTS, Defect, Rig, own_moves};
use godwit_testbed::end_children_on_interrupt;
use serde_json::json;

const PAGE: &str = "docs/reliability.md";
const BEGIN: &str = "<!-- made by `make defects`: begin -->\n";
const END: &str = "<!-- made by `make defects`: end -->\n";

/// Makes deliberate defects in real moves, and counts who finds them.
#[derive(Debug, Parser)]
struct Arguments {
    /// How often each is made
    #[arg(long, default_value_t = 100)]
    times: u32,
    /// These only, by their names; none: the control; qemu: its own migration
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Moves of QEMU's own
    #[arg(long, default_value_t = 30)]
    own_moves: u32,
    /// Put the table into docs/reliability.md, also when this is a part of it
    #[arg(long)]
    table: bool,
}

/// How often a defect was found by whom.
#[derive(Debug, Default)]
struct Count {
    runs: u32,
    guest: u32,
    verify: u32,
    audit: u32,
    example: Option<String>,
    words: Vec<String>,
}

fn count(
    defect: &Defect,
    times: u32,
    rig: &mut Option<Rig>,
    interrupted: &AtomicBool,
) -> Option<Count> {
    let mut count = Count::default();
    for number in 1..=times {
        if interrupted.load(Ordering::Relaxed) {
            return None;
        }
        if rig.is_none() {
            match Rig::start(defect.bench) {
                Ok(Some(made)) => *rig = Some(made),
                Ok(None) => return None,
                Err(problem) => {
                    count.runs += 1;
                    count.words.push(format!("{problem:#}"));
                    continue;
                }
            }
        }
        count.runs += 1;
        let since = Instant::now();
        match rig.as_mut().map(|rig| rig.run(defect)) {
            Some(Ok(found)) => {
                count.guest += u32::from(found.guest.is_some());
                count.verify += u32::from(found.verify.is_some());
                count.audit += u32::from(found.audit.is_some());
                count.example = count.example.or(found.audit).or(found.verify);
                count.words.extend(found.misfits);
            }
            Some(Err(problem)) => {
                count.words.push(format!("{problem:#}"));
                *rig = None;
            }
            None => {}
        }
        println!(
            "{} {number}/{times}: found by the guest {}, --verify {}, --audit {} ({:.1} s)",
            defect.name,
            count.guest,
            count.verify,
            count.audit,
            since.elapsed().as_secs_f64()
        );
    }
    Some(count)
}

/// A line of the table.
fn line(defect: &Defect, count: Option<&Count>) -> String {
    let Some(Count { runs, guest, verify, audit, .. }) = count else {
        return format!("| {} | not tried | | |\n", defect.what);
    };
    let of = |found: &u32, asked: bool| {
        if asked { format!("{found} of {runs}") } else { "does not look".to_owned() }
    };
    let (verify, audit) =
        (of(verify, defect.verify.is_some()), of(audit, !defect.audit.is_empty()));
    format!("| {} | {guest} of {runs} | {verify} | {audit} |\n", defect.what)
}

fn targets(report: &mut Report, defect: &Defect, count: &Count) {
    let control = defect.name == CONTROL.name;
    let limit = if control { 0.0 } else { 99.0 };
    let better = if control { Better::Lower } else { Better::Higher };
    let asked = [
        ("the guest", count.guest, true),
        ("--verify", count.verify, defect.verify.is_some()),
        ("--audit", count.audit, !defect.audit.is_empty()),
    ];
    for (who, found, _) in asked.into_iter().filter(|(_, _, asked)| *asked) {
        let share = 100.0 * f64::from(found) / f64::from(count.runs.max(1));
        report.target(format!("{}: found by {who}, % of runs", defect.what), share, limit, better);
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let interrupted = end_children_on_interrupt().context("no signals")?;
    let wanted =
        |name: &str| arguments.only.is_empty() || arguments.only.iter().any(|only| only == name);
    let mut report = Report::new("defects");
    let mut rows = String::from("| defect | the guest | `--verify` | `--audit` |\n");
    rows += "| --- | --- | --- | --- |\n";
    let mut figures = BTreeMap::new();
    for bench in [Bench::Memory, Bench::Hints, Bench::Disk, Bench::Direct] {
        let mut rig = None;
        for defect in DEFECTS.iter().chain([&CONTROL]).filter(|defect| defect.bench == bench) {
            let counted =
                wanted(defect.name).then(|| count(defect, arguments.times, &mut rig, &interrupted));
            let counted = counted.flatten();
            rows += &line(defect, counted.as_ref());
            if let Some(counted) = &counted {
                targets(&mut report, defect, counted);
                let Count { runs, guest, verify, audit, example, words } = counted;
                figures.insert(
                    defect.name,
                    json!({ "runs": runs, "guest": guest, "verify": verify, "audit": audit,
                        "example": example, "misfits": words }),
                );
            }
        }
    }
    if interrupted.load(Ordering::Relaxed) {
        println!("ended by a signal; all VMs are ended");
        return Ok(ExitCode::from(130));
    }
    report.figure("defects", serde_json::to_value(&figures)?);
    if wanted("qemu") {
        rows += "\n| QEMU's own migration, under TCG | moves | with a BUG or a dead guest |\n";
        rows += "| --- | --- | --- |\n";
        let mut figures = Vec::new();
        for (version, own) in own_moves(arguments.own_moves, Duration::from_secs(60))? {
            let _ = writeln!(rows, "| {version} | {} | {} |", own.moves, own.damaged);
            figures.push(json!({ "qemu": version, "moves": own.moves, "damaged": own.damaged,
                "evidence": own.evidence }));
        }
        report.figure("own_migration", figures);
    }
    let met = report.targets().iter().all(|target| target.met);
    report.finish()?;
    if arguments.table || arguments.only.is_empty() {
        let page = std::fs::read_to_string(PAGE).with_context(|| format!("cannot read {PAGE}"))?;
        let (before, rest) = page.split_once(BEGIN).context("no place for the table")?;
        let (_, after) = rest.split_once(END).context("the place for the table has no end")?;
        std::fs::write(PAGE, [before, BEGIN, &rows, END, after].concat())?;
        println!("table written to {PAGE}");
    }
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("{problem:#}");
            ExitCode::FAILURE
        }
    }
}
