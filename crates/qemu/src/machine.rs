//! What runs behind a monitor: its process, and everything that stands against
//! migrating it.
//!
//! Invariant: looking changes nothing. Every refusal comes before QEMU was touched.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use godwit_memory::RamBlock;
use godwit_track::{AddressSpace, Mapper, other_writers, threads_of};

use crate::QemuError;
use crate::monitor::commands::{
    Block, Human, Migration, QomGet, QomList, QueryAccelerators, QueryBlock, QueryCpus, QueryJobs,
    QueryKvm, QueryMigrate, QueryNodes, QueryStatus,
};
use crate::monitor::{Monitor, QmpError};
use crate::process::{Process, descriptors};
use crate::vhost_user::{self, Front};

/// A plugged device: bus, name and type.
pub(crate) type Plugged = (&'static str, String, String);

/// Where devices are that were plugged in under an id.
pub(crate) const PERIPHERAL: &str = "/machine/peripheral";

/// A QEMU process and its monitor.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) qmp: Box<dyn Monitor>,
    pub(crate) pid: i32,
    pub(crate) process: Process,
}

/// Whether a guest tells of its free memory all the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reporting {
    /// It has a balloon that does.
    On,
    /// It has a balloon that was not told to.
    Off,
    /// It has none.
    NoBalloon,
}

impl Reporting {
    /// How to start the machine the next time, if it does not tell.
    #[must_use]
    pub fn cure(self) -> Option<&'static str> {
        match self {
            Self::On => None,
            Self::Off => Some("start its balloon with free-page-reporting=on"),
            Self::NoBalloon => {
                Some("start it with -device virtio-balloon-pci,free-page-reporting=on")
            }
        }
    }

    /// What the operator could do at the next start of the machine, if anything.
    #[must_use]
    pub fn advice(self) -> Option<&'static str> {
        match self {
            Self::On => None,
            Self::Off => Some(
                "free memory of the guest is sent if it was ever used: its balloon reports none; \
                 start it with free-page-reporting=on",
            ),
            Self::NoBalloon => Some(
                "free memory of the guest is sent if it was ever used: start it with -device \
                 virtio-balloon-pci,free-page-reporting=on",
            ),
        }
    }
}

impl Machine {
    /// The process behind a monitor.
    pub(crate) fn behind(qmp: Box<dyn Monitor>) -> Result<Self, QemuError> {
        let pid = qmp.peer_pid()?.as_raw_nonzero().get();
        let process = Process::open(pid)
            .map_err(|source| QemuError::System { step: "pidfd_open", source })?;
        Ok(Self { qmp, pid, process })
    }

    /// The threads that run the vCPUs, one entry for each vCPU (`query-cpus-fast`). Several may
    /// share one. QEMU has them by the numbers of its own PID namespace; these are their numbers
    /// here, as the process's is (`SO_PEERCRED`, unix(7)).
    pub(crate) fn vcpu_threads(&mut self) -> Result<Vec<i32>, QmpError> {
        let cpus = self.qmp.run(&QueryCpus)?;
        let threads = threads_of(self.pid);
        let here = |inside: i64| threads.iter().find(|thread| i64::from(thread.inside) == inside);
        Ok(cpus.iter().filter_map(|cpu| here(cpu.thread_id)).map(|thread| thread.here).collect())
    }

    /// QEMU's run state (`query-status`).
    pub(crate) fn run_state(&mut self) -> Result<String, QmpError> {
        Ok(self.qmp.run(&QueryStatus)?.status)
    }

    /// The state of QEMU's own migration, empty when there was none (`query-migrate`).
    pub(crate) fn migration_state(&mut self) -> Result<String, QmpError> {
        Ok(self.qmp.run(&QueryMigrate)?.status)
    }

    /// Refuses RAM files that are not what QEMU has mapped: the name may have been given to another
    /// file since. Needs the right to look into the process, without which later checks would find
    /// nothing.
    pub(crate) fn check_mappings(&self, blocks: &[RamBlock]) -> Result<(), QemuError> {
        let space = AddressSpace::of(self.pid)?;
        blocks.iter().try_for_each(|block| space.mappings_of(block).map(drop))?;
        Ok(())
    }

    /// Refuses RAM that another process may write which is not one of `tracked`.
    pub(crate) fn check_writers(
        &self,
        blocks: &[RamBlock],
        tracked: &[i32],
    ) -> Result<(), QemuError> {
        let mut writers = other_writers(self.pid, blocks).into_iter();
        match writers.find(|writer| !tracked.contains(&writer.pid)) {
            Some(writer) if is_vmm(&writer) => Err(QemuError::SharedRam(writer)),
            Some(writer) => Err(QemuError::OtherWriter(writer)),
            None => Ok(()),
        }
    }

    /// A path of the QEMU process as this process reaches it, across chroot and mount namespaces.
    pub(crate) fn path_here(&self, path: &Path) -> PathBuf {
        let base = if path.is_absolute() { "root" } else { "cwd" };
        let relative = path.strip_prefix("/").unwrap_or(path);
        let through = Path::new("/proc").join(self.pid.to_string()).join(base).join(relative);
        if through.exists() { through } else { path.to_owned() }
    }

    /// Refuses what cannot be migrated from here. Looks at this QEMU alone, for a few milliseconds,
    /// and asks it no question twice, since one takes up to a millisecond; [`Self::check_writers`]
    /// looks at all other processes.
    pub(crate) fn check_source(&mut self) -> Result<Seen, QemuError> {
        let (devices, fronts) = self.check_memory()?;
        let drives = self.qmp.run(&QueryBlock)?;
        let direct_io = self.direct_io(&drives)?;
        Ok(Seen { fronts, direct_io, parts: parts(devices, drives) })
    }

    /// The same where its memory alone counts: no image is looked at, whose storage may be gone.
    /// Returns all plugged devices, and those whose back ends are processes of their own.
    pub(crate) fn check_memory(&mut self) -> Result<(Vec<Plugged>, Vec<Front>), QemuError> {
        let Migration { blocked_reasons, .. } = self.qmp.run(&QueryMigrate)?;
        let devices = self.devices()?;
        check_devices(&devices)?;
        let fronts = vhost_user::fronts(self, &devices);
        // QEMU's own words first: they say most.
        vhost_user::check_blockers(blocked_reasons, fronts.as_deref().unwrap_or_default())?;
        self.check_descriptors()?;
        self.check_jobs()?;
        Ok((devices, fronts?))
    }

    /// Refuses a QEMU that works on its images by itself (`query-jobs`).
    fn check_jobs(&mut self) -> Result<(), QemuError> {
        let mut jobs = self.qmp.run(&QueryJobs)?;
        // What a job leaves until it is dismissed has no image any more.
        jobs.retain(|job| !matches!(job.status.as_str(), "concluded" | "null"));
        match jobs.into_iter().next() {
            Some(job) => Err(QemuError::BlockJob { id: job.id, kind: job.kind }),
            None => Ok(()),
        }
    }

    /// Refuses a guest that runs guests under KVM: the processor itself then writes pages of its
    /// memory (the virtual-APIC page, posted interrupts) at their physical address, without a look
    /// at QEMU's page tables. TCG writes them as all others.
    pub(crate) fn check_nested(&mut self) -> Result<(), QemuError> {
        if self.may_nest()? { self.check_registers() } else { Ok(()) }
    }

    /// Whether the guest could ever run guests in that way, as its first processor is made.
    pub(crate) fn may_nest(&mut self) -> Result<bool, QmpError> {
        Ok(runs_on_kvm(&mut *self.qmp)? && self.has_virtualisation()?)
    }

    /// Refuses one that could, where it has turned on what that takes.
    pub(crate) fn check_registers(&mut self) -> Result<(), QemuError> {
        let registers = self.qmp.run(&Human { command_line: "info registers -a" })?;
        runs_guests(&registers).map_or(Ok(()), |what| Err(QemuError::Nested { what }))
    }

    /// Whether the guest's processors have VMX or SVM at all: KVM lets a guest turn on what its
    /// CPUID has, and nothing else. To look at their registers instead takes ten milliseconds, and
    /// has each vCPU leave the guest.
    fn has_virtualisation(&mut self) -> Result<bool, QmpError> {
        let cpus = self.qmp.run(&QueryCpus)?;
        let Some(cpu) = cpus.first() else { return Ok(true) };
        for name in ["vmx", "svm"] {
            let property = QomGet::<bool>::new(&cpu.qom_path, name);
            if self.qmp.run_if_known(&property)? != Some(false) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// All plugged devices.
    pub(crate) fn devices(&mut self) -> Result<Vec<Plugged>, QmpError> {
        let mut devices = Vec::new();
        for bus in [PERIPHERAL, "/machine/peripheral-anon"] {
            for child in self.qmp.run(&QomList { path: bus })? {
                let kind = child.kind.strip_prefix("child<");
                if let Some(kind) = kind.and_then(|kind| kind.strip_suffix('>')) {
                    devices.push((bus, child.name, kind.to_owned()));
                }
            }
        }
        Ok(devices)
    }

    /// How free memory of the guest becomes known: by a balloon that reports it, if there is one.
    pub(crate) fn reporting(&mut self) -> Result<Reporting, QmpError> {
        let is_balloon = |kind: &str| kind.starts_with("virtio-balloon");
        let Some((bus, name, _)) = self.devices()?.into_iter().find(|(.., kind)| is_balloon(kind))
        else {
            return Ok(Reporting::NoBalloon);
        };
        let path = format!("{bus}/{name}");
        // Before QEMU 5.1 there is no such property.
        let on = self.qmp.run_if_known(&QomGet::<bool>::new(&path, "free-page-reporting"))?;
        Ok(if on == Some(true) { Reporting::On } else { Reporting::Off })
    }

    /// A device that was unplugged from the list of devices still shows in the open files.
    fn check_descriptors(&self) -> Result<(), QemuError> {
        // Whoever may not read them may not attach to QEMU either, and is told so there.
        let Ok(open) = descriptors(self.pid) else { return Ok(()) };
        for target in open.filter_map(|descriptor| descriptor.target()) {
            let target = target.to_string_lossy();
            if writes_unseen(&target) {
                return Err(QemuError::Untrackable {
                    device: format!("the device behind {target}"),
                });
            }
        }
        Ok(())
    }

    /// Whether a disk uses direct I/O into guest memory.
    fn direct_io(&mut self, drives: &[Block]) -> Result<bool, QmpError> {
        // Drives made by -drive show the setting at the drive.
        let mut media = drives.iter().filter_map(|drive| drive.inserted.as_ref());
        Ok(media.any(|medium| medium.cache.direct)
            || self.qmp.run(&QueryNodes::FLAT)?.iter().any(|node| node.cache.direct))
    }
}

/// What a look at a source has shown.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The devices whose back ends are processes of their own.
    pub(crate) fronts: Vec<Front>,
    /// Whether a disk writes guest memory by direct I/O.
    pub(crate) direct_io: bool,
    /// What the machine consists of, as far as a destination must have the same: devices, and the
    /// images of drives.
    pub(crate) parts: BTreeSet<String>,
}

fn parts(devices: Vec<Plugged>, drives: Vec<Block>) -> BTreeSet<String> {
    let device = |(_, name, kind): Plugged| format!("device '{name}' ({kind})");
    let image = |drive: Block| {
        let file = drive.inserted.map(|inserted| inserted.file).unwrap_or_default();
        let name = if drive.device.is_empty() { drive.qdev } else { drive.device };
        format!("image {file} of drive '{name}'")
    };
    devices.into_iter().map(device).chain(drives.into_iter().map(image)).collect()
}

/// Looks at the types of all plugged devices.
fn check_devices(devices: &[Plugged]) -> Result<(), QemuError> {
    for (_, name, kind) in devices {
        let device = format!("device '{name}' ({kind})");
        let vhost_disk = kind.starts_with("vhost-scsi");
        // SG_IO and vhost-scsi hand guest pages to a device without a fault.
        let by_dma = kind.starts_with("vfio") || kind.starts_with("vhost-vdpa");
        if by_dma || vhost_disk || kind == "scsi-generic" || kind == "scsi-block" {
            return Err(QemuError::Untrackable { device });
        }
    }
    Ok(())
}

/// Whether behind this file of /dev there is something that writes guest memory without a look at
/// QEMU's page tables: devices of the host, and hypervisors that are neither KVM nor QEMU's own
/// TCG, of which nobody here knows how they do (QEMU 11.1 has Hyper-V's, `mshv`).
fn writes_unseen(file: &str) -> bool {
    ["/dev/vfio/", "/dev/vhost-vdpa", "/dev/mshv", "/dev/xen/", "/dev/nitro_enclaves"]
        .iter()
        .any(|device| file.starts_with(device))
}

/// Whether this process is a QEMU rather than the back end of a device. One that was started by a
/// loader of its own is known by its command name only.
fn is_vmm(writer: &Mapper) -> bool {
    let program = std::fs::read_link(format!("/proc/{}/exe", writer.pid)).unwrap_or_default();
    let program = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    [&program, &writer.command]
        .iter()
        .any(|name| name.starts_with("qemu-system") || name.starts_with("qemu-kvm"))
}

/// Whether a vCPU has turned virtualisation on: CR4.VMXE (bit 13) or EFER.SVME (bit 12; Intel's SDM
/// volume 3, 2.5, and AMD's APM volume 2, 15.4), in what `info registers` prints.
fn runs_guests(registers: &str) -> Option<&'static str> {
    let value = |word: &str, name: &str| {
        let digits = word.strip_prefix(name)?.strip_prefix('=')?;
        u64::from_str_radix(digits, 16).ok()
    };
    registers.split_whitespace().find_map(|word| {
        if value(word, "CR4").is_some_and(|cr4| cr4 >> 13 & 1 == 1) {
            Some("VMX is on")
        } else if value(word, "EFER").is_some_and(|efer| efer >> 12 & 1 == 1) {
            Some("SVM is on")
        } else {
            None
        }
    })
}

/// Whether KVM runs the guest. `query-kvm` is on QEMU's list of what may go, since 10.2 has
/// `query-accelerators`.
pub(crate) fn runs_on_kvm(qmp: &mut dyn Monitor) -> Result<bool, QmpError> {
    match qmp.run_if_known(&QueryKvm)? {
        Some(kvm) => Ok(kvm.enabled),
        None => Ok(qmp.run(&QueryAccelerators)?.enabled == "kvm"),
    }
}

/// Whether QEMU's own migration, in `state`, is not under way.
pub(crate) fn is_over(state: &str) -> bool {
    matches!(state, "" | "none" | "failed" | "cancelled" | "completed")
}

#[cfg(test)]
mod tests;
