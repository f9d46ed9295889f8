//! The differences between two pictures, in words for an operator, each with its key and its cure.
//!
//! Invariant: what follows from another difference is not told beside it, and two QEMUs of one
//! version that were started with the same options have none. Of the source's picture nothing is
//! believed but that it is text.

use std::collections::{BTreeMap, BTreeSet};

use super::picture::Picture;
use super::tree::Device;

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// By which it is let pass.
    pub(crate) key: String,
    /// What differs, and what to do.
    pub(crate) text: String,
}

/// Bytes of a stranger's text that are shown.
const SHOWN: usize = 100;

/// A text of the source as it is shown: not too long, and nothing that moves a cursor.
pub(super) fn shown(text: &str) -> String {
    let clean = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    text.chars().take(SHOWN).map(clean).collect()
}

fn difference(key: impl Into<String>, text: String) -> Difference {
    Difference { key: key.into(), text }
}

fn fact(picture: &Picture, key: &str) -> String {
    picture.facts.get(key).cloned().unwrap_or_default()
}

/// Whether both are machines of one type.
pub(crate) fn is_same_machine(source: &Picture, here: &Picture) -> bool {
    fact(source, "machine") == fact(here, "machine")
}

/// What differs between the source's machine and the one here. `machines` are the types that the
/// QEMU here has; where that of the source is the same nobody looks at them.
pub(crate) fn differences(
    source: &Picture,
    here: &Picture,
    machines: &BTreeSet<String>,
) -> Vec<Difference> {
    let mut found = Vec::new();
    let differs = |key: &str| fact(source, key) != fact(here, key);
    let other_machine = !is_same_machine(source, here);
    if other_machine {
        found.push(machine(
            &fact(source, "machine"),
            &fact(here, "machine"),
            here.version,
            machines,
        ));
    }
    let keys: BTreeSet<&String> = source.facts.keys().chain(here.facts.keys()).collect();
    for key in keys {
        let (theirs, own) = (source.facts.get(key), here.facts.get(key));
        // What follows from another processor, another number of them or another machine is not
        // news.
        let follows = match key.split('.').next() {
            _ if key == "machine" => true,
            Some("machine") => other_machine,
            Some("cpu") => key != "cpu" && differs("cpu"),
            Some("smp") => key != "smp" && differs("smp"),
            Some("memory") => key.contains(".block ") && other_machine,
            _ => false,
        };
        if follows || theirs == own {
            continue;
        }
        found.extend(of_fact(key, theirs.map(String::as_str), own.map(String::as_str)));
    }
    if !differs("cpu") {
        found.extend(features(source, here));
    }
    if !other_machine {
        found.extend(devices(source, here));
    }
    found
}

fn machine(
    theirs: &str,
    own: &str,
    version: (u64, u64, u64),
    machines: &BTreeSet<String>,
) -> Difference {
    let (major, minor, micro) = version;
    let cure = if machines.contains(theirs) {
        format!("use -machine {}", shown(theirs))
    } else {
        let (a, b) = (theirs.rsplit_once('-'), own.rsplit_once('-'));
        let alike = a.zip(b).is_some_and(|((a, _), (b, _))| a == b);
        let both = if alike { own } else { "a type that both have" };
        format!(
            "QEMU {major}.{minor}.{micro} does not have that: use one that does, or start the \
             source with -machine {both}"
        )
    };
    difference("machine", format!("machine: {} at the source, {own} here ({cure})", shown(theirs)))
}

/// A fact that is not the machine's type.
fn of_fact(key: &str, theirs: Option<&str>, own: Option<&str>) -> Option<Difference> {
    let (group, name) = key.split_once('.').unwrap_or((key, ""));
    let (what, cure) = match (group, name) {
        ("smp", "") => ("processors".to_owned(), format!("use -smp {}", shown(theirs?))),
        ("smp", "plugged") => {
            ("places of the processors".to_owned(), "plug the same ones".to_owned())
        }
        ("smp", _) => (format!("-smp {name}"), format!("use -smp …,{name}={}", shown(theirs?))),
        ("cpu", "") => ("CPU model".to_owned(), format!("use -cpu {}", shown(theirs?))),
        ("cpu", _) => (format!("CPU {name}"), "use the source's -cpu".to_owned()),
        ("accel", _) => ("accelerator".to_owned(), format!("use -accel {}", shown(theirs?))),
        ("machine", _) => {
            (format!("machine {name}"), format!("use -machine …,{name}={}", shown(theirs?)))
        }
        ("memory", "") => ("bytes of memory".to_owned(), "use the source's -m".to_owned()),
        ("memory", _) if name.starts_with("block ") => {
            let cure = "use the same devices, and the same firmware and ROM files";
            (format!("bytes of memory {name}"), cure.to_owned())
        }
        ("memory", _) => (
            format!("memory {name}"),
            "use the source's -device for memory, with its addr".to_owned(),
        ),
        // A newer source knows what is not known here.
        _ => return None,
    };
    let absent = |value: Option<&str>| value.map_or_else(|| "none".to_owned(), shown);
    let both_know = theirs.is_some() && own.is_some();
    if !both_know && group != "memory" {
        return None;
    }
    let text = format!(
        "{}: {} at the source, {} here ({cure})",
        shown(&what),
        absent(theirs),
        absent(own)
    );
    Some(difference(shown(key), text))
}

/// Bits of CPUID, where a word that one side does not know is zero there; and switches that both
/// know.
fn features(source: &Picture, here: &Picture) -> Option<Difference> {
    let bits = |picture: &Picture, word: &str| picture.features.get(word).copied().unwrap_or(0);
    let words: BTreeSet<&String> = source.features.keys().chain(here.features.keys()).collect();
    let differ: Vec<String> = words
        .into_iter()
        .filter(|word| bits(source, word) != bits(here, word))
        .map(|word| format!("{} {:#x}/{:#x}", shown(word), bits(source, word), bits(here, word)))
        .collect();
    let text = if differ.is_empty() {
        let only = |of: &Picture, other: &Picture| -> Vec<String> {
            let known = of.switches.iter().filter(|(_, on)| **on);
            let off = known.filter(|(name, _)| other.switches.get(*name) == Some(&false));
            off.map(|(name, _)| name.clone()).collect()
        };
        sides(only(source, here), only(here, source))?
    } else {
        differ.join(", ")
    };
    Some(difference("cpu.features", with_cure(&text, source)))
}

fn with_cure(features: &str, source: &Picture) -> String {
    // Such a model is whatever its host has.
    let by_host = source.facts.get("cpu").is_some_and(|model| model == "host" || model == "max");
    let cure = if by_host {
        "the hosts or their microcode differ: start both with a -cpu that both hosts have, such as \
         a named model"
    } else {
        "use the source's -cpu"
    };
    format!("CPU features: {features} ({cure})")
}

/// Features that one side has alone, in words.
fn sides(source: Vec<String>, here: Vec<String>) -> Option<String> {
    let side = |names: Vec<String>, place: &str| match names.join(", ") {
        none if none.is_empty() => None,
        names => Some(format!("{names} only {place}")),
    };
    let few = |names: Vec<String>| names.iter().take(40).map(|name| shown(name)).collect();
    let sides: Vec<String> = [side(few(source), "at the source"), side(few(here), "here")]
        .into_iter()
        .flatten()
        .collect();
    (!sides.is_empty()).then(|| sides.join("; "))
}

/// The same with names, where the source, whose picture is `source`, tells them.
pub(crate) fn name_features(
    found: &mut [Difference],
    source: &Picture,
    theirs: &[String],
    own: &[String],
) {
    let Some(told) = found.iter_mut().find(|difference| difference.key == "cpu.features") else {
        return;
    };
    let only = |of: &[String], other: &[String]| -> Vec<String> {
        of.iter().filter(|name| !other.contains(name)).cloned().collect()
    };
    if let Some(sides) = sides(only(theirs, own), only(own, theirs)) {
        told.text = with_cure(&sides, source);
    }
}

/// What an operator calls the device at `place`: by its own id or that of the nearest one above it.
fn name(devices: &BTreeMap<String, Device>, place: &str) -> String {
    let kind = devices.get(place).map_or("", |device| device.kind.as_str());
    let mut at = place;
    loop {
        if let Some(device) = devices.get(at).filter(|device| !device.id.is_empty()) {
            return format!("device '{}' ({})", shown(&device.id), shown(kind));
        }
        match at.rsplit_once('/') {
            Some((above, _)) => at = above,
            None => return format!("{} at {}", shown(kind), shown(place)),
        }
    }
}

/// The key of the device at `place`: all that is on it goes with it.
fn key(place: &str) -> String {
    format!("device.{}", shown(place))
}

/// Whether a device above `place` is among `places`.
fn is_below(place: &str, places: &BTreeSet<&String>) -> bool {
    place.match_indices('/').any(|(at, _)| places.contains(&place[..at].to_owned()))
}

fn devices(source: &Picture, here: &Picture) -> Vec<Difference> {
    // Another version builds its boards another way inside; what was plugged is what counts.
    let same_version = source.version == here.version;
    let counts = |devices: &BTreeMap<String, Device>, place: &str| {
        same_version
            || devices.get(place).is_some_and(|device| !device.id.is_empty())
            || place.contains('/')
    };
    let missing = |of: &Picture, other: &Picture| -> Vec<String> {
        let absent: BTreeSet<&String> =
            of.devices.keys().filter(|place| !other.devices.contains_key(*place)).collect();
        let news = |place: &&&String| !is_below(place, &absent) && counts(&of.devices, place);
        absent.iter().filter(news).map(|place| (*place).clone()).collect()
    };
    let mut found = Vec::new();
    let mut absent = missing(here, source);
    for place in missing(source, here) {
        let device = &source.devices[&place];
        let moved = absent.iter().position(|other| {
            let own = &here.devices[other];
            own.kind == device.kind && own.id == device.id && !device.id.is_empty()
        });
        let what = name(&source.devices, &place);
        let text = match moved {
            Some(index) => format!(
                "{what} is at {} at the source and at {} here (give it the same addr)",
                shown(&place),
                shown(&absent.remove(index))
            ),
            None => format!("{what} only at the source (add -device {})", option(device, &place)),
        };
        found.push(difference(key(&place), text));
    }
    for place in absent {
        let text = format!("{} only here (leave it out)", name(&here.devices, &place));
        found.push(difference(key(&place), text));
    }
    for (place, theirs) in &source.devices {
        let Some(own) = here.devices.get(place) else { continue };
        found.extend(device(place, theirs, own, source));
    }
    found
}

/// The option that makes a device.
fn option(device: &Device, place: &str) -> String {
    let id =
        if device.id.is_empty() { String::new() } else { format!(",id={}", shown(&device.id)) };
    let last = place.rsplit('/').next().unwrap_or_default();
    // Of a PCI device.
    let addr = match last.split_once('.') {
        Some((slot, function)) if slot.len() == 2 && function.len() == 1 => {
            format!(",addr={}", shown(last))
        }
        _ => String::new(),
    };
    format!("{}{id}{addr}", shown(&device.kind))
}

/// Two devices at one place.
fn device(place: &str, theirs: &Device, own: &Device, source: &Picture) -> Option<Difference> {
    if theirs.kind != own.kind {
        let text = format!(
            "at {}: {} at the source, {} here (use the source's -device)",
            shown(place),
            shown(&theirs.kind),
            own.kind
        );
        return Some(difference(key(place), text));
    }
    // A property that one side does not know has come with another version, which keeps to what the
    // machine's type says.
    let both = theirs
        .properties
        .iter()
        .filter_map(|(key, value)| Some((key, value, own.properties.get(key)?)));
    let differ: Vec<String> = both
        .filter(|(_, theirs, own)| theirs != own)
        .map(|(key, theirs, own)| {
            format!("{}={} at the source, {own} here", shown(key), shown(theirs))
        })
        .collect();
    if differ.is_empty() {
        return None;
    }
    let text =
        format!("{}: {} (use the source's)", name(&source.devices, place), differ.join(", "));
    Some(difference(key(place), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(kind: &str, id: &str, properties: &[(&str, &str)]) -> Device {
        let properties =
            properties.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Device { kind: kind.to_owned(), id: id.to_owned(), properties: properties.collect() }
    }

    fn picture() -> Picture {
        let facts = [
            ("machine", "pc-q35-7.2"),
            ("machine.hpet", "true"),
            ("accel", "tcg"),
            ("cpu", "qemu64"),
            ("cpu.model", "107"),
            ("smp", "2"),
            ("smp.maxcpus", "2"),
            ("memory", "1024"),
            ("memory.block pc.bios", "4096"),
        ];
        let devices = [
            ("host", device("q35-pcihost", "", &[])),
            ("host/04.0", device("virtio-net-pci", "net0", &[("vectors", "3"), ("new-here", "x")])),
            (
                "host/04.0/virtio-net-device",
                device("virtio-net-device", "", &[("mac", "52:54:00:00:00:01")]),
            ),
            ("host/05.0", device("virtio-rng-pci", "rng0", &[])),
            ("hpet", device("hpet", "", &[("timers", "3")])),
        ];
        Picture {
            version: (7, 2, 0),
            facts: facts.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            features: [("CPUID 0x1.0 EDX".to_owned(), 5)].into(),
            switches: [("rdctl-no".to_owned(), true), ("fma".to_owned(), false)].into(),
            devices: devices.map(|(place, device)| (place.to_owned(), device)).into(),
            allowed: Vec::new(),
        }
    }

    fn found(change: impl FnOnce(&mut Picture)) -> Vec<String> {
        let mut here = picture();
        change(&mut here);
        let machines = ["pc-q35-7.2".to_owned()].into();
        let told = differences(&picture(), &here, &machines);
        told.into_iter()
            .map(|difference| format!("[{}] {}", difference.key, difference.text))
            .collect()
    }

    #[test]
    fn a_machine_is_like_itself() {
        assert!(found(|_| {}).is_empty());
        // What an older or newer one does not know is not compared.
        let other = found(|here| {
            here.version = (10, 0, 0);
            here.facts.remove("machine.hpet");
            here.facts.insert("machine.newer".to_owned(), "on".to_owned());
            here.devices.remove("hpet");
            here.devices.get_mut("host/04.0").unwrap().properties.remove("new-here");
        });
        assert!(other.is_empty(), "{other:?}");
    }

    #[test]
    fn another_machine_is_told_once_with_what_does_not_follow_from_it() {
        let told = found(|here| {
            here.facts.insert("machine".to_owned(), "pc-i440fx-7.2".to_owned());
            here.facts.insert("machine.hpet".to_owned(), "false".to_owned());
            here.facts.insert("smp".to_owned(), "1".to_owned());
            here.facts.insert("smp.maxcpus".to_owned(), "1".to_owned());
            here.devices.clear();
        });
        assert_eq!(
            told,
            [
                "[machine] machine: pc-q35-7.2 at the source, pc-i440fx-7.2 here (use -machine \
                 pc-q35-7.2)",
                "[smp] processors: 2 at the source, 1 here (use -smp 2)",
            ]
        );
        let unknown = differences(
            &picture(),
            &Picture {
                facts: [("machine".to_owned(), "pc-q35-6.0".to_owned())].into(),
                ..picture()
            },
            &BTreeSet::new(),
        );
        assert!(unknown[0].text.contains("7.2.0 does not have that"), "{unknown:?}");
        assert!(
            unknown[0].text.contains("start the source with -machine pc-q35-6.0"),
            "{unknown:?}"
        );
    }

    #[test]
    fn every_kind_of_difference_is_named_with_its_cure() {
        let told = found(|here| {
            here.facts.insert("cpu".to_owned(), "max".to_owned());
            here.facts.insert("cpu.model".to_owned(), "6".to_owned());
            here.facts.remove("memory.block pc.bios");
            here.devices.remove("host/05.0");
            here.devices.insert("host/06.0".to_owned(), device("nvme", "disk", &[]));
            here.devices.insert("host/04.0/virtio-net-device".to_owned(), device("x", "", &[]));
            here.devices
                .get_mut("host/04.0")
                .unwrap()
                .properties
                .insert("vectors".to_owned(), "5".to_owned());
        });
        assert_eq!(
            told,
            [
                "[cpu] CPU model: qemu64 at the source, max here (use -cpu qemu64)",
                "[memory.block pc.bios] bytes of memory block pc.bios: 4096 at the source, none \
                 here (use the same devices, and the same firmware and ROM files)",
                "[device.host/05.0] device 'rng0' (virtio-rng-pci) only at the source (add -device \
                 virtio-rng-pci,id=rng0,addr=05.0)",
                "[device.host/06.0] device 'disk' (nvme) only here (leave it out)",
                "[device.host/04.0] device 'net0' (virtio-net-pci): vectors=3 at the source, 5 \
                 here (use the source's)",
                "[device.host/04.0/virtio-net-device] at host/04.0/virtio-net-device: \
                 virtio-net-device at the source, x here (use the source's -device)",
            ]
        );
    }

    #[test]
    fn a_device_at_another_address_is_the_same_device() {
        let told = found(|here| {
            let moved = here.devices.remove("host/05.0").unwrap();
            here.devices.insert("host/07.0".to_owned(), moved);
        });
        let text = "[device.host/05.0] device 'rng0' (virtio-rng-pci) is at host/05.0 at the \
                    source and at host/07.0 here (give it the same addr)";
        assert_eq!(told, [text]);
    }

    #[test]
    fn features_are_named_where_names_are_known() {
        let mut here = picture();
        here.features.insert("CPUID 0x7.0 EBX".to_owned(), 8);
        let mut told = differences(&picture(), &here, &BTreeSet::new());
        assert_eq!(told[0].text, "CPU features: CPUID 0x7.0 EBX 0x0/0x8 (use the source's -cpu)");
        let (theirs, own) = (["fma".to_owned()], ["fma".to_owned(), "bmi1".to_owned()]);
        name_features(&mut told, &picture(), &theirs, &own);
        assert_eq!(told[0].text, "CPU features: bmi1 only here (use the source's -cpu)");
    }

    #[test]
    fn what_is_in_no_word_of_cpuid_is_compared_by_name() {
        let mut here = picture();
        here.switches = [("rdctl-no".to_owned(), false), ("newer".to_owned(), true)].into();
        let told = differences(&picture(), &here, &BTreeSet::new());
        assert_eq!(told.len(), 1);
        assert_eq!(
            told[0].text,
            "CPU features: rdctl-no only at the source (use the source's -cpu)"
        );
        let mut host = picture();
        for picture in [&mut host, &mut here] {
            picture.facts.insert("cpu".to_owned(), "host".to_owned());
        }
        let told = differences(&host, &here, &BTreeSet::new());
        assert!(told[0].text.contains("a -cpu that both hosts have"), "{told:?}");
    }

    #[test]
    fn a_strangers_text_cannot_write_to_the_terminal() {
        let mut source = picture();
        source.facts.insert("machine".to_owned(), format!("\x1b[2J{}", "x".repeat(5000)));
        source.devices.insert("a\nb/c".to_owned(), device("\x07", "\r", &[]));
        for told in differences(&source, &picture(), &BTreeSet::new()) {
            assert!(!told.text.chars().any(char::is_control) && told.text.len() < 1000, "{told:?}");
        }
    }
}
