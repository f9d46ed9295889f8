//! The source's state machine.

use crate::Unexpected;

/// Where the source is. States that count rounds carry the number of the round in progress or just
/// made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Nothing was said yet.
    Idle,
    /// The offer is out.
    Negotiating,
    /// The guest runs; its memory is copied round by round.
    PreCopy {
        /// The round.
        round: u32,
    },
    /// The destination gets ready for the device state; the guest still runs.
    Preparing {
        /// The round that was made last.
        round: u32,
    },
    /// Both machines are ready. What was written meanwhile is copied, so that the guest is stopped
    /// for less; it still runs.
    Closing {
        /// The round.
        round: u32,
    },
    /// The connections were lost in pre-copy. The guest runs free, its writes are tracked, and the
    /// destination is tried for.
    Severed {
        /// The round that was made last, or cut off.
        round: u32,
    },
    /// The same when both machines were ready.
    SeveredClosing {
        /// The round that was made last, or cut off.
        round: u32,
    },
    /// The guest is being stopped.
    Stopping {
        /// The round that was made last.
        round: u32,
    },
    /// The guest is stopped; the last dirty pages are copied.
    StopAndCopy,
    /// Both sides compute digests of all memory.
    Verifying,
    /// The device state is saved and sent.
    SavingState,
    /// All is sent; the destination loads it.
    AwaitingReady,
    /// COMMIT is out: the guest is the destination's.
    Handover,
    /// The connection broke after COMMIT: who runs the guest is unknown. It stays stopped here.
    InDoubt,
    /// The guest runs at the destination, where pages are missing that only this side has. It keeps
    /// all of them until each is in place.
    Serving,
    /// The same with the connections lost. They are tried for without end: to give up would lose
    /// the guest.
    SeveredServing,
    /// The guest runs at the destination, and nothing is missing there.
    Done,
    /// The guest stays here and runs, if it ran before.
    Cancelled,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// The operator wants it, the connection stands.
    Start,
    /// The operator wants the migration taken up again that another godwit began here, which was
    /// killed in pre-copy.
    Restart,
    /// The same of one that was killed when the guest ran at the destination, or may have, and
    /// pages were missing there.
    Follow,
    /// The destination accepts the offer.
    Accepted,
    /// The destination has every page of the round in place.
    RoundPlaced,
    /// Every page of the last round is on its way, and so is the word that ends the round.
    RoundSent,
    /// The last round has ended without the pages that are left, and the destination was told
    /// which these are.
    MissingListed,
    /// The destination has every page that was missing.
    AllPlaced,
    /// Policy wants another round.
    NextRound,
    /// Policy wants to switch over.
    SwitchOver,
    /// The destination is ready for the device state.
    Prepared,
    /// The same, and another round would gain nothing, or the operator does not want to wait for
    /// one.
    PreparedInHaste,
    /// The guest is stopped and its devices are drained.
    GuestStopped,
    /// The digests of both sides are equal.
    DigestsEqual,
    /// The device state is sent to its end.
    StateSent,
    /// The destination could run the guest.
    Ready,
    /// The destination runs the guest.
    Running,
    /// The destination does not run the guest and never will.
    Discarded,
    /// A connection to the destination stands again.
    Reconnected,
    /// The connections to the destination are lost, or could not be made again yet.
    LinkLost,
    /// They stand again, and the destination has said what it has.
    Resumed,
    /// Anything went wrong, here, there or between, or the operator cancelled.
    Failed,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Tell the destination what will come.
    SendOffer,
    /// Start tracking writes.
    StartTracking,
    /// Copy what is dirty, with the guest running.
    CopyRound(u32),
    /// Ask policy what is next.
    AskPolicy,
    /// Tell the destination to get ready.
    SendPrepare,
    /// Stop the guest.
    StopGuest,
    /// Copy the last dirty pages.
    CopyLastRound(u32),
    /// End the last round, tell the destination which pages are left, and answer it from here on
    /// when it asks for one.
    ListMissing(u32),
    /// Send the pages that are missing, those first that the guest waits for.
    ServePages,
    /// Compute digests and compare them with the destination's.
    CompareDigests,
    /// Begin to copy the last dirty pages.
    StartLastRound(u32),
    /// Let the machine save its device state. None of it is sent before the end of the last round.
    ReleaseState,
    /// Send the device state to its end.
    FinishState,
    /// Give the guest away.
    SendCommit,
    /// Find out who runs the guest.
    Resolve,
    /// End what is left of the connections, and let the guest run free.
    Sever,
    /// Try once to make the connections again.
    Reconnect,
    /// Tell the destination that it was heard.
    SendFarewell,
    /// The guest is gone: end the VM here.
    RetireGuest,
    /// Tell the destination that it is over.
    SendAbort,
    /// Remove tracking, and run the guest if it ran before.
    ResumeGuest,
}

/// How the pages go over that are dirty when the guest has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LastPages {
    /// In the last round, before the handover.
    Sent,
    /// The same, and digests of all memory are compared before it.
    Compared,
    /// Behind the handover, while the guest runs at the destination (post-copy).
    Left,
}

impl LastPages {
    /// In the last round; `verify` says whether digests are compared.
    #[must_use]
    pub fn sent(verify: bool) -> Self {
        if verify { Self::Compared } else { Self::Sent }
    }
}

impl State {
    /// Whether the source may run the guest in this state.
    #[must_use]
    pub fn may_run_guest(self) -> bool {
        match self {
            Self::Idle
            | Self::Negotiating
            | Self::PreCopy { .. }
            | Self::Preparing { .. }
            | Self::Closing { .. }
            | Self::Severed { .. }
            | Self::SeveredClosing { .. }
            | Self::Stopping { .. }
            | Self::StopAndCopy
            | Self::Verifying
            | Self::SavingState
            | Self::AwaitingReady
            | Self::Cancelled => true,
            Self::Handover | Self::InDoubt | Self::Serving | Self::SeveredServing | Self::Done => {
                false
            }
        }
    }

    /// Whether nothing more will happen.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Done | Self::Cancelled)
    }
}

/// One step; `last` says how the last pages go over. It may change until the guest is stopped, and
/// not after that.
///
/// # Errors
/// When the input is out of place: the caller treats that as [`Input::Failed`].
pub fn step(
    state: State,
    input: Input,
    last: LastPages,
) -> Result<(State, Vec<Action>), Unexpected> {
    use {Action as A, Input as I, LastPages as L, State as S};
    Ok(match (state, input) {
        (S::Idle, I::Start) => (S::Negotiating, vec![A::SendOffer]),
        // Nothing is known any more of what was sent. The destination says what it holds; until
        // then this is a session whose connections are lost.
        (S::Idle, I::Restart) => (S::Severed { round: 0 }, vec![A::StartTracking, A::Reconnect]),
        // COMMIT was or may have been sent. What is missing, the destination says when it is back.
        (S::Idle, I::Follow) if last == L::Left => (S::InDoubt, vec![A::Resolve]),
        (S::Negotiating, I::Accepted) => {
            (S::PreCopy { round: 0 }, vec![A::StartTracking, A::CopyRound(0)])
        }
        (S::PreCopy { .. } | S::Closing { .. }, I::RoundPlaced) => (state, vec![A::AskPolicy]),
        (S::PreCopy { round }, I::NextRound) => {
            (S::PreCopy { round: round + 1 }, vec![A::CopyRound(round + 1)])
        }
        (S::PreCopy { round }, I::SwitchOver) => (S::Preparing { round }, vec![A::SendPrepare]),
        // Preparing takes its time, in which the guest has written. One round more as a rule;
        // policy is asked again, since the guest may write more than it did when it was asked
        // before.
        (S::Preparing { round }, I::Prepared) | (S::Closing { round }, I::NextRound) => {
            (S::Closing { round: round + 1 }, vec![A::CopyRound(round + 1)])
        }
        (S::Preparing { round }, I::PreparedInHaste) | (S::Closing { round }, I::SwitchOver) => {
            (S::Stopping { round }, vec![A::StopGuest])
        }
        // As long as the guest has not been stopped, lost connections are made again. What was
        // under way is a round that has ended early; another one follows. A destination that was
        // asked to get ready and may or may not be is asked once more.
        (S::PreCopy { round } | S::Preparing { round }, I::LinkLost) => {
            (S::Severed { round }, vec![A::Sever, A::Reconnect])
        }
        (S::Closing { round }, I::LinkLost) => {
            (S::SeveredClosing { round }, vec![A::Sever, A::Reconnect])
        }
        (S::Severed { .. } | S::SeveredClosing { .. }, I::LinkLost) => (state, vec![A::Reconnect]),
        (S::Severed { round }, I::Resumed) => {
            (S::PreCopy { round: round + 1 }, vec![A::CopyRound(round + 1)])
        }
        (S::SeveredClosing { round }, I::Resumed) => {
            (S::Closing { round: round + 1 }, vec![A::CopyRound(round + 1)])
        }
        // The machine saves its devices while the last pages are copied. The destination takes both
        // in the order in which they were sent, so it need not be waited for in between.
        (S::Stopping { round }, I::GuestStopped) if last == L::Sent => {
            let round = round + 1;
            (
                S::StopAndCopy,
                vec![A::StartLastRound(round), A::ReleaseState, A::CopyLastRound(round)],
            )
        }
        (S::StopAndCopy, I::RoundSent) if last == L::Sent => (S::SavingState, vec![A::FinishState]),
        // What is left is told behind the end of a round, so that no page of a round is placed on
        // one that is awaited. A machine that loads its devices may look at guest memory, so the
        // destination may ask for pages from here on.
        (S::Stopping { round }, I::GuestStopped) if last == L::Left => {
            let round = round + 1;
            (S::StopAndCopy, vec![A::StartLastRound(round), A::ReleaseState, A::ListMissing(round)])
        }
        (S::StopAndCopy, I::MissingListed) if last == L::Left => {
            (S::SavingState, vec![A::FinishState])
        }
        // Digests are compared before anything else is done.
        (S::Stopping { round }, I::GuestStopped) => {
            (S::StopAndCopy, vec![A::StartLastRound(round + 1), A::CopyLastRound(round + 1)])
        }
        (S::StopAndCopy, I::RoundPlaced) if last == L::Compared => {
            (S::Verifying, vec![A::CompareDigests])
        }
        (S::Verifying, I::DigestsEqual) => (S::SavingState, vec![A::ReleaseState, A::FinishState]),
        (S::SavingState, I::StateSent) => (S::AwaitingReady, vec![]),
        (S::AwaitingReady, I::Ready) => (S::Handover, vec![A::SendCommit]),
        (S::Handover | S::InDoubt, I::Running) if last == L::Left => {
            (S::Serving, vec![A::ServePages])
        }
        (S::Serving, I::AllPlaced) => (S::Done, vec![A::SendFarewell, A::RetireGuest]),
        (S::Handover | S::InDoubt, I::Running) => (S::Done, vec![A::SendFarewell, A::RetireGuest]),

        // Only this side has the pages that are missing. Whatever fails, it keeps them and comes
        // back.
        (S::Serving, I::LinkLost | I::Failed) => (S::SeveredServing, vec![A::Sever, A::Reconnect]),
        (S::SeveredServing, I::LinkLost | I::Failed) => (state, vec![A::Reconnect]),
        (S::SeveredServing, I::Resumed) => (S::Serving, vec![A::ServePages]),

        // Who may run the guest? Before COMMIT: the source, whatever happened.
        (state, I::Failed | I::LinkLost) if state.may_run_guest() && state != S::Cancelled => {
            (S::Cancelled, vec![A::SendAbort, A::ResumeGuest])
        }
        // After COMMIT: whoever the destination says.
        (S::Handover | S::InDoubt, I::Failed | I::LinkLost) => (S::InDoubt, vec![A::Resolve]),
        (S::InDoubt, I::Reconnected) => (S::InDoubt, vec![A::SendCommit]),
        (S::Handover | S::InDoubt, I::Discarded) => (S::Cancelled, vec![A::ResumeGuest]),

        (state, input) => {
            return Err(Unexpected { state: format!("{state:?}"), input: format!("{input:?}") });
        }
    })
}
