//! Which pages the guest of the tests checks, and a word that one of them is wrong on purpose.
//! Only a build with the feature `test-hooks` has this.

use std::fs::File;
use std::io::Write;
use std::sync::{Once, OnceLock};

use godwit_fingerprints::Key;
use godwit_units::{PAGE_SIZE, PageIndex, PageRun};

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

/// Where it is written down what has come of pages that followed.
static PLACED: OnceLock<File> = OnceLock::new();

/// From here on each page of the largest RAM block that comes when the guest runs here already is
/// written to the end of `file`: its number, and the word of its fingerprint under the key of seed
/// 0, two little-endian numbers of 8 bytes.
///
/// ```
/// # fn note(path: &std::path::Path) -> std::io::Result<()> {
/// let file = std::fs::File::options().create(true).append(true).open(path)?;
/// godwit_engine::destination::write_placed(file);
/// # Ok(())
/// # }
/// ```
pub fn write_placed(file: File) {
    let _ = PLACED.set(file);
}

/// What has come of `run` of a block, of data or, without bytes, of zeros; the block is the largest
/// one.
pub(crate) fn note_placed(run: PageRun, bytes: Option<&[u8]>) {
    let Some(mut file) = PLACED.get() else { return };
    let key = Key::new(0);
    let mut records = Vec::with_capacity(16 * run.count.0 as usize);
    for index in 0..run.count.0 {
        let page = |bytes: &[u8]| {
            let at = PageIndex(index).offset() as usize;
            key.page(&bytes[at..at + PAGE_SIZE as usize])
        };
        records.extend_from_slice(&(run.start.0 + index).to_le_bytes());
        records.extend_from_slice(&bytes.map_or(key.zero(), page).word().to_le_bytes());
    }
    // In one piece, or nothing: others write to it as well.
    let written = file.write(&records);
    assert!(written.is_ok_and(|written| written == records.len()), "no room for what was placed");
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
