//! A file system of its own for a test or a benchmark.
//!
//! Keeps one promise: dropping it unmounts it. Mounting needs root.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, ensure};

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A file system that is not on any disk, mounted at a directory of its own.
#[derive(Debug)]
pub struct Mount {
    dir: PathBuf,
    mounted: bool,
}

impl Mount {
    /// Mounts one of the type `kind` with `options`, as mount(8) takes them.
    ///
    /// # Errors
    /// When the directory cannot be made, or mount(8) refuses.
    pub fn new(kind: &str, options: &str) -> anyhow::Result<Self> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir =
            std::env::temp_dir().join(format!("godwit-{kind}-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let mut mount = Self { dir, mounted: false };
        let arguments = ["-t", kind, "-o", options, "none"];
        let status = Command::new("mount").args(arguments).arg(&mount.dir).status()?;
        ensure!(
            status.success(),
            "cannot mount a {kind} at {} (this needs root)",
            mount.dir.display()
        );
        mount.mounted = true;
        Ok(mount)
    }

    /// Where it is mounted.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted {
            let _ = Command::new("umount").arg(&self.dir).stderr(Stdio::null()).status();
        }
        let _ = std::fs::remove_dir(&self.dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_mounted_leaves_nothing_behind() {
        let made = Mount::new("nosuchfs", "size=1M");
        assert!(made.is_err());
        let prefix = format!("godwit-nosuchfs-{}-", std::process::id());
        let left = std::fs::read_dir(std::env::temp_dir()).unwrap().flatten();
        assert_eq!(
            left.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)).count(),
            0
        );
    }
}
