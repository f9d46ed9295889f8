//! Keys of two hosts, as `godwit keys` makes them.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use godwit_testbed::Godwit;

/// Keys that go with their value.
#[derive(Debug)]
pub struct Keys(PathBuf);

impl Keys {
    /// Has `godwit keys` make them for two hosts, west and east; in a directory with `test` in its
    /// name.
    ///
    /// # Errors
    /// When it does not, or does not say what to do with them.
    pub fn make(godwit: &Godwit, test: &str) -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("godwit-{test}-{}", std::process::id()));
        let keys = Self(dir);
        let made =
            godwit.run(&["keys", "--dir", keys.path("")?.trim_end_matches('/'), "west", "east"])?;
        ensure!(made.status.success(), "{made:?}");
        let said = String::from_utf8_lossy(&made.stdout).into_owned();
        ensure!(said.contains("keep ca-key.pem to yourself"), "{said}");
        ensure!(said.contains("copy it to west, as /etc/godwit/keys"), "{said}");
        Ok(keys)
    }

    /// The directory of `host`'s.
    ///
    /// # Errors
    /// When its name is no text.
    pub fn path(&self, host: &str) -> anyhow::Result<String> {
        Ok(self.0.join(host).to_str().context("a path of text")?.to_owned())
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
