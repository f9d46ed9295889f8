//! A handle on a migration in progress: for whoever looks at it, changes it or ends it while it runs.
//!
//! Invariant: a change is either taken whole or refused with the reason, and after the switchover has begun none is
//! taken. The engine reads the handle at every tick and puts in force what it finds.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_policy::{SettingError, Settings};
use godwit_units::{ParseError, Rate, TypedRate, format_duration};

use crate::Cancel;
use crate::address::Address;
use crate::compression::Compression;
use crate::report::Progress;

/// The settings that are the engine's own and not the policy's.
pub const MAX_BANDWIDTH: &str = "max-bandwidth";
/// See [`Compression`].
pub const COMPRESSION: &str = "compression";
/// What `max-bandwidth` may be set to.
const ALLOWED: &str = "use a rate such as 10Gbit or 128MiB/s, or off for all that the link carries";

/// The handle. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Steering {
    cancel: Cancel,
    live: Arc<Mutex<Live>>,
}

#[derive(Debug)]
struct Live {
    settings: Settings,
    own: Own,
    changes: Vec<Change>,
    switch_over: bool,
    closed: bool,
    progress: Option<Progress>,
    /// Where the guest goes, once that has begun.
    to: Option<Address>,
    /// What was set before it began, as it was typed.
    typed: Vec<(String, String)>,
}

/// The settings that are the engine's own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Own {
    /// The most that is sent; `None`: all that the link carries.
    pub max_bandwidth: Option<TypedRate>,
    /// How pages are compressed.
    pub compression: Compression,
}

/// A change that was taken and is not in force yet.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Change {
    /// One for the policy: name and value.
    Setting(String, String),
    /// One for the limiter.
    MaxBandwidth(Option<Rate>),
    /// One for the channels.
    Compression(Compression),
}

/// Why a change was refused. Nothing has changed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SteeringError {
    /// The name or the value is wrong.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The guest is being handed over.
    #[error("the switchover has begun: nothing can be changed any more")]
    TooLate,
    /// No round has ended yet.
    #[error("the first round is under way and the downtime not known yet: wait, or use --force")]
    NotYet,
    /// It would be above the limit.
    #[error("the downtime would be {}, above the limit of {}: raise downtime-limit, or use --force", format_duration(*expected), format_duration(*limit))]
    AboveLimit {
        /// The expected downtime.
        expected: Duration,
        /// The limit in force.
        limit: Duration,
    },
}

impl Default for Steering {
    /// One with the usual settings.
    fn default() -> Self {
        Self::new(Settings::default(), Own::default(), Cancel::default())
    }
}

impl Steering {
    /// A handle on a migration that begins with these settings.
    #[must_use]
    pub fn new(settings: Settings, own: Own, cancel: Cancel) -> Self {
        let live = Live {
            settings,
            own,
            changes: Vec::new(),
            switch_over: false,
            closed: false,
            progress: None,
            to: None,
            typed: Vec::new(),
        };
        Self { cancel, live: Arc::new(Mutex::new(live)) }
    }

    /// A handle on a migration that begins with the defaults and what is set in `typed` (names and values).
    ///
    /// # Errors
    /// The first that cannot be taken.
    pub fn typed(typed: Vec<(String, String)>, cancel: Cancel) -> Result<Self, SteeringError> {
        let steering = Self::new(Settings::default(), Own::default(), cancel);
        steering.set(&typed)?;
        let mut live = steering.live();
        live.changes.clear();
        live.typed = typed;
        drop(live);
        Ok(steering)
    }

    /// What it was begun with, as it was typed.
    #[must_use]
    pub fn as_typed(&self) -> Vec<(String, String)> {
        self.live().typed.clone()
    }

    /// The wish to end it, which may come until COMMIT.
    #[must_use]
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Sets all of `typed`, names ([`Settings::keys`] and [`MAX_BANDWIDTH`]) and values. In force at the next tick.
    ///
    /// # Errors
    /// When there is no such setting, a value is not possible, or the switchover has begun. Then none is set.
    pub fn set(&self, typed: &[(String, String)]) -> Result<(), SteeringError> {
        let mut live = self.live();
        if live.closed {
            return Err(SteeringError::TooLate);
        }
        let (mut settings, mut own) = (live.settings, live.own);
        let mut changes = Vec::new();
        for (key, value) in typed {
            match key.trim() {
                MAX_BANDWIDTH => {
                    own.max_bandwidth = parse_bandwidth(value)?;
                    changes.push(Change::MaxBandwidth(own.max_bandwidth.map(TypedRate::rate)));
                    continue;
                }
                COMPRESSION => {
                    own.compression = value.parse().map_err(|allowed| SettingError::Value {
                        key: key.clone(),
                        value: value.clone(),
                        allowed,
                    })?;
                    changes.push(Change::Compression(own.compression));
                    continue;
                }
                _ => {}
            }
            settings.set(key, value).map_err(|error| match error {
                SettingError::UnknownKey { key, known } => SettingError::UnknownKey {
                    key,
                    known: format!("{known}, {MAX_BANDWIDTH}, {COMPRESSION}"),
                },
                error => error,
            })?;
            changes.push(Change::Setting(key.clone(), value.clone()));
        }
        (live.settings, live.own) = (settings, own);
        live.changes.append(&mut changes);
        Ok(())
    }

    /// Asks for the switchover now. Without `force` only if the expected downtime is within the limit.
    ///
    /// # Errors
    /// When it has begun already, or the downtime would be too long.
    pub fn switch_over(&self, force: bool) -> Result<(), SteeringError> {
        let mut live = self.live();
        if live.closed {
            return Err(SteeringError::TooLate);
        }
        if !force {
            let expected = live.progress.as_ref().and_then(|progress| progress.expected_downtime);
            let expected = expected.ok_or(SteeringError::NotYet)?;
            let limit = live.settings.downtime_limit;
            if expected > limit {
                return Err(SteeringError::AboveLimit { expected, limit });
            }
        }
        live.switch_over = true;
        Ok(())
    }

    /// The last look at it; `None` before the first.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        self.live().progress.clone()
    }

    /// What is set now, by name.
    #[must_use]
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let live = self.live();
        let mut shown = live.settings.shown();
        let most = live.own.max_bandwidth.map_or_else(|| "off".to_owned(), |rate| rate.to_string());
        shown.extend([(MAX_BANDWIDTH, most), (COMPRESSION, live.own.compression.to_string())]);
        shown
    }

    /// The policy's settings as they are now.
    #[must_use]
    pub fn policy(&self) -> Settings {
        self.live().settings
    }

    /// How pages are compressed now.
    #[must_use]
    pub fn compression(&self) -> Compression {
        self.live().own.compression
    }

    /// Where the guest goes; `None` before it has begun.
    #[must_use]
    pub fn to(&self) -> Option<Address> {
        self.live().to.clone()
    }

    /// The settings to begin with, on the way to `to`.
    pub(crate) fn begin(&self, to: &Address) -> (Settings, Own) {
        let mut live = self.live();
        live.to = Some(to.clone());
        (live.settings, live.own)
    }

    /// Changes since the last call.
    pub(crate) fn take_changes(&self) -> Vec<Change> {
        std::mem::take(&mut self.live().changes)
    }

    /// Whether the switchover was asked for.
    pub(crate) fn wants_switch_over(&self) -> bool {
        self.live().switch_over
    }

    /// From now on nothing is taken.
    pub(crate) fn close(&self) {
        self.live().closed = true;
    }

    pub(crate) fn report(&self, progress: &Progress) {
        self.live().progress = Some(progress.clone());
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is typed for [`MAX_BANDWIDTH`].
///
/// # Errors
/// One line that says what would do.
fn parse_bandwidth(value: &str) -> Result<Option<TypedRate>, SettingError> {
    match value.trim() {
        "off" => Ok(None),
        text => text.parse().map(Some).map_err(|error: ParseError| SettingError::Value {
            key: MAX_BANDWIDTH.to_owned(),
            value: text.to_owned(),
            allowed: error.readings_or(ALLOWED),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steering() -> Steering {
        Steering::new(Settings::default(), Own::default(), Cancel::default())
    }

    fn typed(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn a_change_is_taken_whole_or_refused_with_the_reason() {
        let steering = steering();
        steering.set(&typed(&[("downtime-limit", "50ms"), ("max-bandwidth", "128MiB/s")])).unwrap();
        for (key, value, words) in [
            ("max-bandwidth", "1G", "'1G' is ambiguous: write 1Gbit (119MiB/s) or 1GiB/s (8.59Gbit)"),
            ("downtime-limit", "soon", "downtime-limit=soon is not possible: use a time"),
            ("max-bandwidth", "0", "max-bandwidth=0 is not possible: use a rate"),
            ("speed", "9", "there is no setting 'speed': use one of"),
        ] {
            let error = steering.set(&typed(&[("patience", "5s"), (key, value)])).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            assert!(!words.contains("use one of") || error.contains("max-bandwidth"), "{error}");
        }
        let taken = steering.take_changes();
        assert_eq!(taken.len(), 2);
        assert_eq!(taken[0], Change::Setting("downtime-limit".to_owned(), "50ms".to_owned()));
        let settings = steering.settings();
        assert!(settings.contains(&("downtime-limit", "50ms".to_owned())));
        assert!(settings.contains(&("patience", "60s".to_owned())), "{settings:?}");
        assert!(settings.contains(&("max-bandwidth", "128MiB/s".to_owned())), "{settings:?}");
        steering.set(&typed(&[("max-bandwidth", "40Mbit")])).unwrap();
        assert!(steering.settings().contains(&("max-bandwidth", "40Mbit".to_owned())), "as it was typed");
    }

    #[test]
    fn nothing_is_taken_once_the_switchover_has_begun() {
        let steering = steering();
        steering.close();
        assert_eq!(steering.set(&typed(&[("downtime-limit", "50ms")])), Err(SteeringError::TooLate));
        assert_eq!(steering.switch_over(true), Err(SteeringError::TooLate));
        assert!(steering.take_changes().is_empty());
    }

    #[test]
    fn a_switchover_above_the_limit_needs_force() {
        let steering = steering();
        assert_eq!(steering.switch_over(false), Err(SteeringError::NotYet));
        assert!(!steering.wants_switch_over());
        steering.switch_over(true).unwrap();
        assert!(steering.wants_switch_over());
    }
}
