//! What faults strike: two VMs and the guest between them, whatever kind they are.
//!
//! Keeps one promise: each of them is looked at from outside, by the VM's own word and its guest's,
//! never by godwit's.

mod libvirt;
mod micro;
mod qemu;

use std::fmt;

use godwit_testbed::{Backend, Godwit, Witness, skip};
use godwit_units::ByteCount;
use rustix::process::Pid;

pub use libvirt::Libvirt;
pub use micro::Micro;
pub use qemu::Qemu;

/// One side of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that the guest leaves.
    Source,
    /// The one that it goes to.
    Destination,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Source { "source" } else { "destination" })
    }
}

/// What a VM does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs the guest.
    Runs,
    /// It has a guest, or part of one, and does not run it.
    Stands,
    /// It waits for a guest.
    Waits,
    /// It has ended.
    Gone,
}

/// A kind of VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Adapter {
    /// QEMU under TCG with a Linux guest, its memory in a file.
    QemuFile,
    /// The same with QEMU's own memory.
    QemuAnonymous,
    /// QEMU on KVM, its memory in a file.
    Kvm,
    /// A microvm, which has the engine in its own process.
    Microvm,
    /// A domain of libvirt's under TCG, in QEMU's own memory, between two daemons.
    Libvirt,
}

impl Adapter {
    /// All of them, the quickest first.
    pub const ALL: [Self; 5] =
        [Self::Kvm, Self::Microvm, Self::QemuFile, Self::QemuAnonymous, Self::Libvirt];

    /// Its name in tables and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::QemuFile => "qemu-file",
            Self::QemuAnonymous => "qemu-anonymous",
            Self::Kvm => "kvm",
            Self::Microvm => "microvm",
            Self::Libvirt => "libvirt",
        }
    }

    /// A pair of its VMs, the first with a guest at work; `None` where there can be none, which is
    /// said.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn rig(self) -> anyhow::Result<Option<Box<dyn Rig>>> {
        self.rig_with(&Outfit::default())
    }

    /// The same with VMs of another outfit.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn rig_with(self, outfit: &Outfit) -> anyhow::Result<Option<Box<dyn Rig>>> {
        let made: Option<Box<dyn Rig>> = match self {
            Self::Microvm => Micro::start(outfit)?.map(|rig| Box::new(rig) as Box<dyn Rig>),
            Self::Libvirt => Libvirt::start(outfit)?.map(|rig| Box::new(rig) as Box<dyn Rig>),
            _ => Qemu::start(self, outfit)?.map(|rig| Box::new(rig) as Box<dyn Rig>),
        };
        if made.is_none() {
            skip("faults", format_args!("{self} cannot run here"));
        }
        Ok(made)
    }
}

impl fmt::Display for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the VMs of a rig have, and what their guest does.
#[derive(Clone, Debug)]
pub struct Outfit {
    /// The newest QEMU there is, instead of the oldest.
    pub newest: bool,
    /// A disk of its own on each side, which moves along.
    pub disk: bool,
    /// RAM of the VM.
    pub memory: ByteCount,
    /// The part of it that the guest stamps and checks.
    pub fill: ByteCount,
    /// The part of that which it writes.
    pub working_set: ByteCount,
    /// Pages that it writes each second.
    pub rate: u64,
    /// Where a QEMU has its memory, where that is not what the kind of VM says.
    pub backend: Option<Backend>,
    /// The tracker of a microvm.
    pub tracker: &'static str,
    /// A program with a check of its own, in the Linux guest of a QEMU.
    pub witness: Option<Witness>,
}

impl Default for Outfit {
    fn default() -> Self {
        Self {
            newest: false,
            disk: false,
            memory: ByteCount(256 << 20),
            fill: ByteCount(32 << 20),
            working_set: ByteCount(16 << 20),
            rate: 2000,
            backend: None,
            tracker: "kvm-log",
            witness: None,
        }
    }
}

/// The size of a disk that moves along: no whole number of the blocks in which writes are tracked.
const DISK: ByteCount = ByteCount((48 << 20) + 4096);

/// Two VMs and the guest between them.
pub trait Rig {
    /// The command.
    fn godwit(&self) -> &Godwit;

    /// The VM's name for `--vm`.
    fn vm(&self, side: Side) -> String;

    /// What `godwit receive` takes for `--vm`.
    fn receiver(&self) -> String {
        self.vm(Side::Destination)
    }

    /// What `godwit migrate` must be told to move this guest.
    fn migrate_options(&self) -> Vec<String> {
        Vec::new()
    }

    /// What `godwit receive` must be told to take it in.
    fn receive_options(&self) -> Vec<String> {
        self.migrate_options()
    }

    /// Ends who manages the VMs on that side, as a crash would, and starts them again.
    ///
    /// # Errors
    /// When nobody does, or they do not come up.
    fn restart_manager(&mut self, side: Side) -> anyhow::Result<()> {
        anyhow::bail!("nobody manages the VM at the {side}")
    }

    /// The process of the VM; the last one, where there is none now.
    fn process(&self, side: Side) -> i32;

    /// What the VM itself complained of; none where that is somebody else's to keep.
    fn complaints(&self, side: Side) -> String {
        let _ = side;
        String::new()
    }

    /// Whether there is nothing that `godwit recover` could look at.
    fn keeps_no_record(&self) -> bool {
        false
    }

    /// What the VM does.
    fn state(&mut self, side: Side) -> State;

    /// Who looks after the godwit at work on that side, if there is somebody.
    ///
    /// # Errors
    /// When processes cannot be listed.
    fn guardian(&self, side: Side) -> anyhow::Result<Option<Pid>>;

    /// Checks that the guest runs on at the source as if nothing had been, and that nothing of
    /// godwit's is left there.
    ///
    /// # Errors
    /// What is not as it should be.
    fn check_stayed(&mut self) -> anyhow::Result<()>;

    /// Checks that the guest runs at the destination, counts on from the source's, has found no
    /// damage, and that nothing of godwit's is left there.
    ///
    /// # Errors
    /// What is not as it should be.
    fn check_arrived(&mut self) -> anyhow::Result<()>;

    /// Waits until nobody but the VM is left on that side.
    ///
    /// # Errors
    /// When somebody stays.
    fn await_alone(&mut self, side: Side) -> anyhow::Result<()>;

    /// Makes sure that there is a destination that waits: a new one unless the old one still does.
    ///
    /// # Errors
    /// When a new one does not come up.
    fn renew(&mut self) -> anyhow::Result<()>;

    /// Makes the destination, where the guest is, the source of the next move, to a new one.
    ///
    /// # Errors
    /// When a new one does not come up.
    fn turn(&mut self) -> anyhow::Result<()>;
}
