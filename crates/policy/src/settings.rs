//! What the operator may set, before a migration and while it runs, under the names that are typed.
//!
//! A setting that cannot be taken changes nothing and says in one line which one it was, what was
//! given and what would do. [`Settings::TABLE`] is the one list that all else is made from:
//! parsing, what `godwit status` shows, help, completions, the manual and docs/settings.md.

mod rows;
mod table;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use godwit_units::TypedRate;

pub use table::{About, Felt, Setting, SettingError, Table, Takes, Value};

/// How the guest is slowed down when it outruns the link.
///
/// ```
/// use godwit_policy::{SettingError, ThrottleMode};
///
/// assert_eq!("governor".parse::<ThrottleMode>()?, ThrottleMode::Governor);
/// assert_eq!(ThrottleMode::default().to_string(), "adaptive");
/// # Ok::<(), SettingError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ThrottleMode {
    /// Not at all.
    Off,
    /// 90 % for 3 s, then 99 % for 3 s, then staged; staged at once when more than 5 s of sending
    /// remain.
    Direct,
    /// Each round a share of the one before, from the ratio of bandwidth to dirty rate.
    Staged,
    /// As QEMU does it: 20 %, then 10 % more after every two bad periods. Here for comparison.
    AutoConverge,
    /// The write governor where the machine offers one, else the least throttle that finishes in
    /// time, from the guest's measured response.
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

    /// The names, as the words of a setting.
    pub(crate) const NAMES: [(&'static str, &'static str); 7] = {
        let mut names = [("", ""); 7];
        let mut at = 0;
        while at < names.len() {
            names[at].0 = Self::ALL[at].1;
            at += 1;
        }
        names
    };
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
        found.map(|(mode, _)| *mode).ok_or_else(|| {
            let known: Vec<&str> = Self::ALL.iter().map(|(_, name)| *name).collect();
            let allowed = format!("use one of {}", known.join(", "));
            value("throttle", text, &allowed)
        })
    }
}

/// What the operator wants of one migration. Copied freely; a change while it runs goes through
/// [`Policy::change`](crate::Policy::change).
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::{SettingError, Settings};
///
/// let mut settings = Settings::default();
/// settings.set("downtime-limit", "50ms")?;
/// settings.assign("throttle=off")?;
/// assert_eq!(settings.downtime_limit, Duration::from_millis(50));
/// assert!(settings.set("downtime-limit", "soon").is_err(), "and nothing has changed");
/// # Ok::<(), SettingError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The downtime must not be expected to exceed this.
    pub downtime_limit: Duration,
    /// The limit may grow to this, step by step, while rounds make no progress; `None`: it never
    /// grows.
    pub downtime_ceiling: Option<Duration>,
    /// Give up when no round came closer to the limit for this long with all that helps in force;
    /// `None`: never.
    pub patience: Option<Duration>,
    /// How long copying may go on after the first round before `adaptive` throttles above 90 % or
    /// governs harder; `None`: twice as long as the first round took, at least 10 s.
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
    /// What the link carries when the guest is stopped; `None`: as measured. Downtimes are expected
    /// by it, rounds still go by what is measured.
    pub switchover_bandwidth: Option<TypedRate>,
}

/// Whether and how the guest's disk writes are limited.
///
/// ```
/// use godwit_policy::{DiskLimit, SettingError, Settings};
///
/// let mut settings = Settings::default();
/// assert_eq!(settings.disk_limit, DiskLimit::Auto);
/// settings.set("disk-limit", "20MiB/s")?;
/// assert!(matches!(settings.disk_limit, DiskLimit::Fixed(_)));
/// # Ok::<(), SettingError>(())
/// ```
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

impl Settings {
    /// All settings, in the order in which help shows them.
    pub const TABLE: Table<Self> = rows::ROWS;
    /// The steps in which the limit grows to its ceiling.
    pub const STEPS: u32 = 8;

    /// Sets `key` to what `text` says.
    ///
    /// # Errors
    /// One line that names the key, the value and what is allowed. Nothing has changed then.
    pub fn set(&mut self, key: &str, text: &str) -> Result<(), SettingError> {
        let row = Self::TABLE.find(key);
        row.ok_or_else(|| SettingError::unknown(key, Self::TABLE.about()))?.set(self, text)
    }

    /// Sets what `assignment`, a `key=value`, says.
    ///
    /// # Errors
    /// As [`Settings::set`]; also when there is no `=`.
    pub fn assign(&mut self, assignment: &str) -> Result<(), SettingError> {
        match assignment.split_once('=') {
            Some((key, text)) => self.set(key, text),
            None => {
                Err(value(assignment, "", "write it as key=value, such as downtime-limit=300ms"))
            }
        }
    }

    /// The downtime limit in force when it has grown by `steps` of [`Settings::STEPS`].
    #[must_use]
    pub fn limit_after(&self, steps: u32) -> Duration {
        let limit = self.downtime_limit;
        let ceiling = self.downtime_ceiling.unwrap_or(limit).max(limit);
        limit + (ceiling - limit) * steps.min(Self::STEPS) / Self::STEPS
    }
}

fn value(key: &str, value: &str, allowed: &str) -> SettingError {
    SettingError::Value {
        key: key.to_owned(),
        value: value.to_owned(),
        allowed: allowed.to_owned(),
    }
}

#[cfg(test)]
mod tests;
