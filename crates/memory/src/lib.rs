//! Guest memory: RAM blocks (what migrates), the segments they are cut into, and mappings of them.
//!
//! A RAM block is a file that the guest's process maps. Godwit reads and writes it with `pread` and `pwrite`,
//! not through a mapping of its own: that costs no page tables and no faults, a hole reads as zeros without
//! being filled, and a page written whole into a new file is neither faulted in nor zeroed first.

mod block;
mod extents;
mod mapping;
mod segment;

pub use block::{MemoryError, RamBlock};
pub use extents::DataExtents;
pub use mapping::Mapping;
pub use segment::{SEGMENT_PAGES, Segment, channel_of, segments};
