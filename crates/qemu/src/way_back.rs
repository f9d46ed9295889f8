//! Back to how the guest was found: QEMU's own migration cancelled, the guest run again.
//!
//! Two call this: a migration that failed, and the guardian of one whose godwit died.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::QemuError;
use crate::machine::{Machine, is_over};
use crate::qmp::QmpError;

const LIMIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(1);

/// Ends QEMU's migration, wherever it is, and then runs the guest if `was_running`.
pub(crate) fn run_again(machine: &mut Machine, was_running: bool) -> Result<(), QemuError> {
    let cancelled = cancel(machine);
    if was_running {
        run(machine)?;
    }
    cancelled
}

/// Runs the guest.
pub(crate) fn run(machine: &mut Machine) -> Result<(), QemuError> {
    let until = Instant::now() + LIMIT;
    loop {
        let state = machine.run_state()?;
        if state == "running" {
            return Ok(());
        }
        // QEMU reports the end of its migration a moment before it lets go of the run state, and refuses `cont`
        // in between; after a failure it runs the guest by itself.
        match machine.qmp.execute("cont", Value::Null) {
            Err(QmpError::Refused { .. }) if Instant::now() < until => std::thread::sleep(PAUSE),
            Ok(_) if Instant::now() < until => {}
            Err(QmpError::Refused { .. }) | Ok(_) => {
                return Err(QemuError::NotRunning {
                    state,
                    cure: "look at QEMU's log and `cont` it by hand",
                });
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// The cancellation is the first thing that QEMU is told: behind a query that QEMU cannot answer yet it would never be
/// sent. QEMU ignores it where nothing is under way (`migrate_fd_cancel` in migration.c).
fn cancel(machine: &mut Machine) -> Result<(), QemuError> {
    let until = Instant::now() + LIMIT;
    machine.qmp.execute("migrate_cancel", Value::Null)?;
    while !is_over(&machine.migration_state()?) {
        if Instant::now() >= until {
            return Err(QemuError::State { action: "cancel", words: "it does not end".to_owned() });
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
