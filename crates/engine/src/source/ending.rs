//! How a migration ends: its first failure, what kept the guest from being brought back, and what
//! both mean for the guest.

use std::path::Path;

use godwit_protocol::source::State;

use super::PEER;
use super::session::{Reason, Session};
use crate::vm::{SourceVm, VmError};
use crate::{EngineError, Failure, Phase, Survivor};

#[derive(Default)]
pub(super) struct Ending {
    /// The first failure, and when it was.
    cause: Option<(Phase, EngineError)>,
    /// What kept the guest from being resumed or retired.
    not_resumed: Option<VmError>,
    /// What shows that the guest at the destination is not what it was here.
    missed: Option<EngineError>,
}

impl Ending {
    /// Keeps the first failure, which is the cause of those that follow.
    pub(super) fn note(
        &mut self,
        state: State,
        error: EngineError,
        vm: &mut dyn SourceVm,
        committed: bool,
    ) {
        if self.cause.is_some() {
            return;
        }
        // What the machine did not do any more, it did not for this reason.
        let befallen = match error {
            EngineError::Vm(_) | EngineError::Ended(_) if !committed => vm.befallen(),
            _ => None,
        };
        self.cause = Some((phase_of(state), befallen.map_or(error, EngineError::Befallen)));
    }

    /// The destination gave the guest back, for this reason if it told one. What broke before is of
    /// no interest then.
    pub(super) fn was_discarded(&mut self, reason: Reason) {
        match reason {
            Some((code, text)) => {
                self.cause =
                    Some((Phase::Handover, EngineError::Aborted { peer: PEER, code, text }));
            }
            None => {
                let what = "it could not run the guest and has discarded it".to_owned();
                self.cause
                    .get_or_insert((Phase::Handover, EngineError::Protocol { peer: PEER, what }));
            }
        }
    }

    /// The guest was brought back or its machine ended, or that failed.
    pub(super) fn brought_back(&mut self, result: Result<(), VmError>) {
        self.not_resumed = result.err().or(self.not_resumed.take());
    }

    /// The guest runs at the destination, and this shows that it is not what it was here.
    pub(super) fn missed(&mut self, missed: Option<EngineError>) {
        self.missed = missed;
    }

    /// Why it ended, as far as it failed.
    pub(super) fn cause(&self) -> Option<&EngineError> {
        self.cause.as_ref().map(|(_, cause)| cause)
    }

    /// Where the link broke, the destination's own words say more.
    pub(super) fn hear_last_words(&mut self, session: &mut Session) {
        if let Some((_, cause @ EngineError::Link { .. })) = &mut self.cause
            && let Some(words) = session.last_words()
        {
            *cause = words;
        }
    }

    /// What became of a migration that ended in `state`, with a copy of what the destination lacked
    /// at `safe`, if there is one.
    pub(super) fn outcome(
        mut self,
        state: State,
        vm: &mut dyn SourceVm,
        safe: Option<&Path>,
    ) -> Result<(), Failure> {
        let survivor = match (state, self.not_resumed.is_some()) {
            (State::Done, false) if self.missed.is_none() => return Ok(()),
            (State::Done, false) => {
                self.cause = self.missed.take().map(|missed| (Phase::Handover, missed));
                Survivor::Destination
            }
            (State::Done, true) => Survivor::Destination,
            (State::Cancelled, _) if vm.has_ended() => {
                // What failed in consequence, and that it could not be brought back, need not be
                // said.
                let ended =
                    vm.befallen().map_or(EngineError::Ended("source"), EngineError::Befallen);
                self.cause = self.cause.map(|(phase, _)| (phase, ended));
                self.not_resumed = None;
                Survivor::Ended
            }
            (State::Cancelled, false) => Survivor::Source,
            (State::Cancelled, true) => Survivor::SourceStopped,
            // Its memory here has ended, and is elsewhere as well.
            (State::Serving | State::SeveredServing, _)
                if safe.is_some() && matches!(self.cause(), Some(EngineError::Ended("source"))) =>
            {
                if let (Some((_, cause)), Some(path)) = (&mut self.cause, safe) {
                    let why = "the source VM has ended, and the destination takes from here what \
                               it was not sent";
                    let (path, why) = (path.to_owned(), why.to_owned());
                    *cause = EngineError::Remainder { path, why };
                }
                Survivor::Destination
            }
            // Its machine there has ended, or its memory here.
            (State::Serving | State::SeveredServing, _) => Survivor::Lost,
            _ => Survivor::Unknown,
        };
        let (phase, cause) = match (self.cause, self.not_resumed) {
            (None, Some(source)) => (Phase::Handover, EngineError::Vm(source)),
            (Some((phase, cause)), Some(source)) => {
                (phase, EngineError::NotResumed { cause: Box::new(cause), source })
            }
            (Some((phase, cause)), None) => (phase, cause),
            (None, None) => (Phase::Setup, EngineError::Cancelled),
        };
        Err(Failure { phase, survivor, cause })
    }
}

fn phase_of(state: State) -> Phase {
    match state {
        State::Idle | State::Negotiating => Phase::Setup,
        State::PreCopy { .. }
        | State::Preparing { .. }
        | State::Closing { .. }
        | State::Severed { .. }
        | State::SeveredClosing { .. } => Phase::PreCopy,
        State::Stopping { .. }
        | State::StopAndCopy
        | State::Verifying
        | State::SavingState
        | State::AwaitingReady
        | State::Cancelled => Phase::StopAndCopy,
        State::Handover | State::InDoubt | State::Serving | State::SeveredServing | State::Done => {
            Phase::Handover
        }
    }
}
