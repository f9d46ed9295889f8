//! Control groups that freeze what is in them, of both versions.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A control group of this test's own.
pub(crate) struct Freezer {
    path: PathBuf,
    /// The file that freezes and thaws, and the words for it.
    file: &'static str,
    words: [&'static str; 2],
}

impl Freezer {
    /// One of each version that this host has.
    pub(crate) fn all() -> Vec<Self> {
        let first = Self::make("/sys/fs/cgroup/freezer", "freezer.state", ["FROZEN", "THAWED"]);
        let unified = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].into_iter();
        let second = unified.filter(|path| Path::new(path).join("cgroup.controllers").exists());
        let second = second.filter_map(|path| Self::make(path, "cgroup.freeze", ["1", "0"]));
        first.into_iter().chain(second.take(1)).collect()
    }

    fn make(parent: &str, file: &'static str, words: [&'static str; 2]) -> Option<Self> {
        let path = Path::new(parent).join(format!("godwit-attach-{}", std::process::id()));
        if !Path::new(parent).exists() || fs::create_dir(&path).is_err() {
            return None;
        }
        let freezer = Self { path, file, words };
        freezer.path.join(file).exists().then_some(freezer)
    }

    pub(crate) fn name(&self) -> &'static str {
        self.file
    }

    pub(crate) fn freeze(&self, pid: i32) {
        fs::write(self.path.join("cgroup.procs"), pid.to_string()).unwrap();
        fs::write(self.path.join(self.file), self.words[0]).unwrap();
        let began = Instant::now();
        while !self.is_frozen() && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_frozen(&self) -> bool {
        let read = |file| fs::read_to_string(self.path.join(file)).unwrap_or_default();
        read("freezer.state").trim() == "FROZEN" || read("cgroup.events").contains("frozen 1")
    }

    pub(crate) fn thaw(&self) {
        fs::write(self.path.join(self.file), self.words[1]).unwrap();
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.thaw();
        let began = Instant::now();
        // Until what was in it has ended.
        while fs::remove_dir(&self.path).is_err() && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
