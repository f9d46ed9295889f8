//! What a guest sees of its machine, asked of QEMU by QMP: the same questions at both sides.
//!
//! Invariant: looking changes nothing. What a QEMU does not know is left out, and what only one
//! side knows is not compared.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::object::Object;
use super::tree::{Device, devices};
use crate::machine::runs_on_kvm;
use crate::monitor::commands::{
    FeatureWord, Human, QueryCpus, QueryMemoryDevices, QueryMemorySize,
};
use crate::monitor::{Monitor, QmpError};

/// A machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Picture {
    /// QEMU's version: major, minor, micro.
    pub(crate) version: (u64, u64, u64),
    /// All but devices, by key.
    pub(crate) facts: BTreeMap<String, String>,
    /// Registers of CPUID that QEMU makes of the model and its options, by name; all zero are left
    /// out.
    pub(crate) features: BTreeMap<String, u64>,
    /// On KVM, the switches of the first CPU: what of its features is not in CPUID is there alone.
    #[serde(default)]
    pub(crate) switches: BTreeMap<String, bool>,
    /// Devices by place.
    pub(crate) devices: BTreeMap<String, Device>,
    /// Differences that the source's operator lets pass.
    #[serde(default)]
    pub(crate) allowed: Vec<String>,
}

/// Properties of the machine that a guest, or the stream of device state, sees.
const OF_THE_MACHINE: [&str; 17] = [
    "acpi",
    "cxl",
    "default-bus-bypass-iommu",
    "graphics",
    "hmat",
    "hpet",
    "i8042",
    "max-ram-below-4g",
    "nvdimm",
    "pic",
    "pit",
    "sata",
    "smbus",
    "smm",
    "usb",
    "vmport",
    "x-south-bridge",
];

/// Properties of a CPU beside its features.
const OF_THE_CPU: [&str; 11] = [
    "family",
    "level",
    "model",
    "model-id",
    "phys-bits",
    "pmu",
    "stepping",
    "vendor",
    "xlevel",
    "l3-cache",
    "legacy-cache",
];

/// Parts of the topology that `-smp` names.
const OF_THE_TOPOLOGY: [&str; 6] = ["maxcpus", "sockets", "dies", "modules", "cores", "threads"];

fn human(qmp: &mut dyn Monitor, command_line: &str) -> Result<String, QmpError> {
    Ok(qmp.run_if_known(&Human { command_line })?.unwrap_or_default())
}

/// A value as it is shown.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.trim().to_owned(),
        other => other.to_string(),
    }
}

/// What a machine was made with and keeps as long as it lives: all that takes a question for each
/// property, where QEMU is older than 10.1. Its monitor reads questions byte by byte
/// (`monitor_can_read` in monitor/monitor.c), so that each takes over half a millisecond, and there
/// are forty to eighty.
#[derive(Clone, Debug)]
pub(crate) struct Realized(Picture);

impl Realized {
    /// Asks the machine behind `qmp`.
    pub(crate) fn of(qmp: &mut dyn Monitor) -> Result<Self, QmpError> {
        let mut picture = Picture { version: qmp.version(), ..Picture::default() };
        picture.machine(qmp)?;
        picture.processors(qmp)?;
        Ok(Self(picture))
    }

    /// The same where it may be `known`, and is from then on.
    pub(crate) fn find<'a>(
        known: &'a mut Option<Self>,
        qmp: &mut dyn Monitor,
    ) -> Result<&'a Self, QmpError> {
        let found = known.take().map_or_else(|| Self::of(qmp), Ok)?;
        Ok(known.insert(found))
    }
}

impl Picture {
    /// Looks at the machine behind `qmp`.
    pub(crate) fn of(qmp: &mut dyn Monitor) -> Result<Self, QmpError> {
        let realized = Realized::of(qmp)?;
        Self::with(&realized, qmp)
    }

    /// The same of a machine of which a part is known: looks at what may have changed.
    pub(crate) fn with(realized: &Realized, qmp: &mut dyn Monitor) -> Result<Self, QmpError> {
        let mut picture = realized.0.clone();
        picture.plugged_processors(qmp)?;
        picture.memory(qmp)?;
        picture.devices = devices(&human(qmp, "info qtree")?);
        Ok(picture)
    }

    fn note(&mut self, key: &str, value: &Value) {
        if !value.is_null() {
            self.facts.insert(key.to_owned(), plain(value));
        }
    }

    fn machine(&mut self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        let machine = Object::at("/machine", qmp)?;
        let kind: String = machine.property(qmp, "type")?.unwrap_or_default();
        self.note("machine", &json!(kind.strip_suffix("-machine").unwrap_or(&kind)));
        for name in OF_THE_MACHINE {
            if let Some(value) = machine.property(qmp, name)? {
                self.note(&format!("machine.{name}"), &value);
            }
        }
        self.note("accel", &json!(if runs_on_kvm(qmp)? { "kvm" } else { "tcg" }));
        if let Some(topology) = machine.property::<BTreeMap<String, Value>>(qmp, "smp")? {
            for name in OF_THE_TOPOLOGY {
                self.note(&format!("smp.{name}"), topology.get(name).unwrap_or(&Value::Null));
            }
        }
        Ok(())
    }

    fn plugged_processors(&mut self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        let cpus = qmp.run(&QueryCpus)?;
        self.note("smp", &json!(cpus.len()));
        let mut places: Vec<String> = cpus.iter().map(|cpu| cpu.props.to_string()).collect();
        places.sort();
        self.note("smp.plugged", &json!(places.join(" ")));
        Ok(())
    }

    /// What the processors are; the first one cannot be unplugged, and all others are as it is.
    fn processors(&mut self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        let cpus = qmp.run(&QueryCpus)?;
        let Some(path) = cpus.first().map(|cpu| cpu.qom_path.as_str()) else { return Ok(()) };
        let cpu = Object::at(path, qmp)?;
        let kind: String = cpu.property(qmp, "type")?.unwrap_or_default();
        self.note("cpu", &json!(kind.strip_suffix("-x86_64-cpu").unwrap_or(&kind)));
        for name in OF_THE_CPU {
            if let Some(value) = cpu.property(qmp, name)? {
                self.note(&format!("cpu.{name}"), &value);
            }
        }
        let words: Vec<FeatureWord> = cpu.property(qmp, "feature-words")?.unwrap_or_default();
        let untold = words.is_empty();
        for word in words {
            let (leaf, sub) = (word.cpuid_input_eax, word.cpuid_input_ecx);
            let register = format!("CPUID {leaf:#x}.{sub} {}", word.cpuid_register);
            let bits = word.features & !follows_from_topology(&register);
            if bits != 0 {
                self.features.insert(register, bits);
            }
        }
        // `feature-words` leaves out what a guest reads from MSRs: under which mitigations its
        // processor can do without, and what its own guests may use. TCG has none of it.
        if self.facts.get("accel").is_some_and(|accelerator| accelerator == "kvm") {
            // A hypervisor's are for a guest that may be one.
            let nests = cpu.property(qmp, "vmx")? == Some(true);
            let has_msrs = untold || announces_msrs(&self.features);
            let wanted = |name: &str| {
                has_msrs && is_read_from_msr(name) || nests && name.starts_with("vmx-")
            };
            if has_msrs || nests {
                self.switches = switches(qmp, &cpu, wanted)?;
            }
        }
        Ok(())
    }

    fn memory(&mut self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        self.note("memory", &json!(qmp.run(&QueryMemorySize)?.base_memory));
        for device in qmp.run_if_known(&QueryMemoryDevices)?.unwrap_or_default() {
            let (kind, data) = (device.kind, device.data);
            let place = data.addr.or(data.memaddr).unwrap_or(0);
            let value =
                format!("{kind} of {} bytes, slot {}, node {}", data.size, data.slot, data.node);
            self.note(&format!("memory.device {place:#x}"), &json!(value));
        }
        for (name, total) in blocks(&human(qmp, "info ramblock")?) {
            self.note(&format!("memory.block {name}"), &json!(total));
        }
        Ok(())
    }
}

/// Bits of a register that say that there are several processors: QEMU 10.0 has them in its words,
/// 7.2 adds them when the guest asks. The topology is compared by itself.
fn follows_from_topology(register: &str) -> u64 {
    match register {
        // HTT and CmpLegacy.
        "CPUID 0x1.0 EDX" => 1 << 28,
        "CPUID 0x80000001.0 ECX" => 1 << 1,
        _ => 0,
    }
}

/// What is no feature of its own among the switches of a CPU: it follows from the topology, or
/// says how QEMU is to make the CPU.
const NO_FEATURES: [&str; 11] = [
    "check",
    "cmp-legacy",
    "enforce",
    "fill-mtrr-mask",
    "full-cpuid-auto-level",
    "host-phys-bits",
    "ht",
    "legacy-multi-node",
    "migratable",
    "realized",
    "start-powered-off",
];

/// Names and sizes in `info ramblock` (`ram_block_format` in softmmu/physmem.c): name, page size,
/// offset, used, total. Tables that the firmware loads may grow when they are loaded, and are left
/// out.
fn blocks(told: &str) -> Vec<(String, u64)> {
    let block = |line: &str| {
        let (head, numbers) = line.split_once(" 0x")?;
        let mut head = head.trim().rsplitn(3, char::is_whitespace);
        let (_unit, _count, name) = (head.next()?, head.next()?, head.next()?.trim());
        let total = numbers.split_whitespace().nth(2)?.strip_prefix("0x")?;
        let fixed = !name.starts_with("/rom@etc/");
        Some((name.to_owned(), u64::from_str_radix(total, 16).ok()?)).filter(|_| fixed)
    };
    told.lines().filter_map(block).collect()
}

/// The features of the first CPU that are on, by QEMU's names: what [`Picture::features`] has as
/// bits.
pub(crate) fn feature_names(qmp: &mut dyn Monitor) -> Result<Vec<String>, QmpError> {
    let cpus = qmp.run(&QueryCpus)?;
    let Some(path) = cpus.first().map(|cpu| cpu.qom_path.as_str()) else { return Ok(Vec::new()) };
    let cpu = Object::at(path, qmp)?;
    Ok(switches(qmp, &cpu, |_| true)?
        .into_iter()
        .filter_map(|(name, on)| on.then_some(name))
        .collect())
}

/// Whether a CPU with the CPUID bits `features` has MSRs from which a guest reads features at all:
/// QEMU takes all of them off where the bit is off that announces it (`feature_dependencies` in
/// target/i386/cpu.c). To ask for them are some thirty questions.
fn announces_msrs(features: &BTreeMap<String, u64>) -> bool {
    /// arch-capabilities and core-capability; pdcm.
    const ANNOUNCE: [(&str, u64); 2] =
        [("CPUID 0x7.0 EDX", 1 << 29 | 1 << 30), ("CPUID 0x1.0 ECX", 1 << 15)];
    ANNOUNCE.iter().any(|(register, bits)| features.get(*register).is_some_and(|on| on & bits != 0))
}

/// Whether the switch `name` may be of a feature that a guest reads from an MSR (target/i386/cpu.c,
/// `feature_word_info` of type MSR_FEATURE_WORD, other than those of VMX). Each switch is a command
/// for QEMU's main loop, and there are hundreds: to ask for all took as long as to move 512 MiB.
fn is_read_from_msr(name: &str) -> bool {
    const NAMES: [&str; 5] = [
        "full-width-write",
        "rsba",
        "skip-l1dfl-vmentry",
        "split-lock-detect",
        "xapic-disable-status",
    ];
    ["-no", "-all", "-clear", "-ctrl"].iter().any(|end| name.ends_with(end))
        || NAMES.contains(&name)
}

/// The features of `cpu` by QEMU's names, as far as they are `wanted`, and whether each is on.
fn switches(
    qmp: &mut dyn Monitor,
    cpu: &Object<'_>,
    wanted: impl Fn(&str) -> bool,
) -> Result<BTreeMap<String, bool>, QmpError> {
    let mut switches = BTreeMap::new();
    for name in cpu.names_of(qmp, "bool")? {
        // A feature has other names, with underscores or dots, and a CPU has switches that are no
        // features.
        let other = name.contains(['_', '.']) || name.starts_with("hotplug");
        let other = other || name.starts_with("x-") || OF_THE_CPU.contains(&name.as_str());
        if other || NO_FEATURES.contains(&name.as_str()) || !wanted(&name) {
            continue;
        }
        if let Some(on) = cpu.property(qmp, &name)? {
            switches.insert(name, on);
        }
    }
    Ok(switches)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::stand_in::StandIn;

    #[test]
    fn what_cannot_change_is_asked_once_and_what_may_is_asked_again() {
        let machine = |cpus: usize| {
            let cpu = json!({ "thread-id": 1, "qom-path": "/cpu", "props": {} });
            StandIn::new(&[
                ("query-cpus-fast", json!(vec![cpu; cpus])),
                ("/machine type", json!("pc-machine")),
                ("/cpu type", json!("max-x86_64-cpu")),
                ("/cpu feature-words", json!([])),
            ])
        };
        let realized = Realized::of(&mut machine(1)).unwrap();
        let mut later = machine(2);
        let picture = Picture::with(&realized, &mut later).unwrap();
        assert_eq!((&*picture.facts["cpu"], &*picture.facts["smp"]), ("max", "2"));
        let later = later.told.lock().unwrap();
        assert!(later.iter().all(|(command, _)| command != "qom-get"), "{later:?}");
        assert_eq!(picture, Picture::of(&mut machine(2)).unwrap());
    }

    #[test]
    fn features_of_msrs_are_asked_for_where_the_cpu_has_such_msrs() {
        let asked = |words: Value| {
            let cpu = json!({ "thread-id": 1, "qom-path": "/cpu", "props": {} });
            let mut machine = StandIn::new(&[
                ("query-cpus-fast", json!([cpu])),
                ("/machine type", json!("pc-machine")),
                ("/cpu type", json!("host-x86_64-cpu")),
                ("query-kvm", json!({ "enabled": true, "present": true })),
                ("/cpu feature-words", words),
                ("/cpu vmx", json!(false)),
                ("/cpu", json!([{ "name": "rdctl-no", "type": "bool" }])),
                ("/cpu rdctl-no", json!(true)),
            ]);
            Realized::of(&mut machine).unwrap().0.switches.contains_key("rdctl-no")
        };
        let word = |leaf: u32, register: &str, features: u64| {
            json!([{ "cpuid-input-eax": leaf, "cpuid-input-ecx": 0, "cpuid-register": register,
                     "features": features }])
        };
        assert!(!asked(word(7, "EDX", 1 << 26)), "spec-ctrl announces none");
        // Mutations: one of the bits is not looked at; a CPU that tells no words is taken for one
        // that has none.
        for (leaf, register, bit) in [(7, "EDX", 29), (7, "EDX", 30), (1, "ECX", 15)] {
            assert!(asked(word(leaf, register, 1 << bit)), "{leaf} {register} {bit}");
        }
        assert!(asked(json!([])));
    }

    #[test]
    fn ram_blocks_are_read_with_and_without_addresses() {
        let old =
            "              Block Name    PSize              Offset               Used              Total
                     mem    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000
    /rom@etc/acpi/tables    4 KiB  0x00000000100c0000 0x0000000000020000 0x0000000000200000
0000:00:01.0/virtio-net-pci.rom    4 KiB  0x0000000010080000 0x0000000000040000 0x0000000000040000\n";
        let rom = ("0000:00:01.0/virtio-net-pci.rom".to_owned(), 0x40000);
        assert_eq!(blocks(old), [("mem".to_owned(), 0x1000_0000), rom]);
        let new = "  pc.bios    4 KiB  0x0000000010000000 0x0000000000040000 0x0000000000040000 \
                   0x00007f4fb5a00000  ro\n";
        assert_eq!(blocks(new), [("pc.bios".to_owned(), 0x40000)]);
        assert!(blocks("what 0x\n 0x1 0x2\nname 0x1 0x2 0xzz").is_empty());
    }
}
