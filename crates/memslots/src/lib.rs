//! Memory slots: which guest frames lie at which host addresses, and in which RAM block.
//!
//! [`MemSlots`] is the one writer's side; [`SlotReader`]s, as many as there are threads, look slots
//! up by guest frame, by host address or by id. The invariant: a reader works on a snapshot in
//! which every update is either whole or absent, it never waits for the writer nor the writer for
//! it, and once an update has returned, every look-up that begins later sees it. An update copies
//! the path from the root to one leaf in each of three trees, never the whole set
//! (docs/structures.md has the arithmetic).
//!
//! The model is KVM's set of memslots since Linux 5.17 (virt/kvm/kvm_main.c, `kvm_set_memslot`):
//! host addresses may overlap, guest frames may not, ids are sparse. KVM keeps two sets, edits the
//! idle one, swaps and waits for readers; that was rejected, since a reader here may hold its
//! snapshot for a whole round.
//!
//! Slot ids are of this host only and never leave it; what migrates is the RAM block.
//!
//! For VMM authors: with the feature `vm-memory`, `MemSlots::of_guest_memory` makes the slots of a
//! `GuestMemoryMmap`.
//!
//! ```
//! use godwit_memslots::{MemSlots, Slot, SlotId};
//! use godwit_units::{Gfn, Hva, PageCount, PageIndex};
//!
//! let mut slots = MemSlots::new();
//! let mut reader = slots.reader();
//! slots.insert(Slot {
//!     id: SlotId(7),
//!     gfn: Gfn(0x100),
//!     pages: PageCount(16),
//!     hva: Hva(0x7f00_0000_0000),
//!     ..Slot::default()
//! })?;
//! let slot = reader.by_hva(Hva(0x7f00_0000_3abc)).expect("readers follow at once");
//! assert_eq!(slot.page_of_hva(Hva(0x7f00_0000_3abc)), Some(PageIndex(3)));
//! # Ok::<(), godwit_memslots::SlotError>(())
//! ```
#![forbid(unsafe_code)]

mod error;
mod map;
mod publish;
mod reader;
#[cfg(feature = "vm-memory")]
mod rust_vmm;
mod slot;
mod tree;

/// What only this crate's loom test replaces.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
    pub(crate) use std::sync::{Arc, RwLock};
}

use std::sync::Arc;

use godwit_units::Gfn;

pub use error::{GfnRange, HvaRange, SlotError};
pub use map::{SlotEdit, SlotMap};
pub use reader::SlotReader;
pub use slot::{Slot, SlotFlags, SlotId};

use publish::Publisher;

/// All memory slots of a guest, and the right to change them.
///
/// ```
/// use godwit_memslots::{MemSlots, Slot, SlotError, SlotId};
/// use godwit_units::{Gfn, PageCount};
///
/// let mut slots = MemSlots::new();
/// slots.insert(Slot { id: SlotId(7), gfn: Gfn(0x100), pages: PageCount(16), ..Slot::default() })?;
/// // Readers see both changes or none.
/// slots.update(|edit| {
///     edit.move_to(SlotId(7), Gfn(0x200))?;
///     edit.insert(Slot { id: SlotId(8), pages: PageCount(1), ..Slot::default() })
/// })?;
/// assert_eq!(slots.map().len(), 2);
/// assert_eq!(slots.remove(SlotId(7))?.gfn, Gfn(0x200));
/// # Ok::<(), SlotError>(())
/// ```
#[derive(Debug, Default)]
pub struct MemSlots {
    map: SlotMap,
    publisher: Publisher<SlotMap>,
}

impl MemSlots {
    /// No slots.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The slots as they are; [`SlotMap`] has the look-ups.
    #[must_use]
    pub fn map(&self) -> &SlotMap {
        &self.map
    }

    /// The slots as they are, to keep.
    #[must_use]
    pub fn snapshot(&self) -> Arc<SlotMap> {
        Arc::new(self.map.clone())
    }

    /// A reader that follows all updates, for one thread; clone it for more.
    #[must_use]
    pub fn reader(&self) -> SlotReader {
        SlotReader::new(self.publisher.reader())
    }

    /// Adds `slot`.
    ///
    /// # Errors
    /// When the slot is empty, misaligned, wraps around an address space, or has frames or the id
    /// of another; nothing is changed then.
    pub fn insert(&mut self, slot: Slot) -> Result<(), SlotError> {
        self.update(|edit| edit.insert(slot))
    }

    /// Takes away slot `id` and returns it.
    ///
    /// # Errors
    /// When there is no such slot.
    pub fn remove(&mut self, id: SlotId) -> Result<Slot, SlotError> {
        self.update(|edit| edit.remove(id))
    }

    /// Moves slot `id` so that it begins with guest frame `gfn`.
    ///
    /// # Errors
    /// When there is no such slot, or its new place wraps around or has frames of another; nothing
    /// is changed then.
    pub fn move_to(&mut self, id: SlotId, gfn: Gfn) -> Result<(), SlotError> {
        self.update(|edit| edit.move_to(id, gfn))
    }

    /// Gives slot `id` other flags; returns those it had.
    ///
    /// # Errors
    /// When there is no such slot.
    pub fn set_flags(&mut self, id: SlotId, flags: SlotFlags) -> Result<SlotFlags, SlotError> {
        self.update(|edit| edit.set_flags(id, flags))
    }

    /// Makes several changes at once: readers see all of them or none. When `change` fails, none is
    /// made.
    ///
    /// # Errors
    /// None of its own: it hands on what `change` says.
    pub fn update<T, E>(
        &mut self,
        change: impl FnOnce(&mut SlotEdit) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut edit = SlotEdit::new(self.map.clone());
        let result = change(&mut edit)?;
        self.map = edit.finish();
        self.publisher.publish(self.map.clone());
        Ok(result)
    }
}

#[cfg(test)]
mod tests;
