//! QEMU's own migration between two machines, for comparison.
//!
//! Keeps it fair: the same machines as for Godwit, RAM copied over TCP, a downtime limit of 300 ms,
//! and the time taken from the command to the guest running on the other side with all of its
//! memory. What a style needs is set, and all that it does not is turned off. Observing the guest
//! and adding up processor time are left to the caller.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use godwit_units::{ByteCount, Rate};
use serde_json::{Value, json};

use crate::vm::TestVm;

/// The time since 1970, by the clock that QEMU stamps its events with.
#[must_use]
pub fn wall_clock() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// More than any link carries, in bytes a second. Zero is "no limit" only in newer QEMUs.
pub(crate) const NO_LIMIT: u64 = 1 << 40;
pub(crate) const DOWNTIME_LIMIT_MS: u64 = 300;
/// A cache of pages as sent before; QEMU's default of 64 MiB is too small for any of our guests.
const XBZRLE_CACHE: u64 = 512 << 20;
const CANCEL_LIMIT: Duration = Duration::from_secs(10);

/// How QEMU migrates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// One connection.
    Plain,
    /// So many channels.
    Multifd(u8),
    /// So many channels and zstd.
    Zstd(u8),
    /// One connection, and of pages sent before only what changed.
    Xbzrle,
    /// One connection, and a guest that is slowed down step by step.
    AutoConverge,
    /// One connection, and each vCPU may make only so many pages dirty a second, fewer step by
    /// step. For guests on KVM with its ring.
    DirtyLimit,
    /// One pass, then the guest runs on the destination and fetches what is missing.
    PostCopy {
        /// Whether the bandwidth limit holds after the switch, too, as a link's own would. By
        /// default it does not.
        limited: bool,
    },
    /// The guest runs on the destination at once, and what it waits for comes over a connection of
    /// its own; without a limit of bandwidth from then on.
    PostCopyNow,
}

impl Style {
    /// Whether the guest runs on the destination before its memory is there.
    #[must_use]
    pub fn is_post_copy(self) -> bool {
        matches!(self, Self::PostCopy { .. } | Self::PostCopyNow)
    }
}

/// Where and for how long QEMU may try.
#[derive(Clone, Copy, Debug)]
pub struct OwnTerms<'a> {
    /// The destination's address; a port is found.
    pub host: &'a str,
    /// The limit that QEMU keeps.
    pub bandwidth: Option<Rate>,
    /// The migration is cancelled when it takes longer.
    pub patience: Duration,
}

/// What QEMU says of its migration, and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnMigration {
    /// Whether it came to an end by itself.
    pub finished: bool,
    /// From the command until the guest runs on the destination and all of its memory is there, by
    /// QEMU's own time stamps of its events.
    pub wall: Duration,
    /// From the stop of the guest on the source to its start on the destination, by the same time
    /// stamps; nothing, where it did not get so far.
    pub switchover: Option<Duration>,
    /// QEMU's `total-time`.
    pub total: Duration,
    /// QEMU's `downtime`.
    pub downtime: Duration,
    /// QEMU's `ram.transferred`.
    pub sent: ByteCount,
    /// Memory passes.
    pub passes: u64,
}

/// Moves the guest from `source` to `destination`, as fast as may be.
///
/// # Errors
/// When QEMU refuses, fails, or is not done within `limit`.
pub fn own_migration(
    source: &mut TestVm,
    destination: &mut TestVm,
    style: Style,
    limit: Duration,
) -> anyhow::Result<OwnMigration> {
    let own = own_migration_within(source, destination, style, None, limit)?;
    ensure!(own.finished, "QEMU's own migration was not done within {limit:?}");
    Ok(own)
}

/// Moves the guest over a link of `bandwidth`, or cancels when that is not done within `patience`:
/// the guest is then at the source, and the destination of no more use.
///
/// # Errors
/// When QEMU refuses or fails.
pub fn own_migration_within(
    source: &mut TestVm,
    destination: &mut TestVm,
    style: Style,
    bandwidth: Option<Rate>,
    patience: Duration,
) -> anyhow::Result<OwnMigration> {
    let terms = OwnTerms { host: "127.0.0.1", bandwidth, patience };
    own_migration_under(terms, source, destination, style)
}

/// The same under other terms.
///
/// # Errors
/// When QEMU refuses or fails, a post-copy also when it is not done in time: it cannot be
/// cancelled.
pub fn own_migration_under(
    OwnTerms { host, bandwidth, patience }: OwnTerms<'_>,
    source: &mut TestVm,
    destination: &mut TestVm,
    style: Style,
) -> anyhow::Result<OwnMigration> {
    for vm in [&mut *source, &mut *destination] {
        prepare(vm, style, bandwidth)?;
        vm.qmp().forget_events();
    }
    let uri = format!("tcp:{host}:0");
    destination.qmp().execute("migrate-incoming", json!({ "uri": uri }))?;
    let uri = listening_at(destination)?;

    let began = wall_clock();
    source.qmp().execute("migrate", json!({ "uri": uri }))?;
    let until = began + patience;
    match style {
        Style::PostCopy { .. } => switch_after_one_pass(source, until)?,
        Style::PostCopyNow => {
            source.qmp().execute("migrate-start-postcopy", Value::Null)?;
        }
        _ => {}
    }
    let left = || until.saturating_sub(wall_clock());
    let over = ["completed", "failed", "cancelled", "postcopy-paused"];
    let ended = source.qmp().wait_event_where("the end of the migration", left(), |event| {
        event.name == "MIGRATION"
            && event.data["status"].as_str().is_some_and(|status| over.contains(&status))
    });
    let Ok(ended) = ended else {
        ensure!(!style.is_post_copy(), "QEMU's own post-copy is not done within {patience:?}");
        return cancelled(source, began);
    };
    ensure!(
        ended.data["status"] == "completed",
        "QEMU's own migration is {}: {} {}",
        ended.data["status"],
        source.errors().trim(),
        destination.errors().trim()
    );
    let running = destination.qmp().wait_event("RESUME", Duration::from_secs(10))?;
    let stopped = source.qmp().wait_event("STOP", Duration::from_secs(10))?;
    // Of a post-copy the guest ran long before its memory was there.
    let end =
        if style.is_post_copy() { running.emitted.max(ended.emitted) } else { running.emitted };
    let switchover = running.emitted.checked_sub(stopped.emitted);
    Ok(OwnMigration { switchover, ..told(source, end.saturating_sub(began), true)? })
}

fn told(source: &mut TestVm, wall: Duration, finished: bool) -> anyhow::Result<OwnMigration> {
    let info = source.qmp().execute("query-migrate", Value::Null)?;
    let millis = |key: &str| info[key].as_u64().map(Duration::from_millis).unwrap_or_default();
    Ok(OwnMigration {
        finished,
        wall,
        switchover: None,
        total: millis("total-time"),
        downtime: millis("downtime"),
        sent: ByteCount(info["ram"]["transferred"].as_u64().context("no ram.transferred")?),
        passes: info["ram"]["dirty-sync-count"].as_u64().unwrap_or(0),
    })
}

/// Out of patience: what it did until now, and an end to it.
fn cancelled(source: &mut TestVm, began: Duration) -> anyhow::Result<OwnMigration> {
    let now = wall_clock();
    let so_far = told(source, now.saturating_sub(began), false)?;
    source.qmp().execute("migrate_cancel", Value::Null)?;
    source.qmp().wait_event_where("the end of the cancelled migration", CANCEL_LIMIT, |event| {
        event.name == "MIGRATION" && event.data["status"] == "cancelled"
    })?;
    Ok(so_far)
}

/// As libvirt does it when asked for post-copy after pre-copy.
fn switch_after_one_pass(source: &mut TestVm, until: Duration) -> anyhow::Result<()> {
    loop {
        let info = source.qmp().execute("query-migrate", Value::Null)?;
        if info["ram"]["dirty-sync-count"].as_u64().unwrap_or(0) >= 2 {
            source.qmp().execute("migrate-start-postcopy", Value::Null)?;
            return Ok(());
        }
        let now = wall_clock();
        ensure!(now < until, "QEMU has not made one pass: {info}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn prepare(vm: &mut TestVm, style: Style, bandwidth: Option<Rate>) -> anyhow::Result<()> {
    let capability = |name: &str, state: bool| json!({ "capability": name, "state": state });
    let channels = match style {
        Style::Multifd(channels) | Style::Zstd(channels) => Some(channels),
        _ => None,
    };
    let capabilities = [
        capability("events", true),
        capability("multifd", channels.is_some()),
        capability("xbzrle", style == Style::Xbzrle),
        capability("auto-converge", style == Style::AutoConverge),
        capability("postcopy-ram", style.is_post_copy()),
    ];
    vm.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
    // Older QEMUs have neither, and the second is refused where KVM has no ring.
    let only = match style {
        Style::PostCopyNow => Some("postcopy-preempt"),
        Style::DirtyLimit => Some("dirty-limit"),
        _ => None,
    };
    if let Some(only) = only {
        let capabilities = [capability(only, true)];
        vm.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
    }
    let limit = bandwidth.map_or(NO_LIMIT, |rate| rate.bytes_per_second() as u64);
    let mut parameters = json!({ "max-bandwidth": limit, "downtime-limit": DOWNTIME_LIMIT_MS });
    if let Some(channels) = channels {
        parameters["multifd-channels"] = channels.into();
        let zstd = matches!(style, Style::Zstd(_));
        parameters["multifd-compression"] = if zstd { "zstd" } else { "none" }.into();
    }
    match style {
        Style::Xbzrle => parameters["xbzrle-cache-size"] = XBZRLE_CACHE.into(),
        // Zero: no limit.
        Style::PostCopy { limited } => {
            parameters["max-postcopy-bandwidth"] = if limited { limit } else { 0 }.into();
        }
        Style::PostCopyNow => parameters["max-postcopy-bandwidth"] = 0.into(),
        _ => {}
    }
    vm.qmp().execute("migrate-set-parameters", parameters)?;
    Ok(())
}

/// The address that the destination chose, as a URI.
fn listening_at(destination: &mut TestVm) -> anyhow::Result<String> {
    let info = destination.qmp().execute("query-migrate", Value::Null)?;
    match (info["socket-address"][0]["host"].as_str(), info["socket-address"][0]["port"].as_str()) {
        (Some(host), Some(port)) => Ok(format!("tcp:{host}:{port}")),
        _ => bail!("QEMU does not say where it listens: {info}"),
    }
}
