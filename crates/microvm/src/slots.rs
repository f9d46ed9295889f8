//! Telling KVM of the memory slots.
#![allow(unsafe_code)]

use godwit_memslots::Slot;
use godwit_units::PAGE_SIZE;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;

use crate::MicrovmError;
use crate::error::kvm;
use crate::ram::Memory;

/// Makes `slots`, which are of `memory`, in `vm`: all, or none if KVM refuses one.
pub(crate) fn show(vm: &VmFd, slots: &[Slot], memory: &Memory) -> Result<(), MicrovmError> {
    for (number, slot) in slots.iter().enumerate() {
        debug_assert!((slot.block as usize) < memory.blocks().len());
        if let Err(error) = set(vm, slot, slot.pages.bytes().0) {
            // One of no size is none (Documentation/virt/kvm/api.rst,
            // KVM_SET_USER_MEMORY_REGION).
            slots[..number].iter().for_each(|slot| drop(set(vm, slot, 0)));
            return Err(error);
        }
    }
    Ok(())
}

fn set(vm: &VmFd, slot: &Slot, size: u64) -> Result<(), MicrovmError> {
    let region = kvm_userspace_memory_region {
        slot: slot.id.0,
        flags: slot.flags.0,
        guest_phys_addr: slot.gfn.0 * PAGE_SIZE,
        memory_size: size,
        userspace_addr: slot.hva.0,
    };
    // SAFETY: the slot shows memory that the machine has mapped and that nothing in this process
    // refers to; the machine drops the VM before it drops the memory.
    unsafe { vm.set_user_memory_region(region) }.map_err(kvm("KVM_SET_USER_MEMORY_REGION"))
}
