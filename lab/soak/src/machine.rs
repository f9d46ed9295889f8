//! The VMs of a soak.
//!
//! Keeps one promise: together they are of every kind that `godwit-faults` has, with memory in
//! files
//! and in QEMU, with disks and without, of the oldest and the newest QEMU there is.

use godwit_faults::rig::{Adapter, Outfit};
use godwit_testbed::Backend;

/// One VM.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Its name in tables and on the command line.
    pub name: &'static str,
    /// Its number among all, on which its chance depends.
    pub number: u64,
    /// Its kind.
    pub adapter: Adapter,
    /// What it has and does.
    pub outfit: Outfit,
}

/// All of them.
#[must_use]
pub fn machines() -> Vec<Machine> {
    let plain = Outfit::default;
    let disk = || Outfit { disk: true, ..plain() };
    let anonymous = Some(Backend::Anonymous);
    let all = [
        ("kvm-disk", Adapter::Kvm, Outfit { newest: true, ..disk() }),
        ("kvm-anonymous", Adapter::Kvm, Outfit { backend: anonymous, rate: 4000, ..plain() }),
        ("microvm-disk", Adapter::Microvm, disk()),
        ("microvm-ring", Adapter::Microvm, Outfit { tracker: "kvm-ring", rate: 8000, ..plain() }),
        ("tcg-file-disk", Adapter::QemuFile, disk()),
        ("tcg-anonymous-disk", Adapter::QemuAnonymous, Outfit { newest: true, ..disk() }),
        ("tcg-anonymous", Adapter::QemuAnonymous, Outfit { rate: 1000, ..plain() }),
        ("libvirt-disk", Adapter::Libvirt, disk()),
    ];
    (1..)
        .zip(all)
        .map(|(number, (name, adapter, outfit))| Machine { name, number, adapter, outfit })
        .collect()
}

/// The VM called `name`.
///
/// # Errors
/// What there is, where there is none of this name.
pub fn machine_named(name: &str) -> Result<&'static str, String> {
    let names: Vec<&str> = machines().iter().map(|machine| machine.name).collect();
    let found = names.iter().find(|known| **known == name).copied();
    found.ok_or_else(|| format!("one of: {}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_eight_vms_of_every_kind_with_disks_and_without() {
        let machines = machines();
        assert_eq!(machines.len(), 8);
        for adapter in Adapter::ALL {
            assert!(machines.iter().any(|machine| machine.adapter == adapter), "{adapter}");
        }
        assert!(machines.iter().all(|machine| machine.outfit.memory.0 == 256 << 20));
        let disks = machines.iter().filter(|machine| machine.outfit.disk).count();
        assert_eq!(disks, 5);
    }
}
