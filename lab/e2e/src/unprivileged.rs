//! A QEMU that may not handle faults of the kernel by the system call alone.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use godwit_testbed::{QemuBuild, skip};

/// Where userfaultfds are made for a process that may not call for them.
pub const USERFAULTFD: &str = "/dev/userfaultfd";
/// Where it is 1 every process may.
const SETTING: &str = "/proc/sys/vm/unprivileged_userfaultfd";

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A QEMU without CAP_SYS_PTRACE, as an unprivileged one is.
#[derive(Debug)]
pub struct Unprivileged {
    script: PathBuf,
    /// What is started in its place.
    pub build: QemuBuild,
}

impl Unprivileged {
    /// One of `build`; `None`, and a word about it, where `test` cannot have it.
    ///
    /// # Errors
    /// When no script can be written.
    pub fn new(test: &str, build: &QemuBuild) -> anyhow::Result<Option<Self>> {
        let all_may = std::fs::read_to_string(SETTING).is_ok_and(|text| text.trim() == "1");
        let why = if Command::new("setpriv").arg("--version").output().is_err() {
            "there is no setpriv(1)"
        } else if all_may {
            "vm.unprivileged_userfaultfd is 1"
        } else if !Path::new(USERFAULTFD).exists() {
            "there is no /dev/userfaultfd"
        } else {
            return Self::made(build).map(Some);
        };
        skip(test, why);
        Ok(None)
    }

    fn made(build: &QemuBuild) -> anyhow::Result<Self> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("godwit-unprivileged-{}-{number}", std::process::id());
        let script = std::env::temp_dir().join(name);
        let program = build.program.display();
        let words = "setpriv --bounding-set -sys_ptrace --inh-caps -sys_ptrace";
        std::fs::write(&script, format!("#!/bin/sh\nexec {words} -- {program} \"$@\"\n"))?;
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
        let build = QemuBuild { program: script.clone(), ..build.clone() };
        Ok(Self { script, build })
    }
}

impl Drop for Unprivileged {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.script);
    }
}
