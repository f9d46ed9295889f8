//! Who gets the link, and how far disk writes are limited, in numbers.

use super::*;
use godwit_units::ByteCount;

fn disk(full_pass: bool, remaining: u64) -> DiskStatistics {
    DiskStatistics {
        full_pass,
        remaining: ByteCount(remaining),
        written: ByteCount(100 << 20),
        ..DiskStatistics::default()
    }
}

#[test]
fn memory_waits_for_the_full_pass_and_then_gets_more_and_more() {
    let mut share = Share::default();
    let shares: Vec<u16> = [(true, 9000), (false, 4096), (false, 2048), (false, 1024), (false, 10)]
        .map(|(full, remaining)| share.round(&disk(full, remaining), 1.0, 100.0, DiskLimit::Off).0)
        .into();
    assert_eq!(shares, [0, 1, 512, 768, 1024]);
}

/// A limit that goes on falling would end at nothing, and hold a guest's disks still.
#[test]
fn no_limit_is_below_a_mebibyte_a_second() {
    let mut share = Share::default();
    let mut limits = || share.round(&disk(false, 1 << 30), 1.0, 0.0, DiskLimit::Auto).1;
    let last = (0..100).filter_map(|_| limits()).last().unwrap();
    assert_eq!(last.bytes_per_second(), 1_048_576.0);
}

#[test]
fn writes_are_limited_further_with_each_round_that_does_not_shrink() {
    let mut share = Share::default();
    let mut limits = |remaining| share.round(&disk(false, remaining), 1.0, 0.0, DiskLimit::Auto).1;
    assert_eq!(limits(1000), None);
    assert_eq!(limits(990).unwrap().to_string(), "70MiB/s");
    assert_eq!(limits(990).unwrap().to_string(), "49MiB/s");
    assert_eq!(limits(500).unwrap().to_string(), "49MiB/s");
    assert_eq!(Share::at_first(true), 0);
}

#[test]
fn a_limit_is_lowered_from_what_the_guest_writes_under_it() {
    let mut share = Share::default();
    let mut limits = |written: u64| {
        let disk = DiskStatistics { written: ByteCount(written << 20), ..disk(false, 1000 << 20) };
        share.round(&disk, 1.0, 0.0, DiskLimit::Auto).1.map(|limit| limit.to_string())
    };
    assert_eq!(limits(100), None);
    assert_eq!(limits(100).unwrap(), "70MiB/s");
    assert_eq!(limits(20).unwrap(), "14MiB/s", "49 MiB/s would not have been felt");
}

#[test]
fn where_storage_is_slow_the_limit_is_loosened_as_far_as_rounds_still_halve() {
    let mut share = Share::default();
    // 100 MiB/s are written, which make twice as much dirty; storage is read at `sent` MiB/s.
    let mut limits = |sent: u64, written: u64, waited: u64| {
        let disk = DiskStatistics {
            full_pass: false,
            sent: ByteCount(sent << 20),
            remaining: ByteCount((2 * written) << 20),
            written: ByteCount(written << 20),
            storage: Duration::from_millis(waited),
        };
        share.transfer(&disk, Duration::from_secs(1), Duration::ZERO);
        let (_, limit) = share.round(&disk, 1.0, 0.0, DiskLimit::Auto);
        limit.map(|limit| (limit.bytes_per_second() / 1_048_576.0).round())
    };
    assert_eq!(limits(200, 100, 900), None, "the first incremental round");
    assert_eq!(limits(200, 100, 900), Some(70.0));
    // At 50 MiB/s of writes half of the 200 MiB/s would become dirty: no lower than that.
    assert_eq!(limits(200, 98, 900), Some(50.0));
    // Storage has become quicker: 20 MiB/s more would halve as well.
    assert_eq!(limits(280, 50, 900), Some(70.0));
    // Held up by the link, it is not loosened.
    assert_eq!(limits(400, 40, 100), Some(70.0));
}

#[test]
fn a_guest_that_writes_little_is_not_limited_because_memory_takes_its_time() {
    let mut share = Share::default();
    let second = Duration::from_secs(1);
    // 100 MiB in a second is what the link carries.
    let sent = DiskStatistics { sent: ByteCount(100 << 20), ..disk(true, 0) };
    share.transfer(&sent, second, Duration::ZERO);
    let mut limit =
        |remaining: u64| share.round(&disk(false, remaining << 20), 2.0, 0.0, DiskLimit::Auto).1;
    // 10 MiB/s are dirtied: not less from round to round, and no reason to worry.
    assert_eq!([limit(20), limit(20), limit(21)], [None; 3]);
    // 40 MiB/s are.
    assert!(limit(80).is_some());
}

#[test]
fn limits_may_be_forbidden_or_given() {
    let rate = Rate::from_bytes_per_second(1e6);
    for (allowed, limit) in [(DiskLimit::Off, None), (DiskLimit::Fixed(rate.into()), Some(rate))] {
        let mut share = Share::default();
        share.round(&disk(false, 1000), 1.0, 0.0, allowed);
        assert_eq!(share.round(&disk(false, 1000), 1.0, 0.0, allowed).1, limit);
    }
}
/// Disks of which `sent` MiB were sent and `remaining` MiB remain.
fn mib(sent: u64, remaining: u64) -> DiskStatistics {
    DiskStatistics {
        sent: ByteCount(sent << 20),
        remaining: ByteCount(remaining << 20),
        ..DiskStatistics::default()
    }
}

const SECOND: Duration = Duration::from_secs(1);

/// Whole milliseconds.
fn millis(time: Option<Duration>) -> Option<u128> {
    time.map(|time| time.as_millis())
}

#[test]
fn the_transfer_of_disks_is_what_remains_and_grows_at_their_best_rate() {
    let mut share = Share::default();
    assert_eq!(share.transfer(&mib(0, 100), SECOND, Duration::ZERO), None, "nothing is known");
    assert_eq!(share.transfer(&mib(0, 0), SECOND, SECOND), Some(Duration::ZERO));
    // 95 MiB at 95 % of 100 MiB/s.
    assert_eq!(millis(share.transfer(&mib(200, 95), 2 * SECOND, Duration::ZERO)), Some(1000));
    // As much again becomes dirty in a lead as long as the round, half in one half as long.
    let half = share.transfer(&mib(200, 95), 2 * SECOND, SECOND);
    assert_eq!(millis(half), Some(1500));
    // A round of next to no time does not make it endless.
    let short = share.transfer(&mib(0, 95), Duration::from_millis(1), SECOND);
    assert_eq!(millis(short), Some(101_000));
    assert_eq!(millis(share.transfer(&mib(0, 95), Duration::ZERO, SECOND)), Some(1000));
}

#[test]
fn the_best_rate_of_disks_is_forgotten_slowly() {
    let rate_after = |sent: u64| {
        let mut share = Share::default();
        share.transfer(&mib(100, 0), SECOND, Duration::ZERO);
        let disk = DiskStatistics { sent: ByteCount(sent), ..mib(0, 0) };
        share.transfer(&disk, SECOND, Duration::ZERO);
        (share.rate / 1_048_576.0 * 100.0).round() / 100.0
    };
    assert_eq!(rate_after(200 << 20), 200.0);
    // Most rounds send memory as well, and 2 % are forgotten with each.
    assert_eq!(rate_after(1 << 20), 98.0);
    // What is under a MiB says nothing.
    assert_eq!(rate_after((1 << 20) - 1), 100.0);
}

#[test]
fn half_of_what_fits_into_the_downtime_is_little() {
    let mut share = Share::default();
    let mut part = |remaining: u64, enough: f64| {
        share.round(&disk(false, remaining), 1.0, enough, DiskLimit::Off).0
    };
    assert_eq!(part(4000, 100.0), 1);
    assert_eq!(part(3000, 5999.0), 256);
    assert_eq!(part(3000, 6000.0), 1024);
    // The first round counts as the first, though all was little.
    let mut share = Share::default();
    share.round(&disk(false, 4000), 1.0, 1e9, DiskLimit::Off);
    assert_eq!(share.round(&disk(false, 2000), 1.0, 100.0, DiskLimit::Off).0, 512);
}

#[test]
fn disks_in_balance_let_memory_have_twice_as_much_each_round() {
    let mut share = Share::default();
    let mut part = |remaining| share.round(&disk(false, remaining), 1.0, 0.0, DiskLimit::Off).0;
    assert_eq!([1000, 1000, 901, 1000].map(&mut part), [1, 2, 101, 8]);
    // Nine tenths are clearly less: it begins again.
    assert_eq!([900, 811, 811].map(&mut part), [102, 193, 193]);
    let parts: Vec<u16> = (0..9).map(|_| part(1000)).collect();
    assert_eq!(parts, [8, 16, 32, 64, 128, 256, 512, 1024, 1024]);
}

#[test]
fn a_lower_limit_helps_only_against_what_the_guest_writes() {
    let stuck = Share { stuck: 1, ..Share::default() };
    assert!(stuck.may_lower(DiskLimit::Auto));
    assert!(!stuck.may_lower(DiskLimit::Off));
    assert!(!Share::default().may_lower(DiskLimit::Auto));
    assert!(!Share { harmless: true, ..stuck.clone() }.may_lower(DiskLimit::Auto));
    assert!(!Share { halving: true, ..stuck.clone() }.may_lower(DiskLimit::Auto));
    // A limit can be lowered down to a MiB a second.
    let at = |bytes| Share { limit: Some(Rate::from_bytes_per_second(bytes)), ..stuck.clone() };
    assert!(at(LEAST + 1.0).may_lower(DiskLimit::Auto));
    assert!(!at(LEAST).may_lower(DiskLimit::Auto));
}

#[test]
fn dirtying_a_quarter_of_what_could_be_sent_is_harmless() {
    let mut share = Share { rate: 1000.0, ..Share::default() };
    let mut harmless = |remaining| {
        share.round(&disk(false, remaining), 2.0, 0.0, DiskLimit::Off);
        share.harmless
    };
    assert_eq!([499, 500].map(&mut harmless), [true, false]);
}

#[test]
fn storage_that_is_waited_for_over_half_of_a_round_is_what_is_slow() {
    // 100 MiB written make 200 MiB dirty; half of the 200 MiB sent a second are 50 MiB/s of writes.
    let limit = |storage: u64, before: Option<f64>| {
        let mut share = Share { stuck: 1, limit: before.map(mib_a_second), ..Share::default() };
        let disk = DiskStatistics {
            written: ByteCount(200 << 20),
            storage: Duration::from_millis(storage),
            ..mib(400, 400)
        };
        let limit = share.adapted(&disk, 2.0).map(|rate| rate.bytes_per_second() / 1_048_576.0);
        (limit.map(f64::round), share.halving)
    };
    // 70 % of 100 MiB/s, again, and again.
    assert_eq!(limit(1000, None), (Some(70.0), false));
    assert_eq!(limit(1000, Some(60.0)), (Some(42.0), false));
    assert_eq!(limit(1001, Some(60.0)), (Some(50.0), false));
    assert_eq!(limit(1001, Some(50.0)), (Some(50.0), true));
    // What is below is loosened by a step, up to there.
    assert_eq!(limit(1001, Some(28.0)), (Some(40.0), true));
    assert_eq!(limit(1001, Some(40.0)), (Some(50.0), true));
}

fn mib_a_second(mib: f64) -> Rate {
    Rate::from_bytes_per_second(mib * 1_048_576.0)
}

#[test]
fn the_rate_at_which_rounds_halve_needs_to_have_seen_writes() {
    let seen = DiskStatistics { written: ByteCount(100), ..mib(0, 0) };
    let seen = DiskStatistics { sent: ByteCount(600), remaining: ByteCount(300), ..seen };
    // Three times as much becomes dirty as is written: half of 300 bytes a second, by three.
    assert_eq!(halving_limit(&seen, 2.0), Some(50.0));
    assert_eq!(halving_limit(&DiskStatistics { written: ByteCount(0), ..seen }, 2.0), None);
    assert_eq!(halving_limit(&DiskStatistics { sent: ByteCount(0), ..seen }, 2.0), None);
    assert_eq!(halving_limit(&DiskStatistics { remaining: ByteCount(0), ..seen }, 2.0), None);
}

#[test]
fn where_writes_are_not_seen_what_became_dirty_counts() {
    let lower = |limit: Option<f64>, written: u64| {
        let share = Share { limit: limit.map(mib_a_second), ..Share::default() };
        let disk = DiskStatistics { written: ByteCount(written << 20), ..mib(0, 40) };
        (share.lower(&disk, 2.0) / 1_048_576.0 * 10.0).round() / 10.0
    };
    assert_eq!(lower(None, 0), 14.0);
    assert_eq!(lower(None, 100), 35.0);
    assert_eq!(lower(Some(30.0), 100), 21.0);
    assert_eq!(lower(Some(60.0), 100), 35.0);
}

#[test]
fn slow_storage_lowers_no_limit_of_rounds_that_shrink() {
    let mut share = Share { limit: Some(mib_a_second(60.0)), ..Share::default() };
    let disk = DiskStatistics {
        written: ByteCount(100 << 20),
        storage: Duration::from_millis(900),
        ..mib(200, 200)
    };
    // Rounds would halve at 50 MiB/s.
    assert_eq!(share.adapted(&disk, 1.0), Some(mib_a_second(60.0)));
}
