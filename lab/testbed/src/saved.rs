//! States of VMs in files, from which others start.
//!
//! Keeps two promises: a state that is kept was made of these programs, for this QEMU and this kind
//! of machine; and whoever looks for one finds a whole one or none, while others make it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_qemu::monitor::Qmp;
use serde_json::{Value, json};

use crate::guest::target_dir;
use crate::leftovers::unique;
use crate::qemu_build::QemuBuild;

const LIMIT: Duration = Duration::from_secs(60);
/// How long what was made of other programs is kept: tests and benchmarks have programs of
/// different builds, and may run at once.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// From this version on QEMU leaves memory alone that is zero in a saved state.
const MAPPED_RAM: (u32, u32, u32) = (9, 0, 0);

/// A VM's state in a file, or the place for it.
#[derive(Debug)]
pub(crate) struct SavedState<'a> {
    build: &'a QemuBuild,
    dir: PathBuf,
    /// What the names of all states begin with that are made of the same programs.
    made_of: String,
    path: PathBuf,
}

impl<'a> SavedState<'a> {
    /// That of machines of this `kind` in `build`, made of `programs`, in the directory `dir` of
    /// target/guest.
    pub(crate) fn new(
        build: &'a QemuBuild,
        dir: &str,
        programs: impl Hash,
        kind: impl Hash,
    ) -> Self {
        let hash = |of: &dyn Fn(&mut DefaultHasher)| {
            let mut hasher = DefaultHasher::new();
            of(&mut hasher);
            hasher.finish()
        };
        let made_of = format!("{:016x}-", hash(&|hasher| programs.hash(hasher)));
        let kind = hash(&|hasher| (build.version, &kind).hash(hasher));
        let dir = target_dir().join("guest").join(dir);
        let path = dir.join(format!("{made_of}{kind:016x}"));
        Self { build, dir, made_of, path }
    }

    /// Whether it is there.
    pub(crate) fn is_kept(&self) -> bool {
        self.path.exists()
    }

    /// Stops the guest of the QEMU behind `qmp` and saves its state.
    pub(crate) fn save(&self, qmp: &mut Qmp) -> anyhow::Result<()> {
        qmp.execute("stop", Value::Null)?;
        self.set_mapped(qmp, true)?;
        let dir = self.dir.display();
        std::fs::create_dir_all(&self.dir).with_context(|| format!("cannot create {dir}"))?;
        self.remove_others();
        // Others may be saving the same one.
        let new = self.dir.join(format!("{}{}", self.made_of, unique().0));
        qmp.execute("migrate", json!({ "uri": self.uri("cat >", &new) }))?;
        let saved = await_end(qmp).and_then(|()| Ok(std::fs::rename(&new, &self.path)?));
        if saved.is_err() {
            let _ = std::fs::remove_file(&new);
        }
        saved
    }

    /// Loads it into the QEMU behind `qmp`, which waits for one, and lets the guest run.
    pub(crate) fn load(&self, qmp: &mut Qmp) -> anyhow::Result<()> {
        self.set_mapped(qmp, true)?;
        qmp.execute("migrate-incoming", json!({ "uri": self.uri("cat", &self.path) }))?;
        await_end(qmp)?;
        self.set_mapped(qmp, false)?;
        qmp.execute("cont", Value::Null)?;
        qmp.forget_events();
        Ok(())
    }

    /// Older QEMUs know no files, but commands.
    fn uri(&self, command: &str, path: &Path) -> String {
        let path = path.display();
        if self.build.version >= MAPPED_RAM {
            format!("file:{path}")
        } else {
            format!("exec:{command} {path}")
        }
    }

    fn set_mapped(&self, qmp: &mut Qmp, state: bool) -> anyhow::Result<()> {
        if self.build.version < MAPPED_RAM {
            return Ok(());
        }
        let mapped = json!({ "capability": "mapped-ram", "state": state });
        qmp.execute("migrate-set-capabilities", json!({ "capabilities": [mapped] }))?;
        Ok(())
    }

    /// Removes what was made of other programs.
    fn remove_others(&self) {
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let made = entry.metadata().and_then(|file| file.modified()).ok();
            let age = made.and_then(|made| made.elapsed().ok());
            let is_old = age.is_some_and(|age| age > KEPT);
            if is_old && !entry.file_name().to_string_lossy().starts_with(&self.made_of) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

fn await_end(qmp: &mut Qmp) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    loop {
        let info = qmp.execute("query-migrate", Value::Null)?;
        match info["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => anyhow::bail!("QEMU says {info}"),
            _ => ensure!(Instant::now() < until, "QEMU is not done within {LIMIT:?}: {info}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
