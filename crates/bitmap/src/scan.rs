//! From words to maximal runs: the fast path of every walk and every harvest.
//!
//! A page is an *edge* when it differs from the page before it, so edges alternate: a run starts, a
//! run ends. `word ^ (word << 1 | carry)` has all edges of a word at once and is zero in the middle
//! of a clean area and of a dirty one alike, hence both are skipped at the speed of memory. The
//! work is split in two: a *filler* (portable, AVX2 or AVX-512) writes the positions of edges into
//! a small buffer without branching on single bits; [`RunScan`] pairs them up and calls the
//! consumer, which the compiler inlines.
//!
//! Rejected: finding start and end of each run with two counts of trailing zeros. It mispredicts
//! once or twice a run and costs three to four times as much on random bits (docs/structures.md).

use std::ops::ControlFlow;

use godwit_units::PageRun;

use crate::path::{CodePath, Kind};
use crate::word::{BITS, edges};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

/// Words that a filler looks at together: 512 bytes, eight cache lines.
pub(crate) const GROUP: usize = 64;
/// Pages in a group, hence the most edges in one.
const GROUP_EDGES: usize = GROUP * 64;
/// Groups that one fill may span from its first edge on, so that a position fits 16 bits.
const SPAN: usize = 65_536 / GROUP_EDGES;
/// A filler stops once it has this many edges; they stay in the first-level cache until consumed.
const ENOUGH: usize = GROUP_EDGES;
/// Fillers may write this many positions past the last one that counts.
const SLACK: usize = 64;
/// The positions of edges, relative to the first group that has one.
pub(crate) type Positions = [u16; ENOUGH + GROUP_EDGES + SLACK];
/// Scans shorter than this are not worth the buffer.
const SHORT: usize = 48;

/// What a filler did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Filled {
    /// The word that positions are relative to; words before it have no edge.
    origin: usize,
    /// How many words have been looked at; at least one unless there was none.
    done: usize,
    /// How many positions are valid.
    edges: usize,
}

/// Finds the edges of `words` in order until enough are found; `before` is the word before the
/// first one.
fn fill(path: CodePath, words: &[u64], before: u64, out: &mut Positions) -> Filled {
    match path.0 {
        Kind::Portable => portable::fill::<false>(words, before, out),
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => avx2::dispatch(words, before, out),
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 => avx512::dispatch(words, before, out),
    }
}

/// How many of `words`, in whole cache lines, repeat the last page of the word `before`.
fn same_words(words: &[u64], before: u64) -> usize {
    let same = 0u64.wrapping_sub(before >> 63);
    let different =
        |line: &[u64; 8]| line.iter().fold(0, |different, word| different | (word ^ same)) != 0;
    let (lines, _) = words.as_chunks::<8>();
    lines.iter().position(different).unwrap_or(lines.len()) * 8
}

/// A walk over words that arrive piece by piece and in order; a run may cross pieces.
#[derive(Debug)]
pub(crate) struct RunScan {
    path: CodePath,
    /// The last word seen; its highest bit tells whether a run is open.
    before: u64,
    /// The first page of the run that is open, if one is.
    open: u64,
    /// Cleared once, at the first piece that needs it.
    positions: Option<Positions>,
}

impl RunScan {
    pub(crate) fn new(path: CodePath) -> Self {
        Self { path, before: 0, open: 0, positions: None }
    }

    /// Where the run that has begun but not ended starts, if there is one.
    pub(crate) fn open(&self) -> Option<u64> {
        (self.before >> 63 == 1).then_some(self.open)
    }

    /// Walks over `words`, of which bit 0 of the first is page `base`, and which follow what was
    /// fed before. Calls `f` with each run that ends; stops at the first break, after which the
    /// scan is of no more use.
    #[inline]
    pub(crate) fn feed<B>(
        &mut self,
        words: &[u64],
        base: u64,
        f: &mut impl FnMut(PageRun) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        if words.len() < SHORT {
            return self.feed_short(words, base, f);
        }
        // Most short pieces have no edge at all; the buffer is not even touched for them.
        let mut at = same_words(words, self.before);
        while at < words.len() {
            let was_open = self.open().is_some();
            let Some(positions) = &mut self.positions else {
                self.clear_positions();
                continue;
            };
            let filled = fill(self.path, &words[at..], self.before, positions);
            let origin = base + (at + filled.origin) as u64 * BITS;
            let mut edges = &positions[..filled.edges];
            if was_open && let [end, rest @ ..] = edges {
                let end = origin + u64::from(*end);
                f(PageRun::new(self.open, end - self.open))?;
                edges = rest;
            }
            let (pairs, last) = edges.as_chunks::<2>();
            for &[start, end] in pairs {
                f(PageRun::new(origin + u64::from(start), u64::from(end - start)))?;
            }
            if let [start] = last {
                self.open = origin + u64::from(*start);
            }
            at += filled.done;
            self.before = words[at - 1];
        }
        ControlFlow::Continue(())
    }

    /// Not inlined, since it needs 16 KiB of stack, which whoever inlines it would have to probe at
    /// each call.
    #[cold]
    #[inline(never)]
    fn clear_positions(&mut self) {
        self.positions = Some([0; _]);
    }

    /// The same for a few words, bit by bit: no buffer to clear, no call.
    #[inline]
    pub(crate) fn feed_short<B>(
        &mut self,
        words: &[u64],
        base: u64,
        f: &mut impl FnMut(PageRun) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        for (i, &word) in words.iter().enumerate() {
            let mut left = edges(word, self.before);
            let mut dirty = self.before >> 63 == 1;
            self.before = word;
            let base = base + i as u64 * BITS;
            while left != 0 {
                let page = base + u64::from(left.trailing_zeros());
                left &= left - 1;
                if dirty {
                    f(PageRun::new(self.open, page - self.open))?;
                } else {
                    self.open = page;
                }
                dirty = !dirty;
            }
        }
        ControlFlow::Continue(())
    }

    /// Ends the walk at page `end`: a run that is still open ends there.
    #[inline]
    pub(crate) fn finish<B>(
        self,
        end: u64,
        f: &mut impl FnMut(PageRun) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        match self.open() {
            Some(start) => f(PageRun::new(start, end - start)),
            None => ControlFlow::Continue(()),
        }
    }
}

#[cfg(test)]
mod tests;
