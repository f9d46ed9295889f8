//! Telling KVM of the memory slots.
#![allow(unsafe_code)]

use godwit_memslots::Slot;
use godwit_units::PAGE_SIZE;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;

use crate::MicrovmError;
use crate::error::kvm;
use crate::ram::Memory;

/// Why slots are not there.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) error: MicrovmError,
    /// KVM would not take back one that it had taken before: it may show that memory to the guest
    /// for as long as there is the VM, under that number.
    pub(crate) stuck: bool,
}

impl From<MicrovmError> for Refusal {
    fn from(error: MicrovmError) -> Self {
        Self { error, stuck: false }
    }
}

/// Makes `slots`, which are of `memory`, in `vm`: all, or none if KVM refuses one.
pub(crate) fn show(vm: &VmFd, slots: &[Slot], memory: &Memory) -> Result<(), Refusal> {
    debug_assert!(slots.iter().all(|slot| (slot.block as usize) < memory.blocks().len()));
    all_or_none(slots, |slot, size| set(vm, slot, size))
}

fn all_or_none(
    slots: &[Slot],
    mut set: impl FnMut(&Slot, u64) -> Result<(), MicrovmError>,
) -> Result<(), Refusal> {
    for (number, slot) in slots.iter().enumerate() {
        let Err(error) = set(slot, slot.pages.bytes().0) else { continue };
        // One of no size is none (Documentation/virt/kvm/api.rst, KVM_SET_USER_MEMORY_REGION). KVM
        // needs memory to take one back, too.
        let stuck = slots[..number].iter().filter(|slot| set(slot, 0).is_err()).count();
        return Err(Refusal { error, stuck: stuck > 0 });
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
    // SAFETY: the slot shows memory that the machine has mapped and to which no reference in this
    // process exists. Once a slot may show it, the machine keeps it until the VM is dropped, unless
    // KVM has taken the slot back: one that it would not take back is told to the machine as stuck.
    unsafe { vm.set_user_memory_region(region) }.map_err(kvm("KVM_SET_USER_MEMORY_REGION"))
}

#[cfg(test)]
mod tests {
    use godwit_memslots::SlotId;
    use godwit_units::PageCount;

    use super::*;

    #[test]
    fn a_slot_that_kvm_does_not_take_back_is_told_of() {
        let slot = |id| Slot { id: SlotId(id), pages: PageCount(1), ..Slot::default() };
        let slots = [slot(7), slot(8), slot(9)];
        for kept in [None, Some(7)] {
            let mut asked = Vec::new();
            let refusal = all_or_none(&slots, |slot, size| {
                asked.push((slot.id.0, size));
                match (slot.id.0, size) {
                    (9, _) => Err(MicrovmError::Capability("a third slot")),
                    (id, 0) if Some(id) == kept => Err(MicrovmError::Capability("memory")),
                    _ => Ok(()),
                }
            });
            let refusal = refusal.unwrap_err();
            assert!(refusal.error.to_string().contains("a third slot"), "{}", refusal.error);
            assert_eq!(refusal.stuck, kept.is_some());
            // The others are taken back all the same.
            assert_eq!(asked, [(7, 4096), (8, 4096), (9, 4096), (7, 0), (8, 0)]);
        }
    }
}
