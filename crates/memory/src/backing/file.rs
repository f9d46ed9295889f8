//! A file that the guest's process maps: on a tmpfs, a memfd, or on hugetlbfs.
//!
//! It is read and written with `pread` and `pwrite`, not through a mapping of our own: that costs
//! no page tables and no faults, a hole reads as zeros without being filled, and a page written
//! whole into a new file is neither faulted in nor zeroed first.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use super::huge::HugeFile;
use super::{Backing, Place, Space, write_zeros};

/// How far data is taken to reach where its end is not looked for, in bytes. To read so many takes
/// a hundred times as long as the next look for data.
const DATA_PIECE: u64 = 256 << 10;

/// A file that holds a block.
#[derive(Debug)]
pub struct FileBacking {
    path: PathBuf,
    file: File,
    /// How it is written where write(2) cannot.
    huge: Option<HugeFile>,
    /// Where the block begins in the file, in bytes.
    offset: u64,
    /// Whether its memory was allocated ahead (`prealloc=on`) and must stay so.
    keep_allocated: bool,
}

impl FileBacking {
    /// `file`, named `path`, from byte `offset` on. With `huge_page`, the bytes of its huge pages,
    /// it is on hugetlbfs.
    pub(crate) fn new(
        path: &Path,
        file: File,
        offset: u64,
        huge_page: Option<u64>,
        keep_allocated: bool,
    ) -> io::Result<Self> {
        let huge = huge_page.map(|page| HugeFile::new(&file, page)).transpose()?;
        Ok(Self { path: path.to_owned(), file, huge, offset, keep_allocated })
    }

    /// A position in the file as one in the block.
    fn within(&self, found: Result<u64, Errno>) -> io::Result<Option<u64>> {
        match found {
            // Past the last data.
            Err(Errno::NXIO) => Ok(None),
            Ok(at) => Ok(Some(at - self.offset)),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Backing for FileBacking {
    fn read(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, self.offset + at)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        match &self.huge {
            None => self.file.write_all_at(bytes, self.offset + at),
            Some(huge) => huge.write(&self.file, bytes, self.offset + at),
        }
    }

    /// A hole stays one; anything else is punched out of the file, or overwritten when the block
    /// keeps its memory allocated.
    fn zero(&self, at: u64, end: u64) -> io::Result<()> {
        if let Some(huge) = &self.huge {
            let (at, end) = (self.offset + at, self.offset + end);
            return huge.zero(&self.file, at, end, self.keep_allocated);
        }
        let Some(at) = self.data_from(at, end)? else { return Ok(()) };
        if self.keep_allocated {
            return write_zeros(self, at, end);
        }
        // Holes among what follows stay holes; to look for them would cost more.
        self.give_back(at, end)
    }

    fn give_back(&self, at: u64, end: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, self.offset + at, end - at)?)
    }

    fn data_from(&self, at: u64, end: u64) -> io::Result<Option<u64>> {
        let found = rustix::fs::seek(&self.file, SeekFrom::Data(self.offset + at));
        Ok(self.within(found)?.filter(|data| *data < end))
    }

    fn hole_from(&self, at: u64, _end: u64) -> io::Result<Option<u64>> {
        self.within(rustix::fs::seek(&self.file, SeekFrom::Hole(self.offset + at)))
    }

    /// No look at all: `SEEK_HOLE` would walk through all the data that follows, with the lock held
    /// that every write to the file takes.
    fn data_end(&self, at: u64, end: u64) -> io::Result<u64> {
        Ok(end.min((at / DATA_PIECE + 1) * DATA_PIECE))
    }

    /// One look, however large the file is.
    fn allocated(&self) -> io::Result<u64> {
        // stat(2): in units of 512 bytes.
        Ok(self.file.metadata()?.blocks() * 512)
    }

    fn place(&self) -> io::Result<Place> {
        let status = self.file.metadata()?;
        Ok(Place::File { device: status.dev(), inode: status.ino(), offset: self.offset })
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.path)
    }

    fn huge_page(&self) -> Option<u64> {
        self.huge.as_ref().map(HugeFile::page)
    }

    fn space(&self) -> Option<Space> {
        let status = rustix::fs::fstatfs(&self.file).ok()?;
        let unit = status.f_bsize.cast_unsigned();
        // tmpfs counts nothing when it is mounted without a limit (shmem_statfs).
        let limited = self.huge.is_none() && status.f_blocks > 0;
        limited.then(|| Space { size: status.f_blocks * unit, free: status.f_bavail * unit })
    }
}
