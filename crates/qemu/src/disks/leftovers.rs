//! What a godwit that was killed has left in QEMU: its server, exports and bitmaps, known by its mark and removed.

use serde_json::{Value, json};

use crate::QemuError;
use crate::disks::server;
use crate::machine::{Machine, text};
use crate::mark::Mark;
use crate::qmp::{Qmp, QmpError};

/// Removes whatever bears the mark of a process that is gone.
///
/// # Errors
/// When QEMU refuses.
pub(crate) fn clear(machine: &mut Machine) -> Result<(), QemuError> {
    remove(machine, |mark| !mark.is_alive())
}

/// Removes whatever bears one of some marks.
///
/// # Errors
/// When QEMU refuses.
pub(crate) fn remove(machine: &mut Machine, which: impl Fn(Mark) -> bool) -> Result<(), QemuError> {
    if server::owner(machine.pid).is_some_and(&which) {
        match machine.qmp.execute("nbd-server-stop", Value::Null) {
            // It was stopped before, and the socket lingers.
            Ok(_) | Err(QmpError::Refused { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    remove_exports(&mut machine.qmp, &which)?;
    remove_bitmaps(&mut machine.qmp, &which)?;
    let _ = server::remove_directories();
    Ok(())
}

/// Refuses a QEMU whose disks a living godwit is moving.
pub(crate) fn check_alone(qmp: &mut Qmp) -> Result<(), QemuError> {
    let exports = server::exports(qmp)?;
    let bitmaps = bitmaps(qmp)?;
    let mut names = exports.iter().chain(bitmaps.iter().map(|(_, name)| name));
    match names.find_map(|name| Mark::of(name)) {
        Some(mark) => Err(QemuError::OtherGodwit { pid: mark.pid }),
        None => Ok(()),
    }
}

fn remove_exports(qmp: &mut Qmp, which: impl Fn(Mark) -> bool) -> Result<(), QmpError> {
    for id in server::exports(qmp)? {
        if Mark::of(&id).is_some_and(&which) {
            qmp.execute("block-export-del", json!({ "id": id, "mode": "hard" }))?;
        }
    }
    Ok(())
}

/// Removes the bitmaps of some processes; none of them may be exported any more.
pub(crate) fn remove_bitmaps(qmp: &mut Qmp, which: impl Fn(Mark) -> bool) -> Result<(), QmpError> {
    let ours = bitmaps(qmp)?.into_iter().filter(|(_, name)| Mark::of(name).is_some_and(&which));
    let remove = |(node, name): (String, String)| json!({ "type": "block-dirty-bitmap-remove", "data": { "node": node, "name": name } });
    let actions: Vec<Value> = ours.map(remove).collect();
    if actions.is_empty() {
        return Ok(());
    }
    qmp.execute("transaction", json!({ "actions": actions })).map(drop)
}

/// Node and name of every bitmap.
fn bitmaps(qmp: &mut Qmp) -> Result<Vec<(String, String)>, QmpError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let mut found = Vec::new();
    for node in nodes.as_array().into_iter().flatten() {
        let bitmaps = node["dirty-bitmaps"].as_array().into_iter().flatten();
        found.extend(bitmaps.map(|bitmap| (text(&node["node-name"]), text(&bitmap["name"]))));
    }
    Ok(found)
}
