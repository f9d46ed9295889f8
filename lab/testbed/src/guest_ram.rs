//! A guest's RAM as an onlooker sees it: the file that holds it, or the memory of its QEMU.
//!
//! Keeps one promise: looking changes nothing. What no data was written to yet is told apart and
//! never read, since reading a hole of a file through a mapping fills it, and reading memory that
//! was never used maps a page of zeros there.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use godwit_memory::pagemap::{Looked, PageRegion, scan};
use godwit_units::PAGE_SIZE;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Where a guest's RAM is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestRam {
    /// In this file.
    File(PathBuf),
    /// In the memory of this process.
    Process {
        /// The process.
        pid: i32,
        /// Where it begins there.
        address: u64,
        /// How long it is, in bytes.
        size: u64,
    },
}

impl From<&Path> for GuestRam {
    fn from(path: &Path) -> Self {
        Self::File(path.to_owned())
    }
}

/// The same, opened.
#[derive(Debug)]
pub(crate) enum OpenRam {
    File(File),
    Process { memory: File, pagemap: File, range: Range<u64> },
}

impl GuestRam {
    pub(crate) fn open(&self) -> anyhow::Result<OpenRam> {
        let open = |path: &Path| {
            File::open(path).with_context(|| format!("cannot open the RAM in {}", path.display()))
        };
        Ok(match self {
            Self::File(path) => OpenRam::File(open(path)?),
            Self::Process { pid, address, size } => OpenRam::Process {
                memory: open(Path::new(&format!("/proc/{pid}/mem")))?,
                pagemap: open(Path::new(&format!("/proc/{pid}/pagemap")))?,
                range: *address..*address + *size,
            },
        })
    }
}

impl OpenRam {
    /// The next stretch of data from offset `from` on; `None` past the last one.
    pub(crate) fn data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        match self {
            Self::File(file) => {
                let Some(start) = seek(file, SeekFrom::Data(from))? else { return Ok(None) };
                let end = match seek(file, SeekFrom::Hole(start))? {
                    Some(hole) => hole,
                    None => file.metadata()?.len(),
                };
                Ok(Some(start..end))
            }
            Self::Process { range, .. } => self.filled(range.start + from..range.end),
        }
    }

    /// The first stretch of filled pages in `within`, as offsets.
    fn filled(&self, within: Range<u64>) -> io::Result<Option<Range<u64>>> {
        let Self::Process { pagemap, range, .. } = self else { return Ok(None) };
        if within.is_empty() {
            return Ok(None);
        }
        let mut found = [PageRegion::default()];
        let (count, _) = scan(pagemap.as_fd(), Looked::Filled, within, 0, 0, &mut found)?;
        let [PageRegion { start, end, .. }] = found;
        Ok((count > 0).then(|| start - range.start..end - range.start))
    }

    /// Reads `bytes` at `offset`, where there must be data.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File(file) => file.read_exact_at(bytes, offset),
            Self::Process { memory, range, .. } => {
                memory.read_exact_at(bytes, range.start + offset)
            }
        }
    }

    /// The word at `offset`; `None` where no data was written yet, or none can be read any more.
    pub(crate) fn word(&self, offset: u64) -> Option<u64> {
        if let Self::Process { range, .. } = self {
            let page = range.start + offset / PAGE_SIZE * PAGE_SIZE;
            self.filled(page..page + PAGE_SIZE).ok()??;
        }
        let mut word = [0; 8];
        self.read(offset, &mut word).ok()?;
        Some(u64::from_le_bytes(word)).filter(|word| *word > 0)
    }
}

/// `None` past the last data.
fn seek(file: &File, target: SeekFrom) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, target) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_process_that_was_never_used_is_left_alone() {
        let size = 64 * PAGE_SIZE;
        // Of a size that the allocator maps for it alone, and does not touch.
        let memory = vec![0_u8; 4 << 20];
        let start = memory.as_ptr().addr() as u64;
        let address = start.next_multiple_of(2 << 20);
        let ram =
            GuestRam::Process { pid: i32::try_from(std::process::id()).unwrap(), address, size };
        let ram = ram.open().unwrap();
        assert_eq!((ram.data(0).unwrap(), ram.word(5 * PAGE_SIZE + 64)), (None, None));
        // An entry of proc(5)'s pagemap is 0 where nothing is mapped, not even a page of zeros.
        let mut entry = [0; 8];
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        pagemap.read_exact_at(&mut entry, (address / PAGE_SIZE + 5) * 8).unwrap();
        assert_eq!(u64::from_le_bytes(entry) >> 63, 0, "to look has mapped it");

        let mut memory = memory;
        let at = usize::try_from(address - start + 5 * PAGE_SIZE + 64).unwrap();
        memory[at] = 7;

        assert_eq!(ram.word(5 * PAGE_SIZE + 64), Some(7));
        let found = ram.data(0).unwrap().unwrap();
        assert!(found.contains(&(5 * PAGE_SIZE)), "{found:?}");
    }
}
