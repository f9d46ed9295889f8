//! The plain bitmap against a set of page numbers.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

pub(crate) fn model_runs(model: &BTreeSet<u64>) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    for &page in model {
        match runs.last_mut() {
            Some(last) if last.end().0 == page => last.count.0 += 1,
            _ => runs.push(PageRun::new(page, 1)),
        }
    }
    runs
}

fn build(len: u64, runs: &[(u64, u64)]) -> (DirtyBitmap, BTreeSet<u64>) {
    let mut bitmap = DirtyBitmap::new(PageCount(len));
    let mut model = BTreeSet::new();
    for &(start, count) in runs {
        bitmap.set(PageRun::new(start, count));
        model.extend(start..(start + count).min(len));
    }
    (bitmap, model)
}

fn some_runs() -> impl Strategy<Value = Vec<(u64, u64)>> {
    prop::collection::vec(
        (0u64..LONGEST, prop_oneof![1u64..4, 1u64..300, 1u64..LONGEST / 2]),
        0..40,
    )
}

const CASES: u32 = if cfg!(miri) { 4 } else { 256 };
/// Miri takes a thousand times as long.
const LONGEST: u64 = if cfg!(miri) { 900 } else { 10_000 };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]
    #[test]
    fn behaves_like_a_set(
        len in 1u64..300,
        edits in prop::collection::vec((any::<bool>(), 0u64..320, 0u64..100), 0..40),
    ) {
        let mut bitmap = DirtyBitmap::new(PageCount(len));
        let mut model = BTreeSet::new();
        for (set, start, count) in edits {
            let run = PageRun::new(start, count);
            let before = model.len();
            let inside = start..(start + count).min(len);
            if set {
                model.extend(inside);
                prop_assert_eq!(bitmap.set(run).0, (model.len() - before) as u64);
            } else {
                model.retain(|page| !inside.contains(page));
                prop_assert_eq!(bitmap.clear(run).0, (before - model.len()) as u64);
            }
        }
        prop_assert_eq!(bitmap.count().0, model.len() as u64);
        prop_assert_eq!(bitmap.runs().collect::<Vec<_>>(), model_runs(&model));
        let pages: Vec<_> = bitmap.pages().map(|page| page.0).collect();
        prop_assert_eq!(pages, model.iter().copied().collect::<Vec<_>>());
        for page in 0..len + 2 {
            prop_assert_eq!(bitmap.is_set(PageIndex(page)), model.contains(&page));
        }
    }

    #[test]
    fn all_walks_agree(
        len in 1u64..LONGEST, runs in some_runs(),
        from in 0u64..LONGEST + 500, count in 0u64..LONGEST + 500, taken in 0usize..5,
    ) {
        let (mut bitmap, model) = build(len, &runs);
        let expected = model_runs(&model);
        for path in CodePath::available() {
            let mut found = Vec::new();
            bitmap.for_each_run_on(path, |run| found.push(run));
            prop_assert_eq!(&found, &expected, "{:?}", path);
        }
        prop_assert_eq!(&bitmap.runs().collect::<Vec<_>>(), &expected);

        // Some by `next`, the rest by `fold`.
        let mut runs = bitmap.runs();
        let mut found: Vec<_> = runs.by_ref().take(taken).collect();
        runs.for_each(|run| found.push(run));
        prop_assert_eq!(&found, &expected);

        let window = from..from + count;
        let within: BTreeSet<u64> =
            model.iter().copied().filter(|page| window.contains(page)).collect();
        let mut found = Vec::new();
        bitmap.for_each_run_in(PageRun::new(from, count), |run| found.push(run));
        prop_assert_eq!(&found, &model_runs(&within));
        prop_assert_eq!(bitmap.count_in(PageRun::new(from, count)).0, within.len() as u64);

        let after: BTreeSet<u64> = model.range(from..).copied().collect();
        prop_assert_eq!(bitmap.next_run(PageIndex(from)), model_runs(&after).first().copied());

        let mut found = Vec::new();
        bitmap.harvest(|run| found.push(run));
        prop_assert_eq!(&found, &expected);
        prop_assert_eq!(bitmap.count(), PageCount(0));
    }

    #[test]
    fn merges_like_a_set(
        target in some_runs(), source in some_runs(),
        target_len in 1u64..LONGEST, source_len in 1u64..LONGEST,
        at in 0u64..LONGEST + 500, from in 0u64..LONGEST + 500, count in 0u64..LONGEST + 500,
    ) {
        let (bitmap, mut model) = build(target_len, &target);
        let (source, source_model) = build(source_len, &source);
        let before = model.len();
        for page in source_model.range(from..from + count) {
            if page - from + at < target_len {
                model.insert(page - from + at);
            }
        }
        let mut merged = bitmap.clone();
        let more = merged.merge(PageIndex(at), &source, PageRun::new(from, count));
        prop_assert_eq!(more.0, (model.len() - before) as u64);
        prop_assert_eq!(merged.runs().collect::<Vec<_>>(), model_runs(&model));
        for path in CodePath::available() {
            let mut other = bitmap.clone();
            other.merge_words_on(path, PageIndex(at), source.words(), PageRun::new(from, count));
            prop_assert_eq!(&other, &merged, "{:?}", path);
        }
    }

    #[test]
    fn unions_stream_and_merge(
        bitmaps in prop::collection::vec((1u64..2 * LONGEST, some_runs()), 0..4),
    ) {
        let (bitmaps, models): (Vec<_>, Vec<_>) =
            bitmaps.iter().map(|(len, runs)| build(*len, runs)).unzip();
        let expected = model_runs(&models.iter().flatten().copied().collect());
        let mut found = Vec::new();
        for_each_run_of_union(&bitmaps.iter().collect::<Vec<_>>(), |run| found.push(run));
        prop_assert_eq!(&found, &expected);

        let mut union = DirtyBitmap::new(PageCount(2 * LONGEST));
        let newly: PageCount = bitmaps.iter().map(|bitmap| union.union(bitmap)).sum();
        prop_assert_eq!(newly, union.count());
        prop_assert_eq!(&union.runs().collect::<Vec<_>>(), &expected);
    }
}

#[test]
fn runs_at_the_ends_of_everything() {
    for len in [1, 63, 64, 65, 127, 128, 4096, 4097, 65_536, 65_537] {
        let mut bitmap = DirtyBitmap::new(PageCount(len));
        bitmap.set_all();
        for path in CodePath::available() {
            let mut found = Vec::new();
            bitmap.for_each_run_on(path, |run| found.push(run));
            assert_eq!(found, [PageRun::new(0, len)], "{path:?}");
        }
        assert_eq!(bitmap.count(), PageCount(len));
        assert_eq!(bitmap.next_run(PageIndex(len - 1)), Some(PageRun::new(len - 1, 1)));
        assert_eq!(bitmap.next_run(PageIndex(len)), None);
        bitmap.clear_all();
        assert_eq!(bitmap, DirtyBitmap::new(PageCount(len)));
    }
}

#[test]
fn a_harvest_that_fails_loses_nothing() {
    let mut bitmap = DirtyBitmap::new(PageCount(300_000));
    for run in [PageRun::new(3, 5), PageRun::new(60_000, 10_000), PageRun::new(100_000, 150_000)] {
        bitmap.set(run);
    }
    let before = bitmap.clone();
    for fails_at in 0..3 {
        let mut bitmap = before.clone();
        let mut seen = Vec::new();
        let result = bitmap.try_harvest(|run| {
            if seen.len() == fails_at {
                return Err(run);
            }
            seen.push(run);
            Ok(())
        });
        assert_eq!(result, Err(before.runs().nth(fails_at).unwrap()));
        for run in seen {
            bitmap.set(run);
        }
        assert_eq!(bitmap, before);
    }
    let panicked =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bitmap.harvest(|_| panic!())));
    assert!(panicked.is_err());
    assert_eq!(bitmap, before);
}

#[test]
fn runs_past_the_end_of_numbers_are_cut() {
    let mut bitmap = DirtyBitmap::new(PageCount(100));
    assert_eq!(bitmap.set(PageRun::new(90, u64::MAX)), PageCount(10));
    assert_eq!(bitmap.set(PageRun::new(u64::MAX, 1)), PageCount(0));
    assert_eq!(bitmap.count_in(PageRun::new(95, u64::MAX)), PageCount(5));
}
