//! `make semver`: whether what the crates meant for others offer fits their version, compared with
//! the release before.
//!
//! Keeps one promise: no crate is left out in silence. What the release before did not have cannot
//! be compared, and is named. Comparing is cargo-semver-checks' work, which takes no crate that
//! cannot be published.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use crate::previous::{Release, SHALLOW};

/// Compares all of them.
pub(crate) fn compare() -> anyhow::Result<()> {
    let root = crate::top();
    let release = Release::of(root)?;
    ensure!(release.is_in_history(root), "{SHALLOW}");
    let place = crate::target_dir().join("semver");
    let before = place.join("before");
    release.unpack(root, &before)?;
    let new = new_crates(root, &before)?;
    let mut cargo = crate::cargo();
    cargo.args(["semver-checks", "--workspace", "--baseline-root"]).arg(&before);
    for name in &new {
        println!("{name}: the release before did not have it, so there is nothing to compare");
        cargo.args(["--exclude", name]);
    }
    cargo.current_dir(root).env("CARGO_TARGET_DIR", &place);
    let fits = cargo.status().context("cargo semver-checks")?.success();
    std::fs::remove_dir_all(&before)?;
    ensure!(
        fits,
        "the version fits less than what has changed: it is one for the whole workspace, in \
         Cargo.toml"
    );
    Ok(())
}

/// The packages in `crates/` that can be published and were not there `before`, in order.
fn new_crates(root: &Path, before: &Path) -> anyhow::Result<Vec<String>> {
    let crates = |root: &Path| root.join("crates");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(crates(root))? {
        let folder = entry?.file_name();
        let manifest = |root: &Path| -> PathBuf { crates(root).join(&folder).join("Cargo.toml") };
        let (now, before) = (manifest(root), manifest(before));
        let Ok(text) = std::fs::read_to_string(&now) else { continue };
        let name = text.lines().find_map(|line| line.strip_prefix("name = "));
        // Who cannot be published says so, as the workspace does.
        let published = !text.lines().any(|line| line == "publish.workspace = true");
        if published && !before.is_file() {
            let name = name.with_context(|| format!("{} has no name", now.display()))?;
            names.push(name.trim_matches('"').to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_there_before_is_named() {
        let root = std::env::temp_dir().join(format!("xtask-semver-{}", std::process::id()));
        let (now, before) = (root.join("now"), root.join("before"));
        let own = ("cli", "publish.workspace = true\n");
        let [bitmap, tls, codec] = ["bitmap", "tls", "codec"].map(|name| (name, ""));
        for (at, (name, more)) in
            [(&now, bitmap), (&now, tls), (&now, own), (&now, codec), (&before, codec)]
        {
            let place = at.join("crates").join(name);
            std::fs::create_dir_all(&place).unwrap();
            let text = format!("[package]\nname = \"godwit-{name}\"\n{more}");
            std::fs::write(place.join("Cargo.toml"), text).unwrap();
        }
        // A folder alone is no crate.
        std::fs::create_dir_all(before.join("crates/tls")).unwrap();
        let new = new_crates(&now, &before);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(new.unwrap(), ["godwit-bitmap", "godwit-tls"]);
    }
}
