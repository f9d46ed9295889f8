//! Which processes map a RAM file, and where: the bridge from RAM-block pages to host virtual
//! addresses.

use godwit_memory::RamBlock;
use godwit_units::{Hva, PAGE_SIZE, PageCount, PageRun};
use procfs::process::{MMPermissions, MemoryMap, Process};

use crate::TrackError;

/// A stretch of a RAM block and where a process maps it.
///
/// ```
/// use godwit_track::BlockMapping;
/// use godwit_units::{Hva, PageRun};
///
/// let mapping = BlockMapping { pages: PageRun::new(0, 256), address: Hva(0x7f00_0000_0000) };
/// assert_eq!(mapping.pages.end().0, 256);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockMapping {
    /// The pages of the block.
    pub pages: PageRun,
    /// The address of the first of them.
    pub address: Hva,
}

/// A process other than the VMM that could write guest memory.
///
/// ```
/// use godwit_memory::RamBlock;
/// use godwit_track::other_writers;
///
/// /// What must end before the guest of process `vmm` can move.
/// fn in_the_way(vmm: i32, blocks: &[RamBlock]) -> Vec<String> {
///     let writers = other_writers(vmm, blocks).into_iter();
///     writers.map(|writer| format!("{} ({})", writer.command, writer.pid)).collect()
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writer {
    /// The process.
    pub pid: i32,
    /// Its command name.
    pub command: String,
    /// The RAM block it maps writable.
    pub block: String,
}

fn proc_error(pid: i32, what: &'static str) -> impl FnOnce(procfs::ProcError) -> TrackError {
    move |source| match source {
        procfs::ProcError::PermissionDenied(_) => TrackError::NotPermitted { pid },
        source => TrackError::Proc { pid, what, source },
    }
}

/// Device (major, minor) and inode as `/proc/PID/maps` shows them.
type FileKey = ((i32, i32), u64);

fn file_key(block: &RamBlock) -> Option<FileKey> {
    let (device, inode) = block.identity().ok()?;
    let number = |n: u32| i32::try_from(n).ok();
    Some(((number(rustix::fs::major(device))?, number(rustix::fs::minor(device))?), inode))
}

fn is_shared_write(map: &MemoryMap, key: FileKey) -> bool {
    map.dev == key.0
        && map.inode == key.1
        && map.perms.contains(MMPermissions::WRITE | MMPermissions::SHARED)
}

/// Where the process `pid` maps `block` shared and writable, in the order of the block's pages.
///
/// # Errors
/// When `/proc/PID/maps` cannot be read, or not every page of the block is mapped exactly once.
///
/// ```
/// use godwit_memory::RamBlock;
/// use godwit_track::{TrackError, mappings_of};
/// use godwit_units::PageCount;
///
/// let block = RamBlock::anonymous("ram", PageCount(16))?;
/// // Nothing of this process maps it.
/// let found = mappings_of(std::process::id() as i32, &block);
/// assert!(matches!(found, Err(TrackError::NotMapped { .. })));
/// # Ok::<(), godwit_memory::MemoryError>(())
/// ```
pub fn mappings_of(pid: i32, block: &RamBlock) -> Result<Vec<BlockMapping>, TrackError> {
    let not_mapped = || TrackError::NotMapped { pid, block: block.name().to_owned() };
    let key = file_key(block).ok_or_else(not_mapped)?;
    let maps = Process::new(pid).and_then(|p| p.maps()).map_err(proc_error(pid, "maps"))?;
    let file_pages = PageRun::new(block.file_offset() / PAGE_SIZE, block.pages().0);
    let mut found: Vec<BlockMapping> = maps
        .iter()
        .filter(|map| is_shared_write(map, key))
        .filter_map(|map| {
            let (start, end) = map.address;
            let mapped = PageRun::new(map.offset / PAGE_SIZE, (end - start) / PAGE_SIZE);
            let pages = mapped.intersect(file_pages)?;
            Some(BlockMapping {
                pages: PageRun::new(pages.start.0 - file_pages.start.0, pages.count.0),
                address: Hva(start + (pages.start.0 - mapped.start.0) * PAGE_SIZE),
            })
        })
        .collect();
    found.sort_by_key(|mapping| mapping.pages.start);
    let mut next = 0;
    for mapping in &found {
        if mapping.pages.start.0 != next {
            return Err(not_mapped());
        }
        next = mapping.pages.end().0;
    }
    if PageCount(next) != block.pages() {
        return Err(not_mapped());
    }
    Ok(found)
}

/// All processes but `vmm` and this one that map one of `blocks` shared and writable. Processes
/// whose maps may not be read are passed over: they belong to other users.
///
/// ```
/// use godwit_memory::RamBlock;
/// use godwit_track::other_writers;
/// use godwit_units::PageCount;
///
/// let block = RamBlock::anonymous("ram", PageCount(16))?;
/// let process = std::process::id() as i32;
/// assert_eq!(other_writers(process, &[block]), [], "the file is this process's own");
/// # Ok::<(), godwit_memory::MemoryError>(())
/// ```
#[must_use]
pub fn other_writers(vmm: i32, blocks: &[RamBlock]) -> Vec<Writer> {
    let keys: Vec<(FileKey, &str)> =
        blocks.iter().filter_map(|block| Some((file_key(block)?, block.name()))).collect();
    let own = std::process::id();
    let Ok(processes) = procfs::process::all_processes() else { return Vec::new() };
    let mut writers = Vec::new();
    for process in processes.flatten() {
        if process.pid() == vmm || process.pid().unsigned_abs() == own {
            continue;
        }
        let Ok(maps) = process.maps() else { continue };
        for (key, block) in &keys {
            if maps.iter().any(|map| is_shared_write(map, *key)) {
                let command = process.stat().map_or_else(|_| "?".to_owned(), |stat| stat.comm);
                writers.push(Writer { pid: process.pid(), command, block: (*block).to_owned() });
            }
        }
    }
    writers
}

/// The `/proc/PID/pagemap` of a process, opened for scanning.
pub(crate) fn open_pagemap(pid: i32) -> Result<std::fs::File, TrackError> {
    std::fs::File::open(format!("/proc/{pid}/pagemap")).map_err(|source| TrackError::Attach {
        pid,
        step: "opening its pagemap",
        source,
    })
}
