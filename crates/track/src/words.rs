//! Shared words of a log: many threads or processes mark bits, one at a time takes them.
//!
//! Invariant: *no write is lost*. A writer changes a page and then marks it, a read-modify-write
//! with release order; the harvester takes the mark with acquire order and then reads the page. Why
//! marking must not be skipped where the bit is seen set is told in the crate godwit-bitmap,
//! atomic/words.rs. That crate's shared bitmap owns its words and is harvested whole; a log lies in
//! memory that others map, and is harvested a segment at a time.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_bitmap::DirtyBitmap;
use godwit_units::{PageIndex, PageRun};

const BITS: u64 = 64;
/// Words that are taken before they are merged on.
const PIECE: usize = 256;

/// Calls `f` with each word that holds some of `bits`, and the mask of them in it.
pub(crate) fn for_each_mask(bits: Range<u64>, mut f: impl FnMut(usize, u64)) {
    let mut at = bits.start;
    while at < bits.end {
        let word = at / BITS;
        let stop = bits.end.min((word + 1) * BITS);
        f(word as usize, (u64::MAX >> (BITS - (stop - at))) << (at % BITS));
        at = stop;
    }
}

/// Marks `bits`. The change that they stand for must come before.
pub(crate) fn mark(words: &[AtomicU64], bits: Range<u64>) {
    for_each_mask(bits, |word, mask| {
        words[word].fetch_or(mask, Ordering::Release);
    });
}

/// Moves those of `bits` that are set into `target`, bit `bits.start` to page `at`.
pub(crate) fn take_into(words: &[AtomicU64], bits: Range<u64>, target: &mut DirtyBitmap, at: u64) {
    let mut piece = [0; PIECE];
    let mut from = bits.start;
    while from < bits.end {
        let first = from / BITS;
        let end = bits.end.min((first + PIECE as u64) * BITS);
        let mut any = 0;
        for_each_mask(from..end, |word, mask| {
            // A word that is zero is only read, so that clean cache lines stay where they are. What
            // is marked just now is found next time; its writer is not done yet.
            let taken = match words[word].load(Ordering::Relaxed) & mask {
                0 => 0,
                _ if mask == u64::MAX => words[word].swap(0, Ordering::Acquire),
                _ => words[word].fetch_and(!mask, Ordering::Acquire) & mask,
            };
            piece[word - first as usize] = taken;
            any |= taken;
        });
        if any != 0 {
            let to = PageIndex(at + (from - bits.start));
            target.merge_words(to, &piece, PageRun::new(from % BITS, end - from));
        }
        from = end;
    }
}

/// Copies those of `bits` that are set into `target`, as [`take_into`] moves them.
pub(crate) fn peek_into(words: &[AtomicU64], bits: Range<u64>, target: &mut DirtyBitmap, at: u64) {
    let start = bits.start;
    for_each_mask(bits, |word, mask| {
        let set = words[word].load(Ordering::Relaxed) & mask;
        if set != 0 {
            let first = (word as u64 * BITS).max(start);
            let to = PageIndex(at + (first - start));
            target.merge_words(to, &[set], PageRun::new(first % BITS, BITS - first % BITS));
        }
    });
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use godwit_units::PageCount;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_was_marked_is_taken_once(
            marks in prop::collection::vec((0u64..40_000, 1u64..300), 1..20),
            take in (0u64..40_000, 0u64..40_000),
            at in 0u64..200,
        ) {
            let words: Vec<AtomicU64> = (0..640).map(|_| AtomicU64::new(0)).collect();
            let mut model = BTreeSet::new();
            for (start, count) in marks {
                mark(&words, start..start + count);
                model.extend(start..start + count);
            }
            let take = take.0.min(take.1)..take.0.max(take.1);
            let expected: Vec<u64> =
                model.range(take.clone()).map(|page| page - take.start + at).collect();
            let bitmap = || DirtyBitmap::new(PageCount(41_000));
            let pages =
                |bitmap: &DirtyBitmap| bitmap.pages().map(|page| page.0).collect::<Vec<_>>();

            let mut seen = bitmap();
            peek_into(&words, take.clone(), &mut seen, at);
            prop_assert_eq!(&pages(&seen), &expected);
            let mut taken = bitmap();
            take_into(&words, take.clone(), &mut taken, at);
            prop_assert_eq!(&pages(&taken), &expected);
            let mut left = bitmap();
            take_into(&words, 0..40_960, &mut left, 0);
            prop_assert_eq!(pages(&left).len(), model.len() - expected.len());
        }
    }
}
