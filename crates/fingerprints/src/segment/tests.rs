//! Fingerprints against a plain map, and its memory against what was put in.

use std::collections::BTreeMap;

use godwit_units::ByteCount;
use proptest::prelude::*;

use super::*;
use crate::{Key, PageFingerprints};

const START: u64 = 4096;
const PAGES: u64 = 64;

fn page(byte: u8) -> Vec<u8> {
    vec![byte; 4096]
}

#[test]
fn what_did_not_change_need_not_be_sent() {
    let key = Key::new(1);
    let mut part = PageFingerprints::new().segment(PageRun::new(START, PAGES));
    let (old, new) = (key.page(&page(1)), key.page(&page(2)));
    let at = PageIndex(START + 5);
    assert!(!part.unchanged(at, old));
    part.record(at, old);
    assert!(part.unchanged(at, old));
    assert!(!part.unchanged(at, new));
    assert!(part.update(at, new));
    assert!(!part.update(at, new));
    part.forget(PageRun::new(at.0, 1));
    assert!(part.update(at, new));
    assert_eq!(part.print(PageIndex(START)), None);
}

#[test]
fn holes_take_no_memory() {
    let key = Key::new(1);
    let fingerprints = PageFingerprints::new();
    let mut part = fingerprints.segment(PageRun::new(0, PAGES));
    part.record_run(PageRun::new(0, PAGES), key.zero());
    assert!(part.unchanged(PageIndex(63), key.page(&page(0))));
    assert_eq!(fingerprints.memory(), ByteCount::ZERO);
    // A hole that is looked at again is nothing new.
    part.record_run(PageRun::new(3, 9), key.zero());
    assert_eq!(fingerprints.memory(), ByteCount::ZERO);
    part.record(PageIndex(7), key.page(&page(9)));
    assert!(part.unchanged(PageIndex(6), key.zero()));
    assert_eq!(fingerprints.memory(), ByteCount(PAGES * 8));
    let other = fingerprints.segment(PageRun::new(PAGES, PAGES));
    part.forget(PageRun::new(0, PAGES));
    assert_eq!(fingerprints.memory(), ByteCount::ZERO);
    part.record(PageIndex(0), key.zero());
    drop((part, other));
    assert_eq!(fingerprints.memory(), ByteCount::ZERO);
}

#[test]
fn the_digest_is_that_of_the_pages_in_order() {
    let key = Key::new(3);
    let fingerprints = PageFingerprints::new();
    let mut part = fingerprints.segment(PageRun::new(START, PAGES));
    let mut read_back = key.digest();
    for number in 0..10_u8 {
        part.record(PageIndex(START + u64::from(number)), key.page(&page(number)));
        read_back.add(key.page(&page(number)));
    }
    let mut sent = key.digest();
    part.digest(PageRun::new(START, 10), &mut sent).unwrap();
    assert_eq!(sent.finish(), read_back.finish());

    let mut swapped = key.digest();
    part.digest(PageRun::new(START + 5, 5), &mut swapped).unwrap();
    part.digest(PageRun::new(START, 5), &mut swapped).unwrap();
    let mut again = key.digest();
    part.digest(PageRun::new(START, 10), &mut again).unwrap();
    assert_ne!(swapped.finish(), again.finish());

    let unknown = part.digest(PageRun::new(START, 11), &mut key.digest());
    assert_eq!(unknown, Err(Unknown { page: PageIndex(START + 10) }));
}

#[test]
fn a_part_goes_to_another_thread() {
    let key = Key::new(3);
    let mut part = PageFingerprints::new().segment(PageRun::new(0, 1));
    let part = std::thread::scope(|scope| {
        let hand = scope.spawn(move || {
            part.record(PageIndex(0), key.zero());
            part
        });
        hand.join().unwrap()
    });
    assert!(part.unchanged(PageIndex(0), key.zero()));
}

#[test]
#[should_panic(expected = "is not in the segment")]
fn a_page_outside_is_our_own_bug() {
    let part = PageFingerprints::new().segment(PageRun::new(START, PAGES));
    let _ = part.print(PageIndex(START + PAGES));
}

#[test]
fn fingerprints_depend_on_seed_and_on_every_byte() {
    let key = Key::new(1);
    let mut bytes = page(0);
    assert_eq!(key.page(&bytes), key.zero());
    assert_ne!(key.page(&bytes), Key::new(2).page(&bytes));
    for at in 0..4096 {
        bytes[at] = 1;
        assert_ne!(key.page(&bytes), key.zero(), "byte {at}");
        bytes[at] = 0;
    }
}

/// Who knows the seed can make two pages with one fingerprint, and logs are read by many.
#[test]
fn the_seed_is_not_shown() {
    assert_eq!(format!("{:?} {:?}", Key::new(4711), Key::new(4711).digest()), "Key RangeDigest");
}

#[derive(Clone, Debug)]
enum Step {
    Record(u64, u64, u8),
    Forget(u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let run = (0..PAGES).prop_flat_map(|start| (Just(start), 0..=PAGES - start));
    prop_oneof![
        (run.clone(), 0..4_u8).prop_map(|((start, count), byte)| Step::Record(start, count, byte)),
        run.prop_map(|(start, count)| Step::Forget(start, count)),
        (0..4_u8).prop_map(|byte| Step::Record(0, PAGES, byte)),
    ]
}

proptest! {
    #[test]
    fn it_is_a_map_of_pages(steps in proptest::collection::vec(step(), 0..20)) {
        let key = Key::new(9);
        let fingerprints = PageFingerprints::new();
        let mut part = fingerprints.segment(PageRun::new(START, PAGES));
        let mut model = BTreeMap::new();
        for step in steps {
            match step {
                Step::Record(start, count, byte) => {
                    let print = key.page(&page(byte));
                    part.record_run(PageRun::new(START + start, count), print);
                    model.extend((start..start + count).map(|at| (at, print)));
                }
                Step::Forget(start, count) => {
                    part.forget(PageRun::new(START + start, count));
                    model.retain(|at, _| !(start..start + count).contains(at));
                }
            }
            for at in 0..PAGES {
                prop_assert_eq!(part.print(PageIndex(START + at)), model.get(&at).copied());
            }
            prop_assert_eq!(fingerprints.memory(), part.memory());
        }
    }
}
