//! The rates of the formulas, and when there is none.

use super::*;
use crate::guest::Guest;

fn view(guest: &Guest, remaining: f64, time_left: f64) -> View<'_> {
    View {
        clock: Duration::from_secs(10),
        remaining,
        bandwidth: 32_768.0,
        dirty_rate: 65_536.0,
        dirtied: 65_536.0,
        sent: 32_768.0,
        enough: 8192.0,
        free_time: 20.0,
        time_left,
        ..View::example(guest)
    }
}

fn budget_for(remaining: f64, time_left: f64) -> f64 {
    let (guest, mut governor) = (Guest::default(), Governor::default());
    governor.round(&view(&guest, remaining, time_left), true, true);
    governor.budget().unwrap()
}

#[test]
fn what_is_sent_soon_is_sent_in_one_round() {
    // 256 MiB in two seconds, of which 32 MiB may remain.
    let budget = budget_for(65_536.0, 10.0);
    assert!((budget * 2.0 - CAREFUL * 8192.0).abs() < 1.0, "{budget}");
    assert_eq!(
        budget_for(8192.0, 10.0),
        0.5 * 32_768.0,
        "but the link is never shared by more than halves"
    );
}

#[test]
fn what_takes_long_is_spread_over_the_time_there_is() {
    // Ten seconds of sending in fifteen: a third of the link is left for the guest.
    let budget = budget_for(327_680.0, 15.0);
    let time = (327_680.0 - 8192.0) / (32_768.0 - budget);
    assert!((time - 15.0).abs() < 0.01, "{time}");
    assert_eq!(budget_for(327_680.0, 1000.0), 0.5 * 32_768.0);
    // With no time left it is one round.
    let budget = budget_for(327_680.0, -3.0);
    assert!((budget * 10.0 - CAREFUL * 8192.0).abs() < 1.0, "{budget}");
    // Not by its name: a guest is held to no less, however little time there is.
    assert_eq!(budget_for(1e9, 1.0), 500.0);
}

#[test]
fn it_begins_when_it_is_needed_and_stays() {
    let (guest, mut governor) = (Guest::default(), Governor::default());
    governor.round(&view(&guest, 60_000.0, 10.0), true, false);
    assert_eq!(governor.budget(), None);
    governor.round(&view(&guest, 60_000.0, 10.0), true, true);
    governor.round(&view(&guest, 30_000.0, 10.0), true, false);
    assert!(governor.budget().is_some());
    assert!(governor.time_to_finish(&view(&guest, 30_000.0, 10.0)).is_some());
    governor.round(&view(&guest, 20_000.0, 10.0), false, true);
    assert_eq!((governor.budget(), governor.failed()), (None, false));
}

#[test]
fn a_guest_that_it_does_not_hold_is_let_go() {
    let (guest, mut governor) = (Guest::default(), Governor::default());
    for _ in 0..4 {
        governor.round(&view(&guest, 60_000.0, 10.0), true, true);
    }
    assert_eq!((governor.budget(), governor.failed()), (None, true));
}
#[test]
fn the_time_to_finish_is_the_formulas_and_the_last_round() {
    let (guest, mut governor) = (Guest::default(), Governor::default());
    let view = view(&guest, 65_536.0, 10.0);
    assert_eq!(governor.time_to_finish(&view), None);
    governor.round(&view, true, true);
    // g = 0.95 · 8192 · 32,768 / 65,536 = 3891.2; (R − E) / (B − g), and E / B for the last one.
    let seconds = 57_344.0 / (32_768.0 - 3891.2) + 8192.0 / 32_768.0;
    assert_eq!(governor.time_to_finish(&view), Some(Duration::from_secs_f64(seconds)));
    // With less than may remain, it is the last round.
    let little = View { remaining: 100.0, ..view };
    assert_eq!(governor.time_to_finish(&little), Some(Duration::from_millis(250)));
}

#[test]
fn three_seconds_of_sending_are_sent_in_one_round() {
    // g₁ = 0.95 · 8192 / 3 s, although there is time for less of a hurry.
    let one_round = budget_for(3.0 * 32_768.0, 20.0);
    assert!((one_round - CAREFUL * 8192.0 / 3.0).abs() < 1e-6, "{one_round}");
    assert_eq!(budget_for(3.0 * 32_768.0 + 1.0, 20.0), 0.5 * 32_768.0);
    // The time there is may be over; what may remain may be more than what does.
    assert_eq!(budget_for(100_000.0, 0.0), CAREFUL * 8192.0 * 32_768.0 / 100_000.0);
    let (guest, mut governor) = (Guest::default(), Governor::default());
    let all = View { enough: 2e6, ..view(&guest, 1e6, 20.0) };
    governor.round(&all, true, true);
    assert_eq!(governor.budget(), Some(0.5 * 32_768.0));
}

#[test]
fn on_a_slow_link_half_of_it_is_less_than_the_least() {
    let (guest, mut governor) = (Guest::default(), Governor::default());
    let slow = View { bandwidth: 600.0, ..view(&guest, 1e6, 1.0) };
    governor.round(&slow, true, true);
    assert_eq!(governor.budget(), Some(300.0));
    // Of a link of which nothing is known there is nothing to share.
    governor.round(&View { bandwidth: 0.0, ..slow }, true, true);
    assert_eq!(governor.budget(), None);
}

#[test]
fn three_rounds_in_a_row_that_do_not_shrink_end_it() {
    let (guest, mut governor) = (Guest::default(), Governor::default());
    let mut failed = |remaining: f64| {
        governor.round(&view(&guest, remaining, 10.0), true, true);
        governor.failed()
    };
    // A round that is not governed says nothing of the governor.
    assert!(!failed(60_000.0));
    assert!(![60_000.0, 60_000.0].map(&mut failed).contains(&true));
    // Nine tenths of what the one before left: it goes on.
    assert!(!failed(54_000.0));
    assert!(![48_601.0, 43_741.0].map(&mut failed).contains(&true));
    assert!(failed(39_367.0));
}

#[test]
fn a_guest_that_is_held_and_leaves_no_less_stays_held() {
    let (guest, mut governor) = (Guest::default(), Governor::default());
    let little = View { enough: 0.0, dirty_rate: 1000.0, ..view(&guest, 60_000.0, 10.0) };
    for _ in 0..20 {
        governor.round(&little, true, true);
        assert_eq!((governor.budget(), governor.failed()), (Some(LEAST), false));
        assert!(governor.is_at_its_least() && governor.is_at_its_end());
    }
    let unheld = View { dirty_rate: 1001.0, ..little };
    (0..DEAF_ROUNDS).for_each(|_| governor.round(&unheld, true, true));
    assert!(governor.failed());
}

#[test]
fn a_machine_that_offers_it_no_longer_is_not_governed() {
    let (guest, mut governor) = (Guest::default(), Governor::default());
    governor.round(&view(&guest, 60_000.0, 10.0), true, true);
    assert!(governor.budget().is_some());
    governor.withdraw();
    assert_eq!((governor.budget(), governor.failed()), (None, false));
}
