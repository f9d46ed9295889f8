//! Which pages the guest of the tests checks, and a word that one of them is wrong on purpose.
//! Only a build with the feature `test-hooks` has this.

use std::io::Write;
use std::sync::Once;

use godwit_units::{PAGE_SIZE, PageIndex};

/// Where `godwit-stamp` has the three copies of a page's stamp, in bytes, and how long one is.
const STAMPS: [usize; 3] = [0, 2048, 4072];
const STAMP: usize = 24;
/// The guest's program and its stack, with pages that it has made to compare others with, are below
/// this page: 4 MiB.
const PROGRAM_END: PageIndex = PageIndex(1 << 10);

/// Whether the page `page` of memory, which holds `bytes`, is one that the guest checks.
pub(crate) fn is_checked(page: PageIndex, bytes: &[u8]) -> bool {
    page >= PROGRAM_END && is_stamped(bytes)
}

/// Whether the page `bytes` has the same stamp at its start, in its middle and at its end. One word
/// repeated is no stamp: many pages of other programs are so, and all alike.
pub(crate) fn is_stamped(bytes: &[u8]) -> bool {
    let [first, middle, last] = STAMPS.map(|at| &bytes[at..at + STAMP]);
    debug_assert_eq!(bytes.len() as u64, PAGE_SIZE);
    first == middle && first == last && first[..8] != first[16..]
}

/// Says on standard error, once, that what was to go wrong has: a defect that found nothing to
/// strike is none that anybody could find.
pub(crate) fn tell_struck() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let _ = std::io::stderr().write_all(b"made up: the defect has struck\n");
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_stamped_that_says_thrice_what_it_holds() {
        let mut page = vec![0; PAGE_SIZE as usize];
        assert!(!is_stamped(&page), "zeros");
        assert!(!is_stamped(&vec![0xcc; PAGE_SIZE as usize]), "all the same");
        for at in STAMPS {
            page[at + 16..at + STAMP].fill(7);
        }
        assert!(is_stamped(&page));
        assert!(is_checked(PageIndex(1024), &page));
        assert!(!is_checked(PageIndex(1023), &page), "on the stack");
        page[2048] ^= 1;
        assert!(!is_stamped(&page), "torn");
    }
}
