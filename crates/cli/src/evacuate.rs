//! `godwit evacuate`: empty this host.
//!
//! ```text
//!   from       the VMs that the host has, as its manager tells
//!   hosts      destinations whose godwitd is asked
//!   limits     what is changed while it runs
//!   control    the socket by which it is steered, from both ends
//!   tell       what is printed: the plan, each step, the end
//!   live       the moves under way as a table that is rewritten
//!   shared     several coordinators, one of which acts
//! ```

mod control;
mod from;
mod hosts;
mod limits;
mod live;
mod shared;
mod tell;

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::Receiver as Requests;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::Args;
use godwit_daemon::client::HostAddress;
use godwit_engine::Cancel;
use godwit_engine::handle::all_settings;
use godwit_evacuate::{EvacuateError, Event, List, Moves, Plan, RedbStore, Runner, Store};
use godwit_fleet::{Evacuation, NoFaults, run as run_virtually};
use godwit_qemu::run_directory;
use godwit_units::{GRAMMAR, Rate};
use serde_json::json;

use crate::layout;
use crate::output::json_line;
use crate::process::{self, CANCELLED, FAILED, OPERATOR};
use crate::processors::Processors;
use crate::run_directory::hold_name;
use control::{Asked, serve};
use from::From;
use limits::{Limit, MOST_AT_ONCE};
use live::Live;
use shared::StoreArguments;

/// How often moves are looked at.
const TICK: Duration = Duration::from_millis(100);
/// A terminal hears of those under way this often.
const NEWS: Duration = Duration::from_secs(5);
/// How often a store that is shared is asked what operators want, and told how far it is.
const HEED: Duration = Duration::from_millis(500);
/// How often moves are told their shares once more, where there are other coordinators.
const TELL_AGAIN: Duration = Duration::from_secs(2);

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
        () if arguments.shared.is_hands() => shared::hands(arguments),
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
    let _name = hold_name(&run_directory::path(), &arguments.name, &place)?;
    let cancel = process::cancel_on_signals();
    let godwit = std::env::current_exe().context("this program cannot be found")?;
    let mut moves =
        Moves::new(&directory.join("moves"), &arguments.name, &godwit, &run_directory::path())?;
    let (mut runner, events) = match &plan {
        Some(plan) => {
            if !store.exists() {
                moves.clear().map_err(anyhow::Error::msg)?;
            }
            // The file has its name only when the plan is in it.
            let new = directory.join(format!("plan.redb.new{}", std::process::id()));
            let runner = Runner::begin(RedbStore::open(&new)?, plan, &place, &mut moves);
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
        None => {
            let mut store = RedbStore::open(&store)?;
            Runner::uncancel(&mut store)?;
            Runner::resume(store, &place, &mut moves)?
        }
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
    coordinate(&mut runner, &desk, &events)?;
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

/// Where a coordinator works: who may ask it for something, and to whom it tells.
struct Desk<'a> {
    arguments: &'a Arguments,
    names: &'a Plan,
    cancel: &'a Cancel,
    requests: Option<&'a Requests<Asked>>,
    /// Others stand by, and wishes may be found in the store.
    shared: bool,
}

/// How a coordinator comes to an end.
enum End {
    /// There is nothing left to do.
    Over,
    /// Others go on.
    Left,
}

/// Coordinates until there is nothing left to do.
fn coordinate<S: Store>(
    runner: &mut Runner<'_, S>,
    desk: &Desk<'_>,
    events: &[Event],
) -> Result<End, EvacuateError> {
    let json = desk.arguments.json;
    let live = (!json).then(|| Live::start(&desk.arguments.name)).flatten();
    let say = |events: &[Event]| {
        if !events.is_empty() {
            live::beside(live.as_ref(), || tell::events(desk.names, events, json));
        }
    };
    let limits_of = |runner: &Runner<'_, S>| {
        let plan = runner.plan();
        (Rate::from_bytes_per_second(plan.bytes_per_second), plan.at_once)
    };
    say(events);
    let (mut news, mut heard, mut told) = (Instant::now(), Instant::now(), Instant::now());
    while !runner.is_over() {
        if desk.cancel.is_cancelled() {
            if desk.shared {
                return Ok(End::Left);
            }
            if !runner.wanted().cancelled {
                runner.cancel()?;
            }
        }
        while let Some(Ok((request, answer))) = desk.requests.map(Requests::try_recv) {
            let done = answered(&request, runner);
            if let Ok(Some(limits)) = &done {
                live::beside(live.as_ref(), || tell::limits(limits, json));
            }
            let report = || tell::as_json(&runner.report());
            let _ = answer.send(done.map_or_else(|why| json!({ "error": why }), |_| report()));
        }
        if desk.shared && heard.elapsed() > HEED {
            heard = Instant::now();
            let before = limits_of(runner);
            if runner.heed()? && limits_of(runner) != before {
                live::beside(live.as_ref(), || tell::limits(&limits_of(runner), json));
            }
            runner.publish()?;
        }
        if desk.shared && told.elapsed() > TELL_AGAIN {
            told = Instant::now();
            runner.tell_again()?;
        }
        say(&runner.turn()?);
        if let Some(live) = &live {
            live.show(&runner.report());
        } else if news.elapsed() > NEWS && !json {
            news = Instant::now();
            tell::news(&runner.report());
        }
        if !runner.is_over() {
            std::thread::sleep(TICK);
        }
    }
    Ok(End::Over)
}

/// Does what somebody has asked for at the control socket; the limits, if they are others now.
///
/// # Errors
/// Why not: nothing has changed then.
fn answered<S: Store>(
    request: &str,
    runner: &mut Runner<'_, S>,
) -> Result<Option<(Rate, u32)>, String> {
    match request {
        "pause" => runner.pause(true).map_err(|error| error.to_string())?,
        "continue" => runner.pause(false).map_err(|error| error.to_string())?,
        "cancel" => runner.cancel().map_err(|error| error.to_string())?,
        "status" => {}
        other => {
            let plan = runner.plan();
            let now = (Rate::from_bytes_per_second(plan.bytes_per_second), plan.at_once);
            let (budget, at_once) = limits::asked(other, now)?;
            runner.limit(budget, at_once).map_err(|error| error.to_string())?;
            return Ok(Some((budget, at_once)));
        }
    }
    Ok(None)
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
        list = list.of(&file, from.vms(&arguments.only, &arguments.except)?)?;
    }
    hosts::ask(&mut list, &arguments.to, arguments.keys.as_deref())?;
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
