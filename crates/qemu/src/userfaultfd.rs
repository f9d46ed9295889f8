//! How a userfaultfd is made in a QEMU: by userfaultfd(2), or by a descriptor of /dev/userfaultfd
//! that QEMU holds for a moment, where the call is refused.
//!
//! To handle faults that the kernel takes on QEMU's behalf (KVM, read(2), vhost) takes a right
//! (Documentation/admin-guide/mm/userfaultfd.rst): CAP_SYS_PTRACE of QEMU, or
//! vm.unprivileged_userfaultfd=1, or a descriptor of /dev/userfaultfd, which godwit opens and hands
//! to QEMU.

use std::fs::File;
use std::os::fd::{AsFd, RawFd};
use std::path::Path;

use godwit_memory::RamBlock;
use godwit_track::{Approach, PagemapTracker, TrackError, Way};

use crate::QemuError;
use crate::machine::Machine;
use crate::monitor::commands::CloseFd;
use crate::process::{Descriptor, descriptors};

const DEVICE: &str = "/dev/userfaultfd";
/// The name under which QEMU keeps the device's descriptor for a moment.
pub(crate) const FD_NAME: &str = "godwit-userfaultfd";

/// CAP_SYS_PTRACE (linux/capability.h).
const SYS_PTRACE: u64 = 1 << 19;

/// Why process `pid` cannot handle faults of the kernel; `None` if it can. Touches nothing.
pub(crate) fn refusal_of_faults(pid: i32) -> Option<String> {
    (!may_call(pid) && File::open(DEVICE).is_err())
        .then(|| TrackError::NoKernelFaults { pid }.to_string())
}

/// Whether userfaultfd(2) in the process may handle faults of the kernel.
fn may_call(pid: i32) -> bool {
    let setting =
        std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective =
        effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    setting.trim() == "1" || effective & SYS_PTRACE != 0
}

/// Makes something that handles faults of the kernel, by whichever way is open.
pub(crate) fn for_faults<T>(
    machine: &mut Machine,
    make: impl Fn(Way) -> Result<T, TrackError>,
) -> Result<T, QemuError> {
    // A way that turns out to be closed (a seccomp filter, a user namespace) leaves the other.
    let called = match may_call(machine.pid) {
        true => make(Way::Call),
        false => Err(TrackError::NoKernelFaults { pid: machine.pid }),
    };
    match called {
        Err(refused @ TrackError::NoKernelFaults { .. }) => by_device(machine, refused, make),
        called => Ok(called?),
    }
}

/// Starts to track `ram` in QEMU's page tables.
pub(crate) fn start_tracking(
    machine: &mut Machine,
    ram: &[RamBlock],
) -> Result<PagemapTracker, QemuError> {
    let pid = machine.pid;
    let harmless_filters = own_filters(pid);
    let start = |way| PagemapTracker::start_by(Approach { way, harmless_filters }, pid, ram);
    match start(Way::Call) {
        // A filter or a security module stands against the call.
        Err(refused @ TrackError::Refused { .. }) => by_device(machine, refused, start),
        started => Ok(started?),
    }
}

/// How many filters for system calls of process `pid` are QEMU's own (`-sandbox on`). It lists what
/// is forbidden, which none of the calls is that make a userfaultfd (QEMU, softmmu/qemu-seccomp.c
/// or system/qemu-seccomp.c, `denylist`).
pub(crate) fn own_filters(pid: i32) -> u32 {
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut arguments = arguments.split(|byte| *byte == 0);
    let is_option = |argument: &[u8]| argument == b"-sandbox" || argument == b"--sandbox";
    let sandbox =
        arguments.by_ref().find(|argument| is_option(argument)).and_then(|_| arguments.next());
    u32::from(sandbox.is_some_and(|how| how.starts_with(b"on") || how.starts_with(b"enable=on")))
}

/// Makes something by the device, which stands in for a call that was `refused`.
fn by_device<T>(
    machine: &mut Machine,
    refused: TrackError,
    make: impl FnOnce(Way) -> Result<T, TrackError>,
) -> Result<T, QemuError> {
    let Ok(device) = File::open(DEVICE) else { return Err(refused.into()) };
    let pid = machine.pid;
    machine.qmp.uninterrupted(|qmp| {
        qmp.pass_fd(FD_NAME, device.as_fd())?;
        let made = match number_in(pid) {
            Some(number) => make(Way::Device(number)),
            None => Err(refused),
        };
        // Nothing of ours stays, whatever came of it.
        qmp.run(&CloseFd { fdname: FD_NAME })?;
        Ok(made?)
    })
}

/// The number of the device's descriptor in process `pid`.
fn number_in(pid: i32) -> Option<RawFd> {
    let is_device = |it: &Descriptor| it.target().is_some_and(|target| target == Path::new(DEVICE));
    descriptors(pid).ok()?.find(is_device).map(|it| it.number)
}
