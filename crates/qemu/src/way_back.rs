//! Back to how the guest was found: QEMU's own migration cancelled, the guest run again.
//!
//! Two call this: a migration that failed, and the guardian of one whose godwit died.
//!
//! A migration that saves the devices is not cancelled. QEMU before 9.0 may carry out a command in
//! the middle of what its migration does with disks: the handler runs in the main loop's context,
//! which whoever waits for a disk polls as well (`monitor_qmp_dispatcher_co`; mended by "monitor:
//! only run coroutine commands in qemu_aio_context"). A `migrate_cancel` that comes while images
//! are let go of takes back those that are gone by then and no others, QEMU runs the guest, and its
//! next write ends QEMU (`bdrv_co_write_req_prepare: Assertion`). Left alone it ends by itself,
//! soon: what it saves is little, and nobody reads it any more.

use std::time::{Duration, Instant};

use godwit_units::format_duration;
use serde_json::Value;

use crate::QemuError;
use crate::limits::Limits;
use crate::machine::{Machine, is_over};
use crate::monitor::commands::{Command, Cont, MigrateCancel, MigrateContinue, QueryMigrate, Stop};
use crate::monitor::{QmpError, Version};

/// How long a migration may say that it is being cancelled before it is helped along.
const CANCEL_LIMIT: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(1);
/// From being told to go on to a migration that says so: a thread of QEMU's wakes up.
const TAKEN_UP: Duration = Duration::from_millis(20);
/// Since then a command is carried out between what QEMU does with disks, and not within it.
const CANCELS_BETWEEN: Version = (9, 0, 0);
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
    // A guest that QEMU does not run by itself finds its disks: `cont` takes the images back.
    let harms = was_running && may_save && machine.qmp.version() < CANCELS_BETWEEN;
    let has_saved = if harms { has_saved(machine, limits, told) } else { Ok(false) };
    let cancelled = match has_saved {
        Ok(false) => cancel(machine, limits, told),
        saved => saved.map(drop),
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

/// What QEMU answers to `command`, whose main loop may stand still.
fn ask<C: Command>(
    machine: &mut Machine,
    command: &C,
    hang: Duration,
    told: fn(&str),
) -> Result<Value, QemuError> {
    let queued = machine.qmp.start(command)?;
    let first = TOLD_AFTER.min(hang);
    let answer = match machine.qmp.answer(&queued, first) {
        Err(QmpError::Timeout { .. }) if first < hang => {
            told(&hangs(hang));
            machine.qmp.answer(&queued, hang - first)
        }
        answer => answer,
    };
    match answer {
        Err(QmpError::Timeout { .. }) => Err(QemuError::Hangs { limit: hang }),
        answer => Ok(answer?),
    }
}

fn hangs(limit: Duration) -> String {
    let limit = format_duration(limit);
    format!(
        "QEMU does not answer, its storage seems to hang: the guest runs on when that does; \
         waiting up to {limit}"
    )
}

/// Waits for the end of a migration that saves devices; whether there is none under way then. One
/// that waits to be told to is given a moment, since it may have been, and says so a little later.
/// What is let go of on storage that hangs may answer meanwhile, and is not cancelled either.
fn has_saved(
    machine: &mut Machine,
    Limits { hang, .. }: Limits,
    told: fn(&str),
) -> Result<bool, QemuError> {
    let began = Instant::now();
    let mut silent = true;
    loop {
        let answer = ask(machine, &QueryMigrate, hang, told)?;
        let state = answer["status"].as_str().unwrap_or_default();
        match state {
            "pre-switchover" if began.elapsed() >= TAKEN_UP => return Ok(false),
            "pre-switchover" => {}
            "device" if began.elapsed() >= hang => return Err(QemuError::Hangs { limit: hang }),
            "device" => {}
            state => return Ok(is_over(state)),
        }
        if began.elapsed() >= TOLD_AFTER && std::mem::take(&mut silent) {
            told(&hangs(hang));
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

/// What is told of a guest that was found paused and that QEMU has not got `paused`.
///
/// None of QEMU's commands leads from `postmigrate` back to `paused` without running or resetting
/// the guest: only a running one is paused (`vm_stop`, `runstate_transitions_def` in
/// system/runstate.c). A migration that came to `completed` ends there in every version, and one
/// that failed or was cancelled with the guest stopped before 8.1 (`migration_iteration_finish`).
pub(crate) const STAYS_POSTMIGRATE: &str = "the guest stands still as it did before, but \
     QEMU calls it 'postmigrate' instead of 'paused' and knows no way back: `cont` runs it when \
     it is to run; godwit does not migrate it until then";

/// Looks, behind [`run_again`], at a guest that `was_running` or was found paused; what is to be
/// told of it, if QEMU has it otherwise now. Who cannot ask finds nothing to be told.
pub(crate) fn stays_otherwise(
    machine: &mut Machine,
    was_running: bool,
    limit: Duration,
) -> Option<&'static str> {
    if was_running {
        return None;
    }
    let until = Instant::now() + limit;
    loop {
        match machine.run_state().ok()?.as_str() {
            // QEMU reports the end of its migration a moment before it sets the run state.
            "finish-migrate" if Instant::now() < until => std::thread::sleep(PAUSE),
            "postmigrate" => return Some(STAYS_POSTMIGRATE),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::monitor::stand_in::StandIn;

    /// What a QEMU of this version is told that says these states of its migration, one after the
    /// other, and what comes of it.
    fn told(
        version: Version,
        states: &[&str],
        as_it_was: (bool, bool),
    ) -> (Vec<String>, Result<(), QemuError>) {
        let states = states.iter().map(|state| json!({ "status": state })).collect();
        let stand_in = StandIn::default().of_version(version).in_turn("query-migrate", states);
        let told = Arc::clone(&stand_in.told);
        let mut machine = Machine::behind(Box::new(stand_in)).unwrap();
        let limits = Limits { hang: Duration::from_millis(100), ..Limits::default() };
        let done = run_again(&mut machine, as_it_was, limits, |_| {});
        let told = told.lock().unwrap();
        let names = told.iter().map(|(command, _)| command.clone());
        (names.filter(|command| !command.starts_with("query-")).collect(), done)
    }

    fn cancels(version: Version, states: &[&str], as_it_was: (bool, bool)) -> bool {
        let (told, done) = told(version, states, as_it_was);
        assert!(done.is_ok(), "{done:?}");
        told == ["migrate_cancel"]
    }

    const OLD: Version = (7, 2, 22);

    #[test]
    fn a_paused_guest_that_qemu_has_otherwise_is_told_of() {
        // Mutation: it is not looked at again when the migration has ended and the state is late.
        for (states, told) in [
            (&["paused"][..], None),
            (&["finish-migrate", "finish-migrate", "postmigrate"], Some(STAYS_POSTMIGRATE)),
            (&["finish-migrate", "paused"], None),
        ] {
            let all = states.iter().map(|state| json!({ "status": state })).collect();
            let stand_in = StandIn::default().in_turn("query-status", all);
            let given = Arc::clone(&stand_in.told);
            let mut machine = Machine::behind(Box::new(stand_in)).unwrap();
            assert_eq!(stays_otherwise(&mut machine, false, Duration::from_secs(5)), told);
            let given = given.lock().unwrap();
            assert_eq!(given.len(), states.len(), "it is asked and told nothing: {given:?}");
        }
    }

    #[test]
    fn a_migration_that_saves_devices_is_waited_for_and_not_cancelled() {
        for ended in ["completed", "failed"] {
            let states = ["pre-switchover", "device", "device", ended];
            assert!(!cancels(OLD, &states, (true, true)), "{ended}");
        }
        // Later ones carry it out when it does no harm, and run no guest that was paused.
        let states = ["cancelling", "cancelled"];
        assert!(cancels((9, 0, 0), &states, (true, true)));
        assert!(cancels(OLD, &states, (false, true)));
    }

    #[test]
    fn one_that_saves_on_storage_that_hangs_is_not_cancelled_either() {
        let (told, done) = told(OLD, &["device"; 1000], (true, true));
        assert_eq!(told, [""; 0]);
        assert!(matches!(done, Err(QemuError::Hangs { .. })), "{done:?}");
    }

    #[test]
    fn one_that_was_not_told_to_save_them_is_cancelled_at_once() {
        assert!(cancels(OLD, &["cancelling", "cancelled"], (true, false)));
        // It could have been told by one that was killed: what it says is waited for, a moment.
        let waits = [&["pre-switchover"; 100][..], &["cancelled"]].concat();
        assert!(cancels(OLD, &waits, (true, true)));
        assert!(cancels(OLD, &["active", "cancelled"], (true, true)));
    }
}
