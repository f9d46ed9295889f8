//! QEMU's own migration with disks that move along, in the order in which libvirt has it done
//! (`qemuMigrationSrcNBDStorageCopy`, `qemuMigrationSrcContinue`): each disk is mirrored into an
//! NBD export of the destination; when all mirrors are in step, memory follows; with the guest
//! stopped the mirrors are ended, then the device state flows.
//!
//! Keeps it fair: everything is done the moment it can be, by one process and without a daemon in
//! between. A migration that does not come to an end is cancelled, and its guest runs on at the
//! source.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_qemu::monitor::QmpError;
use godwit_units::ByteCount;
use serde_json::{Value, json};

use crate::netns::SlowLink;
use crate::own::{DOWNTIME_LIMIT_MS, NO_LIMIT, wall_clock};
use crate::vm::TestVm;

const NBD_PORT: u16 = 10809;
const PORT: u16 = 4444;
/// For each answer that QEMU gives without moving data.
const ANSWER: Duration = Duration::from_secs(30);

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OwnDisksMigration {
    /// Whether it came to an end by itself.
    pub finished: bool,
    /// From the first mirror until the guest runs on the destination, by QEMU's own time stamps; or
    /// until it was cancelled.
    pub wall: Duration,
    /// Of it, until all mirrors were in step; zero if they never were.
    pub mirrored: Duration,
    /// QEMU's `ram.transferred`.
    pub memory: ByteCount,
}

/// Moves the guest with the disks whose block nodes are called `disks`, over `link`, at whose end
/// `destination` is; it must have been started with `-S`.
///
/// # Errors
/// When QEMU refuses or fails.
pub fn own_migration_with_disks(
    source: &mut TestVm,
    destination: &mut TestVm,
    link: &SlowLink,
    disks: &[&str],
    patience: Duration,
) -> anyhow::Result<OwnDisksMigration> {
    prepare(source, destination, link, disks)?;
    let began = wall_clock();
    let until = Instant::now() + patience;
    let left = || until.saturating_duration_since(Instant::now());
    for disk in disks {
        mirror(source, link, disk)?;
    }
    let mut mirrored = Duration::ZERO;
    for _ in disks {
        let ready = source.qmp().wait_event("BLOCK_JOB_READY", left());
        let Some(ready) = in_time(ready)? else { return cancelled(source, disks, began, mirrored) };
        mirrored = ready.emitted.saturating_sub(began);
    }
    source.qmp().execute("migrate", json!({ "uri": format!("tcp:{}:{PORT}", link.address()) }))?;
    let stopped = source.qmp().wait_event_where("pre-switchover", left(), |event| {
        event.name == "MIGRATION"
            && matches!(event.data["status"].as_str(), Some("pre-switchover" | "failed"))
    });
    let Some(stopped) = in_time(stopped)? else { return cancelled(source, disks, began, mirrored) };
    ensure!(
        stopped.data["status"] != "failed",
        "QEMU's own migration failed: {}",
        source.errors().trim()
    );
    for disk in disks {
        // In step, a mirror that is cancelled writes out what is left, and ends.
        source.qmp().execute("block-job-cancel", json!({ "device": job(disk) }))?;
        source.qmp().wait_event("BLOCK_JOB_COMPLETED", ANSWER)?;
    }
    source.qmp().execute("migrate-continue", json!({ "state": "pre-switchover" }))?;
    destination.qmp().wait_event_where("the end of the migration", ANSWER, |event| {
        event.name == "MIGRATION" && event.data["status"] == "completed"
    })?;
    destination.qmp().execute("nbd-server-stop", Value::Null)?;
    destination.qmp().execute("cont", Value::Null)?;
    let running = destination.qmp().wait_event("RESUME", ANSWER)?;
    source.qmp().wait_event_where("the end of the migration", ANSWER, |event| {
        event.name == "MIGRATION" && event.data["status"] == "completed"
    })?;
    told(source, running.emitted.saturating_sub(began), mirrored, true)
}

fn job(disk: &str) -> String {
    format!("move-{disk}")
}

/// Whatever a wait was for, unless it was too long.
fn in_time<T>(waited: Result<T, QmpError>) -> anyhow::Result<Option<T>> {
    match waited {
        Ok(value) => Ok(Some(value)),
        Err(QmpError::Timeout { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn prepare(
    source: &mut TestVm,
    destination: &mut TestVm,
    link: &SlowLink,
    disks: &[&str],
) -> anyhow::Result<()> {
    let capability = |name: &str, state: bool| json!({ "capability": name, "state": state });
    for (vm, pauses) in [(&mut *source, true), (&mut *destination, false)] {
        let capabilities =
            [capability("events", true), capability("pause-before-switchover", pauses)];
        vm.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        let parameters = json!({ "max-bandwidth": NO_LIMIT, "downtime-limit": DOWNTIME_LIMIT_MS });
        vm.qmp().execute("migrate-set-parameters", parameters)?;
        vm.qmp().forget_events();
    }
    let qmp = destination.qmp();
    let host = link.address();
    let address = json!({ "type": "inet", "data": { "host": host, "port": NBD_PORT.to_string() } });
    qmp.execute("nbd-server-start", json!({ "addr": address }))?;
    for disk in disks {
        let export = json!({ "type": "nbd", "id": job(disk), "node-name": disk, "name": disk,
            "writable": true });
        qmp.execute("block-export-add", export)?;
    }
    qmp.execute("migrate-incoming", json!({ "uri": format!("tcp:{host}:{PORT}") }))?;
    Ok(())
}

fn mirror(source: &mut TestVm, link: &SlowLink, disk: &str) -> anyhow::Result<()> {
    let server = json!({ "type": "inet", "host": link.address(), "port": NBD_PORT.to_string() });
    let target = format!("target-{disk}");
    let node = json!({ "driver": "nbd", "node-name": target, "server": server, "export": disk,
        "discard": "unmap" });
    source.qmp().execute("blockdev-add", node)?;
    let mirror = json!({ "job-id": job(disk), "device": disk, "target": target, "sync": "full",
        "on-target-error": "report" });
    source.qmp().execute("blockdev-mirror", mirror).map(drop).context("no mirror")
}

fn told(
    source: &mut TestVm,
    wall: Duration,
    mirrored: Duration,
    finished: bool,
) -> anyhow::Result<OwnDisksMigration> {
    let info = source.qmp().execute("query-migrate", Value::Null)?;
    let memory = ByteCount(info["ram"]["transferred"].as_u64().unwrap_or(0));
    Ok(OwnDisksMigration { finished, wall, mirrored, memory })
}

/// Out of patience. The mirrors are ended by force.
fn cancelled(
    source: &mut TestVm,
    disks: &[&str],
    began: Duration,
    mirrored: Duration,
) -> anyhow::Result<OwnDisksMigration> {
    let so_far = told(source, wall_clock().saturating_sub(began), mirrored, false)?;
    source.qmp().execute("migrate_cancel", Value::Null)?;
    for disk in disks {
        source.qmp().execute("block-job-cancel", json!({ "device": job(disk), "force": true }))?;
        source.qmp().wait_event("BLOCK_JOB_CANCELLED", ANSWER)?;
    }
    Ok(so_far)
}
