//! The rules of each mode.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

impl<'a> View<'a> {
    /// The first moment of a guest that writes nothing, over a link of 1,000 pages a second.
    pub(crate) fn example(guest: &'a Guest) -> Self {
        Self {
            clock: Duration::ZERO,
            remaining: 0.0,
            bandwidth: 1000.0,
            dirty_rate: 0.0,
            dirtied: 0.0,
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
}

fn view(guest: &Guest, clock: u64, remaining: f64, dirty_rate: f64) -> View<'_> {
    let clock = SECOND * clock as u32;
    View { clock, remaining, dirty_rate, dirtied: dirty_rate, ..View::example(guest) }
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
    // Six seconds over: staged goes on from 1 %, beyond 99 %, for 3 s, and then only the operator
    // can help.
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
    let busy = View {
        classes: &classes,
        enough: 200.0,
        time_left: 60.0,
        ..view(&guest, 1, 2000.0, 1000.0)
    };
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

/// A view of 1,000 pages that are all dirty and harvested at once, on a link of 1,000 a second.
/// With each page written `rate` times a second, a share `s` of the guest's time leaves after a
/// round of `t` seconds `1000·(1 − exp(−s·rate·t))`, which takes a thousandth of that in seconds to
/// send.
fn at_once<'a>(guest: &'a Guest, classes: &'a [Class], time_left: f64) -> View<'a> {
    View {
        classes,
        at_once: true,
        enough: 200.0,
        free_time: 0.0,
        time_left,
        ..view(guest, 1, 1000.0, 1000.0)
    }
}

const CALM: [Class; 1] = [Class { pages: 1000.0, rate: 1.0, dirty: 1000.0 }];
const BUSY: [Class; 1] = [Class { pages: 1000.0, rate: 6.0, dirty: 1000.0 }];

/// What comes out of `adapt`, with two digits behind the point.
fn adapted(throttle: &Throttle, view: &View, may_wait: bool) -> f64 {
    (throttle.adapt(view, may_wait) * 100.0).round() / 100.0
}

/// A guest that no throttle slows: under 99 % its growth is the same.
fn deaf() -> Guest {
    let mut guest = Guest::default();
    let looks: Vec<u32> = (0..40).map(|look| look * 100).collect();
    looks.iter().for_each(|look| guest.look(&[*look], SECOND / 10, 0.0));
    for look in looks.iter().cycle().take(120) {
        guest.look(&[*look], SECOND / 10, 0.99);
    }
    guest
}

#[test]
fn the_mildest_throttle_in_time_that_costs_at_most_a_quarter_more_is_chosen() {
    let (guest, throttle) = (Guest::default(), Throttle::default());
    // Times and costs of the shares left, by the formula above: 0.9: 2.56 s, 0.26 s of work;
    // 0.8: 2.16, 0.43; 0.7: 1.80, 0.54; 0.6: 1.69, 0.68; 0.5: 1.39, 0.70; 0.4: 1.33, 0.80;
    // 0.3: 1.26, 0.88; 0.2: 1, 0.8; 0.15: 1, 0.85.
    let by_time = [
        (3.0, 0.1),
        (2.5, 0.2),
        (2.1, 0.3),
        (1.75, 0.4),
        // 0.5 is cheapest.
        (1.5, 0.5),
        (1.35, 0.6),
        // Costs a tenth more than 0.2, and is milder.
        (1.3, 0.7),
        (1.1, 0.8),
    ];
    for (time_left, expected) in by_time {
        let view = at_once(&guest, &CALM, time_left);
        assert_eq!(adapted(&throttle, &view, false), expected, "{time_left} s left");
    }
}

#[test]
fn where_nothing_milder_finishes_in_time_it_is_the_mildest_of_the_strong() {
    let (guest, throttle) = (Guest::default(), Throttle::default());
    // A round takes a second whatever the guest does: ten percent of its time fit as well as one.
    assert_eq!(adapted(&throttle, &at_once(&guest, &CALM, 0.9), false), 0.9);
    // Of the busy guest, 1.69 s at 10 %, 1.21 s at 4 %; 1 s from 3 % on.
    assert_eq!(adapted(&throttle, &at_once(&guest, &BUSY, 0.9), false), 0.97);
    // Compared with the strongest that is allowed: 1 s at 3.4 %.
    let most = View { most: 0.966, ..at_once(&guest, &BUSY, 0.9) };
    assert_eq!(adapted(&throttle, &most, false), 0.97);
    // 1.21 s at 4 %; 6 % takes a tenth longer at the most, 8 % does not.
    let most = View { most: 0.96, ..at_once(&guest, &BUSY, 0.9) };
    assert_eq!(adapted(&throttle, &most, false), 0.94);
    // Where nothing finishes, all that may be taken.
    let class = [Class { rate: 600.0, ..CALM[0] }];
    assert_eq!(adapted(&throttle, &at_once(&guest, &class, 60.0), false), 0.99);
}

#[test]
fn strong_and_brief_is_for_three_seconds_in_all() {
    let guest = Guest::default();
    let busy = at_once(&guest, &BUSY, 60.0);
    // At 15 % it takes 2.56 s and costs 2.18 s of work; at 3 % 1 s and 0.97 s.
    let severe = |severe| Throttle { severe, ..Throttle::default() };
    assert_eq!(adapted(&severe(0.0), &busy, false), 0.97);
    // With 0.3 s of downtime and a reserve, 0.85 · (3 − 0.3 − 1.5) are left, and 0.85 · 1.2 > 1.
    assert_eq!(adapted(&severe(1.5), &busy, false), 0.97);
    assert_eq!(adapted(&severe(1.6), &busy, false), 0.85);
    // The downtime is such a time as well.
    let downtime = |downtime| View { downtime, ..busy };
    assert_eq!(adapted(&severe(0.0), &downtime(1.8), false), 0.97);
    assert_eq!(adapted(&severe(0.0), &downtime(1.9), false), 0.85);
}

#[test]
fn a_milder_throttle_is_taken_that_costs_hardly_more_than_a_strong_one() {
    let (guest, throttle) = (Guest::default(), Throttle::default());
    // 0.87 s of work at 30 %, 0.9 at the mildest of the strong: not clearly less.
    assert_eq!(adapted(&throttle, &at_once(&guest, &CALM, 1.3), false), 0.7);
    // A guest of 1.5 writes a second for each page, in time: 15 % leave 200 pages after 1 s and
    // cost 0.85 s; the mildest of the strong cost 0.9 s.
    let class = [Class { rate: 1.48, ..CALM[0] }];
    assert_eq!(adapted(&throttle, &at_once(&guest, &class, 1.05), false), 0.85);
}

#[test]
fn of_milder_ones_none_is_taken_that_costs_over_a_quarter_more() {
    let guest = Guest::default();
    // No time is left for strong and brief.
    let throttle = Throttle { severe: 2.0, ..Throttle::default() };
    let of_rate = |rate| {
        let class = [Class { rate, ..CALM[0] }];
        adapted(&throttle, &at_once(&guest, &class, 60.0), false)
    };
    // 20 % take 2.16 s and cost 1.72 s, 15 % take 1.69 s and cost 1.43 s.
    assert_eq!(of_rate(4.0), 0.8);
    // 2.56 s and 2.05 s; 1.77 s and 1.51 s.
    assert_eq!(of_rate(4.5), 0.85);
}

#[test]
fn strong_and_brief_is_for_what_costs_a_fifth_less() {
    let (guest, throttle) = (Guest::default(), Throttle::default());
    // 1.80 s and 1.26 s of work at 30 %, 1 s and 0.92 s at 8 %, which is less by over a fifth.
    let class = [Class { rate: 7.0 / 3.0, ..CALM[0] }];
    assert_eq!(adapted(&throttle, &at_once(&guest, &class, 60.0), false), 0.92);
    // On a link of half the speed all takes twice as long: 1.76 s at 30 %, 1.8 s at 10 %.
    let class = [Class { rate: 0.5, ..CALM[0] }];
    let slow = View { bandwidth: 500.0, ..at_once(&guest, &class, 2.6) };
    assert_eq!(adapted(&throttle, &slow, false), 0.7);
}

#[test]
fn a_round_without_a_throttle_is_made_when_that_brings_the_cost_down() {
    let (guest, throttle) = (Guest::default(), Throttle::default());
    // Now 0.26 s of work at 90 %. After a round of 1 s 632 pages are left: with 2 s of time 1.85 s
    // at 90 %, 0.18 s of work.
    assert_eq!(adapted(&throttle, &at_once(&guest, &CALM, 3.0), false), 0.1);
    assert_eq!(adapted(&throttle, &at_once(&guest, &CALM, 3.0), true), 0.0);
    // With 1.6 s of time 1.3 s at 80 %, 0.26 s of work: no gain.
    assert_eq!(adapted(&throttle, &at_once(&guest, &CALM, 2.6), true), 0.1);
    // Of the busy guest nothing is gone after a round.
    assert_eq!(adapted(&throttle, &at_once(&guest, &BUSY, 60.0), true), 0.97);
}

#[test]
fn a_guest_that_finishes_in_its_free_time_is_left_alone() {
    let (guest, throttle) = (Guest::default(), Throttle::default());
    // By itself: 1, 0.632, 0.469, 0.374, 0.312, 0.268, 0.235, 0.209: 3.5 s until 189 are left.
    let free = |free_time| View { free_time, ..at_once(&guest, &CALM, 3.0) };
    assert_eq!(adapted(&throttle, &free(3.45), false), 0.1);
    assert_eq!(adapted(&throttle, &free(3.55), false), 0.0);
    // Nor is one slowed while hot segments wait, or while nothing is known of the link.
    let delaying = View { delaying: true, ..free(0.0) };
    assert_eq!(adapted(&throttle, &delaying, false), 0.0);
    assert_eq!(adapted(&throttle, &View { bandwidth: 0.0, ..free(0.0) }, false), 0.0);
}

#[test]
fn a_throttle_is_not_loosened_by_a_little() {
    let throttle = Throttle { value: 0.5, ..Throttle::default() };
    // From half of its time, the guest is given 60 %, but not: 65 % it is.
    assert_eq!(throttle.settle(0.4), 0.5);
    assert_eq!(throttle.settle(0.34), 0.34);
    assert_eq!(throttle.settle(0.55), 0.55);
    // A throttle that begins is no change of one.
    assert_eq!(Throttle::default().settle(0.1), 0.1);
    assert_eq!(Throttle { value: 0.1, ..Throttle::default() }.settle(0.0), 0.1);
}

#[test]
fn the_least_throttle_that_fits_is_found() {
    let shares = [0.1, 0.08, 0.06];
    assert_eq!(largest(&shares, |share| share <= 0.08), Some(0.08));
    assert_eq!(largest(&shares, |_| true), Some(0.1));
    assert_eq!(largest(&shares, |_| false), None);
}

#[test]
fn a_throttle_is_needed_where_rounds_neither_finish_nor_shrink() {
    let (guest, throttle) = (Guest::default(), Throttle::default());
    let needed = |view: View| throttle.is_needed(&view, false);
    assert!(needed(at_once(&guest, &BUSY, 60.0)));
    // It will not finish in time, but the next round leaves 63 %.
    assert!(!needed(at_once(&guest, &CALM, 60.0)));
    // What was never sent is sent in the round, too, and is gone afterwards.
    let unsent = View { remaining: 3000.0, unsent: 2000.0, ..at_once(&guest, &BUSY, 60.0) };
    assert!(!needed(unsent));
    // A round leaves 86 %, a further one 82 %, which is little enough: 1.86 s.
    let class = [Class { rate: 2.0, ..CALM[0] }];
    let in_time = |free_time| View { free_time, enough: 850.0, ..at_once(&guest, &class, 60.0) };
    assert!(!needed(in_time(1.9)));
    assert!(needed(in_time(1.8)));
    // What the model says of the next round counts no more when the last ones brought nothing; that
    // it is late does.
    assert!(throttle.is_needed(&at_once(&guest, &CALM, 60.0), true));
    assert!(!throttle.is_needed(&in_time(1.9), true));
}

#[test]
fn within_a_round_the_throttle_only_rises() {
    let guest = Guest::default();
    let mode = ThrottleMode::Vcpus;
    let busy = |ms| View { clock: Duration::from_millis(ms), ..at_once(&guest, &BUSY, 60.0) };
    let mut throttle = Throttle::default();
    // Of the first round nothing is known.
    throttle.tick(mode, &busy(100));
    assert_eq!(throttle.value(), 0.0);
    throttle.round(mode, &busy(1000), SECOND);
    assert!((throttle.value() - 0.97).abs() < 1e-9, "{}", throttle.value());
    throttle.tick(mode, &busy(2500));
    assert!((throttle.value() - 0.97).abs() < 1e-9, "{}", throttle.value());
    // After 1.7 s of that, 85 % would do better; from the round's end on.
    throttle.tick(mode, &busy(2700));
    assert!((throttle.value() - 0.97).abs() < 1e-9, "{}", throttle.value());
    throttle.round(mode, &busy(2700), SECOND);
    assert!((throttle.value() - 0.85).abs() < 1e-9, "{}", throttle.value());
    // Under 90 % no such time passes.
    throttle.tick(mode, &busy(9000));
    assert!((throttle.severe - 1.7).abs() < 1e-9, "{}", throttle.severe);
    // What has become harder within the round is met within it.
    throttle.tick(mode, &View { enough: 1.0, ..busy(9100) });
    assert!((throttle.value() - 0.975).abs() < 1e-9, "{}", throttle.value());
}

#[test]
fn a_round_that_goes_without_a_throttle_does_so_to_its_end() {
    let guest = Guest::default();
    let mode = ThrottleMode::Vcpus;
    let mut throttle = Throttle::default();
    // Nothing was there to compare the first round with: another one makes it cheaper.
    throttle.round(mode, &at_once(&guest, &CALM, 3.0), SECOND);
    throttle.tick(mode, &at_once(&guest, &CALM, 3.0));
    assert_eq!(throttle.value(), 0.0);
    // One that has not shrunk is waited for no longer, and then ticks count again.
    throttle.round(mode, &at_once(&guest, &CALM, 3.0), SECOND);
    assert!((throttle.value() - 0.1).abs() < 1e-9, "{}", throttle.value());
    throttle.tick(mode, &at_once(&guest, &CALM, 0.9));
    assert!((throttle.value() - 0.9).abs() < 1e-9, "{}", throttle.value());
}

#[test]
fn another_round_is_waited_for_while_they_leave_a_fifth_less() {
    let guest = Guest::default();
    let waits = |first: fn(&mut Throttle, &View), before: f64, delaying: bool| {
        let mut throttle = Throttle::default();
        let view = at_once(&guest, &CALM, 3.0);
        first(&mut throttle, &View { remaining: before, delaying, ..view });
        throttle.round(ThrottleMode::Vcpus, &view, SECOND);
        throttle.value() == 0.0
    };
    let round =
        |throttle: &mut Throttle, view: &View| throttle.round(ThrottleMode::Vcpus, view, SECOND);
    let governed = |throttle: &mut Throttle, view: &View| throttle.look_on(view);
    for first in [round as fn(&mut Throttle, &View), governed] {
        assert!(!waits(first, 1000.0, false));
        assert!(!waits(first, 1250.0, false), "a fifth less and no more");
        assert!(waits(first, 1260.0, false));
        // A round that left hot segments out could not leave less.
        assert!(waits(first, 1000.0, true));
    }
}

#[test]
fn a_guest_that_the_governor_holds_is_not_throttled() {
    let guest = Guest::default();
    let mut throttle = Throttle { value: 0.95, ..Throttle::default() };
    throttle.look_on(&view(&guest, 2, 1000.0, 1000.0));
    assert_eq!(throttle.value(), 0.0);
    assert_eq!(throttle.severe, 2.0, "the time until then counts");
}

#[test]
fn a_guest_that_it_does_not_slow_is_released_after_three_rounds_in_a_row() {
    let (deaf, guest) = (deaf(), Guest::default());
    assert_eq!(deaf.speed(0.99), 1.0);
    let mode = ThrottleMode::Vcpus;
    let mut throttle = Throttle::default();
    let mut round = |guest: &Guest| {
        throttle.round(mode, &at_once(guest, &BUSY, 60.0), SECOND);
        (throttle.value() > 0.9, throttle.exhausted())
    };
    assert_eq!(round(&deaf), (true, false), "nothing was in force");
    assert_eq!([round(&deaf), round(&deaf)], [(true, false); 2]);
    assert_eq!(round(&guest), (true, false), "this one was slowed");
    assert_eq!([round(&deaf), round(&deaf)], [(true, false); 2]);
    assert_eq!(round(&deaf), (false, true));
    assert_eq!(round(&guest), (false, true), "and stays so");
    throttle.tick(mode, &at_once(&guest, &BUSY, 60.0));
    assert_eq!(throttle.value(), 0.0);
}

#[test]
fn rounds_within_5_percent_of_each_other_start_it_in_either_direction() {
    let guest = Guest::default();
    let begun = |second: f64| {
        let mut throttle = Throttle::default();
        throttle.round(ThrottleMode::Staged, &view(&guest, 1, 1000.0, 2000.0), SECOND);
        throttle.round(ThrottleMode::Staged, &view(&guest, 2, second, 2000.0), SECOND);
        throttle.value() > 0.0
    };
    assert_eq!(
        [940.0, 950.0, 951.0, 1049.0, 1050.0, 1060.0].map(begun),
        [false, false, true, true, false, false]
    );
}

#[test]
fn staged_holds_its_last_level_for_3_seconds_and_asks_for_help() {
    let guest = Guest::default();
    let mode = ThrottleMode::Staged;
    let mut throttle = Throttle::default();
    let mut at = |clock: u64, dirty_rate: f64| {
        throttle.round(mode, &view(&guest, clock, 6000.0, dirty_rate), SECOND);
        (throttle.value(), throttle.exhausted())
    };
    assert_eq!(at(1, 20_000.0), (0.0, false));
    // 0.2 · 1000 / 20,000 is a share of one percent: 99 %, and not above.
    assert_eq!(at(2, 20_000.0), (0.99, false));
    assert_eq!(at(9, 200.0), (0.99, false), "a stage is never weaker");
    assert_eq!(at(10, 1000.0), (0.99, false), "above 99 % from here on");
    assert_eq!(at(12, 1000.0), (0.99, false));
    assert_eq!(at(13, 1000.0), (0.0, true));
}

#[test]
fn five_seconds_of_sending_are_not_under_five_seconds() {
    let guest = Guest::default();
    let direct = |remaining: f64| {
        let mut throttle = Throttle::default();
        throttle.round(ThrottleMode::Direct, &view(&guest, 1, remaining, 1000.0), SECOND);
        throttle.round(ThrottleMode::Direct, &view(&guest, 2, remaining, 1000.0), SECOND);
        throttle.value()
    };
    assert_eq!((direct(4999.0), direct(5000.0)), (0.9, 0.8));
}

#[test]
fn direct_waits_for_the_whole_of_its_six_seconds() {
    let (guest, mut throttle) = (Guest::default(), Throttle::default());
    let mode = ThrottleMode::Direct;
    let mut at = |ms: u64| {
        let view = View { clock: Duration::from_millis(ms), ..view(&guest, 0, 3000.0, 100.0) };
        throttle.round(mode, &view, SECOND);
        (throttle.value() * 100.0).round()
    };
    assert_eq!([at(1000), at(2000), at(4999), at(5000), at(7999)], [0.0, 90.0, 90.0, 99.0, 99.0]);
    // Staged from there on: never weaker, and with 1 % left at 99 %.
    assert_eq!(at(8000), 99.0);
    assert_eq!(throttle.staged.map(|share| (share * 100.0).round()), Some(1.0));
}

#[test]
fn auto_converge_adds_up_what_is_short() {
    let (guest, mut throttle) = (Guest::default(), Throttle::default());
    let mut half = |dirtied: f64, sent: f64| {
        let view = View { dirtied, sent, ..view(&guest, 1, 3000.0, 0.0) };
        throttle.round(ThrottleMode::AutoConverge, &view, SECOND / 2);
        throttle.value()
    };
    // Half of what was sent is not over half.
    for _ in 0..4 {
        assert_eq!([half(0.0, 1000.0), half(1000.0, 1000.0)], [0.0, 0.0]);
    }
    assert_eq!([half(600.0, 1000.0), half(600.0, 1000.0)], [0.0, 0.0]);
    assert_eq!([half(900.0, 1000.0), half(200.0, 1000.0)], [0.0, 0.2]);
}

#[test]
fn modes_without_a_throttle_have_none() {
    let guest = Guest::default();
    for mode in [ThrottleMode::Off, ThrottleMode::Governor] {
        let mut throttle = Throttle { value: 0.5, ..Throttle::default() };
        throttle.round(mode, &at_once(&guest, &BUSY, 60.0), SECOND);
        assert_eq!(throttle.value(), 0.0);
        throttle.tick(mode, &at_once(&guest, &BUSY, 60.0));
        assert_eq!(throttle.value(), 0.0);
    }
}
