//! Where QEMU's RAM blocks are in its process.
//!
//! From 8.0 on `info ramblock` tells. Before, `gpa2hva` tells where the host has what the guest has
//! mapped at an address of its own, and `info mtree -f` at which: a block that the guest has not
//! mapped cannot be found.

use godwit_units::ByteCount;

use crate::QemuError;
use crate::machine::Machine;
use crate::monitor::commands::Human;

/// Why a block has no address.
pub(super) const UNKNOWN: &str = "is not mapped by the guest, and QEMU before 8.0 does not tell \
                                  where it is: try again when the guest has it in use, or take \
                                  the device out";

/// A line of `info ramblock`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) name: String,
    /// What of it is in use.
    pub(super) used: ByteCount,
    /// What is mapped, of which a block that can be resized may use less.
    pub(super) size: ByteCount,
    pub(super) address: Option<u64>,
}

/// All RAM blocks, with their addresses where QEMU tells them.
pub(super) fn list(machine: &mut Machine) -> Result<Vec<Listed>, QemuError> {
    let text = machine.qmp.run(&Human { command_line: "info ramblock" })?;
    parse(&text).ok_or_else(|| QemuError::RamUnreachable {
        block: "*".to_owned(),
        what: "is not listed by `info ramblock` in a form that godwit knows".to_owned(),
    })
}

/// Reads `info ramblock` (ram_block_format in softmmu/physmem.c or system/physmem.c).
fn parse(text: &str) -> Option<Vec<Listed>> {
    let mut lines = text.lines();
    let header = lines.next().filter(|header| header.contains("Block Name"))?;
    let has_addresses = header.contains("HVA");
    let line = |words: Vec<&str>| {
        // Name, page size, its unit, offset, used, total, from 8.0 on: address, and from 8.1 on:
        // may be written.
        let number = |at: usize| u64::from_str_radix(words.get(at)?.strip_prefix("0x")?, 16).ok();
        let (name, used, size) = ((*words.first()?).to_owned(), number(4)?, number(5)?);
        let address = if has_addresses { Some(number(6)?) } else { None };
        Some(Listed { name, used: ByteCount(used), size: ByteCount(size), address })
    };
    let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
    // A back end that nothing uses has no name, and is no RAM of the machine's.
    let unnamed = |words: &[&str]| words.first().is_none_or(|first| first.parse::<u64>().is_ok());
    words.filter(|words| !unnamed(words)).map(line).collect()
}

/// Finds the addresses of `blocks` by where the guest has them; without ROMs that are not mapped.
/// They hold what was loaded from a file, but for the ACPI tables, which QEMU makes anew on the
/// firmware's first look at them: the destination's own stand in for these.
pub(super) fn ask(machine: &mut Machine, blocks: Vec<Listed>) -> Result<Vec<Listed>, QemuError> {
    let ambiguous = |block: &Listed| QemuError::RamUnreachable {
        block: block.name.clone(),
        what: "is one of several of that name, and QEMU before 8.0 does not tell where it is"
            .to_owned(),
    };
    let map = machine.qmp.run(&Human { command_line: "info mtree -f" })?;
    let mut found: Vec<Listed> = Vec::new();
    for block in blocks {
        let region = region_of(&block.name);
        if found.iter().any(|other| region_of(&other.name) == region) {
            return Err(ambiguous(&block));
        }
        // A place in another view (that of SMM, or of a device behind an IOMMU) may be another's in
        // the one that is asked.
        let mut address = None;
        for part in map.lines().filter_map(|line| part(line, region)) {
            let command = format!("gpa2hva {:#x}", part.guest);
            let told = machine.qmp.run(&Human { command_line: &command })?;
            address = host_address(&told, region).and_then(|host| host.checked_sub(part.offset));
            if address.is_some() {
                break;
            }
        }
        if address.is_some() || !is_rom(&block.name) {
            found.push(Listed { address, ..block });
        }
    }
    Ok(found)
}

/// What the memory region of a block is called: a device's blocks have its path before it.
pub(crate) fn region_of(block: &str) -> &str {
    match block.rsplit_once('/') {
        Some((_, region)) if !block.starts_with("/rom@") => region,
        _ => block,
    }
}

/// Whether a block holds what is loaded from a file, by the name that QEMU gives it.
fn is_rom(block: &str) -> bool {
    block.starts_with("/rom@") || block.ends_with(".rom") || block.ends_with(".bios")
}

/// A part of a region that the guest has mapped.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    /// The guest's physical address.
    guest: u64,
    /// Where in the region it begins.
    offset: u64,
}

/// Reads a line of `info mtree -f` (mtree_print_flatview in softmmu/memory.c), if it is of RAM in
/// `region`.
fn part(line: &str, region: &str) -> Option<Part> {
    let (range, rest) = line.trim().split_once(" (prio ")?;
    let (kind, name) = rest.split_once("): ")?;
    let kind = kind.rsplit_once(", ")?.1;
    let name = name.strip_suffix(" KVM").unwrap_or(name);
    let (name, offset) = name.rsplit_once(" @").unwrap_or((name, "0"));
    if name != region || !matches!(kind, "ram" | "rom" | "romd" | "nv-ram") {
        return None;
    }
    let guest = u64::from_str_radix(range.split_once('-')?.0, 16).ok()?;
    Some(Part { guest, offset: u64::from_str_radix(offset, 16).ok()? })
}

/// Reads the answer to `gpa2hva` (hmp_gpa2hva in monitor/misc.c), if it is of `region`.
fn host_address(text: &str, region: &str) -> Option<u64> {
    let (before, address) = text.trim().rsplit_once(" is 0x")?;
    before.ends_with(&format!("({region})")).then_some(())?;
    u64::from_str_radix(address, 16).ok()
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
        let tables = "   /rom@etc/acpi/tables    4 KiB  0x0000000008080000 0x0000000000020000 \
                   0x0000000000200000 0x00007f0a3e800000  rw";
        let unused = "           4 KiB  0x0000000004000000 0x0000000004000000 0x0000000004000000 \
                   0x00007fd097c00000  rw";
        let text = format!("{header}\n{mem}\n{unused}\n{tables}\n\n");
        let blocks = parse(&text).unwrap();
        let first = Listed {
            name: "mem".to_owned(),
            used: ByteCount(128 << 20),
            size: ByteCount(128 << 20),
            address: Some(0x7f0a_3fe0_0000),
        };
        assert_eq!(blocks[0], first);
        assert_eq!(blocks[1].name, "/rom@etc/acpi/tables");
        assert_eq!((blocks[1].used, blocks[1].size), (ByteCount(128 << 10), ByteCount(2 << 20)));
    }

    #[test]
    fn a_list_without_addresses_has_none_and_another_form_is_not_read() {
        let old = "Block Name PSize Offset Used Total\n mem 4 KiB 0x0 0x8000000 0x8000000\n";
        assert_eq!(parse(old).unwrap()[0].address, None);
        assert_eq!(parse("Block Name PSize Offset Used Total HVA RO\n mem 4 KiB 0x0\n"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn what_the_guest_has_mapped_is_found_by_its_name_and_kind() {
        // As QEMU 7.2.22 prints them.
        let ram = "  0000000000100000-000000000fffffff (prio 0, ram): pc.ram @0000000000100000 KVM";
        let vga = "  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram";
        let bios = "  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios";
        let io = "  00000000febf4180-00000000febf43ff (prio 1, i/o): vga.mmio @0000000000000180";
        assert_eq!(part(ram, "pc.ram"), Some(Part { guest: 1 << 20, offset: 1 << 20 }));
        assert_eq!(part(vga, "vga.vram"), Some(Part { guest: 0xfd00_0000, offset: 0 }));
        assert_eq!(part(bios, "pc.bios"), Some(Part { guest: 0xfffc_0000, offset: 0 }));
        for (line, region) in [(io, "vga.mmio"), (ram, "ram"), ("FlatView #1", "pc.ram")] {
            assert_eq!(part(line, region), None);
        }
        assert_eq!(region_of("0000:00:01.0/vga.vram"), "vga.vram");
        assert_eq!(region_of("/rom@etc/acpi/tables"), "/rom@etc/acpi/tables");
    }

    #[test]
    fn an_address_is_taken_only_of_the_region_that_was_asked_for() {
        let told = "Host virtual address for 0x0 (pc.ram) is 0x7f4253e00000\r\n";
        assert_eq!(host_address(told, "pc.ram"), Some(0x7f42_53e0_0000));
        assert_eq!(host_address(told, "mem"), None);
        assert_eq!(host_address("Memory at address 0x0 is not RAM", "mem"), None);
    }
}
