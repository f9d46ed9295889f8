//! Faults made up on purpose, where nothing outside could make them at the right moment. Those that
//! kill end this process as SIGKILL does: nothing of it is run any more.
//!
//! Only a build with the feature `test-hooks` can be told of one. Without it [`MadeUp`] has no size
//! and is no fault, so the compiler leaves out what would follow.

#[cfg(feature = "test-hooks")]
use std::time::Duration;

use godwit_protocol::destination::Action;
use rustix::process::{Signal, getpid, kill_process};

use super::Options;

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
#[cfg_attr(
    not(feature = "test-hooks"),
    expect(unreachable_pub, clippy::enum_variant_names, reason = "nobody can name one")
)]
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

/// What is placed wrongly, although it came as it was sent.
///
/// ```
/// use godwit_engine::destination::{Defect, Faults};
///
/// let faults = Faults { defect: Some(Defect::FlipBit), ..Faults::default() };
/// assert!(faults.kill.is_none());
/// ```
#[cfg(feature = "test-hooks")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// The first version of a page is placed once more, behind the last.
    LateOldPage,
    /// Two pages are placed one in the place of the other.
    SwapPages,
    /// A bit of a page is flipped.
    FlipBit,
    /// The pages of the last round are placed only when the guest runs.
    RunAhead,
}

/// Faults made up on purpose.
///
/// ```
/// use std::time::Duration;
/// use godwit_engine::destination::Faults;
///
/// let faults = Faults { slow_channel: Some((0, Duration::from_millis(1))), ..Faults::default() };
/// assert_ne!(faults, Faults::default());
/// ```
#[cfg(feature = "test-hooks")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// A channel, by its number (those of disks behind those of memory), that places each of its
    /// frames only after this time.
    pub slow_channel: Option<(usize, Duration)>,
    /// This process is killed.
    pub kill: Option<Fault>,
    /// The threads that place pages try to open a file, as one would that was taken over.
    pub trespass: bool,
    /// Pages are placed wrongly.
    pub defect: Option<Defect>,
}

/// The faults that a migration makes up, if any.
#[derive(Clone, Copy, Debug)]
pub(super) struct MadeUp {
    #[cfg(feature = "test-hooks")]
    faults: Faults,
}

impl MadeUp {
    #[cfg(feature = "test-hooks")]
    pub(super) fn of(options: &Options) -> Self {
        Self { faults: options.faults }
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn of(_: &Options) -> Self {
        Self {}
    }

    /// What is placed wrongly.
    #[cfg(feature = "test-hooks")]
    pub(super) fn defect(self) -> Option<Defect> {
        self.faults.defect
    }

    /// No fault.
    pub(super) fn none() -> Self {
        Self::of(&Options::default())
    }

    #[cfg(feature = "test-hooks")]
    fn kill(self) -> Option<Fault> {
        self.faults.kill
    }

    #[cfg(not(feature = "test-hooks"))]
    fn kill(self) -> Option<Fault> {
        None
    }

    /// Keeps channel `number` from placing its next frame for a while, if it is the slow one.
    #[cfg(feature = "test-hooks")]
    pub(super) fn delay(self, number: usize) {
        if let Some((slow, late)) = self.faults.slow_channel
            && slow == number
        {
            std::thread::sleep(late);
        }
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn delay(self, _: usize) {}

    /// Opens a file, if a thread is to have been taken over.
    #[cfg(feature = "test-hooks")]
    pub(super) fn trespass(self) {
        if self.faults.trespass {
            drop(std::fs::File::open("/etc/passwd"));
        }
    }

    #[cfg(not(feature = "test-hooks"))]
    pub(super) fn trespass(self) {}

    /// Ends this process if that is to be when `action` was carried out.
    pub(super) fn strike_after(self, action: Action) {
        self.strike_if(match action {
            Action::Prepare => Fault::KillAfterPrepare,
            Action::FinishLoad => Fault::KillAfterLoad,
            Action::SendReady => Fault::KillAfterReady,
            Action::RunGuest => Fault::KillAfterRun,
            _ => return,
        });
    }

    /// Ends this process if that is the fault.
    pub(super) fn strike_if(self, fault: Fault) {
        if self.kill() == Some(fault) {
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }
}
