//! Huge pages for a test: reserved on the host and mounted, and given back afterwards.
//!
//! Keeps one promise: a test that cannot have them says so aloud. They are taken from the free
//! memory of the host, which needs root; a test that is killed outright leaves them reserved.

use std::path::Path;

use anyhow::{Context, ensure};
use godwit_units::ByteCount;

use crate::mount::Mount;
use crate::skip::skip;

/// The sizes of huge pages that processors have.
const SMALL: u64 = 2 << 20;
const GIANT: u64 = 1 << 30;

/// A hugetlbfs with pages of one size; dropping it unmounts it and gives the pages back.
#[derive(Debug)]
pub struct HugePages {
    mount: Mount,
    // Given back after they are out of use: fields are dropped in order.
    _reserved: Reserved,
}

impl HugePages {
    /// Reserves `bytes` in pages of 2 MiB for `test`, or says that it is skipped.
    #[must_use]
    pub fn for_test(test: &str, bytes: ByteCount) -> Option<Self> {
        Self::of(test, SMALL, bytes)
    }

    /// The same in pages of 1 GiB, of which many hosts have none to give once they have run for a
    /// while.
    #[must_use]
    pub fn giant_for_test(test: &str, bytes: ByteCount) -> Option<Self> {
        Self::of(test, GIANT, bytes)
    }

    fn of(test: &str, size: u64, bytes: ByteCount) -> Option<Self> {
        let made = Self::reserve(size, bytes);
        if let Err(problem) = &made {
            skip(test, format_args!("no huge pages: {problem:#}"));
        }
        made.ok()
    }

    fn reserve(size: u64, bytes: ByteCount) -> anyhow::Result<Self> {
        let file = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", size >> 10);
        let reserved = Reserved { before: number(&file)?, file };
        let wanted = reserved.before + bytes.0.div_ceil(size);
        std::fs::write(&reserved.file, wanted.to_string())
            .with_context(|| format!("cannot write {}", reserved.file))?;
        let got = number(&reserved.file)?;
        ensure!(got >= wanted, "the host gives {got} of {wanted}");
        let mount = Mount::new("hugetlbfs", &format!("pagesize={}M", size >> 20))?;
        Ok(Self { mount, _reserved: reserved })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.mount.dir()
    }
}

/// Puts the number of reserved pages back.
#[derive(Debug)]
struct Reserved {
    before: u64,
    file: String,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.file, self.before.to_string());
    }
}

fn number(path: &str) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    text.trim().parse().with_context(|| format!("{path} holds no number"))
}
