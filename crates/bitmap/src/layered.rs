//! The multi-level dirty bitmap: it knows where it is empty, for bitmaps that are searched often
//! and hold little, above all the dirty blocks of disks.
//!
//! Level 0 has one bit a page; each level above has one bit for each word of the level below, set
//! exactly when that word is not zero (the invariant); the top level is one word. The next dirty
//! page is found by going up until a word has a later bit and down again, at most two words a
//! level: 12 words for 2^36 pages. A page here is whatever unit the owner counts in; for disks it
//! is a dirty block.

use std::convert::Infallible;
use std::ops::{ControlFlow, Range};

use godwit_units::{PageCount, PageIndex, PageRun};

use crate::path::CodePath;
use crate::scan::{GROUP, RunScan};
use crate::word::{BITS, for_each_mask};

/// From this many dirty words of 64 on, a walk takes the whole group at once instead of each word
/// alone.
const WHOLE_GROUP: u32 = 2;

/// One bit for each page of a range of `len` pages, all clear at first, with summaries above.
///
/// ```
/// use godwit_bitmap::LayeredBitmap;
/// use godwit_units::{PageCount, PageIndex, PageRun};
///
/// let mut dirty = LayeredBitmap::new(PageCount(1 << 30));
/// dirty.set(PageRun::new(123_456_789, 300));
/// let next = dirty.take_run(PageIndex(0), PageCount(256));
/// assert_eq!(next, Some(PageRun::new(123_456_789, 256)));
/// assert_eq!(dirty.count(), PageCount(44));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayeredBitmap {
    /// Level 0 first; at least two levels, the last of one word.
    levels: Vec<Vec<u64>>,
    len: u64,
    count: u64,
}

impl LayeredBitmap {
    /// A bitmap for `pages` pages, all clean.
    #[must_use]
    pub fn new(pages: PageCount) -> Self {
        let mut words = pages.0.div_ceil(BITS);
        let mut levels = vec![vec![0; words as usize]];
        loop {
            words = words.div_ceil(BITS).max(1);
            levels.push(vec![0; words as usize]);
            if words == 1 {
                return Self { levels, len: pages.0, count: 0 };
            }
        }
    }

    /// How many pages it covers.
    #[must_use]
    pub fn len(&self) -> PageCount {
        PageCount(self.len)
    }

    /// Whether it covers no page at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many pages are dirty; kept up to date, so this costs nothing.
    #[must_use]
    pub fn count(&self) -> PageCount {
        PageCount(self.count)
    }

    /// Whether page `page` is dirty; pages beyond the end never are.
    #[must_use]
    pub fn is_set(&self, page: PageIndex) -> bool {
        page.0 < self.len && self.levels[0][(page.0 / BITS) as usize] >> (page.0 % BITS) & 1 == 1
    }

    /// Marks the pages of `run` dirty, as far as they lie within the bitmap; returns how many were
    /// clean.
    pub fn set(&mut self, run: PageRun) -> PageCount {
        let pages = self.cut(run);
        if pages.is_empty() {
            return PageCount::ZERO;
        }
        let mut newly = 0;
        // Once no word goes from zero to something, the levels above know already.
        let mut woken = false;
        for_each_mask(pages.clone(), |word, mask| {
            let word = &mut self.levels[0][word];
            woken |= *word == 0;
            newly += u64::from((mask & !*word).count_ones());
            *word |= mask;
        });
        let mut bits = pages;
        for level in &mut self.levels[1..] {
            if !std::mem::take(&mut woken) {
                break;
            }
            bits = bits.start / BITS..(bits.end - 1) / BITS + 1;
            for_each_mask(bits.clone(), |word, mask| {
                woken |= level[word] == 0;
                level[word] |= mask;
            });
        }
        self.count += newly;
        PageCount(newly)
    }

    /// Marks the pages of `run` clean, as far as they lie within the bitmap; returns how many were
    /// dirty.
    pub fn clear(&mut self, run: PageRun) -> PageCount {
        let pages = self.cut(run);
        if pages.is_empty() {
            return PageCount::ZERO;
        }
        let mut were = 0;
        for_each_mask(pages.clone(), |word, mask| {
            let word = &mut self.levels[0][word];
            were += u64::from((mask & *word).count_ones());
            *word &= !mask;
        });
        let mut bits = pages;
        for level in 1..self.levels.len() {
            // Words between the first and the last are zero now; those two perhaps.
            let (below, here) = self.levels.split_at_mut(level);
            let below = &below[level - 1];
            let (first, last) = ((bits.start / BITS) as usize, ((bits.end - 1) / BITS) as usize);
            let first = first + usize::from(below[first] != 0);
            let end = if below[last] == 0 { last + 1 } else { last };
            if first >= end {
                break;
            }
            bits = first as u64..end as u64;
            for_each_mask(bits.clone(), |word, mask| here[0][word] &= !mask);
        }
        self.count -= were;
        PageCount(were)
    }

    /// The first dirty page at or after `from`.
    #[must_use]
    pub fn next_set(&self, from: PageIndex) -> Option<PageIndex> {
        (from.0 < self.len).then(|| self.next_bit(0, from.0)).flatten().map(PageIndex)
    }

    /// The first maximal run of dirty pages at or after `from`, cut at its start, and at its end
    /// when it has more than `limit` pages. A `limit` of zero finds nothing.
    #[must_use]
    pub fn next_run(&self, from: PageIndex, limit: PageCount) -> Option<PageRun> {
        let start = self.next_set(from)?.0;
        let stop = start.saturating_add(limit.0).min(self.len);
        let mut end = start;
        while end < stop {
            let ones = (self.levels[0][(end / BITS) as usize] >> (end % BITS)).trailing_ones();
            end += u64::from(ones);
            // Short of the end of the word: a clean page.
            if ones == 0 || !end.is_multiple_of(BITS) {
                break;
            }
        }
        let end = end.min(stop);
        (start < end).then(|| PageRun::new(start, end - start))
    }

    /// Finds the next run as [`LayeredBitmap::next_run`] does and marks it clean: the next area to
    /// copy.
    pub fn take_run(&mut self, from: PageIndex, limit: PageCount) -> Option<PageRun> {
        let run = self.next_run(from, limit)?;
        self.clear(run);
        Some(run)
    }

    /// Calls `f` with every maximal run of dirty pages, in order, without an allocation, in time
    /// proportional to the words that hold one.
    #[inline]
    pub fn for_each_run(&self, f: impl FnMut(PageRun)) {
        self.for_each_run_on(CodePath::best(), f);
    }

    /// [`LayeredBitmap::for_each_run`] on the code path `path`.
    #[inline]
    pub fn for_each_run_on(&self, path: CodePath, mut f: impl FnMut(PageRun)) {
        let mut f = |run| {
            f(run);
            ControlFlow::<Infallible>::Continue(())
        };
        let mut scan = RunScan::new(path);
        // Words are fed in order, but clean ones between them are not: one stands for all of them,
        // and only where it has an open run to end.
        let mut fed = 0;
        let mut next = self.next_bit(1, 0);
        while let Some(word) = next {
            let group = word / GROUP as u64;
            let mut summary = self.levels[1][group as usize];
            let words = group as usize * GROUP;
            if summary.count_ones() >= WHOLE_GROUP {
                let end = self.levels[0].len().min(words + GROUP);
                let _ = self.feed(&mut scan, &mut fed, words..end, &mut f);
            } else {
                while summary != 0 {
                    let word = words + summary.trailing_zeros() as usize;
                    let _ = self.feed(&mut scan, &mut fed, word..word + 1, &mut f);
                    summary &= summary - 1;
                }
            }
            next = self.next_bit(1, (group + 1) * GROUP as u64);
        }
        let _ = scan.finish(self.len.min(fed as u64 * BITS), &mut f);
    }

    #[inline]
    fn feed(
        &self,
        scan: &mut RunScan,
        fed: &mut usize,
        words: Range<usize>,
        f: &mut impl FnMut(PageRun) -> ControlFlow<Infallible>,
    ) -> ControlFlow<Infallible> {
        if *fed < words.start && scan.open().is_some() {
            scan.feed_short(&[0], *fed as u64 * BITS, f)?;
        }
        *fed = words.end;
        if let [word] = self.levels[0][words.clone()] {
            return scan.feed_short(&[word], words.start as u64 * BITS, f);
        }
        scan.feed(&self.levels[0][words.clone()], words.start as u64 * BITS, f)
    }

    /// The maximal runs of dirty pages, in order, streamed without an allocation.
    pub fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        let mut at = PageIndex(0);
        std::iter::from_fn(move || {
            let run = self.next_run(at, PageCount(u64::MAX))?;
            at = run.end();
            Some(run)
        })
    }

    /// The first set bit of `lowest` level at or after `bit`.
    fn next_bit(&self, lowest: usize, mut bit: u64) -> Option<u64> {
        let mut level = lowest;
        // Up, until a word has a later bit ...
        loop {
            let word = *self.levels[level].get((bit / BITS) as usize)?;
            let later = word & (u64::MAX << (bit % BITS));
            if later != 0 {
                bit = bit / BITS * BITS + u64::from(later.trailing_zeros());
                break;
            }
            level += 1;
            if level == self.levels.len() {
                return None;
            }
            bit = bit / BITS + 1;
        }
        // ... and down again, to the first bit of each word.
        Some((lowest..level).rev().fold(bit, |bit, level| {
            bit * BITS + u64::from(self.levels[level][bit as usize].trailing_zeros())
        }))
    }

    fn cut(&self, run: PageRun) -> Range<u64> {
        run.start.0..run.start.0.saturating_add(run.count.0).min(self.len)
    }
}

#[cfg(test)]
mod tests;
