//! `godwit simulate evacuate`: a fleet whose hosts are emptied, in virtual time.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use godwit_fleet::{Fleet, Rolled, Terms, roll};
use godwit_units::{ByteCount, Rate, format_duration};
use serde_json::json;

use crate::output::json_line;

/// Empty all hosts of a made-up fleet, one wave after the other.
///
/// Hosts and VMs are made up, time is virtual, and what decides is the planner of `godwit
/// evacuate`. Of each move only its time and its bytes are simulated; a single migration, with all
/// that happens in it, is simulated by `godwit simulate`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Hosts
    #[arg(long, value_name = "N", default_value = "10000",
          value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    hosts: u32,

    /// VMs on them
    #[arg(long, value_name = "N", default_value = "200000",
          value_parser = clap::value_parser!(u32).range(0..=10_000_000))]
    vms: u32,

    /// Hosts that are emptied at the same time [default: one in a hundred]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    wave: Option<u32>,

    /// What the moves from a host may send together
    #[arg(long, value_name = "RATE", default_value = "10Gbit")]
    bandwidth: Rate,

    /// What a host's link carries
    #[arg(long, value_name = "RATE", default_value = "25Gbit")]
    link: Rate,

    /// Moves at once from a host, and to one
    #[arg(long, value_name = "N", default_value = "2",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    at_once: u32,

    /// How many of a hundred moves fail on their way
    #[arg(long, value_name = "PERCENT", default_value = "1", value_parser = percent)]
    failing: f64,

    /// In how many of a hundred waves a destination is lost
    #[arg(long, value_name = "PERCENT", default_value = "10", value_parser = percent)]
    losing: f64,

    /// Another number makes another fleet with other faults
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u64,

    /// Print the outcome as a line of JSON
    #[arg(long)]
    json: bool,
}

/// A part of a hundred.
fn percent(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.trim_end_matches('%').parse().ok();
    let number = number.filter(|number| (0.0..=100.0).contains(number));
    number.map(|number| number / 100.0).ok_or_else(|| "use 0 to 100".to_owned())
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let mut random = fastrand::Rng::with_seed(arguments.seed);
    let mut draw = move || random.f64();
    let (hosts, vms) = (arguments.hosts as usize, arguments.vms as usize);
    let wave = arguments.wave.unwrap_or(arguments.hosts.div_ceil(100)) as usize;
    let mut fleet = Fleet::made_up(hosts, vms, arguments.link, &mut draw);
    let terms = Terms {
        wave: wave.min(hosts - 1),
        budget: arguments.bandwidth,
        at_once: arguments.at_once,
        failing: arguments.failing,
        losing: arguments.losing,
    };
    let began = Instant::now();
    let rolled = roll(&mut fleet, &terms, &mut draw);
    let took = began.elapsed();
    if arguments.json {
        tell_json(arguments, &rolled, took);
    } else {
        tell(arguments, &terms, &rolled, took);
    }
    ExitCode::SUCCESS
}

/// Seconds of a wave, of which so many are shorter.
fn quantile(rolled: &Rolled, part: f64) -> f64 {
    let mut seconds: Vec<f64> = rolled.wave_seconds.iter().map(|(was, _)| *was).collect();
    seconds.sort_by(f64::total_cmp);
    let at = (part * seconds.len().saturating_sub(1) as f64).round() as usize;
    seconds.get(at).copied().unwrap_or(0.0)
}

/// How much longer than forecast all waves took; faults are not forecast.
fn over_forecast(rolled: &Rolled) -> f64 {
    let (was, forecast) = rolled
        .wave_seconds
        .iter()
        .fold((0.0, 0.0), |(was, forecast), (one, other)| (was + one, forecast + other));
    if forecast > 0.0 { was / forecast - 1.0 } else { 0.0 }
}

fn tell_json(arguments: &Arguments, rolled: &Rolled, took: Duration) {
    json_line(&json!({
        "simulated": true,
        "hosts": arguments.hosts,
        "vms": arguments.vms,
        "waves": rolled.waves,
        "seconds": rolled.seconds,
        "wave_seconds_median": quantile(rolled, 0.5),
        "wave_seconds_longest": quantile(rolled, 1.0),
        "over_forecast": over_forecast(rolled),
        "hosts_emptied": rolled.emptied,
        "moved": rolled.moved,
        "failures": rolled.failures,
        "stayed": rolled.stays,
        "destinations_lost": rolled.lost,
        "bytes": rolled.bytes,
        "mean_of_budget": rolled.mean_of_budget,
        "most_of_budget": rolled.most_of_budget,
        "most_moves": rolled.most_moves,
        "took_seconds": took.as_secs_f64(),
    }));
}

fn tell(arguments: &Arguments, terms: &Terms, rolled: &Rolled, took: Duration) {
    let time = |seconds: f64| format_duration(Duration::from_secs_f64(seconds.round().max(0.0)));
    println!(
        "{} hosts with {} VMs, emptied {} at a time, with {} for each",
        arguments.hosts, arguments.vms, terms.wave, arguments.bandwidth
    );
    println!("  time            {} in {} waves", time(rolled.seconds), rolled.waves);
    println!(
        "  a wave          {} in the median, {} the longest",
        time(quantile(rolled, 0.5)),
        time(quantile(rolled, 1.0))
    );
    println!("  forecast        without faults; it took {:+.1}%", over_forecast(rolled) * 100.0);
    println!("  hosts emptied   {} of {}", rolled.emptied, arguments.hosts);
    println!(
        "  moves           {}, {} at once at most, {} failed on their way",
        rolled.moved, rolled.most_moves, rolled.failures
    );
    println!("  lost            {} destinations", rolled.lost);
    for (why, count) in &rolled.stays {
        println!("  stayed          {count}: {why}");
    }
    println!("  sent            {}", ByteCount(rolled.bytes as u64));
    println!(
        "  of the budget   {:.0}% in the mean, {:.1}% at most",
        rolled.mean_of_budget * 100.0,
        rolled.most_of_budget * 100.0
    );
    println!("simulated in {}", format_duration(took));
}
