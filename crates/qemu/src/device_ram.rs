//! RAM of devices as a part of the device state: what a QEMU before 8.0 has mapped for its guest,
//! and whose destination cannot be asked where it has the same (there the guest has mapped nothing
//! yet).
//!
//! It goes as QEMU's own migration would send it: one section of the kind `ram`, of stream version
//! 4, with the blocks and their lengths at its start and every page that was ever touched at its
//! end (migration/ram.c, `ram_save_setup`, `save_zero_page_to_file` and `save_normal_page`; QEMU
//! 7.2 to 11.1 read it alike). Only what is named there is checked and filled, so the guest's main
//! memory, which has come another way, is not.

use godwit_memory::{DataHint, MemoryError, RamBlock};
use godwit_units::{ByteCount, PAGE_SIZE, PageBuffer, PageCount, PageIndex, PageRun};

/// QEMU_VM_SECTION_START, QEMU_VM_SECTION_END and QEMU_VM_SECTION_FOOTER (migration/savevm.h).
const START: u8 = 1;
const END: u8 = 3;
const FOOTER: u8 = 0x7e;
/// The section's number: far from those that QEMU gives, which are those of the device sections.
const NUMBER: u32 = 0x676f_6477;
/// The section's name, instance and version.
const NAME: &[u8] = b"\x03ram\0\0\0\0\0\0\0\x04";
/// RAM_SAVE_FLAG_*: a page of one byte, the list of blocks, a page, the end of a part.
const ZERO: u64 = 0x02;
const SIZES: u64 = 0x04;
const PAGE: u64 = 0x08;
const OVER: u64 = 0x10;
/// The page's block is that of the one before.
const CONTINUED: u64 = 0x20;
const PAGE_BYTES: usize = PAGE_SIZE as usize;
/// Pages that are read at once.
const PIECE: usize = 256;

/// The QEMU that is to load a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loader {
    /// Godwit has set its capabilities: it leaves shared RAM out.
    Prepared,
    /// Libvirt has started it, and set none.
    Plain,
}

/// RAM of a device.
#[derive(Debug)]
pub(crate) struct DeviceRam {
    pub(crate) block: RamBlock,
    /// What of it is in use, in whole pages.
    pub(crate) used: ByteCount,
}

/// The section with all of `ram`; nothing where there is none. The guest must stand still.
pub(crate) fn section(ram: &[DeviceRam], loader: Loader) -> Result<Vec<u8>, MemoryError> {
    if ram.is_empty() {
        return Ok(Vec::new());
    }
    let mut out = vec![START];
    out.extend(NUMBER.to_be_bytes());
    out.extend(NAME);
    let total: u64 = ram.iter().map(|it| it.used.0).sum();
    out.extend((total | SIZES).to_be_bytes());
    for DeviceRam { block, used } in ram {
        out.extend(name(block));
        out.extend(used.0.to_be_bytes());
        if loader == Loader::Prepared {
            // Where the block is to the guest, which is asked of blocks that are shared alone
            // (x-ignore-shared).
            out.extend(0_u64.to_be_bytes());
        }
    }
    let footer = [&[FOOTER][..], &NUMBER.to_be_bytes()].concat();
    out.extend(OVER.to_be_bytes());
    out.extend(&footer);
    out.push(END);
    out.extend(NUMBER.to_be_bytes());
    for it in ram {
        pages(it, &mut out)?;
    }
    out.extend(OVER.to_be_bytes());
    out.extend(&footer);
    Ok(out)
}

/// What of `ram` holds bytes, as far as that can be told: about the length of a section with it.
pub(crate) fn allocated(ram: &[DeviceRam]) -> ByteCount {
    let pages = ram.iter().filter_map(|it| it.block.allocated().ok());
    pages.sum::<PageCount>().bytes()
}

fn name(block: &RamBlock) -> Vec<u8> {
    let name = &block.name().as_bytes()[..block.name().len().min(255)];
    let mut out = vec![name.len() as u8];
    out.extend(name);
    out
}

/// Every page, those of zeros in short.
fn pages(DeviceRam { block, used }: &DeviceRam, out: &mut Vec<u8>) -> Result<(), MemoryError> {
    let mut continued = 0;
    let mut page_out = |out: &mut Vec<u8>, page: u64, bytes: Option<&[u8]>| {
        let flags = continued | if bytes.is_some() { PAGE } else { ZERO };
        out.extend(((page * PAGE_SIZE) | flags).to_be_bytes());
        if continued == 0 {
            out.extend(name(block));
        }
        out.extend(bytes.unwrap_or(&[0]));
        continued = CONTINUED;
    };
    let end = used.0 / PAGE_SIZE;
    let mut next = 0;
    let mut buffer = PageBuffer::new(PageCount(PIECE as u64));
    let mut hint = DataHint::default();
    for run in block.data(PageRun::new(0, end), &mut hint) {
        let run = run?;
        (next..run.start.0).for_each(|page| page_out(out, page, None));
        for start in (run.start.0..run.end().0).step_by(PIECE) {
            let count = (PIECE as u64).min(run.end().0 - start);
            let pages = &mut buffer[..PageCount(count).bytes().0 as usize];
            block.read(PageIndex(start), pages)?;
            for (page, bytes) in (start..).zip(pages.chunks_exact(PAGE_BYTES)) {
                let zeros = bytes.iter().all(|byte| *byte == 0);
                page_out(out, page, Some(bytes).filter(|_| !zeros));
            }
        }
        next = run.end().0;
    }
    (next..end).for_each(|page| page_out(out, page, None));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_what_qemu_reads() {
        let block = RamBlock::anonymous("v", PageCount(8)).unwrap();
        block.write(PageIndex(1), &[7; 4096]).unwrap();
        block.write(PageIndex(2), &[0; 4096]).unwrap();
        block.write(PageIndex(7), &[9; 4096]).unwrap();
        let section = section(&[DeviceRam { block, used: ByteCount(6 * 4096) }], Loader::Prepared);
        let mut expected = b"\x01godw\x03ram\0\0\0\0\0\0\0\x04".to_vec();
        expected.extend(b"\0\0\0\0\0\0\x60\x04\x01v\0\0\0\0\0\0\x60\0\0\0\0\0\0\0\0\0");
        expected.extend(b"\0\0\0\0\0\0\0\x10\x7egodw\x03godw");
        expected.extend(b"\0\0\0\0\0\0\0\x02\x01v\0");
        expected.extend(b"\0\0\0\0\0\0\x10\x28");
        expected.extend([7; 4096]);
        for page in 2..6 {
            expected.extend([0, 0, 0, 0, 0, 0, page << 4, 0x22, 0]);
        }
        expected.extend(b"\0\0\0\0\0\0\0\x10\x7egodw");
        assert_eq!(section.unwrap(), expected);
    }

    #[test]
    fn without_such_ram_there_is_no_section() {
        assert!(section(&[], Loader::Prepared).unwrap().is_empty());
    }

    #[test]
    fn a_qemu_that_nobody_prepared_is_told_no_addresses() {
        let section = |loader| {
            let block = RamBlock::anonymous("v", PageCount(1)).unwrap();
            section(&[DeviceRam { block, used: ByteCount(4096) }], loader).unwrap()
        };
        let list = b"\0\0\0\0\0\0\x10\x04\x01v\0\0\0\0\0\0\x10\0";
        let plain = section(Loader::Plain);
        assert_eq!(plain[17..17 + list.len()], *list);
        assert_eq!(plain.len() + 8, section(Loader::Prepared).len());
    }
}
