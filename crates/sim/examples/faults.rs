//! A million migrations by chance in which something goes wrong: `make bench-sim`.
//!
//! Writes `target/bench/sim-faults.json`, and ends with an error when one of them is not as it must
//! be, or all together took longer than five minutes. `--migrations N` for another number of them.
#![allow(clippy::disallowed_methods, reason = "this program measures; the library does not")]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use godwit_sim::{random_trouble, run};

const MIGRATIONS: u64 = 1_000_000;
const LIMIT: Duration = Duration::from_secs(300);

/// What some of the migrations came to.
#[derive(Default)]
struct Tally {
    ends: BTreeMap<String, u64>,
    resumptions: u64,
    recovered: u64,
    /// The first few that went wrong, by their seeds.
    wrong: Vec<(u64, &'static str)>,
}

fn count(seeds: impl Iterator<Item = u64>) -> Tally {
    let mut tally = Tally::default();
    for seed in seeds {
        let scenario = random_trouble(seed);
        let outcome = run(&scenario);
        *tally.ends.entry(format!("{:?}", outcome.end)).or_default() += 1;
        tally.resumptions += u64::from(outcome.resumptions);
        tally.recovered += u64::from(outcome.recovered);
        if let Some(what) = outcome.fault().filter(|_| tally.wrong.len() < 10) {
            tally.wrong.push((seed, what));
        }
    }
    tally
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let wanted = match (words.next().as_deref(), words.next().map(|number| number.parse())) {
        (None, None) => MIGRATIONS,
        (Some("--migrations"), Some(Ok(number))) => number,
        _ => {
            eprintln!("usage: faults [--migrations N]");
            return ExitCode::from(2);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let began = Instant::now();
    let tallies: Vec<Tally> = std::thread::scope(|scope| {
        let part = |first| (first..wanted).step_by(threads as usize);
        let parts: Vec<_> =
            (0..threads).map(|first| scope.spawn(move || count(part(first)))).collect();
        parts.into_iter().filter_map(|part| part.join().ok()).collect()
    });
    let time = began.elapsed();
    let mut all = Tally::default();
    for tally in &tallies {
        for (end, count) in &tally.ends {
            *all.ends.entry(end.clone()).or_default() += count;
        }
        all.resumptions += tally.resumptions;
        all.recovered += tally.recovered;
        all.wrong.extend(&tally.wrong);
    }
    let whole = all.ends.values().sum::<u64>() == wanted;
    let in_time = time <= LIMIT;
    let ends: Vec<String> =
        all.ends.iter().map(|(end, count)| format!("\"{end}\": {count}")).collect();
    let json = format!(
        "{{\"migrations\": {wanted}, \"seconds\": {:.1}, \"threads\": {threads}, \"ends\": {{{}}}, \
         \"resumptions\": {}, \"recovered\": {}, \"wrong\": {}, \"targets\": \
         [{{\"name\": \"a million in five minutes\", \"met\": {}}}, \
         {{\"name\": \"none goes wrong\", \"met\": {}}}]}}\n",
        time.as_secs_f64(),
        ends.join(", "),
        all.resumptions,
        all.recovered,
        all.wrong.len(),
        in_time && wanted >= MIGRATIONS,
        whole && all.wrong.is_empty(),
    );
    print!("{json}");
    let written = std::fs::create_dir_all("target/bench")
        .and_then(|()| std::fs::write("target/bench/sim-faults.json", &json));
    if let Err(error) = written {
        eprintln!("target/bench/sim-faults.json: {error}");
        return ExitCode::FAILURE;
    }
    for (seed, what) in &all.wrong {
        eprintln!("seed {seed}: {what}");
    }
    if whole && all.wrong.is_empty() && in_time { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
