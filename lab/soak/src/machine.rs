//! The VMs of a soak.
//!
//! Keeps one promise: together they are of every kind that `godwit-faults` has, with memory in
//! files and in QEMU, with disks and without, of the oldest and the newest QEMU there is. Beside
//! them there is a VM for each program that has a check of its own.

use godwit_faults::rig::{Adapter, Outfit};
use godwit_testbed::{Backend, Witness};
use godwit_units::ByteCount;

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

/// The VMs with a witness, under the newest QEMU there is: half of them with memory in a file.
#[must_use]
pub fn witnesses() -> Vec<Machine> {
    let one = |(number, witness): (u64, Witness)| {
        let name = match witness {
            Witness::Sqlite => "witness-sqlite",
            Witness::Fio => "witness-fio",
            Witness::Stress => "witness-stress",
            Witness::Compiler => "witness-compiler",
            Witness::Redis => "witness-redis",
        };
        let adapter =
            if number.is_multiple_of(2) { Adapter::QemuFile } else { Adapter::QemuAnonymous };
        let outfit = Outfit {
            newest: true,
            disk: witness.has_disk(),
            memory: ByteCount(512 << 20),
            rate: 500,
            witness: Some(witness),
            ..Outfit::default()
        };
        Machine { name, number, adapter, outfit }
    };
    (101..).zip(Witness::ALL).map(one).collect()
}

/// All VMs that can be named.
fn known() -> Vec<Machine> {
    [machines(), witnesses()].concat()
}

/// The VMs with these names, in their order; without names `machines`.
#[must_use]
pub fn chosen(names: &[&str], with_witnesses: bool) -> Vec<Machine> {
    let mut chosen = known();
    chosen.retain(|vm| match names.is_empty() {
        true => vm.outfit.witness.is_some() == with_witnesses,
        false => names.contains(&vm.name),
    });
    chosen
}

/// The VM called `name`.
///
/// # Errors
/// What there is, where there is none of this name.
pub fn machine_named(name: &str) -> Result<&'static str, String> {
    let names: Vec<&str> = known().iter().map(|machine| machine.name).collect();
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

    #[test]
    fn each_witness_has_a_vm_of_its_own_and_a_number_that_no_other_has() {
        let names = |vms: Vec<Machine>| vms.iter().map(|vm| vm.name).collect::<Vec<_>>();
        for witness in Witness::ALL {
            let name = format!("witness-{witness}");
            assert_eq!(machine_named(&name), Ok(&*name));
            assert_eq!(chosen(&[&name], false)[0].outfit.witness, Some(witness));
        }
        let mut numbers: Vec<u64> = known().iter().map(|vm| vm.number).collect();
        numbers.dedup();
        assert_eq!(numbers.len(), machines().len() + Witness::ALL.len());
        assert_eq!(names(chosen(&[], false)), names(machines()));
        assert_eq!(names(chosen(&[], true)), names(witnesses()));
    }
}
