//! Memory of the bare-metal guest: a file, mapped shared, so that what the guest writes can be read
//! with `pread`.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_units::{ByteCount, Hva, PAGE_SIZE, PageCount, PageIndex, PageRun};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::BlockMapping;

/// A stretch of guest memory.
#[derive(Debug)]
pub struct Ram {
    file: File,
    base: NonNull<AtomicU64>,
    pages: PageCount,
}

// SAFETY: the mapping is accessed only through atomics, and unmapped by its one owner.
unsafe impl Send for Ram {}
// SAFETY: as above.
unsafe impl Sync for Ram {}

impl Ram {
    /// `pages` of memory, all zero.
    pub(super) fn new(pages: PageCount) -> io::Result<Self> {
        let file: File = rustix::fs::memfd_create("godwit-bare-guest", MemfdFlags::CLOEXEC)?.into();
        file.set_len(pages.bytes().0)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let bytes = pages.bytes().0 as usize;
        // SAFETY: a new mapping at a place of the kernel's choice, of a file as long as the
        // mapping.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { file, base, pages })
    }

    /// Its size.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        self.pages
    }

    /// Where it is mapped.
    #[must_use]
    pub fn mapping(&self) -> BlockMapping {
        BlockMapping {
            pages: PageRun::new(0, self.pages.0),
            address: Hva(self.base.as_ptr() as u64),
        }
    }

    /// Reads `page` as it is now.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read(&self, page: PageIndex, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, page.offset())
    }

    /// The word at byte `offset`, a multiple of 8.
    #[must_use]
    pub fn word(&self, offset: u64) -> u64 {
        self.at(offset).load(Ordering::Acquire)
    }

    /// Writes the word at byte `offset`, a multiple of 8, through the mapping, as a device does.
    pub fn store(&self, offset: u64, value: u64) {
        self.at(offset).store(value, Ordering::Release);
    }

    fn at(&self, offset: u64) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8) && ByteCount(offset) < self.pages.bytes(),
            "no word at {offset:#x}"
        );
        // SAFETY: aligned and within the mapping, which lives as long as `self`.
        unsafe { self.base.add((offset / 8) as usize).as_ref() }
    }

    /// Copies `bytes` to byte `offset`.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        let bytes = (self.pages.0 * PAGE_SIZE) as usize;
        // SAFETY: the mapping was made by `new` with this length, and no reference into it is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), bytes) };
    }
}
