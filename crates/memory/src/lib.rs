//! Guest memory: RAM blocks (what migrates), the segments they are cut into, and mappings.
//!
//! A RAM block is a file that the guest's process maps. Godwit reads and writes it with `pread` and
//! `pwrite`, not through a mapping of its own: that costs no page tables and no faults, a hole
//! reads as zeros without being filled, and a page written whole into a new file is neither faulted
//! in nor zeroed first.

mod block;
mod extents;
mod huge;
mod mapping;
mod room;
#[cfg(feature = "vm-memory")]
mod rust_vmm;
mod segment;
mod tmpfs;

pub use block::{MemoryError, RamBlock};
pub use extents::{DataExtents, DataHint};
pub use mapping::Mapping;
pub use room::{NoRoom, host_holds, mounts_hold};
pub use segment::{FIRST_HARVEST, NEXT_HARVEST, SEGMENT_PAGES, Segment, channel_of, segments};
