//! What is done within one 64-page word, and how a range of pages falls into words.
//!
//! Leaves all knowledge of what a bit means to its callers.

use std::ops::Range;

/// Pages in a word.
pub(crate) const BITS: u64 = 64;

/// The mask of bits `from..to` within one word; `from < 64`, `from <= to <= 64`.
pub(crate) fn mask(from: u64, to: u64) -> u64 {
    let upper = if to == BITS { u64::MAX } else { (1 << to) - 1 };
    upper & (u64::MAX << from)
}

/// Calls `f` with the number of each word that holds pages of `pages`, and the mask of those pages
/// in it.
pub(crate) fn for_each_mask(pages: Range<u64>, mut f: impl FnMut(usize, u64)) {
    let mut at = pages.start;
    while at < pages.end {
        let word = at / BITS;
        let stop = pages.end.min((word + 1) * BITS);
        f(word as usize, mask(at % BITS, stop - word * BITS));
        at = stop;
    }
}

/// The edges of `word`: bit `i` is set where page `i` differs from the page before it; `before` is
/// the word before, of which only the highest bit counts.
#[inline(always)]
pub(crate) fn edges(word: u64, before: u64) -> u64 {
    word ^ (word << 1 | before >> 63)
}
