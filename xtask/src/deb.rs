//! `make deb`: the Debian package of the command and of the daemon, with their manual, completions
//! and documents.
//!
//! Keeps one promise: what is in the package was made by the programs in it, and the package says
//! the least version of the C library that these were built against.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::apt;

/// What is done for: `xtask deb [--binary PATH] [--out DIR]`.
#[derive(Debug)]
struct Wish {
    /// The program to put into it, beside which `godwitd` lies; `None`: the release build, made
    /// now.
    binary: Option<PathBuf>,
    /// Where the package is put.
    out: PathBuf,
}

impl Wish {
    fn from(mut words: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let mut wish = Self { binary: None, out: crate::target_dir().join("deb") };
        while let Some(word) = words.next() {
            let value = words.next().with_context(|| format!("{word} needs a value"))?.into();
            match word.as_str() {
                "--binary" => wish.binary = Some(value),
                "--out" => wish.out = value,
                _ => bail!("there is no option {word}: --binary PATH, --out DIR"),
            }
        }
        Ok(wish)
    }
}

/// Makes the package, and prints its path last.
pub(crate) fn build(words: impl Iterator<Item = String>) -> anyhow::Result<()> {
    let Wish { binary, out } = Wish::from(words)?;
    apt::ensure_present()?;
    let binary = match binary {
        Some(binary) => binary,
        None => release()?,
    };
    let root = out.join("root");
    apt::empty(&root)?;
    let program = root.join("usr/bin/godwit");
    let daemon = root.join("usr/bin/godwitd");
    for (from, to) in [(&binary, &program), (&binary.with_file_name("godwitd"), &daemon)] {
        copy(from, to)?;
        apt::output(Command::new("strip").arg("--strip-all").arg(to))?;
        set_mode(to, 0o755)?;
    }
    manual(&program, &root.join("usr/share/man/man1"))?;
    let page = root.join("usr/share/man/man8/godwitd.8");
    write(&page, &apt::output(Command::new(&daemon).arg("--man"))?)?;
    apt::output(Command::new("gzip").args(["--best", "--no-name"]).arg(&page))?;
    completions(&program, &["completions"], &root.join("usr/share"))?;
    completions(&daemon, &["--completions"], &root.join("usr/share"))?;
    documents(&root.join("usr/share/doc/godwit"))?;
    units(&root.join("usr/lib/systemd/system"))?;
    let architecture = apt::output(Command::new("dpkg").arg("--print-architecture"))?;
    let architecture = architecture.trim();
    write(&root.join("DEBIAN/control"), &control(architecture, installed_kib(&root)?)?)?;
    let package = out.join(format!("godwit_{}_{architecture}.deb", env!("CARGO_PKG_VERSION")));
    apt::output(
        Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(&root).arg(&package),
    )?;
    std::fs::remove_dir_all(&root)?;
    println!("{}", package.display());
    Ok(())
}

/// The release build, without what only tests have.
fn release() -> anyhow::Result<PathBuf> {
    println!("building godwit and godwitd (cargo build --release)");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let packages = ["--package", "godwit-cli", "--package", "godwitd"];
    let programs = ["--bin", "godwit", "--bin", "godwitd"];
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--release"]).args(packages).args(programs);
    apt::output(build.arg("--target-dir").arg(crate::target_dir()))?;
    Ok(crate::target_dir().join("release/godwit"))
}

/// A page for the command and for each of its commands, as the program itself prints them.
fn manual(program: &Path, dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir)?;
    apt::output(Command::new(program).args(["man", "--into"]).arg(dir))?;
    for page in std::fs::read_dir(dir)? {
        apt::output(Command::new("gzip").args(["--best", "--no-name"]).arg(page?.path()))?;
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

/// The README, the guides, the changes, and the licence as Debian wants it.
fn documents(dir: &Path) -> anyhow::Result<()> {
    let top = top();
    copy(&top.join("README.md"), &dir.join("README.md"))?;
    for guide in std::fs::read_dir(top.join("docs"))? {
        let guide = guide?.path();
        if guide.extension().is_some_and(|it| it == "md") {
            let name = guide.file_name().context("a file without a name")?;
            copy(&guide, &dir.join("docs").join(name))?;
        }
    }
    let changes = dir.join("changelog");
    copy(&top.join("CHANGELOG.md"), &changes)?;
    apt::output(Command::new("gzip").args(["--best", "--no-name"]).arg(&changes))?;
    let copyright = "Godwit, by its authors, under the Apache License 2.0. On Debian systems its \
        text is in\n/usr/share/common-licenses/Apache-2.0.\n";
    write(&dir.join("copyright"), copyright)
}

/// The units of systemd, as far as there are any.
fn units(dir: &Path) -> anyhow::Result<()> {
    let Ok(found) = std::fs::read_dir(top().join("packaging/systemd")) else { return Ok(()) };
    for unit in found {
        let unit = unit?.path();
        copy(&unit, &dir.join(unit.file_name().context("a file without a name")?))?;
    }
    Ok(())
}

fn control(architecture: &str, installed_kib: u64) -> anyhow::Result<String> {
    let (name, version) = ("godwit", env!("CARGO_PKG_VERSION"));
    let library =
        apt::output(Command::new("dpkg-query").args(["-W", "-f", "${Version}", "libc6"]))?;
    // `2.36-9+deb12u10` and its successors of one release do the same.
    let library = library.split(['-', '+']).next().context("no version of libc6")?.to_owned();
    Ok(format!(
        "Package: {name}\n\
         Version: {version}\n\
         Architecture: {architecture}\n\
         Maintainer: the authors of godwit <godwit@localhost>\n\
         Installed-Size: {installed_kib}\n\
         Depends: libc6 (>= {library}), libgcc-s1\n\
         Suggests: libvirt0, qemu-system-x86\n\
         Section: admin\n\
         Priority: optional\n\
         Description: live migration of running virtual machines\n \
         Moves a running guest of QEMU, libvirt or a small VMM of its own to another\n \
         host: memory, disks and device state, from outside an unpatched QEMU, with\n \
         the guest where it was if anything fails before the handover.\n"
    ))
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

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
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
