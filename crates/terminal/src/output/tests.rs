//! What people read fits a narrow terminal, whatever the values.

use super::*;

const LONG: Duration = Duration::from_secs(35 * 60 + 54);
const MUCH: ByteCount = ByteCount(1023 << 40);

fn disk(name: &str) -> DiskMeasures {
    DiskMeasures {
        name: name.to_owned(),
        size: MUCH,
        granularity: ByteCount(1 << 20),
        sent: ByteCount(1 << 40),
        data: PageCount(1 << 28),
        zero: PageCount(1),
        verified: false,
    }
}

fn measures() -> Measures {
    Measures {
        setup: LONG,
        total: LONG,
        downtime: LONG,
        tracked: LONG,
        throttled: LONG,
        lost: LONG,
        under_half: LONG,
        under_tenth: LONG,
        write_faults_delayed: u64::MAX,
        vcpus_waited: LONG,
        longest_wait: LONG,
        tracking_stop: LONG,
        sent: MUCH,
        hinted: PageCount(1 << 28),
        ram: MUCH,
        rounds: usize::MAX,
        verified: true,
        resumptions: u32::MAX,
        severed: LONG,
        sent_again: MUCH,
        disks: ["disk0", "disk1", "disk2"].map(disk).into(),
        ..Measures::default()
    }
}

#[test]
fn the_result_fits_80_columns() {
    for width in [40, 80, 120] {
        let text = measures_text(&measures(), 1e9, u64::MAX, width);
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= width, "{widest} columns: {text}");
    }
}

#[test]
fn what_was_sent_is_counted_once() {
    let measures = Measures { hinted: PageCount::ZERO, sent: ByteCount(5 << 40), ..measures() };
    let one = Measures { disks: vec![disk("disk0")], ..measures };
    assert_eq!(
        sent_text(&one),
        "5TiB in all: 4TiB for 1023TiB of RAM, 1TiB for disk 'disk0' of 1023TiB (1TiB of data, \
         blocks of 1MiB)"
    );
    assert_eq!(sent_text(&Measures { disks: Vec::new(), ..one }), "5TiB for 1023TiB of RAM");
}

#[test]
fn times_that_say_nothing_are_left_out() {
    let quick = Measures {
        downtime: Duration::from_nanos(1_999_999_842),
        tracking_stop: Duration::ZERO,
        throttled: Duration::ZERO,
        write_faults_delayed: 0,
        parts: godwit_engine::report::DowntimeParts {
            drain: Duration::from_nanos(496),
            save: Duration::from_micros(250),
            ..Default::default()
        },
        ..measures()
    };
    let text = measures_text(&quick, 1.0, 0, 200);
    assert!(text.contains("downtime  2s (save 250us)\n"), "{text}");
    assert!(text.contains("set-up    35.9min\n") && text.contains("; never slowed\n"), "{text}");
    assert!(!text.contains("0s") && !text.contains("ns"), "{text}");
}
