//! A disk of the host that is slow to read, for some processes: by the kernel's block I/O control
//! groups.
//!
//! A read that is held back there has its pages pinned already, as on any slow disk: what lands
//! late is what some tests are about.

use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, bail};

use crate::skip::skip;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A control group; dropping it gives its processes back to the group above.
#[derive(Debug)]
pub struct SlowReads {
    group: PathBuf,
    above: PathBuf,
}

impl SlowReads {
    /// Allows so many reads a second from the file system that holds `file`, or says that `test` is
    /// skipped.
    #[must_use]
    pub fn for_test(test: &str, file: &Path, reads: u32) -> Option<Self> {
        let made = Self::new(file, reads);
        if let Err(problem) = &made {
            skip(test, format_args!("reads cannot be slowed down: {problem:#}"));
        }
        made.ok()
    }

    fn new(file: &Path, reads: u32) -> anyhow::Result<Self> {
        let device = std::fs::metadata(file)?.st_dev();
        let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        // Version 1 (Documentation/admin-guide/cgroup-v1/blkio-controller.rst), else version 2.
        let (above, limit, line) = if Path::new("/sys/fs/cgroup/blkio").is_dir() {
            ("/sys/fs/cgroup/blkio", "blkio.throttle.read_iops_device", format!("{device} {reads}"))
        } else {
            ("/sys/fs/cgroup", "io.max", format!("{device} riops={reads}"))
        };
        let above = PathBuf::from(above);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let group = above.join(format!("godwit-slow-{}-{number}", std::process::id()));
        std::fs::create_dir(&group)
            .with_context(|| format!("cannot create {}", group.display()))?;
        let slow = Self { group, above };
        let limit = slow.group.join(limit);
        if !limit.exists() {
            bail!("{} has no {}", slow.above.display(), limit.display());
        }
        std::fs::write(&limit, line)
            .with_context(|| format!("cannot write {}", limit.display()))?;
        Ok(slow)
    }

    /// From now on it is slow for process `pid`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn add(&self, pid: i32) -> anyhow::Result<()> {
        let tasks = self.group.join("cgroup.procs");
        std::fs::write(&tasks, pid.to_string())
            .with_context(|| format!("cannot write {}", tasks.display()))
    }
}

impl Drop for SlowReads {
    fn drop(&mut self) {
        let tasks = std::fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default();
        for task in tasks.lines() {
            let _ = std::fs::write(self.above.join("cgroup.procs"), task);
        }
        let _ = std::fs::remove_dir(&self.group);
    }
}
