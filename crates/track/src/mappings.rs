//! Which processes map a RAM block, and where: the bridge from RAM-block pages to host virtual
//! addresses.

use std::path::PathBuf;

use godwit_memory::{Place, RamBlock};
use godwit_units::{ByteCount, Hva, PAGE_SIZE, PageCount, PageRun};
use procfs::process::{MMPermissions, MMapPath, MemoryMap, MemoryMaps, Process};

use crate::TrackError;
use crate::permission::not_permitted;

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

/// What is at an address of a process.
///
/// ```
/// use godwit_track::{AddressSpace, Mapped, TrackError};
/// use godwit_units::ByteCount;
///
/// let own = AddressSpace::of(std::process::id().cast_signed())?;
/// assert_eq!(own.at(0, ByteCount(4096)), Mapped::Nowhere);
/// # Ok::<(), TrackError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mapped {
    /// Private memory that no file holds.
    Private,
    /// A file, shared with whoever else maps it; it need not have a name any more.
    Shared {
        /// By which it can be opened.
        file: PathBuf,
        /// Where in it, in bytes.
        offset: u64,
    },
    /// A private copy of a file, of which the process may have changed parts.
    PrivateFile {
        /// Its name.
        path: String,
    },
    /// Not memory that may be written, or not all of it.
    Nowhere,
}

/// A process other than the VMM that has guest memory.
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
pub struct Mapper {
    /// The process.
    pub pid: i32,
    /// Its command name.
    pub command: String,
    /// The RAM block it maps.
    pub block: String,
}

impl Mapper {
    /// Why memory that it maps cannot follow a guest (post-copy), and what to do.
    ///
    /// ```
    /// use godwit_track::Mapper;
    ///
    /// let mapper = Mapper { pid: 4711, command: "virtiofsd".into(), block: "ram".into() };
    /// assert!(mapper.finds_zeros().starts_with("process 4711 (virtiofsd) has RAM block 'ram'"));
    /// ```
    #[must_use]
    pub fn finds_zeros(&self) -> String {
        let Self { pid, command, block } = self;
        format!(
            "process {pid} ({command}) has RAM block '{block}' as well, and would find zeros where \
             pages are still to come: end it, or use pre-copy"
        )
    }
}

fn proc_error(pid: i32, what: &'static str) -> impl FnOnce(procfs::ProcError) -> TrackError {
    move |source| match source {
        procfs::ProcError::PermissionDenied(_) => not_permitted(pid),
        source => TrackError::Proc { pid, what, source },
    }
}

/// Device (major, minor) and inode as `/proc/PID/maps` shows them.
type FileKey = ((i32, i32), u64);

fn file_key(device: u64, inode: u64) -> Option<FileKey> {
    let number = |n: u32| i32::try_from(n).ok();
    Some(((number(rustix::fs::major(device))?, number(rustix::fs::minor(device))?), inode))
}

fn is_shared_write(map: &MemoryMap, key: FileKey) -> bool {
    is_of(map, key) && map.perms.contains(MMPermissions::WRITE | MMPermissions::SHARED)
}

fn is_of(map: &MemoryMap, key: FileKey) -> bool {
    map.dev == key.0 && map.inode == key.1
}

/// What a process has mapped, as it was when this was made (`/proc/PID/maps`).
///
/// ```
/// use godwit_track::{AddressSpace, Mapped, TrackError};
/// use godwit_units::ByteCount;
///
/// let memory = vec![7_u8; 1 << 20];
/// let own = AddressSpace::of(std::process::id().cast_signed())?;
/// assert_eq!(own.at(memory.as_ptr() as u64, ByteCount(1 << 19)), Mapped::Private);
/// # Ok::<(), TrackError>(())
/// ```
#[derive(Debug)]
pub struct AddressSpace {
    pid: i32,
    maps: MemoryMaps,
}

impl AddressSpace {
    /// That of process `pid`.
    ///
    /// # Errors
    /// When `/proc/PID/maps` cannot be read.
    pub fn of(pid: i32) -> Result<Self, TrackError> {
        let maps = Process::new(pid).and_then(|process| process.maps());
        Ok(Self { pid, maps: maps.map_err(proc_error(pid, "maps"))? })
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Where `block` is mapped writable, in the order of its pages: a file shared, memory of the
    /// process's own as a whole.
    ///
    /// # Errors
    /// When not every page of the block is mapped exactly once.
    ///
    /// ```
    /// use godwit_memory::RamBlock;
    /// use godwit_track::{AddressSpace, TrackError};
    /// use godwit_units::PageCount;
    ///
    /// let block = RamBlock::anonymous("ram", PageCount(16))?;
    /// // Nothing of this process maps it.
    /// let found = AddressSpace::of(std::process::id().cast_signed())?.mappings_of(&block);
    /// assert!(matches!(found, Err(TrackError::NotMapped { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn mappings_of(&self, block: &RamBlock) -> Result<Vec<BlockMapping>, TrackError> {
        let Self { pid, maps } = self;
        let not_mapped = || TrackError::NotMapped { pid: *pid, block: block.name().to_owned() };
        let mut found: Vec<BlockMapping> = match block.place() {
            Ok(Place::File { device, inode, offset }) => {
                let key = file_key(device, inode).ok_or_else(not_mapped)?;
                let file_pages = PageRun::new(offset / PAGE_SIZE, block.pages().0);
                let shared = maps.iter().filter(|map| is_shared_write(map, key));
                shared.filter_map(|map| part_of_file(map, file_pages)).collect()
            }
            Ok(Place::Process { pid: owner, address }) if owner == *pid => {
                let end = address.saturating_add(block.pages().bytes().0);
                maps.iter().filter_map(|map| part_of_process(map, address, end)).collect()
            }
            _ => return Err(not_mapped()),
        };
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

    /// What of the file of `block` is mapped shared and writable, in the order of its pages: any
    /// part of it, and any number of times.
    #[must_use]
    pub fn shared_parts_of(&self, block: &RamBlock) -> Vec<BlockMapping> {
        let Ok(Place::File { device, inode, offset }) = block.place() else { return Vec::new() };
        let Some(key) = file_key(device, inode) else { return Vec::new() };
        let file_pages = PageRun::new(offset / PAGE_SIZE, block.pages().0);
        let shared = self.maps.iter().filter(|map| is_shared_write(map, key));
        let mut found: Vec<BlockMapping> =
            shared.filter_map(|map| part_of_file(map, file_pages)).collect();
        found.sort_by_key(|mapping| (mapping.pages.start, mapping.address));
        found
    }

    /// What is mapped at `address`, for all of `size`.
    #[must_use]
    pub fn at(&self, address: u64, size: ByteCount) -> Mapped {
        let Self { pid, maps } = self;
        let Some(end) = address.checked_add(size.0) else { return Mapped::Nowhere };
        let mut parts = maps.iter().filter(|map| map.address.0 < end && map.address.1 > address);
        let Some(first) = parts.next() else { return Mapped::Nowhere };
        let writable = |map: &MemoryMap| map.perms.contains(MMPermissions::WRITE);
        // The kernel divides what is advised differently.
        let mut reached = first.address.1;
        let alike = parts.all(|map| {
            let follows = map.address.0 == std::mem::replace(&mut reached, map.address.1);
            let same = (map.dev, map.inode, map.perms) == (first.dev, first.inode, first.perms);
            let goes_on =
                map.inode == 0 || map.offset == first.offset + (map.address.0 - first.address.0);
            follows && same && goes_on
        });
        if !alike || !writable(first) || first.address.0 > address || reached < end {
            return Mapped::Nowhere;
        }
        let shared = first.perms.contains(MMPermissions::SHARED);
        match (shared, first.inode) {
            (false, 0) => Mapped::Private,
            (false, _) => match &first.pathname {
                MMapPath::Path(path) => Mapped::PrivateFile { path: path.display().to_string() },
                _ => Mapped::PrivateFile { path: "a file".to_owned() },
            },
            (true, _) => {
                let (start, end) = first.address;
                let file = format!("/proc/{pid}/map_files/{start:x}-{end:x}").into();
                Mapped::Shared { file, offset: first.offset + (address - start) }
            }
        }
    }
}

/// What `map` maps of the block that is these pages of the file.
fn part_of_file(map: &MemoryMap, file_pages: PageRun) -> Option<BlockMapping> {
    let (start, end) = map.address;
    let mapped = PageRun::new(map.offset / PAGE_SIZE, (end - start) / PAGE_SIZE);
    let pages = mapped.intersect(file_pages)?;
    Some(BlockMapping {
        pages: PageRun::new(pages.start.0 - file_pages.start.0, pages.count.0),
        address: Hva(start + (pages.start.0 - mapped.start.0) * PAGE_SIZE),
    })
}

/// What `map` maps of the block from `first` to `end`: private memory that is no file's, whose
/// untouched pages are zeros.
fn part_of_process(map: &MemoryMap, first: u64, end: u64) -> Option<BlockMapping> {
    let private = map.perms.contains(MMPermissions::WRITE | MMPermissions::PRIVATE);
    let (from, to) = (map.address.0.max(first), map.address.1.min(end));
    (private && map.inode == 0 && from < to).then(|| BlockMapping {
        pages: PageRun::new((from - first) / PAGE_SIZE, (to - from) / PAGE_SIZE),
        address: Hva(from),
    })
}

/// The file that holds `block`: memory of a process is nobody else's.
fn file_of(block: &RamBlock) -> Option<FileKey> {
    match block.place() {
        Ok(Place::File { device, inode, .. }) => file_key(device, inode),
        _ => None,
    }
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
pub fn other_writers(vmm: i32, blocks: &[RamBlock]) -> Vec<Mapper> {
    others(vmm, blocks, is_shared_write)
}

/// The same that map one of `blocks` in any way: who only reads a page of a file where it has a
/// hole fills that with zeros, so nobody may where pages are still to come.
///
/// ```
/// use godwit_memory::RamBlock;
/// use godwit_track::other_mappers;
/// use godwit_units::PageCount;
///
/// let block = RamBlock::anonymous("ram", PageCount(16))?;
/// let process = std::process::id() as i32;
/// assert_eq!(other_mappers(process, &[block]), [], "the file is this process's own");
/// # Ok::<(), godwit_memory::MemoryError>(())
/// ```
#[must_use]
pub fn other_mappers(vmm: i32, blocks: &[RamBlock]) -> Vec<Mapper> {
    others(vmm, blocks, is_of)
}

fn others(vmm: i32, blocks: &[RamBlock], has: fn(&MemoryMap, FileKey) -> bool) -> Vec<Mapper> {
    let keys: Vec<(FileKey, &str)> =
        blocks.iter().filter_map(|block| Some((file_of(block)?, block.name()))).collect();
    if keys.is_empty() {
        // To read the maps of all processes takes milliseconds.
        return Vec::new();
    }
    let own = std::process::id();
    let Ok(processes) = procfs::process::all_processes() else { return Vec::new() };
    let mut writers = Vec::new();
    for process in processes.flatten() {
        if process.pid() == vmm || process.pid().unsigned_abs() == own {
            continue;
        }
        let Ok(maps) = process.maps() else { continue };
        for (key, block) in &keys {
            if maps.iter().any(|map| has(map, *key)) {
                let command = process.stat().map_or_else(|_| "?".to_owned(), |stat| stat.comm);
                writers.push(Mapper { pid: process.pid(), command, block: (*block).to_owned() });
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
