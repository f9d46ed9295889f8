//! QEMU's own post-copy between two machines, in its best way for a guest that is to leave at once:
//! with preemption (pages that are waited for come over a connection of their own), without a limit
//! of bandwidth, and begun as soon as the migration is.

use std::time::Duration;

use anyhow::{Context, ensure};
use godwit_testbed::{TestVm, wall_clock};
use serde_json::{Value, json};

/// More than any link carries, in bytes a second.
const NO_LIMIT: u64 = 1 << 40;

/// One migration of QEMU's own.
pub(crate) struct Own {
    /// When it was asked for, by the clock of QEMU's events.
    pub(crate) began: Duration,
    /// When the guest ran at the destination.
    pub(crate) resumed: Duration,
    /// When all of its memory was there, too.
    pub(crate) ended: Duration,
    /// Bytes on the wire.
    pub(crate) sent: f64,
    /// Rounds, of which there is one.
    pub(crate) passes: u64,
    /// What both QEMUs say of it.
    pub(crate) words: Value,
}

/// Moves the guest.
pub(crate) fn post_copy(
    source: &mut TestVm,
    destination: &mut TestVm,
    limit: Duration,
) -> anyhow::Result<Own> {
    for vm in [&mut *source, &mut *destination] {
        prepare(vm)?;
        vm.qmp().forget_events();
    }
    destination.qmp().execute("migrate-incoming", json!({ "uri": "tcp:127.0.0.1:0" }))?;
    let listening = destination.qmp().execute("query-migrate", Value::Null)?;
    let port = listening["socket-address"][0]["port"].as_str();
    let port = port.with_context(|| format!("QEMU does not say where it listens: {listening}"))?;

    let began = wall_clock();
    source.qmp().execute("migrate", json!({ "uri": format!("tcp:127.0.0.1:{port}") }))?;
    source.qmp().execute("migrate-start-postcopy", Value::Null)?;
    let over = ["completed", "failed", "cancelled", "postcopy-paused"];
    let ended = source.qmp().wait_event_where("the end of the migration", limit, |event| {
        event.name == "MIGRATION"
            && event.data["status"].as_str().is_some_and(|status| over.contains(&status))
    })?;
    ensure!(
        ended.data["status"] == "completed",
        "QEMU's own migration is {}: {} {}",
        ended.data["status"],
        source.errors().trim(),
        destination.errors().trim()
    );
    let resumed = destination.qmp().wait_event("RESUME", limit)?.emitted;
    let here = source.qmp().execute("query-migrate", Value::Null)?;
    let there = destination.qmp().execute("query-migrate", Value::Null)?;
    let ram = &here["ram"];
    ensure!(ram["postcopy-bytes"].as_u64().is_some_and(|bytes| bytes > 0), "no post-copy: {here}");
    Ok(Own {
        began,
        resumed,
        ended: ended.emitted.max(resumed),
        sent: ram["transferred"].as_f64().context("no ram.transferred")?,
        passes: ram["dirty-sync-count"].as_u64().context("no ram.dirty-sync-count")?,
        words: json!({ "source": here, "destination": there }),
    })
}

fn prepare(vm: &mut TestVm) -> anyhow::Result<()> {
    // It says of itself how long the guest's processors waited, in whole milliseconds; this takes
    // next to nothing.
    let names = ["events", "postcopy-ram", "postcopy-preempt", "postcopy-blocktime"];
    let capabilities = names.map(|name| json!({ "capability": name, "state": true }));
    vm.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
    // Of bandwidth after the switch zero is no limit.
    let parameters = json!({ "max-bandwidth": NO_LIMIT, "max-postcopy-bandwidth": 0 });
    vm.qmp().execute("migrate-set-parameters", parameters)?;
    Ok(())
}
