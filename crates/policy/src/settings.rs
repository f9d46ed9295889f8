//! What the operator may set, before a migration and while it runs, under the names that are typed.
//!
//! A setting that cannot be taken changes nothing and says in one line which one it was, what was given and what
//! would do. The list in [`Settings::keys`] is what help texts and documents are made from.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use godwit_units::{TypedRate, format_duration, parse_duration};

/// How the guest is slowed down when it outruns the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ThrottleMode {
    /// Not at all.
    Off,
    /// 90 % for 3 s, then 99 % for 3 s, then staged; staged at once when more than 5 s of sending remain.
    Direct,
    /// Each round a share of the one before, from the ratio of bandwidth to dirty rate.
    Staged,
    /// As QEMU does it: 20 %, then 10 % more after every two bad periods. Here for comparison.
    AutoConverge,
    /// The write governor where the machine offers one, else the least throttle that finishes in time, from the guest's
    /// measured response.
    #[default]
    Adaptive,
    /// The write governor where `Adaptive` would throttle, and nothing else.
    Governor,
    /// As `Adaptive`, by vCPUs only.
    Vcpus,
}

impl ThrottleMode {
    /// All modes, by the names that are typed.
    pub const ALL: [(Self, &'static str); 7] = [
        (Self::Off, "off"),
        (Self::Direct, "direct"),
        (Self::Staged, "staged"),
        (Self::AutoConverge, "auto-converge"),
        (Self::Adaptive, "adaptive"),
        (Self::Governor, "governor"),
        (Self::Vcpus, "vcpus"),
    ];
}

impl fmt::Display for ThrottleMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(mode, _)| mode == self).map_or("", |(_, name)| name);
        f.pad(name)
    }
}

impl FromStr for ThrottleMode {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        let found = Self::ALL.iter().find(|(_, name)| *name == text.trim());
        found.map(|(mode, _)| *mode).ok_or_else(|| value("throttle", text, MODES))
    }
}

/// What the operator wants of one migration. Copied freely; a change while it runs goes through
/// [`Policy::set`](crate::Policy::set).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The downtime must not be expected to exceed this.
    pub downtime_limit: Duration,
    /// The limit may grow to this, step by step, while rounds make no progress; `None`: it never grows.
    pub downtime_ceiling: Option<Duration>,
    /// Give up when no round came closer to the limit for this long with all that helps in force; `None`: never.
    pub patience: Option<Duration>,
    /// How long copying may go on after the first round before `adaptive` throttles above 90 % or governs harder; `None`:
    /// twice as long as the first round took, at least 10 s.
    pub finish_within: Option<Duration>,
    /// How the guest is slowed down.
    pub throttle: ThrottleMode,
    /// The most that is taken from the guest, as a share of its time.
    pub max_throttle: f64,
    /// The hottest segments, in percent of all, that are left for later; 0: none.
    pub delay_hot_percent: u8,
    /// Hot segments are delayed no longer when less than this much of memory, in percent, remains.
    pub delay_until_percent: u8,
    /// Nor for more rounds than this.
    pub max_delay: u32,
    /// Fixed share of the link's time for memory while disks move, of 1024; `None`: decided here.
    pub memory_share: Option<u16>,
    /// Whether the guest's writes to the disks that move may be limited.
    pub disk_limit: DiskLimit,
    /// What the link carries when the guest is stopped; `None`: as measured. Downtimes are expected by it,
    /// rounds still go by what is measured.
    pub switchover_bandwidth: Option<TypedRate>,
}

/// Whether and how the guest's disk writes are limited.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum DiskLimit {
    /// Never.
    Off,
    /// As far as rounds that do not shrink make it necessary.
    #[default]
    Auto,
    /// To this rate from the first incremental round on.
    Fixed(TypedRate),
}

impl Default for Settings {
    /// What needs no tuning: 300 ms, one minute without progress, adaptive throttle up to 99 %.
    fn default() -> Self {
        Self {
            downtime_limit: Duration::from_millis(300),
            downtime_ceiling: None,
            patience: Some(Duration::from_secs(60)),
            finish_within: None,
            throttle: ThrottleMode::Adaptive,
            max_throttle: 0.99,
            delay_hot_percent: 30,
            delay_until_percent: 10,
            max_delay: 50,
            memory_share: None,
            disk_limit: DiskLimit::Auto,
            switchover_bandwidth: None,
        }
    }
}

/// One setting as help and documents show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// What is typed.
    pub name: &'static str,
    /// What a value looks like.
    pub unit: &'static str,
    /// Its value when nothing is said, as it is typed.
    pub default: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

/// Why a setting was not taken. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// There is no such setting.
    #[error("there is no setting '{key}': use one of {known}")]
    UnknownKey {
        /// What was given.
        key: String,
        /// All names.
        known: String,
    },
    /// The value cannot be taken.
    #[error("{key}={value} is not possible: {allowed}")]
    Value {
        /// Which setting.
        key: String,
        /// What was given.
        value: String,
        /// What would do.
        allowed: String,
    },
}

const MODES: &str = "use off, direct, staged, auto-converge, adaptive, governor or vcpus";
const DOWNTIME: &str = "use a time from 1ms to 1h, such as 300ms";
const LONG: &str = "use a time from 1s to 1000h, such as 60s, or 0s for none";
const WITHIN: &str = "use a time from 1s to 1000h, such as 60s, or auto";

const KEYS: [Key; 12] = [
    Key {
        name: "downtime-limit",
        unit: "time",
        default: "300ms",
        meaning: "the guest is stopped only when the downtime is expected to be within this",
    },
    Key {
        name: "downtime-ceiling",
        unit: "time or off",
        default: "off",
        meaning: "the limit may grow to this, step by step, while rounds make no progress",
    },
    Key {
        name: "patience",
        unit: "time",
        default: "60s",
        meaning: "give up after this long without progress, with all that helps in force; 0s: never",
    },
    Key {
        name: "finish-within",
        unit: "time or auto",
        default: "auto",
        meaning: "after the first round, adaptive throttles over 90 % rather than take longer; auto: twice the first round",
    },
    Key {
        name: "throttle",
        unit: "off, direct, staged, auto-converge, adaptive, governor or vcpus",
        default: "adaptive",
        meaning: "how the guest is slowed down when it outruns the link",
    },
    Key {
        name: "max-throttle",
        unit: "percent, 0 to 99",
        default: "99",
        meaning: "the most that is taken from the guest's processors",
    },
    Key {
        name: "delay-hot-percent",
        unit: "percent, 0 to 90",
        default: "30",
        meaning: "the hottest segments, of all, that are sent last; 0: none",
    },
    Key {
        name: "delay-until-percent",
        unit: "percent, 0 to 100",
        default: "10",
        meaning: "they are delayed no longer when less than this much of memory remains",
    },
    Key {
        name: "max-delay",
        unit: "rounds, 0 to 1000",
        default: "50",
        meaning: "nor for more rounds than this",
    },
    Key {
        name: "memory-share",
        unit: "0 to 1024, or auto",
        default: "auto",
        meaning: "share of the link's time for memory while disks move",
    },
    Key {
        name: "disk-limit",
        unit: "rate, auto or off",
        default: "auto",
        meaning: "limit of the guest's writes to all moving disks while their rounds do not shrink",
    },
    Key {
        name: "switchover-bandwidth",
        unit: "rate or auto",
        default: "auto",
        meaning: "what the link carries at the switchover; auto: as measured",
    },
];

impl Settings {
    /// All settings, in the order in which help shows them.
    #[must_use]
    pub fn keys() -> &'static [Key] {
        &KEYS
    }

    /// Sets `key` to what `text` says.
    ///
    /// # Errors
    /// One line that names the key, the value and what is allowed. Nothing has changed then.
    pub fn set(&mut self, key: &str, text: &str) -> Result<(), SettingError> {
        let text = text.trim();
        let key = key.trim();
        match key {
            "downtime-limit" => {
                let limit = downtime(key, text)?;
                if self.downtime_ceiling.is_some_and(|ceiling| ceiling < limit) {
                    return Err(value(key, text, "it must not be above downtime-ceiling: raise that first"));
                }
                self.downtime_limit = limit;
            }
            "downtime-ceiling" => {
                let ceiling = if text == "off" { None } else { Some(downtime(key, text)?) };
                if ceiling.is_some_and(|ceiling| ceiling < self.downtime_limit) {
                    let allowed = format!(
                        "it must be at least downtime-limit, {}",
                        format_duration(self.downtime_limit)
                    );
                    return Err(value(key, text, &allowed));
                }
                self.downtime_ceiling = ceiling;
            }
            "patience" => self.patience = long(key, text, LONG)?,
            "finish-within" => {
                self.finish_within = match text {
                    "auto" => None,
                    // None at all is nothing that could be meant: "auto" would be in force.
                    _ => Some(long(key, text, WITHIN)?.ok_or_else(|| value(key, text, WITHIN))?),
                }
            }
            "throttle" => self.throttle = text.parse()?,
            "max-throttle" => self.max_throttle = f64::from(number(key, text, 99)? as u8) / 100.0,
            "delay-hot-percent" => self.delay_hot_percent = number(key, text, 90)? as u8,
            "delay-until-percent" => self.delay_until_percent = number(key, text, 100)? as u8,
            "max-delay" => self.max_delay = number(key, text, 1000)?,
            "memory-share" if text == "auto" => self.memory_share = None,
            "memory-share" => self.memory_share = Some(number(key, text, 1024)? as u16),
            "disk-limit" => {
                self.disk_limit = match text {
                    "auto" => DiskLimit::Auto,
                    "off" => DiskLimit::Off,
                    rate => match rate.parse() {
                        Ok(rate) => DiskLimit::Fixed(rate),
                        Err(error) => {
                            let allowed = "use a rate such as 30MiB/s, or auto, or off";
                            return Err(value(key, text, &error.readings_or(allowed)));
                        }
                    },
                }
            }
            "switchover-bandwidth" => {
                let allowed = "use a rate such as 10Gbit or 100MiB/s, or auto";
                self.switchover_bandwidth = match text {
                    "auto" => None,
                    rate => match rate.parse() {
                        Ok(rate) => Some(rate),
                        Err(error) => return Err(value(key, text, &error.readings_or(allowed))),
                    },
                }
            }
            _ => {
                let names: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
                return Err(SettingError::UnknownKey { key: key.to_owned(), known: names.join(", ") });
            }
        }
        Ok(())
    }

    /// What is set, by name, as it would be typed.
    #[must_use]
    pub fn shown(&self) -> Vec<(&'static str, String)> {
        let or = |text: Option<String>, otherwise: &str| text.unwrap_or_else(|| otherwise.to_owned());
        let value = |name: &str| match name {
            "downtime-limit" => format_duration(self.downtime_limit),
            "downtime-ceiling" => or(self.downtime_ceiling.map(format_duration), "off"),
            "patience" => or(self.patience.map(format_duration), "0s"),
            "finish-within" => or(self.finish_within.map(format_duration), "auto"),
            "throttle" => self.throttle.to_string(),
            "max-throttle" => format!("{:.0}", self.max_throttle * 100.0),
            "delay-hot-percent" => self.delay_hot_percent.to_string(),
            "delay-until-percent" => self.delay_until_percent.to_string(),
            "max-delay" => self.max_delay.to_string(),
            "memory-share" => or(self.memory_share.map(|share| share.to_string()), "auto"),
            "switchover-bandwidth" => or(self.switchover_bandwidth.map(|rate| rate.to_string()), "auto"),
            _ => match self.disk_limit {
                DiskLimit::Off => "off".to_owned(),
                DiskLimit::Auto => "auto".to_owned(),
                DiskLimit::Fixed(rate) => rate.to_string(),
            },
        };
        KEYS.iter().map(|key| (key.name, value(key.name))).collect()
    }

    /// Sets what `assignment`, a `key=value`, says.
    ///
    /// # Errors
    /// As [`Settings::set`]; also when there is no `=`.
    pub fn assign(&mut self, assignment: &str) -> Result<(), SettingError> {
        match assignment.split_once('=') {
            Some((key, text)) => self.set(key, text),
            None => Err(value(assignment, "", "write it as key=value, such as downtime-limit=300ms")),
        }
    }
}

fn value(key: &str, value: &str, allowed: &str) -> SettingError {
    SettingError::Value { key: key.to_owned(), value: value.to_owned(), allowed: allowed.to_owned() }
}

fn downtime(key: &str, text: &str) -> Result<Duration, SettingError> {
    let time = parse_duration(text).map_err(|error| value(key, text, &error.readings_or(DOWNTIME)))?;
    let bounds = Duration::from_millis(1)..=Duration::from_secs(3600);
    if bounds.contains(&time) { Ok(time) } else { Err(value(key, text, DOWNTIME)) }
}

/// A time that takes patience; `None` of zero.
fn long(key: &str, text: &str, allowed: &str) -> Result<Option<Duration>, SettingError> {
    let time = parse_duration(text).map_err(|error| value(key, text, &error.readings_or(allowed)))?;
    let fits = time.is_zero() || (1..=3_600_000).contains(&time.as_secs());
    if fits { Ok(Some(time).filter(|time| !time.is_zero())) } else { Err(value(key, text, allowed)) }
}

fn number(key: &str, text: &str, most: u32) -> Result<u32, SettingError> {
    let bare = text.strip_suffix('%').unwrap_or(text);
    bare.parse()
        .ok()
        .filter(|number| *number <= most)
        .ok_or_else(|| value(key, text, &format!("use a whole number from 0 to {most}")))
}

#[cfg(test)]
mod tests;
