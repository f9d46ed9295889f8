//! Huge pages for a test: reserved on the host and mounted, and given back afterwards.
//!
//! Keeps one promise: a test that cannot have them says so aloud. They are taken from the free
//! memory of the host, which needs root; a test that is killed outright leaves them reserved.

use std::path::Path;

use anyhow::{Context, ensure};
use godwit_units::ByteCount;

use crate::mount::Mount;
use crate::skip::skip;

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
const SIZE: u64 = 2 << 20;

/// A hugetlbfs with pages of 2 MiB; dropping it unmounts it and gives the pages back.
#[derive(Debug)]
pub struct HugePages {
    mount: Mount,
    // Given back after they are out of use: fields are dropped in order.
    _reserved: Reserved,
}

impl HugePages {
    /// Reserves `bytes` for `test`, or says that it is skipped.
    #[must_use]
    pub fn for_test(test: &str, bytes: ByteCount) -> Option<Self> {
        let made = Self::reserve(bytes);
        if let Err(problem) = &made {
            skip(test, format_args!("no huge pages: {problem:#}"));
        }
        made.ok()
    }

    fn reserve(bytes: ByteCount) -> anyhow::Result<Self> {
        let reserved = Reserved { before: number(RESERVED)? };
        let wanted = reserved.before + bytes.0.div_ceil(SIZE);
        std::fs::write(RESERVED, wanted.to_string())
            .with_context(|| format!("cannot write {RESERVED}"))?;
        let got = number(RESERVED)?;
        ensure!(got >= wanted, "the host gives {got} of {wanted}");
        Ok(Self { mount: Mount::new("hugetlbfs", "pagesize=2M")?, _reserved: reserved })
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
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let _ = std::fs::write(RESERVED, self.before.to_string());
    }
}

fn number(path: &str) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    text.trim().parse().with_context(|| format!("{path} holds no number"))
}
