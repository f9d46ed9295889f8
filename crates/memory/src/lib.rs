//! RAM blocks, segments and mappings (under construction); memory slots.

mod slots;

pub use slots::{
    GfnRange, HvaRange, MemSlots, Slot, SlotEdit, SlotError, SlotFlags, SlotId, SlotMap, SlotReader,
};
