//! Which tracker the machine uses, and how it is started.
//!
//! KVM's log and ring know what vCPUs write; what devices write is in the device log, and the two
//! are united. Page tables know both, since both go through this process's.
#![allow(unsafe_code)]

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use godwit_memory::RamBlock;
use godwit_memslots::Slot;
use godwit_track::{
    DirtyRingSize, DirtyTracker, KvmDirtyRings, KvmLogTracker, KvmRingTracker, LogMode,
    PagemapTracker, UnionTracker, VhostLogTracker,
};
use godwit_units::PageCount;
use kvm_ioctls::{VcpuFd, VmFd};

use crate::MicrovmError;
use crate::vcpu::Bus;

/// Entries in each vCPU's ring: the most that KVM of this age takes.
const RING_ENTRIES: u32 = 65_536;

/// What is to know which pages were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TrackerKind {
    /// KVM's dirty log.
    #[default]
    KvmLog,
    /// KVM's dirty ring.
    KvmRing,
    /// Write protection in this process's page tables.
    Pagemap,
}

/// What does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tracking {
    Log { mode: LogMode, instead_of_ring: bool },
    Ring(DirtyRingSize),
    Pagemap,
}

impl fmt::Display for Tracking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Log { mode, instead_of_ring: true } => {
                write!(f, "{mode} (fallback: this KVM has no dirty ring)")
            }
            Self::Log { mode, .. } => write!(f, "{mode}"),
            Self::Ring(size) => {
                write!(f, "KVM dirty ring of {} entries for each vCPU", size.entries())
            }
            Self::Pagemap => f.write_str("write protection in the VMM's page tables"),
        }
    }
}

/// The VM's descriptor, to lend out.
fn fd(vm: &impl AsRawFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as its owner lives, which is as long as the borrow.
    unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) }
}

impl Tracking {
    /// Chooses for `vm`, which has no vCPU yet.
    pub(crate) fn choose(kind: TrackerKind, vm: &VmFd) -> Result<Self, MicrovmError> {
        let mode = LogMode::offered(fd(vm));
        Ok(match kind {
            TrackerKind::Pagemap => Self::Pagemap,
            TrackerKind::KvmLog => Self::Log { mode, instead_of_ring: false },
            TrackerKind::KvmRing => match DirtyRingSize::enable(fd(vm), RING_ENTRIES) {
                Ok(size) => Self::Ring(size),
                Err(godwit_track::TrackError::KvmLacks { .. }) => {
                    Self::Log { mode, instead_of_ring: true }
                }
                Err(error) => return Err(error.into()),
            },
        })
    }

    /// The rings of `vcpus`, all that `vm` has.
    pub(crate) fn rings(
        self,
        vm: &VmFd,
        vcpus: &[VcpuFd],
    ) -> Result<Option<Arc<KvmDirtyRings>>, MicrovmError> {
        let Self::Ring(size) = self else { return Ok(None) };
        let vcpus: Vec<_> = vcpus.iter().map(fd).collect();
        Ok(Some(KvmDirtyRings::new(fd(vm), size, &vcpus)?))
    }

    /// Starts the tracker on `slots`, all slots of `vm`.
    pub(crate) fn start(
        self,
        vm: &VmFd,
        slots: &[Slot],
        bus: &Bus,
    ) -> Result<Arc<dyn DirtyTracker>, MicrovmError> {
        let sizes: Vec<PageCount> = bus.ram.blocks().iter().map(RamBlock::pages).collect();
        let vcpus: Box<dyn DirtyTracker> = match (self, bus.rings.get()) {
            (Self::Pagemap, _) => {
                return Ok(Arc::new(PagemapTracker::start_own(&bus.ram.mappings())?));
            }
            (Self::Ring(_), Some(rings)) => {
                // SAFETY: the machine made these slots in this VM and never changes them, and it
                // adds none while it is tracked; it outlives the migration that the tracker belongs
                // to.
                Box::new(unsafe { KvmRingTracker::start(rings, &sizes, slots) }?)
            }
            // SAFETY: as above.
            _ => Box::new(unsafe { KvmLogTracker::start(fd(vm), &sizes, slots) }?),
        };
        let devices = Box::new(VhostLogTracker::start(bus.ram.device_log(), &sizes, slots)?);
        Ok(Arc::new(UnionTracker::new(&sizes, vec![vcpus, devices])))
    }
}
