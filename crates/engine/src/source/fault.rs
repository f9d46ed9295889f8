//! Faults made up on purpose, where nothing outside could make them at the right moment.
//!
//! Those that kill end this process as SIGKILL does: nothing of it is run any more. Only a build
//! with the feature `test-hooks` can be told of one. Without it [`MadeUp`] has no size and is no
//! fault, so the compiler leaves out what would follow.

use godwit_protocol::source::Action;
use rustix::process::{Signal, getpid, kill_process};

use super::Options;

/// A fault to make up.
///
/// ```
/// use godwit_engine::source::{Fault, Options};
///
/// let options = Options::new("west:4444".parse()?);
/// let options = Options { fault: Some(Fault::LoseCommit), ..options };
/// assert!(options.fingerprints);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "test-hooks"), expect(unreachable_pub, reason = "nobody can name one"))]
#[cfg_attr(not(feature = "test-hooks"), allow(dead_code, reason = "nobody makes one up"))]
pub enum Fault {
    /// Break the control connection just after COMMIT was sent: it arrives, its answer does not.
    CutAfterCommit = 1,
    /// Break the control connection just before COMMIT is sent: it never arrives.
    LoseCommit = 2,
    /// Flip a bit in the source's digest of the first chunk.
    WrongDigest = 3,
    /// Break the control connection just before the farewell.
    LoseFarewell = 4,
    /// Take direct I/O for something that the tracker sees: what lands late is lost.
    TrustTracker = 5,
    /// Keep the guest stopped for a while before its last pages are copied.
    HoldStopped = 6,
    /// Keep READY back for a while before COMMIT is sent.
    HoldReady = 7,
    /// Kill this process when both machines are ready; the guest still runs.
    KillAfterPrepare = 8,
    /// When the guest is stopped.
    KillAfterStop = 9,
    /// When the last round has begun.
    KillInLastRound = 10,
    /// When the machine was told to save its state.
    KillAfterRelease = 11,
    /// When the last round is on its way.
    KillAfterLastRound = 12,
    /// When the digests were compared.
    KillAfterDigests = 13,
    /// When the device state was sent.
    KillAfterState = 14,
    /// When the destination is ready.
    KillAfterReady = 15,
    /// When nobody may run the guest here any more, and COMMIT was not sent.
    KillBeforeCommit = 16,
    /// When COMMIT was sent.
    KillAfterCommit = 17,
    /// When the destination was told that it was heard.
    KillAfterFarewell = 18,
    /// Panic when the guest is stopped.
    PanicAfterStop = 19,
    /// Leave out one dirty page of the last round.
    SkipDirtyPage = 20,
    /// Leave out all pages of the last round that the guest checks.
    ForgetLastRound = 21,
    /// Take pages for free that were written since the guest said so.
    BelieveHints = 22,
    /// Leave out one extent of a disk, whenever it is to be sent.
    DropExtent = 23,
    /// No fault: take the way to the destination for a long one.
    LongWay = 24,
    /// The same, and put each frame on another connection than the one before.
    Scatter = 25,
}

impl Fault {
    /// What is to strike when `action` was carried out.
    fn is_after(self, action: Action) -> bool {
        match action {
            Action::SendPrepare => self == Self::KillAfterPrepare,
            Action::StopGuest => self == Self::KillAfterStop || self == Self::PanicAfterStop,
            Action::StartLastRound(_) => self == Self::KillInLastRound,
            Action::ReleaseState => self == Self::KillAfterRelease,
            Action::CopyLastRound(_) => self == Self::KillAfterLastRound,
            Action::CompareDigests => self == Self::KillAfterDigests,
            Action::FinishState => self == Self::KillAfterState,
            Action::SendCommit => self == Self::KillAfterCommit,
            Action::SendFarewell => self == Self::KillAfterFarewell,
            _ => false,
        }
    }

    /// Ends this process.
    fn strike(self) {
        assert!(self != Self::PanicAfterStop, "made up");
        let _ = kill_process(getpid(), Signal::KILL);
    }
}

/// The fault that a migration makes up, if any.
#[derive(Clone, Copy, Debug)]
pub(super) struct MadeUp {
    #[cfg(feature = "test-hooks")]
    fault: Option<Fault>,
}

impl MadeUp {
    #[cfg(feature = "test-hooks")]
    pub(super) fn of(options: &Options) -> Self {
        Self { fault: options.fault }
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn of(_: &Options) -> Self {
        Self {}
    }

    #[cfg(feature = "test-hooks")]
    fn fault(self) -> Option<Fault> {
        self.fault
    }

    #[cfg(not(feature = "test-hooks"))]
    fn fault(self) -> Option<Fault> {
        None
    }

    pub(super) fn is(self, fault: Fault) -> bool {
        self.fault() == Some(fault)
    }

    /// Says that it has struck, if the fault is `fault` and something shows that it `has`.
    pub(super) fn tell_struck(self, fault: Fault, has: bool) {
        #[cfg(feature = "test-hooks")]
        if has && self.is(fault) {
            crate::stamped::tell_struck();
        }
        #[cfg(not(feature = "test-hooks"))]
        let _ = (fault, has);
    }

    /// Ends this process if that is the fault.
    pub(super) fn strike_if(self, fault: Fault) {
        if self.is(fault) {
            fault.strike();
        }
    }

    /// Ends this process if that is to be when `action` was carried out.
    pub(super) fn strike_after(self, action: Action) {
        if let Some(fault) = self.fault().filter(|fault| fault.is_after(action)) {
            fault.strike();
        }
    }
}
