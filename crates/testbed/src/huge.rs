//! Huge pages for a test: reserved on the host and mounted, and given back afterwards.
//!
//! Keeps one promise: a test that cannot have them says so aloud. They are taken from the free memory of the host, which needs
//! root; a test that is killed outright leaves them reserved.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use godwit_units::ByteCount;

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
const SIZE: u64 = 2 << 20;

/// A hugetlbfs with pages of 2 MiB; dropping it unmounts it and gives the pages back.
#[derive(Debug)]
pub struct HugePages {
    dir: PathBuf,
    before: u64,
}

impl HugePages {
    /// Reserves `bytes` for `test`, or says that it is skipped.
    #[must_use]
    pub fn for_test(test: &str, bytes: ByteCount) -> Option<Self> {
        let made = Self::reserve(bytes);
        if let Err(problem) = &made {
            // Not eprintln: the test harness would hold that back.
            let _ = writeln!(std::io::stderr(), "SKIPPED {test}: no huge pages: {problem:#}");
        }
        made.ok()
    }

    fn reserve(bytes: ByteCount) -> anyhow::Result<Self> {
        let before = number(RESERVED)?;
        let dir = std::env::temp_dir().join(format!("godwit-huge-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let pages = Self { dir, before };
        let wanted = before + bytes.0.div_ceil(SIZE);
        std::fs::write(RESERVED, wanted.to_string()).with_context(|| format!("cannot write {RESERVED}"))?;
        let got = number(RESERVED)?;
        ensure!(got >= wanted, "the host gives {got} of {wanted}");
        let mut mount = Command::new("mount");
        let status = mount.args(["-t", "hugetlbfs", "-o", "pagesize=2M", "none"]).arg(&pages.dir).status()?;
        ensure!(status.success(), "cannot mount a hugetlbfs at {}", pages.dir.display());
        Ok(pages)
    }

    /// Where it is mounted.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.dir).stderr(std::process::Stdio::null()).status();
        let _ = std::fs::remove_dir(&self.dir);
        let _ = std::fs::write(RESERVED, self.before.to_string());
    }
}

fn number(path: &str) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    text.trim().parse().with_context(|| format!("{path} holds no number"))
}
