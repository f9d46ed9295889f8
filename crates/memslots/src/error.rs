//! Why a change to the memory slots was refused: always with the slot and the range.

use std::fmt;

use godwit_units::{Gfn, Gpa, Hva, PAGE_SIZE, PageCount};

use crate::{Slot, SlotId};

/// A range of guest frames, as it was asked for.
///
/// ```
/// use godwit_memslots::GfnRange;
/// use godwit_units::{Gfn, PageCount};
///
/// let frames = GfnRange { start: Gfn(0x100), pages: PageCount(16) };
/// assert_eq!(frames.to_string(), "frames 0x100..0x110");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GfnRange {
    /// The first frame.
    pub start: Gfn,
    /// How many.
    pub pages: PageCount,
}

impl fmt::Display for GfnRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "frames {}..{:#x}",
            self.start,
            u128::from(self.start.0) + u128::from(self.pages.0)
        )
    }
}

/// A range of host addresses, as it was asked for.
///
/// ```
/// use godwit_memslots::HvaRange;
/// use godwit_units::{Hva, PageCount};
///
/// let addresses = HvaRange { start: Hva(0x1000), pages: PageCount(2) };
/// assert_eq!(addresses.to_string(), "host addresses 0x1000..0x3000");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HvaRange {
    /// The first address.
    pub start: Hva,
    /// How many pages.
    pub pages: PageCount,
}

impl fmt::Display for HvaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = u128::from(self.start.0) + u128::from(self.pages.0) * u128::from(PAGE_SIZE);
        write!(f, "host addresses {}..{end:#x}", self.start)
    }
}

impl From<&Slot> for GfnRange {
    fn from(slot: &Slot) -> Self {
        Self { start: slot.gfn, pages: slot.pages }
    }
}

impl From<&Slot> for HvaRange {
    fn from(slot: &Slot) -> Self {
        Self { start: slot.hva, pages: slot.pages }
    }
}

/// Why a change to the memory slots was refused.
///
/// ```
/// use godwit_memslots::{MemSlots, Slot, SlotError, SlotId};
/// use godwit_units::{Gfn, PageCount};
///
/// let mut slots = MemSlots::new();
/// let slot = Slot { id: SlotId(7), gfn: Gfn(0x100), pages: PageCount(16), ..Slot::default() };
/// slots.insert(slot)?;
/// let refused = slots.insert(Slot { id: SlotId(8), ..slot });
/// assert!(matches!(refused, Err(SlotError::Overlap { other: SlotId(7), .. })));
/// # Ok::<(), SlotError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The slot has no pages.
    #[error("{slot} at frame {gfn} has no pages")]
    Empty {
        /// The slot refused.
        slot: SlotId,
        /// Where it would begin.
        gfn: Gfn,
    },
    /// The host address does not begin a page.
    #[error("{slot} at {hvas}: the first address is not a multiple of the page size")]
    Misaligned {
        /// The slot refused.
        slot: SlotId,
        /// Its host addresses.
        hvas: HvaRange,
    },
    /// The guest frames end past the last address of the guest.
    #[error("{slot} with {gfns} reaches past the guest's last frame")]
    GfnWraps {
        /// The slot refused.
        slot: SlotId,
        /// Its frames.
        gfns: GfnRange,
    },
    /// The host addresses end past the last one.
    #[error("{slot} at {hvas} reaches past the last host address")]
    HvaWraps {
        /// The slot refused.
        slot: SlotId,
        /// Its host addresses.
        hvas: HvaRange,
    },
    /// The pages of the RAM block end past the last number of a page.
    #[error(
        "{slot} of {pages} from page {first} of its RAM block reaches past the last page number"
    )]
    BlockWraps {
        /// The slot refused.
        slot: SlotId,
        /// The first page of the block.
        first: u64,
        /// How many pages.
        pages: PageCount,
    },
    /// Some guest frames belong to another slot.
    #[error("{slot} with {gfns} overlaps {other} with {others}")]
    Overlap {
        /// The slot refused.
        slot: SlotId,
        /// Its frames.
        gfns: GfnRange,
        /// The slot that is there.
        other: SlotId,
        /// The frames of that slot.
        others: GfnRange,
    },
    /// The id is taken.
    #[error("{slot} with {gfns} cannot be added: {slot} exists with {others}")]
    DuplicateId {
        /// The slot refused.
        slot: SlotId,
        /// Its frames.
        gfns: GfnRange,
        /// The frames of the slot that has the id.
        others: GfnRange,
    },
    /// The memory does not begin and end with a page.
    #[error("{slot} at guest address {start} of {bytes} bytes is not whole pages")]
    NotPages {
        /// The slot refused.
        slot: SlotId,
        /// Where it would begin.
        start: Gpa,
        /// Its size in bytes.
        bytes: u64,
    },
    /// The memory has no address in this process.
    #[error("{slot} at guest address {start} is not mapped in this process")]
    NotMapped {
        /// The slot refused.
        slot: SlotId,
        /// Where it would begin.
        start: Gpa,
    },
    /// There is no slot of this id.
    #[error("there is no {slot}")]
    Unknown {
        /// The id asked for.
        slot: SlotId,
    },
}
