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

/// From here on what becomes of the pages of the largest RAM block that come when the guest runs
/// here already is written to the end of `file`, in records of two little-endian numbers of 8
/// bytes:
///
/// - before the guest runs, for each run of pages that are missing, its first page with the highest
///   bit set, and how many there are;
/// - for each page that comes, before it is placed, its number, and the word of its fingerprint
///   under the key of seed 0;
/// - when nothing is missing any more, a number of all ones, and how many pages of all blocks the
///   guest gave back before they had come.
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

/// The bit of a record that tells of pages that are missing.
const MISSING: u64 = 1 << 63;
/// What a record begins with that says that nothing is missing any more.
const ALL: u64 = u64::MAX;

/// Writes records to where it is written down, if it is. In one piece, or nothing: others write to
/// it as well.
fn note(records: &[[u64; 2]]) {
    let Some(mut file) = PLACED.get() else { return };
    let bytes: Vec<u8> = records.as_flattened().iter().flat_map(|it| it.to_le_bytes()).collect();
    let written = file.write(&bytes);
    assert!(written.is_ok_and(|written| written == bytes.len()), "no room for what was placed");
}

/// The guest is about to run, and these `runs` of the largest block are missing.
pub(crate) fn note_missing(runs: impl Iterator<Item = PageRun>) {
    if PLACED.get().is_some() {
        let records: Vec<_> = runs.map(|run| [MISSING | run.start.0, run.count.0]).collect();
        note(&records);
    }
}

/// Nothing is missing any more, and so many pages were given back before they had come.
pub(crate) fn note_all(given_back: u64) {
    note(&[[ALL, given_back]]);
}

/// What has come of `run` of a block, of data or, without bytes, of zeros; the block is the largest
/// one.
pub(crate) fn note_placed(run: PageRun, bytes: Option<&[u8]>) {
    if PLACED.get().is_none() {
        return;
    }
    let key = Key::new(0);
    let record = |index: u64| {
        let page = |bytes: &[u8]| {
            let at = PageIndex(index).offset() as usize;
            key.page(&bytes[at..at + PAGE_SIZE as usize])
        };
        [run.start.0 + index, bytes.map_or(key.zero(), page).word()]
    };
    let records: Vec<_> = (0..run.count.0).map(record).collect();
    note(&records);
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
