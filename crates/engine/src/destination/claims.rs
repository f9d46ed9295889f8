//! Which channel pages come over in a round, where they may come over any.
//!
//! Invariant: in one round a page comes over one channel, whatever the source does: either all of
//! its segment does, in order, or each page of that comes once. Channels count rounds by the
//! barriers that came over them, which end each round on every one of them.

use std::sync::{Mutex, PoisonError};

use godwit_bitmap::DirtyBitmap;
use godwit_memory::SEGMENT_PAGES;
use godwit_units::{PageCount, PageRun};

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
    /// one segment, and what came of that in this round came over the same channel, or was none of
    /// these pages. From here on they have come.
    pub(super) fn claim(&self, (block, run): (usize, PageRun), channel: usize, round: u32) -> bool {
        let number = run.start.0 / SEGMENT_PAGES;
        let claim = self.0.get(block).and_then(|block| block.get(number as usize));
        let run = PageRun::new(run.start.0 % SEGMENT_PAGES, run.count.0);
        let Some(claim) = claim.filter(|_| run.end().0 <= SEGMENT_PAGES) else { return false };
        let mut claim = claim.lock().unwrap_or_else(PoisonError::into_inner);
        let Claim { round: last, channel: first, shared, came } = &mut *claim;
        let anew = came.is_none() || *last != round;
        let came = came.get_or_insert_with(|| DirtyBitmap::new(PageCount(SEGMENT_PAGES)));
        if anew {
            (*last, *first, *shared) = (round, channel, false);
            came.clear_all();
        }
        *shared |= *first != channel;
        if *shared && came.count_in(run) > PageCount::ZERO {
            return false;
        }
        came.set(run);
        true
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
    fn what_lies_in_no_segment_or_in_two_comes_over_none() {
        let claims = claims(2 * SEGMENT_PAGES);
        let (over_the_end, behind) = (run(SEGMENT_PAGES - 1, 2), run(2 * SEGMENT_PAGES, 1));
        for (block, run) in [(0, over_the_end), (0, behind), (2, run(0, 1))] {
            assert!(!claims.claim((block, run), 0, 0), "{block} {run:?}");
        }
    }
}
