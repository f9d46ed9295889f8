//! What the engine needs of a machine: two traits, implemented by the adapters, and one for each
//! capability that a machine may have beside them.
//!
//! The engine calls them in the order of the state machines and never from two threads at once.

mod capability;
mod destination;
mod source;

use std::time::Duration;

use godwit_units::ByteCount;

pub use capability::{
    ArrivingPages, Brake, DirectIo, DiskDestination, DiskVm, FreePages, Kept, LatePackets,
    PostCopyDestination,
};
pub use destination::DestinationVm;
pub use source::SourceVm;

/// An adapter's error; the adapter's words say what to do.
pub type VmError = Box<dyn std::error::Error + Send + Sync>;

/// What a switchover costs beside what the engine measures itself, as far as a machine can tell
/// beforehand.
///
/// ```
/// use std::time::Duration;
/// use godwit_engine::vm::SwitchoverCosts;
///
/// // A machine that stands still as soon as it is told to.
/// let costs = SwitchoverCosts { lead: Duration::ZERO, ..SwitchoverCosts::default() };
/// assert_eq!(costs.state, Duration::from_millis(15));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchoverCosts {
    /// From the call of [`SourceVm::stop`] until the guest stands still.
    pub lead: Duration,
    /// Saving the device state, loading it, and running the guest.
    pub state: Duration,
    /// What the device state has beyond the usual few hundred KiB, which the link has to carry.
    pub bytes: ByteCount,
}

impl Default for SwitchoverCosts {
    /// What is usual.
    fn default() -> Self {
        let (lead, state) = (Duration::from_millis(10), Duration::from_millis(15));
        Self { lead, state, bytes: ByteCount::ZERO }
    }
}

/// Has a question of the destination's adapter answered by the source's.
pub type Ask<'a> = dyn FnMut(&[u8]) -> Result<Vec<u8>, VmError> + 'a;

/// Why a guest could not be run.
///
/// ```
/// use godwit_engine::vm::RunError;
///
/// /// Whether the source may have its guest back.
/// fn may_go_back(error: &RunError) -> bool {
///     matches!(error, RunError::NeverRan(_))
/// }
/// assert!(!may_go_back(&RunError::Unknown("no answer".into())));
/// ```
#[derive(Debug)]
pub enum RunError {
    /// It has not executed a single instruction here.
    NeverRan(VmError),
    /// It may have run, and may have written to its disks.
    Unknown(VmError),
}
