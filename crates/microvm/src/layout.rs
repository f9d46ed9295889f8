//! Where the guest's memory is: RAM blocks at guest addresses, cut into memory slots.
//!
//! Keeps one promise: a layout that was planned can be built, as far as this program knows. RAM
//! blocks have the names and sizes that both sides of a migration must agree on; guest addresses
//! come with the state and are compared there; host addresses and slots are each host's own.

use std::path::PathBuf;
use std::str::FromStr;

use godwit_units::{ByteCount, PAGE_SIZE, ParseError};

use crate::MicrovmError;
use crate::boot_block::{DISK_MMIO, MAX_PLUGGED};

/// From here to 4 GiB are devices, the local APIC and what KVM keeps for itself on Intel
/// processors.
pub(crate) const HOLE: std::ops::Range<u64> = 0xc000_0000..0x1_0000_0000;
/// KVM_SET_TSS_ADDR and KVM_SET_IDENTITY_MAP_ADDR: three pages and one, in the hole.
pub(crate) const TSS: u64 = 0xfffb_d000;
pub(crate) const IDENTITY_MAP: u64 = 0xfffb_c000;
/// Guest addresses end here: the page tables that the guest starts with reach no further.
pub(crate) const TOP: u64 = 64 << 30;
/// The program and its tables need so much of the first block.
const LEAST_LOW: u64 = 16 << 20;

const _: () = assert!(HOLE.start <= DISK_MMIO && DISK_MMIO < HOLE.end);

/// One RAM block as it is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPlan {
    /// Its name, the same on both sides.
    pub name: String,
    /// Its size, whole pages.
    pub size: ByteCount,
    /// Where the guest sees it.
    pub gpa: u64,
    /// How far its host address lies beyond a multiple of 2 MiB.
    pub host_offset: u64,
    /// The file on a tmpfs that holds it; `None`: one without a name.
    pub path: Option<PathBuf>,
}

impl FromStr for BlockPlan {
    type Err = MicrovmError;

    /// `name=NAME,size=SIZE,gpa=ADDRESS[,host-offset=BYTES][,path=FILE]`; addresses are decimal or
    /// 0x….
    fn from_str(text: &str) -> Result<Self, MicrovmError> {
        let (mut name, mut size, mut gpa, mut host_offset, mut path) = (None, None, None, 0, None);
        for word in text.split(',') {
            let wrong = || {
                MicrovmError::Layout(format!(
                    "'{word}' in --block {text} is not understood: write \
                     name=NAME,size=SIZE,gpa=0xADDRESS[,host-offset=0xBYTES][,path=FILE]"
                ))
            };
            let (key, value) = word.split_once('=').ok_or_else(wrong)?;
            match key {
                "name" if !value.is_empty() => name = Some(value.to_owned()),
                "size" => {
                    let wrong =
                        |error| MicrovmError::Layout(format!("size={value} in --block: {error}"));
                    size = Some(value.parse().map_err(|error: ParseError| wrong(error))?);
                }
                "gpa" => gpa = Some(number(value).ok_or_else(wrong)?),
                "host-offset" => host_offset = number(value).ok_or_else(wrong)?,
                "path" => path = Some(value.into()),
                _ => return Err(wrong()),
            }
        }
        let missing = |key| MicrovmError::Layout(format!("--block {text} lacks {key}="));
        Ok(Self {
            name: name.ok_or_else(|| missing("name"))?,
            size: size.ok_or_else(|| missing("size"))?,
            gpa: gpa.ok_or_else(|| missing("gpa"))?,
            host_offset,
            path,
        })
    }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Blocks for `memory` in all, as `--memory` asks: what does not fit below the hole continues at 4
/// GiB.
#[must_use]
pub fn plain(memory: ByteCount, path: Option<PathBuf>) -> Vec<BlockPlan> {
    let low = memory.0.min(HOLE.start);
    let block = |name: &str, size, gpa, path| BlockPlan {
        name: name.to_owned(),
        size: ByteCount(size),
        gpa,
        host_offset: 0,
        path,
    };
    let mut blocks = vec![block("ram", low, 0, path.clone())];
    if memory.0 > low {
        let path = path.map(|path| path.with_extension("high"));
        blocks.push(block("ram-high", memory.0 - low, HOLE.end, path));
    }
    blocks
}

/// What blocks are called that are plugged in, with a number behind.
const PLUGGED: &str = "plugged";
/// Less than this could not hold its own page tables and something to stamp.
const LEAST_PLUGGED: u64 = 1 << 20;

/// The block for `size` of memory that is plugged in beside `blocks`: behind all others, in the
/// guest, and above the hole.
///
/// # Errors
/// When there is no room for it, or there are too many.
pub(crate) fn plugged(blocks: &[BlockPlan], size: ByteCount) -> Result<BlockPlan, MicrovmError> {
    let mut names = (0..MAX_PLUGGED).map(|number| format!("{PLUGGED}{number}"));
    let free = names.find(|name| blocks.iter().all(|block| block.name != *name));
    let name = free.ok_or_else(|| {
        MicrovmError::Layout(format!(
            "{MAX_PLUGGED} blocks are plugged in, and there can be no more: plug larger ones"
        ))
    })?;
    if size.0 < LEAST_PLUGGED {
        let least = ByteCount(LEAST_PLUGGED);
        return Err(MicrovmError::Layout(format!("{size} is too little: plug at least {least}")));
    }
    let end = blocks.iter().map(|block| block.gpa + block.size.0).max().unwrap_or(0);
    let block = BlockPlan {
        name,
        size,
        gpa: end.max(HOLE.end).next_multiple_of(2 << 20),
        host_offset: 0,
        path: None,
    };
    check([blocks, std::slice::from_ref(&block)].concat())?;
    Ok(block)
}

/// Checks that `blocks` can be built, and puts them in the order of their guest addresses.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn check(mut blocks: Vec<BlockPlan>) -> Result<Vec<BlockPlan>, MicrovmError> {
    blocks.sort_by_key(|block| block.gpa);
    let refuse = |text: String| Err(MicrovmError::Layout(text));
    for block in &blocks {
        let BlockPlan { name, size, gpa, host_offset, .. } = block;
        if size.0 == 0 || [size.0, *gpa, *host_offset].iter().any(|value| value % PAGE_SIZE != 0) {
            return refuse(format!(
                "size, gpa and host-offset of block '{name}' must be whole pages of 4 KiB"
            ));
        }
        let Some(end) = gpa.checked_add(size.0).filter(|&end| end <= TOP) else {
            return refuse(format!("block '{name}' ends beyond {}", ByteCount(TOP)));
        };
        if *gpa < HOLE.end && HOLE.start < end {
            return refuse(format!(
                "block '{name}' at {gpa:#x} reaches into {:#x} to {:#x}, where devices are: put it \
                 below or above",
                HOLE.start, HOLE.end
            ));
        }
        if *host_offset >= 2 << 20 {
            return refuse(format!("host-offset of block '{name}' must be below 2 MiB"));
        }
    }
    for pair in blocks.windows(2) {
        if pair[0].gpa + pair[0].size.0 > pair[1].gpa {
            return refuse(format!("blocks '{}' and '{}' overlap", pair[0].name, pair[1].name));
        }
    }
    for (number, block) in blocks.iter().enumerate() {
        if blocks[..number].iter().any(|other| other.name == block.name) {
            return refuse(format!("there are two blocks '{}'", block.name));
        }
    }
    match blocks.first() {
        Some(first) if first.gpa == 0 && first.size.0 >= LEAST_LOW => Ok(blocks),
        _ => refuse(format!(
            "there must be a block of at least {} at guest address 0",
            ByteCount(LEAST_LOW)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> BlockPlan {
        text.parse().unwrap()
    }

    #[test]
    fn memory_beyond_the_hole_continues_above() {
        let blocks = check(plain(ByteCount(4 << 30), None)).unwrap();
        assert_eq!(
            blocks.iter().map(|b| (b.gpa, b.size.0)).collect::<Vec<_>>(),
            [(0, 3 << 30), (4 << 30, 1 << 30)]
        );
    }

    #[test]
    fn a_block_is_parsed() {
        let block = plan("name=odd,size=65MiB,gpa=0x100003000,host-offset=0x5000");
        assert_eq!((block.gpa, block.size.0, block.host_offset), (0x1_0000_3000, 65 << 20, 0x5000));
        for wrong in
            ["name=odd", "size=1MiB,gpa=0", "name=a,size=1,gpa=x", "name=a,size=4KiB,gpa=0,speed=1"]
        {
            assert!(wrong.parse::<BlockPlan>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_plugged_in_goes_behind_all_others() {
        let mut blocks = check(plain(ByteCount(5 << 30), None)).unwrap();
        let size = ByteCount(20 << 20);
        for number in 0..16 {
            let block = plugged(&blocks, size).unwrap();
            assert_eq!(
                (block.name.clone(), block.gpa),
                (format!("plugged{number}"), (6 << 30) + number * (20 << 20))
            );
            blocks.push(block);
        }
        let refused = |blocks: &[BlockPlan], size| plugged(blocks, size).unwrap_err().to_string();
        assert!(refused(&blocks, size).contains("plug larger ones"));
        // Names that begin alike, or whose number is not the next, are nobody's reason to refuse.
        let named = ["pluggedfish", "plugged1", "plugged0", "plugged3"];
        let named = (0..).zip(named).map(|(number, name)| {
            plan(&format!("name={name},size=16MiB,gpa={:#x}", number * (16 << 20)))
        });
        assert_eq!(plugged(&named.collect::<Vec<_>>(), size).unwrap().name, "plugged2");
        let low = [plan("name=low,size=16MiB,gpa=0")];
        assert_eq!(plugged(&low, size).unwrap().gpa, 4 << 30);
        assert!(refused(&low, ByteCount(60 << 30 | 4096)).contains("ends beyond 64GiB"));
        assert!(refused(&low, ByteCount((1 << 20) + 1)).contains("whole pages"));
        assert!(refused(&low, ByteCount(4096)).contains("plug at least 1MiB"));
    }

    #[test]
    fn what_cannot_be_built_is_refused_with_its_cure() {
        let low = "name=low,size=16MiB,gpa=0";
        let refused = |more: &str| check(vec![plan(low), plan(more)]).unwrap_err().to_string();
        assert!(refused("name=b,size=4KiB,gpa=0x1001").contains("whole pages"));
        assert!(refused("name=b,size=4MiB,gpa=0xfff000").contains("overlap"));
        assert!(refused("name=low,size=4MiB,gpa=0x2000000").contains("two blocks 'low'"));
        assert!(refused("name=b,size=1MiB,gpa=0xbff80000").contains("put it below or above"));
        assert!(refused("name=b,size=1MiB,gpa=0x1000000000").contains("ends beyond"));
        assert!(check(vec![plan("name=b,size=1MiB,gpa=0")]).is_err());
    }
}
