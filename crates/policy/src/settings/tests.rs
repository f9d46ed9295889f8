//! Settings are taken as they are typed, and refused in one line without a trace.

use super::*;

#[test]
fn defaults_are_what_the_list_says() {
    let mut settings = Settings::default();
    for about in Settings::TABLE.about() {
        settings.set(about.name, about.default).unwrap();
    }
    assert_eq!(settings, Settings::default());
}

#[test]
fn settings_are_taken_as_typed() {
    let mut settings = Settings::default();
    for assignment in [
        "downtime-limit=50ms",
        "downtime-ceiling=2s",
        "patience=0s",
        "finish-within=5s",
        "throttle=staged",
        "max-throttle=80%",
        "delay-hot-percent=0",
        "delay-until-percent=20",
        "max-delay=7",
        "memory-share=1024",
        "disk-limit=30MiB/s",
        "switchover-bandwidth=100MiB/s",
    ] {
        settings.assign(assignment).unwrap();
    }
    assert_eq!(
        settings,
        Settings {
            downtime_limit: Duration::from_millis(50),
            downtime_ceiling: Some(Duration::from_secs(2)),
            patience: None,
            finish_within: Some(Duration::from_secs(5)),
            throttle: ThrottleMode::Staged,
            max_throttle: 0.8,
            delay_hot_percent: 0,
            delay_until_percent: 20,
            max_delay: 7,
            memory_share: Some(1024),
            disk_limit: DiskLimit::Fixed("30MiB/s".parse().unwrap()),
            switchover_bandwidth: Some("100MiB/s".parse().unwrap()),
        }
    );
}

#[test]
fn what_cannot_be_taken_is_named_and_changes_nothing() {
    let mut settings = Settings::default();
    for (assignment, line) in [
        (
            "downtime-limit=soon",
            "downtime-limit=soon is not possible: use a time from 1ms to 1h, such as 300ms",
        ),
        (
            "downtime-limit=2h",
            "downtime-limit=2h is not possible: use a time from 1ms to 1h, such as 300ms",
        ),
        (
            "downtime-ceiling=1ms",
            "downtime-ceiling=1ms is not possible: it must be at least downtime-limit, 300ms",
        ),
        ("max-throttle=100", "max-throttle=100 is not possible: use a whole number from 0 to 99"),
        (
            "delay-hot-percent=-1",
            "delay-hot-percent=-1 is not possible: use a whole number from 0 to 90",
        ),
        (
            "memory-share=1025",
            "memory-share=1025 is not possible: use a whole number from 0 to 1024, or auto",
        ),
        (
            "disk-limit=1G",
            "disk-limit=1G is not possible: '1G' is ambiguous: write 1Gbit (119MiB/s) or 1GiB/s \
             (8.59Gbit)",
        ),
        ("patience=5m", "patience=5m is not possible: '5m' is ambiguous: write 5min or 5ms"),
        (
            "downtime-limit=300",
            "downtime-limit=300 is not possible: '300' is ambiguous: write 300ms or 300s",
        ),
        (
            "disk-limit=0",
            "disk-limit=0 is not possible: use a rate such as 30MiB/s, or auto, or off",
        ),
        (
            "switchover-bandwidth=fast",
            "switchover-bandwidth=fast is not possible: use a rate such as 10Gbit or 100MiB/s, or \
             auto",
        ),
        (
            "throttle=hard",
            "throttle=hard is not possible: use off, direct, staged, auto-converge, adaptive, \
             governor or vcpus",
        ),
        (
            "throttle",
            "throttle= is not possible: write it as key=value, such as downtime-limit=300ms",
        ),
    ] {
        assert_eq!(settings.assign(assignment).unwrap_err().to_string(), line);
    }
    let unknown = settings.set("downtime", "1s").unwrap_err().to_string();
    assert!(
        unknown.starts_with("there is no setting 'downtime': use one of downtime-limit, "),
        "{unknown}"
    );
    assert_eq!(settings, Settings::default());
}

#[test]
fn the_limit_does_not_pass_the_ceiling() {
    let mut settings = Settings::default();
    settings.set("downtime-ceiling", "1s").unwrap();
    assert!(settings.set("downtime-limit", "2s").is_err());
    settings.set("downtime-ceiling", "off").unwrap();
    assert_eq!(settings.set("downtime-limit", "2s"), Ok(()));
}

#[test]
fn what_is_shown_can_be_typed() {
    let mut settings = Settings::default();
    for (key, shown) in Settings::TABLE.shown(&settings) {
        assert_eq!(shown, Settings::TABLE.find(key).unwrap().about.default, "{key}");
    }
    for assignment in [
        "downtime-ceiling=2s",
        "patience=0s",
        "finish-within=30s",
        "memory-share=7",
        "disk-limit=30MiB/s",
        "switchover-bandwidth=100MiB/s",
    ] {
        settings.assign(assignment).unwrap();
    }
    let mut again = Settings::default();
    Settings::TABLE.shown(&settings).iter().for_each(|(key, value)| again.set(key, value).unwrap());
    assert_eq!(again, settings);
}

#[test]
fn bounds_are_allowed_and_what_is_beyond_them_is_not() {
    let taken = |assignment: &str| Settings::default().assign(assignment).is_ok();
    let allowed = [
        "downtime-limit=1ms",
        "downtime-limit=1h",
        "downtime-ceiling=300ms",
        "patience=1s",
        "patience=1000h",
        "max-throttle=99",
        "delay-hot-percent=90",
        "delay-until-percent=100",
        "max-delay=1000",
        "finish-within=1s",
        " max-delay = 7 ",
    ];
    assert_eq!(allowed.map(taken), [true; 11]);
    let refused = [
        "downtime-limit=999us",
        "downtime-limit=3601s",
        "downtime-ceiling=299ms",
        "patience=999ms",
        "patience=1001h",
        "delay-hot-percent=91",
        "delay-until-percent=101",
        "max-delay=1001",
        "max-delay=7.5",
    ];
    assert_eq!(refused.map(taken), [false; 9]);
}

#[test]
fn a_limit_may_be_as_high_as_its_ceiling() {
    let mut settings = Settings::default();
    settings.set("downtime-ceiling", "1s").unwrap();
    assert_eq!(settings.set("downtime-limit", "1s"), Ok(()));
}

/// It was taken, and `auto` was in force: the contrary of what "0s for none" promised.
#[test]
fn no_time_to_finish_within_is_refused() {
    let mut settings = Settings::default();
    settings.set("finish-within", "5s").unwrap();
    assert_eq!(
        settings.set("finish-within", "0s").unwrap_err().to_string(),
        "finish-within=0s is not possible: use a time from 1s to 1000h, such as 60s, or auto"
    );
    assert_eq!(settings.finish_within, Some(Duration::from_secs(5)));
}

#[test]
fn a_limit_grows_to_its_ceiling_in_eight_steps() {
    let mut settings = Settings::default();
    assert_eq!([0, 8].map(|steps| settings.limit_after(steps)), [Duration::from_millis(300); 2]);
    settings.set("downtime-ceiling", "1100ms").unwrap();
    let grown = [0, 1, 4, 8, 9].map(|steps| settings.limit_after(steps).as_millis());
    assert_eq!(grown, [300, 400, 700, 1100, 1100]);
}

#[test]
fn values_are_told_with_unit_and_range() {
    let told = |name| Settings::TABLE.find(name).unwrap().about.values();
    assert_eq!(told("downtime-limit"), "time, 1ms to 1h");
    assert_eq!(told("downtime-ceiling"), "time, 1ms to 1h, or off");
    assert_eq!(told("max-throttle"), "percent, 0 to 99");
    assert_eq!(told("memory-share"), "0 to 1024, or auto");
    assert_eq!(told("disk-limit"), "rate, auto or off");
    assert_eq!(told("throttle"), "off, direct, staged, auto-converge, adaptive, governor or vcpus");
}

#[test]
fn modes_are_shown_by_their_names() {
    for (mode, name) in ThrottleMode::ALL {
        assert_eq!((mode.to_string().as_str(), name.parse()), (name, Ok(mode)));
        assert_eq!(format!("{mode:>14}").trim_start(), name);
        assert_eq!(format!("{mode:>14}").len(), 14);
    }
}
