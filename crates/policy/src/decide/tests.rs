//! The rules of the decision, and that it always ends.

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

fn round(ms: u64, sent_mib: u64, remaining: u64) -> Round<'static> {
    Round {
        time: Duration::from_millis(ms),
        sent: ByteCount(sent_mib * MIB),
        remaining: PageCount(remaining),
        fixed: Duration::from_millis(10),
        ..Round::default()
    }
}

fn goes_on(decision: &Decision) -> bool {
    matches!(decision, Decision::NextRound(_))
}

fn policy(limit_ms: u64) -> Policy {
    let downtime_limit = Duration::from_millis(limit_ms);
    Policy::new(Settings { downtime_limit, throttle: ThrottleMode::Off, ..Settings::default() })
}

#[test]
fn an_idle_guest_is_switched_over_after_the_first_round() {
    let (decision, estimate) = policy(300).round(&round(1000, 1000, 20));
    assert_eq!(decision, Decision::SwitchOver);
    assert_eq!(estimate.bandwidth.to_string(), "1000MiB/s");
}

#[test]
fn within_the_limit_rounds_go_on_while_the_rest_shrinks() {
    let mut policy = policy(300);
    assert!(goes_on(&policy.round(&round(1000, 1000, 25_600)).0));
    assert!(goes_on(&policy.round(&round(100, 100, 2560)).0));
    assert_eq!(policy.round(&round(10, 10, 2500)).0, Decision::SwitchOver);
}

#[test]
fn the_search_for_the_minimum_is_bounded() {
    let mut policy = policy(10_000);
    let mut remaining = 1 << 20;
    let mut rounds = 0;
    while goes_on(&policy.round(&round(1000, 1000, remaining)).0) {
        remaining = remaining * 7 / 10;
        rounds += 1;
    }
    assert_eq!(rounds, SEARCH_ROUNDS);
}

#[test]
fn a_guest_that_outruns_the_link_ends_with_advice() {
    let mut policy = policy(300);
    let decision = (0..100).map(|_| policy.round(&round(1000, 128, 65_536)).0).find(|d| !goes_on(d));
    let Some(Decision::GiveUp(advice)) = decision else { panic!("{decision:?}") };
    let text = advice.to_string();
    assert!(text.contains("--downtime-limit 2.41s"), "{text}");
}

#[test]
fn without_patience_it_goes_on() {
    let mut policy = Policy::new(Settings { patience: None, ..Settings::default() });
    assert!((0..1000).all(|_| goes_on(&policy.round(&round(1000, 128, 65_536)).0)));
}

proptest! {
    #[test]
    fn it_always_ends_and_never_above_the_limit(rounds in prop::collection::vec((1u64..2000, 0u64..500, 0u64..500_000), 1..20), limit in 0u64..2000) {
        let mut policy = policy(limit);
        let mut time = Duration::ZERO;
        for observed in rounds.iter().cycle().take(200_000) {
            let observed = round(observed.0, observed.1, observed.2);
            time += observed.time;
            let (decision, estimate) = policy.round(&observed);
            match decision {
                Decision::NextRound(_) => {}
                Decision::SwitchOver => {
                    prop_assert!(estimate.expected_downtime.unwrap() <= Duration::from_millis(limit));
                    return Ok(());
                }
                Decision::GiveUp(_) => {
                    prop_assert!(time >= Duration::from_secs(60));
                    return Ok(());
                }
            }
        }
        prop_assert!(false, "no end after {time:?}");
    }
}
