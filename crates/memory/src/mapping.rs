//! Windows on a RAM file: a read-only one for an observer that looks at single words while the
//! guest writes them, and one for writing to files that cannot be written otherwise.
//!
//! Keeps two promises: a read lies within the window, and it is one aligned load that the compiler
//! neither repeats nor leaves out, so a counter is never seen half written. Bulk reading and
//! writing is [`crate::RamBlock`]'s, on a tmpfs without mappings.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ptr::NonNull;

use godwit_units::{ByteCount, PAGE_SIZE};
use rustix::mm::{MapFlags, ProtFlags};

/// Part of a file, mapped shared and read-only.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u64>,
    len: usize,
}

// SAFETY: the mapping is memory like any other, only read, and unmapped by its one owner; which
// thread does that does not matter to the kernel.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `len` of `file` from `offset` on, both whole pages.
    ///
    /// Reading a hole of a tmpfs file through a mapping fills it with a page of zeroes: look for
    /// data (`SEEK_DATA`) before reading where that matters.
    ///
    /// # Errors
    /// When the range is empty, not whole pages or beyond the end of the file, or the kernel
    /// refuses.
    pub fn read_only(file: &File, offset: u64, len: ByteCount) -> io::Result<Self> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        if len.0 == 0 || !len.0.is_multiple_of(PAGE_SIZE) || !offset.is_multiple_of(PAGE_SIZE) {
            return Err(invalid("a mapping covers whole pages"));
        }
        // Beyond the end every access would raise SIGBUS.
        if offset
            .checked_add(len.0)
            .is_none_or(|end| file.metadata().is_ok_and(|meta| meta.len() < end))
        {
            return Err(invalid("the mapping would reach beyond the end of the file"));
        }
        let size = usize::try_from(len.0).map_err(|_| invalid("the mapping is too large"))?;
        // SAFETY: without MAP_FIXED and at no given address the kernel picks a free place, so
        // nothing that exists is touched.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ,
                MapFlags::SHARED,
                file,
                offset,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| invalid("mapped at address zero"))?;
        Ok(Self { base, len: size })
    }

    /// The word at `offset` as it is now.
    ///
    /// # Panics
    /// When `offset` is not a multiple of 8 within the mapping.
    #[must_use]
    pub fn word(&self, offset: usize) -> u64 {
        assert!(
            offset.is_multiple_of(8) && offset < self.len,
            "word at {offset} of {} mapped bytes",
            self.len
        );
        // SAFETY: the mapping is page-aligned and `offset` a multiple of 8 below its length, itself
        // a multiple of 8, so the word is aligned and inside; it stays mapped as long as `self`
        // lives. Others write it meanwhile, hence the volatile read, which makes no assumption on
        // its value; any bit pattern is a u64. Whoever truncates the file kills this process by
        // SIGBUS: RAM files keep their size.
        unsafe { self.base.as_ptr().add(offset / 8).read_volatile() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping made in `read_only`, and no reference
        // into it is left: none is ever given out. It can only fail for a range that is no mapping.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// All of a file, or a part of it, mapped shared for writing; see [`crate::huge`].
#[derive(Debug)]
pub(crate) struct WritableMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: as for `Mapping`: memory that is unmapped by its one owner.
unsafe impl Send for WritableMapping {}
// SAFETY: `write` makes no reference to the memory, which other processes write as well. Two writes
// to the same bytes at the same time leave a mixture, as two calls of pwrite(2) may; both are
// bytes.
unsafe impl Sync for WritableMapping {}

impl WritableMapping {
    /// Maps `len` bytes of `file` from `offset` on, both whole pages of that file.
    pub(crate) fn new(file: &File, offset: u64, len: ByteCount) -> io::Result<Self> {
        let size =
            usize::try_from(len.0).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as in `Mapping::read_only`.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), size, access, MapFlags::SHARED, file, offset)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { base, len: size })
    }

    /// Copies `bytes` to `offset` of the mapping. The pages there must have been allocated.
    ///
    /// # Panics
    /// Beyond the end of the mapping.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let fits = usize::try_from(offset)
            .is_ok_and(|at| at.checked_add(bytes.len()).is_some_and(|end| end <= self.len));
        assert!(fits, "{} bytes at {offset} of {} mapped bytes", bytes.len(), self.len);
        // SAFETY: source and target are valid for that length, as was just checked, and do not
        // overlap: nobody has a slice of the mapping. It stays mapped as long as `self` lives.
        unsafe {
            let to = self.base.as_ptr().add(offset as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }
}

impl Drop for WritableMapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping made in `new`, and no reference into it
        // was ever given out.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn file(pages: u64) -> File {
        let file: File =
            rustix::fs::memfd_create("mapping", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
        file.set_len(pages * PAGE_SIZE).unwrap();
        file
    }

    #[test]
    fn sees_what_others_write() {
        let file = file(3);
        let mapping = Mapping::read_only(&file, PAGE_SIZE, ByteCount(PAGE_SIZE)).unwrap();
        assert_eq!(mapping.word(64), 0);
        file.write_all_at(&7_u64.to_ne_bytes(), PAGE_SIZE + 64).unwrap();
        assert_eq!(mapping.word(64), 7);
        assert_eq!(mapping.word(4088), 0);
    }

    #[test]
    fn refuses_what_it_could_not_read() {
        let file = file(2);
        for (offset, len) in
            [(0, 0), (0, 100), (8, PAGE_SIZE), (PAGE_SIZE, 2 * PAGE_SIZE), (!4095, PAGE_SIZE)]
        {
            assert!(
                Mapping::read_only(&file, offset, ByteCount(len)).is_err(),
                "{len} bytes at {offset}"
            );
        }
    }

    #[test]
    #[should_panic(expected = "word at 4096")]
    fn a_word_beyond_the_end_is_our_own_bug() {
        let _ = Mapping::read_only(&file(1), 0, ByteCount(PAGE_SIZE)).unwrap().word(4096);
    }
}
