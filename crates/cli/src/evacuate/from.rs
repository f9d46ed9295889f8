//! The VMs of this host that leave it, as their manager tells: `--from libvirt`, `--from proxmox`.
//!
//! Invariant: what cannot be moved, or is not there by that name, is told before anything begins;
//! a VM is left out only because the operator says so.

use std::fmt;
use std::str::FromStr;

use anyhow::bail;
use godwit_evacuate::{ListedVm, exact, fits};
use godwit_qemu::{ManagedVm, domains_that_run, proxmox_vms_that_run};

use crate::vm::libvirt_uri;

/// Who keeps the VMs that leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum From {
    /// A libvirt; without an address that which `virsh` asks.
    Libvirt(Option<String>),
    /// Proxmox VE.
    Proxmox,
}

impl FromStr for From {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "libvirt" => Ok(Self::Libvirt(None)),
            None if text == "proxmox" => Ok(Self::Proxmox),
            Some(("libvirt", uri)) if uri.contains(":/") => Ok(Self::Libvirt(Some(uri.to_owned()))),
            _ => Err("write libvirt, libvirt:URI (libvirt:qemu:///system) or proxmox".to_owned()),
        }
    }
}

impl fmt::Display for From {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Libvirt(None) => f.write_str("libvirt"),
            Self::Libvirt(Some(uri)) => write!(f, "libvirt:{uri}"),
            Self::Proxmox => f.write_str("proxmox"),
        }
    }
}

impl From {
    /// Those that leave: all that run, or only those named in `only`, but not those in `except`.
    ///
    /// # Errors
    /// When there are none, one that is named is not there, or one cannot be moved.
    pub(super) fn vms(&self, only: &[String], except: &[String]) -> anyhow::Result<Vec<ListedVm>> {
        let (found, place) = match self {
            Self::Libvirt(uri) => {
                let address = libvirt_uri(uri.as_deref());
                (domains_that_run(&address, uri.is_none())?, format!("libvirt at {address}"))
            }
            Self::Proxmox => (proxmox_vms_that_run()?, "Proxmox VE on this node".to_owned()),
        };
        Ok(select(found, &place, only, except)?.iter().map(listed).collect())
    }
}

fn select(
    mut found: Vec<ManagedVm>,
    place: &str,
    only: &[String],
    except: &[String],
) -> anyhow::Result<Vec<ManagedVm>> {
    if found.is_empty() {
        bail!("no VM runs in {place}: there is nothing to move");
    }
    let is_there = |name: &&String| found.iter().any(|vm| vm.name == **name);
    if let Some(unknown) = only.iter().chain(except).find(|name| !is_there(name)) {
        let names: Vec<&str> = found.iter().map(|vm| vm.name.as_str()).collect();
        bail!("no VM '{unknown}' runs in {place} (running: {})", names.join(", "));
    }
    found.retain(|vm| (only.is_empty() || only.contains(&vm.name)) && !except.contains(&vm.name));
    if found.is_empty() {
        bail!("--only and --except leave no VM of those that run in {place}");
    }
    let obstacle = |vm: &ManagedVm| {
        let why = vm.obstacle.clone().or_else(|| (!fits(&vm.name)).then(|| unfit(&vm.name)))?;
        Some((vm.name.clone(), why))
    };
    let (names, obstacles): (Vec<String>, Vec<String>) = found
        .iter()
        .filter_map(obstacle)
        .map(|(name, why)| (name.clone(), format!("{name} ({why})")))
        .unzip();
    if !names.is_empty() {
        bail!(
            "cannot be moved: {}; mend that, or leave them here by --except {}",
            obstacles.join("; "),
            names.join(",")
        );
    }
    Ok(found)
}

/// Why one of this name is not taken, whose manager knows it by another kind of names.
fn unfit(name: &str) -> String {
    let length = name.chars().count();
    format!(
        "its name has {length} characters, of which some are others than letters, digits, '-', '_' \
         and '.', or more than 48, so that no command and no file can be called by it: rename it, \
         or put it into the list with a name = \"…\" and a `to`"
    )
}

fn listed(vm: &ManagedVm) -> ListedVm {
    ListedVm {
        name: Some(vm.name.clone()),
        vm: vm.vm.clone(),
        memory: exact(vm.memory),
        cpu: vm.cpu.clone(),
        disks: vm.disks.iter().map(|(name, size)| (name.clone(), exact(*size))).collect(),
        ..ListedVm::default()
    }
}

#[cfg(test)]
mod tests {
    use godwit_units::ByteCount;

    use super::*;

    fn vm(name: &str, obstacle: Option<&str>) -> ManagedVm {
        ManagedVm {
            name: name.to_owned(),
            vm: format!("libvirt:{name}"),
            memory: ByteCount(1536 << 20),
            cpu: Some("EPYC-Milan".to_owned()),
            disks: vec![("vda".to_owned(), ByteCount(20 << 30))],
            obstacle: obstacle.map(str::to_owned),
        }
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_manager_is_named_as_its_vms_are() {
        assert_eq!("libvirt".parse(), Ok(From::Libvirt(None)));
        let uri = "qemu+unix:///system?socket=/run/a".to_owned();
        assert_eq!(format!("libvirt:{uri}").parse(), Ok(From::Libvirt(Some(uri))));
        assert_eq!("proxmox".parse(), Ok(From::Proxmox));
        // As another host is asked for them.
        for text in ["libvirt", "libvirt:qemu:///system", "proxmox"] {
            assert_eq!(text.parse::<From>().unwrap().to_string(), text);
        }
        for wrong in ["", "libvirt:", "libvirt:web01", "proxmox:100", "vmware"] {
            assert!(wrong.parse::<From>().unwrap_err().contains("libvirt:URI"), "{wrong}");
        }
    }

    #[test]
    fn all_leave_but_those_that_the_operator_leaves_out() {
        let found = || vec![vm("a", None), vm("b", None), vm("c", Some("it has a job"))];
        let chosen = |only: &[&str], except: &[&str]| {
            let chosen = select(found(), "here", &names(only), &names(except));
            chosen.map(|vms| vms.into_iter().map(|vm| vm.name).collect::<Vec<_>>())
        };
        assert_eq!(chosen(&[], &["c"]).unwrap(), ["a", "b"]);
        assert_eq!(chosen(&["b"], &[]).unwrap(), ["b"]);
        assert_eq!(chosen(&["a", "b"], &["b"]).unwrap(), ["a"]);
        let told = |only: &[&str], except: &[&str]| chosen(only, except).unwrap_err().to_string();
        let words =
            "cannot be moved: c (it has a job); mend that, or leave them here by --except c";
        assert_eq!(told(&[], &[]), words);
        let words = "no VM 'd' runs in here (running: a, b, c)";
        assert_eq!((told(&["d"], &[]), told(&[], &["d"])), (words.to_owned(), words.to_owned()));
        assert!(told(&["a"], &["a"]).contains("leave no VM"));
        let none = select(Vec::new(), "here", &[], &[]).unwrap_err().to_string();
        assert_eq!(none, "no VM runs in here: there is nothing to move");
    }

    #[test]
    fn a_name_that_would_be_more_than_a_name_in_a_command_is_refused() {
        for name in ["a b", "a;reboot", "$(reboot)", "-x", "ä", &"a".repeat(49)] {
            let told = select(vec![vm(name, None)], "here", &[], &[]).unwrap_err().to_string();
            assert!(told.contains("rename it"), "{told}");
        }
    }

    #[test]
    fn what_a_manager_tells_is_listed_to_the_byte() {
        let listed = listed(&vm("a", None));
        assert_eq!((listed.memory.as_str(), listed.disks["vda"].as_str()), ("1536MiB", "20GiB"));
        assert_eq!((listed.cpu.as_deref(), listed.to.len()), (Some("EPYC-Milan"), 0));
    }
}
