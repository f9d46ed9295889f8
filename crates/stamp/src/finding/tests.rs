//! Each defect made by hand, and what is said of it.

use super::*;

const RUN: u64 = 0xfeed;
const NOW: u64 = 1_700_000_010_000_000_000;

fn stamp(unit: u64, generation: u64) -> Stamp {
    Stamp {
        run: RUN,
        device: 1,
        writer: 2,
        zeroes: false,
        sector: unit * 8,
        generation,
        nanos: NOW - 1_000_000_000 * (10 - generation),
        first: unit * 8,
        sectors: 8,
        span: 256,
    }
}

fn unit(number: u64, generation: u64) -> Unit {
    let mut unit = Unit::ZERO;
    unit.stamp(&stamp(number, generation));
    unit
}

fn expected(wanted: Wanted) -> Expected {
    Expected {
        run: RUN,
        device: 1,
        unit: 5,
        zeroes: false,
        wanted,
        zeroes_before: None,
        nanos: Some(NOW - 3_000_000_000),
    }
}

fn exactly(generation: u64) -> Expected {
    expected(Wanted::Exactly { generation, zero: false, seen: false })
}

fn told(finding: &Finding) -> String {
    Told { finding, name: "/dev/vdb", now: NOW }.to_string()
}

#[test]
fn a_unit_that_is_right_is_no_bug() {
    assert_eq!(diagnose(&unit(5, 7), &exactly(7)), Ok(Fit::Exact));
    assert_eq!(diagnose(&unit(5, 7), &expected(Wanted::Any)), Ok(Fit::Exact));
    let zero = Wanted::Exactly { generation: 8, zero: true, seen: false };
    assert_eq!(diagnose(&Unit::ZERO, &expected(zero)), Ok(Fit::Exact));
}

#[test]
fn an_older_version_is_a_lost_write_until_the_newer_was_seen() {
    let lost = diagnose(&unit(5, 6), &exactly(7)).unwrap_err();
    assert_eq!((lost.kind, lost.sector, lost.sectors), (Kind::LostWrite, 40, 8));
    assert_eq!(
        told(&lost),
        "BUG lost write: /dev/vdb sector 40 (byte 20480; 8 of its unit's 8): expected generation \
         7, written 3.000 s ago; found generation 6, written 4.000 s ago by worker 2 with sectors \
         40 to 47"
    );
    let seen = Wanted::Exactly { generation: 7, zero: false, seen: true };
    assert_eq!(diagnose(&unit(5, 6), &expected(seen)).unwrap_err().kind, Kind::Stale);
}

#[test]
fn a_stamp_where_zeroes_were_written_says_that_these_are_lost_until_they_were_seen() {
    for generation in [6, 7] {
        for (seen, kind) in [(false, Kind::ZeroesLost), (true, Kind::Stale)] {
            let zero = expected(Wanted::Exactly { generation: 7, zero: true, seen });
            assert_eq!(diagnose(&unit(5, generation), &zero).unwrap_err().kind, kind);
        }
    }
}

#[test]
fn a_version_that_nobody_wrote_is_named_so() {
    assert_eq!(diagnose(&unit(5, 8), &exactly(7)).unwrap_err().kind, Kind::Newer);
}

#[test]
fn what_belongs_elsewhere_is_misplaced() {
    let other = diagnose(&unit(6, 7), &exactly(7)).unwrap_err();
    assert_eq!(other.kind, Kind::Misplaced);
    assert!(told(&other).contains("found sector 48 of it, generation 7"), "{}", told(&other));
    let mut device = Unit::ZERO;
    device.stamp(&Stamp { device: 4, ..stamp(5, 7) });
    let other = diagnose(&device, &exactly(7)).unwrap_err();
    assert_eq!(other.kind, Kind::Misplaced);
    assert!(told(&other).contains("found sector 40 of device 4, "), "{}", told(&other));
    assert_eq!(diagnose(&device, &expected(Wanted::Any)).unwrap_err().kind, Kind::Misplaced);
    let mut run = Unit::ZERO;
    run.stamp(&Stamp { run: 9, ..stamp(5, 7) });
    assert_eq!(diagnose(&run, &exactly(7)).unwrap_err().kind, Kind::OtherRun);
}

#[test]
fn a_unit_of_two_versions_is_torn() {
    let mut torn = unit(5, 7);
    torn.0[3..].clone_from_slice(&unit(5, 6).0[3..]);
    for wanted in [exactly(7), expected(Wanted::Any)] {
        let finding = diagnose(&torn, &wanted).unwrap_err();
        assert_eq!((finding.kind, finding.sector, finding.sectors), (Kind::Torn, 43, 5));
        assert!(told(&finding).ends_with("found sectors of generations 6 to 7"));
    }
}

#[test]
fn a_sector_of_two_versions_is_torn() {
    let mut torn = unit(5, 7);
    torn.0[2].0[20..].copy_from_slice(&unit(5, 6).0[2].0[20..]);
    let finding = diagnose(&torn, &exactly(7)).unwrap_err();
    assert_eq!((finding.kind, finding.sector, finding.sectors), (Kind::Torn, 42, 1));
    assert!(told(&finding).contains("from byte 160 of the sector on"), "{}", told(&finding));
}

#[test]
fn a_flipped_bit_is_told_with_its_place() {
    let mut flipped = unit(5, 7);
    flipped.0[4].0[9] ^= 1 << 33;
    let finding = diagnose(&flipped, &exactly(7)).unwrap_err();
    assert_eq!((finding.kind, finding.sector, finding.sectors), (Kind::FlippedBits, 44, 1));
    let line = told(&finding);
    assert!(line.contains("at byte 72 of the sector, 1 bits differ (mask 0x200000000)"), "{line}");
}

#[test]
fn zeroes_are_told_wherever_no_run_makes_them() {
    let mut one = unit(5, 7);
    one.0[7] = Unit::ZERO.0[7].clone();
    let finding = diagnose(&one, &exactly(7)).unwrap_err();
    assert_eq!((finding.kind, finding.sector, finding.sectors), (Kind::Zeroed, 47, 1));
    for wanted in [exactly(7), expected(Wanted::Any)] {
        let finding = diagnose(&Unit::ZERO, &wanted).unwrap_err();
        assert_eq!((finding.kind, finding.sectors), (Kind::Zeroed, 8));
    }
    let zeroes = Expected { zeroes: true, ..expected(Wanted::Any) };
    assert_eq!(diagnose(&Unit::ZERO, &zeroes), Ok(Fit::Exact));
}

#[test]
fn zeroes_that_a_unit_was_before_are_told_from_those_that_it_never_was() {
    let before = Expected { zeroes: true, zeroes_before: Some(4), ..exactly(7) };
    let again = diagnose(&Unit::ZERO, &before).unwrap_err();
    assert_eq!((again.kind, again.sector, again.sectors), (Kind::ZeroesAgain, 40, 8));
    assert_eq!(
        told(&again),
        "BUG zeroes again: /dev/vdb sector 40 (byte 20480; 8 of its unit's 8): expected generation \
         7, written 3.000 s ago; found zeroes, as generation 4 was"
    );
    // One sector of it, too.
    let mut one = unit(5, 7);
    one.0[3] = Unit::ZERO.0[3].clone();
    let again = diagnose(&one, &before).unwrap_err();
    assert_eq!((again.kind, again.sector, again.sectors), (Kind::ZeroesAgain, 43, 1));
    let never = Expected { zeroes_before: None, ..before };
    assert_eq!(diagnose(&Unit::ZERO, &never).unwrap_err().kind, Kind::Zeroed);
    // Where a run was cut off zeroes may have been under way.
    let wanted = Wanted::AtLeast { generation: 7, zero: false };
    assert_eq!(diagnose(&one, &Expected { wanted, ..before }), Ok(Fit::UnderWay));
}

#[test]
fn a_cut_off_run_leaves_what_was_acknowledged_or_newer() {
    let at_least = expected(Wanted::AtLeast { generation: 6, zero: false });
    assert_eq!(diagnose(&unit(5, 6), &at_least), Ok(Fit::Exact));
    assert_eq!(diagnose(&unit(5, 8), &at_least), Ok(Fit::UnderWay));
    let mut mixed = unit(5, 6);
    mixed.0[5..].clone_from_slice(&unit(5, 7).0[5..]);
    assert_eq!(diagnose(&mixed, &at_least), Ok(Fit::UnderWay));
    // One sector behind what was acknowledged is no crash.
    mixed.0[7] = unit(5, 5).0[7].clone();
    let finding = diagnose(&mixed, &at_least).unwrap_err();
    assert_eq!((finding.kind, finding.sector, finding.sectors), (Kind::LostWrite, 47, 1));
    assert_eq!(diagnose(&Unit::ZERO, &at_least).unwrap_err().kind, Kind::Zeroed);
    mixed.0[7] = unit(6, 7).0[7].clone();
    assert_eq!(diagnose(&mixed, &at_least).unwrap_err().kind, Kind::Misplaced);
}

#[test]
fn zeroes_that_were_acknowledged_do_not_come_back_as_data() {
    let zero = Expected { zeroes: true, ..expected(Wanted::AtLeast { generation: 6, zero: true }) };
    assert_eq!(diagnose(&Unit::ZERO, &zero), Ok(Fit::Exact));
    assert_eq!(diagnose(&unit(5, 7), &zero), Ok(Fit::UnderWay));
    let lost = diagnose(&unit(5, 6), &zero).unwrap_err();
    assert_eq!(lost.kind, Kind::ZeroesLost);
    let line = told(&lost);
    let words = "expected zeroes, as generation 6, which an fsync acknowledged, or a newer; found";
    assert!(line.starts_with("BUG zeroes lost: ") && line.contains(words), "{line}");
    let data =
        Expected { zeroes: true, ..expected(Wanted::AtLeast { generation: 6, zero: false }) };
    assert_eq!(diagnose(&Unit::ZERO, &data), Ok(Fit::UnderWay));
}
