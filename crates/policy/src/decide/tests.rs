//! The rules of the decision, and that it always ends.

use proptest::prelude::*;

use super::*;
use crate::DiskStatistics;
use crate::settings::SettingError;

impl Policy {
    /// Changes one setting, as it is typed.
    fn set(&mut self, key: &str, value: &str) -> Result<Plan, SettingError> {
        let mut settings = self.settings;
        settings.set(key, value)?;
        Ok(self.change(settings))
    }
}

/// What comes out of whole rounds and ticks.
mod rounds;
/// What the decision is made of, term by term.
mod terms;

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

const SECOND: Duration = Duration::from_secs(1);

fn near(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= 1e-6 * expected.abs()
}

/// 1,000 pages, 400 of them dirty, each written once a second.
const CLASS: [Class; 1] = [Class { pages: 1000.0, rate: 1.0, dirty: 400.0 }];

/// A link of 1,000 pages a second, in a policy that has seen nothing else.
fn linked(settings: Settings) -> Policy {
    let mut policy = Policy::new(settings);
    policy.bandwidth.observe(PageCount(1000).bytes(), SECOND);
    policy
}

/// Settings without a throttle.
const OFF: fn() -> Settings = || Settings { throttle: ThrottleMode::Off, ..Settings::default() };

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
fn time_in_which_nothing_is_sent_is_no_measure_of_the_link() {
    // Regression: a wait for hints and the look at the end of a round counted as sending.
    let idle = Duration::from_millis(1000);
    let (_, estimate) = policy(300).round(&Round { idle, ..round(2000, 1000, 20) });
    assert_eq!(estimate.bandwidth.to_string(), "1000MiB/s");
}

#[test]
fn the_operators_bandwidth_counts_for_the_downtime_and_no_more() {
    let mut policy = policy(300);
    policy.set("switchover-bandwidth", "100MiB/s").unwrap();
    // 100 MiB remain: a second at that rate, though 100 ms as measured.
    let (decision, estimate) = policy.round(&round(1000, 1000, 25_600));
    assert!(goes_on(&decision));
    assert_eq!(estimate.bandwidth.to_string(), "1000MiB/s");
    assert_eq!(estimate.expected_downtime, Some(Duration::from_millis(1010)));
    policy.set("switchover-bandwidth", "auto").unwrap();
    let (_, estimate) = policy.round(&round(1000, 1000, 25_600));
    assert_eq!(estimate.expected_downtime, Some(Duration::from_millis(110)));
}

#[test]
fn verification_is_foretold_and_not_held_against_the_limit() {
    let verification = Duration::from_secs(6);
    let (decision, estimate) = policy(300).round(&Round { verification, ..round(1000, 1000, 20) });
    assert_eq!(decision, Decision::SwitchOver);
    assert!(estimate.expected_downtime.unwrap() >= verification);
}

#[test]
fn within_the_limit_rounds_go_on_while_the_rest_shrinks() {
    let mut policy = policy(300);
    assert!(goes_on(&policy.round(&round(1000, 1000, 25_600)).0));
    assert!(goes_on(&policy.round(&round(100, 100, 2560)).0));
    assert_eq!(policy.round(&round(10, 10, 2500)).0, Decision::SwitchOver);
}

#[test]
fn a_round_behind_getting_ready_is_compared_with_what_it_began_with() {
    // What was written meanwhile made it longer, and so left more, than the one before promised.
    for (began_with, more) in [(0, false), (6000, true)] {
        let mut policy = policy(300);
        assert!(goes_on(&policy.round(&round(1000, 1000, 3000)).0));
        let behind = Round { began_with: PageCount(began_with), ..round(240, 240, 2800) };
        assert_eq!(goes_on(&policy.round(&behind).0), more, "{began_with}");
    }
}

#[test]
fn a_switchover_is_near_within_the_limit_and_a_second() {
    for (limit, remaining, near) in
        [(300, 200_000, false), (300, 50_000, true), (9000, 512_000, false), (9000, 200_000, true)]
    {
        let (_, estimate) = policy(limit).round(&round(1000, 1000, remaining));
        assert_eq!(estimate.is_near(), near, "{limit} ms, {:?}", estimate.expected_downtime);
    }
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
    let decision =
        (0..100).map(|_| policy.round(&round(1000, 128, 65_536)).0).find(|d| !goes_on(d));
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
    fn it_always_ends_and_never_above_the_limit(
        rounds in prop::collection::vec((1u64..2000, 0u64..500, 0u64..500_000), 1..20),
        limit in 0u64..2000,
    ) {
        let mut policy = policy(limit);
        let mut time = Duration::ZERO;
        for (number, observed) in (0..200_000).zip(rounds.iter().cycle()) {
            let observed = round(observed.0, observed.1, observed.2);
            time += observed.time;
            let (decision, estimate) = policy.round(&observed);
            match decision {
                Decision::NextRound(_) => {}
                Decision::SwitchOver => {
                    let expected = estimate.expected_downtime.unwrap();
                    prop_assert!(expected <= Duration::from_millis(limit));
                    return Ok(());
                }
                Decision::GiveUp(_) => {
                    let hopeless = observed.fixed > Duration::from_millis(limit);
                    let late = time >= Duration::from_secs(60) || number >= MOST_ROUNDS;
                    prop_assert!(late || hopeless);
                    return Ok(());
                }
            }
        }
        prop_assert!(false, "no end after {time:?}");
    }
}

/// A guest of ten segments of which `hot` are rewritten all the time, as looks show it.
fn busy(hot: usize) -> Vec<u32> {
    (0..10).map(|segment| if segment < hot { 4096 } else { 0 }).collect()
}

fn adaptive_round(dirty: &[u32], throttle: f64) -> Round<'_> {
    Round {
        remaining: PageCount(dirty.iter().map(|count| u64::from(*count)).sum()),
        memory: PageCount(10 * 4096),
        dirty,
        throttle,
        ..round(1000, 40, 0)
    }
}

/// A policy with default settings that has seen three segments rewritten throughout the first
/// round.
fn throttled() -> Policy {
    throttled_at_most(Settings::default().max_throttle)
}

/// The same with a throttle that is no stronger than that.
fn throttled_at_most(max_throttle: f64) -> Policy {
    let mut policy = Policy::new(Settings { max_throttle, ..Settings::default() });
    let (none, hot) = (busy(0), busy(3));
    policy.tick(&Tick { in_round: Duration::from_millis(100), dirty: &none, ..Tick::default() });
    policy.tick(&Tick { in_round: Duration::from_millis(200), dirty: &hot, ..Tick::default() });
    policy.round(&adaptive_round(&hot, 0.0));
    policy
}

#[test]
fn what_is_rewritten_in_the_first_round_is_left_for_later_and_then_throttled() {
    let mut policy = Policy::new(Settings::default());
    policy.start(false);
    let (none, hot) = (busy(0), busy(3));
    let tick = Tick { in_round: Duration::from_millis(100), dirty: &none, ..Tick::default() };
    assert_eq!(policy.tick(&tick), None);
    let tick = Tick { in_round: Duration::from_millis(200), dirty: &hot, ..Tick::default() };
    assert_eq!(policy.tick(&tick).map(|plan| plan.delayed.count()), Some(3));
    let (decision, _) = policy.round(&adaptive_round(&hot, 0.0));
    let Decision::NextRound(plan) = decision else { panic!("{decision:?}") };
    assert!(plan.delayed.is_empty() && plan.throttle > 0.9, "{plan:?}");
}

#[test]
fn a_setting_changes_what_is_in_force_at_once_or_nothing() {
    let mut policy = throttled();
    let before = policy.plan().clone();
    assert!(policy.set("max-throttle", "100").is_err());
    assert_eq!((policy.plan(), policy.settings()), (&before, &Settings::default()));
    assert_eq!(policy.set("max-throttle", "50").map(|plan| plan.throttle), Ok(0.5));
    assert_eq!(policy.set("throttle", "off").map(|plan| plan.throttle), Ok(0.0));
}

#[test]
fn memory_waits_for_the_first_pass_over_disks_unless_told_otherwise() {
    assert_eq!(Policy::new(Settings::default()).start(true).memory_share, 0);
    assert_eq!(Policy::new(Settings::default()).start(false).memory_share, 1024);
    let told = Settings { memory_share: Some(100), ..Settings::default() };
    assert_eq!(Policy::new(told).start(true).memory_share, 100);
    assert_eq!(Policy::new(told).settings(), &told);
}

#[test]
fn disks_that_the_lowest_limit_does_not_help_end_a_migration_after_its_patience() {
    // Regression: for as long as disks had memory wait no throttle was put in force, so it was not
    // at its strongest, and five times the patience went by.
    let given_up_after = |disk_limit: &str| {
        let mut policy = Policy::new(Settings::default());
        policy.set("disk-limit", disk_limit).unwrap();
        (1..1000u64).find(|number| {
            // Blocks of 1 MiB of which a little is written; 16 MiB, and now and then a few less.
            let mib = if number % 4 == 0 { 13 } else { 16 };
            let disk = DiskStatistics {
                sent: ByteCount(16 * MIB),
                remaining: ByteCount(mib * MIB),
                written: ByteCount(2 * MIB),
                ..DiskStatistics::default()
            };
            let round = Round { disk: Some(disk), ..round(2000, 2, 1000) };
            !goes_on(&policy.round(&round).0)
        })
    };
    // Of 2 s each: a minute of patience behind the first few.
    let rounds = given_up_after("auto").unwrap();
    assert!((30..40).contains(&rounds), "{rounds}");
    // One that is fixed can be changed while it runs, which may be what the operator is about.
    let rounds = given_up_after("1MiB/s").unwrap();
    assert!(rounds > 60, "{rounds}");
}

#[test]
fn a_setting_of_something_else_leaves_the_throttle_in_force() {
    let mut policy = throttled();
    let throttle = policy.plan().throttle;
    assert!(throttle > 0.9, "{throttle}");
    assert_eq!(policy.set("downtime-limit", "200ms").map(|plan| plan.throttle), Ok(throttle));
}

#[test]
fn a_governor_that_is_lost_within_a_round_is_in_the_plan_no_more() {
    let mut policy = Policy::new(Settings::default());
    let (none, hot) = (busy(0), busy(3));
    let look = |ms, dirty| Tick {
        in_round: Duration::from_millis(ms),
        dirty,
        can_govern: true,
        ..Tick::default()
    };
    policy.tick(&look(100, &none));
    policy.tick(&look(200, &hot));
    policy.round(&Round { can_govern: true, ..adaptive_round(&hot, 0.0) });
    assert!(policy.plan().dirty_rate_limit.is_some(), "{:?}", policy.plan());
    policy.tick(&look(100, &hot));
    assert!(policy.plan().dirty_rate_limit.is_some(), "{:?}", policy.plan());
    policy.tick(&Tick { can_govern: false, ..look(200, &hot) });
    assert_eq!(policy.plan().dirty_rate_limit, None);
}

/// Segments with 2,500 pages, which take 250 ms.
const SOME: [u32; 10] = [1000, 800, 700, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn a_governor_that_is_lost_is_no_reason_for_a_round_for_less_downtime() {
    let governed = || {
        let mut policy = Policy::new(Settings::default());
        policy.plan.dirty_rate_limit = Some(1000.0);
        (policy.rounds, policy.shortening) = (1, true);
        policy
    };
    let mut policy = governed();
    policy.tick(&Tick { in_round: SECOND / 10, dirty: &SOME, ..Tick::default() });
    assert!(!policy.shortening && !policy.is_slowed());
    // Nor is the guest taken for one that is held at the end of a round.
    let mut policy = governed();
    policy.round(&adaptive_round(&SOME, 0.0));
    assert!(!policy.shortening && policy.shortenings == 0);
}

#[test]
fn a_throttled_guest_goes_through_another_round_that_spares_it_more() {
    let mut policy = throttled();
    let throttle = policy.plan().throttle;
    policy.plan.delayed = Delayed::new([0]);
    let (decision, estimate) = policy.round(&adaptive_round(&SOME, 0.99));
    // All of it is sent, and the throttle stays, though so little is left that none is needed.
    let Decision::NextRound(plan) = decision else { panic!("{decision:?}") };
    assert_eq!((plan.throttle, plan.delayed.count()), (throttle, 0));
    let times = estimate.remaining_time.unwrap();
    assert!(times.low < times.mid && times.mid < times.high, "{times:?}");
    // Nor does that round end before its time.
    let in_round = Duration::from_millis(100);
    let rest = [10, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let remaining = PageCount(10);
    policy.tick(&Tick { in_round, remaining, dirty: &rest, throttle, ..Tick::default() });
    assert_eq!(policy.plan().delayed.count(), 0);
    let short = Round { time: 3 * in_round, ..adaptive_round(&rest, 0.99) };
    assert_eq!(policy.round(&short).0, Decision::SwitchOver);
}

#[test]
fn in_a_round_for_less_downtime_the_throttle_stays_as_it_was() {
    let mut policy = throttled_at_most(0.6);
    policy.shortening = true;
    // More is left than promised, and a stronger throttle would be at hand.
    policy.settings.max_throttle = 0.99;
    let (in_round, remaining, hot) = (SECOND / 10, PageCount(3 * 4096), busy(3));
    let tick = Tick { in_round, remaining, dirty: &hot, throttle: 0.6, ..Tick::default() };
    policy.tick(&tick);
    assert_eq!(policy.plan().throttle, 0.6);
    // Behind an outage it is a round like any other, and with settings by which it may not be made.
    let mut changed = policy.clone();
    changed.change(changed.settings);
    policy.taken_up(in_round, &hot);
    for policy in [&mut policy, &mut changed] {
        policy.tick(&Tick { in_round: 2 * in_round, ..tick });
        assert!(policy.plan().throttle > 0.6);
    }
}

#[test]
fn a_throttled_guest_goes_through_three_such_rounds_at_most() {
    let mut policy = throttled();
    policy.without_progress = 59 * SECOND;
    assert!(goes_on(&policy.round(&adaptive_round(&SOME, 0.99)).0));
    assert_eq!(policy.without_progress, Duration::ZERO, "it could have been stopped");
    // Nothing is dirtied anew, and as much remains.
    let (time, sent) = (Duration::from_millis(250), ByteCount(10 * MIB));
    let round = Round { time, sent, ..adaptive_round(&SOME, 0.99) };
    let more = (0..10).take_while(|_| goes_on(&policy.round(&round).0)).count();
    assert_eq!(more, 2);
}

#[test]
fn a_round_that_left_too_much_after_all_is_followed_by_one_that_may_end_early() {
    let (mut policy, hot) = (throttled(), busy(3));
    assert!(goes_on(&policy.round(&adaptive_round(&SOME, 0.99)).0));
    assert!(goes_on(&policy.round(&adaptive_round(&hot, 0.99)).0));
    let (in_round, remaining) = (Duration::from_millis(200), PageCount(1280));
    policy.tick(&Tick { in_round, remaining, dirty: &busy(0), throttle: 0.99, ..Tick::default() });
    assert_eq!(policy.plan().delayed.count(), 10);
}

#[test]
fn a_throttled_guest_is_not_kept_beyond_the_time_in_which_it_may_hardly_work() {
    let mut policy = throttled();
    let (time, sent) = (Duration::from_millis(2600), ByteCount(104 * MIB));
    let long = Round { time, sent, ..adaptive_round(&SOME, 0.99) };
    assert_eq!(policy.round(&long).0, Decision::SwitchOver);
}

#[test]
fn a_guest_that_could_be_stopped_is_not_slowed_for_less() {
    // Regression: where the fixed costs alone are most of the limit, as over a long way, an idle
    // guest was throttled in the round that was made in search of the minimum.
    let mut policy = Policy::new(Settings::default());
    let few = [20, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let (fixed, in_round, remaining) = (Duration::from_millis(280), SECOND / 10, PageCount(20));
    let tick = |policy: &mut Policy, times| {
        let in_round = in_round * times;
        policy.tick(&Tick { in_round, remaining, dirty: &few, ..Tick::default() });
    };
    (1..10).for_each(|times| tick(&mut policy, times));
    for (can_govern, at_once) in [(true, true), (false, false)] {
        let mut policy = policy.clone();
        let (decision, _) = policy.round(&Round {
            fixed,
            can_govern,
            at_once,
            gap: SECOND / 5,
            ..adaptive_round(&few, 0.0)
        });
        assert!(goes_on(&decision) && !policy.is_slowed(), "{decision:?}");
        tick(&mut policy, 1);
        assert!(!policy.is_slowed(), "{:?}", policy.plan());
    }
}

#[test]
fn a_round_under_a_throttle_ends_when_what_remains_fits_into_the_downtime() {
    let (mut policy, none) = (throttled(), busy(0));
    let throttle = policy.plan().throttle;
    // 40 MiB/s: 10 MiB fit into 300 ms, 20 MiB do not.
    let passed_by = |policy: &mut Policy, in_round: u64, remaining: u64| {
        let in_round = Duration::from_millis(in_round);
        policy.tick(&Tick {
            in_round,
            remaining: PageCount(remaining),
            dirty: &none,
            throttle,
            ..Tick::default()
        });
        policy.plan().delayed.count()
    };
    assert!(passed_by(&mut policy, 100, 5120) < 10);
    assert_eq!(passed_by(&mut policy, 200, 1280), 10);
}

#[test]
fn the_limit_grows_to_its_ceiling_only_without_progress() {
    let settings = Settings {
        downtime_ceiling: Some(Duration::from_secs(3)),
        throttle: ThrottleMode::Off,
        ..Settings::default()
    };
    let mut policy = Policy::new(settings);
    let limits: Vec<Duration> =
        (0..4).map(|_| policy.round(&round(1000, 128, 65_536)).1.limit).collect();
    assert_eq!(limits[0..3], [Duration::from_millis(300); 3]);
    assert!(limits[3] > limits[2] && limits[3] < Duration::from_secs(3));
    let end = (0..100)
        .map(|_| policy.round(&round(1000, 128, 65_536)))
        .find(|(d, _)| !goes_on(d))
        .unwrap();
    assert_eq!(end.0, Decision::SwitchOver);
    assert!(end.1.expected_downtime <= Some(Duration::from_secs(3)));
}

#[test]
fn handing_over_alone_beyond_the_limit_is_told_soon() {
    let mut policy = policy(5);
    let rounds = (1..).find(|_| !goes_on(&policy.round(&round(100, 100, 0)).0));
    assert!(rounds.is_some_and(|rounds| rounds < 12), "{rounds:?}");
}
