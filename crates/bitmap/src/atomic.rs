//! The shared dirty bitmap: many writers, one harvester.
//!
//! Keeps two invariants. No write is lost: see `atomic/words.rs` for the order of things. And no
//! harvested page is lost: what a harvest has taken but not handed out, because its consumer failed
//! or panicked, is put back before the harvest returns.

use std::cell::Cell;
use std::convert::Infallible;
use std::ops::{ControlFlow, Range};

use godwit_units::{PageCount, PageIndex, PageRun};

use crate::flat::DirtyBitmap;
use crate::path::CodePath;
use crate::scan::{GROUP, RunScan};
use crate::word::{BITS, for_each_mask, mask};

use self::words::SharedWords;
use crate::sync;

mod words;

/// Words that a harvest takes at a time; they wait in a buffer on the stack until handed out.
const PIECE: usize = 8 * GROUP;

/// One bit for each page of a range of `len` pages, which threads mark while one other thread
/// harvests.
///
/// A thread must change the page first and mark it second. Two harvests at a time are safe, but a
/// run that one of them hands out may then not be maximal.
///
/// ```
/// use godwit_bitmap::AtomicDirtyBitmap;
/// use godwit_units::{PageCount, PageRun};
///
/// let dirty = AtomicDirtyBitmap::new(PageCount(1000));
/// std::thread::scope(|scope| {
///     scope.spawn(|| dirty.set(PageRun::new(3, 2)));
///     scope.spawn(|| dirty.set(PageRun::new(700, 1)));
/// });
/// let mut runs = Vec::new();
/// assert_eq!(dirty.harvest(|run| runs.push(run)), PageCount(3));
/// assert_eq!(runs, [PageRun::new(3, 2), PageRun::new(700, 1)]);
/// assert_eq!(dirty.count(), PageCount::ZERO);
/// ```
#[derive(Debug)]
pub struct AtomicDirtyBitmap {
    words: SharedWords,
    len: u64,
}

impl AtomicDirtyBitmap {
    /// A bitmap for `pages` pages, all clean.
    #[must_use]
    pub fn new(pages: PageCount) -> Self {
        Self { words: SharedWords::new(pages.0.div_ceil(BITS) as usize), len: pages.0 }
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

    /// Whether page `page` was dirty at some moment of the call; pages beyond the end never are.
    #[must_use]
    pub fn is_set(&self, page: PageIndex) -> bool {
        page.0 < self.len && self.words.peek((page.0 / BITS) as usize) >> (page.0 % BITS) & 1 == 1
    }

    /// How many pages are dirty; exact only while nobody marks or harvests.
    #[must_use]
    pub fn count(&self) -> PageCount {
        PageCount(
            (0..self.words.len()).map(|word| u64::from(self.words.peek(word).count_ones())).sum(),
        )
    }

    /// Marks the pages of `run` dirty, as far as they lie within the bitmap; returns how many were
    /// clean. The change to the pages must come before.
    pub fn set(&self, run: PageRun) -> PageCount {
        let mut newly = 0;
        for_each_mask(self.cut(run), |word, mask| {
            newly += u64::from(self.words.set(word, mask).count_ones())
        });
        PageCount(newly)
    }

    /// Marks the pages of `run` clean, as far as they lie within the bitmap; returns how many were
    /// dirty. Whoever wants their content must read it after.
    pub fn clear(&self, run: PageRun) -> PageCount {
        let mut were = 0;
        for_each_mask(self.cut(run), |word, mask| {
            were += u64::from(self.words.take(word, mask).count_ones())
        });
        PageCount(were)
    }

    /// Marks dirty every page that is dirty in `pages`: what was harvested but could not be sent.
    pub fn put_back(&self, pages: &DirtyBitmap) {
        for (word, &mask) in pages.words().iter().enumerate().take(self.words.len()) {
            if mask != 0 {
                self.words.set(word, mask & self.inside(word));
            }
        }
    }

    /// Takes all dirty pages and hands them to `f` as maximal runs, in order: harvest and scan in
    /// one pass over memory, without an allocation. Returns how many pages were taken.
    #[inline]
    pub fn harvest(&self, mut f: impl FnMut(PageRun)) -> PageCount {
        let Ok(pages) = self.try_harvest(|run| {
            f(run);
            Ok::<(), Infallible>(())
        });
        pages
    }

    /// [`AtomicDirtyBitmap::harvest`] until `f` fails. The run that it failed on, and all that was
    /// taken and not handed out, is put back before this returns; so it is when `f` panics.
    ///
    /// # Errors
    /// None of its own: it hands on what `f` says.
    #[inline]
    pub fn try_harvest<E>(&self, f: impl FnMut(PageRun) -> Result<(), E>) -> Result<PageCount, E> {
        self.try_harvest_on(CodePath::best(), f)
    }

    /// [`AtomicDirtyBitmap::try_harvest`] on the code path `path`.
    ///
    /// # Errors
    /// None of its own: it hands on what `f` says.
    #[inline]
    pub fn try_harvest_on<E>(
        &self,
        path: CodePath,
        mut f: impl FnMut(PageRun) -> Result<(), E>,
    ) -> Result<PageCount, E> {
        let mut scan = RunScan::new(path);
        let mut taken =
            Taken { bitmap: self, next: Cell::new(0), words: [0; PIECE], base: 0, end: 0 };
        let mut pages = 0;
        let mut at = 0;
        while at < self.words.len() {
            // What follows an open run belongs to it, so it must be looked at.
            if scan.open().is_none() {
                at = self.words.skip_clean(at);
            }
            let piece = taken.take(at);
            let mut f = |run| taken.hand_out(run, &mut pages, &mut f);
            if let ControlFlow::Break(error) =
                scan.feed(&taken.words[..piece], at as u64 * BITS, &mut f)
            {
                return Err(error);
            }
            taken.next.set(scan.open().unwrap_or(taken.end));
            at += piece;
        }
        match scan.finish(self.len, &mut |run| taken.hand_out(run, &mut pages, &mut f)) {
            ControlFlow::Break(error) => Err(error),
            ControlFlow::Continue(()) => {
                taken.next.set(taken.end);
                Ok(PageCount(pages))
            }
        }
    }

    /// Takes all dirty pages and merges them into `target`, page 0 of this bitmap at page `at`;
    /// returns how many pages of `target` that made dirty which were clean. Pages that fall beyond
    /// the end of `target` are dropped.
    pub fn harvest_into(&self, target: &mut DirtyBitmap, at: PageIndex) -> PageCount {
        let mut words = [0; PIECE];
        let mut newly = PageCount::ZERO;
        let mut from = self.words.skip_clean(0);
        while from < self.words.len() {
            let piece = PIECE.min(self.words.len() - from);
            let words = &mut words[..piece];
            self.words.take_words(from, words);
            let to = PageIndex(at.0 + from as u64 * BITS);
            newly += target.merge_words(to, words, PageRun::new(0, piece as u64 * BITS));
            from = self.words.skip_clean(from + piece);
        }
        newly
    }

    fn cut(&self, run: PageRun) -> Range<u64> {
        run.start.0..run.start.0.saturating_add(run.count.0).min(self.len)
    }

    /// The bits of `word` that stand for pages.
    fn inside(&self, word: usize) -> u64 {
        mask(0, BITS.min(self.len - word as u64 * BITS))
    }
}

/// What a harvest has taken; what of it has not been handed out goes back when this is dropped.
struct Taken<'a> {
    bitmap: &'a AtomicDirtyBitmap,
    /// Pages before this one have been handed out, or were clean.
    next: Cell<u64>,
    /// The words taken last.
    words: [u64; PIECE],
    /// The first page of `words`.
    base: u64,
    /// The page after them.
    end: u64,
}

impl Taken<'_> {
    /// Takes the words from `at` on; returns how many.
    fn take(&mut self, at: usize) -> usize {
        let piece = PIECE.min(self.bitmap.words.len() - at);
        self.base = at as u64 * BITS;
        self.end = self.base + piece as u64 * BITS;
        self.bitmap.words.take_words(at, &mut self.words[..piece]);
        piece
    }

    /// Gives `run` to `f`; until `f` has returned, the run counts as not handed out.
    #[inline]
    fn hand_out<E>(
        &self,
        run: PageRun,
        pages: &mut u64,
        f: &mut impl FnMut(PageRun) -> Result<(), E>,
    ) -> ControlFlow<E> {
        self.next.set(run.start.0);
        match f(run) {
            Ok(()) => {
                self.next.set(run.end().0);
                *pages += run.count.0;
                ControlFlow::Continue(())
            }
            Err(error) => ControlFlow::Break(error),
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // Before `base` there can be one run that is open: all of its pages are dirty.
        let next = self.next.get();
        if next < self.base {
            self.bitmap.set(PageRun::new(next, self.base - next));
        }
        for_each_mask(next.max(self.base)..self.end, |word, mask| {
            let left = self.words[word - (self.base / BITS) as usize] & mask;
            if left != 0 {
                self.bitmap.words.set(word, left);
            }
        });
    }
}

#[cfg(test)]
mod tests;
