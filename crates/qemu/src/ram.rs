//! Where the guest's RAM is, and which way the device state has to take because of that.
//!
//! ```text
//!   all RAM in named files that are mapped shared    its blocks are the back ends; all else that
//!                                                    QEMU has in RAM blocks comes with its own
//!                                                    migration, which leaves out shared files
//!   any other RAM                                    every RAM block of QEMU's, VGA memory and
//!                                                    firmware among them, is reached at its
//!                                                    address in the process: QEMU's migration
//!                                                    would carry it, so the devices are saved
//!                                                    without one (`device_state`)
//! ```

use std::path::Path;

use godwit_memory::{ProcessBacking, RamBlock};
use godwit_track::{AddressSpace, Mapped};
use godwit_units::ByteCount;

use crate::QemuError;
use crate::machine::Machine;
use crate::monitor::commands::{Human, Memdev, QomGet, QueryMemdev, QueryMemorySize};

/// How QEMU hands out the state of its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateBy {
    /// By its own migration, which carries RAM that is not in shared files as well.
    Migration,
    /// By saving the devices alone.
    Saving,
}

/// The RAM of a machine.
#[derive(Debug)]
pub(crate) struct Ram {
    pub(crate) blocks: Vec<RamBlock>,
    pub(crate) state_by: StateBy,
}

impl Ram {
    /// Opens all RAM blocks of `machine`.
    pub(crate) fn open(machine: &mut Machine) -> Result<Self, QemuError> {
        match in_shared_files(machine) {
            Ok(blocks) => Ok(Self { blocks, state_by: StateBy::Migration }),
            Err(refused @ QemuError::RamNotShared { .. }) => {
                let blocks = in_process(machine)?.ok_or(refused)?;
                Ok(Self { blocks, state_by: StateBy::Saving })
            }
            Err(error) => Err(error),
        }
    }
}

fn in_shared_files(machine: &mut Machine) -> Result<Vec<RamBlock>, QemuError> {
    let backends = machine.qmp.run(&QueryMemdev)?;
    let mut blocks = Vec::new();
    for Memdev { id, size, share, prealloc } in backends {
        let object = format!("/objects/{id}");
        let unshared =
            |what: &str| QemuError::RamNotShared { what: format!("RAM block '{id}' {what}") };
        // Only memory-backend-file has the property; asking the others is refused.
        let path = machine.qmp.run_if_known(&QomGet::<String>::new(&object, "mem-path"))?;
        let path = path.ok_or_else(|| unshared("is not a memory-backend-file"))?;
        if !share {
            return Err(unshared("is not shared (share=off)"));
        }
        let path = machine.path_here(Path::new(&path));
        if path.is_dir() {
            return Err(unshared("has a directory as mem-path, in which its file has no name"));
        }
        // Since QEMU 8.1; before, a block begins at the start of its file.
        let offset = machine.qmp.run_if_known(&QomGet::<u64>::new(&object, "offset"))?.unwrap_or(0);
        blocks.push(RamBlock::open(&id, &path, offset, ByteCount(size), prealloc)?);
    }
    let shared: u64 = blocks.iter().map(|block| block.pages().bytes().0).sum();
    let summary = machine.qmp.run(&QueryMemorySize)?;
    let total = summary.base_memory.saturating_add(summary.plugged_memory);
    if total > shared {
        let what = format!(
            "{} of the guest's {} of RAM is not in a shared named file",
            ByteCount(total - shared),
            ByteCount(total)
        );
        return Err(QemuError::RamNotShared { what });
    }
    Ok(blocks)
}

/// All RAM blocks by their addresses; `None` where QEMU does not tell these.
fn in_process(machine: &mut Machine) -> Result<Option<Vec<RamBlock>>, QemuError> {
    let listed = machine.qmp.run(&Human { command_line: "info ramblock" })?;
    let Some(listed) = parse(&listed) else { return Ok(None) };
    let space = AddressSpace::of(machine.pid)?;
    let mut blocks = Vec::new();
    for Listed { name, size, address } in listed {
        let unreachable =
            |what: &str| QemuError::RamUnreachable { block: name.clone(), what: what.to_owned() };
        let pages = size.whole_pages().ok_or_else(|| unreachable("is not whole pages"))?;
        let block = match space.at(address, size) {
            Mapped::Private => {
                let backing = ProcessBacking::open(machine.pid, address, size.0)
                    .map_err(|source| unreachable(&format!("cannot be read: {source}")))?;
                RamBlock::new(&name, Box::new(backing), pages)
            }
            Mapped::Shared { file, offset } => RamBlock::open(&name, &file, offset, size, false)?,
            Mapped::PrivateFile { path } => {
                return Err(unreachable(&format!(
                    "is a private mapping of {path}: godwit cannot tell what of it the guest has \
                     changed; give the back end share=on, or no mem-path"
                )));
            }
            Mapped::Nowhere => {
                return Err(unreachable("is not mapped in the process as QEMU says"));
            }
        };
        blocks.push(block);
    }
    Ok(Some(blocks))
}

/// A line of `info ramblock`.
#[derive(Debug, PartialEq, Eq)]
struct Listed {
    name: String,
    /// What is mapped, of which a block that can be resized may use less.
    size: ByteCount,
    address: u64,
}

/// Reads `info ramblock` (ram_block_format in softmmu/physmem.c or system/physmem.c); `None`
/// where it has no addresses, which it has from QEMU 8.0 on.
fn parse(text: &str) -> Option<Vec<Listed>> {
    let mut lines = text.lines();
    lines.next().filter(|header| header.contains("HVA"))?;
    let line = |line: &str| {
        // Name, page size, its unit, offset, used, total, address, and from 8.1 on: may be written.
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| u64::from_str_radix(words.get(at)?.strip_prefix("0x")?, 16).ok();
        let (name, size, address) = ((*words.first()?).to_owned(), number(5)?, number(6)?);
        Some(Listed { name, size: ByteCount(size), address })
    };
    lines.filter(|text| !text.trim().is_empty()).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_from_what_qemu_lists() {
        // As QEMU 10.0.2 prints it.
        let header = "  Block Name    PSize  Offset  Used  Total  HVA  RO";
        let mem = "         mem    4 KiB  0x0000000000000000 0x0000000008000000 0x0000000008000000 \
                   0x00007f0a3fe00000  rw";
        let vga = "   0000:00:02.0/vga.vram    4 KiB  0x0000000008080000 0x0000000001000000 \
                   0x0000000001000000 0x00007f0a3e800000  rw";
        let text = format!("{header}\n{mem}\n{vga}\n");
        let blocks = parse(&text).unwrap();
        let first = Listed {
            name: "mem".to_owned(),
            size: ByteCount(128 << 20),
            address: 0x7f0a_3fe0_0000,
        };
        assert_eq!(blocks[0], first);
        assert_eq!((blocks[1].name.as_str(), blocks.len()), ("0000:00:02.0/vga.vram", 2));
    }

    #[test]
    fn a_list_without_addresses_or_of_another_form_is_none() {
        let old = "Block Name PSize Offset Used Total\n mem 4 KiB 0x0 0x8000000 0x8000000\n";
        assert_eq!(parse(old), None);
        assert_eq!(parse("Block Name PSize Offset Used Total HVA RO\n mem 4 KiB 0x0\n"), None);
        assert_eq!(parse(""), None);
    }
}
