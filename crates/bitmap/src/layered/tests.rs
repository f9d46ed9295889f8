//! The multi-level bitmap against a set of page numbers, and its levels against their definition.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::DirtyBitmap;

fn levels_are_right(bitmap: &LayeredBitmap) -> bool {
    bitmap.levels.windows(2).all(|pair| {
        (0..pair[1].len() as u64 * BITS).all(|word| {
            let below = pair[0].get(word as usize).is_some_and(|word| *word != 0);
            below == (pair[1][(word / BITS) as usize] >> (word % BITS) & 1 == 1)
        })
    })
}

/// Miri takes a thousand times as long.
const LONGEST: u64 = if cfg!(miri) { 9_000 } else { 600_000 };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 256 }))]
    #[test]
    fn behaves_like_a_set(
        len in prop_oneof![1u64..200, 1u64..LONGEST],
        edits in prop::collection::vec(
            (0u8..3, 0u64..LONGEST, prop_oneof![1u64..4, 1u64..300, 1u64..LONGEST / 6]), 0..30),
        limit in prop_oneof![1u64..100, Just(u64::MAX)],
    ) {
        let mut bitmap = LayeredBitmap::new(PageCount(len));
        let mut model = DirtyBitmap::new(PageCount(len));
        for (edit, start, count) in edits {
            let start = start % len;
            let run = PageRun::new(start, count);
            if edit == 0 {
                prop_assert_eq!(bitmap.clear(run), model.clear(run));
            } else {
                prop_assert_eq!(bitmap.set(run), model.set(run));
            }
            let next = bitmap.next_run(PageIndex(start), PageCount(u64::MAX));
            prop_assert_eq!(next, model.next_run(PageIndex(start)));
        }
        prop_assert!(levels_are_right(&bitmap));
        prop_assert_eq!(bitmap.count(), model.count());
        prop_assert_eq!(&bitmap.levels[0], model.words());
        let expected: Vec<_> = model.runs().collect();
        prop_assert_eq!(&bitmap.runs().collect::<Vec<_>>(), &expected);
        for path in CodePath::available() {
            let mut found = Vec::new();
            bitmap.for_each_run_on(path, |run| found.push(run));
            prop_assert_eq!(&found, &expected, "{:?}", path);
        }

        // Taking areas from any place on, then from the start, empties it, and no area is taken
        // twice.
        let mut at = PageIndex(len / 3);
        let mut wrapped = false;
        loop {
            match bitmap.take_run(at, PageCount(limit.max(len / 50))) {
                Some(run) => {
                    prop_assert_eq!(model.clear(run), run.count);
                    at = run.end();
                }
                None if wrapped => break,
                None => {
                    wrapped = true;
                    at = PageIndex(0);
                }
            }
        }
        prop_assert_eq!(model.count(), PageCount(0));
        prop_assert_eq!(&bitmap, &LayeredBitmap::new(PageCount(len)));
    }

    #[test]
    fn next_set_is_the_next_of_the_set(
        pages in prop::collection::btree_set(0u64..5 * LONGEST, 0..20),
        from in 0u64..=5 * LONGEST,
    ) {
        let mut bitmap = LayeredBitmap::new(PageCount(5 * LONGEST));
        for &page in &pages {
            bitmap.set(PageRun::new(page, 1));
        }
        let pages: BTreeSet<u64> = pages;
        let next = pages.range(from..).next().copied();
        prop_assert_eq!(bitmap.next_set(PageIndex(from)), next.map(PageIndex));
    }
}

#[test]
fn a_bitmap_of_nothing() {
    let mut bitmap = LayeredBitmap::new(PageCount(0));
    assert_eq!(bitmap.set(PageRun::new(0, 1)), PageCount(0));
    assert_eq!(bitmap.next_set(PageIndex(0)), None);
    assert!(bitmap.is_empty());
    bitmap.for_each_run(|run| panic!("{run:?}"));
}
