//! Zero pages, at the speed of memory.
//!
//! A page that holds data mostly shows it in its first cache line, so that is all that is read of
//! it. A zero page is read whole, 256 bytes between two branches; the loop between them is plain
//! code that becomes vector code with whatever the target has. Nothing is dispatched at run time:
//! that takes unsafe code, and the base of x86-64 (16 bytes an instruction) already waits for
//! memory.

use std::ops::Range;

/// Words between two branches: 256 bytes.
const LANES: usize = 32;

/// Whether all of `bytes` are zero; ends early at data.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    let (head, _) = bytes.split_at(bytes.len().min(64));
    joined(head) == 0 && {
        let mut blocks = bytes.chunks_exact(LANES * 8);
        blocks.all(|block| joined(block) == 0) && joined(blocks.remainder()) == 0
    }
}

/// All of `bytes`, joined by or.
#[inline(always)]
fn joined(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let words = words.iter().fold(0, |sum, word| sum | u64::from_ne_bytes(*word));
    rest.iter().fold(words, |sum, byte| sum | u64::from(*byte))
}

/// Cuts a batch of pages into maximal runs of zero pages and of others, in order: (pages by number
/// in the batch, whether they are zero).
///
/// # Panics
/// When `batch` is not whole pages of `page` bytes: a mistake of the caller.
pub fn content_runs(batch: &[u8], page: usize) -> impl Iterator<Item = (Range<usize>, bool)> + '_ {
    assert!(
        page > 0 && batch.len().is_multiple_of(page),
        "{} bytes are not whole pages",
        batch.len()
    );
    let mut pages = batch.chunks_exact(page).map(is_zero).enumerate().peekable();
    std::iter::from_fn(move || {
        let (start, zero) = pages.next()?;
        let mut end = start + 1;
        while pages.next_if(|(_, next)| *next == zero).is_some() {
            end += 1;
        }
        Some((start..end, zero))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_bit_anywhere_is_data() {
        for length in [0, 1, 7, 63, 64, 65, 255, 256, 300, 4096] {
            let mut bytes = vec![0; length];
            assert!(is_zero(&bytes), "{length}");
            for at in 0..length {
                bytes[at] = 0x80;
                assert!(!is_zero(&bytes), "{at} of {length}");
                bytes[at] = 0;
            }
        }
    }

    proptest! {
        #[test]
        fn runs_are_maximal_and_tile_the_batch(
            zeros in proptest::collection::vec(any::<bool>(), 0..40),
        ) {
            let page = 64;
            let batch: Vec<u8> =
                zeros.iter().flat_map(|zero| vec![u8::from(!zero); page]).collect();
            let runs: Vec<_> = content_runs(&batch, page).collect();
            let again: Vec<bool> =
                runs.iter().flat_map(|(run, zero)| vec![*zero; run.len()]).collect();
            prop_assert_eq!(again, zeros);
            for two in runs.windows(2) {
                prop_assert!(two[0].1 != two[1].1 && two[0].0.end == two[1].0.start);
            }
        }
    }
}
