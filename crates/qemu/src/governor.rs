//! Whether a write governor is possible in a QEMU, and getting it ready.
//!
//! The governor handles faults that the kernel takes on QEMU's behalf (KVM, read(2), vhost), which
//! takes a right (`userfaultfd`).

use godwit_memory::RamBlock;
use godwit_track::{PagemapTracker, TrackError};

use crate::machine::Machine;
use crate::{QemuError, userfaultfd};

/// Why process `pid`, with this RAM, cannot be governed; `None` if it can. Touches nothing.
pub(crate) fn refusal(pid: i32, ram: &[RamBlock]) -> Option<String> {
    if ram.iter().any(RamBlock::has_huge_pages) {
        return Some(TrackError::GovernedHugePages.to_string());
    }
    userfaultfd::refusal_of_faults(pid)
}

/// Gets `tracker`'s governor ready, or tells it the threads that run vCPUs now.
pub(crate) fn prepare(
    machine: &mut Machine,
    tracker: &PagemapTracker,
    vcpus: &[i32],
) -> Result<(), QemuError> {
    userfaultfd::for_faults(machine, |way| tracker.prepare_governor(way, vcpus))
}
