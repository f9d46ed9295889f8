//! `make deb`: the Debian packages: one of the command and one of the daemon, each with its manual,
//! completions, units and documents, and one of `godwit-stamp`, which goes into guests.
//!
//! Keeps two promises: what is in a package was made by the programs in it; and a package says what
//! its programs need: the least version of the C library that they were built against, the command
//! that the daemon runs, or nothing where they are static.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

use crate::{apt, guest, top};

/// The unit of `godwit-stamp` as images have it, where the program lies beside what the system's
/// packages bring.
const STAMP_UNIT: &str = include_str!("../../packaging/image/godwit-stamp.service");
const PLACE_IN_IMAGES: &str = "/usr/local/bin/godwit-stamp";
const PLACE: &str = "/usr/bin/godwit-stamp";
/// Where the unit says to read on.
const DOCUMENT: &str = "docs/stamp.md";
const STAMP_DOCUMENTS: &str = "/usr/share/doc/godwit-stamp";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The release from which on the daemon has a package of its own. Older packages of the command may
/// have the daemon's files, and so may those that were made of this one before it was out.
const PARTED: &str = "0.2.0";
/// Where packages put the guides, that of the daemon too: they name each other.
const GUIDES: &str = "usr/share/doc/godwit/docs";
/// The one of the daemon.
const DAEMON_GUIDE: &str = "godwitd.md";
/// What the names of the daemon's units begin with.
const DAEMON_UNITS: &str = "godwitd.";
const UNITS: &str = "usr/lib/systemd/system";
/// What a program has that the kernel is to load together with others (ELF, `PT_INTERP`).
const INTERPRETER: u32 = 3;

/// What is done for: `xtask deb [--binary PATH] [--stamp PATH] [--out DIR]`.
#[derive(Debug)]
struct Wish {
    /// The program to put into it, beside which `godwitd` lies; `None`: the release build, made
    /// now.
    binary: Option<PathBuf>,
    /// A static `godwit-stamp`; `None`: one that is made now.
    stamp: Option<PathBuf>,
    /// Where the packages are put.
    out: PathBuf,
}

impl Wish {
    fn from(mut words: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let out = crate::target_dir().join("deb");
        let mut wish = Self { binary: None, stamp: None, out };
        while let Some(word) = words.next() {
            let value = words.next().with_context(|| format!("{word} needs a value"))?.into();
            match word.as_str() {
                "--binary" => wish.binary = Some(value),
                "--stamp" => wish.stamp = Some(value),
                "--out" => wish.out = value,
                _ => bail!("there is no option {word}: --binary PATH, --stamp PATH, --out DIR"),
            }
        }
        Ok(wish)
    }
}

/// Makes the packages, and prints their paths last, that of the command behind the others.
pub(crate) fn build(words: impl Iterator<Item = String>) -> anyhow::Result<()> {
    let Wish { binary, stamp, out } = Wish::from(words)?;
    apt::ensure_present()?;
    let stamp = match stamp {
        Some(stamp) => stamp,
        None => guest::guest_program()?,
    };
    let binary = match binary {
        Some(binary) => binary,
        None => release()?,
    };
    let packages = [
        stamp_package(&stamp, &out)?,
        daemon_package(&binary.with_file_name("godwitd"), &out)?,
        command_package(&binary, &out)?,
    ];
    for package in packages {
        println!("{}", package.display());
    }
    Ok(())
}

/// The package of the command `binary`.
fn command_package(binary: &Path, out: &Path) -> anyhow::Result<PathBuf> {
    let root = out.join("root");
    apt::empty(&root)?;
    let program = root.join("usr/bin/godwit");
    stripped(binary, &program)?;
    manual(&program, &root.join("usr/share/man/man1"))?;
    completions(&program, &["completions"], &root.join("usr/share"))?;
    documents(&root)?;
    units(&root.join(UNITS), |name| !name.starts_with(DAEMON_UNITS))?;
    let needs = format!(
        "Depends: {}\n\
         Suggests: godwitd, libvirt0, qemu-system-x86\n",
        libraries()?
    );
    let description = "live migration of running virtual machines\n \
        Moves a running guest of QEMU, libvirt or a small VMM of its own to another\n \
        host: memory, disks and device state, from outside an unpatched QEMU, with\n \
        the guest where it was if anything fails before the handover.\n";
    packed("godwit", &needs, description, &root, out)
}

/// The package of the daemon `binary`, which runs the command of its own release.
fn daemon_package(binary: &Path, out: &Path) -> anyhow::Result<PathBuf> {
    let root = out.join("daemon-root");
    apt::empty(&root)?;
    let program = root.join("usr/bin/godwitd");
    stripped(binary, &program)?;
    let page = root.join("usr/share/man/man8/godwitd.8");
    write(&page, &apt::output(Command::new(&program).arg("--man"))?)?;
    compress(&page)?;
    completions(&program, &["--completions"], &root.join("usr/share"))?;
    copy(&top().join("docs").join(DAEMON_GUIDE), &root.join(GUIDES).join(DAEMON_GUIDE))?;
    about(&root.join("usr/share/doc/godwitd"))?;
    units(&root.join(UNITS), |name| name.starts_with(DAEMON_UNITS))?;
    // Debian Policy, 7.6.1: files that another package had.
    let needs = format!(
        "Depends: godwit (= {VERSION}), {}\n\
         Breaks: godwit (<< {PARTED})\n\
         Replaces: godwit (<= {PARTED})\n",
        libraries()?
    );
    let description = "daemon of a host that takes in virtual machines that move\n \
        Says what room its host has, and starts a destination of live migrations for\n \
        whoever shows a certificate that it trusts: for hosts that many guests go to.\n";
    packed("godwitd", &needs, description, &root, out)
}

/// The libraries that programs made here are loaded with.
fn libraries() -> anyhow::Result<String> {
    let library =
        apt::output(Command::new("dpkg-query").args(["-W", "-f", "${Version}", "libc6"]))?;
    // `2.36-9+deb12u10` and its successors of one release do the same.
    let library = library.split(['-', '+']).next().context("no version of libc6")?;
    Ok(format!("libc6 (>= {library}), libgcc-s1"))
}

/// The package of `godwit-stamp`, for guests: it needs nothing.
fn stamp_package(binary: &Path, out: &Path) -> anyhow::Result<PathBuf> {
    let root = out.join("stamp-root");
    apt::empty(&root)?;
    let program = root.join(&PLACE[1..]);
    stripped(binary, &program)?;
    let bytes = std::fs::read(&program)?;
    ensure!(is_static(&bytes), "{} is no static program: make stamp", binary.display());
    let unit = root.join(UNITS).join("godwit-stamp.service");
    write(&unit, stamp_unit())?;
    let documents = root.join(&STAMP_DOCUMENTS[1..]);
    copy(&top().join(DOCUMENT), &documents.join("stamp.md"))?;
    about(&documents)?;
    let description = "test of live migrations from inside the guest\n \
        Fills memory, and disks that it is given, with sectors that say what they\n \
        should hold, goes on writing and checking them, and tells what a migration\n \
        by whatever hypervisor has lost, confused or damaged. One static program.\n";
    packed("godwit-stamp", "", description, &root, out)
}

/// The unit of `godwit-stamp`, for the places that its package has. Nobody but an operator enables
/// it: it uses a quarter of a GiB.
fn stamp_unit() -> String {
    let document = format!("{STAMP_DOCUMENTS}/stamp.md");
    STAMP_UNIT.replace(PLACE_IN_IMAGES, PLACE).replace(DOCUMENT, &document)
}

/// The package `name` of what is below `root`, which is gone afterwards.
fn packed(
    name: &str,
    needs: &str,
    description: &str,
    root: &Path,
    out: &Path,
) -> anyhow::Result<PathBuf> {
    let architecture = apt::output(Command::new("dpkg").arg("--print-architecture"))?;
    let architecture = architecture.trim();
    let control = format!(
        "Package: {name}\n\
         Version: {VERSION}\n\
         Architecture: {architecture}\n\
         Maintainer: the authors of godwit <godwit@localhost>\n\
         Installed-Size: {}\n\
         {needs}\
         Section: admin\n\
         Priority: optional\n\
         Description: {description}",
        installed_kib(root)?
    );
    write(&root.join("DEBIAN/control"), control)?;
    let package = out.join(format!("{name}_{VERSION}_{architecture}.deb"));
    apt::output(
        Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(root).arg(&package),
    )?;
    std::fs::remove_dir_all(root)?;
    Ok(package)
}

/// Puts the program `from` at `to`, without what only a debugger reads.
fn stripped(from: &Path, to: &Path) -> anyhow::Result<()> {
    copy(from, to)?;
    apt::output(Command::new("strip").arg("--strip-all").arg(to))?;
    set_mode(to, 0o755)
}

fn compress(file: &Path) -> anyhow::Result<()> {
    apt::output(Command::new("gzip").args(["--best", "--no-name"]).arg(file)).map(drop)
}

/// Whether `program`, 64-bit ELF as this machine has it, names none that loads its libraries.
fn is_static(program: &[u8]) -> bool {
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let mut whole = [0; 8];
        whole[..bytes].copy_from_slice(program.get(at..at.checked_add(bytes)?)?);
        usize::try_from(u64::from_le_bytes(whole)).ok()
    };
    // e_phoff, e_phentsize and e_phnum; p_type is what an entry begins with (elf(5)).
    let headers = || {
        let (first, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        let places = (0..count).map(|nth| first.checked_add(nth * size));
        places.map(|at| number(at?, 4)).collect::<Option<Vec<_>>>()
    };
    program.starts_with(b"\x7fELF\x02")
        && headers().is_some_and(|kinds| !kinds.contains(&(INTERPRETER as usize)))
}

/// The release build, without what only tests have.
fn release() -> anyhow::Result<PathBuf> {
    println!("building godwit and godwitd (cargo build --release)");
    let packages = ["--package", "godwit-cli", "--package", "godwitd"];
    let programs = ["--bin", "godwit", "--bin", "godwitd"];
    let mut build = crate::cargo();
    build.args(["build", "--quiet", "--release"]).args(packages).args(programs);
    apt::output(build.arg("--target-dir").arg(crate::target_dir()))?;
    Ok(crate::target_dir().join("release/godwit"))
}

/// A page for the command and for each of its commands, as the program itself prints them.
fn manual(program: &Path, dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir)?;
    apt::output(Command::new(program).args(["man", "--into"]).arg(dir))?;
    for page in std::fs::read_dir(dir)? {
        compress(&page?.path())?;
    }
    Ok(())
}

/// What `program` prints for `words` and a shell, where each shell of Debian looks for what
/// packages bring.
fn completions(program: &Path, words: &[&str], share: &Path) -> anyhow::Result<()> {
    let name = program.file_name().context("a file without a name")?.to_string_lossy();
    let shells = [
        ("bash", format!("bash-completion/completions/{name}")),
        ("zsh", format!("zsh/vendor-completions/_{name}")),
        ("fish", format!("fish/vendor_completions.d/{name}.fish")),
    ];
    for (shell, place) in shells {
        let text = apt::output(Command::new(program).args(words).arg(shell))?;
        write(&share.join(place), &text)?;
    }
    Ok(())
}

/// The README, the guides but that of the daemon, the changes, and the licence.
fn documents(root: &Path) -> anyhow::Result<()> {
    let (top, dir) = (top(), root.join("usr/share/doc/godwit"));
    copy(&top.join("README.md"), &dir.join("README.md"))?;
    for guide in std::fs::read_dir(top.join("docs"))? {
        let guide = guide?.path();
        let name = guide.file_name().context("a file without a name")?;
        if guide.extension().is_some_and(|it| it == "md") && name != DAEMON_GUIDE {
            copy(&guide, &root.join(GUIDES).join(name))?;
        }
    }
    about(&dir)
}

/// The changes, and the licence as Debian wants it.
fn about(dir: &Path) -> anyhow::Result<()> {
    let changes = dir.join("changelog");
    copy(&top().join("CHANGELOG.md"), &changes)?;
    compress(&changes)?;
    let copyright = "Godwit, by its authors, under the Apache License 2.0. On Debian systems its \
        text is in\n/usr/share/common-licenses/Apache-2.0.\n";
    write(&dir.join("copyright"), copyright)
}

/// Those units of systemd whose name is one of the package's.
fn units(dir: &Path, is_own: impl Fn(&str) -> bool) -> anyhow::Result<()> {
    for unit in std::fs::read_dir(top().join("packaging/systemd"))? {
        let unit = unit?.path();
        let name = unit.file_name().context("a file without a name")?.to_string_lossy();
        if is_own(&name) {
            copy(&unit, &dir.join(&*name))?;
        }
    }
    Ok(())
}

fn installed_kib(dir: &Path) -> anyhow::Result<u64> {
    let mut kib = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        kib += if metadata.is_dir() {
            1 + installed_kib(&entry.path())?
        } else {
            metadata.len().div_ceil(1024)
        };
    }
    Ok(kib)
}

/// Files of a package may be read by everybody, whatever the umask of who builds it.
fn set_mode(path: &Path, mode: u32) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the mode of {}", path.display()))
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let bytes = std::fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    write(to, bytes)
}

fn write(to: &Path, bytes: impl AsRef<[u8]>) -> anyhow::Result<()> {
    let mut missing = Vec::new();
    let mut dir = to.parent();
    while let Some(there) = dir.filter(|dir| !dir.exists()) {
        missing.push(there);
        dir = there.parent();
    }
    for dir in missing.into_iter().rev() {
        std::fs::create_dir(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        set_mode(dir, 0o755)?;
    }
    std::fs::write(to, bytes).with_context(|| format!("cannot write {}", to.display()))?;
    set_mode(to, 0o644)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_of_a_package_runs_the_program_of_the_package() {
        // Mutation: the program has another place in images.
        let unit = stamp_unit();
        assert!(unit.contains("\nExecStart=/usr/bin/godwit-stamp run "), "{unit}");
        assert!(!unit.contains("/usr/local") && unit.contains("/usr/share/doc/"), "{unit}");
    }

    #[test]
    fn a_program_that_needs_libraries_is_not_static() {
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(!is_static(&program));
        let mut alone = vec![0; 64 + 56];
        alone[..5].copy_from_slice(b"\x7fELF\x02");
        (alone[32], alone[54], alone[56], alone[64]) = (64, 56, 1, 1);
        assert!(is_static(&alone));
        alone[64] = INTERPRETER as u8;
        assert!(!is_static(&alone));
        assert!(!is_static(&alone[..60]) && !is_static(b"#!/bin/sh"));
    }
}
