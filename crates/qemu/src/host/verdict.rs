//! Whether a QEMU could move: asked through its monitor where nobody holds that, of libvirt where
//! it does, and otherwise told from outside.

use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_libvirt::{Connection, Domain, State};
use godwit_track::{kernel_support, may_trace};
use godwit_units::ByteCount;

use super::incus::monitor_of_process;
use super::kinds::{Owner, Verdict};
use super::process::Found;
use crate::command_line::find;
use crate::libvirt::SourceDomain;
use crate::machine::{Machine, runs_on_kvm};
use crate::monitor::commands::QueryMemorySize;
use crate::monitor::{Qmp, QmpError};
use crate::proxmox::ProxmoxVm;
use crate::source::examine;
use crate::{QemuError, monitor_of};

/// A QEMU that does not answer at once is not waited for.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);
/// What libvirt's domains are not asked.
const NOT_TAINTED: &str = "libvirt has nothing against it; its devices are not looked at here, as \
                           a monitor command marks a domain as tainted: godwit plan looks at them";

/// What there was to be heard.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) vm: Option<String>,
    pub(super) state: Option<String>,
    pub(super) ram: Option<ByteCount>,
    pub(super) accelerator: Option<String>,
    pub(super) verdict: Verdict,
}

impl Asked {
    fn only(verdict: Verdict) -> Self {
        Self { vm: None, state: None, ram: None, accelerator: None, verdict }
    }

    fn refused(error: &QemuError) -> Self {
        Self::only(Verdict::Refused(error.to_string()))
    }
}

/// Asks the best one there is.
pub(super) fn ask(found: &Found, uri: &str) -> Asked {
    match &found.owner {
        Owner::Libvirt(name) => ask_libvirt(found, name, uri),
        Owner::Proxmox(id) => ask_proxmox(found, id),
        Owner::Incus(name) => {
            let vm = format!("incus:{name}");
            ask_monitor(found, vm, || monitor_of_process(name, found.pid))
        }
        Owner::Plain => ask_monitor(found, format!("pid:{}", found.pid), || monitor_of(found.pid)),
    }
}

fn ask_proxmox(found: &Found, id: &str) -> Asked {
    let asked = ask_monitor(found, format!("proxmox:{id}"), || monitor_of(found.pid));
    match ProxmoxVm::open(id) {
        Ok(_) => asked,
        Err(error) => Asked { verdict: Verdict::Refused(error.to_string()), ..asked },
    }
}

/// What stands against every VM on this host, or against this process.
pub(super) fn check_rights(found: &Found) -> Result<(), QemuError> {
    kernel_support()?;
    may_trace(found.pid)?;
    Ok(())
}

/// What shows of its devices on the command line alone.
pub(super) fn check_devices(found: &Found) -> Result<(), QemuError> {
    let drivers = found.values("device").filter_map(|value| find(value, "driver", "driver"));
    for driver in drivers {
        let kinds = ["vfio", "vhost-vdpa", "vhost-scsi", "scsi-generic", "scsi-block"];
        if kinds.iter().any(|kind| driver.starts_with(kind)) {
            return Err(QemuError::Untrackable { device: format!("a device ({driver})") });
        }
    }
    Ok(())
}

fn ask_libvirt(found: &Found, name: &str, uri: &str) -> Asked {
    // A session's daemon has what its user has started.
    let (domain, address) = match domain_of(found, name, &[uri, "qemu:///session"]) {
        Ok(known) => known,
        Err(error) => return Asked::refused(&error),
    };
    let state = domain.state().ok().map(|state| match state {
        State::Running => "running".to_owned(),
        State::Paused(_) => "paused".to_owned(),
        State::ShutOff => "shut off".to_owned(),
        State::Other(number) => format!("libvirt's state {number}"),
    });
    let looked = check_rights(found)
        .and_then(|()| SourceDomain::open(name, &address, false).map(drop))
        .and_then(|()| check_devices(found));
    let verdict = match looked {
        Ok(()) => Verdict::Unknown(NOT_TAINTED.to_owned()),
        Err(error) => Verdict::Refused(error.to_string()),
    };
    let vm = match address == uri {
        true => format!("libvirt:{name}"),
        false => format!("libvirt:{name}@{address}"),
    };
    Asked { vm: Some(vm), state, ..Asked::only(verdict) }
}

/// The domain of a process, which one of these daemons has.
fn domain_of(found: &Found, name: &str, uris: &[&str]) -> Result<(Domain, String), QemuError> {
    let uuid = found.values("uuid").next().unwrap_or_default();
    let mut first = None;
    for uri in uris {
        let domain = Connection::open(uri).and_then(|host| host.domain_by_uuid(uuid));
        match domain {
            Ok(domain) => return Ok((domain, (*uri).to_owned())),
            Err(error) => first = first.or(Some(QemuError::from(error))),
        }
    }
    let words = first.map_or_else(String::new, |error| error.to_string());
    Err(QemuError::Domain(format!(
        "it is domain '{name}' of a libvirt that cannot be asked ({words}): name that libvirt by \
         LIBVIRT_DEFAULT_URI"
    )))
}

/// Asks a QEMU that godwit takes by the name `vm`, by the monitor that is found for it.
fn ask_monitor(
    found: &Found,
    vm: String,
    monitor: impl FnOnce() -> Result<PathBuf, QemuError>,
) -> Asked {
    let path = match monitor() {
        Ok(path) => path,
        Err(error) => return Asked::refused(&error),
    };
    let vm = Some(vm);
    match connect(found, &path) {
        Ok(machine) => Asked { vm, ..ask_machine(found, machine) },
        // Who has come to it a moment ago may be gone in the next.
        Err(QemuError::Qmp(error @ QmpError::NoGreeting { .. })) => {
            Asked { vm, ..Asked::only(Verdict::Unknown(error.to_string())) }
        }
        Err(error) => Asked::refused(&error),
    }
}

fn connect(found: &Found, path: &Path) -> Result<Machine, QemuError> {
    let mut machine = Machine::behind(Box::new(Qmp::connect(path)?))?;
    if machine.pid != found.pid {
        return Err(QemuError::NoMonitor { pid: found.pid });
    }
    machine.qmp.set_limit(ANSWER_LIMIT);
    Ok(machine)
}

fn ask_machine(found: &Found, mut machine: Machine) -> Asked {
    let state = machine.run_state();
    let memory = machine.qmp.run(&QueryMemorySize).ok();
    let ram = memory.map(|it| ByteCount(it.base_memory.saturating_add(it.plugged_memory)));
    let kvm = runs_on_kvm(&mut *machine.qmp).unwrap_or(false);
    let looked = check_rights(found)
        .and_then(|()| examine(&mut machine).map(drop))
        .and_then(|()| machine.check_nested());
    let verdict = match looked {
        Ok(()) => Verdict::Moves,
        Err(error @ QemuError::Qmp(QmpError::Timeout { .. })) => {
            Verdict::Unknown(error.to_string())
        }
        Err(error) => Verdict::Refused(error.to_string()),
    };
    let accelerator = kvm.then(|| "kvm".to_owned());
    Asked { vm: None, state: state.ok(), ram, accelerator, verdict }
}
