//! The guest's disks, the names that they go by, and which of them may move.
//!
//! Source: `query-block` and `query-blockstats` of QEMU's QMP reference. A disk may be named by its
//! block node, by the id of its `-drive`, by the id of the guest's device, or by that device's
//! path. The first of these that there is, is what both sides call it.

use godwit_disk::{Disk, DiskChoice, Writes};
use godwit_units::ByteCount;
use serde_json::Value;

use crate::QemuError;
use crate::monitor::commands::{Block, BlockStats, Image, QueryBlock, QueryBlockstats};
use crate::monitor::{Monitor, QmpError};

/// What is in a drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Medium {
    pub(crate) node: String,
    pub(crate) size: ByteCount,
    read_only: bool,
    cache: &'static str,
    file: String,
    format: String,
    /// The files that it is made of: the image, those behind it, and where one keeps its data.
    pub(crate) files: Vec<String>,
}

/// A disk of the guest, and what becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDisk {
    /// What it is called.
    pub name: String,
    /// Bytes that the guest sees.
    pub size: ByteCount,
    /// The image, as QEMU calls it.
    pub file: String,
    /// How the host caches it, as `-drive cache=` has it: `none`, `writeback`, `writethrough`,
    /// `directsync` or `unsafe`.
    pub cache: &'static str,
    /// Whether it moves along.
    pub moves: bool,
}

/// A drive of the guest, with or without a medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Drive {
    /// All names, the best first.
    pub(crate) names: Vec<String>,
    /// Whether a device of the guest uses it.
    attached: bool,
    pub(crate) medium: Option<Medium>,
}

/// A disk that can move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// What both sides call it.
    pub(crate) name: String,
    /// The block node that the guest's device uses.
    pub(crate) node: String,
    pub(crate) size: ByteCount,
    /// QEMU's words for the image.
    pub(crate) file: String,
    pub(crate) format: String,
}

impl Found {
    /// The command that makes an empty image for it. The file is that of the source, which QEMU
    /// tells only of plain files as a path.
    pub(crate) fn image_command(&self) -> String {
        let file = if self.file.starts_with('/') { quoted(&self.file) } else { "FILE".to_owned() };
        format!("qemu-img create -f {} {file} {}   # {}", self.format, self.size.0, self.name)
    }
}

/// As a shell reads it: in quotes where it has to be.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
    if text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// All drives, in QEMU's order.
pub(crate) fn drives(qmp: &mut dyn Monitor) -> Result<Vec<Drive>, QmpError> {
    Ok(qmp.run(&QueryBlock)?.into_iter().map(drive).collect())
}

/// The files of the disks that the guest can write, but for those that move.
pub(crate) fn writable_and_staying(drives: &[Drive], moving: &[Found]) -> Vec<String> {
    let media = drives.iter().filter(|drive| drive.is_in_use()).filter_map(|it| it.medium.as_ref());
    let stays =
        |medium: &&Medium| !medium.read_only && moving.iter().all(|disk| disk.node != medium.node);
    media.filter(stays).map(|medium| medium.file.clone()).collect()
}

fn drive(block: Block) -> Drive {
    let Block { device, qdev: path, inserted } = block;
    let node = inserted.as_ref().map(|inserted| inserted.node_name.clone()).unwrap_or_default();
    // QEMU itself names nodes that nobody has named, and differently each time: `#block123`.
    let named = if node.starts_with('#') { String::new() } else { node.clone() };
    let mut names = vec![named, device, device_id(&path), path.clone()];
    names.retain(|name| !name.is_empty());
    names.dedup();
    let medium = inserted.map(|inserted| Medium {
        node,
        size: ByteCount(inserted.image.virtual_size),
        read_only: inserted.ro,
        cache: inserted.cache.mode(),
        files: files(&inserted.image),
        file: inserted.image.filename,
        format: inserted.image.format,
    });
    Drive { names, attached: !path.is_empty(), medium }
}

/// The files of an image and of those behind it.
fn files(image: &Image) -> Vec<String> {
    const CHAIN: usize = 16;
    let mut found = Vec::new();
    let mut at = Some(image);
    while let Some(image) = at.filter(|_| found.len() < CHAIN) {
        found.push(plain_file(&image.filename));
        if let Some(data) = image.format_specific["data"]["data-file"].as_str() {
            found.push(plain_file(data));
        }
        at = image.backing_image.as_deref();
    }
    found
}

/// The file in QEMU's name for a node: with options that are not in a path it is JSON.
fn plain_file(name: &str) -> String {
    let parsed =
        name.strip_prefix("json:").and_then(|json| serde_json::from_str::<Value>(json).ok());
    let mut at = parsed.as_ref();
    while let Some(node) = at {
        if let Some(file) = node["filename"].as_str().filter(|file| file.starts_with('/')) {
            return file.to_owned();
        }
        at = [&node["file"], &node["image"]].into_iter().find(|below| below.is_object());
    }
    name.to_owned()
}

/// The id in `/machine/peripheral/ID/virtio-backend`; an id by itself stays; empty where the device
/// has none.
fn device_id(path: &str) -> String {
    match path.strip_prefix("/machine/peripheral/") {
        Some(rest) => rest.split('/').next().unwrap_or_default().to_owned(),
        None if path.starts_with('/') => String::new(),
        None => path.to_owned(),
    }
}

impl Drive {
    /// Has it go by `name` first, if it is that of the guest's device `device`.
    pub(crate) fn call(&mut self, device: &str, name: &str) {
        if self.names.iter().any(|own| own == device) {
            self.names.retain(|own| own != name);
            self.names.insert(0, name.to_owned());
        }
    }

    /// Whether a device of the guest has it, which keeps no other copy: flash memory travels with
    /// the device state.
    pub(crate) fn is_in_use(&self) -> bool {
        let flash =
            |name: &String| name.starts_with("pflash") || name.starts_with("/machine/system.flash");
        self.attached && !self.names.iter().any(flash)
    }

    /// What becomes of it, when `moving` are the disks that move along; a drive without a medium is
    /// left out.
    pub(crate) fn listed(&self, moving: &[Found]) -> Option<ListedDisk> {
        let medium = self.medium.as_ref().filter(|_| self.is_in_use())?;
        Some(ListedDisk {
            name: self.names.first().cloned().unwrap_or_default(),
            size: medium.size,
            file: medium.files.first().cloned().unwrap_or_default(),
            cache: medium.cache,
            moves: moving.iter().any(|disk| disk.node == medium.node),
        })
    }

    /// The same refusal with the cure for a disk that is to be filled.
    fn as_a_destination(&self, error: QemuError) -> QemuError {
        let why = match &self.medium {
            None => {
                "it has no medium at the destination: start the QEMU there with an image of the \
                 source's size"
            }
            Some(medium) if medium.read_only => {
                "it is read-only at the destination: start the QEMU there with read-only=off and \
                 the right to write to the image"
            }
            Some(_) => return error,
        };
        match error {
            QemuError::DiskUnmovable { disk, .. } => QemuError::DiskUnmovable { disk, why },
            other => other,
        }
    }

    /// Why it cannot move.
    fn movable(&self, name: &str) -> Result<Found, QemuError> {
        let refused = |why| QemuError::DiskUnmovable { disk: name.to_owned(), why };
        let medium = self.medium.as_ref().ok_or_else(|| refused("it has no medium"))?;
        if medium.read_only {
            return Err(refused("it is read-only: let both sides use the same file, or a copy"));
        }
        if medium.node.is_empty() || medium.size.0 == 0 {
            return Err(refused("QEMU does not tell its node or its size"));
        }
        let name = self.names.first().cloned().unwrap_or_default();
        let Medium { node, size, file, format, .. } = medium.clone();
        Ok(Found { name, node, size, file, format })
    }
}

/// The drive that goes by `name`.
pub(crate) fn by_name<'a>(drives: &'a [Drive], name: &str) -> Result<&'a Drive, QemuError> {
    let mut found = drives.iter().filter(|drive| drive.names.iter().any(|other| other == name));
    match (found.next(), found.next()) {
        (Some(drive), None) => Ok(drive),
        (None, _) => Err(QemuError::NoSuchDisk { name: name.to_owned(), there: list(drives) }),
        (Some(_), Some(_)) => Err(QemuError::DiskUnmovable {
            disk: name.to_owned(),
            why: "several drives go by that name: use the path of the device",
        }),
    }
}

/// What the drives are called, for a message.
fn list(drives: &[Drive]) -> String {
    let names: Vec<String> =
        drives.iter().filter_map(|drive| drive.names.first().cloned()).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// The disks that `choice` means. For all, drives that the guest cannot write to or that no device
/// uses are left out.
pub(crate) fn choose(drives: &[Drive], choice: &DiskChoice) -> Result<Vec<Found>, QemuError> {
    let mut chosen: Vec<Found> = Vec::new();
    match choice {
        DiskChoice::None => {}
        DiskChoice::All => {
            let writable = |drive: &&Drive| {
                drive.attached && drive.medium.as_ref().is_some_and(|medium| !medium.read_only)
            };
            for drive in drives.iter().filter(writable) {
                let disk = drive.movable(&list(std::slice::from_ref(drive)))?;
                // Two devices on one node are one disk.
                if chosen.iter().all(|other| other.node != disk.node) {
                    chosen.push(disk);
                }
            }
            if chosen.is_empty() {
                return Err(QemuError::NoDisks);
            }
        }
        DiskChoice::Named(names) => {
            for name in names {
                let disk = by_name(drives, name)?.movable(name)?;
                if chosen.iter().any(|other| other.node == disk.node) {
                    let why = "it is named twice, by two of its names";
                    return Err(QemuError::DiskUnmovable { disk: name.clone(), why });
                }
                chosen.push(disk);
            }
        }
    }
    Ok(chosen)
}

/// The disks that take `wanted` in, in its order; all of them must be among those `allowed`.
pub(crate) fn receiving(
    drives: &[Drive],
    wanted: &[Disk],
    allowed: &DiskChoice,
) -> Result<Vec<Found>, QemuError> {
    let mut found: Vec<Found> = Vec::new();
    for disk in wanted {
        let drive = by_name(drives, &disk.name).map_err(|error| match error {
            QemuError::NoSuchDisk { name, there } => {
                QemuError::DiskMissing { disk: name, size: disk.size, there }
            }
            other => other,
        })?;
        allowed.allow(&disk.name, &drive.names)?;
        let here = drive.movable(&disk.name).map_err(|error| drive.as_a_destination(error))?;
        if here.size != disk.size {
            return Err(QemuError::DiskSize {
                disk: disk.name.clone(),
                source_size: disk.size,
                here: here.size,
                file: here.file,
                format: here.format,
            });
        }
        if found.iter().any(|other| other.node == here.node) {
            let why = "the source sends two disks that are one here";
            return Err(QemuError::DiskUnmovable { disk: disk.name.clone(), why });
        }
        found.push(Found { name: disk.name.clone(), ..here });
    }
    Ok(found)
}

/// What the guest has written to each of `found` since QEMU opened it.
pub(crate) fn writes_so_far(
    qmp: &mut dyn Monitor,
    found: &[Found],
) -> Result<Vec<Writes>, QmpError> {
    let stats = qmp.run(&QueryBlockstats)?;
    Ok(found.iter().map(|found| writes(&stats, &found.node)).collect())
}

/// What the guest has written to the disk on `node` since QEMU opened it.
fn writes(stats: &[BlockStats], node: &str) -> Writes {
    let entry = stats.iter().find(|entry| entry.node_name == node);
    Writes {
        bytes: ByteCount(entry.map_or(0, |entry| entry.stats.wr_bytes)),
        operations: entry.map_or(0, |entry| entry.stats.wr_operations),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::monitor::commands::Cache;

    fn guest() -> Vec<Drive> {
        let medium = |node: &str, ro: bool, size: u64, format: &str| {
            json!({ "node-name": node, "ro": ro, "file": "/vm/a", "cache": { "direct": false },
                "image": { "filename": "/vm/a", "virtual-size": size, "format": format } })
        };
        let blocks = json!([
            { "device": "d0", "qdev": "/machine/peripheral-anon/device[0]/virtio-backend",
                "inserted": medium("#block226", false, 67108864, "raw") },
            { "device": "", "qdev": "/machine/peripheral/vd1/virtio-backend",
                "inserted": medium("n1", false, 67108864, "qcow2") },
            { "device": "rom", "qdev": "scsi7", "inserted": medium("#block1", true, 512, "raw") },
            { "device": "cd", "qdev": "/machine/peripheral-anon/device[1]" },
            { "device": "spare", "inserted": medium("#block2", false, 512, "raw") },
        ]);
        let blocks: Vec<Block> = serde_json::from_value(blocks).unwrap();
        blocks.into_iter().map(drive).collect()
    }

    fn named(names: &[&str]) -> Result<Vec<String>, String> {
        let choice = DiskChoice::Named(names.iter().map(|&name| name.to_owned()).collect());
        let chosen = choose(&guest(), &choice).map_err(|error| error.to_string())?;
        Ok(chosen.into_iter().map(|disk| disk.name).collect())
    }

    #[test]
    fn how_a_disk_is_cached_has_the_word_of_the_command_line() {
        // The table of `cache=` in qemu(1).
        let mode = |writeback: bool, direct: bool, no_flush: bool| {
            let cache = json!({ "writeback": writeback, "direct": direct, "no-flush": no_flush });
            serde_json::from_value::<Cache>(cache).unwrap().mode()
        };
        assert_eq!(mode(true, false, false), "writeback");
        assert_eq!(mode(true, true, false), "none");
        assert_eq!(mode(false, false, false), "writethrough");
        assert_eq!(mode(false, true, false), "directsync");
        assert_eq!(mode(true, false, true), "unsafe");
        let told = serde_json::from_value::<Cache>(json!({ "direct": true })).unwrap();
        assert_eq!(told.mode(), "none", "of what is not told the usual holds");
    }

    #[test]
    fn all_are_those_that_the_guest_writes_to() {
        let chosen = choose(&guest(), &DiskChoice::All).unwrap();
        let names: Vec<_> =
            chosen.iter().map(|disk| (disk.name.as_str(), disk.node.as_str())).collect();
        assert_eq!(names, [("d0", "#block226"), ("n1", "n1")]);
        assert!(matches!(choose(&guest()[2..], &DiskChoice::All), Err(QemuError::NoDisks)));
    }

    #[test]
    fn a_disk_goes_by_many_names_and_is_called_by_one() {
        assert_eq!(named(&["n1"]).unwrap(), ["n1"]);
        assert_eq!(named(&["vd1"]).unwrap(), ["n1"]);
        assert_eq!(named(&["/machine/peripheral/vd1/virtio-backend", "d0"]).unwrap(), ["n1", "d0"]);
        assert_eq!(named(&["spare"]).unwrap(), ["spare"]);
    }

    #[test]
    fn what_cannot_move_is_refused_with_the_reason() {
        let refused = |name: &str| named(&[name]).unwrap_err();
        assert_eq!(refused("n2"), "the VM has no disk 'n2'; its drives are d0, n1, rom, cd, spare");
        assert!(refused("#block226").contains("has no disk"));
        assert_eq!(refused("cd"), "disk 'cd' cannot move: it has no medium");
        assert!(refused("scsi7").starts_with("disk 'scsi7' cannot move: it is read-only"));
        assert!(named(&["n1", "vd1"]).unwrap_err().contains("named twice"));
    }

    #[test]
    fn the_destination_finds_disks_by_any_name_and_of_the_same_size_only() {
        let wanted = |name: &str, size| Disk { name: name.to_owned(), size: ByteCount(size) };
        let received = |wanted: &[Disk]| {
            receiving(&guest(), wanted, &DiskChoice::All).map_err(|error| error.to_string())
        };
        let found = received(&[wanted("vd1", 64 << 20), wanted("d0", 64 << 20)]).unwrap();
        let nodes: Vec<_> =
            found.iter().map(|disk| (disk.name.as_str(), disk.node.as_str())).collect();
        assert_eq!(nodes, [("vd1", "n1"), ("d0", "#block226")]);
        let refused = received(&[wanted("other", 64 << 20)]).unwrap_err();
        assert!(
            refused.starts_with("disk 'other' (64MiB) does not exist at the destination"),
            "{refused}"
        );
        let refused = received(&[wanted("n1", 32 << 20)]).unwrap_err();
        assert!(refused.contains("33554432 bytes at the source and 67108864 here"), "{refused}");
        assert!(
            received(&[wanted("n1", 64 << 20), wanted("vd1", 64 << 20)])
                .unwrap_err()
                .contains("are one")
        );
        assert!(received(&[wanted("rom", 512)]).unwrap_err().contains("read-only=off"));
        assert!(
            received(&[wanted("cd", 512)]).unwrap_err().contains("no medium at the destination")
        );
    }

    #[test]
    fn only_disks_that_were_allowed_are_filled_by_any_of_their_names() {
        let wanted = [Disk { name: "n1".to_owned(), size: ByteCount(64 << 20) }];
        let received = |allowed: &str| receiving(&guest(), &wanted, &allowed.parse().unwrap());
        assert_eq!(received("vd1").unwrap().len(), 1);
        let refused = received("d0").unwrap_err().to_string();
        assert!(
            refused.contains("overwrite disk 'n1'") && refused.contains("--disks n1"),
            "{refused}"
        );
    }

    #[test]
    fn an_image_is_made_by_a_command_that_a_shell_reads() {
        let found = |file: &str| Found {
            name: "n1".to_owned(),
            node: "n1".to_owned(),
            size: ByteCount(1 << 20),
            file: file.to_owned(),
            format: "qcow2".to_owned(),
        };
        let command = |file| found(file).image_command();
        assert_eq!(command("/vm/a.qcow2"), "qemu-img create -f qcow2 /vm/a.qcow2 1048576   # n1");
        assert_eq!(command("/vm/it's"), "qemu-img create -f qcow2 '/vm/it'\\''s' 1048576   # n1");
        assert_eq!(command("json:{...}"), "qemu-img create -f qcow2 FILE 1048576   # n1");
    }

    #[test]
    fn an_image_is_made_of_files_one_behind_the_other() {
        let image = |filename: &str, backing: Option<Box<Image>>| Image {
            filename: filename.to_owned(),
            format: "qcow2".to_owned(),
            virtual_size: 512,
            format_specific: Value::Null,
            backing_image: backing,
        };
        let file = json!({ "driver": "file", "filename": "/vm/top" });
        let name = format!("json:{}", json!({ "driver": "qcow2", "file": file }));
        let base = image("/vm/base", Some(Box::new(image("rbd:pool/x", None))));
        let data = json!({ "data": { "data-file": "/vm/data" } });
        let top = Image { format_specific: data, ..image(&name, Some(Box::new(base))) };
        assert_eq!(files(&top), ["/vm/top", "/vm/data", "/vm/base", "rbd:pool/x"]);
        assert_eq!(plain_file("json:{"), "json:{");
    }

    #[test]
    fn a_name_of_two_drives_is_refused() {
        let mut drives = guest();
        drives[0].names.push("n1".to_owned());
        let error = choose(&drives, &DiskChoice::Named(vec!["n1".to_owned()])).unwrap_err();
        assert!(error.to_string().contains("several drives"), "{error}");
    }
}
