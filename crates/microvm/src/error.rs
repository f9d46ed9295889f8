//! What can go wrong in the VMM, in words for whoever runs it.

use std::io;
use std::path::PathBuf;

use godwit_memory::NoRoom;
use godwit_units::ByteCount;

/// Why the machine cannot be had, or does not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MicrovmError {
    /// No KVM.
    #[error(
        "cannot open /dev/kvm: {0}; on bare metal load kvm_intel or kvm_amd, in a VM have nested \
         virtualisation switched on, and run as root or as a member of the group kvm"
    )]
    NoKvm(#[source] io::Error),
    /// KVM lacks something that has no substitute.
    #[error("this KVM lacks {0}: run a newer kernel (Linux 5.10 or newer has it)")]
    Capability(&'static str),
    /// A call failed.
    #[error("{call} failed: {source}")]
    Kvm {
        /// Which.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
    /// Another system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// What was being done.
        action: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A RAM file cannot be used.
    #[error(transparent)]
    Memory(#[from] godwit_memory::MemoryError),
    /// The memory was described in a way that cannot be built.
    #[error("the memory layout does not do: {0}")]
    Layout(String),
    /// The memory slots contradict each other.
    #[error("the guest's memory cannot be cut into slots: {0}")]
    Map(#[from] godwit_memslots::SlotError),
    /// More slots than KVM has.
    #[error(
        "{wanted} memory slots were asked for, but this KVM has {available}: use fewer --slots"
    )]
    Slots {
        /// How many the layout takes.
        wanted: usize,
        /// How many there are.
        available: usize,
    },
    /// More memory than can be had.
    #[error("{size} cannot be plugged in: this host has {room} to spare{limit}: plug less")]
    Room {
        /// How much was asked for.
        size: ByteCount,
        /// How much there is.
        room: ByteCount,
        /// What limits it, in words.
        limit: String,
    },
    /// vCPUs that cannot be had.
    #[error("{wanted} vCPUs do not do: use 1 to {most}")]
    Cpus {
        /// How many were asked for.
        wanted: u32,
        /// How many there can be.
        most: u32,
    },
    /// What the guest is to fill does not fit.
    #[error(
        "the guest cannot stamp {fill} of {free} free memory: use a smaller --fill or more --memory"
    )]
    Fill {
        /// What was asked for.
        fill: ByteCount,
        /// What there is.
        free: ByteCount,
    },
    /// The disk image cannot be used.
    #[error("disk image {}: {problem}", path.display())]
    Disk {
        /// The image.
        path: PathBuf,
        /// What is wrong, and the cure.
        problem: String,
    },
    /// Disks are to move along, and there is none.
    #[error("the machine has no disk that could move: leave out --disks")]
    NoDisks,
    /// A disk is to move along that the machine has not.
    #[error(
        "the machine has no disk '{name}' ({}): name the disks it has, and start both machines \
         with --disk",
        own.map_or("it has none".to_owned(), |own| format!("it has '{own}'"))
    )]
    NoDisk {
        /// What was asked for.
        name: String,
        /// What there is.
        own: Option<&'static str>,
    },
    /// The control socket cannot be used.
    #[error(transparent)]
    Control(#[from] godwit_control::ControlError),
    /// Tracking failed.
    #[error(transparent)]
    Track(#[from] godwit_track::TrackError),
    /// The guest cannot be throttled.
    #[error(transparent)]
    Throttle(#[from] godwit_vcpu_throttle::ThrottleError),
    /// The state that came is not one to load.
    #[error(transparent)]
    State(#[from] StateError),
    /// The guest is beyond help.
    #[error("vCPU {cpu} {what}; the guest cannot go on (its last instruction is at {rip:#x})")]
    GuestDied {
        /// Which vCPU.
        cpu: usize,
        /// What it did.
        what: String,
        /// Where.
        rip: u64,
    },
    /// The machine is not in the state that is needed.
    #[error("the machine is {state}: {cure}")]
    WrongState {
        /// What it is.
        state: &'static str,
        /// What to do.
        cure: &'static str,
    },
}

impl MicrovmError {
    /// For memory of `size` that is to be plugged in, and `problem`, which stands against it.
    pub(crate) fn room(size: ByteCount, problem: NoRoom) -> Self {
        let (room, limit) = match problem {
            NoRoom::Group { room, limit, .. } => (room, format!(" ({})", limit.display())),
            NoRoom::Host { room, .. } => (room, String::new()),
            other => return Self::Layout(other.to_string()),
        };
        Self::Room { size, room, limit }
    }
}

/// Why a state blob cannot be loaded. The machine is as before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// Not a blob at all.
    #[error("this is no microvm state: it begins with {found:02x?}")]
    NoState {
        /// Its first bytes.
        found: Vec<u8>,
    },
    /// Of another version.
    #[error(
        "the microvm state is of version {found}, this godwit has version {own}: run the same \
         godwit on both sides"
    )]
    Version {
        /// Its version.
        found: u32,
        /// Ours.
        own: u32,
    },
    /// Cut short, or too long.
    #[error(
        "the microvm state is {found} bytes long but says that it has {expected}: it was cut short \
         or mixed up on the way"
    )]
    Length {
        /// How long it is.
        found: u64,
        /// How long it should be.
        expected: u64,
    },
    /// Damaged.
    #[error("the microvm state is damaged: its checksum is {found:032x}, not {expected:032x}")]
    Checksum {
        /// What it comes to.
        found: u128,
        /// What it should be.
        expected: u128,
    },
    /// Whole, but not what this version writes.
    #[error("the microvm state makes no sense: {0}")]
    Malformed(String),
    /// For another machine.
    #[error("the microvm state does not fit this machine: {0}")]
    Misfit(String),
}

impl From<godwit_virtio::VirtioError> for StateError {
    fn from(error: godwit_virtio::VirtioError) -> Self {
        match error {
            godwit_virtio::VirtioError::Features { .. } => Self::Misfit(error.to_string()),
            _ => Self::Malformed(error.to_string()),
        }
    }
}

impl From<godwit_balloon::BalloonError> for StateError {
    fn from(error: godwit_balloon::BalloonError) -> Self {
        match error {
            godwit_balloon::BalloonError::Registers(error) => error.into(),
            _ => Self::Malformed(error.to_string()),
        }
    }
}

/// Makes an error of a failed KVM call.
pub(crate) fn kvm(call: &'static str) -> impl Fn(kvm_ioctls::Error) -> MicrovmError {
    move |error| MicrovmError::Kvm { call, source: io::Error::from_raw_os_error(error.errno()) }
}

/// Makes an error of a failed system call.
pub(crate) fn system<E: Into<io::Error>>(action: &'static str) -> impl Fn(E) -> MicrovmError {
    move |error| MicrovmError::System { action, source: error.into() }
}
