//! A third place, for the copy of what a guest lacks in post-copy.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context;

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A directory to which what is missing is copied, which goes with this.
#[derive(Debug)]
pub struct Third(PathBuf);

impl Third {
    /// Makes one.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new() -> anyhow::Result<Self> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("godwit-third-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).context("no directory")?;
        Ok(Self(directory))
    }

    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.0
    }

    /// The option of both sides for it.
    #[must_use]
    pub fn option(&self) -> [String; 2] {
        ["--postcopy-safe".to_owned(), self.0.to_string_lossy().into_owned()]
    }

    /// How many files are there.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn files(&self) -> anyhow::Result<usize> {
        Ok(std::fs::read_dir(&self.0)?.count())
    }
}

impl Drop for Third {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
