//! The reader's side: look-ups that follow all updates, and remember the slot they hit last.
//!
//! The invariant: what is remembered belongs to the state in hand; a new state forgets it.

use std::ops::Range;
use std::sync::Arc;

use godwit_units::{Gfn, Hva, PageRun};

use crate::publish::Reader;
use crate::{Slot, SlotId, SlotMap};

/// Looks slots up in the latest state; for one thread, clone it for more. A look-up never waits.
///
/// ```
/// use godwit_memslots::{MemSlots, Slot, SlotError, SlotId};
/// use godwit_units::{Gfn, PageCount};
///
/// let mut slots = MemSlots::new();
/// let mut reader = slots.reader();
/// slots.insert(Slot { id: SlotId(7), gfn: Gfn(0x100), pages: PageCount(16), ..Slot::default() })?;
/// let looking = std::thread::spawn(move || reader.by_gfn(Gfn(0x105)).map(|slot| slot.id));
/// assert_eq!(looking.join().ok().flatten(), Some(SlotId(7)));
/// # Ok::<(), SlotError>(())
/// ```
#[derive(Clone, Debug)]
pub struct SlotReader {
    reader: Reader<SlotMap>,
    /// The slot hit last; of no pages when there is none.
    last: Slot,
    /// Whether no other slot lies at the host addresses of `last`.
    alone: bool,
}

impl SlotReader {
    pub(crate) fn new(reader: Reader<SlotMap>) -> Self {
        Self { reader, last: Slot::default(), alone: false }
    }

    /// The latest state, to make several look-ups in the same one.
    pub fn snapshot(&mut self) -> Arc<SlotMap> {
        self.refresh();
        Arc::clone(self.reader.state())
    }

    /// The slot that guest frame `gfn` lies in.
    #[inline]
    pub fn by_gfn(&mut self, gfn: Gfn) -> Option<Slot> {
        self.refresh();
        if self.last.has_gfn(gfn) {
            return Some(self.last);
        }
        let slot = *self.reader.state().by_gfn(gfn)?;
        self.remember(slot);
        Some(slot)
    }

    /// The slot that host address `hva` lies in; of several, see [`SlotMap::by_hva`].
    #[inline]
    pub fn by_hva(&mut self, hva: Hva) -> Option<Slot> {
        self.refresh();
        if self.alone && self.last.has_hva(hva) {
            return Some(self.last);
        }
        let slot = *self.reader.state().by_hva(hva)?;
        // Asking whether it is alone costs more than a look-up, so only once it is hit again.
        self.alone =
            slot.id == self.last.id && self.last.pages.0 > 0 && self.reader.state().is_alone(&slot);
        self.last = slot;
        Some(slot)
    }

    /// The slot of this id.
    #[inline]
    pub fn by_id(&mut self, id: SlotId) -> Option<Slot> {
        self.refresh();
        if self.last.pages.0 > 0 && self.last.id == id {
            return Some(self.last);
        }
        let slot = *self.reader.state().by_id(id)?;
        self.remember(slot);
        Some(slot)
    }

    /// Calls `f` with every slot that lies at some of the host addresses `hvas` and the pages of
    /// its RAM block that those are: how harvested host addresses become pages. See
    /// [`SlotMap::for_each_in_hvas`]; ranges in the slot hit last are answered without a search.
    #[inline]
    pub fn for_each_in_hvas(&mut self, hvas: Range<Hva>, mut f: impl FnMut(&Slot, PageRun)) {
        self.refresh();
        let own = self.last.hvas();
        if self.alone && own.start <= hvas.start.0 && hvas.end.0 <= own.end {
            if let Some(pages) = self.last.pages_of_hvas(&(hvas.start.0..hvas.end.0)) {
                f(&self.last, pages);
            }
            return;
        }
        let state = self.reader.state();
        let mut last = Slot::default();
        state.for_each_in_hvas(hvas, |slot, pages| {
            last = *slot;
            f(slot, pages);
        });
        self.alone = last.pages.0 > 0 && last == self.last && state.is_alone(&last);
        self.last = last;
    }

    #[inline]
    fn refresh(&mut self) {
        if self.reader.refresh() {
            self.remember(Slot::default());
        }
    }

    #[inline]
    fn remember(&mut self, slot: Slot) {
        self.last = slot;
        self.alone = false;
    }
}
