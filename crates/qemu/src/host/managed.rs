//! The VMs of one manager that run here, as they are to leave this host: what each needs where it
//! goes, and what stands against its move.
//!
//! Invariant: to look changes nothing, as in all of this folder; what only a monitor command could
//! tell of a domain of libvirt's is left to the migration itself.

use godwit_libvirt::{Connection, Domain, State, Xml};
use godwit_units::ByteCount;

use super::kinds::Verdict;
use super::process::{self, Found, size};
use super::verdict::{check_devices, check_rights};
use super::{HostVm, vms_of_host};
use crate::QemuError;
use crate::libvirt::{Outline, SourceDomain, outline};
use crate::proxmox::ProxmoxVm;

/// One that is to leave.
#[derive(Clone, Debug)]
pub struct ManagedVm {
    /// What its manager calls it.
    pub name: String,
    /// By what name godwit takes it.
    pub vm: String,
    /// Its memory.
    pub memory: ByteCount,
    /// The model of processor that it has, if it was given one.
    pub cpu: Option<String>,
    /// Its disks by their names, with what is in use of each, as far as that can be told.
    pub disks: Vec<(String, ByteCount)>,
    /// Why it cannot move.
    pub obstacle: Option<String>,
}

/// The domains of the libvirt at `uri` that run or are paused, in the order of their names. They
/// are named with that address where `is_default` does not say that all know it.
///
/// # Errors
/// When it cannot be asked.
pub fn domains_that_run(uri: &str, is_default: bool) -> Result<Vec<ManagedVm>, QemuError> {
    let host = Connection::open(uri)?;
    let processes = process::all().map_err(|error| {
        QemuError::Domain(format!("the processes of this host cannot be read in /proc: {error}"))
    })?;
    let mut vms = Vec::new();
    for domain in host.domains()? {
        // One that has ended meanwhile has no state.
        if matches!(domain.state(), Ok(State::Running | State::Paused(_))) {
            vms.push(of_domain(&domain, uri, is_default, &processes)?);
        }
    }
    vms.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(vms)
}

fn of_domain(
    domain: &Domain,
    uri: &str,
    is_default: bool,
    processes: &[Found],
) -> Result<ManagedVm, QemuError> {
    let (name, uuid) = (domain.name(), domain.uuid()?);
    let told = outline(&domain.xml(Xml::Running)?);
    let process = processes.iter().find(|it| it.values("uuid").any(|known| known == uuid));
    let obstacle = SourceDomain::open(&name, uri, false)
        .map(drop)
        .and_then(|()| check(told.as_ref(), process))
        .err()
        .map(|error| error.to_string());
    let in_use = |target: &String| {
        let bytes = domain.disk_in_use(target).unwrap_or_default();
        (target.clone(), ByteCount(bytes))
    };
    Ok(ManagedVm {
        vm: match is_default {
            true => format!("libvirt:{name}"),
            false => format!("libvirt:{name}@{uri}"),
        },
        name,
        memory: ByteCount(told.as_ref().map_or(0, |told| told.memory)),
        cpu: told.as_ref().and_then(|told| told.cpu.clone()),
        disks: told.iter().flat_map(|told| &told.disks).map(in_use).collect(),
        obstacle,
    })
}

/// What shows of a domain without a command to its QEMU.
fn check(told: Option<&Outline>, process: Option<&Found>) -> Result<(), QemuError> {
    let refused = |words: &str| Err(QemuError::Domain(words.to_owned()));
    let Some(told) = told else {
        return refused("libvirt's description of it does not say how much memory it has");
    };
    if told.has_host_device {
        return refused(
            "it has a device of this host's (hostdev), whose state cannot be moved: detach it",
        );
    }
    let Some(process) = process else {
        return refused(
            "its QEMU is not on this host, or hidden: run godwit on the domain's host, as root",
        );
    };
    check_rights(process)?;
    check_devices(process)
}

/// The VMs of Proxmox's that run on this node, in the order of their numbers.
///
/// # Errors
/// When there is no Proxmox VE here, or it cannot be looked at.
pub fn proxmox_vms_that_run() -> Result<Vec<ManagedVm>, QemuError> {
    let running = ProxmoxVm::that_run()?;
    if running.is_empty() {
        return Ok(Vec::new());
    }
    let pids: Vec<String> = running.iter().map(|(_, pid)| pid.to_string()).collect();
    let looks = vms_of_host(&pids, "").map(|found| found.vms).unwrap_or_default();
    let of = |(vm, pid): (ProxmoxVm, i32)| {
        let look = looks.iter().find(|look| look.pid == pid);
        of_proxmox(&vm, look)
    };
    Ok(running.into_iter().map(of).collect())
}

fn of_proxmox(vm: &ProxmoxVm, look: Option<&HostVm>) -> ManagedVm {
    let (told, undefined) = match vm.outline() {
        Ok(told) => (told, None),
        Err(error) => (Default::default(), Some(error.to_string())),
    };
    // What it has is what QEMU says; its definition may be of the next start.
    let memory = look.and_then(|look| look.ram).or(told.memory.map(|mib| ByteCount(mib << 20)));
    let refused = look.and_then(|look| match &look.verdict {
        Verdict::Refused(why) => Some(why.clone()),
        Verdict::Moves | Verdict::Unknown(_) => None,
    });
    let unseen = || look.is_none().then(|| "it has ended, or is hidden from this user".to_owned());
    let unknown = || memory.is_none().then(|| "nobody tells how much memory it has".to_owned());
    let disk = |(name, text): (String, String)| (name, size(&text).unwrap_or_default());
    ManagedVm {
        name: vm.id().to_owned(),
        vm: format!("proxmox:{}", vm.id()),
        memory: memory.unwrap_or_default(),
        cpu: told.cpu,
        disks: told.disks.into_iter().map(disk).collect(),
        obstacle: undefined.or(refused).or_else(unseen).or_else(unknown),
    }
}
