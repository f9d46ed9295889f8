//! The shared bitmap against the plain one, and against threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;

fn shared(plain: &DirtyBitmap) -> AtomicDirtyBitmap {
    let bitmap = AtomicDirtyBitmap::new(plain.len());
    bitmap.put_back(plain);
    bitmap
}

fn plain(bitmap: &AtomicDirtyBitmap) -> DirtyBitmap {
    let mut plain = DirtyBitmap::new(bitmap.len());
    for page in (0..bitmap.len().0).filter(|page| bitmap.is_set(PageIndex(*page))) {
        plain.set(PageRun::new(page, 1));
    }
    plain
}

/// Miri takes a thousand times as long.
const LONGEST: u64 = if cfg!(miri) { 3_000 } else { 100_000 };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 256 }))]
    #[test]
    fn harvests_what_was_set(
        len in 1u64..LONGEST,
        runs in prop::collection::vec(
            (0u64..LONGEST, prop_oneof![1u64..4, 1u64..300, 1u64..LONGEST]),
            0..30,
        ),
        fails_at in 0usize..40,
        offset in 0u64..1000,
    ) {
        let mut model = DirtyBitmap::new(PageCount(len));
        let bitmap = AtomicDirtyBitmap::new(PageCount(len));
        for (start, count) in runs {
            let run = PageRun::new(start, count);
            prop_assert_eq!(bitmap.set(run), model.set(run));
        }
        prop_assert_eq!(bitmap.count(), model.count());

        // A harvest that fails leaves what it did not hand out.
        for path in CodePath::available() {
            let bitmap = shared(&model);
            let mut left = model.clone();
            let mut given = 0;
            let result = bitmap.try_harvest_on(path, |run| {
                if given == fails_at {
                    return Err(run);
                }
                given += 1;
                assert_eq!(left.clear(run), run.count);
                Ok(())
            });
            prop_assert_eq!(result.err(), model.runs().nth(fails_at), "{:?}", path);
            prop_assert_eq!(&plain(&bitmap), &left, "{:?}", path);
        }

        let mut target = DirtyBitmap::new(PageCount(len));
        shared(&model).harvest_into(&mut target, PageIndex(offset));
        let mut expected = DirtyBitmap::new(PageCount(len));
        expected.merge(PageIndex(offset), &model, PageRun::new(0, len));
        prop_assert_eq!(target, expected);

        let mut found = Vec::new();
        prop_assert_eq!(bitmap.harvest(|run| found.push(run)), model.count());
        prop_assert_eq!(found, model.runs().collect::<Vec<_>>());
        prop_assert_eq!(bitmap.count(), PageCount(0));
    }
}

#[test]
fn a_panic_puts_back() {
    let mut model = DirtyBitmap::new(PageCount(200_000));
    for run in [PageRun::new(5, 1), PageRun::new(100, 99_000), PageRun::new(150_000, 2)] {
        model.set(run);
    }
    let bitmap = shared(&model);
    let mut given = 0;
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        bitmap.harvest(|_| {
            given += 1;
            assert!(given < 2);
        })
    }));
    assert!(panicked.is_err());
    model.clear(PageRun::new(5, 1));
    assert_eq!(plain(&bitmap), model);
}

/// Writers stamp pages and mark them, a harvester copies what is marked: at the end the copy is
/// complete.
#[test]
fn threads_lose_no_write() {
    const PAGES: u64 = 1000;
    let rounds: u64 = if cfg!(miri) { 20 } else { 20_000 };
    let bitmap = AtomicDirtyBitmap::new(PageCount(PAGES));
    let memory: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let mut copy = vec![0; PAGES as usize];
    let done = AtomicBool::new(false);
    let mut pass = |bitmap: &AtomicDirtyBitmap| {
        bitmap.harvest(|run| {
            for page in run.start.0..run.end().0 {
                copy[page as usize] = memory[page as usize].load(Ordering::Relaxed);
            }
        });
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2u64)
            .map(|writer| {
                let (bitmap, memory) = (&bitmap, &memory);
                scope.spawn(move || {
                    for round in 1..=rounds {
                        let page = (round * 7919 + writer * 31) % PAGES;
                        memory[page as usize].fetch_add(1, Ordering::Relaxed);
                        bitmap.set(PageRun::new(page, 1));
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                pass(&bitmap);
            }
        });
        for writer in writers {
            writer.join().unwrap();
        }
        done.store(true, Ordering::Release);
    });
    pass(&bitmap);
    let memory: Vec<u64> = memory.iter().map(|page| page.load(Ordering::Relaxed)).collect();
    assert_eq!(copy, memory);
}
