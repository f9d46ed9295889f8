//! The policy's settings, a row each: the one list from which they are parsed, shown and
//! documented.

use std::time::Duration;

use godwit_units::format_duration;

use super::table::{About, Felt, Setting, Table, Takes, Value};
use super::{DiskLimit, Settings, ThrottleMode};

/// A time for which the guest stands still.
const DOWNTIME: Takes = Takes::Time {
    least: Duration::from_millis(1),
    most: Duration::from_secs(3600),
    or_zero: false,
    such_as: "300ms",
};
/// A time for which an operator waits.
const WAIT: Takes = Takes::Time {
    least: Duration::from_secs(1),
    most: Duration::from_secs(3_600_000),
    or_zero: false,
    such_as: "60s",
};
/// The same, or none.
const WAIT_OR_NONE: Takes = Takes::Time {
    least: Duration::from_secs(1),
    most: Duration::from_secs(3_600_000),
    or_zero: true,
    such_as: "60s",
};

/// All of them, in the order in which help shows them.
pub(super) const ROWS: Table<Settings> = Table(&[
    Setting {
        about: About {
            name: "downtime-limit",
            takes: DOWNTIME,
            words: &[],
            default: "300ms",
            felt: Felt::RoundEnd,
            meaning: "the guest is stopped only when the downtime is expected to be within this",
            option: true,
        },
        put: |settings, value| {
            let limit = value.time();
            if settings.downtime_ceiling.is_some_and(|ceiling| ceiling < limit) {
                return Err("it must not be above downtime-ceiling: raise that first".to_owned());
            }
            settings.downtime_limit = limit;
            Ok(())
        },
        show: |settings| format_duration(settings.downtime_limit),
    },
    Setting {
        about: About {
            name: "downtime-ceiling",
            takes: DOWNTIME,
            words: &[("off", "")],
            default: "off",
            felt: Felt::RoundEnd,
            meaning: "the limit may grow to this, step by step, while rounds make no progress",
            option: false,
        },
        put: |settings, value| {
            let ceiling = value.or_word().map(Value::time);
            let limit = settings.downtime_limit;
            if ceiling.is_some_and(|ceiling| ceiling < limit) {
                let limit = format_duration(limit);
                return Err(format!("it must be at least downtime-limit, {limit}"));
            }
            settings.downtime_ceiling = ceiling;
            Ok(())
        },
        show: |settings| or(settings.downtime_ceiling.map(format_duration), "off"),
    },
    Setting {
        about: About {
            name: "patience",
            takes: WAIT_OR_NONE,
            words: &[("0s", "none")],
            default: "60s",
            felt: Felt::RoundEnd,
            meaning: "give up when no round came closer to the limit for this long, with all that \
                      helps in force; 0s: never",
            option: true,
        },
        put: |settings, value| {
            let time = value.or_word().map(Value::time);
            settings.patience = time.filter(|time| !time.is_zero());
            Ok(())
        },
        show: |settings| or(settings.patience.map(format_duration), "0s"),
    },
    Setting {
        about: About {
            name: "finish-within",
            takes: WAIT,
            words: &[("auto", "")],
            default: "auto",
            felt: Felt::RoundEnd,
            meaning: "after the first round, adaptive throttles over 90 %, or governs harder, \
                      rather than take longer; auto: twice the first round, at least 10 s",
            option: false,
        },
        put: |settings, value| {
            settings.finish_within = value.or_word().map(Value::time);
            Ok(())
        },
        show: |settings| or(settings.finish_within.map(format_duration), "auto"),
    },
    Setting {
        about: About {
            name: "throttle",
            takes: Takes::Words,
            words: &ThrottleMode::NAMES,
            default: "adaptive",
            felt: Felt::AtOnce,
            meaning: "how a guest that outruns the link is slowed down; adaptive: it is held \
                      to a dirty-rate limit where that can be done, else its processors are \
                      throttled",
            option: true,
        },
        put: |settings, value| {
            let Value::Word(word) = value else { return Ok(()) };
            settings.throttle = word.parse().unwrap_or(settings.throttle);
            Ok(())
        },
        show: |settings| settings.throttle.to_string(),
    },
    Setting {
        about: About {
            name: "max-throttle",
            takes: Takes::Number { least: 0, most: 99, unit: "percent" },
            words: &[],
            default: "99",
            felt: Felt::AtOnce,
            meaning: "the most that is taken from the guest's processors",
            option: false,
        },
        put: |settings, value| {
            settings.max_throttle = f64::from(value.number()) / 100.0;
            Ok(())
        },
        show: |settings| format!("{:.0}", settings.max_throttle * 100.0),
    },
    Setting {
        about: About {
            name: "delay-hot-percent",
            takes: Takes::Number { least: 0, most: 90, unit: "percent" },
            words: &[],
            default: "30",
            felt: Felt::RoundEnd,
            meaning: "the hottest segments (16 MiB each), of all, that are sent last; 0: none",
            option: false,
        },
        put: |settings, value| {
            settings.delay_hot_percent = value.number() as u8;
            Ok(())
        },
        show: |settings| settings.delay_hot_percent.to_string(),
    },
    Setting {
        about: About {
            name: "delay-until-percent",
            takes: Takes::Number { least: 0, most: 100, unit: "percent" },
            words: &[],
            default: "10",
            felt: Felt::RoundEnd,
            meaning: "they are delayed no longer when less than this much of memory remains",
            option: false,
        },
        put: |settings, value| {
            settings.delay_until_percent = value.number() as u8;
            Ok(())
        },
        show: |settings| settings.delay_until_percent.to_string(),
    },
    Setting {
        about: About {
            name: "max-delay",
            takes: Takes::Number { least: 0, most: 1000, unit: "rounds" },
            words: &[],
            default: "50",
            felt: Felt::RoundEnd,
            meaning: "nor for more rounds than this",
            option: false,
        },
        put: |settings, value| {
            settings.max_delay = value.number();
            Ok(())
        },
        show: |settings| settings.max_delay.to_string(),
    },
    Setting {
        about: About {
            name: "memory-share",
            takes: Takes::Number { least: 0, most: 1024, unit: "" },
            words: &[("auto", "")],
            default: "auto",
            felt: Felt::AtOnce,
            meaning: "parts of the link's time for memory for each 1024 of disks that move along",
            option: false,
        },
        put: |settings, value| {
            settings.memory_share = value.or_word().map(|value| value.number() as u16);
            Ok(())
        },
        show: |settings| or(settings.memory_share.map(|share| share.to_string()), "auto"),
    },
    Setting {
        about: About {
            name: "disk-limit",
            takes: Takes::Rate { such_as: "30MiB/s" },
            words: &[("auto", ""), ("off", "")],
            default: "auto",
            felt: Felt::RoundEnd,
            meaning: "limit of the guest's writes to all disks that move, together, while their \
                      rounds do not shrink",
            option: false,
        },
        put: |settings, value| {
            settings.disk_limit = match value {
                Value::Word("off") => DiskLimit::Off,
                Value::Rate(rate) => DiskLimit::Fixed(rate),
                _ => DiskLimit::Auto,
            };
            Ok(())
        },
        show: |settings| match settings.disk_limit {
            DiskLimit::Off => "off".to_owned(),
            DiskLimit::Auto => "auto".to_owned(),
            DiskLimit::Fixed(rate) => rate.to_string(),
        },
    },
    Setting {
        about: About {
            name: "switchover-bandwidth",
            takes: Takes::Rate { such_as: "10Gbit or 100MiB/s" },
            words: &[("auto", "")],
            default: "auto",
            felt: Felt::RoundEnd,
            meaning: "what the link carries at the switchover, if you know better than what was \
                      measured; downtimes are expected by it; auto: as measured",
            option: true,
        },
        put: |settings, value| {
            settings.switchover_bandwidth = value.rate();
            Ok(())
        },
        show: |settings| or(settings.switchover_bandwidth.map(|rate| rate.to_string()), "auto"),
    },
]);

fn or(value: Option<String>, word: &str) -> String {
    value.unwrap_or_else(|| word.to_owned())
}
