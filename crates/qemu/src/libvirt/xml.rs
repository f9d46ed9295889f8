//! The disks in a domain's description, and where each of them is; and what else of a domain
//! matters to who takes it in.

use std::ops::Range;
use std::path::{Path, PathBuf};

use roxmltree::{Document, Node};

/// A disk that moves along, as a description has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) path: PathBuf,
    /// `raw` or `qcow2`.
    pub(super) format: &'static str,
    /// A block device, which is there or is not; else a file, which can be made.
    pub(super) is_device: bool,
}

/// The devices of QEMU's that a running domain's disks are, each with the name that its owner knows
/// it by: the alias, and the target.
pub(super) fn targets(xml: &str) -> Vec<(String, String)> {
    let Ok(document) = Document::parse(xml) else { return Vec::new() };
    let word = |disk: Node, of, key| child(disk, of)?.attribute(key).map(str::to_owned);
    let named = |disk| Some((word(disk, "alias", "name")?, word(disk, "target", "dev")?));
    disks(&document).filter_map(named).collect()
}

/// What a domain needs where it goes, by its description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outline {
    /// Its memory, in bytes.
    pub(crate) memory: u64,
    /// The model of its processor, or `host-passthrough`; none: libvirt's default.
    pub(crate) cpu: Option<String>,
    /// Its disks, by their targets.
    pub(crate) disks: Vec<String>,
    /// Whether it has a device of its host's.
    pub(crate) has_host_device: bool,
}

/// What the description `xml` of a domain that runs says of it; `None` where it says nothing of
/// its memory.
pub(crate) fn outline(xml: &str) -> Option<Outline> {
    let document = Document::parse(xml).ok()?;
    let root = document.root_element();
    // Libvirt writes it in KiB, whatever it was defined in (formatdomain, "Memory Allocation").
    let memory = child(root, "memory")?;
    if !matches!(memory.attribute("unit"), None | Some("KiB")) {
        return None;
    }
    let kib: u64 = memory.text()?.trim().parse().ok()?;
    let cpu = child(root, "cpu").and_then(|cpu| {
        let model = child(cpu, "model").and_then(|model| model.text()).map(str::trim);
        let mode = cpu.attribute("mode").filter(|mode| *mode != "custom");
        model.or(mode).map(str::to_owned)
    });
    let is_disk = |disk: &Node| matches!(disk.attribute("device"), None | Some("disk" | "lun"));
    let target = |disk| child(disk, "target")?.attribute("dev").map(str::to_owned);
    let devices = child(root, "devices").into_iter().flat_map(|devices| devices.children());
    let of_host = |device: Node| {
        device.has_tag_name("hostdev")
            || device.has_tag_name("interface") && device.attribute("type") == Some("hostdev")
    };
    Some(Outline {
        memory: kib.checked_mul(1024)?,
        cpu,
        disks: disks(&document).filter(is_disk).filter_map(target).collect(),
        has_host_device: devices.into_iter().any(of_host),
    })
}

/// Where the disk `target` is.
///
/// # Errors
/// Why it cannot be made anew at a destination, in words that follow its name.
pub(super) fn place(xml: &str, target: &str) -> Result<Placed, &'static str> {
    let document = Document::parse(xml).map_err(|_| "is in a description that cannot be read")?;
    let disk = find(&document, target).ok_or("is not in the domain's description")?;
    let (path, is_device) = match (source(disk, "file"), source(disk, "dev")) {
        (Some((path, _)), None) => (path, false),
        (None, Some((path, _))) => (path, true),
        _ => return Err("is neither a file nor a block device"),
    };
    let format = match child(disk, "driver").and_then(|driver| driver.attribute("type")) {
        None | Some("raw") => "raw",
        Some("qcow2") => "qcow2",
        Some(_) => return Err("is neither raw nor qcow2"),
    };
    let behind = child(disk, "backingStore");
    if behind.is_some_and(|behind| behind.children().any(|node| node.is_element())) {
        return Err("has images behind it");
    }
    let own = |word: &str| child(disk, "source").and_then(|source| child(source, word));
    if own("encryption").is_some() || child(disk, "encryption").is_some() {
        return Err("is encrypted");
    }
    if own("slices").is_some() || own("dataStore").is_some() {
        return Err("is a part of a file, or in two");
    }
    if child(disk, "transient").is_some() {
        return Err("is transient");
    }
    Ok(Placed { path: path.into(), format, is_device })
}

/// The description with the disk `target` at the path `to` instead of `from`; as it is where that
/// disk is not, or not there.
pub(super) fn moved(xml: &str, target: &str, from: &Path, to: &Path) -> String {
    let found = Document::parse(xml).ok().and_then(|document| {
        let disk = find(&document, target)?;
        let (path, range) = source(disk, "file").or_else(|| source(disk, "dev"))?;
        (Path::new(&path) == from).then_some(range)
    });
    let mut xml = xml.to_owned();
    if let Some(range) = found {
        xml.replace_range(range, &escaped(&to.to_string_lossy()));
    }
    xml
}

fn disks<'a, 'i>(document: &'a Document<'i>) -> impl Iterator<Item = Node<'a, 'i>> {
    let root = document.root_element();
    let devices = root.children().filter(|node| node.has_tag_name("devices"));
    devices.flat_map(|it| it.children()).filter(|node| node.has_tag_name("disk"))
}

fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn find<'a, 'i>(document: &'a Document<'i>, target: &str) -> Option<Node<'a, 'i>> {
    let is = |disk: &Node| child(*disk, "target")?.attribute("dev").map(|dev| dev == target);
    disks(document).find(|disk| is(disk) == Some(true))
}

/// What the source of a disk says, and where in the text.
fn source(disk: Node, key: &str) -> Option<(String, Range<usize>)> {
    let attribute = child(disk, "source")?.attribute_node(key)?;
    Some((attribute.value().to_owned(), attribute.range_value()))
}

fn escaped(text: &str) -> String {
    let words = [("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&apos;"), ("\"", "&quot;")];
    words.iter().fold(text.to_owned(), |text, (plain, word)| text.replace(plain, word))
}

#[cfg(test)]
mod tests {
    use super::*;

    const XML: &str = "<domain type='qemu'><name>web</name><devices>
        <disk type='file' device='disk'><driver name='qemu' type='qcow2'/>
          <source file='/vm/a&amp;b.qcow2' index='2'/><backingStore/>
          <target dev='vda' bus='virtio'/><alias name='virtio-disk0'/></disk>
        <disk type='block' device='disk'><driver name='qemu' type='raw'/>
          <source dev='/dev/vg/b'/><target dev='vdb'/></disk>
        <disk type='file' device='disk'><source file='/vm/c'/>
          <backingStore type='file'><format type='raw'/></backingStore><target dev='vdc'/></disk>
        <disk type='network' device='disk'><source protocol='rbd' name='a/b'/>
          <target dev='vdd'/></disk>
        <disk type='file' device='disk'><driver type='vmdk'/><source file='/vm/e'/>
          <target dev='vde'/></disk>
        </devices></domain>";

    #[test]
    fn what_a_domain_needs_is_in_its_description() {
        let with = |words: &str| {
            let xml = XML.replacen("<name>web</name>", &format!("<name>web</name>{words}"), 1);
            outline(&xml)
        };
        let memory = "<memory unit='KiB'>2097152</memory>";
        let plain = with(memory).unwrap();
        assert_eq!((plain.memory, plain.cpu), (2 << 30, None));
        assert_eq!(plain.disks, ["vda", "vdb", "vdc", "vdd", "vde"]);
        assert!(!plain.has_host_device);
        for (cpu, expected) in [
            ("<cpu mode='custom'><model fallback='forbid'>EPYC-Milan</model></cpu>", "EPYC-Milan"),
            ("<cpu mode='host-passthrough' check='none'/>", "host-passthrough"),
        ] {
            let cpu = with(&format!("{memory}{cpu}")).unwrap().cpu;
            assert_eq!(cpu.as_deref(), Some(expected));
        }
        assert_eq!(with("<memory unit='GiB'>2</memory>"), None);
        let cdrom = XML.replacen("device='disk'", "device='cdrom'", 2);
        let with_host = cdrom.replace("<devices>", "<devices><hostdev mode='subsystem'/>");
        let other = with_host.replacen("<devices>", &format!("{memory}<devices>"), 1);
        let other = outline(&other).unwrap();
        assert_eq!(other.disks, ["vdc", "vdd", "vde"]);
        assert!(other.has_host_device);
    }

    #[test]
    fn a_disk_is_found_by_its_target() {
        let placed =
            |path: &str, format, is_device| Placed { path: path.into(), format, is_device };
        assert_eq!(place(XML, "vda"), Ok(placed("/vm/a&b.qcow2", "qcow2", false)));
        assert_eq!(place(XML, "vdb"), Ok(placed("/dev/vg/b", "raw", true)));
        assert_eq!(targets(XML), [("virtio-disk0".to_owned(), "vda".to_owned())]);
    }

    #[test]
    fn what_cannot_be_made_anew_is_refused() {
        assert_eq!(place(XML, "vdc"), Err("has images behind it"));
        assert_eq!(place(XML, "vdd"), Err("is neither a file nor a block device"));
        assert_eq!(place(XML, "vde"), Err("is neither raw nor qcow2"));
        assert_eq!(place(XML, "vdz"), Err("is not in the domain's description"));
        assert_eq!(place("<domain", "vda"), Err("is in a description that cannot be read"));
    }

    #[test]
    fn a_path_is_another_at_the_destination() {
        let (from, to) = (Path::new("/vm/a&b.qcow2"), Path::new("/srv/x'&<.qcow2"));
        let there = moved(XML, "vda", from, to);
        assert_eq!(place(&there, "vda").unwrap().path, to);
        assert_eq!(place(&there, "vdb"), place(XML, "vdb"));
        assert_eq!(there.len(), XML.len() + "/srv/x&apos;&amp;&lt;".len() - "/vm/a&amp;b".len());
        // The definition of what is started next may have another disk by that name.
        assert_eq!(moved(XML, "vda", Path::new("/vm/other"), to), XML);
    }
}
