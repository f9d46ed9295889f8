//! The plain dirty bitmap: one owner, one bit a page, 64 pages a word.
//!
//! Keeps one invariant: bits past its length are never set. Runs given to it are cut to that
//! length, so that a tracker which reports whole words needs no care at the end.

use std::convert::Infallible;
use std::ops::{ControlFlow, Range};

use godwit_units::{PageCount, PageIndex, PageRun};

use crate::merge::merge;
use crate::path::CodePath;
use crate::scan::{GROUP, RunScan};
use crate::word::{BITS, edges, for_each_mask, mask};

/// One bit for each page of a range of `len` pages, all clear at first.
///
/// ```
/// use godwit_bitmap::DirtyBitmap;
/// use godwit_units::{PageCount, PageRun};
///
/// let mut dirty = DirtyBitmap::new(PageCount(1000));
/// dirty.set(PageRun::new(62, 4));
/// dirty.clear(PageRun::new(63, 1));
/// assert_eq!(dirty.try_harvest(|_| Err("the link is down")), Err("the link is down"));
/// assert_eq!(dirty.count(), PageCount(3), "what was not taken is still dirty");
/// let mut runs = Vec::new();
/// dirty.harvest(|run| runs.push(run));
/// assert_eq!(runs, [PageRun::new(62, 1), PageRun::new(64, 2)]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyBitmap {
    words: Vec<u64>,
    len: u64,
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

    /// Its words: page `i` is bit `i % 64` of word `i / 64`, as in the kernel's dirty logs
    /// (`KVM_GET_DIRTY_LOG`, Documentation/virt/kvm/api.rst).
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Whether page `page` is dirty; pages beyond the end never are.
    #[must_use]
    pub fn is_set(&self, page: PageIndex) -> bool {
        page.0 < self.len && self.words[(page.0 / BITS) as usize] >> (page.0 % BITS) & 1 == 1
    }

    /// Marks the pages of `run` dirty, as far as they lie within the bitmap; returns how many were
    /// clean.
    pub fn set(&mut self, run: PageRun) -> PageCount {
        let mut newly = 0;
        for_each_mask(self.cut(run), |word, mask| {
            let word = &mut self.words[word];
            newly += u64::from((mask & !*word).count_ones());
            *word |= mask;
        });
        PageCount(newly)
    }

    /// Marks the pages of `run` clean, as far as they lie within the bitmap; returns how many were
    /// dirty.
    pub fn clear(&mut self, run: PageRun) -> PageCount {
        let mut were = 0;
        for_each_mask(self.cut(run), |word, mask| {
            let word = &mut self.words[word];
            were += u64::from((mask & *word).count_ones());
            *word &= !mask;
        });
        PageCount(were)
    }

    /// Marks all pages dirty.
    pub fn set_all(&mut self) {
        self.words.fill(u64::MAX);
        self.cut_last_word();
    }

    /// Marks all pages clean.
    pub fn clear_all(&mut self) {
        self.words.fill(0);
    }

    /// How many pages are dirty.
    #[must_use]
    pub fn count(&self) -> PageCount {
        PageCount(self.words.iter().map(|w| u64::from(w.count_ones())).sum())
    }

    /// How many pages of `run` are dirty: the heat of a segment.
    #[must_use]
    pub fn count_in(&self, run: PageRun) -> PageCount {
        let mut count = 0;
        for_each_mask(self.cut(run), |word, mask| {
            count += u64::from((self.words[word] & mask).count_ones())
        });
        PageCount(count)
    }

    /// Merges the `pages` of `source` into this bitmap, the first of them at page `at`; returns how
    /// many pages that made dirty which were clean. What lies beyond either end is left out.
    pub fn merge(&mut self, at: PageIndex, source: &Self, pages: PageRun) -> PageCount {
        let count = pages.count.0.min(source.len.saturating_sub(pages.start.0));
        self.merge_words(at, &source.words, PageRun { count: PageCount(count), ..pages })
    }

    /// Merges bits `bits` of `words` into this bitmap, the first of them at page `at`, word by word
    /// at any offset: see [`DirtyBitmap::merge`]. For the logs of kernels and devices, which are
    /// plain words.
    pub fn merge_words(&mut self, at: PageIndex, words: &[u64], bits: PageRun) -> PageCount {
        self.merge_words_on(CodePath::best(), at, words, bits)
    }

    /// [`DirtyBitmap::merge_words`] on the code path `path`.
    pub fn merge_words_on(
        &mut self,
        path: CodePath,
        at: PageIndex,
        words: &[u64],
        bits: PageRun,
    ) -> PageCount {
        let source = (words.len() as u64 * BITS).saturating_sub(bits.start.0);
        let count = bits.count.0.min(source).min(self.len.saturating_sub(at.0));
        PageCount(merge(path, &mut self.words, at.0, words, bits.start.0, count))
    }

    /// Makes every page dirty that is dirty in `other`; returns how many were clean.
    pub fn union(&mut self, other: &Self) -> PageCount {
        self.merge(PageIndex(0), other, PageRun::new(0, other.len))
    }

    /// Calls `f` with every maximal run of dirty pages, in order. The fast path: nothing is
    /// allocated, and it runs at the speed of memory where little is dirty.
    #[inline]
    pub fn for_each_run(&self, mut f: impl FnMut(PageRun)) {
        self.for_each_run_on(CodePath::best(), &mut f);
    }

    /// [`DirtyBitmap::for_each_run`] on the code path `path`.
    #[inline]
    pub fn for_each_run_on(&self, path: CodePath, mut f: impl FnMut(PageRun)) {
        let all = PageRun::new(0, self.len);
        let _: ControlFlow<Infallible> = self.walk(path, all, &mut |run| {
            f(run);
            ControlFlow::Continue(())
        });
    }

    /// [`DirtyBitmap::for_each_run`] within `pages` only: a run that crosses its ends is cut there.
    #[inline]
    pub fn for_each_run_in(&self, pages: PageRun, mut f: impl FnMut(PageRun)) {
        let _: ControlFlow<Infallible> = self.walk(CodePath::best(), pages, &mut |run| {
            f(run);
            ControlFlow::Continue(())
        });
    }

    /// Calls `f` with every maximal run of dirty pages within `pages` until it breaks.
    ///
    /// # Errors
    /// None of its own: it hands on the break.
    #[inline]
    pub fn try_for_each_run_in<B>(
        &self,
        pages: PageRun,
        mut f: impl FnMut(PageRun) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        self.walk(CodePath::best(), pages, &mut f)
    }

    #[inline]
    fn walk<B>(
        &self,
        path: CodePath,
        pages: PageRun,
        f: &mut impl FnMut(PageRun) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        let Range { start, end } = self.cut(pages);
        if start >= end {
            return ControlFlow::Continue(());
        }
        let mut scan = RunScan::new(path);
        let (mut first, last) = ((start / BITS) as usize, (end / BITS) as usize);
        if start % BITS != 0 {
            let stop = end.min((first as u64 + 1) * BITS) - first as u64 * BITS;
            let word = self.words[first] & mask(start % BITS, stop);
            scan.feed_short(&[word], first as u64 * BITS, f)?;
            first += 1;
        }
        if first < last {
            scan.feed(&self.words[first..last], first as u64 * BITS, f)?;
        }
        if first <= last && end % BITS != 0 {
            let word = self.words[last] & mask(0, end % BITS);
            scan.feed_short(&[word], last as u64 * BITS, f)?;
        }
        scan.finish(end, f)
    }

    /// The maximal runs of dirty pages, in order, streamed without an allocation. Whole walks
    /// (`for_each`, `fold`, `sum`, `count`) take the fast path of [`DirtyBitmap::for_each_run`].
    #[must_use]
    pub fn runs(&self) -> Runs<'_> {
        Runs { bitmap: self, word: 0, left: self.words.first().map_or(0, |&word| edges(word, 0)) }
    }

    /// The first maximal run of dirty pages at or after `from`, cut at its start.
    #[must_use]
    pub fn next_run(&self, from: PageIndex) -> Option<PageRun> {
        let rest = PageRun { start: from, count: PageCount(self.len.saturating_sub(from.0)) };
        self.try_for_each_run_in(rest, ControlFlow::Break).break_value()
    }

    /// The numbers of the dirty pages, in order.
    pub fn pages(&self) -> impl Iterator<Item = PageIndex> + '_ {
        self.runs().flat_map(|run| (run.start.0..run.end().0).map(PageIndex))
    }

    /// Hands every maximal run of dirty pages to `f`, in order, and leaves all pages clean: scan
    /// and clearing in one pass over memory. When `f` panics, no page that it was not given is
    /// clean.
    #[inline]
    pub fn harvest(&mut self, mut f: impl FnMut(PageRun)) {
        let Ok(()) = self.try_harvest(|run| {
            f(run);
            Ok::<(), Infallible>(())
        });
    }

    /// [`DirtyBitmap::harvest`] until `f` fails; the run that it failed on and all after it stay
    /// dirty, and some before it may.
    ///
    /// # Errors
    /// None of its own: it hands on what `f` says.
    #[inline]
    pub fn try_harvest<E>(&mut self, mut f: impl FnMut(PageRun) -> Result<(), E>) -> Result<(), E> {
        let mut f = |run| match f(run) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(error),
        };
        let mut scan = RunScan::new(CodePath::best());
        let mut cleared = 0;
        for at in (0..self.words.len()).step_by(HARVEST) {
            let piece = HARVEST.min(self.words.len() - at);
            if let ControlFlow::Break(error) =
                scan.feed(&self.words[at..at + piece], at as u64 * BITS, &mut f)
            {
                return Err(error);
            }
            // Words of a run that is still open hold pages that nobody has been given yet.
            let upto = scan.open().map_or(at + piece, |start| (start / BITS) as usize);
            if cleared < upto {
                clear_words(&mut self.words[cleared..upto]);
                cleared = upto;
            }
        }
        if let ControlFlow::Break(error) = scan.finish(self.len, &mut f) {
            return Err(error);
        }
        self.words[cleared..].fill(0);
        Ok(())
    }

    /// The pages of `run` that lie within the bitmap.
    fn cut(&self, run: PageRun) -> Range<u64> {
        run.start.0..run.start.0.saturating_add(run.count.0).min(self.len)
    }

    fn cut_last_word(&mut self) {
        if let Some(last) = self.words.last_mut()
            && !self.len.is_multiple_of(BITS)
        {
            *last &= mask(0, self.len % BITS);
        }
    }
}

/// Words that a harvest scans and then clears: few enough to be still in the first-level cache.
const HARVEST: usize = 16 * GROUP;

/// Clears `words`, without writing to a cache line that is clean.
fn clear_words(words: &mut [u64]) {
    for line in words.chunks_mut(8) {
        if line.iter().fold(0, |any, word| any | *word) != 0 {
            line.fill(0);
        }
    }
}

/// Calls `f` with every maximal run of pages that are dirty in any of `bitmaps`, in order, without
/// building their union. Bitmaps may differ in length.
///
/// ```
/// use godwit_bitmap::{DirtyBitmap, for_each_run_of_union};
/// use godwit_units::{PageCount, PageRun};
///
/// let mut bitmaps = [DirtyBitmap::new(PageCount(100)), DirtyBitmap::new(PageCount(100))];
/// bitmaps[0].set(PageRun::new(10, 5));
/// bitmaps[1].set(PageRun::new(15, 5));
/// let mut runs = Vec::new();
/// for_each_run_of_union(&bitmaps.each_ref(), |run| runs.push(run));
/// assert_eq!(runs, [PageRun::new(10, 10)]);
/// ```
#[inline]
pub fn for_each_run_of_union(bitmaps: &[&DirtyBitmap], mut f: impl FnMut(PageRun)) {
    let words = bitmaps.iter().map(|bitmap| bitmap.words.len()).max().unwrap_or(0);
    let len = bitmaps.iter().map(|bitmap| bitmap.len).max().unwrap_or(0);
    let mut f = |run| {
        f(run);
        ControlFlow::<Infallible>::Continue(())
    };
    // Four groups at a time: few enough to stay in the first-level cache.
    const PIECE: usize = 4 * GROUP;
    let mut union = [0; PIECE];
    let mut scan = RunScan::new(CodePath::best());
    for at in (0..words).step_by(PIECE) {
        let piece = PIECE.min(words - at);
        let union = &mut union[..piece];
        union.fill(0);
        for bitmap in bitmaps {
            let here = bitmap.words.get(at..).unwrap_or_default();
            union.iter_mut().zip(here).for_each(|(to, word)| *to |= word);
        }
        let _ = scan.feed(union, at as u64 * BITS, &mut f);
    }
    let _ = scan.finish(len, &mut f);
}

/// The maximal runs of a [`DirtyBitmap`]; see [`DirtyBitmap::runs`].
///
/// ```
/// use godwit_bitmap::DirtyBitmap;
/// use godwit_units::{PageCount, PageRun};
///
/// let mut dirty = DirtyBitmap::new(PageCount(100));
/// dirty.set(PageRun::new(10, 5));
/// assert_eq!(dirty.runs().next(), Some(PageRun::new(10, 5)));
/// ```
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    bitmap: &'a DirtyBitmap,
    /// The word that `left` belongs to.
    word: usize,
    /// Edges of that word that have not been handed out.
    left: u64,
}

impl Runs<'_> {
    #[inline]
    fn next_edge(&mut self) -> Option<u64> {
        if self.left == 0 {
            self.next_word()?;
        }
        let edge = self.word as u64 * BITS + u64::from(self.left.trailing_zeros());
        self.left &= self.left - 1;
        Some(edge)
    }

    /// Goes on to the next word that has an edge.
    #[inline]
    fn next_word(&mut self) -> Option<()> {
        let words = &self.bitmap.words;
        let before = *words.get(self.word)?;
        self.word += 1;
        self.left = edges(*words.get(self.word)?, before);
        while self.left == 0 {
            // Whole cache lines are skipped only from a word without an edge on: dense bitmaps
            // never ask.
            let same = 0u64.wrapping_sub(words[self.word] >> 63);
            self.word += 1;
            while let Some(line) = words.get(self.word..self.word + 8)
                && line.iter().fold(0, |different, word| different | (word ^ same)) == 0
            {
                self.word += 8;
            }
            self.left = edges(*words.get(self.word)?, same);
        }
        Some(())
    }
}

impl Iterator for Runs<'_> {
    type Item = PageRun;

    #[inline]
    fn next(&mut self) -> Option<PageRun> {
        let start = self.next_edge()?;
        let end = self.next_edge().unwrap_or(self.bitmap.len);
        Some(PageRun::new(start, end - start))
    }

    #[inline]
    fn fold<A, F: FnMut(A, PageRun) -> A>(self, init: A, mut f: F) -> A {
        // The first edge left is a start, so nothing before it is dirty or yet to be handed out.
        let from = match self.left {
            0 => (self.word as u64 + 1) * BITS,
            left => self.word as u64 * BITS + u64::from(left.trailing_zeros()),
        };
        let mut folded = Some(init);
        let rest = PageRun::new(from, self.bitmap.len.saturating_sub(from));
        self.bitmap
            .for_each_run_in(rest, |run| folded = folded.take().map(|so_far| f(so_far, run)));
        match folded {
            Some(folded) => folded,
            None => unreachable!("f returned or panicked"),
        }
    }
}

impl std::iter::FusedIterator for Runs<'_> {}

#[cfg(test)]
mod tests;
