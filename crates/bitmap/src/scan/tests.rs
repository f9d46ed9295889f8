//! The fillers against a walk over single bits, on every code path.

use std::ops::ControlFlow;

use proptest::prelude::*;

use super::*;

fn runs_bit_by_bit(words: &[u64]) -> Vec<PageRun> {
    let mut runs = Vec::new();
    let mut start = None;
    for page in 0..=words.len() as u64 * BITS {
        let dirty =
            words.get((page / BITS) as usize).is_some_and(|word| word >> (page % BITS) & 1 == 1);
        match (start, dirty) {
            (None, true) => start = Some(page),
            (Some(from), false) => {
                runs.push(PageRun::new(from, page - from));
                start = None;
            }
            _ => {}
        }
    }
    runs
}

fn runs_in_pieces(path: CodePath, words: &[u64], piece: usize) -> Vec<PageRun> {
    let mut runs = Vec::new();
    let mut collect = |run| {
        runs.push(run);
        ControlFlow::<()>::Continue(())
    };
    let mut scan = RunScan::new(path);
    for (i, words) in words.chunks(piece).enumerate() {
        assert!(scan.feed(words, (i * piece) as u64 * BITS, &mut collect).is_continue());
    }
    assert!(scan.finish(words.len() as u64 * BITS, &mut collect).is_continue());
    runs
}

/// Words of one kind in a row: empty, full, sparse, dense, or alternating.
fn stretch() -> impl Strategy<Value = Vec<u64>> {
    let word = prop_oneof![
        Just(0u64).boxed(),
        Just(u64::MAX).boxed(),
        (0u32..64).prop_map(|bit| 1 << bit).boxed(),
        any::<u64>().boxed(),
        Just(0x5555_5555_5555_5555).boxed(),
    ];
    prop_oneof![
        (prop_oneof![Just(0u64), Just(u64::MAX)], 1usize..400).prop_map(|(word, n)| vec![word; n]),
        prop::collection::vec(word, 1..200),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 300 }))]
    #[test]
    fn every_path_finds_every_run(
        stretches in prop::collection::vec(stretch(), 0..6),
        piece in 1usize..1500,
    ) {
        let words = stretches.concat();
        let expected = runs_bit_by_bit(&words);
        for path in CodePath::available() {
            prop_assert_eq!(&runs_in_pieces(path, &words, piece), &expected, "{:?}", path);
        }
    }
}

#[test]
fn densities_from_one_page_to_all() {
    let mut rng = fastrand::Rng::with_seed(1);
    for dirty_of_1024 in [1, 4, 10, 30, 51, 100, 300, 512, 1000] {
        let mut words = vec![0u64; if cfg!(miri) { 70 } else { 3000 }];
        for word in &mut words {
            for bit in 0..64 {
                *word |= u64::from(rng.u64(..1024) < dirty_of_1024) << bit;
            }
        }
        for path in CodePath::available() {
            assert_eq!(
                runs_in_pieces(path, &words, usize::MAX),
                runs_bit_by_bit(&words),
                "{path:?}"
            );
        }
    }
}

#[test]
fn alternating_pages_fill_the_buffer_to_its_end() {
    let words = vec![0xaaaa_aaaa_aaaa_aaaa; if cfg!(miri) { 200 } else { 5000 }];
    for path in CodePath::available() {
        assert_eq!(runs_in_pieces(path, &words, usize::MAX), runs_bit_by_bit(&words), "{path:?}");
    }
}

#[test]
fn a_break_stops_the_walk() {
    let words = vec![0x0101_0101_0101_0101; 200];
    for path in CodePath::available() {
        let mut left = 7;
        let flow = RunScan::new(path).feed(&words, 0, &mut |run| {
            left -= 1;
            if left == 0 { ControlFlow::Break(run) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(flow, ControlFlow::Break(PageRun::new(48, 1)), "{path:?}");
    }
}
