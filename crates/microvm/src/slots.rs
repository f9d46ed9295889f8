//! Telling KVM of the memory slots.
#![allow(unsafe_code)]

use godwit_memslots::SlotMap;
use godwit_units::PAGE_SIZE;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;

use crate::MicrovmError;
use crate::error::kvm;
use crate::ram::GuestRam;

/// Makes `slots`, which are those of `ram`, in `vm`.
pub(crate) fn show(vm: &VmFd, slots: &SlotMap, ram: &GuestRam) -> Result<(), MicrovmError> {
    for slot in slots.to_vec() {
        debug_assert!((slot.block as usize) < ram.blocks().len());
        let region = kvm_userspace_memory_region {
            slot: slot.id.0,
            flags: slot.flags.0,
            guest_phys_addr: slot.gfn.0 * PAGE_SIZE,
            memory_size: slot.pages.bytes().0,
            userspace_addr: slot.hva.0,
        };
        // SAFETY: the slot shows memory that `ram` has mapped and that nothing in this process
        // refers to; the machine drops the VM before it drops the memory.
        unsafe { vm.set_user_memory_region(region) }.map_err(kvm("KVM_SET_USER_MEMORY_REGION"))?;
    }
    Ok(())
}
