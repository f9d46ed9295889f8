//! Which channel pages come over in a round, where they may come over any.
//!
//! Invariant: in one round a page comes over one channel, whatever the source does: either all of
//! its segment does, in order, or each page of that comes once. Channels count rounds by the
//! barriers that came over them, which end each round on every one of them.

use std::sync::{Mutex, PoisonError};

use godwit_bitmap::DirtyBitmap;
use godwit_memory::SEGMENT_PAGES;
use godwit_units::{PageCount, PageRun};

use crate::disk_prints::within_segments;

/// What came of a segment.
#[derive(Debug, Default)]
struct Claim {
    round: u32,
    /// Over which channel anything of it came first in that round.
    channel: usize,
    /// Something of it came over another one, too.
    shared: bool,
    /// The pages that came in that round; none before anything has come.
    came: Option<DirtyBitmap>,
}

/// What came of each segment, by the source's numbers of blocks. Of those of which something came,
/// a bit for each page is kept.
#[derive(Debug)]
pub(super) struct Claims(Vec<Vec<Mutex<Claim>>>);

impl Claims {
    /// For RAM blocks of these sizes.
    pub(super) fn new(sizes: impl Iterator<Item = PageCount>) -> Self {
        let segments = |pages: PageCount| pages.0.div_ceil(SEGMENT_PAGES);
        Self(sizes.map(|pages| (0..segments(pages)).map(|_| Mutex::default()).collect()).collect())
    }

    /// Whether `run`, of a block, may come over `channel` in its round number `round`: it lies in
    /// the block, and what came in this round of each of its segments came over the same channel,
    /// or was none of these pages. From here on they have come.
    pub(super) fn claim(&self, (block, run): (usize, PageRun), channel: usize, round: u32) -> bool {
        let Some(segments) = self.0.get(block) else { return false };
        if run.end().0 > segments.len() as u64 * SEGMENT_PAGES {
            return false;
        }
        // A run is joined over segments, as holes are.
        within_segments(run).all(|part| {
            let (segment, first) = (part.start.0 / SEGMENT_PAGES, part.start.0 % SEGMENT_PAGES);
            let claim = segments[segment as usize].lock();
            let pages = PageRun::new(first, part.count.0);
            claim.unwrap_or_else(PoisonError::into_inner).comes(pages, channel, round)
        })
    }
}

impl Claim {
    /// Whether pages of the segment may come over `channel` in `round`.
    fn comes(&mut self, pages: PageRun, channel: usize, round: u32) -> bool {
        let anew = self.came.is_none() || self.round != round;
        let came = self.came.get_or_insert_with(|| DirtyBitmap::new(PageCount(SEGMENT_PAGES)));
        if anew {
            (self.round, self.channel, self.shared) = (round, channel, false);
            came.clear_all();
        }
        self.shared |= self.channel != channel;
        let again = self.shared && came.count_in(pages) > PageCount::ZERO;
        came.set(pages);
        !again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, count: u64) -> PageRun {
        PageRun::new(start, count)
    }

    fn claims(pages: u64) -> Claims {
        Claims::new([PageCount(pages), PageCount(1)].into_iter())
    }

    #[test]
    fn a_page_comes_over_one_channel_in_a_round_and_over_any_in_the_next() {
        let claims = claims(2 * SEGMENT_PAGES);
        assert!(claims.claim((0, run(7, 2)), 1, 0));
        assert!(claims.claim((0, run(7, 1)), 1, 0), "the same channel once more");
        assert!(!claims.claim((0, run(8, 2)), 0, 0), "another one in the same round");
        assert!(claims.claim((0, run(SEGMENT_PAGES + 8, 1)), 0, 0), "another segment");
        assert!(claims.claim((1, run(0, 1)), 0, 0), "another block");
        assert!(claims.claim((0, run(7, 2)), 0, 1), "the next round");
        assert!(!claims.claim((0, run(8, 1)), 1, 1));
    }

    #[test]
    fn each_page_of_a_segment_that_comes_over_several_channels_comes_once() {
        let claims = claims(SEGMENT_PAGES);
        assert!(claims.claim((0, run(0, 4)), 0, 3));
        assert!(claims.claim((0, run(4, 4)), 1, 3));
        for (page, channel) in [(0, 0), (7, 1), (7, 0), (3, 2)] {
            assert!(!claims.claim((0, run(page, 1)), channel, 3), "{page} over {channel}");
        }
        assert!(claims.claim((0, run(8, 4)), 2, 3));
        // Over one channel they come in order, as often as may be.
        assert!(claims.claim((0, run(0, 4)), 2, 4) && claims.claim((0, run(0, 4)), 2, 4));
    }

    #[test]
    fn a_run_may_reach_over_segments_but_not_over_the_block() {
        let claims = claims(3 * SEGMENT_PAGES);
        assert!(claims.claim((0, run(SEGMENT_PAGES - 1, SEGMENT_PAGES + 2)), 0, 0));
        for page in [SEGMENT_PAGES - 1, SEGMENT_PAGES, 2 * SEGMENT_PAGES] {
            assert!(!claims.claim((0, run(page, 1)), 1, 0), "{page} came");
        }
        assert!(claims.claim((0, run(2 * SEGMENT_PAGES + 1, 1)), 1, 0), "this did not");
        let (over_the_end, behind) =
            (run(3 * SEGMENT_PAGES - 1, u64::from(u32::MAX)), run(3 * SEGMENT_PAGES, 1));
        let far_behind = run(u64::MAX - 8, 8);
        let wrong = [(0, over_the_end), (0, behind), (0, far_behind), (2, run(0, 1))];
        for (block, run) in wrong {
            assert!(!claims.claim((block, run), 0, 1), "{block} {run:?}");
        }
    }
}
