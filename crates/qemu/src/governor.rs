//! Which way is open to a write governor in a QEMU, and getting it ready.
//!
//! The governor handles faults that the kernel takes on QEMU's behalf (KVM, read(2), vhost), which
//! takes a right (Documentation/admin-guide/mm/userfaultfd.rst): CAP_SYS_PTRACE of QEMU, or
//! vm.unprivileged_userfaultfd=1, or a descriptor of /dev/userfaultfd, which godwit opens and hands
//! to QEMU.

use godwit_memory::RamBlock;
use godwit_track::{PagemapTracker, TrackError, Way};

use crate::machine::Machine;
use crate::{QemuError, userfaultfd};

/// CAP_SYS_PTRACE (linux/capability.h).
const SYS_PTRACE: u64 = 1 << 19;

/// Why process `pid`, with this RAM, cannot be governed; `None` if it can. Touches nothing.
pub(crate) fn refusal(pid: i32, ram: &[RamBlock]) -> Option<String> {
    if ram.iter().any(RamBlock::has_huge_pages) {
        return Some(TrackError::GovernedHugePages.to_string());
    }
    refusal_of_faults(pid)
}

/// Why process `pid` cannot handle faults of the kernel; `None` if it can.
pub(crate) fn refusal_of_faults(pid: i32) -> Option<String> {
    (!may_call(pid) && !userfaultfd::device_is_there())
        .then(|| TrackError::NoKernelFaults { pid }.to_string())
}

/// Whether userfaultfd(2) in the process may handle faults of the kernel.
pub(crate) fn may_call(pid: i32) -> bool {
    let setting =
        std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective =
        effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    setting.trim() == "1" || effective & SYS_PTRACE != 0
}

/// Gets `tracker`'s governor ready, or tells it the threads that run vCPUs now.
pub(crate) fn prepare(
    machine: &mut Machine,
    tracker: &PagemapTracker,
    vcpus: &[i32],
) -> Result<(), QemuError> {
    // A way that turns out to be closed (a seccomp filter, a user namespace) leaves the other.
    let called = match may_call(machine.pid) {
        true => tracker.prepare_governor(Way::Call, vcpus),
        false => Err(TrackError::NoKernelFaults { pid: machine.pid }),
    };
    match called {
        Err(refused @ TrackError::NoKernelFaults { .. }) => {
            userfaultfd::by_device(machine, refused, |way| tracker.prepare_governor(way, vcpus))
        }
        called => Ok(called?),
    }
}
