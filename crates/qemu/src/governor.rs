//! Which way is open to a write governor in a QEMU, and getting it ready.
//!
//! The governor handles faults that the kernel takes on QEMU's behalf (KVM, read(2), vhost), which takes a right
//! (Documentation/admin-guide/mm/userfaultfd.rst): CAP_SYS_PTRACE of QEMU, or vm.unprivileged_userfaultfd=1, or a descriptor
//! of /dev/userfaultfd, which godwit opens and hands to QEMU.

use std::fs::File;
use std::os::fd::{AsFd, RawFd};

use godwit_memory::RamBlock;
use godwit_track::{PagemapTracker, TrackError, Way};
use serde_json::json;

use crate::QemuError;
use crate::machine::Machine;

const DEVICE: &str = "/dev/userfaultfd";
/// The name under which QEMU keeps the device's descriptor for a moment.
pub(crate) const FD_NAME: &str = "godwit-userfaultfd";
/// CAP_SYS_PTRACE (linux/capability.h).
const SYS_PTRACE: u64 = 1 << 19;

/// Why process `pid`, with this RAM, cannot be governed; `None` if it can. Touches nothing.
pub(crate) fn refusal(pid: i32, ram: &[RamBlock]) -> Option<String> {
    if ram.iter().any(RamBlock::has_huge_pages) {
        return Some(TrackError::GovernedHugePages.to_string());
    }
    (!may_call(pid) && File::open(DEVICE).is_err()).then(|| TrackError::NoKernelFaults { pid }.to_string())
}

/// Whether userfaultfd(2) in the process may handle faults of the kernel.
fn may_call(pid: i32) -> bool {
    let setting = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
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
            let Ok(device) = File::open(DEVICE) else { return Err(refused.into()) };
            by_device(machine, tracker, vcpus, &device)
        }
        called => Ok(called?),
    }
}

/// By a descriptor that QEMU holds for a moment.
fn by_device(
    machine: &mut Machine,
    tracker: &PagemapTracker,
    vcpus: &[i32],
    device: &File,
) -> Result<(), QemuError> {
    machine.qmp.pass_fd(FD_NAME, device.as_fd())?;
    let prepared = match number_in(machine.pid) {
        Some(number) => tracker.prepare_governor(Way::Device(number), vcpus),
        None => Err(TrackError::NoKernelFaults { pid: machine.pid }),
    };
    // Nothing of ours stays, whatever came of it.
    machine.qmp.execute("closefd", json!({ "fdname": FD_NAME }))?;
    Ok(prepared?)
}

/// The number of the device's descriptor in process `pid`.
fn number_in(pid: i32) -> Option<RawFd> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let device =
        |path: &std::path::Path| std::fs::read_link(path).is_ok_and(|to| to == std::path::Path::new(DEVICE));
    entries.filter(|entry| device(&entry.path())).find_map(|entry| entry.file_name().to_str()?.parse().ok())
}
