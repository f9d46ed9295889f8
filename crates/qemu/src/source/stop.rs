//! Stopping the guest, by QEMU's migration or by a command.

use std::time::{Duration, Instant};

use godwit_units::format_duration;

use super::{FD_NAME, QemuSource, SILENT, failure_words, migration_event};
use crate::QemuError;
use crate::guard::Stage;
use crate::monitor::commands::{Migrate, Stop};
use crate::monitor::{Event, QmpError, Queued, Seen};
use crate::ram::StateBy;
use crate::way_back::TOLD_AFTER;

/// In force, the vCPUs stand still for nearly 100 ms at once, from its begin on.
const HOLD_SHARE: f64 = 0.99;
/// From a command to when QEMU acts on it.
const TAKEN_UP: Duration = Duration::from_micros(500);

/// What ends when the guest has stopped.
enum Stopping {
    /// QEMU's migration.
    Migration,
    /// A command, with its answer, and when it was given.
    Command(Queued, Instant),
}

impl QemuSource {
    /// What comes before the guest is told to stop, either way.
    fn prepare_stop(&mut self) -> Result<(), QemuError> {
        // QEMU needs its big lock for this, which a vCPU may hold while it stands still. Should the
        // throttle have failed, the guest runs freely and stops all the sooner.
        let _ = self.throttle.set_short(true);
        // What was plugged in since the start would have written unseen.
        self.check_unchanged()?;
        self.note(|left| left.stage = Stage::Stopping)?;
        self.take_events();
        self.stopping = true;
        Ok(())
    }

    /// Begins to stop the guest.
    fn begin_stop(&mut self) -> Result<Stopping, QemuError> {
        self.prepare_stop()?;
        self.held_since = None;
        if let Some(outlets) = &mut self.outlets {
            outlets.open();
        }
        let qmp = &mut *self.machine.qmp;
        Ok(match self.state_by {
            StateBy::Saving => {
                let given = Instant::now();
                let held = self.back_ends.as_ref().filter(|_| self.was_running);
                let held = held.is_some_and(|back_ends| {
                    let held = self.throttle.set_short(false).is_ok()
                        && self.throttle.set(HOLD_SHARE).is_ok();
                    if held {
                        back_ends.await_quiet();
                    }
                    held
                });
                let stop = qmp.start(&Stop)?;
                if held {
                    // They run as far as QEMU's wish to stop them, which it has by then.
                    std::thread::sleep(TAKEN_UP);
                    let _ = self.throttle.set(0.0);
                    self.held_since = Some(given);
                }
                Stopping::Command(stop, given)
            }
            StateBy::Migration => {
                qmp.run(&Migrate { uri: &format!("fd:{FD_NAME}") })?;
                Stopping::Migration
            }
        })
    }

    /// Stops the guest; returns when it stopped.
    pub(super) fn stop_guest(&mut self) -> Result<Instant, QemuError> {
        let stopping = self.begin_stop()?;
        let limit = self.limits.stop;
        let first = TOLD_AFTER.min(limit);
        let mut at = None;
        match self.await_stop(&stopping, &mut at, first) {
            Err(QemuError::Qmp(QmpError::Timeout { .. })) if first < limit => {
                (self.told)(&stops_late(limit));
                self.await_stop(&stopping, &mut at, limit - first)
            }
            stopped => stopped,
        }
        .map(|at| self.held_since.map_or(at, |held| at.min(held)))
        .map_err(|error| match error {
            QemuError::Qmp(QmpError::Timeout { during, .. }) => {
                QmpError::Timeout { during, limit }.into()
            }
            error => error,
        })
    }

    /// Waits for the end of a stop; in `at` is when the vCPUs stopped, as soon as they have.
    fn await_stop(
        &mut self,
        stopping: &Stopping,
        at: &mut Option<Instant>,
        limit: Duration,
    ) -> Result<Instant, QemuError> {
        match stopping {
            Stopping::Migration => self.await_migration(at, limit),
            Stopping::Command(command, given) => self.await_command(command, *given, limit),
        }
    }

    /// Waits for the end of a stop by a command, which QEMU answers when its disks are flushed.
    fn await_command(
        &mut self,
        stop: &Queued,
        given: Instant,
        limit: Duration,
    ) -> Result<Instant, QemuError> {
        self.machine.qmp.answer(stop, limit)?;
        let answered = Instant::now();
        // Its event comes before the answer.
        let mut stopped = None;
        for event in self.machine.qmp.take_events()? {
            self.fate.take(&event);
            if event.name == "STOP" {
                stopped.get_or_insert(event.at);
                self.fate.stands_still();
            }
        }
        match stopped {
            Some(at) => Ok(at),
            None if !self.was_running => Ok(answered),
            // Libvirt tells of events when it comes to it. The guest did not stop earlier than
            // this.
            None if self.machine.qmp.is_libvirts() => {
                self.fate.stands_still();
                Ok(given)
            }
            None => Err(self.stopped_by_another()),
        }
    }

    /// Something else has stopped the guest since it was looked at last, so it is not ours to run.
    fn stopped_by_another(&mut self) -> QemuError {
        self.was_running = false;
        self.fate.stands_still();
        QemuError::Changed("the guest stopped")
    }

    /// Waits for the end of a stop by QEMU's migration. The throttle ends with the event that says
    /// that the guest has stopped.
    fn await_migration(
        &mut self,
        stopped: &mut Option<Instant>,
        limit: Duration,
    ) -> Result<Instant, QemuError> {
        let Self { machine, throttle, tracker, fate, .. } = self;
        let qmp = &mut *machine.qmp;
        let mut look = |event: &Event| {
            fate.take(event);
            if event.name == "STOP" {
                stopped.get_or_insert(event.at);
                fate.stands_still();
                let _ = throttle.set(0.0);
                if let Some(tracker) = tracker.upgrade() {
                    tracker.answer_at_once();
                }
            }
            let reached = migration_event(event);
            match reached.as_str() {
                "pre-switchover" | "failed" | "completed" | "cancelled" => Seen::Awaited,
                _ => Seen::TakenIn,
            }
        };
        let reached = qmp.watch("pre-switchover", limit, &mut look)?;
        match (migration_event(&reached).as_str(), *stopped) {
            ("pre-switchover", Some(at)) => Ok(at),
            ("pre-switchover", None) if !self.was_running => Ok(reached.at),
            ("pre-switchover", None) => Err(self.stopped_by_another()),
            _ => Err(QemuError::State { action: "save", words: failure_words(qmp, SILENT) }),
        }
    }
}

/// What is told of a wait for the guest to stop.
fn stops_late(limit: Duration) -> String {
    let limit = format_duration(limit);
    format!("QEMU is to stop the guest and still flushes its disks; waiting for it, up to {limit}")
}
