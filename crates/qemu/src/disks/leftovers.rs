//! What a godwit that was killed has left in QEMU: its server, exports and bitmaps, known by its
//! mark and removed.

use crate::QemuError;
use crate::disks::server;
use crate::machine::Machine;
use crate::mark::Mark;
use crate::monitor::commands::{BitmapAction, ExportDel, NbdServerStop, QueryNodes, Transaction};
use crate::monitor::{Monitor, QmpError};

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
        // Refused where it was stopped before, and the socket lingers.
        machine.qmp.run_if_known(&NbdServerStop)?;
    }
    remove_exports(&mut *machine.qmp, &which)?;
    remove_bitmaps(&mut *machine.qmp, &which)?;
    let _ = server::remove_directories();
    Ok(())
}

/// Refuses a QEMU whose disks a living godwit is moving.
pub(crate) fn check_alone(qmp: &mut dyn Monitor) -> Result<(), QemuError> {
    let exports = server::exports(qmp)?;
    let bitmaps = bitmaps(qmp)?;
    let mut names = exports.iter().chain(bitmaps.iter().map(|(_, name)| name));
    match names.find_map(|name| Mark::of(name)) {
        Some(mark) => Err(QemuError::OtherGodwit { pid: mark.pid }),
        None => Ok(()),
    }
}

fn remove_exports(qmp: &mut dyn Monitor, which: impl Fn(Mark) -> bool) -> Result<(), QmpError> {
    for id in server::exports(qmp)? {
        if Mark::of(&id).is_some_and(&which) {
            qmp.run(&ExportDel::hard(&id))?;
        }
    }
    Ok(())
}

/// Removes the bitmaps of some processes; none of them may be exported any more.
pub(crate) fn remove_bitmaps(
    qmp: &mut dyn Monitor,
    which: impl Fn(Mark) -> bool,
) -> Result<(), QmpError> {
    let ours = bitmaps(qmp)?.into_iter().filter(|(_, name)| Mark::of(name).is_some_and(&which));
    let remove = |(node, name)| BitmapAction::Remove { node, name };
    let actions: Vec<BitmapAction> = ours.map(remove).collect();
    if actions.is_empty() {
        return Ok(());
    }
    qmp.run(&Transaction { actions }).map(drop)
}

/// Node and name of every bitmap.
fn bitmaps(qmp: &mut dyn Monitor) -> Result<Vec<(String, String)>, QmpError> {
    let mut found = Vec::new();
    for node in qmp.run(&QueryNodes::FLAT)? {
        let bitmaps = node.dirty_bitmaps.into_iter();
        found.extend(bitmaps.map(|bitmap| (node.node_name.clone(), bitmap.name)));
    }
    Ok(found)
}
