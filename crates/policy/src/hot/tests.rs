//! What is left for later, and when that ends.

use super::*;

const BOUNDS: Bounds = Bounds { percent: 30, rounds: 50, until: 100.0, enough: 10.0, again: 1e9 };

#[test]
fn the_hottest_are_delayed_until_the_others_are_done() {
    let mut hot = Hot::default();
    let busy = [4000, 3500, 3100, 400, 300, 300, 0, 0, 0, 0];
    hot.round(&busy, 4096.0, 10_000.0, BOUNDS);
    assert_eq!(
        (0..10).filter(|index| hot.delayed().contains(*index)).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    // The others have stopped to shrink.
    hot.round(&busy, 4096.0, 10_000.0, BOUNDS);
    assert!(hot.delayed().is_empty());
}

#[test]
fn the_hot_are_not_sent_while_the_others_shrink_or_when_all_fits() {
    let mut hot = Hot::default();
    let bounds = Bounds { enough: 3000.0, ..BOUNDS };
    let look = |others: u32| [4000, others, others, others, others, 0, 0, 0, 0, 0];
    hot.round(&look(1000), 4096.0, 8000.0, bounds);
    assert_eq!(hot.delayed().count(), 1);
    // The others alone would fit, and go on shrinking.
    hot.round(&look(600), 4096.0, 6400.0, bounds);
    assert_eq!(hot.delayed().count(), 1);
    // Little beside what is delayed.
    hot.round(&look(200), 4096.0, 4800.0, bounds);
    assert!(hot.delayed().is_empty());
    // All of it fits: another round need not touch it.
    let mut hot = Hot::default();
    hot.round(&look(100), 4096.0, 4400.0, Bounds { enough: 5000.0, ..BOUNDS });
    assert_eq!(hot.delayed().count(), 1);
}

#[test]
fn a_delay_ends_when_little_remains_and_after_its_rounds() {
    let mut hot = Hot::default();
    hot.round(&[4000, 0, 0, 0], 4096.0, 99.0, BOUNDS);
    assert!(hot.delayed().is_empty());
    let mut hot = Hot::default();
    for round in 0..60u32 {
        // The others halve for ever.
        let others = 1_000_000_u32.checked_shr(round).unwrap_or(0) + 100;
        hot.round(
            &[4_000_000, others, others, others],
            4096.0,
            5000.0,
            Bounds { rounds: 5, ..BOUNDS },
        );
        assert!(round < 5 || hot.delayed().is_empty());
    }
}

#[test]
fn what_is_written_in_the_first_round_waits() {
    let mut hot = Hot::default();
    assert!(hot.look(&[0, 3000, 10, 0], 4096.0, 30));
    assert!(hot.delayed().contains(1));
    assert!(!hot.look(&[4000, 3000, 10, 0], 4096.0, 30));
    assert_eq!(hot.delayed().count(), 1);
    assert!(!Hot::default().look(&[0, 3000], 4096.0, 0));
}

#[test]
fn what_would_be_far_less_after_one_more_round_is_sent_before_the_guest_stops() {
    let dirty = [900, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let bounds = |again| Bounds { enough: 5000.0, again, ..BOUNDS };
    let mut hot = Hot::default();
    // Written again as soon as it is sent: it waits for the guest to stop.
    hot.round(&dirty, 4096.0, 900.0, bounds(880.0));
    assert!(hot.delayed().contains(0));
    // Written now and then.
    let mut hot = Hot::default();
    hot.round(&dirty, 4096.0, 900.0, bounds(40.0));
    assert!(hot.delayed().is_empty());
}
fn held(hot: &Hot) -> Vec<usize> {
    (0..64).filter(|index| hot.delayed().contains(*index)).collect()
}

#[test]
fn heat_is_what_is_dirty_and_half_of_what_was() {
    let mut hot = Hot::default();
    let bounds = Bounds { percent: 50, ..BOUNDS };
    hot.round(&[4000, 0, 0, 0, 2000, 0, 0, 0, 0, 900], 4096.0, 10_000.0, bounds);
    assert_eq!(held(&hot), [0]);
    // 2000 + 2000; 3000 is three quarters of that, 2999 is not; 2000 + 1000.
    hot.round(&[2000, 3000, 2999, 0, 2000, 0, 0, 0, 0, 500], 4096.0, 50_000.0, bounds);
    assert_eq!(hot.heat[..5], [4000.0, 3000.0, 2999.0, 0.0, 3000.0]);
    assert_eq!(hot.heat[9], 950.0);
}

#[test]
fn segments_at_three_quarters_of_the_greatest_heat_are_delayed() {
    let mut hot = Hot::default();
    hot.round(&[4000, 3000, 2999, 0, 0, 0, 0, 0, 0, 0], 4096.0, 20_000.0, BOUNDS);
    assert_eq!(held(&hot), [0, 1]);
    // No more than their share of all, the hottest of them.
    let mut hot = Hot::default();
    let dirty = [3900, 4000, 3800, 3700, 3990, 0, 0, 0, 0, 0];
    hot.round(&dirty, 4096.0, 40_000.0, Bounds { percent: 39, ..BOUNDS });
    assert_eq!(held(&hot), [0, 1, 4]);
    // A sixteenth of a segment is the least that is hot.
    for (pages, delayed) in [(256, 1), (255, 0)] {
        let mut hot = Hot::default();
        hot.round(&[pages, 100, 0, 0], 4096.0, 4000.0, BOUNDS);
        assert_eq!(hot.delayed().count(), delayed, "{pages}");
    }
}

#[test]
fn a_delay_goes_on_while_the_others_leave_a_quarter_less() {
    let delayed = |second: u32| {
        let mut hot = Hot::default();
        let look = |others| [4000, others, others, 0, 0, 0, 0, 0, 0, 0];
        hot.round(&look(2000), 4096.0, 8000.0, BOUNDS);
        hot.round(&look(second), 4096.0, 5000.0 + 2.0 * f64::from(second), BOUNDS);
        hot.delayed().count()
    };
    assert_eq!((delayed(1500), delayed(1501)), (1, 0));
}

#[test]
fn a_delay_ends_when_the_others_are_little_beside_it_and_fit() {
    let delayed = |others: u32, remaining: f64, enough: f64| {
        let mut hot = Hot::default();
        let bounds = Bounds { enough, ..BOUNDS };
        hot.round(&[4000, others, 0, 0], 4096.0, remaining, bounds);
        hot.delayed().count()
    };
    // 2,000 of 6,000 are half of what is delayed.
    assert_eq!(delayed(2000, 6000.0, 2000.0), 0);
    assert_eq!(delayed(2000, 6000.0, 1999.0), 1);
    assert_eq!(delayed(2000, 5999.0, 2000.0), 1);
}

#[test]
fn a_delay_ends_below_what_may_remain_and_not_where_all_fits() {
    let delayed = |remaining: f64, bounds: Bounds| {
        let mut hot = Hot::default();
        hot.round(&[4000, 2900, 0, 0], 4096.0, remaining, bounds);
        hot.delayed().count()
    };
    let until = Bounds { until: 8000.0, ..BOUNDS };
    assert_eq!((delayed(8000.0, until), delayed(7999.0, until)), (1, 0));
    // With all of it fitting, what is hot waits for the guest to stop.
    let fits = Bounds { enough: 7999.0, ..until };
    assert_eq!((delayed(7999.0, fits), delayed(7999.5, fits)), (1, 0));
    // Unless a round would leave half.
    let again = |again| Bounds { again, enough: 8000.0, ..BOUNDS };
    assert_eq!((delayed(8000.0, again(4000.0)), delayed(8000.0, again(4001.0))), (0, 1));
    // Where it does not fit, what is left after a round that sends all is no question.
    assert_eq!(delayed(8000.0, Bounds { enough: 2899.0, ..again(0.0) }), 1);
}

#[test]
fn a_delay_lasts_as_many_rounds_as_are_allowed_and_ends_for_good() {
    let mut hot = Hot::default();
    let bounds = Bounds { rounds: 2, ..BOUNDS };
    let delayed: Vec<usize> = [3000, 1000, 300, 100]
        .map(|others| {
            hot.round(&[40_000, others, 0, 0], 4096.0, 90_000.0, bounds);
            hot.delayed().count()
        })
        .into();
    assert_eq!(delayed, [1, 1, 0, 0]);
    assert!(!hot.look(&[40_000, 0, 0, 0], 4096.0, 30), "not within a round either");
    // One that was forbidden does not come back.
    let mut hot = Hot::default();
    hot.round(&[40_000, 3000, 0, 0], 4096.0, 90_000.0, BOUNDS);
    assert_eq!(hot.delayed().count(), 1);
    hot.forbid();
    assert!(hot.delayed().is_empty());
    hot.round(&[40_000, 1000, 0, 0], 4096.0, 90_000.0, BOUNDS);
    assert!(hot.delayed().is_empty());
}

#[test]
fn in_the_first_round_what_is_delayed_stays_so_and_more_is_added() {
    let mut hot = Hot::default();
    assert!(!hot.look(&[0; 10], 4096.0, 30), "nothing is written");
    assert!(hot.look(&[0, 3000, 0, 0, 0, 0, 0, 0, 0, 0], 4096.0, 30));
    assert!(!hot.look(&[0, 3000, 0, 0, 0, 0, 0, 0, 0, 0], 4096.0, 30), "no more than before");
    // Hotter ones come, for which there are two places; sent in the meantime, they stay hot.
    assert!(hot.look(&[4000, 0, 3999, 3900, 0, 0, 0, 0, 0, 0], 4096.0, 30));
    assert_eq!(held(&hot), [0, 1, 2]);
    assert!(!hot.look(&[4000, 0, 3999, 4001, 0, 0, 0, 0, 0, 0], 4096.0, 30));
    assert_eq!(held(&hot), [0, 1, 2]);
}

#[test]
fn in_the_first_round_heat_does_not_fade() {
    let mut hot = Hot::default();
    hot.look(&[100, 0, 0, 0], 4096.0, 50);
    hot.look(&[0, 90, 0, 0], 4096.0, 50);
    assert_eq!(hot.heat, [100.0, 90.0, 0.0, 0.0]);
}
