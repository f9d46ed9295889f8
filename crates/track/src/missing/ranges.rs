//! Where in a process the missing pages of RAM blocks are, what is held there, and the calls that
//! register it with a userfaultfd. Nothing here keeps anything.

use std::io;
use std::ops::{ControlFlow, Range};
use std::os::fd::{AsFd, BorrowedFd};

use godwit_bitmap::DirtyBitmap;
use godwit_memory::pagemap::{Looked, PageRegion, scan};
use godwit_memory::{Place, RamBlock};
use godwit_units::{Hva, PAGE_SIZE, PageIndex, PageRun};

use crate::TrackError;
use crate::mappings::{AddressSpace, BlockMapping, open_pagemap};
use crate::uapi;

/// Discarded by one system call of the process, which takes its time.
const DISCARDED_AT_ONCE: u64 = 256 << 20;

/// Lets accesses to `ranges` wait, and returns what of them is held there of private memory, to be
/// thrown away: nothing is registered then, as who throws away what is would wait until that is
/// read.
///
/// # Errors
/// When another userfaultfd has registered any of it: to discard may take that one's leave.
pub(super) fn register_all(
    uffd: BorrowedFd<'_>,
    pid: i32,
    blocks: &[RamBlock],
    ranges: &[Vec<Range<u64>>],
) -> Result<Vec<Range<u64>>, TrackError> {
    let mut held = Vec::new();
    for (block, (ram, ranges)) in blocks.iter().zip(ranges).enumerate() {
        register(uffd, pid, ram, ranges)?;
        if !is_file(ram) && !ranges.is_empty() {
            let pagemap = open_pagemap(pid)?;
            for range in ranges {
                // One call of the process for all that lies in it, scattered as it may be.
                let mut all: Option<Range<u64>> = None;
                mapped_in(pagemap.as_fd(), block, range, &mut |found| {
                    all = Some(all.as_ref().map_or(found.start, |all| all.start)..found.end);
                })?;
                held.extend(all.iter().flat_map(in_pieces));
            }
        }
    }
    if !held.is_empty() {
        ranges.iter().for_each(|ranges| unregister(uffd, ranges));
    }
    Ok(held)
}

/// Lets accesses to `ranges` of `block` wait.
pub(super) fn register(
    uffd: BorrowedFd<'_>,
    pid: i32,
    block: &RamBlock,
    ranges: &[Range<u64>],
) -> Result<(), TrackError> {
    ranges.iter().try_for_each(|range| {
        uapi::uffd_register_missing(uffd, range.start, range.end - range.start).map_err(|source| {
            match source.raw_os_error() {
                Some(libc::EBUSY) => TrackError::Registered { block: block.name().to_owned() },
                _ => TrackError::Missing { pid, source },
            }
        })
    })
}

/// Ends the registration of `ranges`: who waits is woken.
pub(super) fn unregister(uffd: BorrowedFd<'_>, ranges: &[Range<u64>]) {
    for range in ranges {
        let _ = uapi::uffd_unregister(uffd, range.start, range.end - range.start);
    }
}

/// Where the process maps the blocks, of which each has a bitmap of its size.
pub(super) fn mappings_of(
    pid: i32,
    space: &AddressSpace,
    blocks: &[RamBlock],
    missing: &[DirtyBitmap],
) -> Result<Vec<Vec<BlockMapping>>, TrackError> {
    check_kinds(pid, blocks, missing)?;
    let of_block = |(block, pages): (&RamBlock, &DirtyBitmap)| match lacks(pages) {
        true => space.mappings_of(block),
        false => Ok(Vec::new()),
    };
    blocks.iter().zip(missing).map(of_block).collect()
}

/// Whether pages of process `pid` can come one by one to the `blocks` in which some are missing;
/// the others may be of any kind.
pub(super) fn check_kinds(
    pid: i32,
    blocks: &[RamBlock],
    missing: &[DirtyBitmap],
) -> Result<(), TrackError> {
    let fit = blocks.iter().map(RamBlock::pages).eq(missing.iter().map(DirtyBitmap::len));
    if !fit {
        return Err(TrackError::Missing { pid, source: io::ErrorKind::InvalidInput.into() });
    }
    let cannot = |block: &RamBlock| {
        let fillable = match block.place() {
            Ok(Place::Process { pid: owner, .. }) => owner == pid,
            Ok(Place::File { .. }) => true,
            Err(_) => false,
        };
        !fillable || block.has_huge_pages()
    };
    let mut lacking = blocks.iter().zip(missing).filter(|(_, pages)| lacks(pages));
    match lacking.find(|(block, _)| cannot(block)) {
        Some((block, _)) => Err(TrackError::NotFillable { block: block.name().to_owned() }),
        None => Ok(()),
    }
}

fn lacks(pages: &DirtyBitmap) -> bool {
    pages.next_run(PageIndex(0)).is_some()
}

pub(super) fn is_file(block: &RamBlock) -> bool {
    matches!(block.place(), Ok(Place::File { .. }))
}

/// Makes holes of the pages of a file that are in `awaited`.
pub(super) fn throw_away(block: &RamBlock, awaited: &DirtyBitmap) -> Result<(), TrackError> {
    let punched = awaited.try_for_each_run_in(block.all(), |run| match block.give_back(run) {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => ControlFlow::Break(error),
    });
    punched.break_value().map_or(Ok(()), |error| Err(error.into()))
}

/// Reports the pages of a block that are there: of a file those of `wanted` alone.
pub(super) fn there(
    pid: i32,
    ram: &RamBlock,
    mappings: &[BlockMapping],
    (block, wanted): (usize, &DirtyBitmap),
    found: &mut dyn FnMut(PageRun),
) -> Result<(), TrackError> {
    if !is_file(ram) {
        return mapped(pid, block, mappings, found);
    }
    let looked = wanted.try_for_each_run_in(ram.all(), |run| match ram.held(run, found) {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => ControlFlow::Break(error),
    });
    looked.break_value().map_or(Ok(()), |error| Err(error.into()))
}

/// The addresses of the missing pages, by block.
pub(super) fn ranges_of(
    mappings: &[Vec<BlockMapping>],
    missing: &[DirtyBitmap],
) -> Vec<Vec<Range<u64>>> {
    let of_block = |(mappings, missing): (&Vec<BlockMapping>, &DirtyBitmap)| {
        let mut ranges = Vec::new();
        for mapping in mappings {
            missing.for_each_run_in(mapping.pages, |run| {
                let at = mapping.address.0 + (run.start.0 - mapping.pages.start.0) * PAGE_SIZE;
                ranges.push(at..at + run.count.bytes().0);
            });
        }
        ranges
    };
    mappings.iter().zip(missing).map(of_block).collect()
}

fn in_pieces(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = range.end;
    let starts = (range.start..end).step_by(DISCARDED_AT_ONCE as usize);
    starts.map(move |start| start..(start + DISCARDED_AT_ONCE).min(end))
}

/// Reports the pages of a block that have an entry in the page tables.
fn mapped(
    pid: i32,
    block: usize,
    mappings: &[BlockMapping],
    found: &mut dyn FnMut(PageRun),
) -> Result<(), TrackError> {
    let pagemap = open_pagemap(pid)?;
    mappings.iter().try_for_each(|mapping| {
        let Hva(start) = mapping.address;
        let range = start..start + mapping.pages.count.bytes().0;
        mapped_in(pagemap.as_fd(), block, &range, &mut |range| {
            let first = mapping.pages.start.0 + (range.start - start) / PAGE_SIZE;
            found(PageRun::new(first, (range.end - range.start) / PAGE_SIZE));
        })
    })
}

/// Reports the parts of `range`, in a block, that have an entry in the page tables.
fn mapped_in(
    pagemap: BorrowedFd<'_>,
    block: usize,
    range: &Range<u64>,
    found: &mut dyn FnMut(Range<u64>),
) -> Result<(), TrackError> {
    let mut regions = [PageRegion::default(); 128];
    let mut at = range.start;
    while at < range.end {
        let scanned = scan(pagemap, Looked::Mapped, at..range.end, 0, 0, &mut regions);
        let (count, walked) = scanned.map_err(|source| TrackError::Scan { block, source })?;
        regions[..count].iter().for_each(|region| found(region.start..region.end));
        if walked <= at {
            let source = io::Error::other("PAGEMAP_SCAN made no progress");
            return Err(TrackError::Scan { block, source });
        }
        at = walked;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use godwit_units::PageCount;

    use super::*;

    #[test]
    fn a_large_range_is_discarded_in_pieces() {
        let pieces: Vec<_> = in_pieces(&(4096..4096 + DISCARDED_AT_ONCE + 8192)).collect();
        let second = 4096 + DISCARDED_AT_ONCE;
        assert_eq!(pieces, [4096..second, second..second + 8192]);
    }

    #[test]
    fn ranges_are_where_the_pages_are_mapped() {
        let mapping =
            |start, count, at| BlockMapping { pages: PageRun::new(start, count), address: Hva(at) };
        let mappings = [vec![mapping(0, 4, 0x10_0000), mapping(4, 4, 0x90_0000)]];
        let mut missing = DirtyBitmap::new(PageCount(8));
        missing.set(PageRun::new(2, 4));
        let expected = [vec![0x10_2000..0x10_4000, 0x90_0000..0x90_2000]];
        assert_eq!(ranges_of(&mappings, &[missing]), expected);
    }
}
