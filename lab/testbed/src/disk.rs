//! Disk images for virtual machines.
//!
//! Keeps one promise: an image goes with its value, and after a killed test with the next sweep.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use godwit_units::ByteCount;

use crate::leftovers::{Place, SHARED_MEMORY};
use crate::skip::skip;

/// An image of a disk.
#[derive(Debug)]
pub struct DiskImage {
    place: Place,
    format: &'static str,
}

impl DiskImage {
    /// An empty image.
    ///
    /// # Errors
    /// When there is no `qemu-img`, or no room.
    pub fn create(format: &'static str, size: ByteCount) -> anyhow::Result<Self> {
        Self::create_in(Path::new(SHARED_MEMORY), format, size)
    }

    /// The same in the directory `dir`: on a disk of the host, for example.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn create_in(dir: &Path, format: &'static str, size: ByteCount) -> anyhow::Result<Self> {
        let image = Self { place: Place::with_ram_in(Some(dir))?, format };
        let size = size.0.to_string();
        tool(&["create", "-q", "-f", format, &image.path().display().to_string(), &size])?;
        Ok(image)
    }

    /// The file: in memory, where nothing else was said, since a test of many writes must not wait
    /// for the disk of its host.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.place.ram().to_owned()
    }

    /// `raw` or `qcow2`.
    #[must_use]
    pub fn format(&self) -> &'static str {
        self.format
    }

    /// What QEMU is told so that the guest has it as a virtio disk: the block node is called
    /// `name`, the device `name-device`.
    #[must_use]
    pub fn arguments(&self, name: &str) -> Vec<String> {
        let file = format!("file.driver=file,file.filename={}", self.path().display());
        let node = format!(
            "driver={},node-name={name},discard=unmap,file.discard=unmap,{file}",
            self.format
        );
        let device = format!("virtio-blk-pci,id={name}-device,drive={name}");
        ["-blockdev", &node, "-device", &device].map(str::to_owned).into()
    }

    /// The same for the guest on KVM, which reaches a disk by ports.
    #[must_use]
    pub fn arguments_on_kvm(&self, name: &str) -> Vec<String> {
        let mut arguments = self.arguments(name);
        if let Some(device) = arguments.last_mut() {
            device.push_str(",disable-modern=on,disable-legacy=off,queue-size=4,addr=08.0");
        }
        arguments
    }

    /// Bytes that the file takes up on its file system.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub fn allocated(&self) -> anyhow::Result<ByteCount> {
        allocated(&self.path())
    }

    /// Whether a guest sees the same in both. The machines must have ended, or have been told to
    /// flush.
    ///
    /// # Errors
    /// When it does not, with the place of the first difference, or `qemu-img` fails.
    pub fn compare(&self, other: &Self) -> anyhow::Result<()> {
        let path = |image: &Self| image.path().display().to_string();
        let (ours, theirs) = (path(self), path(other));
        let run = |quiet: &[&str]| {
            let images = ["-U", "-f", self.format, "-F", other.format, &ours, &theirs];
            tool(&[&["compare"], quiet, &images].concat())
        };
        // The second time for what differs, and where.
        run(&["-q"]).or_else(|_| run(&[]))
    }
}

/// Bytes that `file` takes up on its file system.
///
/// # Errors
/// When it cannot be looked at.
pub fn allocated(file: &Path) -> anyhow::Result<ByteCount> {
    // In units of 512 bytes (stat(2)).
    Ok(ByteCount(std::fs::metadata(file)?.blocks() * 512))
}

/// Runs `qemu-img`.
fn tool(arguments: &[&str]) -> anyhow::Result<()> {
    let output =
        Command::new("qemu-img").args(arguments).output().context("cannot run qemu-img")?;
    let said = [&output.stdout[..], &output.stderr[..]].concat();
    ensure!(
        output.status.success(),
        "qemu-img {arguments:?}: {}",
        String::from_utf8_lossy(&said).trim()
    );
    Ok(())
}

/// Whether there is a `qemu-img` to make images with; aloud why not, for the test `test`.
#[must_use]
pub fn images_for(test: &str) -> bool {
    let there =
        Command::new("qemu-img").arg("--version").output().is_ok_and(|it| it.status.success());
    if !there {
        skip(test, "there is no qemu-img: run `make qemu`");
    }
    there
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_compared_by_what_a_guest_sees_and_go_away() {
        if !images_for("images_are_compared_by_what_a_guest_sees_and_go_away") {
            return;
        }
        let image = |format| DiskImage::create(format, ByteCount(1 << 20)).unwrap();
        let (raw, qcow2) = (image("raw"), image("qcow2"));
        raw.compare(&qcow2).unwrap();
        let file = std::fs::File::options().write(true).open(raw.path()).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"x", 5000).unwrap();
        let error = raw.compare(&qcow2).unwrap_err().to_string();
        assert!(error.contains("Content mismatch"), "{error}");
        let path = raw.path();
        drop(raw);
        assert!(!path.exists());
    }
}
