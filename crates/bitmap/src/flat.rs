//! The plain dirty bitmap: one owner, one bit a page, 64 pages a word.

use godwit_units::{PageCount, PageIndex, PageRun};

const BITS: u64 = 64;

/// One bit for each page of a range of `len` pages, all clear at first.
///
/// Bits beyond `len` in the last word are never set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyBitmap {
    words: Vec<u64>,
    len: u64,
}

/// The mask of bits `from..to` within one word; `from < 64`, `from <= to <= 64`.
fn mask(from: u64, to: u64) -> u64 {
    let upper = if to == BITS { u64::MAX } else { (1 << to) - 1 };
    upper & (u64::MAX << from)
}

impl DirtyBitmap {
    /// A bitmap for `pages` pages, all clean.
    #[must_use]
    pub fn new(pages: PageCount) -> Self {
        Self { words: vec![0; pages.0.div_ceil(BITS) as usize], len: pages.0 }
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

    /// Whether page `page` is dirty; pages beyond the end never are.
    #[must_use]
    pub fn is_set(&self, page: PageIndex) -> bool {
        page.0 < self.len && self.words[(page.0 / BITS) as usize] >> (page.0 % BITS) & 1 == 1
    }

    /// Marks the pages of `run` dirty, as far as they lie within the bitmap; returns how many were clean.
    pub fn set(&mut self, run: PageRun) -> PageCount {
        self.apply(run, |word, mask| {
            let newly = mask & !*word;
            *word |= mask;
            newly
        })
    }

    /// Marks the pages of `run` clean, as far as they lie within the bitmap; returns how many were dirty.
    pub fn clear(&mut self, run: PageRun) -> PageCount {
        self.apply(run, |word, mask| {
            let newly = mask & *word;
            *word &= !mask;
            newly
        })
    }

    fn apply(&mut self, run: PageRun, edit: impl Fn(&mut u64, u64) -> u64) -> PageCount {
        let end = run.end().0.min(self.len);
        let mut at = run.start.0;
        let mut changed = 0;
        while at < end {
            let word = at / BITS;
            let stop = end.min((word + 1) * BITS);
            let bits = mask(at % BITS, stop - word * BITS);
            changed += u64::from(edit(&mut self.words[word as usize], bits).count_ones());
            at = stop;
        }
        PageCount(changed)
    }

    /// How many pages are dirty.
    #[must_use]
    pub fn count(&self) -> PageCount {
        PageCount(self.words.iter().map(|w| u64::from(w.count_ones())).sum())
    }

    /// The maximal runs of dirty pages, in order, streamed without an allocation.
    pub fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, true)?;
            let end = self.next(start, false).unwrap_or(self.len);
            at = end;
            Some(PageRun::new(start, end - start))
        })
    }

    /// The first page from `from` on whose bit is `wanted`.
    fn next(&self, from: u64, wanted: bool) -> Option<u64> {
        if from >= self.len {
            return None;
        }
        let flip = if wanted { 0 } else { u64::MAX };
        let mut word = (from / BITS) as usize;
        let mut bits = (self.words[word] ^ flip) & (u64::MAX << (from % BITS));
        while bits == 0 {
            word += 1;
            bits = *self.words.get(word)? ^ flip;
        }
        let found = word as u64 * BITS + u64::from(bits.trailing_zeros());
        (found < self.len).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn model_runs(model: &BTreeSet<u64>) -> Vec<PageRun> {
        let mut runs: Vec<PageRun> = Vec::new();
        for &page in model {
            match runs.last_mut() {
                Some(last) if last.end().0 == page => last.count.0 += 1,
                _ => runs.push(PageRun::new(page, 1)),
            }
        }
        runs
    }

    proptest! {
        #[test]
        fn behaves_like_a_set(len in 1u64..300, edits in prop::collection::vec((any::<bool>(), 0u64..320, 0u64..100), 0..40)) {
            let mut bitmap = DirtyBitmap::new(PageCount(len));
            let mut model = BTreeSet::new();
            for (set, start, count) in edits {
                let run = PageRun::new(start, count);
                let before = model.len();
                let inside = start..(start + count).min(len);
                if set {
                    model.extend(inside);
                    prop_assert_eq!(bitmap.set(run).0, (model.len() - before) as u64);
                } else {
                    model.retain(|page| !inside.contains(page));
                    prop_assert_eq!(bitmap.clear(run).0, (before - model.len()) as u64);
                }
            }
            prop_assert_eq!(bitmap.count().0, model.len() as u64);
            prop_assert_eq!(bitmap.runs().collect::<Vec<_>>(), model_runs(&model));
            for page in 0..len + 2 {
                prop_assert_eq!(bitmap.is_set(PageIndex(page)), model.contains(&page));
            }
        }
    }
}
