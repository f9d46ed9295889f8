//! KVM's calls that dirty tracking needs, on raw descriptors; each is named as in
//! Documentation/virt/kvm/api.rst.
//!
//! Everything unsafe about them is here, but for what a memory region makes the guest see.
//! Structures come from kvm-bindings; kvm-ioctls has no KVM_CLEAR_DIRTY_LOG and no dirty ring, and
//! its KVM_GET_DIRTY_LOG allocates.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use godwit_memslots::{Slot, SlotFlags, SlotId};
use godwit_units::PAGE_SIZE;
use kvm_bindings::{
    kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1, kvm_dirty_log,
    kvm_dirty_log__bindgen_ty_1, kvm_enable_cap, kvm_userspace_memory_region,
};

use crate::uapi::{iow, iowr};

const KVMIO: u8 = 0xae;
const KVM_CHECK_EXTENSION: u64 = (KVMIO as u64) << 8 | 0x03;
const KVM_GET_DIRTY_LOG: u64 = iow(KVMIO, 0x42, size_of::<kvm_dirty_log>());
const KVM_SET_USER_MEMORY_REGION: u64 = iow(KVMIO, 0x46, size_of::<kvm_userspace_memory_region>());
const KVM_ENABLE_CAP: u64 = iow(KVMIO, 0xa3, size_of::<kvm_enable_cap>());
const KVM_CLEAR_DIRTY_LOG: u64 = iowr(KVMIO, 0xc0, size_of::<kvm_clear_dirty_log>());
const KVM_RESET_DIRTY_RINGS: u64 = (KVMIO as u64) << 8 | 0xc7;

fn answer(result: libc::c_int) -> io::Result<u32> {
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// What this VM can do for capability `cap`; 0 where it does not know it.
pub(crate) fn check_extension(vm: BorrowedFd<'_>, cap: u32) -> u32 {
    // SAFETY: KVM_CHECK_EXTENSION takes a number and touches no memory.
    answer(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CHECK_EXTENSION, u64::from(cap)) }).unwrap_or(0)
}

/// Enables capability `cap` with one argument.
pub(crate) fn enable_cap(vm: BorrowedFd<'_>, cap: u32, argument: u64) -> io::Result<()> {
    let mut arg = kvm_enable_cap { cap, ..Default::default() };
    arg.args[0] = argument;
    // SAFETY: KVM_ENABLE_CAP reads one `struct kvm_enable_cap`, which `arg` is.
    answer(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_ENABLE_CAP, &raw const arg) }).map(drop)
}

/// Sets the flags of `slot` to `flags`.
///
/// # Safety
/// The VM must have this slot with these frames and this host address. (KVM refuses to change the
/// address of an existing slot, but it would make a new one, and the guest would write to wherever
/// it points.)
pub(crate) unsafe fn set_flags(
    vm: BorrowedFd<'_>,
    slot: &Slot,
    flags: SlotFlags,
) -> io::Result<()> {
    let region = kvm_userspace_memory_region {
        slot: slot.id.0,
        flags: flags.0,
        guest_phys_addr: slot.gfn.0 * PAGE_SIZE,
        memory_size: slot.pages.bytes().0,
        userspace_addr: slot.hva.0,
    };
    // SAFETY: KVM_SET_USER_MEMORY_REGION reads one `struct kvm_userspace_memory_region`, which
    // `region` is; by the contract of this function it changes nothing but flags.
    answer(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_SET_USER_MEMORY_REGION, &raw const region) })
        .map(drop)
}

/// `KVM_GET_DIRTY_LOG`: the dirty pages of slot `slot` into `words`. Clears them too, unless
/// manual protection is on.
///
/// # Safety
/// The slot must have no more pages than `words` has bits: the kernel asks for no length.
pub(crate) unsafe fn fetch_dirty_log(
    vm: BorrowedFd<'_>,
    slot: SlotId,
    words: &mut [u64],
) -> io::Result<()> {
    let arg = kvm_dirty_log {
        slot: slot.0,
        padding1: 0,
        __bindgen_anon_1: kvm_dirty_log__bindgen_ty_1 { dirty_bitmap: words.as_mut_ptr().cast() },
    };
    // SAFETY: KVM_GET_DIRTY_LOG reads `arg` and writes one bit for each page of the slot, rounded
    // up to whole words, to `words`, borrowed exclusively and long enough by the contract of this
    // function.
    answer(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_GET_DIRTY_LOG, &raw const arg) }).map(drop)
}

/// `KVM_CLEAR_DIRTY_LOG`: clears and protects those of the `pages` pages from `first` on that are
/// set in `mask`.
///
/// # Errors
/// When `mask` is too short, or the kernel refuses: `first` and `pages` must be multiples of 64,
/// but for the end of the slot (api.rst, KVM_CLEAR_DIRTY_LOG).
///
/// ```
/// use std::os::fd::BorrowedFd;
///
/// use godwit_memslots::SlotId;
///
/// /// Clears and protects the pages 64, 65 and 130 of slot 0.
/// fn clear(vm: BorrowedFd<'_>) -> std::io::Result<()> {
///     godwit_track::clear_dirty_log(vm, SlotId(0), 64, 128, &[0b11, 0b100])
/// }
/// ```
pub fn clear_dirty_log(
    vm: BorrowedFd<'_>,
    slot: SlotId,
    first: u64,
    pages: u32,
    mask: &[u64],
) -> io::Result<()> {
    if (mask.len() as u64) < u64::from(pages).div_ceil(64) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let dirty_bitmap = mask.as_ptr().cast_mut().cast();
    let arg = kvm_clear_dirty_log {
        slot: slot.0,
        num_pages: pages,
        first_page: first,
        __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 { dirty_bitmap },
    };
    // SAFETY: KVM_CLEAR_DIRTY_LOG reads `arg` and one bit for each of `pages` from `mask`, which is
    // long enough; it writes to neither.
    answer(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CLEAR_DIRTY_LOG, &raw const arg) }).map(drop)
}

/// `KVM_RESET_DIRTY_RINGS`: protects the pages of all entries that were handed back; how many those
/// were.
pub(crate) fn reset_dirty_rings(vm: BorrowedFd<'_>) -> io::Result<u32> {
    loop {
        // SAFETY: KVM_RESET_DIRTY_RINGS takes no argument and touches no memory but the rings,
        // which are shared.
        let reset = answer(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_RESET_DIRTY_RINGS, 0) });
        match reset {
            // A signal came (virt/kvm/dirty_ring.c, kvm_dirty_ring_reset); what is left is done by
            // the next call.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ioctl_numbers_are_the_kernels() {
        assert_eq!(KVM_CHECK_EXTENSION, 0xae03);
        assert_eq!(KVM_GET_DIRTY_LOG, 0x4010_ae42);
        assert_eq!(KVM_SET_USER_MEMORY_REGION, 0x4020_ae46);
        assert_eq!(KVM_ENABLE_CAP, 0x4068_aea3);
        assert_eq!(KVM_CLEAR_DIRTY_LOG, 0xc018_aec0);
        assert_eq!(KVM_RESET_DIRTY_RINGS, 0xaec7);
    }
}
