//! The dirty rings of a VM's vCPUs, mapped once, and how entries leave them.
//!
//! How it works (Documentation/virt/kvm/api.rst, KVM_CAP_DIRTY_LOG_RING_ACQ_REL): a vCPU's first
//! write to a protected page of a logged slot puts one entry (slot, page in slot) into that vCPU's
//! ring and lifts the protection. Collecting an entry marks it as handed back;
//! `KVM_RESET_DIRTY_RINGS` then protects the pages of all such entries again.
//!
//! Invariants:
//! - A page is published to the tracker only *after* the reset. Between collecting and reset the
//!   guest can write the page without a new entry; whoever read its bytes then would send an old
//!   page and never hear of it again.
//! - Rings are collected by one thread at a time, and the place where collecting goes on outlives
//!   every tracker: the kernel does not tell it.
//!
//! A full ring stops its vCPU (KVM_EXIT_DIRTY_RING_FULL) until somebody has collected; the vCPU's
//! thread does, with [`KvmDirtyRings::make_room`]. KVM promises to stop it while some entries are
//! left. A KVM that does not (seen with one that emulates many instructions between two looks at
//! the ring) overwrites entries: that is noticed by a ring without any free entry, or one that
//! stays full though nothing is in it, and from then on every call fails, since writes were lost.
//! The rings are emptied all the same: a vCPU must not stand still because its migration has
//! failed.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_units::{PAGE_SIZE, PageCount};
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_DIRTY_LOG_PAGE_OFFSET,
    kvm_dirty_gfn,
};
use rustix::mm::{MapFlags, ProtFlags};

use super::uapi;
use crate::TrackError;

/// `KVM_DIRTY_GFN_F_DIRTY`: the entry holds a page.
const DIRTY: u32 = 1 << 0;
/// `KVM_DIRTY_GFN_F_RESET`: the entry is handed back.
const RESET: u32 = 1 << 1;

/// That a VM has dirty rings, and how many entries each.
///
/// ```
/// use std::os::fd::BorrowedFd;
///
/// use godwit_track::{DirtyRingSize, TrackError};
///
/// /// Comes before the first vCPU is made.
/// fn enable(vm: BorrowedFd<'_>) -> Result<DirtyRingSize, TrackError> {
///     let size = DirtyRingSize::enable(vm, 1 << 14)?;
///     println!("each vCPU gets {} entries", size.entries());
///     Ok(size)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyRingSize {
    entries: u32,
}

impl DirtyRingSize {
    /// Gives every vCPU that the VM `vm` will have a ring of `entries` entries, or as many as this
    /// KVM allows. Must come before the first vCPU is made. The VM has no dirty log any more then,
    /// and must not use KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2: KVM would not protect what it calls
    /// initially dirty, and lose writes.
    ///
    /// # Errors
    /// When this KVM has no dirty ring (use [`super::KvmLogTracker`]), or refuses: not a power of
    /// two, or a vCPU was made already.
    pub fn enable(vm: BorrowedFd<'_>, entries: u32) -> Result<Self, TrackError> {
        // The variant that orders flags and content by acquire and release; the older one promises
        // that only where the processor does, as x86 does.
        let caps = [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING];
        let offered = caps.into_iter().map(|cap| (cap, uapi::check_extension(vm, cap)));
        let Some((cap, most)) = offered.into_iter().find(|(_, bytes)| *bytes > 0) else {
            return Err(TrackError::KvmLacks {
                missing: "the dirty ring (KVM_CAP_DIRTY_LOG_RING_ACQ_REL, Linux 5.11 or newer)",
                cure: "use the dirty log",
            });
        };
        let entries = entries.min(most / size_of::<kvm_dirty_gfn>() as u32);
        let bytes = u64::from(entries) * size_of::<kvm_dirty_gfn>() as u64;
        uapi::enable_cap(vm, cap, bytes).map_err(|source| TrackError::Kvm {
            call: "KVM_ENABLE_CAP for the dirty ring (before any vCPU is made, a power of two of \
                   entries)",
            source,
        })?;
        Ok(Self { entries })
    }

    /// Entries in each ring.
    #[must_use]
    pub fn entries(self) -> u32 {
        self.entries
    }
}

/// Takes what leaves the rings.
pub(super) trait Sink: Send + Sync {
    /// Page `page` of slot number `slot` was written, and is protected again.
    fn publish(&self, slot: u32, page: u64);
}

/// The rings of all vCPUs of one VM. Make it once, when all vCPUs exist.
///
/// ```
/// use std::os::fd::BorrowedFd;
/// use std::sync::Arc;
///
/// use godwit_track::{DirtyRingSize, KvmDirtyRings, TrackError};
///
/// /// Comes when all vCPUs exist.
/// fn map(
///     vm: BorrowedFd<'_>,
///     size: DirtyRingSize,
///     vcpus: &[BorrowedFd<'_>],
/// ) -> Result<Arc<KvmDirtyRings>, TrackError> {
///     KvmDirtyRings::new(vm, size, vcpus)
/// }
///
/// /// What the thread of a vCPU does when KVM says that its ring is full.
/// fn full(rings: &KvmDirtyRings, vcpu: usize) -> Result<(), TrackError> {
///     rings.make_room(vcpu)
/// }
/// ```
pub struct KvmDirtyRings {
    vm: OwnedFd,
    state: Mutex<State>,
}

struct State {
    rings: Vec<Ring>,
    /// Entries that were collected and not yet published.
    collected: Vec<(u32, u64)>,
    sink: Option<Arc<dyn Sink>>,
    /// The vCPU whose ring was overrun, if any ever was.
    overrun: Option<usize>,
}

impl std::fmt::Debug for KvmDirtyRings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvmDirtyRings").field("vm", &self.vm).finish_non_exhaustive()
    }
}

impl KvmDirtyRings {
    /// Maps the rings of `vcpus`, all vCPUs of `vm`.
    ///
    /// # Errors
    /// When KVM refuses to map them.
    pub fn new(
        vm: BorrowedFd<'_>,
        size: DirtyRingSize,
        vcpus: &[BorrowedFd<'_>],
    ) -> Result<Arc<Self>, TrackError> {
        let vm =
            vm.try_clone_to_owned().map_err(|source| TrackError::Kvm { call: "dup", source })?;
        let rings =
            vcpus.iter().map(|vcpu| Ring::map(*vcpu, size.entries)).collect::<Result<_, _>>()?;
        let collected = Vec::new();
        Ok(Arc::new(Self {
            vm,
            state: Mutex::new(State { rings, collected, sink: None, overrun: None }),
        }))
    }

    /// For the thread of vCPU `vcpu` (counted as in [`KvmDirtyRings::new`]), which left guest mode
    /// with KVM_EXIT_DIRTY_RING_FULL: empties the rings, so that it can run on. It can after an
    /// error, too.
    ///
    /// # Errors
    /// As [`KvmDirtyRings::collect`].
    pub fn make_room(&self, vcpu: usize) -> Result<(), TrackError> {
        let mut state = self.lock();
        let collected = state.collect(self.vm.as_fd()).map(drop);
        let Some(ring) = state.rings.get_mut(vcpu) else { return collected };
        // Between two times of being full, somebody must have collected something.
        if ring.next_when_full.replace(ring.next) != Some(ring.next) {
            return collected;
        }
        ring.skip_lost_entries();
        state.overrun.get_or_insert(vcpu);
        reset(self.vm.as_fd())?;
        Err(TrackError::RingOverrun { vcpu })
    }

    /// Empties all rings into the tracker that is at work, so that they can fill again; returns how
    /// many entries that were. Harvesting does it too; in between it keeps rings from getting full.
    ///
    /// # Errors
    /// When KVM refuses to protect the pages again, or a ring was overrun.
    pub fn collect(&self) -> Result<PageCount, TrackError> {
        self.lock().collect(self.vm.as_fd())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on, what is collected goes to `sink`.
    pub(super) fn connect(&self, sink: Arc<dyn Sink>) -> Result<(), TrackError> {
        let mut state = self.lock();
        if state.sink.is_some() {
            return Err(TrackError::RingsInUse);
        }
        state.sink = Some(sink);
        Ok(())
    }

    /// From now on, what is collected is nobody's business.
    pub(super) fn disconnect(&self) {
        self.lock().sink = None;
    }

    pub(super) fn vm(&self) -> BorrowedFd<'_> {
        self.vm.as_fd()
    }
}

impl State {
    /// Empties all rings into the sink.
    fn collect(&mut self, vm: BorrowedFd<'_>) -> Result<PageCount, TrackError> {
        let Self { rings, collected, sink, overrun } = self;
        for (vcpu, ring) in rings.iter_mut().enumerate() {
            if ring.hand_back_all(collected) == ring.entries {
                overrun.get_or_insert(vcpu);
            }
        }
        let pages = PageCount(collected.len() as u64);
        let reset = if collected.is_empty() { Ok(()) } else { reset(vm) };
        match (*overrun, sink) {
            // Whoever harvests is told that pages are missing, and needs none of the others. The
            // entries were handed back and reset all the same: else every KVM_RUN from here on
            // would end with a full ring.
            (Some(_), _) | (None, None) => {}
            (None, Some(sink)) => {
                collected.iter().for_each(|&(slot, page)| sink.publish(slot, page))
            }
        }
        collected.clear();
        reset?;
        overrun.map_or(Ok(pages), |vcpu| Err(TrackError::RingOverrun { vcpu }))
    }
}

/// Protects the pages of all entries that were handed back.
fn reset(vm: BorrowedFd<'_>) -> Result<(), TrackError> {
    let reset = uapi::reset_dirty_rings(vm);
    reset.map(drop).map_err(|source| TrackError::Kvm { call: "KVM_RESET_DIRTY_RINGS", source })
}

/// The ring of one vCPU.
struct Ring {
    base: NonNull<kvm_dirty_gfn>,
    /// A power of two.
    entries: u32,
    /// Entries collected so far, modulo 2^32; the next one is at this number modulo `entries`.
    next: u32,
    /// What `next` was when the ring was full the last time.
    next_when_full: Option<u32>,
}

// SAFETY: a ring is memory shared with the kernel, used by one thread at a time: all use is by
// `&mut`.
unsafe impl Send for Ring {}

impl Ring {
    fn map(vcpu: BorrowedFd<'_>, entries: u32) -> Result<Self, TrackError> {
        let failed = |source| TrackError::Kvm { call: "mmap of a dirty ring", source };
        let bytes = entries as usize * size_of::<kvm_dirty_gfn>();
        // The flags of entries are written here, so it is not enough to map it for reading.
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let offset = u64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE_SIZE;
        // SAFETY: a new mapping at a place of the kernel's choice. KVM maps nothing but the ring
        // there, and no more of it than it has.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED,
                vcpu,
                offset,
            )
        };
        let base = base.map_err(|errno| failed(errno.into()))?;
        let base = NonNull::new(base.cast())
            .ok_or_else(|| failed(std::io::ErrorKind::InvalidData.into()))?;
        Ok(Self { base, entries, next: 0, next_when_full: None })
    }

    /// Hands back every entry that holds a page, and notes the page; how many those were.
    fn hand_back_all(&mut self, pages: &mut Vec<(u32, u64)>) -> u32 {
        // One turn at the most: entries that come meanwhile are for the next time.
        for handed in 0..self.entries {
            let (entry, flags) = (self.entry(self.next), self.flags(self.next));
            if flags.load(Ordering::Acquire) & DIRTY == 0 {
                return handed;
            }
            // SAFETY: the entry lies in the mapping, and one that is marked dirty is ours until it
            // is handed back.
            let (slot, page) =
                unsafe { ((&raw const (*entry).slot).read(), (&raw const (*entry).offset).read()) };
            flags.store(RESET, Ordering::Release);
            pages.push((slot, page));
            self.next = self.next.wrapping_add(1);
        }
        self.entries
    }

    /// Hands back entries of a ring that is full though none is marked where the next one is due.
    /// They were overwritten by later ones, which were handed back in their place, and KVM counts
    /// them as in use for ever. Half of the ring, since a full one has more than that in use
    /// (virt/kvm/dirty_ring.c, `kvm_dirty_ring_init`: all but 64 entries and those of the
    /// processor's own log), and one entry too many would make KVM's count negative, which is a
    /// ring that is full for ever. A longer gap is left in several steps.
    fn skip_lost_entries(&mut self) {
        for _ in 0..self.entries / 2 {
            self.flags(self.next).store(RESET, Ordering::Release);
            self.next = self.next.wrapping_add(1);
        }
        self.next_when_full = Some(self.next);
    }

    fn entry(&self, number: u32) -> *mut kvm_dirty_gfn {
        self.base.as_ptr().wrapping_add((number % self.entries) as usize)
    }

    fn flags(&self, number: u32) -> &AtomicU32 {
        // SAFETY: `entry` reduces the number below that of the entries, so the entry lies in the
        // mapping, aligned to 8 as all of them; the kernel too changes the flags by whole, atomic
        // accesses only. The mapping lives as long as `self`.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.entry(number)).flags) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let bytes = self.entries as usize * size_of::<kvm_dirty_gfn>();
        // SAFETY: the mapping was made by `map` with this length, and no reference into it is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), bytes) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_followed_around_its_end() {
        // A file in the place of a vCPU; what the kernel would write, the test writes.
        let entries = 4096 / size_of::<kvm_dirty_gfn>() as u32;
        let file = rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 65 * PAGE_SIZE).unwrap();
        let mut ring = Ring::map(file.as_fd(), entries).unwrap();
        let mut expected = Vec::new();
        let mut pages = Vec::new();
        for number in 0..3 * u64::from(entries) {
            let at =
                KVM_DIRTY_LOG_PAGE_OFFSET as u64 * PAGE_SIZE + number % u64::from(entries) * 16;
            let mut entry = [0; 16];
            entry[..4].copy_from_slice(&DIRTY.to_ne_bytes());
            entry[4..8].copy_from_slice(&7u32.to_ne_bytes());
            entry[8..].copy_from_slice(&number.to_ne_bytes());
            rustix::io::pwrite(&file, &entry, at).unwrap();
            expected.push((7, number));
            if number % 100 == 99 {
                assert_eq!(ring.hand_back_all(&mut pages), 100);
                assert_eq!(pages, expected);
            }
        }
        let mut flags = [0; 4];
        rustix::io::pread(&file, &mut flags, KVM_DIRTY_LOG_PAGE_OFFSET as u64 * PAGE_SIZE).unwrap();
        assert_eq!(u32::from_ne_bytes(flags), RESET);
    }
}
