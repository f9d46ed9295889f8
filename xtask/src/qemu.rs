//! `make qemu`: Debian's own QEMU, its tools for images and its libvirt installed, and two newer
//! QEMUs unpacked beside it: QEMU 10 of this release's backports, and the newest that the backports
//! of Debian's stable release have, with libraries of its own.
//!
//! Keeps three promises: the system's package sources stay as they are (backports are looked up
//! with sources, lists and cache of our own under target/); signatures are checked with the keys
//! that the system trusts; and where one of the two cannot be had, one line says so and tests do
//! without it. Which of them a test runs is left to `godwit-testbed`.

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::apt::{self, Apt};

const PACKAGE: &str = "qemu-system-x86";
/// Has qemu-img and qemu-nbd, for the tests of disks.
const TOOLS: &str = "qemu-utils";
/// Libvirt's daemon, its part for QEMU and its client, for the tests of domains.
const LIBVIRT: [&str; 3] =
    ["libvirt-daemon-system", "libvirt-daemon-driver-qemu", "libvirt-clients"];
/// Where the part for QEMU is; it is no program.
const LIBVIRT_DRIVER: &str =
    "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so";
const BINARY: &str = "qemu-system-x86_64";
/// Where the multi-arch libraries are inside an unpacked package.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// A QEMU that is unpacked beside the installed one.
struct Newer {
    name: &'static str,
    dir: &'static str,
    /// Of Debian's stable release, with all libraries of that, rather than of this system's.
    of_stable: bool,
}

const TEN: Newer = Newer { name: "QEMU 10", dir: "qemu-10.0", of_stable: false };
const NEWEST: Newer = Newer { name: "the newest QEMU", dir: "qemu-newest", of_stable: true };

/// Installs QEMU where it is missing, and unpacks QEMU 10 where that is possible: what the demo
/// runs its guests in.
pub(crate) fn provide_for_demo() -> anyhow::Result<()> {
    install(PACKAGE, BINARY)?;
    TEN.provide();
    Ok(())
}

/// Installs QEMU where it is missing, and unpacks the newer ones where that is possible.
pub(crate) fn provide() -> anyhow::Result<()> {
    install(PACKAGE, BINARY)?;
    install(TOOLS, "qemu-nbd")?;
    // Without it the tests that need it say so.
    if let Err(problem) = install_libvirt() {
        println!("libvirt is not available here: {problem:#}");
    }
    TEN.provide();
    NEWEST.provide();
    Ok(())
}

fn install(package: &str, program: &str) -> anyhow::Result<()> {
    if let Some(version) = version(Path::new(program)) {
        println!("{program} is installed: {version}");
        return Ok(());
    }
    apt::ensure_present()?;
    let apt = Apt::default();
    apt.know(package).with_context(|| format!("cannot learn of the package {package}"))?;
    println!("installing {package} {}", apt.candidate(package)?);
    apt.get(["install", "-q", "-y", "--no-install-recommends", package])
        .with_context(|| format!("cannot install {package} (this needs root)"))?;
    let version = version(Path::new(program))
        .with_context(|| format!("{program} was installed and does not run"))?;
    println!("{program} is installed: {version}");
    Ok(())
}

fn install_libvirt() -> anyhow::Result<()> {
    let there = || version(Path::new("libvirtd")).filter(|_| Path::new(LIBVIRT_DRIVER).exists());
    if let (Some(version), Some(_)) = (there(), version(Path::new("virsh"))) {
        println!("libvirt is installed: {version}");
        return Ok(());
    }
    apt::ensure_present()?;
    let apt = Apt::default();
    LIBVIRT.into_iter().try_for_each(|package| apt.know(package))?;
    println!("installing {} {}", LIBVIRT.join(", "), apt.candidate(LIBVIRT[0])?);
    apt.get(["install", "-q", "-y", "--no-install-recommends"].into_iter().chain(LIBVIRT))
        .context("cannot install libvirt (this needs root)")?;
    let version = there().context("libvirt was installed and does not run")?;
    println!("libvirt is installed: {version}");
    Ok(())
}

/// The first line of what `program` says of its version, if it runs.
fn version(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let line = String::from_utf8_lossy(&output.stdout).lines().next()?.to_owned();
    output.status.success().then_some(line)
}

impl Newer {
    /// Unpacks it where that is possible, and says what became of it.
    fn provide(&self) {
        let wrapper = self.wrapper();
        if let Some(version) = version(&wrapper) {
            println!("{} is there: {version}", wrapper.display());
            return;
        }
        match self.unpack() {
            Ok(version) => println!("{} made: {version}", wrapper.display()),
            Err(problem) => {
                println!("{} is not available here, and is done without: {problem:#}", self.name)
            }
        }
    }

    fn dir(&self) -> PathBuf {
        crate::target_dir().join(self.dir)
    }

    fn wrapper(&self) -> PathBuf {
        self.dir().join(BINARY)
    }

    /// Downloads and unpacks it; its version.
    fn unpack(&self) -> anyhow::Result<String> {
        apt::ensure_present()?;
        let system = SystemSource::find()?;
        let release = if self.of_stable { "stable" } else { &system.codename };
        let suite = format!("{release}-backports");
        let work = crate::target_dir().join("qemu-apt");
        let apt = private_apt(&work, &system.lines(&[release, &suite]), self.of_stable)?;
        println!("fetching the package list of {suite}");
        apt.get(["update", "-q"])
            .with_context(|| format!("cannot fetch the package list of {suite}"))?;
        println!("downloading {PACKAGE} of {suite} and what it needs beyond this system");
        apt.get([
            "install",
            "-q",
            "-y",
            "--download-only",
            "--no-install-recommends",
            "-t",
            &suite,
            PACKAGE,
        ])
        .with_context(|| format!("cannot download {PACKAGE} of {suite}"))?;

        let files = apt::packages_in(&work.join("cache/archives"))?;
        ensure!(!files.is_empty(), "{suite} has no {PACKAGE} newer than the installed one");
        let root = self.dir().join("root");
        apt::empty(&root)?;
        println!("unpacking {} packages", files.len());
        files.iter().try_for_each(|file| apt::unpack(file, &root))?;
        std::fs::remove_dir_all(&work)
            .with_context(|| format!("cannot remove {}", work.display()))?;
        if self.of_stable {
            have_own_libraries(&root)?;
        }
        let wrapper = self.wrapper();
        self.write_wrapper(&wrapper)?;
        version(&wrapper).with_context(|| format!("{} does not run", wrapper.display()))
    }

    /// A script that becomes QEMU, so that the process id of one is that of the other. Newer or
    /// missing libraries come first; the firmware is looked up in the unpacked tree, then in the
    /// system's (for what was not downloaded).
    fn write_wrapper(&self, path: &Path) -> anyhow::Result<()> {
        let libraries = if self.of_stable {
            String::new()
        } else {
            format!(
                "export LD_LIBRARY_PATH=\
                 \"$root/{LIBRARIES}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\"\n"
            )
        };
        let name = self.name;
        let script = format!(
            "#!/bin/sh\n\
             # {name}, unpacked by `make qemu`.\n\
             root=$(dirname \"$(readlink -f \"$0\")\")/root\n\
             {libraries}\
             export QEMU_MODULE_DIR=\"$root/{LIBRARIES}/qemu\"\n\
             exec \"$root/usr/bin/{BINARY}\" \\\n\
             \x20   -L \"$root/usr/share/qemu\" -L \"$root/usr/share/seabios\" \\\n\
             \x20   -L /usr/share/qemu -L /usr/share/seabios -L /usr/lib/ipxe/qemu \"$@\"\n"
        );
        std::fs::write(path, script).with_context(|| format!("cannot write {}", path.display()))?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
            .with_context(|| format!("cannot make {} a program", path.display()))
    }
}

/// Has QEMU below `root` loaded by the C library there, with the libraries there: the two paths in
/// its ELF header are all that is changed. Started through that loader it would not have the name
/// and the command line of a QEMU, and with LD_LIBRARY_PATH whatever it starts would be given a C
/// library that is not for it.
fn have_own_libraries(root: &Path) -> anyhow::Result<()> {
    let (libraries, program) = (root.join(LIBRARIES), root.join("usr/bin").join(BINARY));
    let tool = Apt::default().unpacked(&["patchelf"], &crate::target_dir().join("patchelf"))?;
    let mut patchelf = Command::new(tool.join("usr/bin/patchelf"));
    patchelf.arg("--set-interpreter").arg(libraries.join("ld-linux-x86-64.so.2"));
    // Of the program and of all that it loads, which a run path is not.
    patchelf.arg("--force-rpath").arg("--set-rpath").arg(&libraries).arg(&program);
    let output = patchelf.output().context("cannot run patchelf")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "patchelf {}: {}", program.display(), said.trim());
    Ok(())
}

/// The entry of the system's own package sources that has the release itself.
struct SystemSource {
    codename: String,
    uri: String,
    component: String,
    /// The key file that this entry is checked with, where the entry names one.
    signed_by: Option<String>,
}

impl SystemSource {
    fn find() -> anyhow::Result<Self> {
        let release =
            std::fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
        let codename = release
            .lines()
            .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
            .context("/etc/os-release names no release")?
            .trim_matches('"')
            .to_owned();
        let apt = Apt::default();
        // Apt tells the release of a source only once it has its lists.
        let source = match Self::of_release(&apt, &codename)? {
            Some(source) => Some(source),
            None => {
                apt.update()?;
                Self::of_release(&apt, &codename)?
            }
        };
        source.with_context(|| format!("the system's package sources have no {codename}"))
    }

    fn of_release(apt: &Apt, codename: &str) -> anyhow::Result<Option<Self>> {
        // What apt itself made of the configuration, in whichever of its forms that is written.
        let format = "$(CODENAME)|$(REPO_URI)|$(COMPONENT)|$(SOURCESENTRY)";
        let targets = apt.get(["indextargets", "--format", format, "Identifier: Packages"])?;
        let mut fields = targets.lines().map(|line| line.split('|').collect::<Vec<_>>());
        let found =
            fields.find(|fields| fields.len() == 4 && fields[0] == codename && fields[2] == "main");
        Ok(found.map(|fields| {
            let signed_by =
                signed_by(fields[3].rsplit_once(':').map_or(fields[3], |(file, _)| file));
            let (uri, component) = (fields[1].to_owned(), fields[2].to_owned());
            Self { codename: codename.to_owned(), uri, component, signed_by }
        }))
    }

    /// Sources with these `suites`.
    fn lines(&self, suites: &[&str]) -> String {
        let key =
            self.signed_by.as_ref().map(|key| format!("[signed-by={key}] ")).unwrap_or_default();
        let mut lines = String::new();
        for suite in suites {
            let _ = writeln!(lines, "deb {key}{} {suite} {}", self.uri, self.component);
        }
        lines
    }
}

/// The key that a file of package sources names, in either of its forms. Without one, apt uses the
/// keys in its trusted.gpg.d, which the private configuration shares.
fn signed_by(sources: &str) -> Option<String> {
    let text = std::fs::read_to_string(sources).ok()?;
    let deb822 = text.lines().find_map(|line| line.strip_prefix("Signed-By:")).map(str::trim);
    let one_line = || text.lines().find_map(|line| Some(line.split_once("signed-by=")?.1));
    let key = deb822.or_else(one_line)?.split([' ', ']']).next()?;
    key.starts_with('/').then(|| key.to_owned())
}

/// Apt with sources, which are these `lines`, lists and cache of its own. It shares the system's
/// knowledge of what is installed, so that it downloads what is missing or too old here and nothing
/// else; or nothing is, and it downloads all.
fn private_apt(work: &Path, lines: &str, all: bool) -> anyhow::Result<Apt> {
    apt::empty(work)?;
    for dir in ["lists/partial", "cache/archives/partial", "parts"] {
        std::fs::create_dir_all(work.join(dir)).with_context(|| format!("cannot create {dir}"))?;
    }
    let write = |name: &str, text: &str| {
        let path = work.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        anyhow::Ok(path)
    };
    let option = |key: &str, path: PathBuf| format!("{key}={}", path.display());
    let mut options = vec![
        option("Dir::Etc::sourcelist", write("sources.list", lines)?),
        option("Dir::Etc::sourceparts", work.join("parts")),
        option("Dir::State::lists", work.join("lists")),
        option("Dir::Cache", work.join("cache")),
    ];
    if all {
        options.push(option("Dir::State::status", write("status", "")?));
    }
    Ok(Apt::with_options(options))
}
