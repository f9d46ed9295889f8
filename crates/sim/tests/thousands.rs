//! Ten thousand migrations by chance: they end, within their limits, and with one owner.
//!
//! Four tests of 2,500, so that they share the processors. A seed that fails is named;
//! `random(seed)` is the scenario.
#![allow(clippy::unwrap_used)]

use godwit_policy::ThrottleMode;
use godwit_sim::{End, Outcome, Scenario, random, random_leaving, random_trouble, run};

const EACH: u64 = 2500;

/// What is wrong with `outcome`, if anything.
fn fault(scenario: &Scenario, outcome: &Outcome) -> Option<&'static str> {
    let settings = &scenario.settings;
    let ceiling = settings.downtime_ceiling.unwrap_or(settings.downtime_limit).as_secs_f64();
    let moved = outcome.end == End::Moved;
    // What the link loses after the decision is nobody's to foresee, nor a phase that begins then.
    let steady =
        scenario.link.loss <= 0.0 && scenario.guest.phases.is_empty() && scenario.cut.is_none();
    let verification = if scenario.verify { scenario.verification.as_secs_f64() } else { 0.0 };
    let extra = if scenario.verify { 4.0 * scenario.link.latency.as_secs_f64() } else { 0.0 }
        + verification;
    let checks = [
        (outcome.end == End::Endless, "it does not end"),
        (outcome.owners > 1, "two owners"),
        (outcome.owners == 0, "no owner"),
        (
            moved && outcome.expected_downtime > ceiling + verification + 1e-9,
            "switched over above the limit",
        ),
        (outcome.limit > ceiling + 1e-9, "the limit grew above the ceiling"),
        (
            moved && steady && outcome.downtime > 1.1 * ceiling + extra + 0.002,
            "downtime above the limit",
        ),
        (outcome.throttle > settings.max_throttle + 1e-9, "throttled above max-throttle"),
        (settings.throttle == ThrottleMode::Off && outcome.throttle > 0.0, "throttled though off"),
        (scenario.cut.is_none() && !moved && outcome.end != End::GaveUp, "failed without a fault"),
        (outcome.end == End::GaveUp && outcome.reason.is_none(), "gave up without advice"),
    ];
    checks.iter().find(|(wrong, _)| *wrong).map(|(_, what)| *what)
}

fn faults(part: u64) -> Vec<(u64, &'static str)> {
    let seeds = part * EACH..(part + 1) * EACH;
    let check = |seed| {
        let scenario = random(seed);
        fault(&scenario, &run(&scenario)).map(|what| (seed, what))
    };
    seeds.filter_map(check).collect()
}

#[test]
fn first_quarter() {
    assert_eq!(faults(0), []);
}

#[test]
fn second_quarter() {
    assert_eq!(faults(1), []);
}

#[test]
fn third_quarter() {
    assert_eq!(faults(2), []);
}

#[test]
fn fourth_quarter() {
    assert_eq!(faults(3), []);
}

#[test]
fn chance_reaches_every_end() {
    let mut ends = vec![End::Moved, End::GaveUp, End::Stayed, End::InDoubt];
    for seed in 0..4000 {
        let outcome = run(&random(seed));
        ends.retain(|end| outcome.end != *end);
        if ends.is_empty() {
            return;
        }
    }
    panic!("not reached: {ends:?}");
}

#[test]
fn a_seed_always_gives_the_same() {
    assert_eq!(run(&random(7)), run(&random(7)));
}

/// So many of the million of `make bench-sim`: of these two end with an operator who looks for the
/// guest.
const TROUBLES: u64 = 10_000;

#[test]
fn whatever_goes_wrong_one_side_has_all_of_the_guest() {
    // Mutations: what was on its way is not taken back; a severed source runs into a wait without
    // end; a killed source's guest is run behind COMMIT.
    let outcomes = (0..TROUBLES).map(|seed| (seed, run(&random_trouble(seed))));
    let (mut resumed, mut recovered, mut wrong) = (0, 0, Vec::new());
    let mut ends = [0; 4];
    for (seed, outcome) in outcomes {
        wrong.extend(outcome.fault().map(|what| (seed, what)));
        resumed += u32::from(outcome.resumptions > 0 && outcome.moved());
        recovered += u32::from(outcome.recovered);
        let known = [End::Moved, End::GaveUp, End::Stayed, End::InDoubt];
        if let Some(at) = known.iter().position(|end| *end == outcome.end) {
            ends[at] += 1;
        }
    }
    assert_eq!(wrong, []);
    println!("{ends:?}, {resumed} moved behind a resumption, {recovered} recovered");
    assert!(ends.iter().all(|count| *count > 0), "{ends:?}");
    assert!(resumed > 200 && recovered > 0, "{resumed}, {recovered}");
}

#[test]
fn a_guest_that_left_before_its_memory_has_all_of_it_at_last() {
    // Mutation: a destination that is killed is not followed.
    let outcomes = (0..TROUBLES).map(|seed| (seed, run(&random_leaving(seed))));
    let (mut left, mut cut, mut wrong) = (0, 0, Vec::new());
    for (seed, outcome) in outcomes {
        wrong.extend(outcome.fault().map(|what| (seed, what)));
        let Some(followed) = outcome.post_copy else { continue };
        if outcome.moved() {
            left += 1;
            cut += u32::from(outcome.resumptions > 0);
            let all = (0.0..=outcome.total).contains(&followed.seconds)
                && (0.0..=followed.seconds + 1e-6).contains(&followed.lost_work)
                && followed.faults * 4096.0 <= followed.missing * 1.001 + 4096.0;
            wrong.extend((!all).then_some((seed, "no such time, or more waits than pages")));
        }
    }
    assert_eq!(wrong, []);
    println!("{left} left before their memory, {cut} of them with a resumption");
    assert!(left > 2000 && cut > 800, "{left} {cut}");
}
