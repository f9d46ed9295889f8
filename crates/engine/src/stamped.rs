//! Which pages the guest of the tests checks. Only a build with the feature `test-hooks` has this.

use godwit_units::PAGE_SIZE;

/// Where `godwit-stamp` has the three copies of a page's stamp, in bytes, and how long one is.
const STAMPS: [usize; 3] = [0, 2048, 4072];
const STAMP: usize = 24;

/// Whether the page `bytes` has the same stamp at its start, in its middle and at its end. Zeros
/// are no stamp.
pub(crate) fn is_stamped(bytes: &[u8]) -> bool {
    let [first, middle, last] = STAMPS.map(|at| &bytes[at..at + STAMP]);
    debug_assert_eq!(bytes.len() as u64, PAGE_SIZE);
    first == middle && first == last && first[16..].iter().any(|byte| *byte != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_stamped_that_says_thrice_what_it_holds() {
        let mut page = vec![0; PAGE_SIZE as usize];
        assert!(!is_stamped(&page), "zeros");
        for at in STAMPS {
            page[at..at + STAMP].fill(7);
        }
        assert!(is_stamped(&page));
        page[2048] ^= 1;
        assert!(!is_stamped(&page), "torn");
    }
}
