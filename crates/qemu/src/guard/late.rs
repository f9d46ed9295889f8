//! When guardian and godwit were both killed: what the record names is undone by the next godwit
//! that comes to this QEMU.
//!
//! Somebody may have been here in between, so only what is still as godwit made it is put back, and
//! a guest that stands is left to the operator, who may have moved it by other means.

use super::record::{Record, orphans};
use super::{Left, Stage};
use crate::machine::Machine;
use crate::monitor::commands::CloseFd;
use crate::{FD_NAMES, QemuError, device_state};

/// Puts back what a godwit that is gone has set and nobody has changed since.
pub(crate) fn clear(machine: &mut Machine) -> Result<(), QemuError> {
    for record in orphans(machine.pid) {
        let Left { settings, mut limits, .. } = record.left().clone();
        limits.restore_ours(&mut *machine.qmp)?;
        if let Some(settings) = settings {
            settings.restore_ours(&mut *machine.qmp)?;
        }
        close_descriptors(machine, record.left())?;
        record.remove();
    }
    Ok(())
}

/// Closes whatever descriptor of godwit's QEMU still holds, under a name or in a set.
pub(super) fn close_descriptors(machine: &mut Machine, left: &Left) -> Result<(), QemuError> {
    if left.fd_set {
        device_state::forget(&mut *machine.qmp)?;
    }
    for name in FD_NAMES {
        // Most often there is none.
        machine.qmp.run_if_known(&CloseFd { fdname: name })?;
    }
    Ok(())
}

/// What to do about a guest that a godwit that is gone left stopped in the QEMU `pid`, if there is
/// one.
pub(crate) fn cure(pid: i32) -> Option<&'static str> {
    orphans(pid).iter().map(Record::left).find_map(|left| match left.stage {
        Stage::Stopping => Some(
            "a godwit that was killed stopped it and did not hand it over: godwit recover --vm VM \
             --guest here",
        ),
        Stage::HandingOver => Some(
            "a godwit that was killed was handing its guest over: godwit recover --vm VM tells \
             what to do",
        ),
        _ => None,
    })
}
