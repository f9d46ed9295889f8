//! The metrics, by their names: docs/metrics.md has a row for each, which a test compares.
//!
//! Invariant: what is a counter or a histogram never gets smaller; what cannot be told is left out
//! and is no zero.

use std::collections::BTreeMap;
use std::time::Duration;

use godwit_control::messages::MigrationLook;
use godwit_engine::report::{Progress, Stage};
use godwit_report::{Distribution, Totals};
use godwit_terminal::progress::believable;
use godwit_units::Rate;
use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType,
};
use serde_json::Value;

/// How migrations end of which a record is kept: each is there from the beginning, so that its
/// first time is seen as one.
const OUTCOMES: [&str; 5] = ["migrated", "upgraded", "failed", "cancelled", "in-doubt"];
/// What the VMs of an evacuation do.
const STATES: [&str; 5] = ["waiting", "moving", "moved", "stayed", "in-doubt"];

/// What is told of.
pub(super) struct Seen {
    pub(super) totals: Totals,
    /// Migrations that run, by their names.
    pub(super) running: Vec<(String, MigrationLook)>,
    /// Directories of other users, in which more may run.
    pub(super) closed: usize,
    /// Evacuations that run, by their names.
    pub(super) evacuations: Vec<(String, Value)>,
}

type Labels<'a> = Vec<(&'a str, String)>;

/// A family of gauges or counters, unless nothing is known of any.
fn family(
    name: &str,
    help: &str,
    kind: MetricType,
    values: Vec<(Labels<'_>, f64)>,
) -> Option<MetricFamily> {
    let metric = |(labels, value): (Labels<'_>, f64)| {
        let mut metric = Metric::from_label(labels.into_iter().map(label).collect());
        if kind == MetricType::COUNTER {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
        metric
    };
    named(name, help, kind, values.into_iter().map(metric).collect())
}

fn named(name: &str, help: &str, kind: MetricType, all: Vec<Metric>) -> Option<MetricFamily> {
    if all.is_empty() {
        return None;
    }
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family.set_metric(all);
    Some(family)
}

fn label((name, value): (&str, String)) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(name.to_owned());
    pair.set_value(value);
    pair
}

fn histogram(name: &str, help: &str, values: &Distribution) -> Option<MetricFamily> {
    let mut sum = 0;
    let bucket = |(bound, count): &(f64, u64)| {
        sum += count;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound);
        bucket.set_cumulative_count(sum);
        bucket
    };
    let mut histogram = Histogram::default();
    histogram.set_bucket(values.buckets.iter().map(bucket).collect());
    histogram.set_sample_count(values.count);
    histogram.set_sample_sum(values.sum);
    let mut metric = Metric::default();
    metric.set_histogram(histogram);
    named(name, help, MetricType::HISTOGRAM, vec![metric])
}

/// All of them, in the order in which they are printed.
pub(super) fn families(seen: &Seen) -> Vec<MetricFamily> {
    let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    let one = |value: usize| vec![(Vec::new(), value as f64)];
    let mut all = vec![
        family(
            "godwit_build_info",
            "The godwit that tells all this; always 1.",
            MetricType::GAUGE,
            vec![(version, 1.0)],
        ),
        family(
            "godwit_migrations_total",
            "Migrations from this host that have ended, by how.",
            MetricType::COUNTER,
            outcomes(&seen.totals),
        ),
        histogram(
            "godwit_migration_downtime_seconds",
            "Downtimes of guests that have moved.",
            &seen.totals.downtime,
        ),
        histogram(
            "godwit_migration_duration_seconds",
            "How long their migrations took.",
            &seen.totals.duration,
        ),
        histogram(
            "godwit_migration_sent_bytes",
            "Bytes that their migrations put on the wire.",
            &seen.totals.bytes,
        ),
        family(
            "godwit_running_migrations",
            "Migrations from this host that run now.",
            MetricType::GAUGE,
            one(seen.running.len()),
        ),
        family(
            "godwit_hidden_users",
            "Other users whose migrations this one cannot see.",
            MetricType::GAUGE,
            one(seen.closed),
        ),
    ];
    all.extend(GAUGES.iter().map(|gauge| {
        let values = seen.running.iter().flat_map(|(name, look)| of_running(gauge, name, look));
        family(gauge.name, gauge.help, MetricType::GAUGE, values.collect())
    }));
    all.extend(evacuations(&seen.evacuations));
    all.into_iter().flatten().collect()
}

fn outcomes(totals: &Totals) -> Vec<(Labels<'static>, f64)> {
    let mut counts: BTreeMap<&str, u64> = OUTCOMES.map(|outcome| (outcome, 0)).into();
    counts.extend(totals.outcomes.iter().map(|(outcome, count)| (outcome.as_str(), *count)));
    let value =
        |(outcome, count): (&str, u64)| (vec![("outcome", outcome.to_owned())], count as f64);
    counts.into_iter().map(value).collect()
}

/// Something that is told of each migration that runs.
struct OfRunning {
    name: &'static str,
    help: &'static str,
    /// The value, or one for each value of another label.
    values: fn(&Progress) -> Values,
}

type Label = (&'static str, &'static str);
type Values = Vec<(Option<Label>, f64)>;

fn some(value: Option<f64>) -> Values {
    value.map(|value| (None, value)).into_iter().collect()
}

fn seconds(time: Option<Duration>) -> Values {
    some(time.map(|time| time.as_secs_f64()))
}

fn rate(rate: Option<Rate>) -> Values {
    some(rate.map(Rate::bytes_per_second))
}

const GAUGES: [OfRunning; 11] = [
    OfRunning {
        name: "godwit_running_elapsed_seconds",
        help: "How long it has run.",
        values: |now| seconds(Some(now.elapsed)),
    },
    OfRunning {
        name: "godwit_running_stage",
        help: "What it is at: 1 for that stage, 0 for the others.",
        values: |now| {
            let stages = [
                ("pre-copy", Stage::PreCopy),
                ("stop-and-copy", Stage::StopAndCopy),
                ("handover", Stage::Handover),
                ("post-copy", Stage::PostCopy),
            ];
            let is = |stage: Stage| if now.stage == stage { 1.0 } else { 0.0 };
            stages.map(|(word, stage)| (Some(("stage", word)), is(stage))).into()
        },
    },
    OfRunning {
        name: "godwit_running_round",
        help: "The round, counted from 0.",
        values: |now| some(Some(f64::from(now.round))),
    },
    OfRunning {
        name: "godwit_running_sent_bytes",
        help: "Bytes put on the wire so far.",
        values: |now| some(Some(now.sent.0 as f64)),
    },
    OfRunning {
        name: "godwit_running_remaining_bytes",
        help: "What is still to be sent, of memory and of disks that move along.",
        values: |now| {
            let disks: u64 = now.disks.iter().map(|disk| disk.remaining.0).sum();
            let mut values = vec![(Some(("of", "memory")), now.remaining.0 as f64)];
            if !now.disks.is_empty() {
                values.push((Some(("of", "disks")), disks as f64));
            }
            values
        },
    },
    OfRunning {
        name: "godwit_running_dirty_bytes_per_second",
        help: "How fast the guest dirties memory.",
        values: |now| rate(now.dirty_rate),
    },
    OfRunning {
        name: "godwit_running_bandwidth_bytes_per_second",
        help: "How fast the link carries.",
        values: |now| rate(now.bandwidth),
    },
    OfRunning {
        name: "godwit_running_expected_downtime_seconds",
        help: "The downtime if the guest were stopped now.",
        values: |now| seconds(now.expected_downtime),
    },
    OfRunning {
        name: "godwit_running_expected_remaining_seconds",
        help: "How long it will probably still take.",
        values: |now| seconds(now.remaining_time.as_ref().map(|time| time.mid)),
    },
    OfRunning {
        name: "godwit_running_throttle_ratio",
        help: "The part of the time in which vCPUs are kept from running, 0 to 1.",
        values: |now| some(Some(now.throttle)),
    },
    OfRunning {
        name: "godwit_running_severed",
        help: "1 while its connections are lost and made again, else 0.",
        values: |now| some(Some(if now.severed.is_some() { 1.0 } else { 0.0 })),
    },
];

fn of_running<'a>(gauge: &OfRunning, name: &str, look: &MigrationLook) -> Vec<(Labels<'a>, f64)> {
    let Some(progress) = &look.progress else { return Vec::new() };
    let known = |value: &Option<String>| value.clone().unwrap_or_default();
    let labels = |more: Option<Label>| {
        let mut labels =
            vec![("migration", name.to_owned()), ("vm", known(&look.vm)), ("to", known(&look.to))];
        labels.extend(more.map(|(name, value)| (name, value.to_owned())));
        labels
    };
    let values = (gauge.values)(&believable(progress)).into_iter();
    values.map(|(more, value)| (labels(more), value)).collect()
}

fn evacuations(running: &[(String, Value)]) -> [Option<MetricFamily>; 3] {
    let label = |name: &str| ("evacuation", name.to_owned());
    let states = running.iter().flat_map(|(name, report)| {
        STATES.map(|state| {
            let vms = report["vms"].as_array().into_iter().flatten();
            let count = vms.filter(|vm| vm["state"] == state).count();
            (vec![label(name), ("state", state.to_owned())], count as f64)
        })
    });
    let value = |key: &'static str| {
        let of = move |(name, report): &(String, Value)| {
            report[key].as_f64().map(|value| (vec![label(name)], value))
        };
        running.iter().filter_map(of).collect()
    };
    [
        family(
            "godwit_evacuation_vms",
            "VMs of an evacuation that runs, by what they do.",
            MetricType::GAUGE,
            states.collect(),
        ),
        family(
            "godwit_evacuation_budget_bytes_per_second",
            "What its moves together may send.",
            MetricType::GAUGE,
            value("budget_bytes_per_second"),
        ),
        family(
            "godwit_evacuation_moves_at_once",
            "The most moves that it makes at once.",
            MetricType::GAUGE,
            value("at_once"),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prometheus::TextEncoder;
    use serde_json::json;

    use super::*;

    fn seen() -> Seen {
        let progress: Progress = serde_json::from_value(json!({
            "elapsed_ms": 1500.0, "stage": "stop-and-copy", "round": 4, "round_ended": false,
            "sent_bytes": 1 << 20, "remaining_bytes": 4096, "dirty_bytes_per_second": 1e6,
            "bandwidth_bytes_per_second": 1e9, "expected_downtime_ms": 20.0,
            "remaining_time": { "low_ms": 1000.0, "mid_ms": 2000.0, "high_ms": 3000.0 },
            "throttle": 0.25, "guest_speed": null, "delayed_segments": 0, "advice": null,
            "warning": null,
            "disks": [{ "name": "vda", "size_bytes": 9, "sent_bytes": 1, "remaining_bytes": 8,
                        "full_pass": true }],
        }))
        .unwrap();
        let look = MigrationLook {
            version: None,
            vm: Some("qemu:/run/\"a\"\n.qmp".to_owned()),
            to: Some("192.0.2.7:7000".to_owned()),
            progress: Some(Box::new(progress)),
            settings: Vec::new(),
        };
        let mut totals = Totals::default();
        totals.outcomes.insert("migrated".to_owned(), 3);
        totals.downtime.buckets[0].1 = 1;
        totals.downtime.buckets[2].1 = 1;
        (totals.downtime.count, totals.downtime.sum) = (3, 100.25);
        let report = json!({
            "budget_bytes_per_second": 1e8, "at_once": 2,
            "vms": [{ "state": "moving" }, { "state": "moving" }, { "state": "moved" }],
        });
        let evacuations = vec![("weekly".to_owned(), report)];
        Seen { totals, running: vec![("web01".to_owned(), look)], closed: 0, evacuations }
    }

    #[test]
    fn what_was_seen_is_told_as_prometheus_reads_it() {
        let text = TextEncoder::new().encode_to_string(&families(&seen())).unwrap();
        let labels = r#"{migration="web01",vm="qemu:/run/\"a\"\n.qmp",to="192.0.2.7:7000""#;
        for line in [
            "# TYPE godwit_migrations_total counter",
            "godwit_migrations_total{outcome=\"migrated\"} 3",
            "godwit_migrations_total{outcome=\"in-doubt\"} 0",
            "# TYPE godwit_migration_downtime_seconds histogram",
            "godwit_migration_downtime_seconds_bucket{le=\"0.001\"} 1",
            "godwit_migration_downtime_seconds_bucket{le=\"0.005\"} 2",
            "godwit_migration_downtime_seconds_bucket{le=\"10\"} 2",
            "godwit_migration_downtime_seconds_bucket{le=\"+Inf\"} 3",
            "godwit_migration_downtime_seconds_sum 100.25",
            "godwit_migration_downtime_seconds_count 3",
            "godwit_running_migrations 1",
            &format!("godwit_running_stage{labels},stage=\"stop-and-copy\"}} 1"),
            &format!("godwit_running_stage{labels},stage=\"pre-copy\"}} 0"),
            &format!("godwit_running_remaining_bytes{labels},of=\"disks\"}} 8"),
            &format!("godwit_running_expected_remaining_seconds{labels}}} 2"),
            "godwit_evacuation_vms{evacuation=\"weekly\",state=\"moving\"} 2",
            "godwit_evacuation_budget_bytes_per_second{evacuation=\"weekly\"} 100000000",
        ] {
            assert!(text.lines().any(|known| known == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn what_nobody_knows_is_left_out() {
        let mut unknown = seen();
        let progress = unknown.running[0].1.progress.as_mut().unwrap();
        (progress.dirty_rate, progress.remaining_time) = (None, None);
        let mut setting_up = unknown.running[0].1.clone();
        setting_up.progress = None;
        unknown.running.push(("db".to_owned(), setting_up));
        let text = TextEncoder::new().encode_to_string(&families(&unknown)).unwrap();
        assert!(!text.contains("godwit_running_dirty") && !text.contains("db"), "{text}");
        assert!(text.contains("\ngodwit_running_migrations 2\n"), "{text}");
    }

    #[test]
    fn each_metric_has_its_row_in_the_documentation() {
        let page = include_str!("../../../../docs/metrics.md");
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `godwit_"));
        let rows = rows.filter_map(|row| row.split('`').next());
        let documented: BTreeSet<String> = rows.map(|name| format!("godwit_{name}")).collect();
        let known: BTreeSet<String> =
            families(&seen()).iter().map(|family| family.name().to_owned()).collect();
        assert_eq!(known, documented);
    }
}
