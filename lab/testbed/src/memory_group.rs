//! Control groups with a limit of memory.

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::leftovers::unique;

/// A control group with a limit of memory. Nobody may be in it any more when it is dropped, or it
/// stays.
#[derive(Debug)]
pub struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// One whose processes may take `limit` bytes from when they are in it.
    ///
    /// # Errors
    /// When this user may make none, or memory is not counted.
    pub fn new(limit: u64) -> anyhow::Result<Self> {
        let (root, file) = if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
            ("/sys/fs/cgroup", "memory.max")
        } else {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
        };
        let (process, number) = (std::process::id(), unique().1);
        let dir = Path::new(root).join(format!("godwit-room-{process}-{number}"));
        std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let group = Self(dir);
        std::fs::write(group.0.join(file), limit.to_string())
            .context("no control group counts memory")?;
        Ok(group)
    }

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// Puts the process `pid` into it.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn take(&self, pid: i32) -> anyhow::Result<()> {
        Ok(std::fs::write(self.0.join("cgroup.procs"), pid.to_string())?)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}
