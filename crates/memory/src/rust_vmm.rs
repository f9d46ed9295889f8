//! RAM blocks of a VMM that holds its memory in vm-memory.

use std::sync::Arc;

use godwit_units::ByteCount;
use vm_memory::{FileOffset, GuestMemoryBackend, GuestMemoryRegion};

use crate::{MemoryError, RamBlock};

impl RamBlock {
    /// The `size` bytes of a file from where `file` says, as the RAM block `name`. The descriptor
    /// is duplicated; the file must be a memfd, or lie on a tmpfs or hugetlbfs.
    ///
    /// # Errors
    /// As [`RamBlock::from_fd`].
    pub fn from_file_offset(
        name: &str,
        file: &FileOffset,
        size: ByteCount,
    ) -> Result<Self, MemoryError> {
        let own = file.file().try_clone();
        let own = own.map_err(|source| MemoryError::Open {
            block: name.to_owned(),
            path: "its descriptor".into(),
            source,
        })?;
        Self::from_fd(name, own.into(), file.start(), size)
    }

    /// A RAM block for each region of `memory`, in its order: `ram0`, `ram1` and so on, which the
    /// other side must have as well. Each region must have been made from a file, shared with the
    /// guest.
    ///
    /// # Errors
    /// When a region has no file, or one of a kind that is not handled.
    ///
    /// ```
    /// use std::fs::File;
    /// use godwit_memory::RamBlock;
    /// use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
    ///
    /// let memfd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC)?;
    /// let file = File::from(memfd);
    /// file.set_len(1 << 20)?;
    /// let ranges = [(GuestAddress(0), 1 << 20, Some(FileOffset::new(file, 0)))];
    /// let memory = GuestMemoryMmap::<()>::from_ranges_with_files(ranges)?;
    /// let blocks = RamBlock::of_guest_memory(&memory)?;
    /// assert_eq!((blocks[0].name(), blocks[0].pages().0), ("ram0", 256));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of_guest_memory<M: GuestMemoryBackend>(
        memory: &M,
    ) -> Result<Arc<Vec<Self>>, MemoryError> {
        let block = |(number, region): (usize, &M::R)| {
            let name = format!("ram{number}");
            match region.file_offset() {
                Some(file) => Self::from_file_offset(&name, file, ByteCount(region.len())),
                None => Err(MemoryError::Unsuitable {
                    block: name,
                    path: "its region".into(),
                    problem: "has no file: make it with GuestMemoryMmap::from_ranges_with_files, \
                              from a memfd",
                }),
            }
        };
        memory.iter().enumerate().map(block).collect::<Result<Vec<_>, _>>().map(Arc::new)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use godwit_units::PageIndex;
    use rustix::fs::{MemfdFlags, memfd_create};
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;

    #[test]
    fn what_the_vmm_writes_is_read_from_the_block_and_the_other_way_round() {
        let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(3 << 20).unwrap();
        let part = FileOffset::new(file, 1 << 20);
        let memory = GuestMemoryMmap::<()>::from_ranges_with_files([(
            GuestAddress(0x1000),
            2 << 20,
            Some(part),
        )])
        .unwrap();
        let blocks = RamBlock::of_guest_memory(&memory).unwrap();
        memory.write_slice(b"guest", GuestAddress(0x3000)).unwrap();
        let mut page = [0; 4096];
        blocks[0].read(PageIndex(2), &mut page).unwrap();
        assert_eq!(&page[..5], b"guest");
        page[..5].copy_from_slice(b"moved");
        blocks[0].write(PageIndex(511), &page).unwrap();
        let mut back = [0; 5];
        memory.read_slice(&mut back, GuestAddress(0x1000 + 511 * 4096)).unwrap();
        assert_eq!(&back, b"moved");
    }

    #[test]
    fn memory_without_a_file_is_refused_with_the_cure() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let refused = RamBlock::of_guest_memory(&memory).unwrap_err().to_string();
        assert!(refused.contains("from_ranges_with_files"), "{refused}");
    }
}
