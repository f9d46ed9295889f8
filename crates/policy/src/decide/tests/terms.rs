//! What the decision is made of, with the numbers of the documents (docs/convergence.md).

use crate::observe::DiskStatistics;
use crate::settings::DiskLimit;

use super::*;

#[test]
fn growth_is_what_is_clean_and_written_in_the_time() {
    let mut policy = Policy::new(Settings::default());
    let clean = |rate: f64| 600.0 * (1.0 - (-rate).exp());
    assert!(near(policy.growth(&CLASS, SECOND, 0.0), clean(1.0)));
    assert!(near(policy.growth(&CLASS, SECOND / 2, 0.0), clean(0.5)));
    assert!(near(policy.growth(&CLASS, SECOND, 0.75), clean(0.25)));
    let two = [CLASS[0], Class { rate: 2.0, ..CLASS[0] }];
    assert!(near(policy.growth(&two, SECOND, 0.0), clean(1.0) + clean(2.0)));
    // More dirty than there is counts for nothing.
    let odd = [Class { dirty: 1001.0, ..CLASS[0] }];
    assert_eq!(policy.growth(&odd, SECOND, 0.0), 0.0);
    // A governed guest makes no more dirty than it may.
    policy.plan.dirty_rate_limit = Some(100.0);
    assert_eq!(policy.growth(&CLASS, 2 * SECOND, 0.0), 200.0);
    assert!(near(policy.growth(&CLASS, SECOND / 10, 0.99), clean(0.001)));
}

#[test]
fn unseen_growth_goes_at_the_pace_since_the_harvests() {
    let mut policy = Policy::new(Settings::default());
    let round = Round {
        time: 3 * SECOND,
        idle: SECOND,
        remaining: PageCount(1000),
        lead: SECOND / 10,
        ..Round::default()
    };
    // Harvested half of 2 s of sending ago: 1,000 pages a second.
    assert!(near(policy.growth_at_most(&round), 100.0));
    // Harvested all at once: 3 s ago.
    assert!(near(policy.growth_at_most(&Round { at_once: true, ..round }), 1000.0 / 3.0 / 10.0));
    // What was never sent does not grow; what was left for later was looked at.
    let dirty = Round { dirty: &[300, 200, 50], ..round };
    assert!(near(policy.growth_at_most(&dirty), 55.0));
    policy.plan.delayed = Delayed::new([1]);
    assert!(near(policy.growth_at_most(&dirty), 35.0));
    policy.plan.dirty_rate_limit = Some(100.0);
    assert!(near(policy.growth_at_most(&dirty), 10.0));
    // A round of no length has none of any length before it.
    let short = Round {
        time: Duration::ZERO,
        idle: Duration::ZERO,
        lead: Duration::from_micros(1),
        ..round
    };
    assert!(near(policy.growth_at_most(&short), 1e-4));
}

#[test]
fn what_is_left_are_the_bytes_of_what_remains_and_grows() {
    let mut policy = Policy::new(Settings::default());
    policy.page_bytes = 2048.0;
    let round =
        Round { time: 2 * SECOND, remaining: PageCount(1000), lead: SECOND, ..Round::default() };
    let seen = 1000.0 + 600.0 * (1.0 - (-1.0_f64).exp());
    assert_eq!(policy.left(&CLASS, &round, true), ByteCount((seen * 2048.0) as u64));
    // Not looked at, at the pace since the harvests: 1,000 a second.
    assert_eq!(policy.left(&CLASS, &round, false), ByteCount(2000 * 2048));
    let slow = Round { time: 20 * SECOND, ..round };
    assert_eq!(
        policy.left(&CLASS, &slow, false),
        ByteCount((seen * 2048.0) as u64),
        "whichever is more"
    );
}

#[test]
fn the_limit_grows_in_eight_steps() {
    let ceiling = Some(Duration::from_millis(1100));
    let mut policy = Policy::new(Settings { downtime_ceiling: ceiling, ..Settings::default() });
    let mut limit = |step| {
        policy.step = step;
        policy.limit().as_millis()
    };
    assert_eq!([limit(0), limit(1), limit(4), limit(8)], [300, 400, 700, 1100]);
    // A ceiling that is below is none.
    let ceiling = Some(Duration::from_millis(100));
    let policy = Policy {
        step: 8,
        ..Policy::new(Settings { downtime_ceiling: ceiling, ..policy.settings })
    };
    assert_eq!(policy.limit().as_millis(), 300);
}

#[test]
fn plans_aim_at_85_percent_of_the_limit_less_what_is_fixed() {
    let mut policy = linked(Settings::default());
    policy.fixed = Duration::from_millis(55);
    // 255 ms − 55 ms at 1,000 pages a second.
    assert!(near(policy.enough(policy.bandwidth.average()), 200.0));
    policy.page_bytes = 2048.0;
    assert!(near(policy.enough(policy.bandwidth.average()), 400.0));
    policy.set("switchover-bandwidth", "40.96MB/s").unwrap();
    assert!(near(policy.enough(policy.bandwidth.average()), 4000.0));
    policy.fixed = SECOND;
    assert_eq!(policy.enough(policy.bandwidth.average()), 0.0);
}

#[test]
fn within_a_round_the_link_is_what_the_round_shows_after_half_a_second() {
    let policy = linked(Settings::default());
    let link = |ms, pages: u64| {
        let sent = PageCount(pages).bytes();
        (policy.link_within(Duration::from_millis(ms), sent).bytes_per_second() / 4096.0).round()
    };
    assert_eq!([link(500, 1000), link(1000, 700)], [2000.0, 700.0]);
    assert_eq!(link(499, 1000), 1000.0, "too soon");
    // Sending stood still for most of the time, or altogether.
    assert_eq!([link(1000, 200), link(1000, 199), link(1000, 0)], [200.0, 1000.0, 1000.0]);
    assert_eq!(Policy::new(Settings::default()).link_within(SECOND, ByteCount(0)), Rate::ZERO);
}

#[test]
fn there_is_time_for_twice_the_first_round_and_twice_that_without_a_throttle() {
    let mut policy = Policy::new(Settings::default());
    let mut times = |first: u64, clock: u64| {
        policy.first_round = SECOND * first as u32;
        let view = policy.view(&[], SECOND * clock as u32, PageCount(0), Rate::ZERO);
        (view.free_time, view.time_left)
    };
    // At least 10 s and 20 s; what has passed since the first round is used up.
    assert_eq!(times(3, 3), (20.0, 10.0));
    assert_eq!(times(3, 7), (16.0, 6.0));
    assert_eq!(times(3, 30), (-7.0, -17.0));
    assert_eq!(times(10, 11), (39.0, 19.0));
    policy.set("finish-within", "7s").unwrap();
    policy.first_round = 10 * SECOND;
    let view = policy.view(&[], 12 * SECOND, PageCount(0), Rate::ZERO);
    assert_eq!((view.free_time, view.time_left), (5.0, 5.0));
}

#[test]
fn what_no_class_knows_was_never_sent() {
    let mut policy = linked(Settings::default());
    policy.page_bytes = 2048.0;
    (policy.gap, policy.lead, policy.at_once) = (SECOND / 2, SECOND / 4, true);
    let view = policy.view(&CLASS, SECOND, PageCount(1400), policy.bandwidth.average());
    assert_eq!((view.remaining, view.unsent, view.bandwidth), (1400.0, 1000.0, 2000.0));
    assert_eq!((view.idle, view.lead, view.at_once, view.downtime), (0.5, 0.25, true, 0.3));
    assert!(!view.delaying);
    let view = policy.view(&CLASS, SECOND, PageCount(300), Rate::ZERO);
    assert_eq!(view.unsent, 0.0);
    policy.hot.look(&[4000, 0, 0, 0], 4096.0, 30);
    assert!(policy.view(&CLASS, SECOND, PageCount(300), Rate::ZERO).delaying);
}

#[test]
fn the_minimum_is_where_a_round_no_longer_brings_three_quarters() {
    let minimum = |remaining: u64, previous: Option<u64>, transfer_us: u64, searched: u32| {
        let mut policy = Policy { searched, ..Policy::new(Settings::default()) };
        let transfer = Duration::from_micros(transfer_us);
        policy.is_minimum(PageCount(remaining), previous.map(PageCount), transfer)
    };
    assert!(!minimum(749, Some(1000), 501, 0));
    assert!(minimum(750, Some(1000), 501, 0));
    assert!(!minimum(9999, None, 501, 0), "the first round is compared with nothing");
    assert!(minimum(1, Some(1000), 500, 0), "fixed costs dominate");
    assert!(!minimum(1, Some(1000), 501, 7));
    assert!(minimum(1, Some(1000), 501, 8), "eight rounds are enough");
}

/// A policy with `settings` whose guest has this `throttle` or budget, on a link of 1,000 pages a
/// second.
fn slowed(settings: Settings, throttle: f64, dirty_rate_limit: Option<f64>) -> Policy {
    let mut policy = linked(settings);
    policy.plan = Plan { throttle, dirty_rate_limit, ..Plan::default() };
    policy
}

/// Behind a round that left so many pages, of which the guest dirties so many a second: how many
/// milliseconds what another one leaves would take, if it is made.
fn shortened(policy: &Policy, left: u64, rate: f64, round: Round) -> Option<u128> {
    let round = Round { remaining: PageCount(left), throttle: policy.plan.throttle, ..round };
    let next = policy.shortened(&[], &round, rate, policy.bandwidth.average());
    next.map(|(_, next)| next.as_millis())
}

#[test]
fn a_round_may_cost_twice_the_work_that_it_spares() {
    let policy = slowed(Settings::default(), 0.9, None);
    let spares = |policy: &Policy, left, rate| shortened(policy, left, rate, Round::default());
    // 180 ms of its work are lost, and may spare it no less than 90.
    assert_eq!(spares(&policy, 200, 100.0), Some(10), "as old as half of the round");
    assert_eq!([spares(&policy, 200, 1090.0), spares(&policy, 200, 1110.0)], [Some(109), None]);
    assert_eq!([spares(&policy, 21, 0.0), spares(&policy, 19, 0.0)], [Some(0), None]);
    let at_once = Policy { at_once: true, ..policy.clone() };
    assert_eq!([spares(&at_once, 200, 540.0), spares(&at_once, 200, 560.0)], [Some(108), None]);
    // While nothing is sent work is lost, and what is written is sent in the round.
    let idle = Policy { gap: SECOND / 5, ..policy.clone() };
    assert_eq!([spares(&idle, 200, 190.0), spares(&idle, 200, 210.0)], [Some(19), None]);
    // What the model says of the round counts, if it is more.
    let known = [Class { pages: 1000.0, rate: 1000.0, dirty: 200.0 }];
    let round = Round { remaining: PageCount(200), throttle: 0.9, ..Round::default() };
    let bandwidth = policy.bandwidth.average();
    assert_eq!(policy.shortened(&known, &round, 0.0, bandwidth), None);
    // How fast it dirties under the throttle says nothing of what it loses of its work.
    let mut quick = policy.clone();
    quick.guest.set_memory(100_000);
    (1..9).for_each(|times| quick.guest.look(&[500 * times], SECOND / 2, 0.0));
    quick.guest.note(&[0]);
    (1..9).for_each(|times| quick.guest.look(&[400 * times], SECOND / 2, 0.9));
    assert!(quick.guest.speed(0.9) > 0.5, "{}", quick.guest.speed(0.9));
    assert_eq!([spares(&quick, 200, 1090.0), spares(&quick, 200, 1110.0)], [Some(109), None]);
}

#[test]
fn a_round_that_is_waited_for_costs_work_and_is_sent_at_the_pace_of_rounds() {
    let policy = slowed(Settings::default(), 0.9, None);
    // 100 ms on their way, in which it is dirtied as well: 270 ms of work may spare no less than
    // 135, so that 65 pages are left by no more than 325 a second.
    let afar = Round { round_trip: SECOND / 10, ..Round::default() };
    assert_eq!(shortened(&policy, 200, 324.0, afar), Some(64));
    assert_eq!(shortened(&policy, 200, 326.0, afar), None);
    // And by what the model says.
    let known = [Class { pages: 1000.0, rate: 0.5, dirty: 0.0 }];
    let round = Round { remaining: PageCount(200), throttle: 0.9, ..afar };
    let times = policy.shortened(&known, &round, 0.0, policy.bandwidth.average()).unwrap();
    assert_eq!((times.0.as_millis(), times.1.as_millis()), (305, 10));
    // The last round is ten times as fast, and spares a tenth.
    let fast = Settings {
        switchover_bandwidth: Some("40.96MB/s".parse().unwrap()),
        ..Settings::default()
    };
    let mut fast = slowed(fast, 0.9, None);
    assert_eq!(shortened(&fast, 1000, 0.0, Round::default()), None);
    fast.settings.switchover_bandwidth = None;
    assert_eq!(shortened(&fast, 1000, 0.0, Round::default()), Some(0));
}

#[test]
fn a_governed_guest_may_lose_all_of_its_work_and_dirties_as_much_as_it_may() {
    let governed = |limit| slowed(Settings::default(), 0.0, Some(limit));
    let spares = |policy: &Policy, rate| shortened(policy, 200, rate, Round::default());
    assert_eq!(spares(&governed(100.0), 50.0), Some(5));
    assert_eq!(spares(&governed(100.0), 1e9), Some(20), "twice its budget");
    let governed = governed(600.0);
    assert_eq!([spares(&governed, 990.0), spares(&governed, 1010.0)], [Some(99), None]);
}

#[test]
fn rounds_for_less_downtime_are_made_only_where_nothing_is_against_them() {
    let with = |settings| slowed(settings, 0.9, None);
    let policy = with(Settings::default());
    assert_eq!(shortened(&policy, 200, 0.0, Round::default()), Some(0));
    let mode = |throttle| Settings { throttle, ..Settings::default() };
    let soon = with(Settings { finish_within: Some(SECOND * 35 / 100), ..Settings::default() });
    for (fixed, made) in [(SECOND / 10, Some(0)), (SECOND / 5, None)] {
        let round = Round { fixed, ..Round::default() };
        assert_eq!(shortened(&soon, 200, 0.0, round), made, "{fixed:?}");
    }
    let never = [
        Policy { shortenings: 3, ..policy.clone() },
        Policy { disks: true, ..policy },
        with(mode(ThrottleMode::Direct)),
        with(mode(ThrottleMode::Staged)),
        with(mode(ThrottleMode::AutoConverge)),
        with(Settings { finish_within: Some(SECOND / 10), ..Settings::default() }),
    ];
    for policy in never {
        assert_eq!(shortened(&policy, 200, 0.0, Round::default()), None, "{:?}", policy.settings);
    }
}

#[test]
fn progress_is_a_downtime_that_is_5_percent_better_than_the_best() {
    let mut policy = Policy::new(Settings::default());
    let mut note = |expected: Option<u64>| {
        policy.note_progress(expected.map(Duration::from_millis), SECOND);
        (policy.without_progress.as_secs(), policy.stuck_rounds, policy.step)
    };
    assert_eq!(note(None), (0, 0, 0));
    assert_eq!(note(Some(1000)), (0, 0, 0), "better than unknown");
    assert_eq!(note(Some(951)), (1, 1, 0));
    // Against the best, not the last; the limit grows from the second such round on.
    assert_eq!([note(Some(2000)), note(Some(950))], [(2, 2, 1), (3, 3, 2)]);
    assert_eq!(note(Some(949)), (0, 0, 2));
    assert_eq!(policy.best, Some(Duration::from_millis(949)));
    (0..20).for_each(|_| policy.note_progress(None, SECOND));
    assert_eq!(policy.step, 8);
}

/// A policy that is `seconds` without progress, over `rounds`.
fn stuck(settings: Settings, seconds: u64, rounds: u32) -> Policy {
    let mut policy = Policy::new(settings);
    (policy.without_progress, policy.stuck_rounds) = (Duration::from_secs(seconds), rounds);
    policy
}

#[test]
fn patience_is_a_minute_and_three_rounds() {
    let hopeless = |seconds, rounds| stuck(OFF(), seconds, rounds).is_hopeless();
    assert_eq!([hopeless(60, 3), hopeless(59, 3), hopeless(60, 2)], [true, false, false]);
    // Or a thousand rounds, however short.
    assert_eq!([hopeless(1, 1000), hopeless(1, 999)], [true, false]);
    let endless = Settings { patience: None, ..OFF() };
    assert!(!stuck(endless, 1_000_000, 1_000_000).is_hopeless());
}

#[test]
fn what_may_still_help_is_waited_for_five_times_as_long() {
    let growing = Settings { downtime_ceiling: Some(SECOND), ..OFF() };
    let at_step =
        |step, seconds, rounds| Policy { step, ..stuck(growing, seconds, rounds) }.is_hopeless();
    assert_eq!([at_step(7, 60, 3), at_step(8, 60, 3)], [false, true]);
    assert_eq!(
        [at_step(7, 300, 12), at_step(7, 299, 12), at_step(7, 300, 11)],
        [true, false, false]
    );
    // A limit of disk writes that may fall further.
    let mut disks = stuck(OFF(), 60, 3);
    let disk = DiskStatistics { remaining: ByteCount(1 << 30), ..DiskStatistics::default() };
    disks.share.round(&disk, 1.0, 0.0, DiskLimit::Auto);
    disks.share.round(&disk, 1.0, 0.0, DiskLimit::Auto);
    assert!(!disks.is_hopeless());
    disks.settings.disk_limit = DiskLimit::Off;
    assert!(disks.is_hopeless());
}

#[test]
fn a_handover_above_the_limit_is_hopeless_after_eight_rounds() {
    let hopeless = |fixed_ms, rounds, ceiling: Option<Duration>| {
        let settings = Settings { downtime_ceiling: ceiling, ..OFF() };
        let fixed = Duration::from_millis(fixed_ms);
        Policy { fixed, ..stuck(settings, 0, rounds) }.is_hopeless()
    };
    assert_eq!(
        [hopeless(301, 8, None), hopeless(300, 8, None), hopeless(301, 7, None)],
        [true, false, false]
    );
    assert!(!hopeless(301, 8, Some(SECOND)), "the limit may grow");
}

#[test]
fn before_the_strongest_throttle_is_in_force_it_is_not_hopeless() {
    let class = [Class { pages: 1000.0, rate: 600.0, dirty: 1000.0 }];
    let under = |most: f64, max_throttle: f64| {
        let settings =
            Settings { throttle: ThrottleMode::Vcpus, max_throttle, ..Settings::default() };
        let mut policy = Policy { at_once: true, ..stuck(settings, 60, 3) };
        policy.bandwidth.observe(PageCount(1000).bytes(), SECOND);
        let mut throttle = policy.throttle.clone();
        let view = policy.view(&class, SECOND, PageCount(1000), policy.bandwidth.average());
        // No throttle finishes that: the most that is allowed is taken.
        throttle.round(ThrottleMode::Vcpus, &View { most, ..view }, SECOND);
        policy.throttle = throttle;
        (policy.throttle.value(), policy.is_hopeless())
    };
    assert_eq!(
        [under(0.97, 0.99).1, under(0.98, 0.99).1, under(0.99, 0.99).1],
        [false, true, true]
    );
    assert_eq!(under(0.5, 0.5), (0.5, true));
    assert!(!under(0.4, 0.5).1);
}

#[test]
fn a_governor_in_force_is_waited_for_unless_it_grants_the_least() {
    let hopeless = |throttle, pages_a_second| {
        let mut policy = stuck(Settings { throttle, ..Settings::default() }, 60, 3);
        policy.bandwidth.observe(PageCount(pages_a_second).bytes(), SECOND);
        let mut governor = policy.governor.clone();
        let view = policy.view(&CLASS, SECOND, PageCount(1000), policy.bandwidth.average());
        governor.round(&view, true, true);
        policy.governor = governor;
        policy.is_hopeless()
    };
    assert!(
        stuck(Settings { throttle: ThrottleMode::Governor, ..Settings::default() }, 60, 3)
            .is_hopeless(),
        "there is none"
    );
    for mode in [ThrottleMode::Governor, ThrottleMode::Adaptive] {
        assert!(!hopeless(mode, 100_000));
        // Half of this link.
        assert!(hopeless(mode, 1000));
    }
}

#[test]
fn the_remaining_time_is_rounds_and_the_last_one_with_bounds() {
    let mut policy = linked(Settings::default());
    policy.fixed = Duration::from_millis(55);
    let bandwidth = policy.bandwidth.average();
    // Nothing is dirtied: 3,000 pages that were never sent, at 1,000 a second, then the 200 that
    // may be left, and what is fixed.
    let view = policy.view(&[], SECOND, PageCount(3000), bandwidth);
    let time = policy.remaining_time(&view, 0.0, bandwidth).unwrap();
    assert!(near(time.mid.as_secs_f64(), 3.255), "{time:?}");
    // A link that is 15 % faster or slower.
    assert!(near(time.low.as_secs_f64(), 3.2 / 1.15 + 0.055), "{time:?}");
    assert!(near(time.high.as_secs_f64(), 3.2 / 0.85 + 0.055), "{time:?}");
    // With less left than may be, that.
    let view = policy.view(&[], SECOND, PageCount(100), bandwidth);
    let time = policy.remaining_time(&view, 0.0, bandwidth).unwrap();
    assert!(near(time.mid.as_secs_f64(), 0.155), "{time:?}");
    assert_eq!(policy.remaining_time(&view, 0.0, Rate::ZERO), None);
}

#[test]
fn a_guest_that_is_a_quarter_busier_may_take_far_longer() {
    let mut policy = linked(Settings::default());
    (policy.fixed, policy.at_once) = (Duration::from_millis(55), true);
    let bandwidth = policy.bandwidth.average();
    let time = |rate: f64, throttle: f64| {
        let class = [Class { pages: 1000.0, rate, dirty: 1000.0 }];
        let view = policy.view(&class, SECOND, PageCount(1000), bandwidth);
        policy.remaining_time(&view, throttle, bandwidth)
    };
    // A throttle of 80 %: 1000 · (1 − e^(−0.2 · 1.1)) = 197.5, after one round. A quarter busier,
    // on a slower link, it takes several.
    let one = time(1.1, 0.8).unwrap();
    assert!(near(one.mid.as_secs_f64(), 1.255), "{one:?}");
    assert!(near(one.low.as_secs_f64(), 1.2 / 1.15 + 0.055), "{one:?}");
    let second = 1.0 - (-0.2 * 1.25 * 1.1 / 0.85_f64).exp();
    assert!(near(one.high.as_secs_f64(), (1.2 + second) / 0.85 + 0.055), "{one:?}");
    // Where the busier one does not finish at all, three times as long.
    let three = time(4.4, 0.8).unwrap();
    assert!(near(three.high.as_secs_f64(), 3.0 * three.mid.as_secs_f64()), "{three:?}");
    assert_eq!(time(60.0, 0.8), None);
}

#[test]
fn advice_names_the_throttle_that_did_not_suffice() {
    let estimate = Policy::new(OFF()).round(&round(1000, 128, 65_536)).1;
    let advice = throttled().advice(&estimate, 0.2);
    assert!(advice.throttle > 0.9, "what is in force now: {advice:?}");
    let advice = Policy::new(OFF()).advice(&estimate, 0.2);
    assert_eq!((advice.throttle, advice.best, advice.limit), (0.2, Duration::ZERO, estimate.limit));
}

#[test]
fn what_is_dirty_again_after_a_round_is_written_while_all_is_sent() {
    let policy = linked(Settings::default());
    let again = |classes: &[Class], pages, throttle| {
        policy.again(classes, PageCount(pages).bytes(), policy.bandwidth.average(), throttle)
    };
    let after = |writes: f64| 1000.0 * (1.0 - (-writes).exp());
    assert!(near(again(&CLASS, 2000, 0.0), after(2.0)));
    assert!(near(again(&CLASS, 2000, 0.75), after(0.5)));
    let two = [CLASS[0], Class { rate: 3.0, ..CLASS[0] }];
    assert!(near(again(&two, 500, 0.0), after(0.5) + after(1.5)));
    assert_eq!(again(&CLASS, 0, 0.0), 0.0);
}
