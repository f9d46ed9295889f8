//! `make guest`: Debian's cloud kernel, and an initramfs with the self-checking guest as its init.
//!
//! Keeps three promises: nothing is installed (the kernel is unpacked, not set up); a second run changes nothing; and
//! the image does not hold the beacon's magic number, which an observer would take for the beacon. What the guest does
//! is left to `godwit-verify`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::apt::{self, Apt};
use crate::cpio::Archive;

/// The meta-package: it depends on the kernel of the day.
const KERNEL: &str = "linux-image-cloud-amd64";
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Brings target/guest up to date.
pub(crate) fn build() -> anyhow::Result<()> {
    let dir = crate::target_dir().join("guest");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    kernel(&dir.join("vmlinuz"))?;
    initramfs(&dir.join("initramfs.cpio"))
}

/// Any kernel will do that is there already: a newer package is fetched after `rm target/guest/vmlinuz`.
fn kernel(path: &Path) -> anyhow::Result<()> {
    if path.exists() {
        println!("{} is there", path.display());
        return Ok(());
    }
    apt::ensure_present()?;
    let apt = Apt::default();
    apt.know(KERNEL).context("cannot learn of the kernel package")?;
    let package = apt.dependency(KERNEL, "linux-image-")?;
    let dir = crate::target_dir().join("guest-kernel");
    let file = apt.download(&package, &dir)?;
    let root = dir.join("root");
    apt::unpack(&file, &root)?;
    let image = kernel_image(&root.join("boot"))?;
    std::fs::rename(&image, path).with_context(|| format!("cannot move {}", image.display()))?;
    std::fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    println!("{} made from {package}", path.display());
    Ok(())
}

fn kernel_image(boot: &Path) -> anyhow::Result<PathBuf> {
    let entries = std::fs::read_dir(boot).with_context(|| format!("cannot list {}", boot.display()))?;
    let mut images = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    images
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")))
        .with_context(|| format!("the kernel package has no vmlinuz in {}", boot.display()))
}

fn initramfs(path: &Path) -> anyhow::Result<()> {
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "sys"] {
        archive.directory(directory);
    }
    // The kernel opens this for init's standard streams before anything could be mounted.
    archive.character_device("dev/console", 5, 1);
    archive.program("init", &std::fs::read(guest_program()?).context("cannot read the guest program")?);
    let image = archive.finish();
    let magic = godwit_verify::beacon::magic();
    ensure!(
        !image.windows(magic.len()).any(|window| window == magic),
        "the guest program holds the beacon's magic number: the compiler put it together ahead of time"
    );
    if std::fs::read(path).is_ok_and(|there| there == image) {
        println!("{} is up to date", path.display());
        return Ok(());
    }
    std::fs::write(path, &image).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{} made, {} KiB", path.display(), image.len() / 1024);
    Ok(())
}

/// Builds the guest program, static: the image has no libraries. It has a target directory of its own, since a
/// change of RUSTFLAGS would make cargo build everything else anew. Naming the triple, though it is the machine's
/// own, keeps the flags from procedural macros, which cannot be static.
fn guest_program() -> anyhow::Result<PathBuf> {
    let target = crate::target_dir().join("guest-build");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--release", "--package", "godwit-verify", "--bin", "godwit-guest"])
        .args(["--target", TRIPLE, "--target-dir"])
        .arg(&target)
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "the guest program does not build");
    Ok(target.join(TRIPLE).join("release/godwit-guest"))
}
