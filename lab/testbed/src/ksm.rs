//! The kernel's merging of equal pages (KSM, Documentation/admin-guide/mm/ksm.rst) at full speed,
//! for tests of what it does to guests that move.
//!
//! Keeps one promise: dropping it puts back how the host merges.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::skip::skip;

const DIR: &str = "/sys/kernel/mm/ksm";

/// One test at a time has it.
static ONE: Mutex<()> = Mutex::new(());

/// KSM that scans all the time.
#[derive(Debug)]
pub struct Ksm {
    before: Vec<(&'static str, String)>,
    _one: MutexGuard<'static, ()>,
}

impl Ksm {
    /// Switches it on for `test`, or says that it is skipped.
    #[must_use]
    pub fn for_test(test: &str) -> Option<Self> {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ksm = Self { before: Vec::new(), _one };
        for (name, value) in [("sleep_millisecs", "0"), ("pages_to_scan", "5000"), ("run", "1")] {
            let path = Path::new(DIR).join(name);
            let before = std::fs::read_to_string(&path);
            match before.and_then(|before| std::fs::write(path, value).map(|()| before)) {
                Ok(before) => ksm.before.insert(0, (name, before)),
                Err(error) => {
                    skip(test, format_args!("no KSM here, or no right to it: {error}"));
                    return None;
                }
            }
        }
        Some(ksm)
    }

    /// Pages of process `pid` that are merged.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn merged(&self, pid: i32) -> anyhow::Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/ksm_merging_pages"))?;
        Ok(text.trim().parse()?)
    }

    /// Waits until `count` pages of process `pid` are merged.
    ///
    /// # Errors
    /// When they are not within `limit`.
    pub fn wait_for(&self, pid: i32, count: u64, limit: Duration) -> anyhow::Result<()> {
        let until = Instant::now() + limit;
        loop {
            let merged = self.merged(pid)?;
            if merged >= count {
                return Ok(());
            }
            ensure!(Instant::now() < until, "{merged} pages were merged within {limit:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        for (name, before) in &self.before {
            let _ = std::fs::write(Path::new(DIR).join(name), before);
        }
    }
}
