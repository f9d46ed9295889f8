//! One state of all memory slots, and the changes that make the next state of it.
//!
//! The invariant: the three trees hold the same slots; slots share no guest frame and no id. Each
//! change is checked in full before the first tree is touched.

use std::ops::{ControlFlow, Range};

use godwit_units::{Gfn, Hva, PAGE_SIZE, PageRun};

use crate::tree::{Entry, Tree};
use crate::{GfnRange, HvaRange, Slot, SlotError, SlotFlags, SlotId};

/// Guest frames that a guest can have: 2^52, as many as fit a 64-bit physical address.
const FRAMES: u64 = u64::MAX / PAGE_SIZE + 1;

#[derive(Clone, Copy, Debug, Default)]
struct ByGfn(Slot);

impl Entry for ByGfn {
    const OVERLAPS: bool = false;
    fn key(&self) -> u64 {
        self.0.gfn.0
    }
    fn tie(&self) -> u32 {
        0
    }
    fn end(&self) -> u64 {
        self.0.gfns().end
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct ByHva(Slot);

impl Entry for ByHva {
    const OVERLAPS: bool = true;
    fn key(&self) -> u64 {
        self.0.hva.0
    }
    fn tie(&self) -> u32 {
        self.0.id.0
    }
    fn end(&self) -> u64 {
        self.0.hvas().end
    }
}

/// The frame that the slot of an id begins with: all that is needed to find it.
#[derive(Clone, Copy, Debug, Default)]
struct ById {
    id: u32,
    gfn: Gfn,
}

impl Entry for ById {
    const OVERLAPS: bool = false;
    fn key(&self) -> u64 {
        u64::from(self.id)
    }
    fn tie(&self) -> u32 {
        0
    }
    fn end(&self) -> u64 {
        u64::from(self.id) + 1
    }
}

/// One state of all memory slots. Cloning is cheap: the clones share what they have in common.
///
/// ```
/// use godwit_memslots::{MemSlots, Slot, SlotError, SlotId};
/// use godwit_units::{Gfn, PageCount, PageRun};
///
/// let mut slots = MemSlots::new();
/// slots.insert(Slot { id: SlotId(7), gfn: Gfn(0x100), pages: PageCount(16), ..Slot::default() })?;
/// let map = slots.snapshot();
/// slots.remove(SlotId(7))?;
/// // What was taken before the change does not see it.
/// let mut found = Vec::new();
/// map.for_each_in_gfns(Gfn(0x10e)..Gfn(0x200), |slot, pages| found.push((slot.id, pages)));
/// assert_eq!(found, [(SlotId(7), PageRun::new(14, 2))]);
/// # Ok::<(), SlotError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct SlotMap {
    gfns: Tree<ByGfn>,
    hvas: Tree<ByHva>,
    ids: Tree<ById>,
}

impl SlotMap {
    /// How many slots there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.gfns.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slot that guest frame `gfn` lies in.
    #[must_use]
    pub fn by_gfn(&self, gfn: Gfn) -> Option<&Slot> {
        self.gfns.holding(gfn.0).map(|entry| &entry.0)
    }

    /// The slot that host address `hva` lies in; of several, the one that begins last, and of those
    /// the one with the highest id.
    #[must_use]
    pub fn by_hva(&self, hva: Hva) -> Option<&Slot> {
        self.hvas.holding(hva.0).map(|entry| &entry.0)
    }

    /// The slot of this id.
    #[must_use]
    pub fn by_id(&self, id: SlotId) -> Option<&Slot> {
        let entry = self.ids.exact(u64::from(id.0), 0)?;
        self.gfns.exact(entry.gfn.0, 0).map(|entry| &entry.0)
    }

    /// Calls `f` with every slot that has some of the guest frames `gfns`, in order of frames, and
    /// with the pages of its RAM block that those are.
    pub fn for_each_in_gfns(&self, gfns: Range<Gfn>, mut f: impl FnMut(&Slot, PageRun)) {
        let gfns = gfns.start.0..gfns.end.0;
        let _ = self.gfns.overlapping(gfns.clone(), &mut |entry| {
            if let Some(pages) = entry.0.pages_of_gfns(&gfns) {
                f(&entry.0, pages);
            }
            ControlFlow::<()>::Continue(())
        });
    }

    /// Calls `f` with every slot that lies at some of the host addresses `hvas`, in order of where
    /// slots begin, and with the pages of its RAM block that those are. Addresses that several
    /// slots share come once for each; addresses of none do not come.
    pub fn for_each_in_hvas(&self, hvas: Range<Hva>, mut f: impl FnMut(&Slot, PageRun)) {
        let hvas = hvas.start.0..hvas.end.0;
        let _ = self.hvas.overlapping(hvas.clone(), &mut |entry| {
            if let Some(pages) = entry.0.pages_of_hvas(&hvas) {
                f(&entry.0, pages);
            }
            ControlFlow::<()>::Continue(())
        });
    }

    /// All slots, in order of guest frames: what a tracker of KVM's is started on.
    #[must_use]
    pub fn to_vec(&self) -> Vec<Slot> {
        let mut slots = Vec::with_capacity(self.len());
        self.for_each(|slot| slots.push(*slot));
        slots
    }

    /// Calls `f` with every slot, in order of guest frames.
    pub fn for_each(&self, mut f: impl FnMut(&Slot)) {
        let _ = self.gfns.overlapping(0..u64::MAX, &mut |entry| {
            f(&entry.0);
            ControlFlow::<()>::Continue(())
        });
    }

    /// Whether no other slot lies at any host address of `slot`.
    pub(crate) fn is_alone(&self, slot: &Slot) -> bool {
        let others = self.hvas.overlapping(slot.hvas(), &mut |entry| {
            if entry.0.id == slot.id { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        others.is_continue()
    }

    /// A slot other than `id` that has frames of `gfns`.
    fn other_in(&self, gfns: Range<u64>, id: SlotId) -> Option<Slot> {
        let found = self.gfns.overlapping(gfns, &mut |entry| {
            if entry.0.id == id { ControlFlow::Continue(()) } else { ControlFlow::Break(entry.0) }
        });
        found.break_value()
    }

    fn check_place(&self, slot: &Slot) -> Result<(), SlotError> {
        let gfns = GfnRange::from(slot);
        if slot.gfn.0.checked_add(slot.pages.0).is_none_or(|end| end > FRAMES) {
            return Err(SlotError::GfnWraps { slot: slot.id, gfns });
        }
        match self.other_in(slot.gfns(), slot.id) {
            Some(other) => Err(SlotError::Overlap {
                slot: slot.id,
                gfns,
                other: other.id,
                others: GfnRange::from(&other),
            }),
            None => Ok(()),
        }
    }
}

/// Changes under way that no reader sees yet; see [`crate::MemSlots::update`].
///
/// A change that fails changes nothing; the others stand if the whole update is kept.
///
/// ```
/// use godwit_memslots::{MemSlots, Slot, SlotError, SlotId};
/// use godwit_units::{Gfn, PageCount};
///
/// let mut slots = MemSlots::new();
/// let result = slots.update(|edit| {
///     let slot = Slot { id: SlotId(7), gfn: Gfn(0x100), ..Slot::default() };
///     edit.insert(Slot { pages: PageCount(16), ..slot })?;
///     edit.remove(SlotId(8))
/// });
/// assert!(result.is_err());
/// assert!(slots.map().is_empty(), "with one change refused, none is made");
/// ```
#[derive(Debug)]
pub struct SlotEdit {
    map: SlotMap,
}

impl SlotEdit {
    pub(crate) fn new(map: SlotMap) -> Self {
        Self { map }
    }

    pub(crate) fn finish(self) -> SlotMap {
        self.map
    }

    /// The slots with the changes so far.
    #[must_use]
    pub fn map(&self) -> &SlotMap {
        &self.map
    }

    /// Adds `slot`; see [`crate::MemSlots::insert`].
    ///
    /// # Errors
    /// As there.
    pub fn insert(&mut self, slot: Slot) -> Result<(), SlotError> {
        let Slot { id, gfn, pages, hva, .. } = slot;
        let (gfns, hvas) = (GfnRange::from(&slot), HvaRange::from(&slot));
        if pages.0 == 0 {
            return Err(SlotError::Empty { slot: id, gfn });
        }
        if !hva.0.is_multiple_of(PAGE_SIZE) {
            return Err(SlotError::Misaligned { slot: id, hvas });
        }
        if pages.0.checked_mul(PAGE_SIZE).and_then(|bytes| hva.0.checked_add(bytes)).is_none() {
            return Err(SlotError::HvaWraps { slot: id, hvas });
        }
        if slot.first.0.checked_add(pages.0).is_none() {
            return Err(SlotError::BlockWraps { slot: id, first: slot.first.0, pages });
        }
        if let Some(other) = self.map.by_id(id) {
            return Err(SlotError::DuplicateId { slot: id, gfns, others: GfnRange::from(other) });
        }
        self.map.check_place(&slot)?;
        self.map.gfns.insert(ByGfn(slot));
        self.map.hvas.insert(ByHva(slot));
        self.map.ids.insert(ById { id: id.0, gfn });
        Ok(())
    }

    /// Takes away slot `id`; see [`crate::MemSlots::remove`].
    ///
    /// # Errors
    /// As there.
    pub fn remove(&mut self, id: SlotId) -> Result<Slot, SlotError> {
        let slot = self.find(id)?;
        self.map.gfns.remove(slot.gfn.0, 0);
        self.map.hvas.remove(slot.hva.0, id.0);
        self.map.ids.remove(u64::from(id.0), 0);
        Ok(slot)
    }

    /// Moves slot `id`; see [`crate::MemSlots::move_to`].
    ///
    /// # Errors
    /// As there.
    pub fn move_to(&mut self, id: SlotId, gfn: Gfn) -> Result<(), SlotError> {
        let old = self.find(id)?;
        let slot = Slot { gfn, ..old };
        self.map.check_place(&slot)?;
        self.map.gfns.remove(old.gfn.0, 0);
        self.map.gfns.insert(ByGfn(slot));
        self.map.hvas.replace(ByHva(slot));
        self.map.ids.replace(ById { id: id.0, gfn });
        Ok(())
    }

    /// Gives slot `id` other flags; see [`crate::MemSlots::set_flags`].
    ///
    /// # Errors
    /// As there.
    pub fn set_flags(&mut self, id: SlotId, flags: SlotFlags) -> Result<SlotFlags, SlotError> {
        let old = self.find(id)?;
        let slot = Slot { flags, ..old };
        self.map.gfns.replace(ByGfn(slot));
        self.map.hvas.replace(ByHva(slot));
        Ok(old.flags)
    }

    fn find(&self, id: SlotId) -> Result<Slot, SlotError> {
        self.map.by_id(id).copied().ok_or(SlotError::Unknown { slot: id })
    }
}
