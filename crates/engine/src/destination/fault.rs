//! Kills made up on purpose, where nothing outside could make them at the right moment. This
//! process then ends as by SIGKILL: nothing of it is run any more.

use godwit_protocol::destination::Action;
use rustix::process::{Signal, getpid, kill_process};

/// When this process is to be killed.
///
/// ```
/// use godwit_engine::destination::{Fault, Faults, Options};
///
/// let faults = Faults { kill: Some(Fault::KillBeforeRun), ..Faults::default() };
/// let options = Options { faults, ..Options::default() };
/// assert!(!options.overcommit);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// When the machine is ready to load.
    KillAfterPrepare = 1,
    /// When it has loaded the guest.
    KillAfterLoad = 2,
    /// When the source was told so.
    KillAfterReady = 3,
    /// When COMMIT has come and the guest is taken over, and the machine was not told to run it.
    KillBeforeRun = 4,
    /// When the guest runs, and the source was not told so.
    KillAfterRun = 5,
}

impl Fault {
    /// Ends this process if that is to be when `action` was carried out.
    pub(super) fn strike_after(self, action: Action) {
        let strikes = match action {
            Action::Prepare => self == Self::KillAfterPrepare,
            Action::FinishLoad => self == Self::KillAfterLoad,
            Action::SendReady => self == Self::KillAfterReady,
            Action::RunGuest => self == Self::KillAfterRun,
            _ => false,
        };
        if strikes {
            self.strike();
        }
    }

    /// Ends this process.
    pub(super) fn strike(self) {
        let _ = kill_process(getpid(), Signal::KILL);
    }
}
