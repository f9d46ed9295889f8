//! An upgrade: the guest goes on in another QEMU of this host that has the very memory mapped, so
//! that nothing of it is moved; or has memory of its own, where no other process can have that of
//! the old one.
//!
//! ```text
//!   memory of the back ends                   the new QEMU
//!   named files, mapped shared                maps them by their names; no RAM is offered
//!   memfds and files without a name, shared   maps them by the old QEMU's descriptors; what else
//!                                             is RAM (VGA, firmware) is offered
//!   of the old QEMU alone                     has as much of its own; all RAM is offered
//! ```
//!
//! The engine moves the guest as ever, from a source and to a destination that offer no RAM which
//! stays. What both sides have to know of each other is here: which memory it is, which process is
//! the other one, and under which names the new QEMU opens its sockets while the old one still has
//! the proper ones.
//!
//! Invariant: RAM is left out only where the new QEMU has mapped the same files at the same places
//! as the old one (device, inode and offset), and where neither gives the files' pages back when it
//! ends; and what is offered, no other process has.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use godwit_memory::{NoRoom, Place, RamBlock, host_has};
use godwit_units::PageCount;
use procfs::net::UnixState;
use procfs::process::Process;

use crate::QemuError;
use crate::command_line::options;
use crate::device_state::machine_type;
use crate::find::own_sockets;
use crate::machine::Machine;
use crate::mark::{Mark, leftovers};
use crate::monitor::commands::{QomGet, QueryMemdev};
use crate::ram::{self, Ram, StateBy, is_same};
use crate::run_directory;

/// What the file is called that says that the guest is the new QEMU's, behind whose it is.
const HANDOVER: &str = "-handover";
/// Guardians have looked at it long before.
const HANDOVER_AGE: Duration = Duration::from_secs(3600);
/// What stands before the number of the godwit in whose upgrade a name was given.
const STAGED: &str = ".godwit-";
/// Machine types whose start leaves guest memory alone while a guest is awaited; those of other
/// processors may write a device tree to it (hw/ppc/spapr.c, `spapr_machine_reset`).
const MACHINES: [&str; 2] = ["pc-", "microvm"];
/// What keeps memory where it is.
const CURE: &str = "start the VM with -object memory-backend-file,id=ID,size=SIZE,\
                    mem-path=/dev/shm/NAME,share=on and -machine memory-backend=ID, and nothing is \
                    copied any more";

/// A QEMU that came to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Successor {
    /// Its process.
    pub pid: i32,
    /// Its version: major, minor, micro.
    pub version: (u64, u64, u64),
}

/// A guest's memory while the guest changes its process: it stays where it is, or is copied.
#[derive(Debug)]
pub struct InPlace {
    old: i32,
    /// What both QEMUs are to have: all back ends' memory, or none.
    staying: Vec<RamBlock>,
    /// What the new QEMU is to have of its own, which is offered to it.
    moving: Arc<Vec<RamBlock>>,
    /// Whether the blocks that stay are all that there are.
    whole: bool,
    /// The back ends whose files have no name, and where the new QEMU finds these.
    descriptors: Vec<(String, PathBuf)>,
    new: OnceLock<Successor>,
    names: Vec<Name>,
    handover: PathBuf,
}

/// A name of a file that the old QEMU has, and the new one is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Name {
    /// Under which the old QEMU made it.
    old: PathBuf,
    /// Under which the new one makes it.
    staged: PathBuf,
    /// Under which others know it.
    known: PathBuf,
}

impl Name {
    fn new(old: PathBuf) -> Self {
        let known = known(&old);
        let mut staged = known.clone().into_os_string();
        staged.push(format!("{STAGED}{}", std::process::id()));
        Self { old, staged: staged.into(), known }
    }
}

/// The name without what an earlier upgrade has added.
fn known(path: &Path) -> PathBuf {
    let text = path.to_string_lossy();
    let stem = text.rsplit_once(STAGED).filter(|(_, number)| number.parse::<u32>().is_ok());
    stem.map_or_else(|| path.to_owned(), |(stem, _)| PathBuf::from(stem))
}

impl InPlace {
    /// Looks whether the guest of `machine` can go on in another process: its RAM is `ram`, and the
    /// device state is had of it by `state_by`. Changes nothing.
    ///
    /// # Errors
    /// What stands against it, with the cure.
    pub(crate) fn look(
        machine: &mut Machine,
        ram: &Arc<Vec<RamBlock>>,
        (state_by, back_ends): (StateBy, bool),
    ) -> Result<Self, QemuError> {
        let pid = machine.pid;
        check_user(pid)?;
        if back_ends {
            return Err(refused(
                "the VM has a device of another process's (vhost-user), which serves one QEMU: \
                 this guest moves by `godwit migrate`, to a QEMU with a back end of its own",
            ));
        }
        let whole = state_by == StateBy::Migration;
        let Parted { staying, moving, descriptors } = match whole {
            // The source's own blocks are its own to look at.
            true => Parted { staying: Ram::main(machine, false)?, ..Parted::default() },
            false => part(machine, ram)?,
        };
        let directory = run_directory::path();
        let names = names(pid)?.into_iter().map(Name::new).collect();
        let handover = directory.join(format!("{}{HANDOVER}", Mark::own()));
        let new = OnceLock::new();
        let it = Self { old: pid, staying, moving, whole, descriptors, new, names, handover };
        if !it.is_copied() {
            check_staying(machine)?;
        }
        sweep(&directory);
        Ok(it)
    }

    /// The old QEMU's process.
    pub(crate) fn old(&self) -> i32 {
        self.old
    }

    /// Whether all memory is copied, since no other process can have that of the old QEMU.
    #[must_use]
    pub fn is_copied(&self) -> bool {
        self.staying.is_empty()
    }

    /// What is offered to the new QEMU.
    pub(crate) fn moving(&self) -> &Arc<Vec<RamBlock>> {
        &self.moving
    }

    /// Whether nothing is.
    pub(crate) fn is_whole(&self) -> bool {
        self.whole
    }

    /// The names of what is not.
    pub(crate) fn staying(&self) -> impl Iterator<Item = &str> {
        self.staying.iter().map(RamBlock::name)
    }

    /// The blocks of the new QEMU that are not the old one's as well.
    pub(crate) fn without_staying(&self, ram: Vec<RamBlock>) -> Vec<RamBlock> {
        let stays = |block: &RamBlock| self.staying.iter().any(|old| is_same(old, block));
        ram.into_iter().filter(|block| !stays(block)).collect()
    }

    /// The file by which the new QEMU has the memory of the back end `id`, where that has no name.
    pub(crate) fn descriptor(&self, id: &str) -> Option<&Path> {
        self.descriptors.iter().find(|(name, _)| name == id).map(|(_, path)| &**path)
    }

    /// Refuses to copy what there is no room for twice.
    ///
    /// # Errors
    /// What lacks room, with the cure.
    pub fn check_room(&self) -> Result<(), QemuError> {
        // What it takes while it is copied comes to this twice.
        let taken = self.moving.iter().filter(|block| !block.has_huge_pages());
        let taken = taken.map(|block| block.allocated().unwrap_or(block.pages()));
        let pages: u64 = taken.map(|pages| pages.0).sum();
        if !self.is_copied() || pages == 0 {
            return Ok(());
        }
        // The new QEMU is started in the groups of this process.
        host_has(PageCount(pages).bytes()).map_err(no_room)
    }

    /// The file that says that the guest is the new QEMU's.
    pub(crate) fn handover(&self) -> &Path {
        &self.handover
    }

    /// Settles that the guest is the new QEMU's, whatever becomes of this process.
    pub(crate) fn hand_over(&self) -> Result<(), QemuError> {
        let made = File::create_new(&self.handover);
        made.map(drop).map_err(|source| QemuError::Record { path: self.handover.clone(), source })
    }

    /// The new QEMU, as soon as it waits for the guest.
    #[must_use]
    pub fn successor(&self) -> Option<Successor> {
        self.new.get().copied()
    }

    /// The old name of each file, and that under which the new QEMU is to make it.
    pub(crate) fn names(&self) -> impl Iterator<Item = (&Path, &Path)> {
        self.names.iter().map(|name| (&*name.old, &*name.staged))
    }

    /// Refuses a new QEMU that has other memory than the old one where it is to have the same.
    pub(crate) fn check_same(&self, ram: &[RamBlock]) -> Result<(), QemuError> {
        let there = |old: &RamBlock| ram.iter().any(|here| is_same(old, here));
        match self.staying.iter().find(|block| !there(block)) {
            Some(block) => Err(refused(format!(
                "RAM block '{}' of the new QEMU is not that of the old one: give its back end the \
                 same id, size, mem-path and offset, and share=on",
                block.name()
            ))),
            None if self.whole && ram.len() != self.staying.len() => Err(refused(format!(
                "the new QEMU has {} RAM blocks and the old one {}: give it the same memory back \
                 ends",
                ram.len(),
                self.staying.len()
            ))),
            None => Ok(()),
        }
    }

    /// The new QEMU is there, and has the memory that it is to have.
    pub(crate) fn found(&self, new: Successor) {
        // There is one of them.
        let _ = self.new.set(new);
    }

    /// Removes what a new QEMU has left that did not get the guest.
    pub fn drop_names(&self) {
        for name in &self.names {
            let _ = std::fs::remove_file(&name.staged);
        }
    }

    /// Gives the new QEMU's files the names by which others know them. The old one has ended: it
    /// removes what is under its names.
    ///
    /// # Errors
    /// Names what has kept another name.
    pub fn take_names(&self) -> Result<(), QemuError> {
        let left = self.names.iter().filter(|name| {
            name.staged.exists() && std::fs::rename(&name.staged, &name.known).is_err()
        });
        let left: Vec<String> = left
            .map(|name| format!("{} ({})", name.known.display(), name.staged.display()))
            .collect();
        match left.is_empty() {
            true => Ok(()),
            false => Err(refused(format!(
                "these files of the new QEMU could not be given their names and have others: {}",
                left.join(", ")
            ))),
        }
    }
}

impl Drop for InPlace {
    /// After a panic the guardians need it.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_file(&self.handover);
        }
    }
}

/// Removes from `directory` what upgrades have left that were killed long ago.
fn sweep(directory: &Path) {
    for (file, _) in leftovers(directory, HANDOVER) {
        let age = file.metadata().and_then(|about| about.modified()).ok();
        if age.and_then(|at| at.elapsed().ok()).is_some_and(|age| age > HANDOVER_AGE) {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// RAM, by what becomes of it.
#[derive(Default)]
struct Parted {
    staying: Vec<RamBlock>,
    moving: Arc<Vec<RamBlock>>,
    descriptors: Vec<(String, PathBuf)>,
}

/// Parts `ram`, which is reached by its addresses: what back ends have in files stays.
fn part(machine: &mut Machine, ram: &Arc<Vec<RamBlock>>) -> Result<Parted, QemuError> {
    let (of_files, own) = ram::in_files(machine, ram)?;
    match (of_files.first(), own.first()) {
        (None, _) => return Ok(Parted { moving: Arc::clone(ram), ..Parted::default() }),
        (Some(_), None) => {}
        (Some(file), Some(own)) => {
            return Err(refused(format!(
                "the guest's memory is in files ('{file}') and the old QEMU's own ('{own}'): the \
                 one would stay and the other be copied, which is not done: give all back ends a \
                 mem-path and share=on, or none"
            )));
        }
    }
    // Another handle on the same.
    let again = Ram::of_source(machine, false)?.blocks;
    let (staying, moving): (Vec<RamBlock>, Vec<RamBlock>) =
        again.into_iter().partition(|block| of_files.iter().any(|name| name == block.name()));
    let mut descriptors = Vec::new();
    for block in &staying {
        let id = ram::region_of(block.name());
        if ram::file_name(machine, id)?.is_none() {
            descriptors.push((id.to_owned(), descriptor_of(machine.pid, block)?));
        }
    }
    Ok(Parted { staying, moving: Arc::new(moving), descriptors })
}

/// The name by which another process of this user's opens the file of `block`, which the process
/// `pid` has open (proc_pid_fd(5)).
fn descriptor_of(pid: i32, block: &RamBlock) -> Result<PathBuf, QemuError> {
    let none = || {
        refused(format!(
            "the old QEMU has memory '{}' in a file that it has not open any more, so that no \
             other process can map it: {CURE}",
            block.name()
        ))
    };
    let place = block.place().ok();
    let Some(Place::File { device, inode, .. }) = place else { return Err(none()) };
    let is_it = |path: &PathBuf| {
        std::fs::metadata(path).is_ok_and(|file| (file.dev(), file.ino()) == (device, inode))
    };
    let all = std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(|_| none())?;
    all.flatten().map(|entry| entry.path()).find(is_it).ok_or_else(none)
}

/// Refuses memory that is in files and cannot stay there, with the cure.
fn check_staying(machine: &mut Machine) -> Result<(), QemuError> {
    for back_end in machine.qmp.run(&QueryMemdev)? {
        let object = format!("/objects/{}", back_end.id);
        let asked = QomGet::<bool>::new(&object, "discard-data");
        if machine.qmp.run_if_known(&asked)? == Some(true) {
            return Err(refused(format!(
                "the memory back end '{}' has discard-data=on: the old QEMU would take the \
                 guest's memory along when it ends; start the VM without it",
                back_end.id
            )));
        }
    }
    // QEMU before 8.1 punches holes into what a device of this kind has when it starts, also one
    // that waits (`virtio_mem_device_realize`), and here that would be the guest's memory.
    let devices = machine.devices()?;
    let plugged = devices.iter().find(|(_, _, kind)| kind.starts_with("virtio-mem"));
    if let Some((_, name, kind)) = plugged {
        return Err(refused(format!(
            "the device '{name}' ({kind}) may discard guest memory when it is started anew: \
             unplug it, or move the guest by `godwit migrate`"
        )));
    }
    let kind = machine_type(machine)?;
    if !MACHINES.iter().any(|known| kind.starts_with(known)) {
        return Err(refused(format!(
            "a machine of type '{kind}' may write guest memory when it is started: an upgrade is \
             for pc, q35 and microvm; move it by `godwit migrate`"
        )));
    }
    Ok(())
}

/// There is too little room for memory that is needed twice.
fn no_room(problem: NoRoom) -> QemuError {
    let (who, room, needed) = match problem {
        NoRoom::Host { room, needed } => ("this host".to_owned(), room, needed),
        NoRoom::Group { who, limit, room, needed } => {
            (format!("{who} ({})", limit.display()), room, needed)
        }
        problem => return refused(problem.to_string()),
    };
    refused(format!(
        "the guest's memory is the old QEMU's own and has to be copied, for which {needed} more \
         are needed until the old one ends, and {who} has {room}: make room, or say --overcommit; \
         or {CURE}"
    ))
}

/// What stands against an upgrade.
fn refused(words: impl Into<String>) -> QemuError {
    QemuError::Upgrade(words.into())
}

/// Refuses a QEMU of another user: the new one would have this process's rights.
fn check_user(pid: i32) -> Result<(), QemuError> {
    let failed = |source| QemuError::System { step: "looking at QEMU's process", source };
    let user = std::fs::metadata(format!("/proc/{pid}")).map_err(failed)?.uid();
    if user == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    Err(refused(format!(
        "the old QEMU is user {user}'s, and the new one would be this user's: run godwit upgrade \
         as that user"
    )))
}

/// The files that QEMU `pid` has made and the new one is to make as well: sockets that it listens
/// at, and its pid file.
fn names(pid: i32) -> Result<BTreeSet<PathBuf>, QemuError> {
    let failed = |source: procfs::ProcError| QemuError::NoProcess { pid, why: source.to_string() };
    let process = Process::new(pid).map_err(failed)?;
    let own = own_sockets(&process).map_err(failed)?;
    let sockets = process.unix().map_err(failed)?.into_iter();
    let listening = sockets
        .filter(|socket| own.contains(&socket.inode))
        .filter(|socket| !matches!(socket.state, UnixState::CONNECTED))
        .filter_map(|socket| socket.path)
        .filter(|path| !path.to_string_lossy().starts_with('@'));
    let words = process.cmdline().map_err(failed)?;
    let given = options(&words).into_iter().filter(|given| given.name == "pidfile");
    let pid_files = given.filter_map(|given| given.value).map(PathBuf::from);
    let directory = process.cwd().map_err(failed)?;
    Ok(listening.chain(pid_files).map(|path| directory.join(path)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_others_know_however_often_the_guest_was_upgraded() {
        let own = std::process::id();
        let first = Name::new("/run/vm.qmp".into());
        assert_eq!(first.staged, Path::new(&format!("/run/vm.qmp.godwit-{own}")));
        assert_eq!((&first.known, &first.old), (&"/run/vm.qmp".into(), &"/run/vm.qmp".into()));
        let second = Name::new("/run/vm.qmp.godwit-17".into());
        assert_eq!(second.known, Path::new("/run/vm.qmp"));
        assert_eq!(second.staged, first.staged);
        assert_eq!(known(Path::new("/run/a.godwit-x")), Path::new("/run/a.godwit-x"));
    }
}
