//! Whether there is room for all that a guest may use, and not only for what is sent of it.
//!
//! Most of a guest's memory is holes when it arrives. It fills them later, when the source has long
//! gone: a tmpfs that is full by then answers with SIGBUS, a control group or a host without memory
//! with the OOM killer, and either ends the VM. So a destination looks beforehand. It only looks:
//! to allocate the memory would make a mostly empty guest cost all of its size. Where looking can
//! be too strict, since memory is shared out more than once on purpose, is for the caller to
//! decide: [`mounts_hold`] is about limits that somebody set for these files, [`host_holds`] about
//! what happens to be free.
//!
//! Nobody keeps the room free afterwards. Huge pages are the exception: they are reserved
//! (`backing/huge.rs`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use godwit_units::ByteCount;

use crate::{Place, RamBlock, tmpfs};

/// Memory sizes are told to mount(8) in these.
const MIB: u64 = 1 << 20;

/// Where there is too little room, and what helps.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoRoom {
    /// A tmpfs has a limit.
    #[error(
        "the tmpfs at {} has room for {room} of guest memory, and the guest may come to use \
         {needed}: mount -o remount,size={enough} {0}",
        mount.display()
    )]
    Mount {
        /// Where it is mounted.
        mount: PathBuf,
        /// What is free there, and what the RAM files take already.
        room: ByteCount,
        /// The size of the RAM blocks.
        needed: ByteCount,
        /// A size of the mount that would do, as mount(8) takes it.
        enough: String,
    },
    /// The control group of the VM has a limit, or that of godwit, to which the pages count that it
    /// fills.
    #[error(
        "{who} may take {room} more of memory ({}), and the guest may come to use {needed} more: \
         raise that limit, or receive with --overcommit",
        limit.display()
    )]
    Group {
        /// The VM's process, or godwit's.
        who: String,
        /// The file that holds the limit.
        limit: PathBuf,
        /// What is left of it.
        room: ByteCount,
        /// What the guest does not have yet.
        needed: ByteCount,
    },
    /// The host has too little memory.
    #[error(
        "this host has {room} of memory to spare, and the guest may come to use {needed} more: \
         make room, or receive with --overcommit"
    )]
    Host {
        /// Available memory and free swap.
        room: ByteCount,
        /// What the guest does not have yet.
        needed: ByteCount,
    },
}

/// What the RAM blocks in one file need of it.
#[derive(Clone, Copy, Debug, Default)]
struct Need {
    size: u64,
    allocated: u64,
}

/// Device and inode of the file that holds `block`, if there is one. A file that the kernel does
/// not tell of has no needs, and is found wrong elsewhere.
fn identity(block: &RamBlock) -> Option<(u64, u64)> {
    match block.place() {
        Ok(Place::File { device, inode, .. }) => Some((device, inode)),
        _ => None,
    }
}

/// The needs of all files on tmpfs, by device.
fn needs(blocks: &[RamBlock]) -> BTreeMap<u64, (&RamBlock, Need)> {
    let mut files: BTreeMap<(u64, u64), (&RamBlock, Need)> = BTreeMap::new();
    for block in blocks.iter().filter(|block| !block.has_huge_pages()) {
        let (Some(identity), Ok(allocated)) = (identity(block), block.allocated()) else {
            continue;
        };
        let (_, need) = files.entry(identity).or_insert((block, Need::default()));
        need.size += block.pages().bytes().0;
        need.allocated = allocated.bytes().0;
    }
    let mut mounts: BTreeMap<u64, (&RamBlock, Need)> = BTreeMap::new();
    for ((device, _), (block, need)) in files {
        let (_, sum) = mounts.entry(device).or_insert((block, Need::default()));
        sum.size += need.size;
        // A file may hold more than the blocks in it.
        sum.allocated += need.allocated.min(need.size);
    }
    mounts
}

/// Whether each tmpfs with RAM files of `blocks` would hold all of them.
///
/// # Errors
/// The first that would not.
pub fn mounts_hold(blocks: &[RamBlock]) -> Result<(), NoRoom> {
    for (device, (block, need)) in needs(blocks) {
        let Some(space) = block.space() else { continue };
        let room = space.free + need.allocated;
        if room < need.size {
            let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
            let parent =
                || block.path().and_then(Path::parent).unwrap_or(Path::new("/")).to_owned();
            return Err(NoRoom::Mount {
                mount: tmpfs::mounted_at(&mountinfo, device).unwrap_or_else(parent),
                room: ByteCount(room),
                needed: ByteCount(need.size),
                enough: format!("{}M", (space.size + need.size - room).div_ceil(MIB)),
            });
        }
    }
    Ok(())
}

/// Whether the host, and the control groups of process `pid`, in which the guest runs, would hold
/// all of `blocks`.
///
/// # Errors
/// What would not.
pub fn host_holds(blocks: &[RamBlock], pid: u32) -> Result<(), NoRoom> {
    let in_files: u64 = needs(blocks).values().map(|(_, need)| need.size - need.allocated).sum();
    holds(in_files + private_needs(blocks), huge_needs(blocks), pid)
}

/// Whether the host, and the control groups of this process, would hold so much more memory.
///
/// ```
/// use godwit_memory::host_has;
/// use godwit_units::ByteCount;
///
/// assert!(host_has(ByteCount(0)).is_ok());
/// assert!(host_has(ByteCount(1 << 60)).is_err());
/// ```
///
/// # Errors
/// What would not.
pub fn host_has(needed: ByteCount) -> Result<(), NoRoom> {
    holds(needed.0, 0, std::process::id())
}

/// The same for bytes of memory, and of them those in huge pages of 2 MiB.
fn holds(needed: u64, huge: u64, pid: u32) -> Result<(), NoRoom> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let swap = in_meminfo(&meminfo, "SwapFree:").unwrap_or(0);
    // Whoever touches a page first has it counted: godwit what it fills, the VM what the guest
    // takes later.
    let own = std::process::id();
    for (pid, who) in
        [(pid, format!("process {pid}")), (own, format!("godwit itself (process {own})"))]
    {
        let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let refuse = |room, limit, needed| {
            Err(NoRoom::Group {
                who: who.clone(),
                limit,
                room: ByteCount(room),
                needed: ByteCount(needed),
            })
        };
        for group in groups_of(&groups, "memory") {
            if let Some((room, limit)) = room_in(&group, swap).filter(|(room, _)| *room < needed) {
                return refuse(room, limit, needed);
            }
        }
        for group in groups_of(&groups, "hugetlb").iter().filter(|_| huge > 0) {
            if let Some((room, limit)) = huge_room_in(group).filter(|(room, _)| *room < huge) {
                return refuse(room, limit, huge);
            }
        }
    }
    let Some(available) = in_meminfo(&meminfo, "MemAvailable:") else { return Ok(()) };
    let room = available + swap;
    if room < needed {
        return Err(NoRoom::Host { room: ByteCount(room), needed: ByteCount(needed) });
    }
    Ok(())
}

/// Bytes of memory without a file that are not there yet.
fn private_needs(blocks: &[RamBlock]) -> u64 {
    let private = blocks.iter().filter(|block| matches!(block.place(), Ok(Place::Process { .. })));
    let missing = private.map(|block| {
        let allocated = block.allocated().map_or(0, |pages| pages.bytes().0);
        block.pages().bytes().0.saturating_sub(allocated)
    });
    missing.sum()
}

/// Bytes in huge pages of 2 MiB that the files of `blocks` do not have yet. Larger ones have limits
/// of their own, which nobody looks at.
fn huge_needs(blocks: &[RamBlock]) -> u64 {
    let huge = blocks.iter().filter(|block| block.huge_page() == Some(ByteCount(2 << 20)));
    let needs: BTreeMap<(u64, u64), (u64, u64)> =
        huge.fold(BTreeMap::new(), |mut needs: BTreeMap<_, (u64, u64)>, block| {
            if let (Some(identity), Ok(allocated)) = (identity(block), block.allocated()) {
                let need = needs.entry(identity).or_default();
                *need = (need.0 + block.pages().bytes().0, allocated.bytes().0);
            }
            needs
        });
    needs.values().map(|(size, allocated)| size.saturating_sub(*allocated)).sum()
}

/// A line of /proc/meminfo (proc_meminfo(5)), in bytes.
///
/// ```
/// let text = "MemTotal:       24684084 kB\nMemAvailable:   23299080 kB\n";
/// assert_eq!(godwit_memory::in_meminfo(text, "MemAvailable:"), Some(23_299_080 << 10));
/// assert_eq!(godwit_memory::in_meminfo(text, "SwapFree:"), None);
/// ```
#[must_use]
pub fn in_meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A control group that counts memory, or huge pages.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    dir: PathBuf,
    /// Of the unified hierarchy (version 2), whose files have other names.
    unified: bool,
}

/// The control groups of a process that belong to `controller`, from its own outwards; `text` is
/// its /proc/PID/cgroup (cgroups(7)). The root has no limit.
fn groups_of(text: &str, controller: &str) -> Vec<Group> {
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let unified = controllers.is_empty();
        let root = match controllers {
            "" => Path::new("/sys/fs/cgroup").to_owned(),
            controllers if controllers.split(',').any(|name| name == controller) => {
                Path::new("/sys/fs/cgroup").join(controller)
            }
            _ => continue,
        };
        let path = path.trim_start_matches('/');
        for part in Path::new(path).ancestors().filter(|part| !part.as_os_str().is_empty()) {
            groups.push(Group { dir: root.join(part), unified });
        }
    }
    groups
}

/// What is left of the limit of `group`, and the file that holds it; `None` without a limit. `swap`
/// is free on this host.
fn room_in(group: &Group, swap: u64) -> Option<(u64, PathBuf)> {
    let read = |name: &str| std::fs::read_to_string(group.dir.join(name)).ok();
    // "max" is no number, and no limit.
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let (limit, used) = if group.unified {
        ("memory.max", "memory.current")
    } else {
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
    };
    let (most, used) = (number(limit)?, number(used)?);
    let stat = read("memory.stat").unwrap_or_default();
    // Pages of ordinary files are dropped when memory is short (memory.stat,
    // Documentation/admin-guide/cgroup-v2.rst).
    let names = if group.unified {
        ["inactive_file", "active_file"]
    } else {
        ["total_inactive_file", "total_active_file"]
    };
    let droppable: u64 = names.iter().filter_map(|name| in_stat(&stat, name)).sum();
    let swap = match (group.unified, number("memory.swap.max"), number("memory.swap.current")) {
        (true, Some(most), used) => swap.min(most.saturating_sub(used.unwrap_or(0))),
        _ => swap,
    };
    let room = most.saturating_sub(used.saturating_sub(droppable)).saturating_add(swap);
    Some((room, group.dir.join(limit)))
}

/// The same for huge pages of 2 MiB (Documentation/admin-guide/cgroup-v1/hugetlb.rst,
/// cgroup-v2.rst): a fault beyond this limit is answered with SIGBUS, whatever the pool still has.
fn huge_room_in(group: &Group) -> Option<(u64, PathBuf)> {
    let number =
        |name: &str| std::fs::read_to_string(group.dir.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = if group.unified {
        ("hugetlb.2MB.max", "hugetlb.2MB.current")
    } else {
        ("hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes")
    };
    let room = number(limit)?.saturating_sub(number(used)?);
    Some((room, group.dir.join(limit)))
}

fn in_stat(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[cfg(test)]
mod tests {
    use godwit_units::{PageCount, PageIndex, PageRun};

    use super::*;

    #[test]
    fn what_a_file_holds_already_is_not_needed_again() {
        let block = RamBlock::anonymous("mem", PageCount(64)).unwrap();
        block.write(PageIndex(3), &[7; 4 * 4096]).unwrap();
        let blocks = [block];
        let needs: Vec<(u64, u64)> =
            needs(&blocks).values().map(|(_, need)| (need.size, need.allocated)).collect();
        assert_eq!(needs, [(64 * 4096, 4 * 4096)]);
    }

    #[test]
    fn a_file_without_a_limit_and_a_host_with_memory_have_room() {
        let blocks = [RamBlock::anonymous("mem", PageCount(64)).unwrap()];
        assert_eq!(mounts_hold(&blocks), Ok(()));
        assert_eq!(host_holds(&blocks, std::process::id()), Ok(()));
    }

    #[test]
    fn a_guest_larger_than_the_host_has_no_room() {
        // 64 TiB, of which nothing is allocated but one page.
        let block = RamBlock::anonymous("mem", PageCount(1 << 34)).unwrap();
        block.zero(PageRun::new(0, 1)).unwrap();
        let error = host_holds(&[block], std::process::id()).unwrap_err();
        assert!(error.to_string().contains("the guest may come to use 64TiB more"), "{error}");
    }

    #[test]
    fn the_groups_of_a_process_are_found_in_both_hierarchies() {
        let dirs = |text| {
            groups_of(text, "memory").into_iter().map(|group| (group.dir, group.unified)).collect()
        };
        let unified: Vec<(PathBuf, bool)> = dirs("0::/machine.slice/vm1\n");
        let expected = ["/sys/fs/cgroup/machine.slice/vm1", "/sys/fs/cgroup/machine.slice"];
        assert_eq!(unified, expected.map(|dir| (dir.into(), true)));
        let older: Vec<(PathBuf, bool)> =
            dirs("5:cpu,cpuacct:/a\n4:memory:/vm1\n1:name=systemd:/b\n0::/\n");
        assert_eq!(older, [("/sys/fs/cgroup/memory/vm1".into(), false)]);
    }

    #[test]
    fn what_is_left_of_a_limit_counts_what_can_be_dropped() {
        let dir = std::env::temp_dir().join(format!("godwit-group-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let files = [
            ("memory.max", "1000000\n"),
            ("memory.current", "900000\n"),
            ("memory.stat", "anon 5\ninactive_file 30000\nactive_file 20000\nshmem 800000\n"),
            ("memory.swap.max", "7000\n"),
        ];
        for (name, text) in files {
            std::fs::write(dir.join(name), text).unwrap();
        }
        let group = Group { dir: dir.clone(), unified: true };
        let with_swap = room_in(&group, 1 << 30);
        let without = room_in(&group, 0);
        std::fs::write(dir.join("memory.max"), "max\n").unwrap();
        let unlimited = room_in(&group, 0);
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(with_swap, Some((157_000, dir.join("memory.max"))));
        assert_eq!(without, Some((150_000, dir.join("memory.max"))));
        assert_eq!(unlimited, None);
    }

    #[test]
    fn what_is_left_of_a_limit_of_huge_pages() {
        let dir = std::env::temp_dir().join(format!("godwit-huge-group-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let files = [
            ("hugetlb.2MB.max", "8388608\n"),
            ("hugetlb.2MB.current", "2097152\n"),
            ("hugetlb.2MB.limit_in_bytes", "4194304\n"),
            ("hugetlb.2MB.usage_in_bytes", "4194304\n"),
        ];
        for (name, text) in files {
            std::fs::write(dir.join(name), text).unwrap();
        }
        let room = |unified| huge_room_in(&Group { dir: dir.clone(), unified });
        let (unified, older) = (room(true), room(false));
        std::fs::write(dir.join("hugetlb.2MB.max"), "max\n").unwrap();
        let unlimited = room(true);
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(unified, Some((6 << 20, dir.join("hugetlb.2MB.max"))));
        assert_eq!(older, Some((0, dir.join("hugetlb.2MB.limit_in_bytes"))));
        assert_eq!(unlimited, None);
        let groups = groups_of("7:hugetlb:/vm1\n4:memory:/vm2\n", "hugetlb");
        assert_eq!(groups, [Group { dir: "/sys/fs/cgroup/hugetlb/vm1".into(), unified: false }]);
    }

    #[test]
    fn a_line_of_meminfo_is_in_bytes() {
        let text = "MemTotal:       24684084 kB\nMemAvailable:   23299080 kB\nSwapFree:  0 kB\n";
        assert_eq!(in_meminfo(text, "MemAvailable:"), Some(23_299_080 << 10));
        assert_eq!(in_meminfo(text, "SwapFree:"), Some(0));
        assert_eq!(in_meminfo(text, "Nothing:"), None);
    }
}
