//! Trackers on KVM's own knowledge of which pages the guest wrote: the dirty log and the dirty
//! ring.
//!
//! Common to both: a slot is logged only while its flag `KVM_MEM_LOG_DIRTY_PAGES` is set.
//! Invariant: whatever happens, the flags of every slot are again what they were once the tracker
//! is gone.
//!
//! Neither sees what the VMM or a device back end writes through host addresses; those writes
//! belong into a device log ([`crate::VhostLog`]), combined with this one by
//! [`crate::UnionTracker`].
#![allow(unsafe_code)]

mod log;
mod ring;
mod rings;
mod uapi;

pub use log::{KvmLogCalls, KvmLogTracker, LogMode};
pub use ring::KvmRingTracker;
pub use rings::{DirtyRingSize, KvmDirtyRings};
pub use uapi::clear_dirty_log;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use godwit_memslots::{Slot, SlotFlags};

use crate::TrackError;

/// The logging of a set of slots; dropping it ends that.
#[derive(Debug)]
struct Logging {
    vm: OwnedFd,
    /// The slots that are logged on our account, with the flags they had.
    slots: Vec<Slot>,
}

impl Logging {
    /// Begins to log `slots`.
    ///
    /// # Safety
    /// The VM must have these slots, with these frames and host addresses, for as long as this
    /// value lives.
    unsafe fn start(vm: BorrowedFd<'_>, slots: &[Slot]) -> Result<Self, TrackError> {
        let vm =
            vm.try_clone_to_owned().map_err(|source| TrackError::Kvm { call: "dup", source })?;
        let mut logging = Self { vm, slots: Vec::with_capacity(slots.len()) };
        for slot in slots {
            let flags = slot.flags | SlotFlags::LOG_DIRTY_PAGES;
            // SAFETY: the contract of this function is the contract of that one.
            unsafe { uapi::set_flags(logging.vm(), slot, flags) }.map_err(|source| {
                TrackError::KvmSlot {
                    call: "KVM_SET_USER_MEMORY_REGION with dirty logging",
                    slot: slot.id.0,
                    source,
                }
            })?;
            logging.slots.push(*slot);
        }
        Ok(logging)
    }

    fn vm(&self) -> BorrowedFd<'_> {
        self.vm.as_fd()
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        for slot in &self.slots {
            // SAFETY: the slot is as promised to `start`. A failure leaves it logged, which costs
            // the guest time and nothing else; there is nobody to tell.
            let _ = unsafe { uapi::set_flags(self.vm.as_fd(), slot, slot.flags) };
        }
    }
}
