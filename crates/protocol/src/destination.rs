//! The destination's state machine.

use crate::Unexpected;

/// Where the destination is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Waiting for a source.
    Listening,
    /// Pages arrive.
    Receiving,
    /// The VM is ready for its device state; the last pages arrive.
    Prepared,
    /// The source was lost while pages arrived. What has arrived is kept, and the source waited
    /// for.
    Severed,
    /// The same when the VM was ready for its device state.
    SeveredPrepared,
    /// Device state arrives: the guest is stopped at the source.
    Filling,
    /// The device state is complete and being loaded.
    Loading,
    /// Everything is written, checked and loaded; the guest is stopped.
    Ready,
    /// COMMIT came: the guest is being started here.
    Starting,
    /// The guest runs here, and pages are missing that only the source has: who accesses one waits.
    Fetching,
    /// The same with the source lost. It is waited for without end.
    SeveredFetching,
    /// The guest runs here and nothing is missing; the source may not know yet.
    Running,
    /// The guest runs here, and the source knows.
    Done,
    /// The guest does not run here and never will.
    Discarded,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// A source offers a VM that fits.
    Offer,
    /// The source ended a round, and every channel has placed its pages.
    RoundEnd,
    /// The source is about to stop the guest.
    Prepare,
    /// The source asks for digests.
    DigestRequest,
    /// A source that was started anew, or that audits, asks for the fingerprints of all pages.
    PrintsRequest,
    /// The source has said which pages are still to come when the guest runs here.
    Missing,
    /// All of them are in place.
    AllPlaced,
    /// A piece of device state came.
    State,
    /// The device state is complete.
    StateEnd,
    /// The device state is loaded.
    Loaded,
    /// The guest is ours.
    Commit,
    /// The guest runs.
    Started,
    /// The source has heard that the guest runs here.
    Farewell,
    /// The connection broke, or the source makes another one.
    LinkLost,
    /// The source is back.
    Returned,
    /// The guest runs here, and one that was killed has left pages missing.
    Follow,
    /// The source gave up.
    Aborted,
    /// Something went wrong here, a wait reached its limit, or the operator cancelled.
    Failed,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Accept the offer.
    SendAccept,
    /// Say that the round is in place.
    SendRoundAck,
    /// Make the VM ready for its device state, and say so.
    Prepare,
    /// Say that the VM is ready for its device state.
    SendPrepared,
    /// End what is left of the connections. What came over them is in place behind this, or never
    /// will be.
    Sever,
    /// Wait for the source to take the migration up again.
    AwaitReturn,
    /// Say what is in place, and take the new connections.
    SendResumed,
    /// Compute and send digests.
    SendDigests,
    /// Compute and send the fingerprints of all pages.
    SendPrints,
    /// From here on whoever accesses one of the missing pages waits until it has come.
    AwaitPages,
    /// Ask the source for pages that somebody waits for, and place what it sends.
    FetchPages,
    /// Say that every missing page is in place.
    SendPlaced,
    /// Hand the piece of device state to the VM.
    WriteState,
    /// Wait until the VM has loaded it.
    FinishLoad,
    /// Say that the guest could run.
    SendReady,
    /// Run the guest.
    RunGuest,
    /// Say that it runs.
    SendRunning,
    /// Wait for the source to come back and say what it decided.
    AwaitResolve,
    /// Make sure that the guest cannot run here.
    DiscardGuest,
    /// Say so, if anybody listens.
    SendDiscarded,
}

impl State {
    /// Whether the destination may run the guest in this state.
    #[must_use]
    pub fn may_run_guest(self) -> bool {
        matches!(
            self,
            Self::Starting | Self::Fetching | Self::SeveredFetching | Self::Running | Self::Done
        )
    }

    /// Whether nothing more will happen.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Done | Self::Discarded)
    }
}

/// One step; `left` says whether [`Input::Missing`] came, so that the guest will run before all of
/// its pages are here.
///
/// # Errors
/// When the input is out of place: the caller treats that as [`Input::Failed`].
pub fn step(state: State, input: Input, left: bool) -> Result<(State, Vec<Action>), Unexpected> {
    use {Action as A, Input as I, State as S};
    Ok(match (state, input) {
        (S::Listening, I::Offer) => (S::Receiving, vec![A::SendAccept]),
        // It comes back for what one that was killed has left.
        (S::Listening, I::Returned) => (S::Receiving, vec![A::SendResumed]),
        // It comes back for what is missing, or asks who runs the guest.
        (S::Listening, I::Follow) if left => (S::SeveredFetching, vec![A::AwaitReturn]),
        // Behind it nothing is placed but what is missing, and the guest is stopped at the source.
        // What came of device state before is the head of it, which a source sends when it likes.
        (S::Prepared | S::Filling, I::Missing) if !left => (state, vec![A::AwaitPages]),
        (S::Prepared, I::LinkLost) if left => {
            (S::Discarded, vec![A::DiscardGuest, A::SendDiscarded])
        }
        (
            S::Prepared | S::Filling,
            I::RoundEnd | I::Prepare | I::DigestRequest | I::PrintsRequest,
        ) if left => return Err(unexpected(state, input)),
        (S::Receiving | S::Prepared | S::Filling, I::RoundEnd) => (state, vec![A::SendRoundAck]),
        (S::Receiving, I::Prepare) => (S::Prepared, vec![A::Prepare]),
        // A source that was lost before it heard the answer asks once more.
        (S::Prepared, I::Prepare) => (state, vec![A::SendPrepared]),
        (S::Prepared | S::Filling, I::DigestRequest) => (state, vec![A::SendDigests]),
        // No page can be on its way: the source waits for the answer before it sends any, or asks
        // behind the last round.
        (S::Receiving | S::Prepared | S::Filling, I::PrintsRequest) => (state, vec![A::SendPrints]),
        (S::Prepared | S::Filling, I::State) => (S::Filling, vec![A::WriteState]),
        (S::Prepared | S::Filling, I::StateEnd) => (S::Loading, vec![A::FinishLoad]),
        (S::Loading, I::Loaded) => (S::Ready, vec![A::SendReady]),
        (S::Ready, I::Commit) => (S::Starting, vec![A::RunGuest]),
        (S::Starting, I::Started) if left => (S::Fetching, vec![A::SendRunning, A::FetchPages]),
        (S::Starting, I::Started) => (S::Running, vec![A::SendRunning]),
        (S::Fetching, I::AllPlaced) => (S::Running, vec![A::SendPlaced]),
        (S::Running, I::Farewell) => (S::Done, vec![]),

        // While pages arrive, a source that is lost may come back. With device state, the guest is
        // stopped there: it is brought back, and nothing is taken up again.
        (S::Receiving, I::LinkLost) => (S::Severed, vec![A::Sever, A::AwaitReturn]),
        (S::Prepared, I::LinkLost) => (S::SeveredPrepared, vec![A::Sever, A::AwaitReturn]),
        (S::Severed | S::SeveredPrepared, I::LinkLost) => (state, vec![A::AwaitReturn]),
        (S::Severed, I::Returned) => (S::Receiving, vec![A::SendResumed]),
        (S::SeveredPrepared, I::Returned) => (S::Prepared, vec![A::SendResumed]),

        // The guest runs, and nobody but the source can complete it. Whatever fails, that is waited
        // for.
        (S::Fetching, I::LinkLost | I::Failed | I::Aborted) => {
            (S::SeveredFetching, vec![A::Sever, A::AwaitReturn])
        }
        (S::SeveredFetching, I::LinkLost | I::Failed | I::Aborted) => (state, vec![A::AwaitReturn]),
        (S::SeveredFetching, I::Returned) => (S::Fetching, vec![A::SendResumed, A::FetchPages]),
        // It did not hear that the guest runs.
        (S::Fetching | S::SeveredFetching, I::Commit) => {
            (S::Fetching, vec![A::SendRunning, A::FetchPages])
        }
        // The last page can come while nobody is connected any more.
        (S::SeveredFetching, I::AllPlaced) => (S::Running, vec![A::AwaitResolve]),
        // It did not hear that nothing is missing any more.
        (S::Running, I::Returned) if left => (state, vec![A::SendResumed, A::SendPlaced]),
        (S::Running, I::Commit) if left => (state, vec![A::SendRunning, A::SendPlaced]),

        // Who may run the guest? Ours since COMMIT; a source that did not hear it asks again and is
        // told.
        (S::Running, I::LinkLost) => (S::Running, vec![A::AwaitResolve]),
        (S::Running, I::Commit) => (S::Running, vec![A::SendRunning]),
        // It could not be started (it never ran), so the source may have it back.
        (S::Starting, I::Failed) => (S::Discarded, vec![A::DiscardGuest, A::SendDiscarded]),
        // Started is started: what breaks now changes nothing, and neither does a late word of the
        // source.
        (S::Starting, I::LinkLost | I::Aborted) => (state, vec![]),
        (S::Running, I::Failed | I::Aborted) => (S::Done, vec![]),
        (S::Done | S::Discarded, I::LinkLost | I::Aborted | I::Failed) => (state, vec![]),
        // Ready, and the link broke: COMMIT may have been lost with it. Only the source knows.
        (S::Ready, I::LinkLost) => (S::Ready, vec![A::AwaitResolve]),
        (S::Ready, I::Aborted) => (S::Discarded, vec![A::DiscardGuest]),
        // Nothing is loaded that could run. So it is said before it is done: what is on its way to
        // storage that hangs must have ended before it is, and a source waits for words no longer
        // than it must.
        (S::Receiving, I::Failed) => (S::Discarded, vec![A::SendDiscarded, A::DiscardGuest]),
        // Before COMMIT came: not ours.
        (_, I::LinkLost | I::Aborted | I::Failed) => {
            (S::Discarded, vec![A::DiscardGuest, A::SendDiscarded])
        }

        (state, input) => return Err(unexpected(state, input)),
    })
}

fn unexpected(state: State, input: Input) -> Unexpected {
    Unexpected { state: format!("{state:?}"), input: format!("{input:?}") }
}
