//! `make guest`: Debian's cloud kernel, and an initramfs with the self-checking guest as its init.
//!
//! Keeps three promises: nothing is installed (the kernel is unpacked, not set up); a second run
//! changes nothing; and the image does not hold the beacon's magic number, which an observer would
//! take for the beacon. What the guest does is left to `godwit-stamp`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::apt::{self, Apt};
use crate::cpio::Archive;

/// The guest's.
const KERNEL: Kernel<'_> = Kernel {
    package: "linux-image-cloud-amd64",
    modules: &["virtio_pci", "virtio_blk", "virtio_balloon", "virtio_net"],
    work: "guest-kernel",
};
/// Beside them, what they were chosen for.
const LIST: &str = "list";
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// A kernel of Debian's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel<'a> {
    /// The meta-package: it depends on the kernel of the day.
    pub(crate) package: &'a str,
    /// Drivers that it has as modules only; what they need is found by their own word.
    pub(crate) modules: &'a [&'a str],
    /// The directory in target/ where it is unpacked, which is removed again.
    pub(crate) work: &'a str,
}

/// Brings target/guest up to date.
pub(crate) fn build() -> anyhow::Result<()> {
    let dir = crate::target_dir().join("guest");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let modules = dir.join("modules");
    KERNEL.provide(&dir.join("vmlinuz"), &modules)?;
    initramfs(&dir.join("initramfs.cpio"), &modules)
}

impl Kernel<'_> {
    /// Any kernel will do that is there already, with these modules: a newer package is fetched
    /// after the directory in target/ was removed.
    pub(crate) fn provide(&self, path: &Path, modules: &Path) -> anyhow::Result<()> {
        // Some of them may be part of the kernel, so which files there are does not tell.
        let chosen_for = modules.join(LIST);
        let wanted = self.modules.join(" ");
        let same = std::fs::read_to_string(&chosen_for).is_ok_and(|list| list == wanted);
        if path.exists() && same {
            println!("{} is there", path.display());
            return Ok(());
        }
        apt::ensure_present()?;
        let apt = Apt::default();
        apt.know(self.package).context("cannot learn of the kernel package")?;
        let package = apt.dependency(self.package, "linux-image-")?;
        let dir = crate::target_dir().join(self.work);
        let file = apt.download(&package, &dir)?;
        let root = dir.join("root");
        apt::unpack(&file, &root)?;
        // The modules last: whoever finds them finds the kernel, too.
        let chosen = dir.join("modules");
        choose_modules(&root.join("lib/modules"), self.modules, &chosen)?;
        let image = kernel_image(&root.join("boot"))?;
        if modules.exists() {
            std::fs::remove_dir_all(modules)
                .with_context(|| format!("cannot remove {}", modules.display()))?;
        }
        std::fs::rename(&image, path)
            .with_context(|| format!("cannot move {}", image.display()))?;
        std::fs::rename(&chosen, modules)
            .with_context(|| format!("cannot move {}", chosen.display()))?;
        std::fs::remove_dir_all(&dir)
            .with_context(|| format!("cannot remove {}", dir.display()))?;
        println!("{} and {} made from {package}", path.display(), modules.display());
        Ok(())
    }
}

fn kernel_image(boot: &Path) -> anyhow::Result<PathBuf> {
    let entries =
        std::fs::read_dir(boot).with_context(|| format!("cannot list {}", boot.display()))?;
    let mut images = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    images
        .find(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
        })
        .with_context(|| format!("the kernel package has no vmlinuz in {}", boot.display()))
}

/// Copies `modules` and what they need from below `from` to `to`, with names that sort in the
/// order of loading.
fn choose_modules(from: &Path, modules: &[&str], to: &Path) -> anyhow::Result<()> {
    let mut found = BTreeMap::new();
    find_modules(from, &mut found)?;
    let mut order = Vec::new();
    modules.iter().try_for_each(|name| require(name, &found, &mut order))?;
    apt::empty(to)?;
    for (number, name) in order.iter().enumerate() {
        let file = to.join(format!("{number:02}-{name}.ko"));
        std::fs::copy(&found[name], &file)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    std::fs::write(to.join(LIST), modules.join(" ")).context("cannot write the list of modules")
}

/// All modules below `dir`, by name.
fn find_modules(dir: &Path, found: &mut BTreeMap<String, PathBuf>) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            find_modules(&path, found)?;
        } else if let Some(name) =
            path.file_name().and_then(|name| name.to_str()?.strip_suffix(".ko"))
        {
            found.insert(name.replace('-', "_"), path);
        }
    }
    Ok(())
}

/// Puts `name` into `order`, behind what it needs. A module that is not there is part of the
/// kernel.
fn require(
    name: &str,
    found: &BTreeMap<String, PathBuf>,
    order: &mut Vec<String>,
) -> anyhow::Result<()> {
    let Some(path) = found.get(name) else { return Ok(()) };
    if order.iter().any(|there| there == name) {
        return Ok(());
    }
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    for needed in needs(&bytes) {
        require(&needed, found, order)?;
    }
    order.push(name.to_owned());
    Ok(())
}

/// What a module says that it needs: strings `depends=NAME,NAME` of its section .modinfo (kernel,
/// include/linux/module.h).
fn needs(module: &[u8]) -> Vec<String> {
    let fields =
        module.split(|&byte| byte == 0).filter_map(|field| field.strip_prefix(b"depends="));
    let names = fields.flat_map(|list| list.split(|&byte| byte == b','));
    names
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8_lossy(name).replace('-', "_"))
        .collect()
}

fn initramfs(path: &Path, modules: &Path) -> anyhow::Result<()> {
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "sys"] {
        archive.directory(directory);
    }
    // The kernel opens this for init's standard streams before anything could be mounted.
    archive.character_device("dev/console", 5, 1);
    archive.program(
        "init",
        &std::fs::read(guest_program()?).context("cannot read the guest program")?,
    );
    add_modules(&mut archive, modules)?;
    let image = archive.finish();
    let magic = godwit_stamp::beacon::magic();
    ensure!(
        !image.windows(magic.len()).any(|window| window == magic),
        "the guest program holds the beacon's magic number: the compiler put it together ahead of \
         time"
    );
    if std::fs::read(path).is_ok_and(|there| there == image) {
        println!("{} is up to date", path.display());
        return Ok(());
    }
    std::fs::write(path, &image).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{} made, {} KiB", path.display(), image.len() / 1024);
    Ok(())
}

/// Adds the files that [`Kernel::provide`] has put into `modules`, as /modules of the image.
pub(crate) fn add_modules(archive: &mut Archive, modules: &Path) -> anyhow::Result<()> {
    archive.directory("modules");
    let mut files: Vec<_> = std::fs::read_dir(modules)?.collect::<Result<_, _>>()?;
    files.retain(|file| file.file_name() != LIST);
    files.sort_by_key(std::fs::DirEntry::file_name);
    for file in files {
        let name = format!("modules/{}", file.file_name().to_string_lossy());
        archive.program(&name, &std::fs::read(file.path()).context("cannot read a module")?);
    }
    Ok(())
}

/// Brings target/stamp up to date: the guest's program, for other guests.
pub(crate) fn program() -> anyhow::Result<()> {
    let dir = crate::target_dir().join("stamp");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let path = dir.join("godwit-stamp");
    std::fs::copy(guest_program()?, &path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    println!("{} made", path.display());
    Ok(())
}

/// Builds the guest program, static: the image has no libraries. It has a target directory of its
/// own, since a change of RUSTFLAGS would make cargo build everything else anew. Naming the triple,
/// though it is the machine's own, keeps the flags from procedural macros, which cannot be static.
pub(crate) fn guest_program() -> anyhow::Result<PathBuf> {
    let target = crate::target_dir().join("guest-build");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let status = Command::new(cargo)
        .args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "godwit-stamp",
            "--bin",
            "godwit-stamp",
        ])
        .args(["--target", TRIPLE, "--target-dir"])
        .arg(&target)
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "the guest program does not build");
    Ok(target.join(TRIPLE).join("release/godwit-stamp"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_names_what_it_needs() {
        let module = b"\x7fELF\0license=GPL\0depends=virtio,virtio-ring\0name=x\0";
        assert_eq!(needs(module), ["virtio", "virtio_ring"]);
        assert!(needs(b"\x7fELF\0depends=\0").is_empty());
    }
}
