//! `make previous`: the godwit of the release before this one, from its commit, for the test that
//! runs both against each other.
//!
//! Keeps two promises: it is built once, as it shipped (without what only tests ask for), and kept
//! under its commit; and where the history does not have that commit, one line says so and the test
//! is skipped. The commit is in `lab/testbed/previous-release`.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};

use crate::apt;

/// Where the commit is written down.
const RELEASE: &str = "lab/testbed/previous-release";

/// The release before this one, by its commit.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    commit: String,
}

impl Release {
    /// The one that is written down in the checkout `root`.
    pub(crate) fn of(root: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(root.join(RELEASE)).context(RELEASE)?;
        let commit = commit_in(&text).with_context(|| format!("{RELEASE} names no commit"))?;
        Ok(Self { commit: commit.to_owned() })
    }

    /// Whether the history of `root` has it.
    pub(crate) fn is_in_history(&self, root: &Path) -> bool {
        let mut git = Command::new("git");
        git.args(["cat-file", "-e", &format!("{}^{{commit}}", self.commit)]).current_dir(root);
        git.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }

    /// Puts its tree into `dir`, which is made anew.
    pub(crate) fn unpack(&self, root: &Path, dir: &Path) -> anyhow::Result<()> {
        apt::empty(dir)?;
        let mut git = Command::new("git");
        git.args(["archive", &self.commit]).current_dir(root).stdout(Stdio::piped());
        let mut git = git.spawn().context("git")?;
        let Some(archive) = git.stdout.take() else { bail!("git archive says nothing") };
        let mut tar = Command::new("tar");
        let unpacked = tar.arg("-x").arg("-C").arg(dir).stdin(archive).status().context("tar")?;
        ensure!(unpacked.success() && git.wait()?.success(), "cannot unpack {}", self.commit);
        Ok(())
    }
}

/// What to do where the history does not have it.
pub(crate) const SHALLOW: &str = "this checkout's history does not have the commit of the release \
                                  before (a shallow clone? `git fetch --unshallow` gets it)";

/// Builds it where it is not there yet.
pub(crate) fn provide() -> anyhow::Result<()> {
    let root = crate::top();
    let release = Release::of(root)?;
    let commit = &release.commit;
    let dir = crate::target_dir().join("previous").join(commit);
    let program = dir.join("godwit");
    if program.is_file() {
        println!("{} is there", program.display());
        return Ok(());
    }
    if !release.is_in_history(root) {
        println!("the previous release cannot be built here: {SHALLOW}");
        return Ok(());
    }
    println!("building the godwit of the previous release, {commit} (once, a few minutes)");
    let began = Instant::now();
    let (source, build) = (dir.join("source"), dir.join("build"));
    release.unpack(root, &source)?;
    let mut cargo = crate::cargo();
    // Its own Cargo.lock; what this one has downloaded serves for it.
    cargo.args(["build", "--quiet", "--locked", "--package", "godwit-cli", "--bin", "godwit"]);
    cargo.current_dir(&source).env("CARGO_TARGET_DIR", &build);
    // A quick build: the program only moves small guests. What looks at every page is made fast.
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_INCREMENTAL", "0");
    cargo.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0");
    let fast = ["godwit-bitmap", "godwit-memory", "godwit-wire", "twox-hash", "zstd-sys"];
    for (package, level) in fast.map(|package| (package, 2)).into_iter().chain([("\"*\"", 0)]) {
        cargo.args(["--config", &format!("profile.dev.package.{package}.opt-level={level}")]);
    }
    ensure!(cargo.status().context("cargo")?.success(), "the previous release does not build");
    // In one step: half a program would be taken for it.
    fs::rename(build.join("debug/godwit"), &program).context("no program was built")?;
    fs::remove_dir_all(&build)?;
    fs::remove_dir_all(&source)?;
    println!("{} made in {} s", program.display(), began.elapsed().as_secs());
    Ok(())
}

/// The commit that the text of [`RELEASE`] names.
fn commit_in(text: &str) -> Option<&str> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let mut pairs = lines.filter_map(|line| line.split_once('='));
    let commit = pairs.find(|(key, _)| key.trim() == "commit")?.1.trim();
    let hex = commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
    hex.then_some(commit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_named_by_a_whole_commit() {
        let text = include_str!("../../lab/testbed/previous-release");
        assert!(commit_in(text).is_some(), "{text}");
        assert_eq!(commit_in("# commit = 1\nprotocol = 5\n"), None);
        assert_eq!(commit_in("commit = 1c79822\n"), None, "others may begin like this one");
    }
}
