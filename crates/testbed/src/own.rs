//! QEMU's own migration between two machines, for comparison.
//!
//! Keeps it fair: the same machines as for Godwit, RAM copied over TCP loopback, no bandwidth limit, a downtime limit
//! of 300 ms, and the time taken from the command to the guest running on the other side. Observing the guest and
//! adding up processor time are left to the caller.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use godwit_units::ByteCount;
use serde_json::{Value, json};

use crate::vm::TestVm;

/// More than any link carries, in bytes a second. Zero is "no limit" only in newer QEMUs.
const NO_LIMIT: u64 = 1 << 40;
const DOWNTIME_LIMIT_MS: u64 = 300;

/// How QEMU migrates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// One connection.
    Plain,
    /// So many channels.
    Multifd(u8),
}

/// What QEMU says of its migration, and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnMigration {
    /// From the command to the guest running on the destination, by QEMU's own time stamps of its events.
    pub wall: Duration,
    /// QEMU's `total-time`.
    pub total: Duration,
    /// QEMU's `downtime`.
    pub downtime: Duration,
    /// QEMU's `ram.transferred`.
    pub sent: ByteCount,
    /// Memory passes.
    pub passes: u64,
}

/// Moves the guest from `source` to `destination`.
///
/// # Errors
/// When QEMU refuses, fails, or is not done within `limit`.
pub fn own_migration(
    source: &mut TestVm,
    destination: &mut TestVm,
    style: Style,
    limit: Duration,
) -> anyhow::Result<OwnMigration> {
    for vm in [&mut *source, &mut *destination] {
        prepare(vm, style)?;
        vm.qmp().forget_events();
    }
    destination.qmp().execute("migrate-incoming", json!({ "uri": "tcp:127.0.0.1:0" }))?;
    let uri = listening_at(destination)?;

    let started = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    source.qmp().execute("migrate", json!({ "uri": uri }))?;
    let ended = source.qmp().wait_event_where("the end of the migration", limit, |event| {
        event.name == "MIGRATION" && matches!(event.data["status"].as_str(), Some("completed" | "failed"))
    })?;
    ensure!(ended.data["status"] == "completed", "QEMU's own migration failed: {}", source.errors().trim());
    let running = destination.qmp().wait_event("RESUME", Duration::from_secs(10))?;

    let info = source.qmp().execute("query-migrate", Value::Null)?;
    let millis =
        |key: &str| info[key].as_u64().map(Duration::from_millis).with_context(|| format!("no {key}"));
    Ok(OwnMigration {
        wall: running.emitted.saturating_sub(started),
        total: millis("total-time")?,
        downtime: millis("downtime")?,
        sent: ByteCount(info["ram"]["transferred"].as_u64().context("no ram.transferred")?),
        passes: info["ram"]["dirty-sync-count"].as_u64().unwrap_or(0),
    })
}

fn prepare(vm: &mut TestVm, style: Style) -> anyhow::Result<()> {
    let capability = |name: &str, state: bool| json!({ "capability": name, "state": state });
    let multifd = matches!(style, Style::Multifd(_));
    let capabilities = [capability("events", true), capability("multifd", multifd)];
    vm.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
    let mut parameters = json!({ "max-bandwidth": NO_LIMIT, "downtime-limit": DOWNTIME_LIMIT_MS });
    if let Style::Multifd(channels) = style {
        parameters["multifd-channels"] = channels.into();
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
