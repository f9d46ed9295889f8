//! What is understood, what is refused, and with which words.

use super::*;
use crate::{ByteCount, TypedRate};

#[test]
fn durations_round_trip() {
    for text in ["300ms", "1.5s", "250us", "12.5ms", "20min", "11h", "7ns", "0s"] {
        assert_eq!(format_duration(parse_duration(text).unwrap()), text);
    }
}

#[test]
fn durations_are_rounded_to_three_digits_and_the_unit_follows() {
    for (nanos, shown) in [
        (1_999_999_842, "2s"),
        (999_999_600, "1s"),
        (999_400_000, "999ms"),
        (9_996_000_000, "10s"),
        (99_960_000_000, "100s"),
        (599_900_000_000, "10min"),
        (35_999_000_000_000, "10h"),
        (999_700, "1ms"),
    ] {
        assert_eq!(format_duration(Duration::from_nanos(nanos)), shown);
    }
}

#[test]
fn sizes_round_trip() {
    for text in ["64KiB", "1GiB", "1.5GiB", "12TiB", "0B", "513B"] {
        assert_eq!(ByteCount(bytes(text).unwrap()).to_string(), text);
    }
    assert_eq!(bytes("1GB"), Ok(1_000_000_000));
    assert_eq!(bytes("4G"), Ok(4 << 30));
    assert_eq!(bytes("512m"), Ok(512 << 20));
    assert_eq!(bytes("4096B"), Ok(4096));
    assert_eq!(bytes("0"), Ok(0));
}

#[test]
fn rates_are_bits_or_bytes() {
    for (text, expected) in [
        ("10Gbit", 1.25e9),
        ("10Gbit/s", 1.25e9),
        ("10Gbps", 1.25e9),
        ("800Kbit", 1e5),
        ("128MiB/s", 134_217_728.0),
        ("128MiB", 134_217_728.0),
        ("128MB/s", 128e6),
        ("128MBps", 128e6),
        ("5000B/s", 5000.0),
    ] {
        assert_eq!(rate(text).map(|(.., bytes)| bytes), Ok(expected), "{text}");
    }
}

#[test]
fn what_can_mean_two_things_is_refused_with_both() {
    let refused = |text: &str| rate(text).unwrap_err().to_string();
    assert_eq!(refused("1G"), "'1G' is ambiguous: write 1Gbit (119MiB/s) or 1GiB/s (8.59Gbit)");
    assert_eq!(
        refused("100"),
        "'100' is ambiguous: write 100Mbit (11.9MiB/s) or 100MiB/s (839Mbit)"
    );
    assert_eq!(
        refused("40Mb/s"),
        "'40Mb/s' is ambiguous: write 40Mbit (4.77MiB/s) or 40MB/s (320Mbit)"
    );
    assert_eq!(
        refused("1.5g"),
        "'1.5g' is ambiguous: write 1.5Gbit (179MiB/s) or 1.5GiB/s (12.9Gbit)"
    );
    let refused = |text: &str| parse_duration(text).unwrap_err().to_string();
    assert_eq!(refused("5m"), "'5m' is ambiguous: write 5min or 5ms");
    assert_eq!(refused("300"), "'300' is ambiguous: write 300ms or 300s");
    assert_eq!(bytes("512").unwrap_err().to_string(), "'512' is ambiguous: write 512MiB or 512B");
}

#[test]
fn errors_say_what_would_do() {
    let error = parse_duration("3days").unwrap_err().to_string();
    assert_eq!(error, "'days' in '3days' is not a unit here: use us, ms, s, min or h");
    assert!(parse_duration("soon").unwrap_err().to_string().contains("300ms"));
    assert!(bytes("64 furlongs").is_err());
    assert!(bytes("64Mbit").is_err());
    assert!(rate("64 furlongs").unwrap_err().to_string().contains("kbit, Mbit, Gbit"));
    assert!(parse_duration("1e400s").is_err());
    assert!(bytes("99999999999TiB").is_err());
    assert!(parse_duration("99999999999h").is_err());
}

#[test]
fn a_rate_is_shown_as_typed_with_the_other_unit_beside_it() {
    for (text, shown, both) in [
        ("40Mbit", "40Mbit", "40Mbit (4.77MiB/s)"),
        ("1Gbit", "1Gbit", "1Gbit (119MiB/s)"),
        ("1000Mbps", "1000Mbit", "1000Mbit (119MiB/s)"),
        ("128MiB", "128MiB/s", "128MiB/s (1.07Gbit)"),
        ("1.25GB/s", "1.25GB/s", "1.25GB/s (10Gbit)"),
    ] {
        let rate: TypedRate = text.parse().unwrap();
        assert_eq!(rate.to_string(), shown);
        assert_eq!(rate.both(), both);
        assert_eq!(shown.parse::<TypedRate>(), Ok(rate));
    }
    let own = |bytes| TypedRate::from(Rate::from_bytes_per_second(bytes)).to_string();
    assert_eq!(own(20.0 * 1_048_576.0), "20MiB/s");
    assert_eq!(own(12_500.0), "12500B/s");
}

#[test]
fn the_grammar_fits_80_columns() {
    assert!(GRAMMAR.lines().all(|line| line.len() <= 80), "{GRAMMAR}");
}
