//! Segments: the pieces in which memory is harvested, sent and assigned to channels.
//!
//! Both sides compute the same segments from the sizes of the RAM blocks.

use godwit_units::{PageCount, PageIndex, PageRun};

/// Pages in a segment: 16 MiB. Small enough to spread a small VM over several channels, large
/// enough that a scan of a clean segment costs more than the system call around it.
pub const SEGMENT_PAGES: u64 = 4096;

/// Pages that are harvested at once, at the most, where all of a segment is sent: 4 MiB. A segment
/// that turns out to be hot is put off between two such pieces.
pub const FIRST_HARVEST: PageCount = PageCount(1024);

/// Pages that are harvested at once, at the most, in every other round: a whole segment, with one
/// call into the kernel for each contiguous chunk. Two harvests of a page lie a round apart in any
/// case, so what is sent in a round does not depend on it; only what is dirty at the end of a round
/// has that little longer to become so.
pub const NEXT_HARVEST: PageCount = PageCount(SEGMENT_PAGES);

/// A piece of one RAM block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The index of the RAM block.
    pub block: usize,
    /// Its pages; only the last segment of a block is shorter than [`SEGMENT_PAGES`].
    pub run: PageRun,
}

impl Segment {
    /// The channel, of `channels`, that this segment belongs to: the only one that it goes over
    /// where the destination takes it over no other.
    #[must_use]
    pub fn channel(self, channels: usize) -> usize {
        channel_of(self.block, self.run.start, channels)
    }
}

/// The channel, of `channels`, that page `page` of RAM block `block` belongs to.
#[must_use]
pub fn channel_of(block: usize, page: PageIndex, channels: usize) -> usize {
    let number = page.0 / SEGMENT_PAGES;
    // Blocks start on different channels, so that many small blocks spread as well.
    (number as usize + block) % channels
}

/// All segments of RAM blocks of the given sizes, in order.
pub fn segments(blocks: &[PageCount]) -> impl Iterator<Item = Segment> + '_ {
    blocks.iter().enumerate().flat_map(|(block, pages)| {
        (0..pages.0).step_by(SEGMENT_PAGES as usize).map(move |start| Segment {
            block,
            run: PageRun::new(start, SEGMENT_PAGES.min(pages.0 - start)),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_tile_every_block() {
        let all: Vec<Segment> =
            segments(&[PageCount(SEGMENT_PAGES * 2 + 5), PageCount(1)]).collect();
        let shape: Vec<(usize, u64, u64)> =
            all.iter().map(|s| (s.block, s.run.start.0, s.run.count.0)).collect();
        assert_eq!(shape, [(0, 0, 4096), (0, 4096, 4096), (0, 8192, 5), (1, 0, 1)]);
        let channels: Vec<usize> = all.iter().map(|s| s.channel(2)).collect();
        assert_eq!(channels, [0, 1, 0, 1]);
    }
}
