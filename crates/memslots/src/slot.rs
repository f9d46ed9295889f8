//! One memory slot, and what it says about addresses within it.

use std::fmt;
use std::ops::{BitOr, Range};

use godwit_units::{Gfn, Hva, PAGE_SIZE, PageCount, PageIndex, PageRun};

/// The number of a slot on this host; sparse numbers cost nothing.
///
/// ```
/// assert_eq!(godwit_memslots::SlotId(7).to_string(), "slot 7");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SlotId(pub u32);

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {}", self.0)
    }
}

/// Flags of a slot, with the values of KVM (`KVM_MEM_*`, Documentation/virt/kvm/api.rst,
/// `KVM_SET_USER_MEMORY_REGION`); bits unknown here are kept.
///
/// ```
/// use godwit_memslots::SlotFlags;
///
/// let flags = SlotFlags::LOG_DIRTY_PAGES | SlotFlags::READONLY;
/// assert!(flags.contains(SlotFlags::READONLY));
/// assert_eq!(flags.0, 3, "as KVM has them");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct SlotFlags(pub u32);

impl SlotFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// Writes of the guest are logged.
    pub const LOG_DIRTY_PAGES: Self = Self(1);
    /// The guest cannot write.
    pub const READONLY: Self = Self(2);

    /// Whether all flags of `other` are set.
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for SlotFlags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A range of guest frames, where it lies in the host, and which pages of which RAM block it shows.
///
/// ```
/// use godwit_memslots::Slot;
/// use godwit_units::{Gfn, Hva, PageCount, PageIndex};
///
/// let (gfn, hva) = (Gfn(0x100), Hva(0x7f00_0000_0000));
/// let slot = Slot { gfn, hva, pages: PageCount(16), first: PageIndex(1000), ..Slot::default() };
/// assert_eq!(slot.page_of_gfn(Gfn(0x103)), Some(PageIndex(1003)));
/// assert_eq!(slot.page_of_hva(Hva(0x7f00_0000_3abc)), Some(PageIndex(1003)));
/// assert_eq!(slot.page_of_gfn(Gfn(0x110)), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Slot {
    /// Its number.
    pub id: SlotId,
    /// Its flags.
    pub flags: SlotFlags,
    /// The first guest frame.
    pub gfn: Gfn,
    /// How many pages; never 0.
    pub pages: PageCount,
    /// The host address of the first page.
    pub hva: Hva,
    /// Which RAM block its pages belong to.
    pub block: u32,
    /// Which page of that block is the first page of the slot.
    pub first: PageIndex,
}

impl Slot {
    /// The guest frames, `start..end`.
    #[inline]
    #[must_use]
    pub fn gfns(&self) -> Range<u64> {
        self.gfn.0..self.gfn.0 + self.pages.0
    }

    /// The host addresses in bytes, `start..end`.
    #[inline]
    #[must_use]
    pub fn hvas(&self) -> Range<u64> {
        self.hva.0..self.hva.0 + self.pages.0 * PAGE_SIZE
    }

    /// Whether guest frame `gfn` lies in this slot: one comparison, since the outcome of the first
    /// of two would be anyone's guess.
    #[inline]
    #[must_use]
    pub fn has_gfn(&self, gfn: Gfn) -> bool {
        gfn.0.wrapping_sub(self.gfn.0) < self.pages.0
    }

    /// Whether host address `hva` lies in this slot.
    #[inline]
    #[must_use]
    pub fn has_hva(&self, hva: Hva) -> bool {
        hva.0.wrapping_sub(self.hva.0) < self.pages.0 * PAGE_SIZE
    }

    /// The page of the RAM block that guest frame `gfn` is, if it lies in this slot.
    #[must_use]
    pub fn page_of_gfn(&self, gfn: Gfn) -> Option<PageIndex> {
        self.has_gfn(gfn).then(|| PageIndex(self.first.0 + gfn.0 - self.gfn.0))
    }

    /// The page of the RAM block that host address `hva` lies in, if it lies in this slot.
    #[must_use]
    pub fn page_of_hva(&self, hva: Hva) -> Option<PageIndex> {
        self.has_hva(hva).then(|| PageIndex(self.first.0 + (hva.0 - self.hva.0) / PAGE_SIZE))
    }

    /// The pages of the RAM block that lie at host addresses `hvas`, as far as they lie in this
    /// slot; a page that is touched only in part counts.
    #[inline]
    #[must_use]
    pub fn pages_of_hvas(&self, hvas: &Range<u64>) -> Option<PageRun> {
        let own = self.hvas();
        let (start, end) = (hvas.start.max(own.start), hvas.end.min(own.end));
        (start < end).then(|| {
            let (from, to) =
                ((start - own.start) / PAGE_SIZE, (end - own.start).div_ceil(PAGE_SIZE));
            PageRun::new(self.first.0 + from, to - from)
        })
    }

    /// The pages of the RAM block that the guest frames `gfns` are, as far as they lie in this
    /// slot.
    #[must_use]
    pub fn pages_of_gfns(&self, gfns: &Range<u64>) -> Option<PageRun> {
        let own = self.gfns();
        let (start, end) = (gfns.start.max(own.start), gfns.end.min(own.end));
        (start < end).then(|| PageRun::new(self.first.0 + start - own.start, end - start))
    }
}
