//! `make qemu`: Debian's own QEMU, its tools for images and its libvirt installed, and QEMU 10 from
//! its backports unpacked beside it.
//!
//! Keeps three promises: the system's package sources stay as they are (backports are looked up
//! with sources, lists and cache of our own under target/); signatures are checked with the keys
//! that the system trusts; and where QEMU 10 cannot be had, one line says so and the installed QEMU
//! is all that tests use. Which of them a test runs is left to `godwit-testbed`.

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

/// Installs QEMU where it is missing, and unpacks the newer one where that is possible.
pub(crate) fn provide() -> anyhow::Result<()> {
    install(PACKAGE, BINARY)?;
    install(TOOLS, "qemu-nbd")?;
    // Without it the tests that need it say so.
    if let Err(problem) = install_libvirt() {
        println!("libvirt is not available here: {problem:#}");
    }
    let dir = crate::target_dir().join("qemu-10.0");
    let wrapper = dir.join(BINARY);
    if let Some(version) = version(&wrapper) {
        println!("{} is there: {version}", wrapper.display());
        return Ok(());
    }
    match unpack_newer(&dir) {
        Ok(version) => println!("{} made: {version}", wrapper.display()),
        Err(problem) => {
            println!("QEMU 10 is not available here, only the installed one is used: {problem:#}")
        }
    }
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

fn unpack_newer(dir: &Path) -> anyhow::Result<String> {
    apt::ensure_present()?;
    let system = SystemSource::find()?;
    let work = crate::target_dir().join("qemu-apt");
    let apt = private_apt(&work, &system)?;
    let suite = system.backports();
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
    let root = dir.join("root");
    apt::empty(&root)?;
    for file in &files {
        println!("unpacking {}", file.file_name().unwrap_or_default().to_string_lossy());
        apt::unpack(file, &root)?;
    }
    std::fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    let wrapper = dir.join(BINARY);
    write_wrapper(&wrapper)?;
    version(&wrapper).with_context(|| format!("{} does not run", wrapper.display()))
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

    fn backports(&self) -> String {
        format!("{}-backports", self.codename)
    }

    /// Sources with the release, for what QEMU needs, and its backports.
    fn lines(&self) -> String {
        let key =
            self.signed_by.as_ref().map(|key| format!("[signed-by={key}] ")).unwrap_or_default();
        let mut lines = String::new();
        for suite in [&self.codename, &self.backports()] {
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

/// Apt with sources, lists and cache of its own. It shares the system's knowledge of what is
/// installed, so that it downloads what is missing or too old here and nothing else.
fn private_apt(work: &Path, system: &SystemSource) -> anyhow::Result<Apt> {
    apt::empty(work)?;
    for dir in ["lists/partial", "cache/archives/partial", "parts"] {
        std::fs::create_dir_all(work.join(dir)).with_context(|| format!("cannot create {dir}"))?;
    }
    let sources = work.join("sources.list");
    std::fs::write(&sources, system.lines()).context("cannot write the private package sources")?;
    let option = |key: &str, path: PathBuf| format!("{key}={}", path.display());
    Ok(Apt::with_options(vec![
        option("Dir::Etc::sourcelist", sources),
        option("Dir::Etc::sourceparts", work.join("parts")),
        option("Dir::State::lists", work.join("lists")),
        option("Dir::Cache", work.join("cache")),
    ]))
}

/// A script that becomes QEMU, so that the process id of one is that of the other. Newer or missing
/// libraries come first; the firmware is looked up in the unpacked tree, then in the system's (for
/// what was not downloaded).
fn write_wrapper(path: &Path) -> anyhow::Result<()> {
    let script = format!(
        "#!/bin/sh\n\
         # QEMU 10, unpacked by `make qemu`.\n\
         root=$(dirname \"$(readlink -f \"$0\")\")/root\n\
         export LD_LIBRARY_PATH=\"$root/{LIBRARIES}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\"\n\
         export QEMU_MODULE_DIR=\"$root/{LIBRARIES}/qemu\"\n\
         exec \"$root/usr/bin/{BINARY}\" -L \"$root/usr/share/qemu\" \
         -L \"$root/usr/share/seabios\" \\\n\
         \x20   -L /usr/share/qemu -L /usr/share/seabios -L /usr/lib/ipxe/qemu \"$@\"\n"
    );
    std::fs::write(path, script).with_context(|| format!("cannot write {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} a program", path.display()))
}
