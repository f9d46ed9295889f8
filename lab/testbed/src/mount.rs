//! A file system of its own for a test or a benchmark.
//!
//! Keeps one promise: dropping it unmounts it. Mounting needs root.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, ensure};

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A file system mounted at a directory of its own.
#[derive(Debug)]
pub struct Mount {
    dir: PathBuf,
    /// The disk that it is on, where it is on one: a sparse file.
    disk: Option<PathBuf>,
    mounted: bool,
}

impl Mount {
    /// Mounts one of the type `kind`, that is on no disk, with `options`, as mount(8) takes them.
    ///
    /// # Errors
    /// When the directory cannot be made, or mount(8) refuses.
    pub fn new(kind: &str, options: &str) -> anyhow::Result<Self> {
        Self::of(kind, options, None)
    }

    /// Makes an ext4 of so many bytes in a sparse file, and mounts it.
    ///
    /// # Errors
    /// When one of both cannot be done.
    pub fn on_disk(bytes: u64) -> anyhow::Result<Self> {
        Self::of("ext4", "loop", Some(bytes))
    }

    fn of(kind: &str, options: &str, disk: Option<u64>) -> anyhow::Result<Self> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir =
            std::env::temp_dir().join(format!("godwit-{kind}-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let disk_path = disk.map(|_| dir.with_extension("disk"));
        let mut mount = Self { dir, disk: disk_path, mounted: false };
        if let (Some(path), Some(bytes)) = (&mount.disk, disk) {
            File::create_new(path)?.set_len(bytes)?;
            let made = Command::new("mkfs.ext4").arg("-q").arg(path).status();
            ensure!(made.context("no mkfs.ext4")?.success(), "cannot make an ext4");
        }
        let what = mount.disk.as_deref().unwrap_or(Path::new("none"));
        let mut command = Command::new("mount");
        command.args(["-t", kind, "-o", options]).arg(what).arg(&mount.dir);
        let status = command.status()?;
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

    /// Storage that hangs: whoever writes to it waits until what this gives is dropped, and cannot
    /// be killed before (`FIFREEZE`). So that has to go before whoever is awaited. It ends with
    /// this process, too, however that ends.
    ///
    /// # Errors
    /// When fsfreeze(8) refuses.
    pub fn freeze(&self) -> anyhow::Result<Frozen> {
        // The end of its input is that of this process as well; a signal to its group is not.
        const KEEP: &str = "fsfreeze -f \"$1\" || exit 1; echo frozen; read -r _; \
                            fsfreeze -u \"$1\"";
        let mut command = Command::new("sh");
        command.args(["-c", KEEP, "sh"]).arg(&self.dir).process_group(0);
        let mut keeper =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("no sh")?;
        let said = keeper.stdout.take().map(BufReader::new).context("no output")?.lines().next();
        let frozen = Frozen { keeper };
        ensure!(said.is_some_and(|line| line.is_ok_and(|line| line == "frozen")), "not frozen");
        Ok(frozen)
    }
}

/// A file system to which nobody can write until this is dropped.
#[derive(Debug)]
pub struct Frozen {
    keeper: Child,
}

impl Drop for Frozen {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted {
            let _ = Command::new("umount").arg(&self.dir).stderr(Stdio::null()).status();
        }
        let _ = std::fs::remove_dir(&self.dir);
        if let Some(disk) = &self.disk {
            let _ = std::fs::remove_file(disk);
        }
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
