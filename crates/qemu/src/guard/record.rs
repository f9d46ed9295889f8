//! The record of what godwit has changed in a QEMU: a file in the run directory, a line of JSON for
//! each change.
//!
//! The name says whose it is, each line what would have to be undone from then on. A line is
//! written before what it tells of is done, so one that was cut off tells of something that was not
//! done: the last whole line counts. The guardian holds a lock of the file for as long as it lives.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};

use crate::QemuError;
use crate::disk_limits::DiskLimits;
use crate::libvirt::Definition;
use crate::mark::{Mark, start_time};
use crate::proxmox::ProxmoxVm;
use crate::run_directory;
use crate::settings::MigrationSettings;

/// How far godwit has come, as far as it matters to whoever stands in for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Source: the guest is as it was found.
    Copying,
    /// Source: `migrate` was or is about to be issued, which stops the guest. The guest is the
    /// source's.
    Stopping,
    /// Source: COMMIT was or is about to be sent.
    HandingOver,
    /// Destination: it took in nothing but pages.
    Waiting,
    /// Destination: it was told to load. The guest is the source's.
    Loading,
    /// Destination: COMMIT came. The guest is the destination's.
    Starting,
    /// Destination: the guest is to go, and the source may have been told so.
    Discarding,
}

impl Stage {
    pub(super) const ALL: [Self; 7] = [
        Self::Copying,
        Self::Stopping,
        Self::HandingOver,
        Self::Waiting,
        Self::Loading,
        Self::Starting,
        Self::Discarding,
    ];

    fn word(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::Stopping => "stopping",
            Self::HandingOver => "handing-over",
            Self::Waiting => "waiting",
            Self::Loading => "loading",
            Self::Starting => "starting",
            Self::Discarding => "discarding",
        }
    }
}

/// What would have to be undone.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Left {
    pub(crate) stage: Stage,
    /// Whether the guest ran when godwit came.
    pub(crate) was_running: bool,
    pub(crate) settings: Option<MigrationSettings>,
    /// Whether QEMU may have been handed what it is to save its devices into.
    pub(crate) fd_set: bool,
    pub(crate) limits: DiskLimits,
    /// Whether there may be bitmaps, exports or a server with godwit's mark.
    pub(crate) disks: bool,
    /// What libvirt is to keep of a domain that has come to run here.
    pub(crate) definition: Option<Definition>,
    /// The VM of Proxmox's that was locked there, if its guest is this side's.
    pub(crate) lock: Option<ProxmoxVm>,
    /// Whether godwit has started this QEMU, which ends if it does not come to run the guest.
    pub(crate) started: bool,
    /// Where both sides are one godwit's: the file that is made right before the guest becomes the
    /// destination's. Whether it is there settles for both guardians whose the guest is.
    pub(crate) handover: Option<PathBuf>,
    /// Files that this QEMU has made and others wait for: they go if it ends without the guest.
    pub(crate) staged: Vec<PathBuf>,
}

impl Left {
    pub(crate) fn at(stage: Stage, was_running: bool) -> Self {
        Self {
            stage,
            was_running,
            settings: None,
            fd_set: false,
            limits: DiskLimits::default(),
            disks: false,
            definition: None,
            lock: None,
            started: false,
            handover: None,
            staged: Vec::new(),
        }
    }

    /// Removes what this QEMU has left, which has ended and never had the guest.
    pub(super) fn remove_staged(&self) {
        for path in &self.staged {
            let _ = std::fs::remove_file(path);
        }
    }

    /// How far the godwit had come that is gone, by all that it has left.
    pub(super) fn settled(&self) -> Stage {
        match (self.stage, &self.handover) {
            (Stage::HandingOver, Some(file)) if !file.exists() => Stage::Stopping,
            (Stage::Loading, Some(file)) if file.exists() => Stage::Starting,
            (stage, _) => stage,
        }
    }

    /// Has Proxmox take its lock back, where the VM was locked there.
    pub(super) fn unlock(&self) -> Result<(), QemuError> {
        self.lock.as_ref().map_or(Ok(()), ProxmoxVm::unlock)
    }

    /// Whether QEMU is as it was found.
    pub(crate) fn is_nothing(&self) -> bool {
        matches!(self.stage, Stage::Copying | Stage::Waiting)
            && self.settings.is_none()
            && !self.fd_set
            && self.limits.is_empty()
            && !self.disks
            && self.definition.is_none()
            && self.lock.is_none()
            && !self.started
    }

    fn to_json(&self, qemu: &Qemu) -> Value {
        json!({
            "qemu": qemu.pid,
            "qemu_started": qemu.started,
            "boot": qemu.boot,
            "stage": self.stage.word(),
            "was_running": self.was_running,
            "settings": self.settings.as_ref().map(MigrationSettings::to_json),
            "fd_set": self.fd_set,
            "limits": self.limits.to_json(),
            "disks": self.disks,
            "definition": self.definition,
            "lock": self.lock,
            "started": self.started,
            "handover": self.handover,
            "staged": self.staged,
        })
    }

    fn from_json(value: &Value) -> Option<Self> {
        let stage = Stage::ALL.into_iter().find(|stage| value["stage"] == stage.word())?;
        let settings = match &value["settings"] {
            Value::Null => None,
            settings => Some(MigrationSettings::from_json(settings)?),
        };
        Some(Self {
            stage,
            was_running: value["was_running"].as_bool()?,
            settings,
            fd_set: value["fd_set"].as_bool().unwrap_or(false),
            limits: DiskLimits::from_json(&value["limits"])?,
            disks: value["disks"].as_bool()?,
            definition: serde_json::from_value(value["definition"].clone()).ok()?,
            lock: serde_json::from_value(value["lock"].clone()).ok()?,
            started: value["started"].as_bool().unwrap_or(false),
            handover: value["handover"].as_str().map(PathBuf::from),
            staged: serde_json::from_value(value["staged"].clone()).unwrap_or_default(),
        })
    }
}

/// A QEMU process, once and for all.
#[derive(Clone, Debug, PartialEq)]
struct Qemu {
    pid: i32,
    started: u64,
    /// Start times count from the start of the host (`/proc/sys/kernel/random/boot_id`, random(4)).
    boot: String,
}

impl Qemu {
    fn of(pid: i32) -> Option<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let started = start_time(u32::try_from(pid).ok()?)?;
        Some(Self { pid, started, boot: boot.trim().to_owned() })
    }

    fn from_json(value: &Value) -> Option<Self> {
        let pid = i32::try_from(value["qemu"].as_i64()?).ok()?;
        let boot = value["boot"].as_str()?.to_owned();
        Some(Self { pid, started: value["qemu_started"].as_u64()?, boot })
    }
}

/// A record.
#[derive(Debug)]
pub(crate) struct Record {
    file: File,
    path: PathBuf,
    qemu: Qemu,
    left: Left,
}

impl Record {
    /// Where the one of this process for the QEMU `pid` is to be, in a directory that is there.
    pub(super) fn place(pid: i32) -> io::Result<PathBuf> {
        let dir = run_directory::path();
        run_directory::make(&dir, user()).map_err(io::Error::other)?;
        Ok(dir.join(format!("{}{}", Mark::own(), end(pid))))
    }

    /// A new one for the QEMU `pid` at `path`, of which the guardian has made an empty file.
    pub(super) fn begin(path: &Path, pid: i32, left: Left) -> io::Result<Self> {
        let qemu = Qemu::of(pid).ok_or(io::ErrorKind::NotFound)?;
        let file = append(path)?;
        file.set_len(0)?;
        let mut record = Self { file, path: path.to_owned(), qemu, left };
        record.note(|_| {})?;
        Ok(record)
    }

    /// The one at `path`, as it was left; `None` if it was never begun.
    pub(super) fn open(path: &Path) -> io::Result<Option<Self>> {
        let text = std::fs::read_to_string(path)?;
        let file = OpenOptions::new().append(true).open(path)?;
        let values = text.lines().rev().filter_map(|line| serde_json::from_str(line).ok());
        let mut states =
            values.filter_map(|value| Some((Qemu::from_json(&value)?, Left::from_json(&value)?)));
        Ok(states.next().map(|(qemu, left)| Self { file, path: path.to_owned(), qemu, left }))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn left(&self) -> &Left {
        &self.left
    }

    pub(super) fn pid(&self) -> i32 {
        self.qemu.pid
    }

    /// Whether the QEMU is the one that it was, and has not ended.
    pub(super) fn names_a_living_qemu(&self) -> bool {
        Qemu::of(self.qemu.pid).as_ref() == Some(&self.qemu)
    }

    /// Writes `change` down. After an error nothing has changed.
    pub(super) fn note(&mut self, change: impl FnOnce(&mut Left)) -> io::Result<()> {
        let mut left = self.left.clone();
        change(&mut left);
        // The first line feed ends what an earlier attempt left unfinished, on a file system that
        // was full.
        self.file.write_all(format!("\n{}\n", left.to_json(&self.qemu)).as_bytes())?;
        self.left = left;
        Ok(())
    }

    /// Whether somebody has taken it away: what is written goes nowhere.
    pub(super) fn is_gone(&self) -> bool {
        self.file.metadata().map_or(true, |about| about.nlink() == 0)
    }

    pub(super) fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Opens the file at `path`, and makes it if need be.
fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Makes the record at `path` guarded for as long as what is returned lives (flock(2)). A file that
/// is not there yet is made here, so that there is none that nobody would remove.
pub(super) fn hold(path: &Path) -> io::Result<File> {
    let file = append(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

/// The QEMU that the name of the record at `path` tells.
pub(super) fn qemu_of(path: &Path) -> Option<i32> {
    path.file_name()?.to_str()?.rsplit_once("-guard-")?.1.parse().ok()
}

fn user() -> u32 {
    rustix::process::getuid().as_raw()
}

/// What the name of a record for the QEMU `pid` ends with; the mark comes first, as everywhere.
fn end(pid: i32) -> String {
    format!("-guard-{pid}")
}

/// Whose the record at `path` is.
pub(super) fn owner(path: &Path) -> Option<Mark> {
    Mark::of(path.file_name()?.to_str()?)
}

/// Whether a guardian lives that has this record.
fn is_guarded(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
}

/// All records for QEMUs for which `wanted` answers yes to the end of the name.
fn paths(wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let dir = run_directory::path();
    // What others could have written is nothing to act on.
    if run_directory::check(&dir, user()).is_err() {
        return Vec::new();
    }
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths
        .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(&wanted))
        .collect()
}

/// Records of the QEMU `pid` whose godwit and guardian are both gone. Those of QEMUs that are gone
/// are removed.
pub(super) fn orphans(pid: i32) -> Vec<Record> {
    let mut orphans = Vec::new();
    for path in paths(|name| name.contains("-guard-")) {
        if owner(&path).is_none_or(Mark::is_alive) || is_guarded(&path) {
            continue;
        }
        match Record::open(&path) {
            Ok(Some(record)) if !record.names_a_living_qemu() => {
                record.remove();
            }
            Ok(Some(record)) if record.qemu.pid == pid => orphans.push(record),
            // It was never begun.
            Ok(None) => {
                let _ = std::fs::remove_file(&path);
            }
            _ => {}
        }
    }
    orphans
}

/// The godwit that is gone and whose guardian has the monitor of the QEMU `pid`, if there is one.
pub(crate) fn at_work(pid: i32) -> Option<u32> {
    let end = end(pid);
    let guarded = paths(|name| name.ends_with(&end)).into_iter().find(|path| is_guarded(path))?;
    owner(&guarded).filter(|mark| !mark.is_alive()).map(|mark| mark.pid)
}

/// How far the godwit had come that is gone and whose guardian is at work on the QEMU `pid`.
pub(super) fn stage_at_work(pid: i32) -> Option<Stage> {
    let end = end(pid);
    let guarded = paths(|name| name.ends_with(&end)).into_iter().find(|path| is_guarded(path))?;
    owner(&guarded).filter(|mark| !mark.is_alive())?;
    Some(Record::open(&guarded).ok()??.left().settled())
}

/// The other godwit that lives and is at work on the QEMU `pid`, if there is one.
pub(crate) fn in_work(pid: i32) -> Option<u32> {
    let end = end(pid);
    let owners = paths(|name| name.ends_with(&end)).into_iter().filter_map(|path| owner(&path));
    let other = |mark: &Mark| mark.is_alive() && mark.pid != std::process::id();
    owners.filter(|mark| other(mark)).map(|mark| mark.pid).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left() -> Left {
        let settings = MigrationSettings::from_json(&json!({
            "capabilities": [{ "capability": "events", "state": false }],
            "parameters": { "downtime-limit": 300 },
        }));
        let limits = DiskLimits::from_json(
            &json!({ "before": [{ "node": "n", "call": { "id": "d" } }], "ours": [] }),
        );
        let limits = limits.unwrap();
        let (handover, staged) = (Some("/run/x".into()), vec!["/run/y".into()]);
        Left {
            settings,
            fd_set: true,
            limits,
            disks: true,
            handover,
            staged,
            ..Left::at(Stage::HandingOver, true)
        }
    }

    #[test]
    fn what_is_left_is_read_as_it_was_written() {
        let qemu = Qemu::of(std::process::id().cast_signed()).unwrap();
        for stage in Stage::ALL {
            let left = Left { stage, ..left() };
            let value = left.to_json(&qemu);
            assert_eq!(Left::from_json(&value), Some(left));
            assert_eq!(Qemu::from_json(&value).as_ref(), Some(&qemu));
        }
    }

    #[test]
    fn of_two_sides_that_one_godwit_had_exactly_one_has_the_guest() {
        let file = std::env::temp_dir().join(format!("godwit-handover-{}", std::process::id()));
        let at = |stage| Left { handover: Some(file.clone()), ..Left::at(stage, true) }.settled();
        let runs = |stage| matches!(stage, Stage::Stopping | Stage::Starting);
        let _ = std::fs::remove_file(&file);
        for made in [false, true] {
            if made {
                std::fs::write(&file, "").unwrap();
            }
            let (source, destination) = (at(Stage::HandingOver), at(Stage::Loading));
            assert_ne!(runs(source), runs(destination), "{made}");
            assert_eq!(runs(destination), made);
            // Before, and behind, there is no doubt.
            for stage in [Stage::Copying, Stage::Stopping, Stage::Starting, Stage::Discarding] {
                assert_eq!(at(stage), stage);
            }
        }
        std::fs::remove_file(file).unwrap();
        assert_eq!(Left::at(Stage::HandingOver, true).settled(), Stage::HandingOver);
    }

    #[test]
    fn a_line_that_was_cut_off_does_not_count() {
        let dir = std::env::temp_dir().join(format!("godwit-record-{}", std::process::id()));
        let qemu = Qemu::of(std::process::id().cast_signed()).unwrap();
        let whole = format!("\n{}\n", left().to_json(&qemu));
        let next = Left::at(Stage::Copying, true).to_json(&qemu).to_string();
        for cut in 1..next.len() {
            std::fs::write(&dir, format!("{whole}\n{}", &next[..cut])).unwrap();
            assert_eq!(Record::open(&dir).unwrap().unwrap().left, left());
        }
        std::fs::write(&dir, "\n{\"qemu\"").unwrap();
        assert!(Record::open(&dir).unwrap().is_none());
        std::fs::remove_file(dir).unwrap();
    }
}
