//! The devices of a machine, read off QEMU's `info qtree`: one answer that holds every device,
//! user's or built in, with the properties that it was made with.
//!
//! QMP has the same one property at a time (`qom-get`), a thousand questions for an ordinary
//! machine. The text is for people, but `qbus_print` and `qdev_print` (softmmu/qdev-monitor.c,
//! since 10.0 system/qdev-monitor.c) have written it alike from 7.2 to 11.1; a line that is not
//! understood is left out on both sides.
//!
//! A device is found by its place: a PCI device by its address below the host bridge, a USB device
//! by its port, a SCSI device by its target, any other by its type. QEMU's stream of device state
//! goes by places, too.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A device and what it was made with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    /// Its type.
    pub(crate) kind: String,
    /// Its id; empty when it has none.
    pub(crate) id: String,
    pub(crate) properties: BTreeMap<String, String>,
}

/// Properties that name what is behind a device on its host, that only say how errors are handled
/// or work is divided there, or that the guest sets. The geometry of a disk follows from its size,
/// which is compared by itself, and from the partition table that its image held when QEMU was
/// started (`hd_geometry_guess` in hw/block/hd-geometry.c): empty images have none.
const OF_THE_HOST: [&str; 41] = [
    "MCFG",
    "account-failed",
    "account-invalid",
    "audiodev",
    "backend_defaults",
    "busnr",
    "chardev",
    "cryptodev",
    "cyls",
    "display",
    "drive",
    "ebpf-rss-fds",
    "failover_pair_id",
    "filter",
    "head",
    "heads",
    "ioeventfd",
    "iothread",
    "iothread-vq-mapping",
    "lcyls",
    "lheads",
    "logappend",
    "logfile",
    "lsecs",
    "memdev",
    "netdev",
    "pcap",
    "port",
    "rerror",
    "rng",
    "romfile",
    "secs",
    "share-rw",
    "smb_io_base",
    "stats",
    "tx",
    "vhostfd",
    "werror",
    "x-max-bounce-buffer-size",
    "x-txburst",
    "x-txtimer",
];

/// Deeper than buses nest.
const DEPTH: usize = 64;

/// All devices by their places.
pub(crate) fn devices(text: &str) -> BTreeMap<String, Device> {
    let lines: Vec<(usize, &str)> = text
        .lines()
        .map(|line| (line.len() - line.trim_start().len(), line.trim()))
        .filter(|(_, line)| !line.is_empty())
        .collect();
    let mut tree = Tree { lines, at: 0, found: BTreeMap::new() };
    while let Some((indent, line)) = tree.line() {
        tree.at += 1;
        if line.starts_with("bus: ") {
            tree.bus(indent, "", 0);
        }
    }
    tree.found
}

struct Tree<'a> {
    lines: Vec<(usize, &'a str)>,
    at: usize,
    found: BTreeMap<String, Device>,
}

impl<'a> Tree<'a> {
    fn line(&self) -> Option<(usize, &'a str)> {
        self.lines.get(self.at).copied()
    }

    /// The devices of a bus whose line, indented by `indent`, has just been read.
    fn bus(&mut self, indent: usize, place: &str, depth: usize) {
        let mut alike: BTreeMap<String, usize> = BTreeMap::new();
        while let Some((inside, line)) = self.line().filter(|(inside, _)| *inside > indent) {
            self.at += 1;
            let Some(head) = line.strip_prefix("dev: ").filter(|_| depth < DEPTH) else { continue };
            let (kind, id) = head.split_once(", id ").unwrap_or((head, ""));
            let device = Device {
                kind: kind.to_owned(),
                id: id.trim_matches('"').to_owned(),
                properties: BTreeMap::new(),
            };
            self.device(inside, device, place, &mut alike, depth);
        }
    }

    /// A device whose first line, indented by `indent`, has just been read, and all that is behind
    /// it.
    fn device(
        &mut self,
        indent: usize,
        mut device: Device,
        place: &str,
        alike: &mut BTreeMap<String, usize>,
        depth: usize,
    ) {
        let mut own = None;
        while let Some((inside, line)) = self.line().filter(|(inside, _)| *inside > indent) {
            if line.starts_with("bus: ") || line.starts_with("dev: ") {
                break;
            }
            self.at += 1;
            if inside == indent + 2 {
                read(line, &mut device, &mut own);
            }
        }
        let target = ["channel", "scsi-id", "lun"].map(|key| device.properties.get(key).cloned());
        if let [Some(channel), Some(target), Some(lun)] = target {
            own = Some(format!("{channel}:{target}:{lun}"));
        }
        let mut own = own.unwrap_or_else(|| device.kind.clone());
        let count = alike.entry(own.clone()).or_default();
        *count += 1;
        if *count > 1 {
            own = format!("{own}#{count}");
        }
        let place = if place.is_empty() { own } else { format!("{place}/{own}") };
        self.found.insert(place.clone(), device);
        let mut buses = 0;
        while let Some((inside, line)) = self.line().filter(|(inside, _)| *inside > indent) {
            self.at += 1;
            if line.starts_with("bus: ") {
                let below = if buses == 0 { place.clone() } else { format!("{place}/bus.{buses}") };
                self.bus(inside, &below, depth + 1);
                buses += 1;
            }
        }
    }
}

/// One line of a device: a property, or where a PCI or USB device is and what it is.
fn read(line: &str, device: &mut Device, place: &mut Option<String>) {
    if let Some((key, value)) = line.split_once(" = ") {
        // A number is followed by itself in another notation.
        let value = value.split(" (").next().unwrap_or(value).trim_matches('"');
        match key {
            "addr" => *place = Some(value.to_owned()),
            // Its default became "chosen by the device" in 10.0, which means as much.
            "rombar"
                if value == "-1" || value == "4294967295" || value == "18446744073709551615" =>
            {
                device.properties.insert(key.to_owned(), "1".to_owned());
            }
            // Whoever was not told takes the size of what is behind it. `usb-storage` leaves that
            // to its disk, which has a line of its own, in 10.0 and 11.1; in 7.2 it shows what it
            // has found.
            "logical_block_size" | "physical_block_size" if value == "0" => {}
            _ if OF_THE_HOST.contains(&key) => {}
            _ => {
                device.properties.insert(key.to_owned(), value.to_owned());
            }
        }
        return;
    }
    if let Some((class, rest)) =
        line.strip_prefix("class ").and_then(|rest| rest.split_once(", addr "))
    {
        // The address begins with the number of the bus, which the guest gives.
        let id = rest.split_once(", pci id ").map_or("", |(_, id)| id);
        device.properties.insert("PCI class".to_owned(), class.to_owned());
        device.properties.insert("PCI id".to_owned(), id.to_owned());
    } else if let Some((_, rest)) = line.split_once(", port ").filter(|_| line.starts_with("addr "))
    {
        *place = rest.split(',').next().map(|port| format!("port {port}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"bus: main-system-bus
  type System
  dev: hpet, id ""
    gpio-in "" 2
    timers = 3 (0x3)
    mmio 00000000fed00000/0000000000000400
  dev: q35-pcihost, id ""
    bypass-iommu = false
    bus: pcie.0
      type PCIE
      dev: virtio-blk-pci, id "vd1"
        vectors = 2 (0x2)
        addr = 05.0
        rombar = -1 (0xffffffffffffffff)
        busnr = 0 (0x0)
        class SCSI controller, addr 00:05.0, pci id 1af4:1001 (sub 1af4:0002)
        bar 0: i/o at 0xffffffffffffffff [0x7e]
        bus: virtio-bus
          type virtio-pci-bus
          dev: virtio-blk-device, id ""
            drive = "virtio0"
            serial = "a = b"
            queue-size = 256 (0x100)
      dev: qemu-xhci, id ""
        addr = 06.0
        bus: usb-bus.0
          type usb-bus
          dev: usb-tablet, id ""
            port = ""
            addr 0.0, port 1, speed 480, name QEMU USB Tablet, attached
      dev: virtio-scsi-pci, id "s0"
        addr = 07.0
        bus: virtio-bus
          type virtio-pci-bus
          dev: virtio-scsi-device, id ""
            bus: s0.0
              type SCSI
              dev: scsi-hd, id ""
                channel = 0 (0x0)
                scsi-id = 3 (0x3)
                lun = 1 (0x1)
          dev: odd, id ""
          dev: odd, id ""
"#;

    #[test]
    fn a_size_of_blocks_that_was_not_told_is_none() {
        let disk = |size: &str| {
            let text =
                format!("bus: b\n  dev: usb-storage, id \"u\"\n    logical_block_size = {size}\n");
            devices(&text)["usb-storage"].properties.clone()
        };
        assert!(disk("0 (0 B)").is_empty());
        assert_eq!(disk("4096 (4 KiB)")["logical_block_size"], "4096");
    }

    #[test]
    fn every_device_has_a_place_and_its_properties() {
        let found = devices(TEXT);
        let places: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(
            places,
            [
                "hpet",
                "q35-pcihost",
                "q35-pcihost/05.0",
                "q35-pcihost/05.0/virtio-blk-device",
                "q35-pcihost/06.0",
                "q35-pcihost/06.0/port 1",
                "q35-pcihost/07.0",
                "q35-pcihost/07.0/odd",
                "q35-pcihost/07.0/odd#2",
                "q35-pcihost/07.0/virtio-scsi-device",
                "q35-pcihost/07.0/virtio-scsi-device/0:3:1",
            ]
        );
        let disk = &found["q35-pcihost/05.0"];
        assert_eq!((disk.kind.as_str(), disk.id.as_str()), ("virtio-blk-pci", "vd1"));
        let of = |device: &Device| -> Vec<String> {
            device.properties.iter().map(|(key, value)| format!("{key}={value}")).collect()
        };
        let own = [
            "PCI class=SCSI controller",
            "PCI id=1af4:1001 (sub 1af4:0002)",
            "rombar=1",
            "vectors=2",
        ];
        assert_eq!(of(disk), own);
        assert_eq!(
            of(&found["q35-pcihost/05.0/virtio-blk-device"]),
            ["queue-size=256", "serial=a = b"]
        );
        assert_eq!(of(&found["hpet"]), ["timers=3"]);
    }

    #[test]
    fn a_text_that_makes_no_sense_is_no_machine() {
        for text in [
            "",
            "no",
            "dev: x, id \"\"",
            "  bus: a\n dev: b\n      bus: c\n  type d",
            " = \n, port ",
        ] {
            let _ = devices(text);
        }
        assert!(devices("dev: x, id \"\"\n  a = 1").is_empty());
        let mut deep = String::new();
        for level in 0..200 {
            deep +=
                &format!("{}bus: a\n{}dev: b\n", " ".repeat(level * 4), " ".repeat(level * 4 + 2));
        }
        assert!(devices(&deep).len() <= DEPTH + 1);
    }
}
