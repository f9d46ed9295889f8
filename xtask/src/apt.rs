//! The few things asked of Debian's package tools: which version there is, fetch it, unpack it,
//! install it.
//!
//! Keeps two promises: every download and installation is announced, and a failure names the
//! command that failed and the end of what it said. Which packages, and from which suite, is for
//! the callers to say.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

/// `apt-get` and `apt-cache` with a set of options: none for the system's own sources.
#[derive(Clone, Debug, Default)]
pub(crate) struct Apt {
    options: Vec<String>,
}

impl Apt {
    /// Apt with `options` in the form `Dir::Cache=/some/where`.
    pub(crate) fn with_options(options: Vec<String>) -> Self {
        Self { options }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
        for option in &self.options {
            command.args(["-o", option]);
        }
        command
    }

    /// `apt-get` with `args`; its standard output.
    pub(crate) fn get<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<String> {
        output(self.command("apt-get").args(args))
    }

    /// Fetches the package lists if there are none that know `package`.
    pub(crate) fn know(&self, package: &str) -> anyhow::Result<()> {
        if self.candidate(package).is_ok() {
            return Ok(());
        }
        // An unreachable extra source is no reason to fail as long as the package becomes known.
        let update = self.update();
        if self.candidate(package).is_err() {
            update?;
            bail!("no source of this system has the package {package}");
        }
        Ok(())
    }

    /// Fetches the package lists if one of `packages` is not in them.
    fn know_all(&self, packages: &[&str]) -> anyhow::Result<()> {
        let policy = output(self.command("apt-cache").arg("policy").args(packages))?;
        let known = policy.lines().filter_map(|line| line.trim().strip_prefix("Candidate: "));
        if known.filter(|version| *version != "(none)").count() < packages.len() {
            packages.iter().try_for_each(|package| self.know(package))?;
        }
        Ok(())
    }

    /// Fetches the package lists.
    pub(crate) fn update(&self) -> anyhow::Result<()> {
        println!("fetching the package lists (apt-get update)");
        self.get(["update", "-q"])
            .context("cannot fetch the package lists (this needs root)")
            .map(drop)
    }

    /// The version that would be installed.
    pub(crate) fn candidate(&self, package: &str) -> anyhow::Result<String> {
        let policy = output(self.command("apt-cache").args(["policy", package]))?;
        let candidate = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
        match candidate {
            Some(version) if version != "(none)" => Ok(version.to_owned()),
            _ => bail!("the package {package} is unknown"),
        }
    }

    /// The package that the meta-package `package` stands for: its one dependency that begins with
    /// `prefix`.
    pub(crate) fn dependency(&self, package: &str, prefix: &str) -> anyhow::Result<String> {
        let depends = output(self.command("apt-cache").args(["depends", "--important", package]))?;
        depends
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .find(|name| name.starts_with(prefix))
            .map(str::to_owned)
            .with_context(|| {
                format!("{package} depends on no {prefix}*: apt-cache depends said {depends:?}")
            })
    }

    /// Downloads `package` into `dir`, which is emptied first; the path of the one file that
    /// arrived.
    pub(crate) fn download(&self, package: &str, dir: &Path) -> anyhow::Result<PathBuf> {
        empty(dir)?;
        println!("downloading the package {package} {}", self.candidate(package)?);
        // Apt drops its rights to the user _apt if that one can write there, and says so if not: no
        // failure.
        output(self.command("apt-get").args(["download", "-q", package]).current_dir(dir))?;
        let files = packages_in(dir)?;
        let [file] = &files[..] else {
            bail!("apt-get download {package} left {} files in {}", files.len(), dir.display());
        };
        Ok(file.clone())
    }

    /// `packages` of today, unpacked below `work`, where they stay; the directory that is their
    /// root. It is made once, and anew when it is to be of other packages.
    pub(crate) fn unpacked(&self, packages: &[&str], work: &Path) -> anyhow::Result<PathBuf> {
        let (root, list) = (work.join("root"), work.join("packages"));
        if std::fs::read_to_string(&list).is_ok_and(|there| there == packages.join(" ")) {
            return Ok(root);
        }
        ensure_present()?;
        self.know_all(packages)?;
        let fresh = work.join("fresh");
        empty(work)?;
        empty(&fresh)?;
        println!("downloading the packages {}", packages.join(" "));
        // In one go, since apt reads all of its lists each time. It may not drop its rights to a
        // user who can write there, and says so: no failure.
        let mut download = self.command("apt-get");
        output(download.args(["download", "-q"]).args(packages).current_dir(&fresh))?;
        for file in packages_in(&fresh)? {
            unpack(&file, &root)?;
        }
        std::fs::remove_dir_all(&fresh)
            .with_context(|| format!("cannot remove {}", fresh.display()))?;
        std::fs::write(&list, packages.join(" "))
            .with_context(|| format!("cannot write {}", list.display()))?;
        Ok(root)
    }
}

/// The package files in `dir`.
pub(crate) fn packages_in(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries =
        std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension() == Some(OsStr::new("deb")) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Unpacks the package `file` into `dir`, without installing it.
pub(crate) fn unpack(file: &Path, dir: &Path) -> anyhow::Result<()> {
    output(Command::new("dpkg-deb").arg("-x").arg(file).arg(dir)).map(drop)
}

/// An empty directory `dir`.
pub(crate) fn empty(dir: &Path) -> anyhow::Result<()> {
    if dir.exists() {
        std::fs::remove_dir_all(dir).with_context(|| format!("cannot empty {}", dir.display()))?;
    }
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))
}

/// Fails unless this is Debian or a relative.
pub(crate) fn ensure_present() -> anyhow::Result<()> {
    for tool in ["apt-get", "apt-cache", "dpkg-deb"] {
        let found = Command::new(tool)
            .arg("--version")
            .output()
            .is_ok_and(|output| output.status.success());
        ensure!(
            found,
            "{tool} is missing: this needs Debian or a relative of it (tried with Debian 12)"
        );
    }
    Ok(())
}

/// Runs `command` to its end; its standard output, or what went wrong.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let mut end: Vec<_> =
            said.lines().rev().filter(|line| !line.trim().is_empty()).take(3).collect();
        end.reverse();
        bail!("{command:?} failed: {}", end.join("; "));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
