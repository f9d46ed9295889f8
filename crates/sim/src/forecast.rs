//! A forecast: the migration simulated, with a guest made from what was measured of the real one.

use std::time::Duration;

use godwit_policy::Settings;
use godwit_units::{ByteCount, PageCount, Rate};
use serde::Serialize;

use crate::outcome::End;
use crate::scenario::{GuestSpec, Scenario};

/// So many pages were dirty this long after all were clean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Since they were clean.
    pub interval: Duration,
    /// Dirty pages then.
    pub dirty: PageCount,
}

/// What will probably happen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    /// Whether it will finish.
    pub finishes: bool,
    /// How long it takes, in seconds: within the bounds and probably.
    pub seconds: (f64, f64, f64),
    /// Bytes of memory sent.
    pub bytes: f64,
    /// Downtime in seconds.
    pub downtime: f64,
    /// The highest throttle.
    pub throttle: f64,
    /// Whether the guest will be held to a dirty-rate limit.
    pub governed: bool,
    /// Seconds of the guest's work lost.
    pub lost_work: f64,
}

/// The rates, per page and second, that a guest is made of: one region for each, as far as the
/// samples tell.
const RATES: usize = 12;

/// A guest with `memory`, of which `data` is not zero, that dirties as `samples` show.
///
/// Of two kinds of guest the one that fits better is taken. One writes at random: the samples lie
/// on a curve `Σ N·(1 − exp(−λt))`, fitted with non-negative `N` for fixed `λ`, half an order of
/// magnitude apart around what the intervals can tell, by repeated projection, so that no sample
/// decides alone. The other goes through its working set page by page and over again: `min(N,
/// r·t)`.
#[must_use]
pub fn fit(memory: ByteCount, data: ByteCount, samples: &[Sample]) -> GuestSpec {
    let points: Vec<(f64, f64)> = samples
        .iter()
        .filter(|sample| !sample.interval.is_zero())
        .map(|sample| (sample.interval.as_secs_f64(), sample.dirty.0 as f64))
        .collect();
    let guest = GuestSpec::idle(memory, data);
    let longest = points.iter().map(|(time, _)| *time).fold(0.0, f64::max);
    let shortest = points.iter().map(|(time, _)| *time).fold(f64::INFINITY, f64::min);
    if longest <= 0.0 {
        return guest;
    }
    let (low, high) = (0.02 / longest, 4.0 / shortest);
    let rates: Vec<f64> =
        (0..RATES).map(|i| low * (high / low).powf(i as f64 / (RATES - 1) as f64)).collect();
    let most = memory.0 as f64 / 4096.0;
    let pages = non_negative(&points, &rates, most);
    let at_random =
        |time: f64| rates.iter().zip(&pages).map(|(rate, n)| n * share(*rate, time)).sum::<f64>();
    let (size, rate) = walk(&points);
    let walking = |time: f64| (rate * time).min(size);
    if error(&points, walking) < error(&points, at_random) {
        return guest.walking(PageCount(size as u64).bytes(), rate);
    }
    // What is written most comes first: regions are laid out one after the other.
    rates
        .iter()
        .zip(&pages)
        .rev()
        .filter(|(_, pages)| **pages >= 1.0)
        .fold(guest, |guest, (rate, pages)| {
            guest.writing(PageCount(*pages as u64).bytes(), rate * pages)
        })
}

/// The share of pages, each written `rate` times a second, that are dirty after `time`.
fn share(rate: f64, time: f64) -> f64 {
    1.0 - (-rate * time).exp()
}

/// The sum of the squared relative errors of `model`.
fn error(points: &[(f64, f64)], model: impl Fn(f64) -> f64) -> f64 {
    points.iter().map(|(time, dirty)| ((model(*time) - dirty) / dirty.max(1.0)).powi(2)).sum()
}

/// Size in pages and pages a second of the walk that fits best: the size is the most that was
/// dirty, and the rate is that of one of the samples before.
fn walk(points: &[(f64, f64)]) -> (f64, f64) {
    let size = points.iter().map(|(_, dirty)| *dirty).fold(0.0, f64::max);
    let rates = points.iter().map(|(time, dirty)| dirty / time);
    let fits = |rate: &f64| error(points, |time| (rate * time).min(size));
    let rate = rates.min_by(|a, b| fits(a).total_cmp(&fits(b))).unwrap_or(0.0);
    (size, rate)
}

/// Non-negative least squares by multiplicative updates, which keep what is positive positive.
fn non_negative(points: &[(f64, f64)], rates: &[f64], most: f64) -> Vec<f64> {
    let total = points.iter().map(|(_, dirty)| *dirty).fold(0.0, f64::max);
    let mut pages = vec![total / rates.len() as f64; rates.len()];
    for _ in 0..2000 {
        let fitted: Vec<f64> = points
            .iter()
            .map(|(time, _)| {
                rates.iter().zip(&pages).map(|(rate, n)| n * share(*rate, *time)).sum()
            })
            .collect();
        for (rate, n) in rates.iter().zip(&mut pages) {
            // Weighted, so that short intervals count as much as long ones.
            let ratio = |value: &dyn Fn(usize) -> f64| {
                (0..points.len())
                    .map(|i| share(*rate, points[i].0) * value(i) / points[i].1.max(1.0).powi(2))
                    .sum::<f64>()
            };
            let (wanted, present) = (ratio(&|i| points[i].1), ratio(&|i| fitted[i]));
            if present > 0.0 {
                *n *= wanted / present;
            }
        }
    }
    let sum: f64 = pages.iter().sum();
    let scale = if sum > most { most / sum } else { 1.0 };
    pages.into_iter().map(|n| n * scale).collect()
}

/// What will happen to `scenario` under each of `settings`. The bounds come from a link a fifth
/// slower and faster.
#[must_use]
pub fn forecast(scenario: &Scenario, settings: &[Settings]) -> Vec<Forecast> {
    settings.iter().map(|settings| one(scenario, *settings)).collect()
}

fn one(scenario: &Scenario, settings: Settings) -> Forecast {
    let with = |factor: f64| {
        let mut scenario = scenario.clone();
        scenario.settings = settings;
        let bandwidth = scenario.link.bandwidth.bytes_per_second() * factor;
        scenario.link.bandwidth = Rate::from_bytes_per_second(bandwidth);
        crate::run(&scenario)
    };
    let outcome = with(1.0);
    let (low, high) = (with(1.2).total.min(outcome.total), with(0.8).total.max(outcome.total));
    Forecast {
        finishes: outcome.end == End::Moved,
        seconds: (low, outcome.total, high),
        bytes: outcome.sent,
        downtime: outcome.downtime,
        throttle: outcome.throttle,
        governed: outcome.governed,
        lost_work: outcome.lost_work,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(dirty: impl Fn(f64) -> f64) -> Vec<Sample> {
        let times = (0..14).map(|i| 0.02 * 1.5f64.powi(i));
        times
            .map(|time| Sample {
                interval: Duration::from_secs_f64(time),
                dirty: PageCount(dirty(time) as u64),
            })
            .collect()
    }

    fn fitted(dirty: impl Fn(f64) -> f64) -> GuestSpec {
        fit(ByteCount(1 << 30), ByteCount(1 << 29), &samples(dirty))
    }

    #[test]
    fn a_walk_is_told_from_writes_at_random() {
        let guest = fitted(|time| (100_000.0 * time).min(65_536.0));
        assert_eq!(guest.regions.len(), 1);
        assert!(guest.regions[0].sequential);
        assert_eq!(guest.regions[0].size.to_string(), "256MiB");
        assert!((guest.regions[0].writes / 100_000.0 - 1.0).abs() < 0.1, "{guest:?}");

        let guest = fitted(|time| 65_536.0 * (1.0 - (-2.0 * time).exp()));
        assert!(guest.regions.iter().all(|region| !region.sequential));
        let writes: f64 = guest.regions.iter().map(|region| region.writes).sum();
        assert!((writes / 131_072.0 - 1.0).abs() < 0.25, "{guest:?}");
    }

    #[test]
    fn what_does_not_write_is_idle() {
        assert!(fitted(|_| 0.0).regions.is_empty());
        assert!(fit(ByteCount(1 << 30), ByteCount(1 << 29), &[]).regions.is_empty());
    }
}
