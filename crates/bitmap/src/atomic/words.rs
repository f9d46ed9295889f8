//! The shared words: every atomic operation of this crate, and why each order suffices.
//!
//! The invariant: *no write is lost*. A writer changes a page and then marks it; the harvester
//! takes the mark and then reads the page. If the harvester took the mark, it sees the write; if it
//! came too early, the mark stays for the next harvest. For that, marking is always a
//! read-modify-write with release order, and taking is one with acquire order. Rejected: skipping
//! the `fetch_or` when the bit is seen set. The load may be answered before the page's own store is
//! visible, the harvester may take the bit in between and read the old page, and the write would
//! never be sent; tests/loom.rs shows it.
//!
//! This file depends on nothing but the atomics, so that loom's can take their place.

use super::sync::{AtomicU64, Ordering};

/// Words of bits that many threads set and one takes.
#[derive(Debug)]
pub(crate) struct SharedWords(Box<[AtomicU64]>);

impl SharedWords {
    pub(crate) fn new(words: usize) -> Self {
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The word as it was at some moment.
    pub(crate) fn peek(&self, word: usize) -> u64 {
        self.0[word].load(Ordering::Relaxed)
    }

    /// Sets the bits of `mask`; returns those that were clear.
    pub(crate) fn set(&self, word: usize, mask: u64) -> u64 {
        mask & !self.0[word].fetch_or(mask, Ordering::Release)
    }

    /// Clears the bits of `mask`; returns those that were set.
    pub(crate) fn take(&self, word: usize, mask: u64) -> u64 {
        mask & self.0[word].fetch_and(!mask, Ordering::Acquire)
    }

    /// Moves words `from..from + to.len()` into `to`, leaving them zero. A word that is zero is
    /// only read: an unconditional swap would take every clean cache line for writing, more than 20
    /// times as slow.
    ///
    /// The plain load may miss a bit that is being set; that bit's writer is then not done, and the
    /// next harvest takes it. After the writers have been stopped and waited for, nothing is
    /// missed.
    pub(crate) fn take_words(&self, from: usize, to: &mut [u64]) {
        let words = &self.0[from..from + to.len()];
        for (word, to) in words.iter().zip(to) {
            *to = match word.load(Ordering::Relaxed) {
                0 => 0,
                _ => word.swap(0, Ordering::Acquire),
            };
        }
    }

    /// The first word at or after `from` in a cache line that is not all zero, rounded down to
    /// eight words; the number of words if there is none.
    pub(crate) fn skip_clean(&self, from: usize) -> usize {
        let mut at = from;
        for line in self.0[from..].chunks(8) {
            if line.iter().fold(0, |any, word| any | word.load(Ordering::Relaxed)) != 0 {
                return at;
            }
            at += line.len();
        }
        at
    }
}
