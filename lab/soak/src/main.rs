//! `make soak`: many VMs at once, of every kind, moved to and fro under load, from one seed.
//!
//! Keeps two promises: Ctrl-C ends all VMs and still leaves a report; and the exit code is 0 only
//! where all targets were met, 1 where one was missed, 130 where somebody has ended it.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use godwit_faults::defects::{Defect, defect_of_memory};
use godwit_soak::damage::{DAMAGED, Told, damage};
use godwit_soak::draw::{OneFault, Strikes, draw, one_fault};
use godwit_soak::load::{Kind, Load};
use godwit_soak::machine::{chosen, machine_named};
use godwit_soak::report::{self, Asked, Part};
use godwit_soak::run::{Soak, Until};
use godwit_testbed::end_children_on_interrupt;
use godwit_units::{format_duration, parse_duration};

/// How often the table is drawn.
const PAUSE: Duration = Duration::from_millis(500);

/// Moves many VMs to and fro, and looks whether their guests are unharmed.
#[derive(Debug, Parser)]
struct Arguments {
    /// So many moves in all
    #[arg(long, default_value_t = 500)]
    moves: usize,
    /// Instead, for so long (30min, 8h)
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration)]
    time: Option<Duration>,
    /// Instead, so many moves of each VM
    #[arg(long, value_name = "MOVES", conflicts_with = "time",
          value_parser = clap::value_parser!(u16).range(1..))]
    each: Option<u16>,
    /// The VMs with a witness, a program that has a check of its own, instead of the others
    #[arg(long, conflicts_with = "only")]
    witnesses: bool,
    /// What chance begins with
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// These VMs only, by their names, with commas between
    #[arg(long, value_parser = machine_named, value_delimiter = ',')]
    only: Vec<&'static str>,
    /// The number of the first move of each VM, on which its settings depend
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Of a hundred moves, so many are struck by a fault of docs/reliability.md
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(..=100))]
    faults: u8,
    /// Instead, each move is struck by this one of them, at a step of a migration if one is named
    /// (11, 11@state)
    #[arg(long, value_name = "NUMBER[@STEP]", value_parser = one_fault, conflicts_with = "faults")]
    fault: Option<OneFault>,
    /// What keeps the host busy meanwhile
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cpu,memory,io")]
    load: Vec<Kind>,
    /// No load beside the VMs
    #[arg(long, conflicts_with = "load")]
    no_load: bool,
    /// Put the table into docs/reliability.md, also when these are not all VMs
    #[arg(long)]
    table: bool,
    /// No moves: instead damage the disk of fio and the memory of stress-ng, which have to tell
    #[arg(long, conflicts_with_all = ["only", "witnesses", "time", "each", "table"])]
    damage: bool,
    /// What each move gets wrong on purpose, as `make defects` calls it
    #[arg(long, hide = true, value_parser = defect_of_memory)]
    defect: Option<&'static Defect>,
}

/// Damages the work of witnesses, one after the other.
fn damage_all() -> anyhow::Result<ExitCode> {
    end_children_on_interrupt().context("no signals")?;
    let mut skipped = 0;
    for witness in DAMAGED {
        println!("{witness}: starting it, and damaging what it has");
        match damage(witness).with_context(|| format!("{witness}"))? {
            Some(Told { line, pages, after }) => {
                let after = format_duration(after);
                println!("{witness} tells after {after} and a bit of {pages} pages: {line}");
            }
            None => skipped += 1,
        }
    }
    ensure!(skipped == 0, "{skipped} of {} witnesses were not there", DAMAGED.len());
    Ok(ExitCode::SUCCESS)
}

fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.damage {
        return damage_all();
    }
    ensure!(arguments.moves > 0, "--moves 0: use 1 or more");
    let vms = chosen(&arguments.only, arguments.witnesses);
    let kinds = if arguments.no_load { &[][..] } else { &arguments.load };
    let words: Vec<String> = kinds.iter().map(|kind| format!("{kind:?}").to_lowercase()).collect();
    let load = if words.is_empty() { "none".to_owned() } else { words.join(", ") };
    let (until, moves) = match (arguments.time, arguments.each) {
        (Some(time), _) => (Until::Time(time), 1),
        (None, Some(each)) => (Until::Each(each.into()), usize::from(each) * vms.len()),
        (None, None) => (Until::Moves(arguments.moves), arguments.moves),
    };
    if let Some(only) = arguments.fault {
        let strikes = Strikes::every(only);
        let spared = vms.iter().find(|vm| draw(arguments.seed, vm, 0, &strikes).strike.is_none());
        if let Some(vm) = spared {
            bail!("{} is nothing that can strike {}: use --only", strikes.words().trim(), vm.name);
        }
    }
    let asked = Asked { seed: arguments.seed, moves, vms, load, defect: arguments.defect };
    // Every wait for one of them fails then.
    let heard = end_children_on_interrupt().context("no signals")?;
    let own = Arc::clone(&heard);
    let strikes = arguments.fault.map_or_else(|| Strikes::some(arguments.faults), Strikes::every);
    let soak = Soak::new(asked, until, (arguments.from, strikes), own);
    let load = Load::start(kinds)?;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..soak.asked.vms.len())
            .map(|place| (scope, place))
            .map(|(scope, place)| {
                scope.spawn({
                    let soak = &soak;
                    move || soak.work(place)
                })
            })
            .collect();
        let mut drawn = false;
        while workers.iter().any(|worker| !worker.is_finished()) {
            soak.table.draw(drawn);
            drawn = true;
            std::thread::sleep(PAUSE);
        }
        soak.table.draw(drawn);
    });
    drop(load);
    let (rows, seconds) = (soak.rows(), soak.since.elapsed().as_secs_f64());
    let met = report::finish(&rows, &soak.asked, seconds)?;
    let interrupted = heard.load(Ordering::Relaxed);
    let whole = arguments.only.is_empty() && arguments.from == 0;
    let part = if arguments.witnesses { Part::Witnesses } else { Part::Kinds };
    let long = arguments.time.is_some() || moves >= part.worth();
    // One that was ended when it had all the moves that it was to have is whole.
    let complete = (!interrupted || met && arguments.time.is_none()) && arguments.defect.is_none();
    if (arguments.table || whole && long) && complete {
        report::write_page(&rows, &soak.asked, seconds, part)?;
    }
    if interrupted {
        println!("ended by a signal; all VMs are ended");
        return Ok(ExitCode::from(130));
    }
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> ExitCode {
    run(&Arguments::parse()).unwrap_or_else(|problem| {
        eprintln!("{problem:#}");
        ExitCode::FAILURE
    })
}
