//! The report of a benchmark run: its figures, and its targets with the verdict on each.
//!
//! Keeps one promise: a target that was missed is written down as missed.

use std::path::PathBuf;

use anyhow::Context;
use serde::Serialize;
use serde_json::{Map, Value};

/// Which side of its limit a target wants to be on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// The value must not exceed the limit.
    Lower,
    /// The value must reach the limit.
    Higher,
}

/// One figure that must be reached, and whether it was.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    /// What was measured, in words and with its unit.
    pub name: String,
    /// The measured value.
    pub value: f64,
    /// The limit it answers to.
    pub limit: f64,
    /// On which side of the limit it should be.
    pub better: Better,
    /// Of single rounds, where there are some to tell: the least and the most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<[f64; 2]>,
    /// The verdict.
    pub met: bool,
    /// The verdict may be chance: some rounds alone would have another, or there are too few.
    pub within_noise: bool,
}

/// With fewer rounds a verdict may be chance, whatever they say.
const ROUNDS_TO_TELL: usize = 3;

impl Target {
    /// In a word or two.
    #[must_use]
    pub fn verdict(&self) -> &'static str {
        match (self.met, self.within_noise) {
            (true, false) => "met",
            (false, false) => "MISSED",
            (true, true) => "met, within the noise",
            (false, true) => "MISSED, within the noise",
        }
    }
}

impl Better {
    fn is_met(self, value: f64, limit: f64) -> bool {
        match self {
            Self::Lower => value <= limit,
            Self::Higher => value >= limit,
        }
    }
}

/// Figures and targets of one benchmark run.
#[derive(Debug, Serialize)]
pub struct Report {
    name: String,
    machine: String,
    targets: Vec<Target>,
    #[serde(flatten)]
    figures: Map<String, Value>,
}

impl Report {
    /// An empty report for the benchmark `name`, stamped with the machine it runs on.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), machine: machine(), targets: Vec::new(), figures: Map::new() }
    }

    /// Adds a figure (any JSON value) under `key`.
    pub fn figure(&mut self, key: &str, value: impl Into<Value>) {
        self.figures.insert(key.to_owned(), value.into());
    }

    /// Adds a target; whether it is met follows from value, limit and direction. NaN never meets a
    /// limit.
    pub fn target(&mut self, name: impl Into<String>, value: f64, limit: f64, better: Better) {
        let met = better.is_met(value, limit);
        let (name, spread, within_noise) = (name.into(), None, false);
        self.targets.push(Target { name, value, limit, better, spread, met, within_noise });
    }

    /// The same for a value that was measured in rounds, of which each alone came to one of `each`.
    pub fn target_of_rounds(
        &mut self,
        name: impl Into<String>,
        (value, each): (f64, &[f64]),
        limit: f64,
        better: Better,
    ) {
        let met = better.is_met(value, limit);
        let agree = each.iter().all(|value| better.is_met(*value, limit) == met);
        let (spread, within_noise) =
            (Some([least(each), most(each)]), each.len() < ROUNDS_TO_TELL || !agree);
        let name = name.into();
        self.targets.push(Target { name, value, limit, better, spread, met, within_noise });
    }

    /// The targets so far.
    pub fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// Prints the verdicts and writes `target/bench/NAME.json`; returns the path of that file.
    pub fn finish(&self) -> anyhow::Result<PathBuf> {
        println!("\n{:<78} {:>12} {:>12}", "target", "value", "limit");
        for t in &self.targets {
            let sign = if t.better == Better::Lower { "<=" } else { ">=" };
            let verdict = t.verdict();
            let spread = t.spread.map_or(String::new(), |[least, most]| {
                format!(" (rounds: {least:.3} to {most:.3})")
            });
            println!("{:<78} {:>12.3} {sign} {:>9.3}  {verdict}{spread}", t.name, t.value, t.limit);
        }
        let dir = PathBuf::from("target/bench");
        std::fs::create_dir_all(&dir)
            .with_context(|| format!("cannot create {}", dir.display()))?;
        let path = dir.join(format!("{}.json", self.name));
        let text = serde_json::to_string_pretty(self)?;
        std::fs::write(&path, text + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
        println!("\nfigures written to {}", path.display());
        Ok(path)
    }
}

/// `page` with `table` in the place of what stands between `begin` and `end`.
pub fn with_table(page: &str, begin: &str, end: &str, table: &str) -> anyhow::Result<String> {
    let (before, rest) = page.split_once(begin).context("the page has no place for the table")?;
    let (_, after) = rest.split_once(end).context("the place for the table has no end")?;
    Ok([before, begin, table, end, after].concat())
}

/// The median of `values` (mean of the middle two when their number is even); NaN for none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => f64::NAN,
        _ if n % 2 == 1 => sorted[n / 2],
        _ => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// The median of a figure of `rows`; NaN for none.
pub fn median_of<'a, R: 'a>(
    rows: impl IntoIterator<Item = &'a R>,
    figure: impl Fn(&R) -> f64,
) -> f64 {
    median(&rows.into_iter().map(figure).collect::<Vec<_>>())
}

/// The least of `values`; NaN when one of them is, or for none: what was not measured stays
/// missing.
pub fn least(values: &[f64]) -> f64 {
    let lesser = |a: f64, b: f64| if a.is_nan() || b.is_nan() { f64::NAN } else { a.min(b) };
    values.iter().copied().reduce(lesser).unwrap_or(f64::NAN)
}

/// The most of `values`, likewise.
pub fn most(values: &[f64]) -> f64 {
    -least(&values.iter().map(|value| -value).collect::<Vec<_>>())
}

/// The most of a figure of `rows`, likewise.
pub fn most_of<'a, R: 'a>(
    rows: impl IntoIterator<Item = &'a R>,
    figure: impl Fn(&R) -> f64,
) -> f64 {
    most(&rows.into_iter().map(figure).collect::<Vec<_>>())
}

/// Processor, core count, memory and kernel of this machine, in one line.
pub fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("unknown processor", |(_, model)| model.trim());
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let memory_kib: u64 = read("/proc/meminfo")
        .lines()
        .find_map(|line| {
            line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok()
        })
        .unwrap_or(0);
    let kernel = read("/proc/sys/kernel/osrelease");
    format!("{model}, {cores} cores, {} GiB, Linux {}", memory_kib.div_ceil(1 << 20), kernel.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_counts() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn verdicts_follow_the_direction() {
        let mut report = Report::new("test");
        report.target("low", 1.0, 2.0, Better::Lower);
        report.target("high", 1.0, 2.0, Better::Higher);
        report.target("unmeasured", f64::NAN, 2.0, Better::Lower);
        let met: Vec<bool> = report.targets().iter().map(|t| t.met).collect();
        assert_eq!(met, [true, false, false]);
    }

    #[test]
    fn what_was_not_measured_stays_missing() {
        assert_eq!((least(&[2.0, 1.0]), most(&[2.0, 3.0, 1.0])), (1.0, 3.0));
        assert!(least(&[1.0, f64::NAN]).is_nan() && most(&[f64::NAN, 1.0]).is_nan());
        assert!(least(&[]).is_nan() && most(&[]).is_nan());
    }

    #[test]
    fn a_verdict_that_rounds_disagree_on_is_within_the_noise() {
        let mut report = Report::new("test");
        let mut enter = |value, each: &[f64]| {
            report.target_of_rounds("ratio", (value, each), 1.0, Better::Lower);
        };
        enter(0.8, &[0.7, 0.8, 0.9]);
        enter(0.9, &[0.7, 0.9, 1.2]);
        enter(1.2, &[0.9, 1.2, 1.3]);
        enter(1.2, &[1.1, 1.2, 1.3]);
        enter(0.8, &[0.7, 0.9]);
        enter(0.8, &[0.7, 0.8, f64::NAN]);
        let verdicts: Vec<&str> = report.targets().iter().map(Target::verdict).collect();
        assert_eq!(
            verdicts,
            [
                "met",
                "met, within the noise",
                "MISSED, within the noise",
                "MISSED",
                "met, within the noise",
                "met, within the noise"
            ]
        );
        assert_eq!(report.targets()[0].spread, Some([0.7, 0.9]));
    }
}
