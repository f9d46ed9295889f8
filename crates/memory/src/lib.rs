//! Guest memory: RAM blocks (what migrates), the segments they are cut into, and mappings.
//!
//! A RAM block is a file that the guest's process maps, or memory of that process itself; which,
//! is behind [`Backing`].

mod backing;
mod block;
mod extents;
mod mapping;
pub mod pagemap;
mod room;
#[cfg(feature = "vm-memory")]
mod rust_vmm;
mod segment;
mod tmpfs;

pub use backing::{Backing, FileBacking, Place, ProcessBacking, Space, huge_pool};
pub use block::{MemoryError, RamBlock};
pub use extents::{DataExtents, DataHint};
pub use mapping::Mapping;
pub use room::{NoRoom, host_has, host_holds, in_meminfo, mounts_hold};
pub use segment::{FIRST_HARVEST, NEXT_HARVEST, SEGMENT_PAGES, Segment, channel_of, segments};
