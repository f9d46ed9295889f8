//! What this host has, as a destination tells it to who asks: memory, huge pages, and what its
//! processors can do.
//!
//! Invariant: what cannot be read is not known, and no error: the answer to an inquiry does not
//! hang on it.

use std::fs;
use std::path::Path;

pub use godwit_wire::{Facts, HugePages};

use godwit_memory::in_meminfo;
use godwit_units::ByteCount;
use godwit_wire::HUGE_LIMIT;

/// Where the kernel has a directory for each size of huge pages
/// (Documentation/admin-guide/mm/hugetlbpage.rst).
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// What this host has now.
///
/// ```
/// let facts = godwit_engine::facts::of_this_host();
/// assert!(facts.available <= facts.total);
/// ```
#[must_use]
pub fn of_this_host() -> Facts {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    Facts {
        huge_pages: pools(Path::new(POOLS)),
        ..parsed(&read("/proc/meminfo"), &read("/proc/cpuinfo"))
    }
}

/// What /proc tells (proc(5)): of the processors the first stands for all.
fn parsed(meminfo: &str, cpuinfo: &str) -> Facts {
    let memory = |name| ByteCount(in_meminfo(meminfo, name).unwrap_or(0));
    let processor = |name: &str| {
        let lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        let value = lines.filter(|(key, _)| key.trim() == name).map(|(_, value)| value.trim());
        let plain = |c: char| if c.is_control() { ' ' } else { c };
        value.take(1).flat_map(str::chars).map(plain).collect::<String>()
    };
    Facts {
        available: memory("MemAvailable:"),
        total: memory("MemTotal:"),
        huge_pages: Vec::new(),
        processor: processor("model name"),
        flags: processor("flags"),
    }
}

/// The pools of huge pages below `directory`, the smallest pages first.
fn pools(directory: &Path) -> Vec<HugePages> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut pools: Vec<HugePages> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let kib = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?;
            let number = |name| {
                let text = fs::read_to_string(entry.path().join(name)).ok()?;
                text.trim().parse::<u64>().ok()
            };
            Some(HugePages {
                size: ByteCount(kib.parse::<u64>().ok()?.checked_mul(1024)?),
                total: number("nr_hugepages")?,
                free: number("free_hugepages")?.saturating_sub(number("resv_hugepages")?),
            })
        })
        .collect();
    pools.sort_by_key(|pool| pool.size);
    pools.truncate(HUGE_LIMIT);
    pools
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_the_first_processor_are_read_and_what_is_missing_is_not_known() {
        let meminfo = "MemTotal:       4048576 kB\nMemAvailable:   1024 kB\n";
        let cpuinfo = "processor\t: 0\nmodel name\t: Made: up\nflags\t\t: fpu avx2\n\n\
                       processor\t: 1\nmodel name\t: Another\nflags\t\t: fpu\n";
        let facts = parsed(meminfo, cpuinfo);
        assert_eq!((facts.available.0, facts.total.0), (1 << 20, 4_048_576 << 10));
        assert_eq!((facts.processor.as_str(), facts.flags.as_str()), ("Made: up", "fpu avx2"));
        assert_eq!(parsed("", "flags\n"), Facts::default());
    }

    #[test]
    fn pools_of_huge_pages_are_found_by_their_sizes() {
        let directory = std::env::temp_dir().join(format!("godwit-pools-{}", std::process::id()));
        for (kib, total, free) in [(1_048_576, 2, 1), (2048, 512, 100)] {
            let pool = directory.join(format!("hugepages-{kib}kB"));
            fs::create_dir_all(&pool).unwrap();
            fs::write(pool.join("nr_hugepages"), format!("{total}\n")).unwrap();
            fs::write(pool.join("free_hugepages"), format!("{}\n", free + 2)).unwrap();
            fs::write(pool.join("resv_hugepages"), "2\n").unwrap();
        }
        fs::create_dir_all(directory.join("hugepages-64kB")).unwrap();
        let pool = |size, total, free| HugePages { size: ByteCount(size), total, free };
        assert_eq!(pools(&directory), [pool(2 << 20, 512, 100), pool(1 << 30, 2, 1)]);
        fs::remove_dir_all(directory).unwrap();
    }
}
