//! The keys of one node, laid out for the search.
//!
//! A search reads two cache lines: the last keys of all blocks, then one block of eight. Within a
//! line all keys are compared and the outcomes summed, without a branch that could be mispredicted.
//! The invariant: unused keys are `u64::MAX`, which no entry has, so that a search needs no length.

use std::hint::select_unpredictable;

/// The number of keys in a block: one cache line.
const BLOCK: usize = 8;

#[derive(Clone, Copy, Debug)]
pub(super) struct Keys<const BLOCKS: usize> {
    blocks: [[u64; BLOCK]; BLOCKS],
}

impl<const BLOCKS: usize> Keys<BLOCKS> {
    pub(super) fn new() -> Self {
        Self { blocks: [[u64::MAX; BLOCK]; BLOCKS] }
    }

    /// How many keys are at most `key`.
    #[inline(always)]
    pub(super) fn rank(&self, key: u64) -> usize {
        // Unused keys are never at most this.
        let key = key.min(u64::MAX - 1);
        let mut block = 0;
        for (number, keys) in self.blocks[..BLOCKS - 1].iter().enumerate() {
            block = select_unpredictable(keys[BLOCK - 1] <= key, number + 1, block);
        }
        let mut within = 0;
        for (number, k) in self.blocks[block].iter().enumerate() {
            within = select_unpredictable(*k <= key, number + 1, within);
        }
        block * BLOCK + within
    }

    pub(super) fn at(&self, position: usize) -> u64 {
        self.blocks.as_flattened()[position]
    }

    pub(super) fn first(&self) -> u64 {
        self.blocks[0][0]
    }

    pub(super) fn set(&mut self, position: usize, key: u64) {
        self.blocks.as_flattened_mut()[position] = key;
    }

    /// Puts `key` before position `position` of `len`.
    pub(super) fn insert(&mut self, position: usize, len: usize, key: u64) {
        let keys = self.blocks.as_flattened_mut();
        keys.copy_within(position..len, position + 1);
        keys[position] = key;
    }

    /// Takes away the key at `position` of `len`.
    pub(super) fn remove(&mut self, position: usize, len: usize) {
        let keys = self.blocks.as_flattened_mut();
        keys.copy_within(position + 1..len, position);
        keys[len - 1] = u64::MAX;
    }

    /// Keeps the first `len` keys.
    pub(super) fn truncate(&mut self, len: usize) {
        self.blocks.as_flattened_mut()[len..].fill(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_up_to_the_ends() {
        let mut keys = Keys::<8>::new();
        for i in 0..50 {
            keys.insert(i, i, i as u64 * 2);
        }
        assert_eq!(keys.rank(0), 1);
        assert_eq!(keys.rank(97), 49);
        assert_eq!(keys.rank(u64::MAX), 50);
        assert_eq!(Keys::<2>::new().rank(u64::MAX), 0);
        keys.remove(0, 50);
        assert_eq!((keys.rank(1), keys.rank(2), keys.first()), (0, 1, 2));
        keys.truncate(8);
        assert_eq!(keys.rank(1000), 8);
        let mut full = Keys::<1>::new();
        (0..8).for_each(|i| full.insert(i, i, 5));
        assert_eq!((full.rank(4), full.rank(5)), (0, 8));
    }
}
