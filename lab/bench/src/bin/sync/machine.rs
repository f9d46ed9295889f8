//! The machines that are measured: the same memory, cut in two ways.

use godwit_track::bare::{BareMachine, Cut, Shape};

/// Blocks that the memory is cut into.
const BLOCKS: u64 = 4;
/// The page at which the second slot of a misaligned block begins.
const ODD: u64 = 37;

/// How blocks lie in slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alignment {
    /// One slot a block: words of the log are words of the block.
    Aligned,
    /// A small slot and the rest, which begins at page 37 of the block and at an odd guest frame.
    Misaligned,
}

impl Alignment {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Aligned => "aligned",
            Self::Misaligned => "misaligned",
        }
    }
}

/// A machine of `mib` MiB with one vCPU.
pub(crate) fn machine(
    mib: u64,
    alignment: Alignment,
    ring: Option<u32>,
) -> anyhow::Result<BareMachine> {
    let pages = mib * 256 / BLOCKS;
    let cut = |block: u64, first, pages, frame| Cut { block: block as u32, first, pages, frame };
    let slots = (0..BLOCKS).flat_map(|block| {
        let frame = Shape::FIRST_FRAME + block * (pages + 4096);
        match alignment {
            Alignment::Aligned => vec![cut(block, 0, pages, frame)],
            Alignment::Misaligned => {
                vec![cut(block, 0, ODD, frame), cut(block, ODD, pages - ODD, frame + 64 + 1)]
            }
        }
    });
    let blocks = vec![pages; BLOCKS as usize];
    Ok(BareMachine::new(&Shape { blocks, slots: slots.collect(), vcpus: 1, ring })?)
}

/// How many pages the machine has.
pub(crate) fn total(machine: &BareMachine) -> u64 {
    machine.block_sizes().iter().map(|pages| pages.0).sum()
}

/// A stable choice of `percent` of `pages` pages, spread at random, in order.
pub(crate) fn some(pages: u64, percent: u64) -> Vec<u32> {
    let mut rng = fastrand::Rng::with_seed(1);
    (0..pages as u32).filter(|_| rng.u64(..100) < percent).collect()
}
