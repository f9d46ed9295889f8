//! `godwit simulate`: a migration in virtual time, under the policy and protocol of the real ones.

mod evacuate;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use godwit_engine::limits;
use godwit_policy::{PostCopy, Settings, ThrottleMode};
use godwit_sim::{NAMES, Outcome, Scenario, Synchronisation, chart, named, run as simulate};
use godwit_units::{ByteCount, GRAMMAR, Rate, parse_duration};
use serde_json::{Value, json};

use crate::layout;
use crate::output::json_line;
use crate::plan;
use crate::process::FAILED;
use crate::settings;

/// Simulate a migration: nothing real is touched.
///
/// Guest, link and disk are made up, time is virtual, and what decides is the policy and the
/// protocol of real migrations.
#[derive(Debug, Args)]
#[command(after_help = GRAMMAR, args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    other: Option<Other>,

    /// A scenario by name; `--list` shows them
    #[arg(long, value_name = "NAME", default_value = "busy")]
    scenario: String,

    /// List the scenarios and the settings
    #[arg(long)]
    list: bool,

    /// The guest as `godwit plan --json` has seen a real one (the file that it wrote), instead of
    /// the scenario's
    #[arg(long, value_name = "FILE", conflicts_with_all = ["memory", "working_set", "writes"])]
    measured: Option<PathBuf>,

    /// The guest's memory, all of it holding data, instead of the scenario's
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteCount>,

    /// How much of it is written at random, instead of what the scenario writes
    #[arg(long, value_name = "SIZE", requires = "writes")]
    working_set: Option<ByteCount>,

    /// Pages written each second in the working set
    #[arg(long, value_name = "PAGES", requires = "working_set")]
    writes: Option<u32>,

    /// What the link carries, instead of the scenario's
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<Rate>,

    /// One way over the link
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    latency: Option<Duration>,

    /// A synchronisation at once, at the start of each round, that takes this long
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    synchronisation: Option<Duration>,

    /// The guest leaves before its memory, as `migrate --postcopy` has it: never, now, "after N"
    /// rounds, or on-timeout. Of what it does only writes are known, so it waits for no page that
    /// it would only read
    #[arg(long, value_name = "WHEN", default_value_t = PostCopy::Never)]
    postcopy: PostCopy,

    /// Size of a dirty block of the scenario's disk
    #[arg(long, value_name = "SIZE")]
    block: Option<ByteCount>,

    /// A setting, as key=value; more than once for several
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Run it several times: over `throttle` (all modes), or over the values given, such as
    /// downtime-limit=50ms,100ms or postcopy=never,now
    #[arg(long, value_name = "KEY[=VALUES]", num_args = 0..=1, default_missing_value = "throttle")]
    sweep: Option<String>,

    /// Draw dirty against sent, throttle and guest speed into this file
    #[arg(long, value_name = "FILE.svg")]
    chart: Option<PathBuf>,

    /// Print the outcome as lines of JSON
    #[arg(long)]
    json: bool,
}

/// What else can be simulated.
#[derive(Debug, Subcommand)]
enum Other {
    /// Empty all hosts of a made-up fleet, one wave after the other, by the planner of `godwit
    /// evacuate`.
    Evacuate(evacuate::Arguments),
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    if let Some(Other::Evacuate(arguments)) = &arguments.other {
        return evacuate::run(arguments);
    }
    if arguments.list {
        list();
        return ExitCode::SUCCESS;
    }
    match perform(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("godwit: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

fn list() {
    let width = layout::width(&std::io::stdout());
    println!("scenarios");
    for (name, shows) in NAMES {
        println!("{}", layout::wrap(&format!("  {name:<12} "), shows, 15, width));
    }
    println!("settings");
    print!("{}", settings::list(Settings::TABLE.about(), width));
}

fn perform(arguments: &Arguments) -> anyhow::Result<()> {
    let scenario = scenario(arguments)?;
    let outcomes = outcomes(&scenario, arguments.sweep.as_deref())?;
    for (name, outcome) in &outcomes {
        if arguments.json {
            json_line(&json!({
                "scenario": arguments.scenario, "case": name, "simulated": true, "outcome": outcome,
            }));
        }
    }
    if !arguments.json {
        let width = layout::width(&std::io::stdout());
        println!("{}", layout::wrap("", &scenario.title, 2, width));
        match outcomes.as_slice() {
            [(_, only)] => print!("{}", table::rounds(only, width)),
            several => {
                let key = arguments.sweep.as_deref().unwrap_or("case");
                let key = key.split_once('=').map_or(key, |(key, _)| key);
                print!("{}", table::comparison(key, several, width));
            }
        }
    }
    match &arguments.chart {
        Some(path) => draw(path, &scenario.title, &outcomes),
        None => Ok(()),
    }
}

fn draw(path: &Path, title: &str, outcomes: &[(String, Outcome)]) -> anyhow::Result<()> {
    std::fs::write(path, chart(title, outcomes))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn scenario(arguments: &Arguments) -> anyhow::Result<Scenario> {
    let Some(mut scenario) = named(&arguments.scenario) else {
        let names: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
        bail!("there is no scenario '{}': use one of {}", arguments.scenario, names.join(", "));
    };
    if let Some(path) = &arguments.measured {
        let shown = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
        let answer: Value =
            serde_json::from_str(&text).with_context(|| format!("{shown} is no JSON"))?;
        let measured = serde_json::from_value(answer["measured"].clone())
            .with_context(|| format!("{shown} is no answer of `godwit plan --json`"))?;
        scenario.guest = plan::guest(&measured);
    }
    if let Some(memory) = arguments.memory {
        (scenario.guest.memory, scenario.guest.data) = (memory, memory);
    }
    if let (Some(size), Some(writes)) = (arguments.working_set, arguments.writes) {
        if size > scenario.guest.memory {
            bail!("--working-set {size} is more than the memory, {}", scenario.guest.memory);
        }
        scenario.guest.regions.clear();
        scenario.guest = scenario.guest.writing(size, writes.into());
    }
    if let Some(bandwidth) = arguments.bandwidth {
        scenario.link.bandwidth = bandwidth;
    }
    if let Some(latency) = arguments.latency {
        scenario.link.latency = latency;
    }
    if let Some(time) = arguments.synchronisation {
        scenario.synchronisation = Synchronisation::AtOnce(time);
    }
    if let Some(block) = arguments.block {
        match &mut scenario.disk {
            Some(disk) if block.0 >= 512 => disk.granularity = block,
            Some(_) => bail!("--block {block} is too small: use at least 512B"),
            None => {
                bail!("the scenario '{}' has no disk: --block is of no use", arguments.scenario)
            }
        }
    }
    for assignment in &arguments.set {
        scenario.settings.assign(assignment)?;
    }
    leave(&mut scenario, arguments.postcopy)?;
    Ok(scenario)
}

fn leave(scenario: &mut Scenario, postcopy: PostCopy) -> anyhow::Result<()> {
    if postcopy != PostCopy::Never && scenario.disk.is_some() {
        bail!("this scenario has a disk that moves, for which a guest does not leave: no postcopy");
    }
    scenario.post_copy = postcopy;
    scenario.reconnect = limits::RECONNECT;
    Ok(())
}

fn outcomes(scenario: &Scenario, sweep: Option<&str>) -> anyhow::Result<Vec<(String, Outcome)>> {
    let Some(sweep) = sweep else {
        return Ok(vec![(scenario.settings.throttle.to_string(), simulate(scenario))]);
    };
    let (key, values) = match sweep.split_once('=') {
        Some((key, values)) => (key, values.split(',').collect::<Vec<_>>()),
        None if sweep == "throttle" => (sweep, ThrottleMode::ALL.map(|(_, name)| name).into()),
        None => bail!("--sweep {sweep} needs values, such as {sweep}=50ms,100ms"),
    };
    let one = |value: &&str| {
        let mut scenario = scenario.clone();
        if key == "postcopy" {
            let when =
                value.parse().map_err(|wrong| anyhow::anyhow!("--sweep postcopy: {wrong}"))?;
            leave(&mut scenario, when)?;
        } else {
            scenario.settings.set(key, value)?;
        }
        Ok(((*value).to_owned(), simulate(&scenario)))
    };
    values.iter().map(one).collect()
}
