//! Back to how the guest was found: QEMU's own migration cancelled, the guest run again.
//!
//! Two call this: a migration that failed, and the guardian of one whose godwit died.
//!
//! A migration that saves the devices is not cancelled. QEMU before 9.0 may carry out a command in
//! the middle of what its migration does with disks: the handler runs in the main loop's context,
//! which whoever waits for a disk polls as well (`monitor_qmp_dispatcher_co`; mended by "monitor:
//! only run coroutine commands in qemu_aio_context"). A `migrate_cancel` that comes while images are
//! let go of takes back those that are gone by then and no others, QEMU runs the guest, and its next
//! write ends QEMU (`bdrv_co_write_req_prepare: Assertion`). Left alone it ends by itself, soon: what
//! it saves is little, and nobody reads it any more.

use std::time::{Duration, Instant};

use godwit_units::format_duration;

use crate::QemuError;
use crate::limits::Limits;
use crate::machine::{Machine, is_over};
use crate::monitor::QmpError;
use crate::monitor::commands::{Command, Cont, MigrateCancel, MigrateContinue, QueryMigrate, Stop};

/// How long a migration may say that it is being cancelled before it is helped along.
const CANCEL_LIMIT: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(1);
/// A wait for QEMU's storage that is longer is told of: somebody sits there and sees nothing
/// happen.
pub(crate) const TOLD_AFTER: Duration = Duration::from_secs(3);

/// Ends QEMU's migration, wherever it is, and then runs the guest if `was_running`. It `may_save`
/// devices unless it is known that it was not told to. A QEMU whose main loop stands still is
/// waited for as long as `limits.hang`, all else for `limits.resume`. `told` hears of a wait that
/// is long.
pub(crate) fn run_again(
    machine: &mut Machine,
    (was_running, may_save): (bool, bool),
    limits: Limits,
    told: fn(&str),
) -> Result<(), QemuError> {
    let cancelled = if may_save && has_saved(machine, limits, told)? {
        Ok(())
    } else {
        cancel(machine, limits, told)
    };
    if let Err(QemuError::Hangs { .. } | QemuError::Qmp(QmpError::Closed { .. })) = cancelled {
        // It would not answer anything else either.
        return cancelled;
    }
    if was_running {
        run(machine, limits.resume)?;
    }
    cancelled
}

/// Has `command` answered by a QEMU whose main loop may stand still.
fn ask<C: Command>(
    machine: &mut Machine,
    command: &C,
    hang: Duration,
    told: fn(&str),
) -> Result<(), QemuError> {
    let queued = machine.qmp.start(command)?;
    let first = TOLD_AFTER.min(hang);
    let answer = match machine.qmp.answer(&queued, first) {
        Err(QmpError::Timeout { .. }) if first < hang => {
            let limit = format_duration(hang);
            told(&format!(
                "QEMU does not answer, its storage seems to hang: the guest runs on when that \
                 does; waiting up to {limit}"
            ));
            machine.qmp.answer(&queued, hang - first)
        }
        answer => answer,
    };
    match answer {
        Err(QmpError::Timeout { .. }) => Err(QemuError::Hangs { limit: hang }),
        answer => Ok(answer.map(drop)?),
    }
}

/// Waits for the end of a migration that saves devices; whether there is none under way then. One
/// that waits to be told to is given a moment, since it may have been, and says so a little later.
fn has_saved(
    machine: &mut Machine,
    Limits { hang, resume, .. }: Limits,
    told: fn(&str),
) -> Result<bool, QemuError> {
    ask(machine, &QueryMigrate, hang, told)?;
    let began = Instant::now();
    loop {
        let state = machine.migration_state()?;
        let patience = match state.as_str() {
            "device" => resume,
            "pre-switchover" => CANCEL_LIMIT,
            state => return Ok(is_over(state)),
        };
        if began.elapsed() >= patience {
            return Ok(false);
        }
        std::thread::sleep(PAUSE);
    }
}

fn cancel(
    machine: &mut Machine,
    Limits { hang, resume, .. }: Limits,
    told: fn(&str),
) -> Result<(), QemuError> {
    // Before anything is asked: a QEMU whose main loop stands still answers nothing, and what was
    // queued by then is all that it does when it goes on. Where no migration is under way, it
    // changes nothing.
    ask(machine, &MigrateCancel, hang, told)?;
    let until = Instant::now() + resume;
    let mut help_at = Instant::now() + CANCEL_LIMIT;
    loop {
        let state = machine.migration_state()?;
        if is_over(&state) {
            return Ok(());
        }
        let now = Instant::now();
        if now >= until {
            return Err(QemuError::State { action: "cancel", words: "it does not end".to_owned() });
        }
        // Where the command was queued while disks were drained, it may be carried out between the
        // moment in which QEMU 7.2 lets go of its lock and the one in which it says that it is in
        // pre-switchover: then it waits there for ever to be told to go on (migration_maybe_pause
        // in migration/migration.c).
        if state == "cancelling" && now >= help_at {
            help_at = now + CANCEL_LIMIT;
            machine.qmp.run_if_known(&MigrateContinue { state: &state })?;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Runs the guest.
pub(crate) fn run(machine: &mut Machine, limit: Duration) -> Result<(), QemuError> {
    let until = Instant::now() + limit;
    loop {
        let state = machine.run_state()?;
        if state == "running" {
            return Ok(());
        }
        // QEMU reports the end of its migration a moment before it lets go of the run state, and
        // refuses `cont` in between; after a failure it runs the guest by itself.
        let late = Instant::now() >= until;
        match machine.qmp.run(&Cont) {
            Err(QmpError::Refused { description: words, .. }) if late => {
                return Err(QemuError::NotRunning { state, words });
            }
            Ok(_) if late => {
                let words = "it accepted the last one and stopped again".to_owned();
                return Err(QemuError::NotRunning { state, words });
            }
            Ok(_) | Err(QmpError::Refused { .. }) => std::thread::sleep(PAUSE),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Keeps a guest that powered off or panicked from running: QEMU runs what it has stopped itself
/// once its migration is taken back, a moment after it has said that this has ended.
pub(crate) fn keep_stopped(machine: &mut Machine, limit: Duration) -> Result<(), QemuError> {
    let until = Instant::now() + limit;
    loop {
        let state = machine.run_state()?;
        if !matches!(state.as_str(), "running" | "finish-migrate") || Instant::now() >= until {
            return Ok(());
        }
        machine.qmp.run(&Stop)?;
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::monitor::stand_in::StandIn;

    /// What a QEMU is told that says these states of its migration, one after the other.
    fn told(states: &[&str], may_save: bool) -> Vec<String> {
        let states = states.iter().map(|state| json!({ "status": state })).collect();
        let stand_in = StandIn::default().in_turn("query-migrate", states);
        let told = Arc::clone(&stand_in.told);
        let mut machine = Machine::behind(Box::new(stand_in)).unwrap();
        run_again(&mut machine, (true, may_save), Limits::default(), |_| {}).unwrap();
        let told = told.lock().unwrap();
        let names = told.iter().map(|(command, _)| command.clone());
        names.filter(|command| !command.starts_with("query-")).collect()
    }

    #[test]
    fn a_migration_that_saves_devices_is_waited_for_and_not_cancelled() {
        for ended in ["completed", "failed"] {
            // The first word is waited for, and not looked at.
            let states = ["pre-switchover", "pre-switchover", "device", "device", ended];
            assert_eq!(told(&states, true), [""; 0], "{ended}");
        }
    }

    #[test]
    fn one_that_was_not_told_to_save_them_is_cancelled_at_once() {
        assert_eq!(told(&["cancelling", "cancelled"], false), ["migrate_cancel"]);
        // It could have been told by one that was killed: what it says is waited for, a moment.
        assert_eq!(told(&["active", "active", "cancelled"], true), ["migrate_cancel"]);
    }
}
