//! A VM that waits to take a guest in.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Arc;

use godwit_memory::RamBlock;

use super::{Ask, DiskDestination, PostCopyDestination, RunError, VmError};
use crate::Interrupt;

/// A VM that waits to take a guest in. The first seven functions are every VM's.
///
/// ```
/// use godwit_engine::vm::DestinationVm;
/// use godwit_units::ByteCount;
///
/// /// Guest memory that it has room for. A whole adapter is in `examples/embed.rs`.
/// fn memory(vm: &dyn DestinationVm) -> ByteCount {
///     vm.ram().iter().map(|block| block.pages().bytes()).sum()
/// }
/// ```
pub trait DestinationVm {
    /// The kind of machine.
    fn machine(&self) -> &'static str;

    /// The RAM blocks to fill.
    fn ram(&self) -> Arc<Vec<RamBlock>>;

    /// Makes the machine ready to load device state and returns where to write it. The guest must
    /// not run when it is loaded.
    ///
    /// # Errors
    /// When the machine refuses.
    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError>;

    /// Waits until the device state, which was written to its end, is loaded.
    ///
    /// # Errors
    /// When the machine could not load it.
    fn finish_load(&mut self) -> Result<(), VmError>;

    /// Runs the guest.
    ///
    /// # Errors
    /// [`RunError::NeverRan`] lets the source have its guest back, so it must be certain.
    fn run(&mut self) -> Result<(), RunError>;

    /// Tells the network where the guest is now. Called when it runs.
    ///
    /// # Errors
    /// When the machine refuses; the guest runs all the same.
    fn announce(&mut self) -> Result<(), VmError>;

    /// Makes sure that the guest never runs here. A machine that took nothing in but pages may go
    /// on waiting for another attempt.
    ///
    /// # Errors
    /// When that is not certain.
    fn discard(&mut self) -> Result<(), VmError>;

    /// Called before all else, as [`SourceVm::heed`](super::SourceVm::heed) is; a call that ended
    /// because `interrupt` was raised is followed by [`Self::discard`].
    fn heed(&mut self, interrupt: &Interrupt) {
        let _ = interrupt;
    }

    /// The source has RAM blocks of these names. Comes before [`Self::compare`], and [`Self::ram`]
    /// is asked for again behind it: an adapter that can reach its RAM in more than one way chooses
    /// the one that fits, and one whose machine is not there yet asks the source by `ask` what to
    /// start. What does not fit then is refused by the engine.
    ///
    /// # Errors
    /// When the machine refuses.
    fn offered(&mut self, blocks: &BTreeSet<&str>, ask: &mut Ask<'_>) -> Result<(), VmError> {
        let _ = (blocks, ask);
        Ok(())
    }

    /// Gives one of the guest's cards a packet that had come for it at the source
    /// ([`LatePackets`](super::LatePackets)). Only called when the guest runs.
    ///
    /// # Errors
    /// When there is no way to that card. The packet is lost, as any may be.
    fn deliver(&mut self, packet: Vec<u8>) -> Result<(), VmError> {
        let _ = packet;
        Err("this kind of machine has no way into its cards".into())
    }

    /// Disks that a source may fill; `None` where none can be received.
    fn disk_destination(&mut self) -> Option<&mut dyn DiskDestination> {
        None
    }

    /// Whether and how the guest can run before all of its pages are here; `None` where it cannot.
    fn post_copy(&mut self) -> Option<&mut dyn PostCopyDestination> {
        None
    }

    /// Compares the machine that the source offers with this one, as far as that shows beforehand.
    /// `ask` has a question answered by the source's adapter
    /// ([`SourceVm::answer`](super::SourceVm::answer)), whose words are a stranger's: they are
    /// checked before they are used. Comes before anything else is done; changes nothing, so that
    /// the machine can go on waiting for another source.
    ///
    /// # Errors
    /// When they differ: all differences and their cures, in one line.
    fn compare(&mut self, ask: &mut Ask<'_>) -> Result<(), VmError> {
        let _ = ask;
        Ok(())
    }

    /// A source only asked whether its guest would be accepted, and is not taken in: what
    /// [`Self::offered`] has begun is undone, so that the machine can go on waiting.
    ///
    /// # Errors
    /// When that is not certain.
    fn inquired(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// The process in which the guest will run, whose control group has to hold its memory. Without
    /// an answer of its own: this one.
    fn pid(&self) -> u32 {
        std::process::id()
    }

    /// Whether the machine is known to have ended, so that the guest runs here neither now nor
    /// later. Asked all the time until [`Self::run`].
    fn has_ended(&self) -> bool {
        false
    }

    /// COMMIT has come, and [`Self::run`] is called next: from here on whoever stands in for this
    /// process runs the guest.
    ///
    /// # Errors
    /// When that cannot be made sure of; the guest is then discarded.
    fn taking_over(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}
