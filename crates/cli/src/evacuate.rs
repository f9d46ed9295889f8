//! `godwit evacuate`: empty this host.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver as Requests, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::Args;
use godwit_evacuate::{EvacuateError, Event, List, Moves, Plan, RedbStore, Report, Runner};
use godwit_fleet::{Evacuation, NoFaults, Place, run as run_virtually};
use godwit_qemu::run_directory;
use godwit_units::{GRAMMAR, Rate, format_duration};
use serde_json::{Value, json};

use crate::layout::{self, Column};
use crate::output::json_line;
use crate::process::{self, CANCELLED, FAILED, OPERATOR};
use crate::run_directory::hold_name;
use crate::say;

/// How often moves are looked at.
const TICK: Duration = Duration::from_millis(100);
/// A terminal hears of those under way this often.
const NEWS: Duration = Duration::from_secs(5);
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// Empty this host: move its VMs to where there is room, under one bandwidth budget.
///
/// LIST is a file, in TOML or JSON, of the VMs and of the destinations: docs/evacuate.md. Each VM
/// gets a destination with room for it; those that take the least time go first, and those under
/// way share the budget. The plan and every step are written down: when this command is killed, the
/// moves under way go on, and `--resume` takes them up. Exit codes: 0 every VM has moved; 1 some
/// are where they were; 3 an operator has to look at one; 130 cancelled, with --resume to go on.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR)]
pub(crate) struct Arguments {
    /// The file that lists VMs and destinations
    #[arg(value_name = "LIST")]
    #[arg(required_unless_present_any = ["resume", "pause", "proceed", "cancel", "status"])]
    list: Option<PathBuf>,

    /// What this evacuation is called, among others on this host
    #[arg(long, value_name = "NAME", default_value = "evacuation", value_parser = name)]
    name: String,

    /// What all moves together may send
    #[arg(long, value_name = "RATE", default_value = "1GiB/s")]
    bandwidth: Rate,

    /// Moves at once
    #[arg(long, value_name = "N", default_value = "4",
          value_parser = clap::value_parser!(u32).range(1..=64))]
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
        () if arguments.pause => steer(arguments, "pause"),
        () if arguments.proceed => steer(arguments, "continue"),
        () if arguments.cancel => steer(arguments, "cancel"),
        () if arguments.status => steer(arguments, "status"),
        () => evacuate(arguments),
    };
    done.unwrap_or_else(|error| {
        let text = format!("{error:#}");
        crate::output::refusal(&text, arguments.json);
        ExitCode::from(FAILED)
    })
}

/// Where everything of this evacuation is kept.
fn directory(arguments: &Arguments) -> anyhow::Result<PathBuf> {
    let parent = match &arguments.state_dir {
        Some(directory) => directory.clone(),
        None => {
            let records = crate::migrate::records();
            let records = records.context("there is no home: name a --state-dir")?;
            records.directory().with_file_name("evacuations")
        }
    };
    // Moves are started with other working directories in mind than this one's.
    let parent = std::path::absolute(&parent).context("--state-dir")?;
    Ok(parent.join(&arguments.name))
}

fn evacuate(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let directory = directory(arguments)?;
    let plan = arguments.list.as_deref().map(|list| planned(arguments, list)).transpose()?;
    if let Some(plan) = plan.as_ref().filter(|_| arguments.dry_run) {
        tell_plan(plan, arguments.json);
        return Ok(ExitCode::SUCCESS);
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
        None => Runner::resume(RedbStore::open(&store)?, &place, &mut moves)?,
    };
    let (_socket, requests) = serve(&directory.join("control"))?;
    let names = runner.plan().clone();
    if !arguments.json {
        tell_heading(&names);
    }
    let began = Instant::now();
    let mut news = Instant::now();
    tell(&names, &events, arguments.json);
    let mut cancelled = false;
    while !runner.is_over() {
        if cancel.is_cancelled() && !cancelled {
            cancelled = true;
            runner.cancel();
        }
        while let Ok((request, answer)) = requests.try_recv() {
            match request.as_str() {
                "pause" => runner.pause(true),
                "continue" => runner.pause(false),
                "cancel" => {
                    cancelled = true;
                    runner.cancel();
                }
                _ => {}
            }
            let _ = answer.send(as_json(&runner.report()));
        }
        tell(&names, &runner.turn()?, arguments.json);
        if news.elapsed() > NEWS && !arguments.json {
            news = Instant::now();
            tell_news(&runner.report());
        }
        if !runner.is_over() {
            std::thread::sleep(TICK);
        }
    }
    let report = runner.report();
    let whole = whole_report(&names, &report, began.elapsed(), cancelled);
    std::fs::write(directory.join("report.json"), format!("{whole}\n"))?;
    if arguments.json {
        json_line(&whole);
    } else {
        print!("{}", as_text(&report, layout::width(&std::io::stdout())));
        println!("{}", summary(&report, &names, began.elapsed()));
    }
    Ok(match (&report, cancelled) {
        (report, _) if report.in_doubt > 0 => ExitCode::from(OPERATOR),
        (report, true) if report.stayed > 0 => ExitCode::from(CANCELLED),
        (report, _) if report.stayed > 0 => ExitCode::from(FAILED),
        _ => ExitCode::SUCCESS,
    })
}

/// A directory for this user alone.
fn private(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// The plan for the list, with its forecast.
fn planned(arguments: &Arguments, list: &Path) -> anyhow::Result<Plan> {
    let file = list.display().to_string();
    let mut plan = List::read(list)?.plan(&file, arguments.bandwidth, arguments.at_once)?;
    if plan.vms.is_empty() {
        bail!("{file}: there is no VM in it");
    }
    if arguments.bandwidth == Rate::ZERO {
        bail!("--bandwidth 0: nothing would move");
    }
    let (vms, destinations, source) = plan.inventory();
    let mut evacuation = Evacuation::new(vms, destinations, vec![source]);
    plan.forecast_seconds = run_virtually(&mut evacuation, &mut NoFaults).seconds;
    plan.options.clone_from(&arguments.options);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    plan.began_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    Ok(plan)
}

/// A VM, its destination, when its move begins and ends in seconds, and why it stays.
type Planned = (String, Option<String>, Option<(f64, f64)>, Option<String>);

fn tell_plan(plan: &Plan, json: bool) {
    let (vms, destinations, source) = plan.inventory();
    let mut evacuation = Evacuation::new(vms, destinations, vec![source]);
    let first = evacuation.places().to_vec();
    let ran = run_virtually(&mut evacuation, &mut NoFaults);
    let rows: Vec<Planned> = plan
        .vms
        .iter()
        .zip(&first)
        .zip(&ran.times)
        .map(|((vm, place), times)| match place {
            Place::Waiting { to } => {
                (vm.name.clone(), Some(plan.destinations[*to].name.clone()), *times, None)
            }
            Place::Stays(godwit_fleet::Stays::Unplaced(why)) => {
                (vm.name.clone(), None, None, Some(why.to_string()))
            }
            _ => (vm.name.clone(), None, None, None),
        })
        .collect();
    if json {
        let vms: Vec<Value> = rows
            .iter()
            .map(|(name, to, times, why)| {
                let (begins, ends) = times.unzip();
                json!({ "name": name, "to": to, "begins_s": begins, "ends_s": ends, "why": why })
            })
            .collect();
        json_line(&json!({ "outcome": "planned", "seconds": ran.seconds, "vms": vms }));
        return;
    }
    let columns = [
        Column::words("VM", 0),
        Column::words("to", 0),
        Column::number("begins", 0),
        Column::number("ends", 0),
    ];
    let time =
        |seconds: Option<f64>| seconds.map_or("-".to_owned(), |seconds| format!("{seconds:.1} s"));
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|(name, to, times, why)| {
            let (begins, ends) = times.unzip();
            let to = to.clone().or_else(|| why.clone()).unwrap_or_default();
            vec![name.clone(), to, time(begins), time(ends)]
        })
        .collect();
    print!("{}", layout::table(&columns, &cells, 0, layout::width(&std::io::stdout())));
}

fn tell_heading(plan: &Plan) {
    let forecast = Duration::from_secs_f64(plan.forecast_seconds.clamp(0.0, 1e9));
    println!(
        "{} VMs, {} at once, {} for all of them; forecast: {}",
        plan.vms.len(),
        plan.at_once,
        Rate::from_bytes_per_second(plan.bytes_per_second),
        format_duration(forecast)
    );
}

fn tell(plan: &Plan, events: &[Event], json: bool) {
    for event in events {
        let (name, to, word, more) = match event {
            Event::Began { vm, to, rate } => (vm, Some(to), "began", Some(rate.to_string())),
            Event::Found { vm, to } => (vm, Some(to), "found", None),
            Event::Moved { vm, to } => (vm, Some(to), "moved", None),
            Event::Failed { vm, why, again } => {
                (vm, None, if *again { "failed" } else { "stays" }, Some(why.clone()))
            }
            Event::Operator { vm, why } => (vm, None, "in-doubt", Some(why.clone())),
        };
        let name = &plan.vms[*name].name;
        let to = to.map(|to| plan.destinations[*to].name.as_str());
        if json {
            json_line(&json!({ "event": word, "vm": name, "to": to, "why": more }));
            continue;
        }
        let to = to.map_or_else(String::new, |to| format!(" to {to}"));
        let words = match word {
            "began" => "begins to move",
            "found" => "is on its way",
            "moved" => "has moved",
            "failed" => "did not move, and is tried again",
            "stays" => "stays",
            _ => "needs an operator",
        };
        let more = more.map_or_else(String::new, |more| match word {
            "began" => format!(" at {more}"),
            _ => format!(": {more}"),
        });
        println!("{name} {words}{to}{}", say::line(more));
    }
}

fn tell_news(report: &Report) {
    let count = |state: &str| report.vms.iter().filter(|vm| vm.state == state).count();
    println!(
        "{} moved, {} on their way, {} wait, {} stay",
        report.moved,
        count("moving"),
        count("waiting"),
        count("stayed")
    );
}

fn summary(report: &Report, plan: &Plan, took: Duration) -> String {
    let forecast = Duration::from_secs_f64(plan.forecast_seconds.clamp(0.0, 1e9));
    format!(
        "{} of {} moved in {} (forecast {}), {} where they were, {} for an operator",
        report.moved,
        report.vms.len(),
        format_duration(took),
        format_duration(forecast),
        report.stayed,
        report.in_doubt
    )
}

fn as_json(report: &Report) -> Value {
    serde_json::to_value(report).unwrap_or_default()
}

/// What is kept of an evacuation, and printed for programs.
fn whole_report(plan: &Plan, report: &Report, took: Duration, cancelled: bool) -> Value {
    let mut whole = json!({
        "outcome": if cancelled { "cancelled" } else { "evacuated" },
        "began_ms": plan.began_ms,
        "took_seconds": took.as_secs_f64(),
        "forecast_seconds": plan.forecast_seconds,
        "budget_bytes_per_second": plan.bytes_per_second,
    });
    if let (Value::Object(whole), Value::Object(rest)) = (&mut whole, as_json(report)) {
        whole.extend(rest);
    }
    whole
}

fn as_text(report: &Report, width: usize) -> String {
    let columns = [
        Column::words("VM", 0),
        Column::words("state", 0),
        Column::words("to", 0),
        Column::number("moves", 1),
    ];
    let cells = |vm: &godwit_evacuate::ReportedVm| {
        let to = vm.to.clone().unwrap_or_else(|| "-".to_owned());
        vec![vm.name.clone(), vm.state.to_owned(), to, vm.attempts.to_string()]
    };
    let rows: Vec<Vec<String>> = report.vms.iter().map(cells).collect();
    let mut text = layout::table(&columns, &rows, 0, width);
    for vm in report.vms.iter().filter(|vm| vm.state != "moved") {
        if let Some(why) = &vm.why {
            let label = format!("{}: ", vm.name);
            text += &format!("{}\n", layout::wrap(&label, &say::line(why).to_string(), 4, width));
        }
    }
    text
}

/// A request, and where its answer goes.
type Asked = (String, Sender<Value>);

/// Listens at `path` for those who steer this evacuation.
fn serve(path: &Path) -> anyhow::Result<(godwit_control::steer::Socket, Requests<Asked>)> {
    let (listener, socket) = godwit_control::steer::bind(path)?;
    let (sender, requests) = channel();
    let serving = std::thread::Builder::new().name("control".to_owned());
    serving.spawn(move || listen(&listener, &sender)).context("no thread can be had")?;
    Ok((socket, requests))
}

fn listen(listener: &UnixListener, sender: &Sender<Asked>) {
    for stream in listener.incoming().flatten() {
        let _ = stream.set_read_timeout(Some(REQUEST_LIMIT));
        let mut line = String::new();
        if BufReader::new((&stream).take(64)).read_line(&mut line).is_err() {
            continue;
        }
        let (answer, answered) = channel();
        if sender.send((line.trim().to_owned(), answer)).is_err() {
            return;
        }
        if let Ok(answer) = answered.recv_timeout(REQUEST_LIMIT) {
            let _ = writeln!(&stream, "{answer}");
        }
    }
}

/// Tells the evacuation that runs what to do.
fn steer(arguments: &Arguments, request: &str) -> anyhow::Result<ExitCode> {
    let path = directory(arguments)?.join("control");
    let mut stream = UnixStream::connect(&path).with_context(|| {
        format!("no evacuation '{}' runs ({}): see --name", arguments.name, path.display())
    })?;
    stream.set_read_timeout(Some(REQUEST_LIMIT * 2))?;
    writeln!(stream, "{request}")?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).context("the evacuation does not answer")?;
    let answer: Value = serde_json::from_str(&line).context("the evacuation does not answer")?;
    if arguments.json {
        json_line(&answer);
        return Ok(ExitCode::SUCCESS);
    }
    let count = |state: &str| {
        let vms = answer["vms"].as_array().into_iter().flatten();
        vms.filter(|vm| vm["state"] == state).count()
    };
    let now = match request {
        "pause" => "no further move begins. ",
        "continue" => "it goes on. ",
        "cancel" => "its moves are being cancelled. ",
        _ => "",
    };
    println!(
        "{now}{} moved, {} on their way, {} wait, {} stay, {} for an operator",
        count("moved"),
        count("moving"),
        count("waiting"),
        count("stayed"),
        count("in-doubt")
    );
    Ok(ExitCode::SUCCESS)
}
