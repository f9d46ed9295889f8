//! What rounds and ticks make of what is seen, up to the plan.

use crate::observe::DiskStatistics;

use super::*;

#[test]
fn an_estimate_is_what_the_round_showed() {
    let mut policy = Policy::new(OFF());
    let disk = DiskStatistics { sent: ByteCount(50 * MIB), ..DiskStatistics::default() };
    // 50 MiB of memory and as much of disks in a second of sending; 100 MiB are 25,600 pages.
    let seen = Round { idle: SECOND, disk: Some(disk), ..round(2000, 50, 25_600) };
    let (_, estimate) = policy.round(&seen);
    assert_eq!(estimate.bandwidth.to_string(), "100MiB/s");
    assert_eq!(estimate.dirty_rate.to_string(), "50MiB/s", "over all of the round");
    assert_eq!(estimate.expected_downtime, Some(Duration::from_millis(1010)));
    // Disks are counted in full beside memory: 95 MiB at 95 % of 100 MiB/s.
    let disk =
        DiskStatistics { sent: ByteCount(100 * MIB), remaining: ByteCount(95 * MIB), ..disk };
    let mut policy = Policy::new(OFF());
    let (_, estimate) = policy.round(&Round { disk: Some(disk), ..round(1000, 0, 0) });
    assert_eq!(estimate.expected_downtime.map(|time| time.as_millis()), Some(1010));
}

#[test]
fn pages_that_are_compressed_take_less_of_the_downtime() {
    let expected = |pages: u64| {
        let mut policy = Policy::new(OFF());
        let sent = ByteCount(pages * 1024);
        let seen = Round { sent, pages: PageCount(pages), ..round(1, 0, 1000) };
        (policy.round(&seen).1.expected_downtime.unwrap().as_secs_f64() * 1e5).round() / 100.0
    };
    // 1,000 pages of 1 KiB each, at 1,024 of them in a millisecond; and the fixed ten.
    assert_eq!(expected(1024), 10.98);
    // 1,000 whole ones at 255 KiB in a millisecond; of 256 pages it is believed.
    assert_eq!([expected(255), expected(256)], [25.69, 13.91]);
}

#[test]
fn what_became_dirty_in_a_round_is_added_up_over_its_looks() {
    let mut policy = Policy::new(OFF());
    let looks: [[u32; 2]; 3] = [[100, 0], [300, 50], [20, 60]];
    for (number, dirty) in (1..).zip(&looks) {
        let in_round = Duration::from_millis(100 * number);
        policy.tick(&Tick { in_round, dirty, ..Tick::default() });
    }
    // 100 + 200 + 20 after a harvest, 50 + 10; and 80 + 40 at the end.
    let (_, estimate) = policy.round(&Round { dirty: &[100, 100], ..round(2000, 100, 200) });
    assert_eq!(estimate.dirty_rate.bytes_per_second(), 500.0 / 2.0 * 4096.0);
    // The next round begins at nothing.
    let (_, estimate) = policy.round(&Round { dirty: &[100, 120], ..round(1000, 100, 200) });
    assert_eq!(estimate.dirty_rate.bytes_per_second(), 20.0 * 4096.0);
}

#[test]
fn a_look_without_time_since_the_last_one_changes_nothing() {
    let mut policy = Policy::new(Settings::default());
    let tick = |ms, dirty| Tick { in_round: Duration::from_millis(ms), dirty, ..Tick::default() };
    assert_eq!(policy.tick(&tick(0, &[4000, 0, 0, 0])), None);
    assert!(policy.tick(&tick(100, &[4000, 0, 0, 0])).is_some());
    // A second look at the same time, or one that came late, is passed over.
    assert_eq!(policy.tick(&tick(100, &[0, 0, 0, 0])), None);
    assert_eq!(policy.tick(&tick(50, &[0, 0, 0, 0])), None);
    assert_eq!(policy.dirtied, 4000.0);
}

#[test]
fn a_delay_that_is_forbidden_ends_and_other_settings_leave_it() {
    let mut policy = Policy::new(Settings::default());
    let hot = busy(3);
    policy.tick(&Tick { in_round: SECOND, dirty: &hot, ..Tick::default() });
    assert_eq!(policy.plan().delayed.count(), 3);
    assert_eq!(policy.set("max-delay", "7").map(|plan| plan.delayed.count()), Ok(3));
    assert_eq!(policy.set("delay-hot-percent", "0").map(|plan| plan.delayed.count()), Ok(0));
    assert_eq!(policy.set("memory-share", "77").map(|plan| plan.memory_share), Ok(77));
}

#[test]
fn a_delay_ends_when_a_tenth_of_memory_remains() {
    let delayed = |remaining: u64| {
        let mut policy = Policy::new(OFF());
        let dirty = [4000, 2500, 2500, 0];
        let seen = Round { memory: PageCount(16_384), dirty: &dirty, ..round(1000, 1, remaining) };
        let Decision::NextRound(plan) = policy.round(&seen).0 else { panic!("it goes on") };
        plan.delayed.count()
    };
    assert_eq!([delayed(1639), delayed(1638)], [1, 0]);
}

#[test]
fn a_guest_is_not_throttled_while_memory_waits_for_disks() {
    let plan = |disk: DiskStatistics| {
        let mut policy = throttled();
        let hot = busy(3);
        let Decision::NextRound(plan) =
            policy.round(&Round { disk: Some(disk), ..adaptive_round(&hot, 0.9) }).0
        else {
            panic!("it goes on")
        };
        (plan.memory_share, plan.throttle > 0.0)
    };
    let much = DiskStatistics {
        remaining: ByteCount(1 << 40),
        sent: ByteCount(1 << 20),
        ..DiskStatistics::default()
    };
    assert_eq!(plan(DiskStatistics { full_pass: true, ..much }), (0, false));
    assert_eq!(plan(much), (1, false));
    // When disks have as good as nothing left, memory is what is waited for.
    assert_eq!(plan(DiskStatistics { remaining: ByteCount(4096), ..much }), (1024, true));
}

#[test]
fn disks_that_fill_half_of_what_fits_are_little() {
    let share = |remaining: u64| {
        let mut policy = Policy::new(OFF());
        let disk = |remaining: u64| DiskStatistics {
            remaining: ByteCount(remaining),
            sent: ByteCount(50 * MIB),
            ..DiskStatistics::default()
        };
        // 100 MiB/s with memory: 24.5 MiB in 245 ms, which is 85 % of the limit less 10 ms.
        let seen = |disk| Round { disk: Some(disk), ..round(1000, 50, 1 << 20) };
        policy.round(&seen(disk(100 * MIB)));
        let Decision::NextRound(plan) = policy.round(&seen(disk(remaining))).0 else {
            panic!("it goes on")
        };
        plan.memory_share
    };
    assert_eq!([share(12 * MIB), share(13 * MIB)], [1024, 890]);
}

#[test]
fn a_round_ends_within_it_when_what_remains_fits_into_85_percent_of_the_limit() {
    let mut policy = linked(Settings::default());
    policy.fixed = Duration::from_millis(55);
    policy.plan.throttle = 0.9;
    let ends = |policy: &Policy, remaining: u64| {
        policy.may_end_round(&Tick { remaining: PageCount(remaining), ..Tick::default() })
    };
    // 200 ms of sending at 1,000 pages a second.
    assert_eq!([ends(&policy, 199), ends(&policy, 201)], [true, false]);
    let with = |change: fn(&mut Policy)| {
        let mut policy = policy.clone();
        change(&mut policy);
        ends(&policy, 199)
    };
    assert!(!with(|policy| policy.plan.throttle = 0.0), "a guest that is not slowed may wait");
    assert!(with(
        |policy| (policy.plan.throttle, policy.plan.dirty_rate_limit) = (0.0, Some(500.0))
    ));
    assert!(!with(|policy| policy.disks = true), "disks have a round of their own");
    assert!(!with(|policy| policy.at_once = true), "nothing is left to pass by");
    policy.page_bytes = 2048.0;
    assert_eq!([ends(&policy, 399), ends(&policy, 401)], [true, false]);
}

#[test]
fn what_becomes_dirty_meanwhile_keeps_a_round_from_ending() {
    let mut policy = linked(Settings::default());
    policy.plan.throttle = 0.9;
    for look in [0, 512, 768, 896] {
        policy.guest.look(&[look], SECOND, 0.0);
    }
    // 128 clean pages of the 1,024, each written 2/3 times a second at full speed.
    let ends = |policy: &Policy, throttle| {
        policy.may_end_round(&Tick { remaining: PageCount(250), throttle, ..Tick::default() })
    };
    assert!(ends(&policy, 0.0));
    policy.lead = SECOND / 10;
    assert!(!ends(&policy, 0.0), "8 pages in 100 ms");
    assert!(ends(&policy, 0.9), "0.8 pages at a tenth of its speed");
}

#[test]
fn only_a_guest_that_hardly_runs_is_spared_and_93_percent_of_the_limit_are_used() {
    let mut policy = linked(Settings::default());
    policy.fixed = Duration::from_millis(55);
    // Ten segments with 100 dirty pages that rest.
    policy.guest.look(&[100; 10], Duration::ZERO, 0.0);
    policy.guest.note(&[100; 10]);
    let spared = |policy: &Policy, throttle: f64, change: fn(&mut View)| {
        let mut view = policy.view(&[], SECOND, PageCount(1000), policy.bandwidth.average());
        view.unsent = 0.0;
        change(&mut view);
        policy.spared(&view, throttle).map(|spared| spared.count())
    };
    // 200 pages by the aim, 218 by the last round's: two segments.
    assert_eq!(spared(&policy, 0.9, |_| ()), Some(2));
    assert_eq!(spared(&policy, 0.9, |view| view.enough = 274.0), Some(2));
    assert_eq!(spared(&policy, 0.9, |view| view.enough = 275.0), Some(3));
    assert_eq!(spared(&policy, 0.89, |_| ()), None);
    assert_eq!(spared(&policy, 0.9, |view| view.delaying = true), None);
    assert_eq!(spared(&policy, 0.9, |view| view.at_once = true), None);
    policy.settings.throttle = ThrottleMode::Staged;
    assert_eq!(spared(&policy, 0.9, |_| ()), None);
    policy.settings.throttle = ThrottleMode::Vcpus;
    assert_eq!(spared(&policy, 0.9, |_| ()), Some(2));
}

#[test]
fn the_first_round_is_the_first() {
    let mut policy = Policy::new(OFF());
    policy.round(&round(2000, 128, 65_536));
    policy.round(&round(5000, 128, 65_536));
    assert_eq!((policy.first_round, policy.clock), (2 * SECOND, 7 * SECOND));
}

#[test]
fn without_looks_within_the_round_growth_is_taken_from_the_harvests() {
    let expected = |looked: bool| {
        let mut policy = Policy::new(OFF());
        if looked {
            policy.tick(&Tick { in_round: SECOND / 10, ..Tick::default() });
        }
        // 1,024 pages a second; 1,000 remain, harvested half a round ago.
        let seen = Round { lead: SECOND / 10, ..round(2000, 8, 1000) };
        let bytes = policy.round(&seen).1.expected_downtime.unwrap().as_secs_f64() - 0.01;
        (bytes * 1024.0).round()
    };
    // 1,000 pages a second, for 100 ms; what was looked at is known to grow by less.
    assert_eq!(expected(false), 1100.0);
    assert_eq!(expected(true), 1085.0);
}

#[test]
fn pages_take_no_more_than_twice_their_size_and_no_less_than_16_bytes() {
    let page_bytes = |sent| {
        let mut policy = Policy::new(OFF());
        let seen = Round { sent: ByteCount(sent), pages: PageCount(300), ..round(1000, 0, 1000) };
        policy.round(&seen);
        policy.page_bytes
    };
    assert_eq!(
        [page_bytes(300 * 100_000), page_bytes(300), page_bytes(300 * 77)],
        [8192.0, 16.0, 77.0]
    );
}

#[test]
fn time_passes_within_a_round_too() {
    let settings = Settings { throttle: ThrottleMode::Direct, ..Settings::default() };
    let mut policy = Policy::new(settings);
    (0..2).for_each(|_| {
        policy.round(&round(1000, 128, 65_536));
    });
    let mut throttle_at = |seconds: u32| {
        policy.tick(&Tick {
            in_round: seconds * SECOND,
            remaining: PageCount(65_536),
            ..Tick::default()
        });
        policy.plan().throttle
    };
    assert_eq!([throttle_at(1), throttle_at(2), throttle_at(3)], [0.9, 0.9, 0.99]);
}

#[test]
fn auto_converge_counts_in_pages_whatever_they_take_on_the_wire() {
    let throttle = |dirtied: u64| {
        let settings = Settings { throttle: ThrottleMode::AutoConverge, ..Settings::default() };
        let mut policy = Policy::new(settings);
        // 1,024 pages, in half of their bytes.
        let seen = Round { pages: PageCount(1024), ..round(1000, 2, dirtied) };
        (0..2).for_each(|_| drop(policy.round(&seen)));
        policy.plan().throttle
    };
    assert_eq!([throttle(512), throttle(513)], [0.0, 0.2]);
}

#[test]
fn a_guest_that_is_throttled_is_not_handed_over_to_the_governor() {
    let mut policy = throttled();
    assert!(policy.plan().throttle > 0.9);
    let hot = busy(3);
    policy.round(&Round { can_govern: true, ..adaptive_round(&hot, 0.9) });
    assert_eq!(policy.plan().dirty_rate_limit, None);
    assert!(policy.plan().throttle > 0.9);
}
