//! `make image`: `godwit-stamp` for any hypervisor: kernel and initramfs, an ISO that boots with
//! BIOS and UEFI, and a seed for cloud images.
//!
//! Keeps three promises: what boots destroys nothing that its command line does not name; nothing
//! is installed (the tools are unpacked, as the kernel is); and a second run with nothing new makes
//! nothing anew. The texts in the image are files of packaging/image.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::apt::{self, Apt};
use crate::cpio::Archive;
use crate::guest::{self, Kernel};

/// The kernel with drivers for everything, since other hypervisors have other disks.
const KERNEL: Kernel<'_> = Kernel {
    package: "linux-image-amd64",
    modules: &[
        "virtio_pci",
        "virtio_mmio",
        "virtio_blk",
        "virtio_scsi",
        "virtio_balloon",
        "virtio_mem",
        "virtio_console",
        "sd_mod",
        "nvme",
        "ahci",
        "ata_piix",
        "mptspi",
        "mptsas",
        "vmw_pvscsi",
        "vmw_balloon",
        "hv_vmbus",
        "hv_storvsc",
        "hv_balloon",
        "hv_utils",
        "hyperv_keyboard",
        "hyperv_drm",
        "xen_blkfront",
    ],
    work: "image-kernel",
};
const SHELL: [&str; 1] = ["busybox-static"];
/// For the test that boots the ISO with UEFI.
const FIRMWARE: [&str; 1] = ["ovmf"];
/// What makes the ISO, with those of their libraries that not every system has.
const TOOLS: [&str; 11] = [
    "grub-common",
    "grub-pc-bin",
    "grub-efi-amd64-bin",
    "xorriso",
    "libisoburn1",
    "libisofs6",
    "libburn4",
    "libjte2",
    "libreadline8",
    "libdevmapper1.02.1",
    "mtools",
];
const INIT: &str = include_str!("../../packaging/image/init");
const MENU: &str = include_str!("../../packaging/image/grub.cfg");
const SERVICE: &str = include_str!("../../packaging/image/godwit-stamp.service");
const USER_DATA: &str = include_str!("../../packaging/image/user-data");
const META_DATA: &str = include_str!("../../packaging/image/meta-data");
/// Run by GRUB before anything else: from CD, from disk, and from the EFI partition of either, it
/// finds the file system with the menu.
const EARLY: &str = "search --file --set=root /boot/grub/grub.cfg
set prefix=($root)/boot/grub
configfile $prefix/grub.cfg
";
/// For the menu and what it does.
const MODULES: [&str; 12] = [
    "iso9660",
    "part_gpt",
    "part_msdos",
    "normal",
    "configfile",
    "search",
    "search_fs_file",
    "linux",
    "serial",
    "terminal",
    "echo",
    "test",
];
/// What `cloud-init` looks for.
const SEED_LABEL: &str = "CIDATA";

/// Brings target/image up to date.
pub(crate) fn build() -> anyhow::Result<()> {
    let out = crate::target_dir().join("image");
    let work = crate::target_dir().join("image-build");
    for dir in [&out, &work] {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let (kernel, modules) = (out.join("vmlinuz"), work.join("modules"));
    KERNEL.provide(&kernel, &modules)?;
    let program = guest::guest_program()?;
    let program = std::fs::read(program).context("cannot read the program")?;
    let kernel = std::fs::read(kernel).context("cannot read the kernel")?;
    let initramfs = initramfs(&program, &modules, &work)?;
    write(&out.join("initramfs.cpio"), &initramfs)?;
    Apt::default().unpacked(&FIRMWARE, &work.join("firmware"))?;
    write(&out.join("godwit-stamp.service"), SERVICE.as_bytes())?;
    write(&out.join("user-data"), USER_DATA.as_bytes())?;

    let disc = Disc { dir: work.join("iso"), to: out.join("godwit-stamp.iso") };
    let bootable = disc.fill(&[
        ("boot/vmlinuz", &kernel),
        ("boot/initramfs.cpio", &initramfs),
        ("boot/grub/grub.cfg", MENU.as_bytes()),
    ])?;
    let seed = Disc { dir: work.join("seed"), to: out.join("seed.iso") };
    let seeded = seed.fill(&[
        ("user-data", USER_DATA.as_bytes()),
        ("meta-data", META_DATA.as_bytes()),
        ("godwit-stamp", &program),
        ("godwit-stamp.service", SERVICE.as_bytes()),
    ])?;
    if !bootable && !seeded {
        println!("{} is up to date", out.display());
        return Ok(());
    }
    let tools = Tools { root: Apt::default().unpacked(&TOOLS, &work.join("tools"))? };
    if bootable {
        tools.bootable(&disc, &work)?;
    }
    if seeded {
        tools.burn(&seed, SEED_LABEL, &[])?;
    }
    println!("{} made", out.display());
    Ok(())
}

fn initramfs(program: &[u8], modules: &Path, work: &Path) -> anyhow::Result<Vec<u8>> {
    let root = Apt::default().unpacked(&SHELL, &work.join("shell"))?;
    let busybox = std::fs::read(root.join("bin/busybox")).context("cannot read busybox")?;
    let mut archive = Archive::default();
    for directory in ["bin", "dev", "proc", "sys", "tmp"] {
        archive.directory(directory);
    }
    // The kernel opens this for init's standard streams before anything could be mounted.
    archive.character_device("dev/console", 5, 1);
    archive.program("init", INIT.as_bytes());
    archive.program("bin/busybox", &busybox);
    archive.program("bin/godwit-stamp", program);
    guest::add_modules(&mut archive, modules)?;
    Ok(archive.finish())
}

/// Writes what is not there in just these bytes; whether it was not.
fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<bool> {
    if std::fs::read(path).is_ok_and(|there| there == bytes) {
        return Ok(false);
    }
    let dir = path.parent().unwrap_or(path);
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(true)
}

/// A disc in the making.
#[derive(Debug)]
struct Disc {
    /// The files that are to be on it.
    dir: PathBuf,
    /// Its image.
    to: PathBuf,
}

impl Disc {
    /// Puts `files` into the directory; whether the image is to be made anew.
    fn fill(&self, files: &[(&str, &[u8])]) -> anyhow::Result<bool> {
        let mut changed = !self.to.exists();
        for (name, bytes) in files {
            changed |= write(&self.dir.join(name), bytes)?;
        }
        Ok(changed)
    }
}

/// Programs of packages that are unpacked.
#[derive(Debug)]
struct Tools {
    root: PathBuf,
}

impl Tools {
    fn run<S: AsRef<OsStr>>(
        &self,
        program: &str,
        words: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<()> {
        let lib = |dir: &str| self.root.join(dir).join("x86_64-linux-gnu").display().to_string();
        let libraries = format!("{}:{}", lib("usr/lib"), lib("lib"));
        let mut command = Command::new(self.root.join("usr/bin").join(program));
        command.env("LD_LIBRARY_PATH", libraries).env("MTOOLS_SKIP_CHECK", "1").args(words);
        apt::output(&mut command).map(drop)
    }

    /// GRUB for `platform` as one file at `to`.
    fn grub(&self, platform: &str, format: &str, work: &Path, to: &Path) -> anyhow::Result<()> {
        let early = work.join("early.cfg");
        write(&early, EARLY.as_bytes())?;
        let own: &[&str] = match platform {
            "i386-pc" => &["biosdisk"],
            // The kernel's screen is the one that GRUB found.
            _ => &["fat", "efi_gop"],
        };
        let modules = self.root.join("usr/lib/grub").join(platform);
        let words = ["-d", text(&modules)?, "-O", format, "-o", text(to)?, "-p", "/boot/grub"];
        let more = ["-c", text(&early)?];
        self.run("grub-mkimage", words.iter().chain(&more).chain(own).chain(&MODULES))
    }

    /// Makes the ISO that boots: from CD and from disk, with BIOS and with UEFI.
    fn bootable(&self, disc: &Disc, work: &Path) -> anyhow::Result<()> {
        let (efi, partition) = (work.join("bootx64.efi"), work.join("efi.img"));
        let bios = disc.dir.join("boot/grub/bios.img");
        self.grub("i386-pc", "i386-pc-eltorito", work, &bios)?;
        self.grub("x86_64-efi", "x86_64-efi", work, &efi)?;
        let (efi, partition) = (text(&efi)?, text(&partition)?);
        // 2.88 MB, as floppy disks once had.
        self.run("mformat", ["-C", "-i", partition, "-f", "2880", "::"])?;
        self.run("mmd", ["-i", partition, "::/EFI", "::/EFI/BOOT"])?;
        self.run("mcopy", ["-o", "-i", partition, efi, "::/EFI/BOOT/BOOTX64.EFI"])?;
        let sector = self.root.join("usr/lib/grub/i386-pc/boot_hybrid.img");
        let from_bios = ["-b", "boot/grub/bios.img", "-no-emul-boot", "-boot-load-size", "4"];
        let patched = ["-boot-info-table", "--grub2-boot-info", "--grub2-mbr", text(&sector)?];
        let from_efi = ["-append_partition", "2", "0xef", partition, "-appended_part_as_gpt"];
        let entry = ["-eltorito-alt-boot", "-e", "--interval:appended_partition_2:all::"];
        let words = [&from_bios[..], &patched, &from_efi, &entry, &["-no-emul-boot"]].concat();
        self.burn(disc, "GODWIT_STAMP", &words)
    }

    /// Makes the image of `disc`.
    fn burn(&self, disc: &Disc, label: &str, more: &[&str]) -> anyhow::Result<()> {
        let fresh = disc.to.with_extension("fresh");
        let words = ["-as", "mkisofs", "-quiet", "-r", "-J", "-V", label, "-o", text(&fresh)?];
        self.run("xorriso", words.iter().chain(more).chain(&[text(&disc.dir)?]))?;
        std::fs::rename(&fresh, &disc.to)
            .with_context(|| format!("cannot move {}", fresh.display()))
    }
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is no UTF-8", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_the_image_names_a_device_to_overwrite_by_itself() {
        for text in [INIT, MENU, SERVICE, USER_DATA] {
            let told = text.lines().filter(|line| !line.trim_start().starts_with('#'));
            for line in told {
                assert!(!line.contains("--destroy-data"), "{line}");
            }
        }
    }

    #[test]
    fn what_is_there_in_the_same_bytes_is_not_written_again() {
        let dir = std::env::temp_dir().join(format!("godwit-image-{}", std::process::id()));
        let disc = Disc { dir: dir.join("files"), to: dir.join("disc.iso") };
        let files: [(&str, &[u8]); 1] = [("boot/kernel", b"one")];
        let first = disc.fill(&files).unwrap();
        std::fs::write(&disc.to, "an image").unwrap();
        let again = disc.fill(&files).unwrap();
        let changed = disc.fill(&[("boot/kernel", b"two")]).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!((first, again, changed), (true, false, true));
    }
}
