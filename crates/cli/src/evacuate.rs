//! `godwit evacuate`: empty this host.
//!
//! ```text
//!   from       the VMs that the host has, as its manager tells
//!   hosts      destinations whose godwitd is asked
//!   limits     what is changed while it runs
//!   control    the socket by which it is steered, from both ends
//!   tell       what is printed: the plan, each step, the end
//!   live       the moves under way as a table that is rewritten
//!   desk       the coordinator at work
//!   reach      the host that is emptied, this one or another
//!   shared     several coordinators, one of which acts
//! ```

mod control;
mod desk;
mod from;
mod hosts;
mod limits;
mod live;
mod reach;
mod shared;
mod tell;

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::Args;
use godwit_daemon::client::HostAddress;
use godwit_engine::handle::all_settings;
use godwit_evacuate::{EvacuateError, List, Plan, RedbStore, Runner};
use godwit_fleet::{Evacuation, NoFaults, run as run_virtually};
use godwit_qemu::run_directory;
use godwit_units::{GRAMMAR, Rate};

use crate::layout;
use crate::output::json_line;
use crate::process::{self, CANCELLED, FAILED, OPERATOR};
use crate::processors::Processors;
use crate::run_directory::hold_name;
use control::serve;
use desk::{Desk, End, coordinate};
use from::From;
use limits::{Limit, MOST_AT_ONCE};
use reach::Reach;
use shared::StoreArguments;

pub(crate) use control::that_run;

/// Empty this host: move its VMs to where there is room, under one bandwidth budget.
///
/// LIST is a file, in TOML or JSON, of the VMs and of the destinations, or of destinations alone
/// where --from says whose VMs leave: docs/evacuate.md. Each VM gets a destination with room for
/// it; those that take the least time go first, and those under way share the budget. The plan and
/// every step are written down: when this command is killed, the moves under way go on, and
/// `--resume` takes them up. Exit codes: 0 every VM has moved; 1 some are where they were; 3 an
/// operator has to look at one; 130 cancelled, with --resume to go on.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR)]
pub(crate) struct Arguments {
    /// The file that lists VMs and destinations
    #[arg(value_name = "LIST")]
    #[arg(required_unless_present_any =
        ["resume", "pause", "proceed", "cancel", "status", "set", "to"])]
    list: Option<PathBuf>,

    /// Move them to this host too, whose godwitd is asked for room and destinations:
    /// godwitd://HOST, with :PORT and /WAY as needed; more than once for several
    #[arg(long, value_name = "HOST", conflicts_with = "resume")]
    to: Vec<HostAddress>,

    /// Encrypt with this host's keys in DIR, as `godwit migrate --keys` does
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    keys: Option<PathBuf>,

    /// Whose VMs leave: libvirt or libvirt:URI for the domains that run, proxmox for the VMs of
    /// this node; LIST then says only where to
    #[arg(long, value_name = "MANAGER", conflicts_with = "resume")]
    from: Option<From>,

    /// Of these only those of these names
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "from")]
    only: Vec<String>,

    /// But not those of these names
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "from")]
    except: Vec<String>,

    /// What this evacuation is called, among others on this host
    #[arg(long, value_name = "NAME", default_value = "evacuation", value_parser = name)]
    name: String,

    /// What all moves together may send
    #[arg(long, value_name = "RATE", default_value = "1GiB/s")]
    bandwidth: Rate,

    /// Moves at once
    #[arg(long, value_name = "N", default_value = "4",
          value_parser = clap::value_parser!(u32).range(1..=MOST_AT_ONCE))]
    at_once: u32,

    /// Where the plan and the words of the moves are kept [default: beside the records of
    /// migrations]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,

    /// Tell what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,

    /// Go on with the evacuation of this name
    #[arg(long, conflicts_with_all = ["list", "dry_run"])]
    resume: bool,

    /// Tell the one that runs to begin no further move
    #[arg(long, group = "steer", conflicts_with_all = ["list", "resume"])]
    pause: bool,

    /// Tell it to go on
    #[arg(long = "continue", group = "steer", conflicts_with_all = ["list", "resume"])]
    proceed: bool,

    /// Tell it to cancel its moves and end
    #[arg(long, group = "steer", conflicts_with_all = ["list", "resume"])]
    cancel: bool,

    /// Ask it how far it is
    #[arg(long, group = "steer", conflicts_with_all = ["list", "resume"])]
    status: bool,

    /// Give the one that runs another budget, bandwidth=RATE or at-once=N, also for --resume
    #[arg(long, group = "steer", conflicts_with_all = ["list", "resume"])]
    #[arg(value_name = "KEY=VALUE", value_delimiter = ',')]
    set: Vec<Limit>,

    /// The most processor time for all moves together on this host, 100%: one processor; each
    /// gets as much of it as of the bandwidth
    #[arg(
        long,
        value_name = "PERCENT",
        default_value = "off",
        conflicts_with = "resume",
        value_parser = cpu_budget
    )]
    // By its whole name: an option that is always there, and may be off.
    cpu_budget: std::option::Option<NonZeroU32>,

    /// Have each move work on these processors of the host only, as in 0-3,8; for VMs of QEMU's
    #[arg(long, value_name = "LIST", conflicts_with = "resume")]
    cpus: Option<Processors>,

    /// When a move is over, run this command, as `godwit migrate --hook-after` does
    #[arg(long, value_name = "COMMAND", conflicts_with = "resume")]
    hook_after: Option<String>,

    #[command(flatten)]
    shared: StoreArguments,

    /// Print events and the report as lines of JSON
    #[arg(long)]
    json: bool,

    /// Options for each `godwit migrate`, behind --
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// A name that makes a file name, short enough to stand before that of a VM.
fn name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if (1..=15).contains(&text.len()) && text.chars().all(fits) {
        Ok(text.to_owned())
    } else {
        Err("use 1 to 15 letters, digits, '-' and '_'".to_owned())
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let done = match () {
        () if arguments.shared.is_hands() => reach::serve(arguments),
        () if arguments.pause => steer(arguments, "pause"),
        () if arguments.proceed => steer(arguments, "continue"),
        () if arguments.cancel => steer(arguments, "cancel"),
        () if arguments.status => steer(arguments, "status"),
        () if !arguments.set.is_empty() => steer(arguments, &limits::request(&arguments.set)),
        () => evacuate(arguments),
    };
    done.unwrap_or_else(|error| {
        let text = format!("{error:#}");
        crate::output::refusal(&text, arguments.json);
        ExitCode::from(FAILED)
    })
}

/// Tells the evacuation what to do, whichever way it is reached.
fn steer(arguments: &Arguments, request: &str) -> anyhow::Result<ExitCode> {
    if arguments.shared.is_shared() {
        shared::steer(arguments, request)
    } else {
        control::steer(arguments, request)
    }
}

/// Where everything of this evacuation is kept.
fn directory(arguments: &Arguments) -> anyhow::Result<PathBuf> {
    Ok(evacuations(arguments)?.join(&arguments.name))
}

/// Where all evacuations of this user are kept.
fn evacuations(arguments: &Arguments) -> anyhow::Result<PathBuf> {
    let parent = match &arguments.state_dir {
        Some(directory) => directory.clone(),
        None => {
            let records = crate::records::records();
            let records = records.context("there is no home: name a --state-dir")?;
            records.directory().with_file_name("evacuations")
        }
    };
    // Moves are started with other working directories in mind than this one's.
    std::path::absolute(&parent).context("--state-dir")
}

fn evacuate(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let directory = directory(arguments)?;
    let begins = arguments.list.is_some() || !arguments.to.is_empty();
    let plan = begins.then(|| planned(arguments)).transpose()?;
    if let Some(plan) = plan.as_ref().filter(|_| arguments.dry_run) {
        tell::plan(plan, arguments.json);
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.shared.is_shared() {
        return shared::evacuate(arguments, plan);
    }
    let place = directory.display().to_string();
    let store = directory.join("plan.redb");
    if plan.is_none() && !store.exists() {
        return Err(EvacuateError::NoPlan { place }.into());
    }
    private(&directory).with_context(|| place.clone())?;
    // Its moves are found by its name at their control sockets, wherever its plan is kept.
    let here = arguments.shared.on().is_none();
    let name = here.then(|| hold_name(&run_directory::path(), &arguments.name, &place));
    let _name = name.transpose()?;
    if plan.is_some() && store.exists() {
        return Err(EvacuateError::Planned { place }.into());
    }
    let old = plan.is_none().then(|| RedbStore::open(&store)).transpose()?;
    let known = old.as_ref().map(shared::read_plan).transpose()?.flatten();
    // Ctrl-C ends the wait for a host that does not answer.
    let mut reach = Reach::alone(arguments, known.as_ref(), &place)?;
    let cancel = process::cancel_on_signals();
    let (mut runner, events) = match (plan, old) {
        (_, Some(mut store)) => {
            Runner::uncancel(&mut store)?;
            Runner::resume(store, &place, reach.hands())?
        }
        (Some(plan), None) => {
            reach.clear()?;
            let plan = Plan { home: reach.home().filter(|_| !here).cloned(), ..plan };
            // The file has its name only when the plan is in it.
            let new = directory.join(format!("plan.redb.new{}", std::process::id()));
            let runner = Runner::begin(RedbStore::open(&new)?, &plan, &place, reach.hands());
            let linked = std::fs::hard_link(&new, &store);
            std::fs::remove_file(&new)?;
            linked.map_err(|error| match error.kind() {
                std::io::ErrorKind::AlreadyExists => {
                    EvacuateError::Planned { place: place.clone() }.into()
                }
                _ => anyhow::Error::from(error).context(place.clone()),
            })?;
            (runner?, Vec::new())
        }
        (None, None) => return Err(EvacuateError::NoPlan { place }.into()),
    };
    let (_socket, requests) = serve(&directory.join("control"))?;
    let names = runner.plan().clone();
    if !arguments.json {
        tell::heading(&names);
    }
    let began = Instant::now();
    let desk = Desk {
        arguments,
        names: &names,
        cancel: &cancel,
        requests: Some(&requests),
        shared: false,
    };
    if let End::Left = coordinate(&mut runner, &desk, &events)? {
        let text = "moves under way could not be cancelled, and go on: take them up by --resume";
        tell::note("left", text, arguments.json);
        return Ok(ExitCode::from(CANCELLED));
    }
    let report = runner.report();
    let cancelled = runner.wanted().cancelled;
    let whole = tell::whole_report(&names, &report, began.elapsed(), cancelled);
    std::fs::write(directory.join("report.json"), format!("{whole}\n"))?;
    if arguments.json {
        json_line(&whole);
    } else {
        print!("{}", tell::ended_text(&whole, layout::width(&std::io::stdout())));
    }
    Ok(exit_code(report.in_doubt as u64, report.stayed as u64, cancelled))
}

/// What tells what became of the VMs.
fn exit_code(in_doubt: u64, stayed: u64, cancelled: bool) -> ExitCode {
    match (in_doubt, stayed, cancelled) {
        (0, 0, _) => ExitCode::SUCCESS,
        (0, _, true) => ExitCode::from(CANCELLED),
        (0, _, false) => ExitCode::from(FAILED),
        _ => ExitCode::from(OPERATOR),
    }
}

/// A directory for this user alone.
fn private(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// The plan for the list, with its forecast.
fn planned(arguments: &Arguments) -> anyhow::Result<Plan> {
    let file = arguments.list.as_ref().map(|list| list.display().to_string());
    let file = file.unwrap_or_else(|| "--to".to_owned());
    if arguments.bandwidth == Rate::ZERO {
        bail!("--bandwidth 0: nothing would move");
    }
    let mut list = arguments.list.as_deref().map_or_else(|| Ok(List::default()), List::read)?;
    if let Some(from) = &arguments.from {
        list = list.of(&file, reach::vms(arguments, from)?)?;
    }
    let godwit = reach::program(arguments)?;
    hosts::ask(&mut list, &arguments.to, arguments.keys.as_deref(), &godwit)?;
    let mut plan = list.plan(&file, arguments.bandwidth, arguments.at_once)?;
    if plan.vms.is_empty() {
        bail!(
            "{file}: there is no VM in it: write [[vm]] entries, or name their manager by --from"
        );
    }
    plan.options = options(arguments);
    plan.cpu_percent = arguments.cpu_budget;
    let (vms, destinations, source) = plan.inventory();
    let mut evacuation = Evacuation::new(vms, destinations, vec![source]);
    plan.forecast_seconds = run_virtually(&mut evacuation, &mut NoFaults).seconds;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    plan.began_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    Ok(plan)
}

/// What the setting of that name takes: one move alone gets all of it.
fn cpu_budget(text: &str) -> Result<Option<NonZeroU32>, String> {
    let about = all_settings().find(|about| about.name == "cpu-budget");
    let about = about.ok_or("there is no such setting")?;
    let value = about.parse(text).map_err(|error| error.to_string())?;
    Ok(NonZeroU32::new(value.number()))
}

/// What each `godwit migrate` is told besides what is its own.
fn options(arguments: &Arguments) -> Vec<String> {
    let cpus = arguments.cpus.as_ref().map(|cpus| format!("--cpus={cpus}"));
    let hook = arguments.hook_after.as_ref().map(|command| format!("--hook-after={command}"));
    let keys = arguments.keys.as_ref().and_then(|dir| std::path::absolute(dir).ok());
    let keys = keys.map(|dir| format!("--keys={}", dir.display()));
    keys.into_iter().chain(cpus).chain(hook).chain(arguments.options.iter().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn each_move_is_told_its_processors_its_hook_and_what_stands_behind() {
        let words = ["evacuate", "l", "--cpus", "3,0-1", "--hook-after", "a b", "--", "--verify"];
        let line = Line::try_parse_from(words).unwrap();
        assert_eq!(options(&line.arguments), ["--cpus=0-1,3", "--hook-after=a b", "--verify"]);
        let budget = |text| Line::try_parse_from(["evacuate", "l", "--cpu-budget", text]);
        assert_eq!(budget("150%").unwrap().arguments.cpu_budget, NonZeroU32::new(150));
        assert_eq!(budget("off").unwrap().arguments.cpu_budget, None);
        assert!(budget("0").is_err() && budget("much").is_err() && budget("100001").is_err());
        let resumes = ["evacuate", "--resume", "--cpus", "1"];
        assert!(Line::try_parse_from(resumes).is_err(), "the plan says that already");
    }
}
