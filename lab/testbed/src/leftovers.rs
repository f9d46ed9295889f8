//! What a virtual machine leaves on the host: a directory, a RAM file, a process; and what a link
//! of its leaves, a network namespace.
//!
//! Keeps one promise: they go away with their owner, at the latest when the next one starts.
//! Dropping a [`Place`] removes its files; what a test left that was killed outright is found by
//! the number of its process in the names, and swept away, the QEMU too. Nothing that another
//! living process made is touched.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};

use crate::ip;

const PREFIX: &str = "godwit-vm-";
pub(crate) const SHARED_MEMORY: &str = "/dev/shm";
/// Where ip-netns(8) keeps them.
const NAMESPACES: &str = "/run/netns";
/// QEMU writes its process number here.
const PID_FILE: &str = "pid";

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A name that no other process takes, which says whose it is; and a number that this process gave
/// nothing else.
pub(crate) fn unique() -> (String, u32) {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    (format!("{PREFIX}{}-{number}", std::process::id()), number)
}

/// The private directory and the RAM file of one virtual machine.
#[derive(Debug)]
pub(crate) struct Place {
    dir: PathBuf,
    ram: PathBuf,
}

impl Place {
    /// A place for one more machine of this process.
    pub(crate) fn new() -> anyhow::Result<Self> {
        Self::with_ram_in(None)
    }

    /// The same with the RAM file in another directory than /dev/shm.
    pub(crate) fn with_ram_in(ram_in: Option<&Path>) -> anyhow::Result<Self> {
        if NEXT.load(Ordering::Relaxed) == 0 {
            sweep();
        }
        let (name, _) = unique();
        let ram = ram_in.unwrap_or(Path::new(SHARED_MEMORY)).join(&name);
        let place = Self { dir: std::env::temp_dir().join(&name), ram };
        std::fs::create_dir(&place.dir)
            .with_context(|| format!("cannot create {}", place.dir.display()))?;
        Ok(place)
    }

    /// The private directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The file `name` in the private directory.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Where QEMU writes its process number.
    pub(crate) fn pid_file(&self) -> PathBuf {
        self.file(PID_FILE)
    }

    /// The RAM file.
    pub(crate) fn ram(&self) -> &Path {
        &self.ram
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
        let _ = std::fs::remove_file(&self.ram);
    }
}

/// Removes what processes left that have ended.
fn sweep() {
    for dir in orphans(&std::env::temp_dir()) {
        end_qemus(&dir);
        let _ = std::fs::remove_dir_all(&dir);
    }
    for ram in orphans(Path::new(SHARED_MEMORY)) {
        let _ = std::fs::remove_file(&ram);
    }
    for namespace in orphans(Path::new(NAMESPACES)) {
        namespace
            .file_name()
            .and_then(|name| name.to_str())
            .into_iter()
            .for_each(ip::remove_namespace);
    }
}

/// The entries of `dir` whose names are ours and say that they belong to a process that is no more.
fn orphans(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let orphaned = |path: &PathBuf| {
        let owner = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_prefix(PREFIX)?.split('-').next());
        let owner: Option<u32> = owner.and_then(|owner| owner.parse().ok());
        owner.is_some_and(|owner| !Path::new(&format!("/proc/{owner}")).exists())
    };
    entries.flatten().map(|entry| entry.path()).filter(orphaned).collect()
}

/// Ends the QEMUs whose numbers are in `dir`, written there by themselves or by a libvirt that has
/// its directories there, if such a number still is such a QEMU: its command line names who made
/// `dir`.
pub(crate) fn end_qemus(dir: &Path) {
    let name = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some((owner, _)) = name.rsplit_once('-') else { return };
    let of_libvirt = std::fs::read_dir(dir.join("run/qemu")).into_iter().flatten().flatten();
    let of_libvirt = of_libvirt.map(|entry| entry.path());
    let of_libvirt = of_libvirt.filter(|path| path.extension().is_some_and(|it| it == PID_FILE));
    for file in of_libvirt.chain([dir.join(PID_FILE)]) {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let Some(pid) = text.trim().parse().ok().and_then(Pid::from_raw) else { continue };
        let line = std::fs::read(format!("/proc/{}/cmdline", text.trim())).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains(&format!("{owner}-")) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn a_place_goes_away_with_its_owner() {
        let place = Place::new().unwrap();
        std::fs::write(place.ram(), b"ram").unwrap();
        std::fs::write(place.file("x"), b"x").unwrap();
        let (dir, ram) = (place.dir.clone(), place.ram.clone());
        drop(place);
        assert!(!dir.exists() && !ram.exists());
    }

    #[test]
    fn only_the_dead_have_orphans() {
        let here = Place::new().unwrap();
        let within = |name: &str| here.file(name);
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let orphan = within(&format!("{PREFIX}{}-0", ended.id()));
        for path in
            [&orphan, &within(&format!("{PREFIX}{}-0", std::process::id())), &within("other")]
        {
            std::fs::create_dir(path).unwrap();
        }
        assert_eq!(orphans(&here.dir), [orphan]);
    }

    #[test]
    fn what_a_libvirt_started_is_ended_and_nobody_else() {
        let place = Place::new().unwrap();
        let directory = place.file("run").join("qemu");
        std::fs::create_dir_all(&directory).unwrap();
        let run = |word: &str, file: &str| {
            let script = ["-c", "read word", word];
            let child = std::process::Command::new("sh").args(script).stdin(Stdio::piped()).spawn();
            let child = child.unwrap();
            std::fs::write(directory.join(file), child.id().to_string()).unwrap();
            child
        };
        let guest = format!("guest={}", place.dir.file_name().unwrap().to_str().unwrap());
        let mut own = run(&guest, "a.pid");
        let mut other = run("guest=web01", "b.pid");
        end_qemus(place.dir());
        assert!(!own.wait().unwrap().success());
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
