//! Which channel a segment comes over in a round, where it may come over any.
//!
//! Invariant: in one round it is one channel, whatever the source does. Channels count rounds by
//! the barriers that came over them, which end each round on every one of them.

use std::sync::atomic::{AtomicU64, Ordering};

use godwit_memory::SEGMENT_PAGES;
use godwit_units::{PageCount, PageRun};

/// Nothing of the segment has come yet.
const NEVER: u64 = u64::MAX;

/// By the source's numbers of blocks, and segment: the round in which something of it came last,
/// and below that, in 8 bits, the channel.
#[derive(Debug)]
pub(super) struct Claims(Vec<Vec<AtomicU64>>);

impl Claims {
    /// For RAM blocks of these sizes.
    pub(super) fn new(sizes: impl Iterator<Item = PageCount>) -> Self {
        let segments = |pages: PageCount| pages.0.div_ceil(SEGMENT_PAGES);
        Self(sizes.map(|pages| (0..segments(pages)).map(|_| NEVER.into()).collect()).collect())
    }

    /// Whether `run`, of a block, may come over `channel` in its round number `round`: it lies in
    /// one segment, and nothing of that has come over another channel in this round. From here on
    /// nothing may.
    pub(super) fn claim(&self, (block, run): (usize, PageRun), channel: usize, round: u32) -> bool {
        let Some(last) = run.end().0.checked_sub(1) else { return false };
        let segment = run.start.0 / SEGMENT_PAGES;
        let claim = self.0.get(block).and_then(|block| block.get(segment as usize));
        let Some(claim) = claim.filter(|_| last / SEGMENT_PAGES == segment) else { return false };
        let wanted = u64::from(round) << 8 | channel as u64;
        let taken = |held: u64| held != NEVER && held >> 8 == u64::from(round);
        let held = claim.load(Ordering::Relaxed);
        if held == wanted {
            return true;
        }
        // Of two channels that claim it at once one sees what the other has put there.
        !taken(held) && !taken(claim.swap(wanted, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, count: u64) -> PageRun {
        PageRun::new(start, count)
    }

    #[test]
    fn a_segment_comes_over_one_channel_in_a_round_and_over_any_in_the_next() {
        let claims = Claims::new([PageCount(2 * SEGMENT_PAGES), PageCount(1)].into_iter());
        assert!(claims.claim((0, run(7, 2)), 1, 0));
        assert!(claims.claim((0, run(3, 2)), 1, 0), "the same channel once more");
        assert!(!claims.claim((0, run(900, 1)), 0, 0), "another one in the same round");
        assert!(claims.claim((0, run(SEGMENT_PAGES, 1)), 0, 0), "another segment");
        assert!(claims.claim((1, run(0, 1)), 0, 0), "another block");
        assert!(claims.claim((0, run(7, 2)), 0, 1), "the next round");
        assert!(!claims.claim((0, run(7, 2)), 1, 1));
    }

    #[test]
    fn what_lies_in_no_segment_or_in_two_comes_over_none() {
        let claims = Claims::new([PageCount(2 * SEGMENT_PAGES)].into_iter());
        let (over_the_end, behind) = (run(SEGMENT_PAGES - 1, 2), run(2 * SEGMENT_PAGES, 1));
        for (block, run) in [(0, over_the_end), (0, behind), (1, run(0, 1)), (0, run(0, 0))] {
            assert!(!claims.claim((block, run), 0, 0), "{block} {run:?}");
        }
    }

    #[test]
    fn of_channels_that_claim_a_segment_at_once_one_gets_it() {
        for round in 0..200 {
            let claims = Claims::new([PageCount(1)].into_iter());
            let claim = |channel| claims.claim((0, run(0, 1)), channel, round);
            let got = std::thread::scope(|scope| {
                let all = [0, 1, 2, 3].map(|channel| scope.spawn(move || claim(channel)));
                all.map(|it| it.join().unwrap()).into_iter().filter(|got| *got).count()
            });
            assert_eq!(got, 1);
        }
    }
}
