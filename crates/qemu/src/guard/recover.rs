//! Who has the guest, when godwit has ended without knowing it, and its guardian did not settle it
//! either: told by the record and by what QEMU does, and settled by the operator, who has looked at
//! both sides.
//!
//! Invariant: a guest is run here only if nobody can have it elsewhere, or the operator has said
//! so; one that has not come whole is never run.

use std::path::Path;

use super::guardian::undo;
use super::record::{Record, orphans};
use super::{Stage, connect, connect_briefly, connect_domain};
use crate::limits::Limits;
use crate::machine::Machine;
use crate::proxmox::ProxmoxVm;
use crate::source::{ANNOUNCED, announce};
use crate::{QemuError, destination, left, libvirt, way_back};

/// Who has the guest, as far as this side can know.
///
/// ```
/// use godwit_qemu::Known;
///
/// assert!(Known::InDoubt.is_unsettled() && !Known::Runs.is_unsettled());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// It runs here.
    Runs,
    /// None has come, or one that began to come did not arrive: it is the other side's.
    NeverCame,
    /// A godwit that was killed has stopped it, and did not begin to hand it over: it is this
    /// side's.
    Stopped,
    /// It was being handed over when the link or godwit was lost, and is stopped here.
    InDoubt,
    /// It was handed over to this side, which was not told to run it: it is this side's.
    HandedOver,
    /// The same; and if it runs there, it does so without all of its pages, which are here.
    Leaves,
    /// It runs at the destination without all of its pages, which are here.
    Follows,
    /// It runs here without all of its pages, which are at the source.
    Lacks,
    /// It is stopped here, and no godwit has left word of it.
    Silent,
}

impl Known {
    /// What it is, by QEMU's run state and by how far the last godwit came.
    fn judge(state: &str, stage: Option<Stage>) -> Self {
        match (state, stage) {
            ("running", _) => Self::Runs,
            ("inmigrate", _) | (_, Some(Stage::Waiting | Stage::Loading | Stage::Discarding)) => {
                Self::NeverCame
            }
            (_, Some(Stage::Stopping)) => Self::Stopped,
            (_, Some(Stage::HandingOver)) => Self::InDoubt,
            (_, Some(Stage::Starting)) => Self::HandedOver,
            // It was found so.
            (_, Some(Stage::Copying) | None) => Self::Silent,
        }
    }

    /// Whether an operator has to do something.
    #[must_use]
    pub fn is_unsettled(self) -> bool {
        let missing = matches!(self, Self::Leaves | Self::Follows | Self::Lacks);
        missing || matches!(self, Self::Stopped | Self::InDoubt | Self::HandedOver)
    }

    /// A word for programs.
    ///
    /// ```
    /// assert_eq!(godwit_qemu::Known::InDoubt.word(), "in-doubt");
    /// ```
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Runs => "runs",
            Self::NeverCame => "never-came",
            Self::Stopped => "stopped",
            Self::InDoubt => "in-doubt",
            Self::HandedOver => "handed-over",
            Self::Leaves => "leaves",
            Self::Follows => "follows",
            Self::Lacks => "lacks-pages",
            Self::Silent => "silent",
        }
    }

    /// What it is, in a sentence.
    ///
    /// ```
    /// assert!(godwit_qemu::Known::Runs.words().contains("runs here"));
    /// ```
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Runs => "the guest runs here",
            Self::NeverCame => "no guest has come to run here: it is the other side's",
            Self::Stopped => {
                "a godwit that was killed stopped the guest and did not hand it over: it is this \
                 side's"
            }
            Self::InDoubt => {
                "IN DOUBT: the guest is stopped here, and perhaps runs at the destination"
            }
            Self::HandedOver => {
                "the guest was handed over to this side and was not run yet: it is this side's"
            }
            Self::Leaves => {
                "IN DOUBT: the guest was leaving before all of its memory, and perhaps runs at the \
                 destination, where it needs what is here"
            }
            Self::Follows => {
                "the guest runs at the destination without all of its memory, which is here"
            }
            Self::Lacks => "the guest runs here, and memory of it is still at the source",
            Self::Silent => "the guest is stopped here, and no godwit has left word of it",
        }
    }

    fn lets_run(self, force: bool) -> bool {
        match self {
            Self::Stopped | Self::InDoubt | Self::Leaves | Self::HandedOver => true,
            Self::Silent | Self::Follows => force,
            Self::Runs | Self::Lacks | Self::NeverCame => false,
        }
    }

    fn lets_end(self, force: bool) -> bool {
        force || matches!(self, Self::InDoubt | Self::NeverCame)
    }
}

/// What is known of the guest of the QEMU `pid`, which is in the run state `state`.
///
/// ```
/// // No QEMU, and so no record of one.
/// assert_eq!(godwit_qemu::known_of(-1, "paused"), godwit_qemu::Known::Silent);
/// ```
#[must_use]
pub fn known_of(pid: i32, state: &str) -> Known {
    known(pid, state, stage_of(pid))
}

fn known(pid: i32, state: &str, stage: Option<Stage>) -> Known {
    match Known::judge(state, stage) {
        Known::InDoubt => match left::at_source(pid) {
            Some(record) if left::ran_there(&record) => Known::Follows,
            Some(_) => Known::Leaves,
            None => Known::InDoubt,
        },
        Known::Runs if left::lacks_pages(pid) => Known::Lacks,
        known => known,
    }
}

/// How far the godwits had come that are gone, of the QEMU `pid`.
pub(crate) fn stage_of(pid: i32) -> Option<Stage> {
    stage(&orphans(pid))
}

/// The stage that says most of several godwits'.
fn stage(records: &[Record]) -> Option<Stage> {
    let stages = || records.iter().map(|record| record.left().stage);
    let any = |wanted: Stage| stages().find(|stage| *stage == wanted);
    any(Stage::HandingOver).or_else(|| any(Stage::Starting)).or_else(|| stages().next())
}

/// A VM that nobody is at work on, and what is known of its guest.
#[derive(Debug)]
pub struct Recovery {
    machine: Machine,
    records: Vec<Record>,
    known: Known,
    state: String,
}

impl Recovery {
    /// The QEMU behind the monitor at `path`. Waits for the guardian of a godwit that was killed.
    ///
    /// # Errors
    /// When it is not there, or somebody is at work on it.
    pub fn of_monitor(path: &Path) -> Result<Self, QemuError> {
        Self::of(connect(path)?)
    }

    /// The domain `name` of the libvirt at `uri`.
    ///
    /// # Errors
    /// The same.
    pub fn of_domain(name: &str, uri: &str) -> Result<Self, QemuError> {
        Self::of(connect_domain(&libvirt::domain(name, uri)?)?)
    }

    /// The VM `id` of Proxmox's.
    ///
    /// # Errors
    /// The same.
    pub fn of_proxmox(id: &str) -> Result<Self, QemuError> {
        Self::of(connect_briefly(&ProxmoxVm::named(id)?.monitor())?)
    }

    /// The QEMU behind the monitor at `path`, for who goes on with what was left of it: nobody else
    /// is at work on that.
    pub(crate) fn beside(path: &Path) -> Result<Self, QemuError> {
        Self::look(connect(path)?)
    }

    fn of(machine: Machine) -> Result<Self, QemuError> {
        left::check_alone(machine.pid)?;
        Self::look(machine)
    }

    fn look(mut machine: Machine) -> Result<Self, QemuError> {
        let records = orphans(machine.pid);
        let state = machine.run_state()?;
        let known = known(machine.pid, &state, stage(&records));
        Ok(Self { machine, records, known, state })
    }

    /// Who has the guest.
    #[must_use]
    pub fn known(&self) -> Known {
        self.known
    }

    /// QEMU's word for what it does.
    #[must_use]
    pub fn state(&self) -> &str {
        &self.state
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.machine.pid
    }

    /// Has the guest run here, puts QEMU back as it was, and forgets the record. One that was
    /// paused before the migration stays so; returns what is to be told of it, if QEMU has it
    /// otherwise than it was.
    ///
    /// # Errors
    /// When what is known stands against it, unless it is `force`d, or QEMU does not do it. Who
    /// knows of no guest that could run here refuses always.
    pub fn run_here(mut self, force: bool) -> Result<Option<&'static str>, QemuError> {
        let mut otherwise = None;
        match self.known {
            Known::Runs | Known::Lacks => {}
            known if !known.lets_run(force) => {
                let (what, for_force) = ("run it here", known.lets_run(true));
                return Err(QemuError::Settled { known: known.words(), what, for_force });
            }
            known => {
                let was_running = match known {
                    Known::Stopped | Known::InDoubt | Known::Leaves | Known::Follows => {
                        self.records.iter().all(|record| record.left().was_running)
                    }
                    _ => true,
                };
                let as_it_was = (was_running, true);
                way_back::run_again(&mut self.machine, as_it_was, Limits::default(), |_| {})?;
                let limit = Limits::default().resume;
                otherwise = way_back::stays_otherwise(&mut self.machine, was_running, limit);
                // Whoever was told that it is elsewhere should know better.
                let _ = announce(&mut *self.machine.qmp, ANNOUNCED);
            }
        }
        left::forget(self.machine.pid);
        for record in &mut self.records {
            record.note(|left| left.stage = Stage::Copying).map_err(super::unwritable)?;
            undo(&mut self.machine, record)?;
            record.remove();
        }
        Ok(otherwise)
    }

    /// Ends this VM, whose guest is the other side's, and forgets the record.
    ///
    /// # Errors
    /// When what is known stands against it, unless it is `force`d, or QEMU does not end.
    pub fn end_here(mut self, force: bool) -> Result<(), QemuError> {
        if !self.known.lets_end(force) {
            let (known, what) = (self.known.words(), "end this VM");
            return Err(QemuError::Settled { known, what, for_force: true });
        }
        destination::end(&mut self.machine)?;
        self.records.iter().for_each(Record::remove);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_run_only_where_it_can_be() {
        let all = |state: &str| Stage::ALL.map(|stage| Known::judge(state, Some(stage)));
        assert!(all("running").iter().all(|known| *known == Known::Runs));
        assert!(all("inmigrate").iter().all(|known| *known == Known::NeverCame));
        for state in ["paused", "postmigrate", "finish-migrate"] {
            assert_eq!(
                all(state),
                [
                    Known::Silent,
                    Known::Stopped,
                    Known::InDoubt,
                    Known::NeverCame,
                    Known::NeverCame,
                    Known::HandedOver,
                    Known::NeverCame
                ]
            );
            assert_eq!(Known::judge(state, None), Known::Silent);
        }
        // Half a guest is not run by force either.
        assert!(!Known::NeverCame.lets_run(true));
        assert!(Known::Silent.lets_run(true) && !Known::Silent.lets_run(false));
        // Its pages are nowhere else; but where it never came it is this side's.
        assert!(Known::Leaves.lets_run(false) && !Known::Leaves.lets_end(false));
        assert!(!Known::Follows.lets_run(false) && !Known::Follows.lets_end(false));
        assert!(!Known::Lacks.lets_run(true) && !Known::Lacks.lets_end(false));
        let lost = [Known::Runs, Known::Stopped, Known::HandedOver, Known::Silent];
        assert!(lost.iter().all(|known| !known.lets_end(false) && known.lets_end(true)));
        assert!(Known::InDoubt.lets_run(false) && Known::InDoubt.lets_end(false));
    }
}
