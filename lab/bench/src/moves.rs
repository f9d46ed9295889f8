//! One move of a guest over a slow link, by Godwit or by QEMU, as it is seen from outside.
//!
//! Keeps it fair: same QEMU, same machines, RAM in a shared file, TCP loopback, the same limit of
//! bandwidth set on both, a downtime limit of 300 ms. Work lost is what the guest did not count,
//! against its own rate in the two seconds before the move, from the start of the move to its end,
//! downtime included. Time under half and under a tenth of that rate is judged in windows of 50 ms.
//! QEMU's moves that do not end are cancelled; their guest is used for the next.

use std::time::Duration;

use godwit_testbed::{Godwit, Style, TestVm, VmConfig, own_migration_within};
use godwit_units::Rate;
use serde_json::json;

use crate::fixture::{Fixture, Moved};
use crate::godwit::Attempt;
use crate::row::{Row, TABLE, seconds};

/// No move takes longer.
pub const LIMIT: Duration = Duration::from_secs(120);
/// The guest's rate before is that over this time.
const BEFORE: Duration = Duration::from_secs(2);
const MIB: f64 = 1_048_576.0;
/// How Godwit is told.
const GODWIT: [&str; 5] =
    ["--downtime-limit", "300ms", "--max-bandwidth", "128MiB/s", "--keep-source"];

/// Where moves are made from: a guest that did not leave is used again.
pub fn fixture(config: VmConfig) -> Fixture {
    Fixture { lead: BEFORE, ..Fixture::new(config, LIMIT) }
}

/// One move, called `name`, made by `by`.
///
/// # Errors
/// As [`Fixture::one_move`].
pub fn one_move(
    fixture: &mut Fixture,
    name: &'static str,
    by: impl FnOnce(&mut TestVm, &mut TestVm) -> anyhow::Result<Moved>,
) -> anyhow::Result<Row> {
    let outcome = fixture.one_move(by)?;
    let rate = outcome.rate_before(BEFORE);
    let (seen, moved, from) = (outcome.seen, outcome.moved, outcome.began);
    let trace = outcome.trace.unwrap_or_default();
    let loss = trace.loss(from, from + moved.wall, rate);
    let millis = |time: Duration| seconds(time) * 1e3;
    let longest = seen.longest();
    let [here, there] = outcome.cpu;
    let row = Row {
        name,
        finished: moved.finished,
        total_s: seconds(moved.wall),
        downtime_ms: seen.switchover.map_or(f64::NAN, |gap| millis(gap.length)),
        gap_ms: longest.map_or(f64::NAN, |gap| millis(gap.length)),
        gap_resolution_ms: longest.map_or(f64::NAN, |gap| millis(gap.resolution)),
        sent_mib: moved.sent / MIB,
        lost_s: seconds(loss.work),
        under_half_s: seconds(loss.under_half),
        under_tenth_s: seconds(loss.under_tenth),
        cpu_s: seconds(here + there + moved.godwit_cpu),
        rounds: moved.rounds,
        bugs: outcome.bugs,
        stall_ms: seen.stall.map_or(0.0, |gap| millis(gap.length)),
        own_words: moved.own_words,
    };
    TABLE.print(&row);
    if !moved.finished {
        fixture.left = Some(outcome.source);
    }
    Ok(row)
}

/// By QEMU, in one of its ways; cancelled when that is not done within `patience`.
pub fn by_qemu(
    source: &mut TestVm,
    destination: &mut TestVm,
    style: Style,
    patience: Duration,
) -> anyhow::Result<Moved> {
    let link = Rate::from_bytes_per_second(128.0 * MIB);
    let own = own_migration_within(source, destination, style, Some(link), patience)?;
    Ok(Moved::by_qemu(&own))
}

/// By Godwit, with a throttle and a compression.
pub fn by_godwit(
    godwit: &Godwit,
    source: &TestVm,
    destination: &mut TestVm,
    [throttle, compression]: [&str; 2],
) -> anyhow::Result<Moved> {
    let options = [&GODWIT[..], &["--throttle", throttle, "--compression", compression]].concat();
    let attempt = Attempt::within(LIMIT, godwit, source, destination, &options)?;
    let migrate = &attempt.migrate;
    let last = migrate.last();
    if attempt.receive.is_none() {
        println!("{last} {}", migrate.errors.trim());
    }
    let progress = migrate.lines.iter().filter(|line| line["event"] == "progress");
    let own_words = json!({ "migrate": last, "progress": progress.collect::<Vec<_>>() });
    Ok(Moved::by_godwit(&attempt, own_words))
}
