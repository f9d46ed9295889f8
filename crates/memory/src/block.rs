//! A RAM block: a name, a size and what holds the guest's bytes.
//!
//! Keeps every access within the block. What is dirty and what must be sent is decided elsewhere.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use godwit_units::{ByteCount, PAGE_SIZE, PageCount, PageIndex, PageRun};
use rustix::fs::MemfdFlags;

use crate::backing::{Backing, FileBacking, Place, Space, huge_pool, unreserved};
use crate::{DataExtents, DataHint};

/// `statfs.f_type` of tmpfs, from `linux/magic.h`.
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// `statfs.f_type` of hugetlbfs, from `linux/magic.h`.
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// What to do when a RAM file cannot be opened.
fn open_cure(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::PermissionDenied => "; run godwit as root or as the user that runs the VM",
        io::ErrorKind::NotFound => {
            "; it was removed or renamed: restart the VM on a RAM file of its own"
        }
        _ => "",
    }
}

/// Why a RAM file cannot be used or accessed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The file cannot be opened.
    #[error(
        "RAM block '{block}': cannot open its file {}: {source}{}",
        path.display(), open_cure(source.kind())
    )]
    Open {
        /// The block.
        block: String,
        /// Its file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is of a kind that is not handled.
    #[error("RAM block '{block}': {} {problem}", path.display())]
    Unsuitable {
        /// The block.
        block: String,
        /// Its file.
        path: PathBuf,
        /// What is wrong, and the cure.
        problem: &'static str,
    },
    /// The huge pages that the file may come to use cannot be reserved.
    #[error(
        "RAM block '{block}': its {size} cannot be reserved in huge pages, of which {free} are \
         free: raise {}",
        huge_pool(*page).join("nr_hugepages").display()
    )]
    NoHugePages {
        /// The block.
        block: String,
        /// The size of its file.
        size: ByteCount,
        /// Bytes in huge pages that nobody has or has reserved.
        free: ByteCount,
        /// The size of a huge page.
        page: ByteCount,
    },
    /// Reading or writing failed.
    #[error("RAM block '{block}': cannot {action} {} from {}: {source}", run.count, run.start)]
    Access {
        /// The block.
        block: String,
        /// Read, write or discard.
        action: &'static str,
        /// The pages.
        run: PageRun,
        /// Why.
        source: io::Error,
    },
    /// The pages do not lie within the block.
    #[error("RAM block '{block}' has {size}, but {} from {} were named", run.count, run.start)]
    OutOfRange {
        /// The block.
        block: String,
        /// Its size.
        size: PageCount,
        /// The pages.
        run: PageRun,
    },
}

/// One RAM block, opened for reading and writing.
#[derive(Debug)]
pub struct RamBlock {
    name: String,
    backing: Box<dyn Backing>,
    pages: PageCount,
}

impl RamBlock {
    /// The RAM block `name` of `pages` in memory of any kind.
    #[must_use]
    pub fn new(name: &str, backing: Box<dyn Backing>, pages: PageCount) -> Self {
        Self { name: name.to_owned(), backing, pages }
    }

    /// Opens the file `path`, whose bytes from `file_offset` on are the RAM block `name` of `size`.
    ///
    /// With `keep_allocated`, zero pages are written rather than punched out of the file.
    ///
    /// # Errors
    /// When the file cannot be opened, is shorter than the block, or lies neither on a tmpfs nor on
    /// a hugetlbfs.
    pub fn open(
        name: &str,
        path: &Path,
        file_offset: u64,
        size: ByteCount,
        keep_allocated: bool,
    ) -> Result<Self, MemoryError> {
        let open =
            |source| MemoryError::Open { block: name.to_owned(), path: path.to_owned(), source };
        let file = File::options().read(true).write(true).open(path).map_err(open)?;
        Self::over(name, path, file, file_offset, size, keep_allocated)
    }

    /// The `size` bytes from `file_offset` on of a file that is open already, such as a memfd, as
    /// the RAM block `name`.
    ///
    /// # Errors
    /// As [`Self::open`].
    ///
    /// ```
    /// use godwit_memory::RamBlock;
    /// use godwit_units::{ByteCount, PageIndex};
    ///
    /// let memfd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC)?;
    /// rustix::fs::ftruncate(&memfd, 1 << 20)?;
    /// let block = RamBlock::from_fd("ram", memfd, 0, ByteCount(1 << 20))?;
    /// block.write(PageIndex(3), &[7; 4096])?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_fd(
        name: &str,
        fd: OwnedFd,
        file_offset: u64,
        size: ByteCount,
    ) -> Result<Self, MemoryError> {
        let file = File::from(fd);
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Self::over(name, &path, file, file_offset, size, false)
    }

    /// A new RAM block of `pages`, all hole, in a file of its own without a name (memfd_create(2)).
    ///
    /// # Errors
    /// When there are no pages, or the kernel refuses.
    pub fn anonymous(name: &str, pages: PageCount) -> Result<Self, MemoryError> {
        Self::in_memfd(name, pages, MemfdFlags::CLOEXEC)
    }

    pub(crate) fn in_memfd(
        name: &str,
        pages: PageCount,
        flags: MemfdFlags,
    ) -> Result<Self, MemoryError> {
        let failed =
            |source| MemoryError::Open { block: name.to_owned(), path: "memfd".into(), source };
        let fd = rustix::fs::memfd_create(name, flags).map_err(|errno| failed(errno.into()))?;
        rustix::fs::ftruncate(&fd, pages.bytes().0).map_err(|errno| failed(errno.into()))?;
        Self::from_fd(name, fd, 0, pages.bytes())
    }

    fn over(
        name: &str,
        path: &Path,
        file: File,
        file_offset: u64,
        size: ByteCount,
        keep_allocated: bool,
    ) -> Result<Self, MemoryError> {
        let open =
            |source| MemoryError::Open { block: name.to_owned(), path: path.to_owned(), source };
        let unsuitable = |problem| MemoryError::Unsuitable {
            block: name.to_owned(),
            path: path.to_owned(),
            problem,
        };
        let status = rustix::fs::fstatfs(&file).map_err(|errno| open(errno.into()))?;
        if ![TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&status.f_type) {
            return Err(unsuitable(
                "is not on a tmpfs or hugetlbfs: use a mem-path such as /dev/shm/NAME",
            ));
        }
        let page = status.f_bsize.cast_unsigned();
        let pages = size
            .whole_pages()
            .filter(|pages| pages.0 > 0 && file_offset.is_multiple_of(PAGE_SIZE))
            .ok_or_else(|| unsuitable("does not hold a whole number of 4 KiB pages"))?;
        let needed = file_offset.checked_add(size.0);
        if needed.is_none_or(|needed| file.metadata().is_ok_and(|meta| meta.len() < needed)) {
            return Err(unsuitable("is shorter than the RAM block it backs"));
        }
        let length = file.metadata().map_or(size.0, |meta| meta.len());
        let huge_page = (status.f_type == HUGETLBFS_MAGIC).then_some(page);
        let backing = FileBacking::new(path, file, file_offset, huge_page, keep_allocated);
        let backing = backing.map_err(|source| match source.raw_os_error() {
            Some(errno) if errno == rustix::io::Errno::NOMEM.raw_os_error() => {
                MemoryError::NoHugePages {
                    block: name.to_owned(),
                    size: ByteCount(length),
                    free: unreserved(page),
                    page: ByteCount(page),
                }
            }
            _ => open(source),
        })?;
        Ok(Self::new(name, Box::new(backing), pages))
    }

    /// The name under which both sides know the block.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that holds it, where there is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.backing.path()
    }

    /// Whether its memory comes in huge pages only (hugetlbfs), which are protected as a whole.
    #[must_use]
    pub fn has_huge_pages(&self) -> bool {
        self.huge_page().is_some()
    }

    /// The size of these huge pages.
    #[must_use]
    pub fn huge_page(&self) -> Option<ByteCount> {
        self.backing.huge_page().map(ByteCount)
    }

    /// Its size.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        self.pages
    }

    /// All its pages.
    #[must_use]
    pub fn all(&self) -> PageRun {
        PageRun::new(0, self.pages.0)
    }

    /// Where it is in the page tables of the process that runs the guest.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn place(&self) -> io::Result<Place> {
        self.backing.place()
    }

    /// The tmpfs that holds the file, if it keeps to pages of 4 KiB: filling it then takes about
    /// twice the processor time (docs/bulk.md).
    #[must_use]
    pub fn in_small_pages(&self) -> Option<PathBuf> {
        match self.place().ok()? {
            Place::File { device, .. } if !self.has_huge_pages() => {
                let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
                crate::tmpfs::small_pages(&mountinfo, device)
            }
            _ => None,
        }
    }

    /// The size of the tmpfs that holds the file, and what of it is free; `None` where it has no
    /// limit, or there is none.
    pub(crate) fn space(&self) -> Option<Space> {
        self.backing.space()
    }

    /// Where `run` begins, in bytes.
    fn check(&self, run: PageRun) -> Result<u64, MemoryError> {
        let end = run.start.0.checked_add(run.count.0);
        if end.is_none_or(|end| end > self.pages.0) {
            return Err(MemoryError::OutOfRange {
                block: self.name.clone(),
                size: self.pages,
                run,
            });
        }
        Ok(run.start.offset())
    }

    fn failed(&self, action: &'static str, run: PageRun, source: io::Error) -> MemoryError {
        MemoryError::Access { block: self.name.clone(), action, run, source }
    }

    /// Reads the pages from `start` on into `buffer`, a whole number of pages. A hole reads as
    /// zeros.
    ///
    /// # Errors
    /// When the pages lie outside the block or the read fails.
    pub fn read(&self, start: PageIndex, buffer: &mut [u8]) -> Result<(), MemoryError> {
        let run = PageRun::new(start.0, buffer.len() as u64 / PAGE_SIZE);
        let at = self.check(run)?;
        self.backing.read(at, buffer).map_err(|source| self.failed("read", run, source))
    }

    /// Writes `bytes`, a whole number of pages, to the pages from `start` on.
    ///
    /// # Errors
    /// When the pages lie outside the block or the write fails (no memory or huge page left).
    pub fn write(&self, start: PageIndex, bytes: &[u8]) -> Result<(), MemoryError> {
        let run = PageRun::new(start.0, bytes.len() as u64 / PAGE_SIZE);
        let at = self.check(run)?;
        self.backing.write(at, bytes).map_err(|source| self.failed("write", run, source))
    }

    /// Makes the pages of `run` read as zeros: a hole stays one, anything else becomes one or is
    /// overwritten.
    ///
    /// # Errors
    /// When the pages lie outside the block or the operation fails.
    pub fn zero(&self, run: PageRun) -> Result<(), MemoryError> {
        let at = self.check(run)?;
        let zeroed = self.backing.zero(at, at + run.count.bytes().0);
        zeroed.map_err(|source| self.failed("discard", run, source))
    }

    /// Gives the memory of `run` back, also of a block that keeps its memory allocated: whoever
    /// reads it finds zeros, and whoever waits for pages of the file that are not there
    /// (userfaultfd(2)) waits for these.
    ///
    /// # Errors
    /// When the pages lie outside the block, or it is no file.
    pub fn give_back(&self, run: PageRun) -> Result<(), MemoryError> {
        let at = self.check(run)?;
        let given = self.backing.give_back(at, at + run.count.bytes().0);
        given.map_err(|source| self.failed("give back", run, source))
    }

    /// Calls `found` with the parts of `run` that take memory, to the page, whatever that costs.
    ///
    /// # Errors
    /// When the pages lie outside the block or the kernel does not tell.
    ///
    /// ```
    /// use godwit_memory::RamBlock;
    /// use godwit_units::{PageCount, PageIndex, PageRun};
    ///
    /// let block = RamBlock::anonymous("ram", PageCount(16))?;
    /// block.write(PageIndex(3), &[7; 8192])?;
    /// let mut held = Vec::new();
    /// block.held(block.all(), &mut |run| held.push(run))?;
    /// assert_eq!(held, [PageRun::new(3, 2)]);
    /// # Ok::<(), godwit_memory::MemoryError>(())
    /// ```
    pub fn held(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> Result<(), MemoryError> {
        let mut at = self.check(run)?;
        let end = at + run.count.bytes().0;
        let failed = |source| self.failed("find the data of", run, source);
        while let Some(data) = self.backing.data_from(at, end).map_err(failed)? {
            let hole = self.backing.hole_from(data, end).map_err(failed)?;
            at = hole.unwrap_or(end).min(end);
            let (first, last) = (data / PAGE_SIZE, at.div_ceil(PAGE_SIZE));
            found(PageRun::new(first, last - first));
            if at >= end {
                break;
            }
        }
        Ok(())
    }

    /// How many pages of memory it takes: with all that is in the same file, where several share
    /// one. One look at a file, however large it is; a walk over page tables where there is none.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn allocated(&self) -> Result<PageCount, MemoryError> {
        let bytes = self.backing.allocated();
        let bytes = bytes.map_err(|source| self.failed("look at", self.all(), source))?;
        Ok(PageCount(bytes / PAGE_SIZE))
    }

    /// Whether any page of `run` holds data.
    ///
    /// # Errors
    /// When the pages lie outside the block or the kernel does not tell.
    pub fn has_data(&self, run: PageRun) -> Result<bool, MemoryError> {
        Ok(self.first_data(run)?.is_some())
    }

    /// The first page of `run` that holds data, if there is one. One question to the kernel, which
    /// looks no further than that.
    ///
    /// # Errors
    /// When the pages lie outside the block or the kernel does not tell.
    ///
    /// ```
    /// use godwit_memory::RamBlock;
    /// use godwit_units::{PageCount, PageIndex, PageRun};
    ///
    /// let block = RamBlock::anonymous("ram", PageCount(100))?;
    /// block.write(PageIndex(70), &[1; 4096])?;
    /// assert_eq!(block.first_data(block.all())?, Some(PageIndex(70)));
    /// assert_eq!(block.first_data(PageRun::new(71, 29))?, None);
    /// # Ok::<(), godwit_memory::MemoryError>(())
    /// ```
    pub fn first_data(&self, run: PageRun) -> Result<Option<PageIndex>, MemoryError> {
        let at = self.check(run)?;
        let data = self.backing.data_from(at, at + run.count.bytes().0);
        let data = data.map_err(|source| self.failed("find the data of", run, source))?;
        Ok(data.map(|byte| PageIndex(run.start.0 + (byte - at) / PAGE_SIZE)))
    }

    /// The parts of `run` that hold data, in order; what lies between them are holes, which read as
    /// zeros. `hint` is what was learnt from earlier pieces of the same block.
    pub fn data<'a>(&'a self, run: PageRun, hint: &'a mut DataHint) -> DataExtents<'a> {
        DataExtents::new(self, &*self.backing, run, Some(hint), &[])
    }

    /// The same, in time that depends on `run` alone and not on how much data lies behind it: small
    /// holes may be named as data.
    #[must_use]
    pub fn data_coarse(&self, run: PageRun) -> DataExtents<'_> {
        DataExtents::new(self, &*self.backing, run, None, &[])
    }

    /// The same where `known`, in order, was data a while ago. Where that has become holes since,
    /// it may still be named.
    pub fn data_known<'a>(
        &'a self,
        run: PageRun,
        hint: &'a mut DataHint,
        known: &'a [PageRun],
    ) -> DataExtents<'a> {
        DataExtents::new(self, &*self.backing, run, Some(hint), known)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A RAM block of `pages` in memory.
    pub(crate) fn block(pages: u64, keep_allocated: bool) -> RamBlock {
        let file = File::from(rustix::fs::memfd_create("mem", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(pages * PAGE_SIZE).unwrap();
        let size = PageCount(pages).bytes();
        RamBlock::over("mem", Path::new("mem"), file, 0, size, keep_allocated).unwrap()
    }

    #[test]
    fn what_is_written_is_read() {
        let block = block(4, false);
        block.write(PageIndex(1), &[7; 8192]).unwrap();
        let mut buffer = vec![1; 4 * 4096];
        block.read(PageIndex(0), &mut buffer).unwrap();
        assert_eq!(buffer[..4096], [0; 4096]);
        assert_eq!(buffer[4096..12288], [7; 8192]);
        assert_eq!(buffer[12288..], [0; 4096]);
    }

    #[test]
    fn access_beyond_the_end_is_refused() {
        let block = block(4, false);
        let error = block.write(PageIndex(3), &[7; 8192]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "RAM block 'mem' has 4 pages, but 2 pages from page 3 (offset 0x3000) were named"
        );
        assert!(block.read(PageIndex(u64::MAX), &mut [0; 4096]).is_err());
        assert!(block.zero(PageRun::new(4, 1)).is_err());
    }

    #[test]
    fn zeroing_punches_holes_unless_memory_stays_allocated() {
        for keep in [false, true] {
            let block = block(8, keep);
            block.write(PageIndex(0), &[7; 4 * 4096]).unwrap();
            block.zero(PageRun::new(1, 6)).unwrap();
            let data: Vec<PageRun> =
                block.data(block.all(), &mut DataHint::default()).map(Result::unwrap).collect();
            let expected = if keep { PageRun::new(0, 7) } else { PageRun::new(0, 1) };
            assert_eq!(data, [expected]);
            let mut buffer = [1; 4096];
            block.read(PageIndex(3), &mut buffer).unwrap();
            assert_eq!(buffer, [0; 4096]);
        }
    }

    #[test]
    fn what_is_given_back_is_a_hole_also_where_memory_stays_allocated() {
        for keep_allocated in [false, true] {
            let block = block(64, keep_allocated);
            block.write(PageIndex(0), &[7; 64 * 4096]).unwrap();
            block.give_back(PageRun::new(5, 2)).unwrap();
            let mut held = Vec::new();
            block.held(PageRun::new(3, 60), &mut |run| held.push(run)).unwrap();
            assert_eq!(held, [PageRun::new(3, 2), PageRun::new(7, 56)]);
            assert!(block.give_back(PageRun::new(60, 5)).is_err());
        }
    }

    #[test]
    fn what_is_given_back_is_not_allocated() {
        let block = block(8, false);
        assert_eq!(block.allocated().unwrap(), PageCount(0));
        block.write(PageIndex(2), &[7; 3 * 4096]).unwrap();
        assert_eq!(block.allocated().unwrap(), PageCount(3));
        block.zero(PageRun::new(3, 1)).unwrap();
        assert_eq!(block.allocated().unwrap(), PageCount(2));
    }

    #[test]
    fn unsuitable_files_are_told_apart() {
        let open =
            |path: &str, size| RamBlock::open("mem", Path::new(path), 0, ByteCount(size), false);
        assert!(
            open("/dev/shm/no-such-file", 4096).unwrap_err().to_string().contains("cannot open")
        );
        let path = format!("{}/unsuitable-{}", env!("CARGO_MANIFEST_DIR"), std::process::id());
        File::create(&path).unwrap().set_len(4096).unwrap();
        let result = open(&path, 4096);
        std::fs::remove_file(&path).unwrap();
        assert!(result.unwrap_err().to_string().contains("not on a tmpfs"));
        let path = format!("/dev/shm/godwit-short-{}", std::process::id());
        File::create(&path).unwrap().set_len(4096).unwrap();
        let result = open(&path, 8192);
        std::fs::remove_file(&path).unwrap();
        assert!(result.unwrap_err().to_string().contains("shorter"));
    }
}
