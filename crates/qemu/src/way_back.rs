//! Back to how the guest was found: QEMU's own migration cancelled, the guest run again.
//!
//! Two call this: a migration that failed, and the guardian of one whose godwit died.

use std::time::{Duration, Instant};

use godwit_units::format_duration;

use crate::QemuError;
use crate::limits::Limits;
use crate::machine::{Machine, is_over};
use crate::monitor::QmpError;
use crate::monitor::commands::{Cont, MigrateCancel, MigrateContinue, Stop};

/// How long a migration may say that it is being cancelled before it is helped along.
const CANCEL_LIMIT: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(1);
/// A wait for QEMU's storage that is longer is told of: somebody sits there and sees nothing
/// happen.
pub(crate) const TOLD_AFTER: Duration = Duration::from_secs(3);

/// Ends QEMU's migration, wherever it is, and then runs the guest if `was_running`. A QEMU whose
/// main loop stands still is waited for as long as `limits.hang`, all else for `limits.resume`.
/// `told` hears of a wait that is long.
pub(crate) fn run_again(
    machine: &mut Machine,
    was_running: bool,
    limits: Limits,
    told: fn(&str),
) -> Result<(), QemuError> {
    let cancelled = cancel(machine, limits, told);
    if let Err(QemuError::Hangs { .. } | QemuError::Qmp(QmpError::Closed { .. })) = cancelled {
        // It would not answer anything else either.
        return cancelled;
    }
    if was_running {
        run(machine, limits.resume)?;
    }
    cancelled
}

fn cancel(
    machine: &mut Machine,
    Limits { hang, resume, .. }: Limits,
    told: fn(&str),
) -> Result<(), QemuError> {
    // Before anything is asked: a QEMU whose main loop stands still answers nothing, and what was
    // queued by then is all that it does when it goes on. Where no migration is under way, it
    // changes nothing.
    let cancel = machine.qmp.start(&MigrateCancel)?;
    let first = TOLD_AFTER.min(hang);
    let answer = match machine.qmp.answer(&cancel, first) {
        Err(QmpError::Timeout { .. }) if first < hang => {
            let limit = format_duration(hang);
            told(&format!(
                "QEMU does not answer, its storage seems to hang: the guest runs on when that \
                 does; waiting up to {limit}"
            ));
            machine.qmp.answer(&cancel, hang - first)
        }
        answer => answer,
    };
    match answer {
        Err(QmpError::Timeout { .. }) => return Err(QemuError::Hangs { limit: hang }),
        answer => answer?,
    };
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
