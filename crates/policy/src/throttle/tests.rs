//! The rules of each mode.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn view(guest: &Guest, clock: u64, remaining: f64, dirty_rate: f64) -> View<'_> {
    View {
        clock: SECOND * clock as u32,
        remaining,
        bandwidth: 1000.0,
        dirty_rate,
        dirtied: dirty_rate,
        sent: 1000.0,
        guest,
        classes: &[],
        unsent: 0.0,
        idle: 0.0,
        at_once: false,
        lead: 0.0,
        enough: 10.0,
        free_time: 0.0,
        time_left: 0.0,
        downtime: 0.3,
        most: 0.99,
        delaying: false,
    }
}

#[test]
fn direct_is_90_percent_for_3_seconds_then_99_for_3_then_staged() {
    let (guest, mut throttle) = (Guest::default(), Throttle::default());
    let mode = ThrottleMode::Direct;
    throttle.round(mode, &view(&guest, 1, 3000.0, 2000.0), SECOND);
    // 6 % less: not yet.
    throttle.round(mode, &view(&guest, 2, 2820.0, 2000.0), SECOND);
    assert_eq!(throttle.value(), 0.0);
    // 4 % less, and under 5 s of sending.
    throttle.round(mode, &view(&guest, 3, 2707.0, 2000.0), SECOND);
    let levels: Vec<f64> = (3..9)
        .map(|clock| {
            throttle.tick(mode, &view(&guest, clock, 2707.0, 2000.0));
            throttle.value()
        })
        .collect();
    assert_eq!(levels, [0.9, 0.9, 0.9, 0.99, 0.99, 0.99]);
    // Six seconds over: staged goes on from 1 %, beyond 99 %, for 3 s, and then only the operator can help.
    throttle.round(mode, &view(&guest, 9, 2000.0, 2000.0), SECOND);
    assert_eq!((throttle.value(), throttle.exhausted()), (0.99, false));
    throttle.tick(mode, &view(&guest, 12, 2000.0, 2000.0));
    assert_eq!((throttle.value(), throttle.exhausted()), (0.0, true));
}

#[test]
fn more_than_5_seconds_of_sending_is_staged() {
    let (guest, mut throttle) = (Guest::default(), Throttle::default());
    let mode = ThrottleMode::Direct;
    throttle.round(mode, &view(&guest, 1, 6000.0, 1000.0), SECOND);
    throttle.round(mode, &view(&guest, 2, 6000.0, 1000.0), SECOND);
    assert!((throttle.value() - 0.8).abs() < 1e-9);
    // The share left, 0.2, times 200 / 400.
    throttle.round(mode, &view(&guest, 3, 5000.0, 400.0), SECOND);
    assert!((throttle.value() - 0.9).abs() < 1e-9);
    // A stage is never weaker than the one before.
    throttle.round(mode, &view(&guest, 4, 5000.0, 100.0), SECOND);
    assert!((throttle.value() - 0.9).abs() < 1e-9);
}

#[test]
fn auto_converge_steps_after_two_bad_periods() {
    let (guest, mut throttle) = (Guest::default(), Throttle::default());
    let mut level = |dirty, time| {
        throttle.round(ThrottleMode::AutoConverge, &view(&guest, 1, 3000.0, dirty), time);
        throttle.value()
    };
    assert_eq!(level(900.0, SECOND), 0.0);
    assert_eq!(level(900.0, SECOND), 0.2);
    assert_eq!(level(400.0, SECOND), 0.2);
    assert_eq!(level(900.0, SECOND), 0.2);
    // Half a period.
    assert_eq!(level(900.0, SECOND / 2), 0.2);
    assert!((level(900.0, SECOND / 2) - 0.3).abs() < 1e-9);
    for _ in 0..40 {
        level(900.0, SECOND);
    }
    assert_eq!(level(900.0, SECOND), 0.99);
}

#[test]
fn adaptive_leaves_a_guest_alone_that_finishes_by_itself() {
    let guest = Guest::default();
    let classes = [Class { pages: 10_000.0, rate: 0.01, dirty: 5000.0 }];
    let mut throttle = Throttle::default();
    let calm = View { classes: &classes, free_time: 60.0, ..view(&guest, 1, 5000.0, 100.0) };
    throttle.round(ThrottleMode::Adaptive, &calm, SECOND);
    assert_eq!(throttle.value(), 0.0);
}

#[test]
fn adaptive_is_strong_and_brief_where_that_costs_less_work() {
    let guest = Guest::default();
    // At 85 % it would take many rounds to get there.
    let classes = [Class { pages: 2000.0, rate: 6.0, dirty: 2000.0 }];
    let mut throttle = Throttle::default();
    let busy = View { classes: &classes, enough: 200.0, time_left: 60.0, ..view(&guest, 1, 2000.0, 1000.0) };
    // Two rounds alike: to wait is no use.
    (0..2).for_each(|_| throttle.round(ThrottleMode::Adaptive, &busy, SECOND));
    assert!(throttle.value() > SEVERE, "{}", throttle.value());
    // Where that would take longer than a guest may be held like this, a milder one is taken.
    let mut throttle = Throttle::default();
    let large = [Class { pages: 20_000.0, rate: 0.3, dirty: 20_000.0 }];
    let large = View { classes: &large, enough: 2000.0, remaining: 20_000.0, ..busy };
    (0..2).for_each(|_| throttle.round(ThrottleMode::Adaptive, &large, SECOND));
    assert!((0.5..SEVERE).contains(&throttle.value()), "{}", throttle.value());
}

#[test]
fn adaptive_takes_no_more_than_it_may() {
    let guest = Guest::default();
    let classes = [Class { pages: 10_000.0, rate: 10.0, dirty: 10_000.0 }];
    for (most, expected) in [(0.99, 0.99), (0.5, 0.5), (0.0, 0.0)] {
        let mut throttle = Throttle::default();
        let wild = View { classes: &classes, most, ..view(&guest, 1, 10_000.0, 10_000.0) };
        throttle.round(ThrottleMode::Adaptive, &wild, SECOND);
        assert!((throttle.value() - expected).abs() < 0.01, "{}", throttle.value());
    }
}
