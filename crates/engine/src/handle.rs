//! A handle on a migration in progress: for whoever looks at it, changes it or ends it while it
//! runs.
//!
//! Invariant: a change is either taken whole or refused with the reason, and after the switchover
//! has begun none is taken. The settings are kept here and nowhere else: the engine reads the
//! handle at every tick and puts in force what it finds, and where it cannot, it changes them here
//! too, so that whoever looks sees what is in force.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_policy::{
    About, Felt, Setting, SettingError, Settings, Table, Takes, ThrottleMode, Value,
};
use godwit_units::{TypedRate, format_duration};
use godwit_wire::CHANNELS_LIMIT;

use crate::Cancel;
use crate::address::Address;
use crate::compression::Compression;
use crate::report::Progress;

/// The handle. Cloning shares it.
///
/// ```
/// use godwit_engine::handle::MigrationHandle;
///
/// let handle = MigrationHandle::default();
/// // Another thread changes what the one that migrates goes by.
/// let set = |name: &str, value: &str| handle.set(&[(name.to_owned(), value.to_owned())]);
/// set("max-bandwidth", "1Gbit")?;
/// assert!(set("max-bandwidth", "fast").is_err());
/// # Ok::<(), godwit_engine::handle::HandleError>(())
/// ```
#[derive(Clone, Debug)]
pub struct MigrationHandle {
    cancel: Cancel,
    live: Arc<Mutex<Live>>,
}

impl Open {
    /// Whether all is taken; how far it is, if not.
    fn all(self) -> Result<(), HandleError> {
        match self {
            Self::All => Ok(()),
            Self::Following => Err(HandleError::Follows),
            Self::Nothing => Err(HandleError::TooLate),
        }
    }
}

/// Settings that can be changed while what is left follows.
const FOLLOWING: [&str; 2] = ["max-bandwidth", "compression"];

/// What is taken of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    All,
    /// The guest runs at the destination, and what is left follows: by which way, and how fast.
    Following,
    Nothing,
}

#[derive(Debug)]
struct Live {
    settings: Settings,
    own: Own,
    /// Whether something was set that the engine has not looked at yet.
    changed: bool,
    /// The steps by which the policy has let the downtime limit grow.
    limit_steps: u32,
    switch_over: bool,
    /// What is left is to follow when the guest runs at the destination.
    post_copy: bool,
    /// Why that cannot be, if it cannot, as soon as that is known.
    post_copy_refusal: Option<Option<String>>,
    takes: Open,
    progress: Option<Progress>,
    /// Where the guest goes, once that has begun.
    to: Option<Address>,
    /// Channels of memory from the next connections on, where that was said.
    channels: Option<u8>,
    /// What was set before it began, as it was typed.
    typed: Vec<(String, String)>,
}

/// The settings that are the engine's own.
///
/// ```
/// use godwit_engine::handle::Own;
///
/// let own = Own::default();
/// assert_eq!((own.max_bandwidth, own.compression.to_string().as_str()), (None, "auto"));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Own {
    /// The most that is sent; `None`: all that the link carries.
    pub max_bandwidth: Option<TypedRate>,
    /// How pages are compressed.
    pub compression: Compression,
    /// The most processor time that channels take, in hundredths of a processor; `None`: all that
    /// they want.
    pub cpu_budget: Option<NonZeroU32>,
}

impl Own {
    /// The engine's own settings, in the order in which help shows them.
    pub const TABLE: Table<Self> = Table(&[
        Setting {
            about: About {
                name: "max-bandwidth",
                takes: Takes::Rate { such_as: "10Gbit or 128MiB/s" },
                words: &[("off", "all that the link carries")],
                default: "off",
                felt: Felt::AtOnce,
                meaning: "the most that is sent; off: all that the link carries",
                option: true,
            },
            put: |own, value| {
                own.max_bandwidth = value.rate();
                Ok(())
            },
            show: |own| own.max_bandwidth.map_or_else(|| "off".to_owned(), |rate| rate.to_string()),
        },
        Setting {
            about: About {
                name: "compression",
                takes: Takes::Other { such_as: "lz4:1 to lz4:1000, zstd:-50 to zstd:19" },
                words: &[("auto", ""), ("none", ""), ("lz4", ""), ("zstd", "")],
                default: "auto",
                felt: Felt::AtOnce,
                meaning: "how pages are compressed; auto: by link, processor and pages, anew all \
                          the time, and not within a host, but under max-bandwidth",
                option: true,
            },
            put: |own, value| {
                let (Value::Word(text) | Value::Other(text)) = value else { return Ok(()) };
                own.compression = text.parse()?;
                Ok(())
            },
            show: |own| own.compression.to_string(),
        },
        Setting {
            about: About {
                name: "cpu-budget",
                takes: Takes::Number { least: 1, most: 100_000, unit: "percent" },
                words: &[("off", "all that they want")],
                default: "off",
                felt: Felt::AtOnce,
                meaning: "the most processor time for reading, compressing and sending, 100%: one \
                          processor; from when the guest is stopped there is no limit, but \
                          downtimes are expected by what was sent before",
                option: true,
            },
            put: |own, value| {
                own.cpu_budget = NonZeroU32::new(value.number());
                Ok(())
            },
            show: |own| own.cpu_budget.map_or_else(|| "off".to_owned(), |it| format!("{it}%")),
        },
    ]);
}

/// All that can be set, the policy's and the engine's own, in the order in which help shows it.
///
/// ```
/// let names: Vec<&str> = godwit_engine::handle::all_settings().map(|about| about.name).collect();
/// assert!(names.contains(&"downtime-limit") && names.contains(&"max-bandwidth"));
/// ```
pub fn all_settings() -> impl Iterator<Item = &'static About> {
    Settings::TABLE.about().chain(Own::TABLE.about())
}

/// Why a change was refused. Nothing has changed.
///
/// ```
/// use godwit_engine::handle::{HandleError, MigrationHandle};
///
/// // Nothing runs yet whose end could be foretold.
/// assert_eq!(MigrationHandle::default().switch_over(false), Err(HandleError::NotYet));
/// ```
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HandleError {
    /// The name or the value is wrong.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The guest is being handed over.
    #[error("the switchover has begun: nothing can be changed any more")]
    TooLate,
    /// The guest runs at the destination already.
    #[error(
        "the guest has left and its memory follows: only max-bandwidth and compression can still \
         be changed, and the way (godwit redirect)"
    )]
    Follows,
    /// It would leave this host, which it was not to do.
    #[error(
        "{to} is beyond this host, and this migration may be unencrypted since it began within \
         it: cancel it, and migrate to that address with keys or with --insecure"
    )]
    Beyond {
        /// The other address.
        to: Address,
    },
    /// No round has ended yet.
    #[error("the first round is under way and the downtime not known yet: wait, or use --force")]
    NotYet,
    /// What is left cannot follow when the guest runs at the destination.
    #[error("post-copy is not possible: {0}")]
    NoPostCopy(String),
    /// It would be above the limit.
    #[error(
        "the downtime would be {}, above the limit of {}: raise downtime-limit, or use --force",
        format_duration(*expected), format_duration(*limit)
    )]
    AboveLimit {
        /// The expected downtime.
        expected: Duration,
        /// The limit in force.
        limit: Duration,
    },
}

impl Default for MigrationHandle {
    /// One with the usual settings.
    fn default() -> Self {
        Self::new(Settings::default(), Own::default(), Cancel::default())
    }
}

impl MigrationHandle {
    /// A handle on a migration that begins with these settings.
    #[must_use]
    pub fn new(settings: Settings, own: Own, cancel: Cancel) -> Self {
        let live = Live {
            settings,
            own,
            changed: false,
            limit_steps: 0,
            switch_over: false,
            post_copy: false,
            post_copy_refusal: None,
            takes: Open::All,
            progress: None,
            to: None,
            channels: None,
            typed: Vec::new(),
        };
        Self { cancel, live: Arc::new(Mutex::new(live)) }
    }

    /// A handle on a migration that begins with the defaults and what is set in `typed` (names and
    /// values).
    ///
    /// # Errors
    /// The first that cannot be taken.
    pub fn typed(typed: Vec<(String, String)>, cancel: Cancel) -> Result<Self, HandleError> {
        let handle = Self::new(Settings::default(), Own::default(), cancel);
        handle.set(&typed)?;
        let mut live = handle.live();
        live.changed = false;
        live.typed = typed;
        drop(live);
        Ok(handle)
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

    /// Sets all of `typed`, names ([`all_settings`]) and values. In force at the next tick.
    ///
    /// # Errors
    /// When there is no such setting, a value is not possible, or the switchover has begun; when
    /// what is left follows (post-copy), only how fast that may can be set. Then none is set.
    pub fn set(&self, typed: &[(String, String)]) -> Result<(), HandleError> {
        let mut live = self.live();
        if live.takes == Open::Nothing {
            return Err(HandleError::TooLate);
        }
        let (mut settings, mut own) = (live.settings, live.own);
        for (key, value) in typed {
            if live.takes == Open::Following && !FOLLOWING.contains(&key.as_str()) {
                return Err(HandleError::Follows);
            }
            if let Some(row) = Settings::TABLE.find(key) {
                row.set(&mut settings, value)?;
            } else if let Some(row) = Own::TABLE.find(key) {
                row.set(&mut own, value)?;
            } else {
                return Err(SettingError::unknown(key, all_settings()).into());
            }
        }
        (live.settings, live.own) = (settings, own);
        live.changed = true;
        Ok(())
    }

    /// Asks for the switchover now. Without `force` only if the expected downtime is within the
    /// limit.
    ///
    /// # Errors
    /// When it has begun already, or the downtime would be too long.
    pub fn switch_over(&self, force: bool) -> Result<(), HandleError> {
        let mut live = self.live();
        live.takes.all()?;
        if !force {
            let expected = live.progress.as_ref().and_then(|progress| progress.expected_downtime);
            let expected = expected.ok_or(HandleError::NotYet)?;
            let limit = live.settings.limit_after(live.limit_steps);
            if expected > limit {
                return Err(HandleError::AboveLimit { expected, limit });
            }
        }
        live.switch_over = true;
        Ok(())
    }

    /// Asks for the switchover now, whatever is left: that follows when the guest runs at the
    /// destination (post-copy). Should the network fail meanwhile, those of its processors wait
    /// that need what has not come; should this host, the guest is lost.
    ///
    /// # Errors
    /// When the switchover has begun already, or this is not possible.
    pub fn switch_over_by_post_copy(&self) -> Result<(), HandleError> {
        let mut live = self.live();
        live.takes.all()?;
        match &live.post_copy_refusal {
            Some(None) => {}
            Some(Some(why)) => return Err(HandleError::NoPostCopy(why.clone())),
            None => {
                let why = "the destination has not accepted yet: wait".to_owned();
                return Err(HandleError::NoPostCopy(why));
            }
        }
        (live.switch_over, live.post_copy) = (true, true);
        Ok(())
    }

    /// Whether post-copy is possible: why not, if it is not.
    pub(crate) fn post_copy_is(&self, refusal: Option<String>) {
        self.live().post_copy_refusal = Some(refusal);
    }

    /// Whether what is left is to follow when the guest runs at the destination.
    pub(crate) fn wants_post_copy(&self) -> bool {
        self.live().post_copy
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
        let mut shown = Settings::TABLE.shown(&live.settings);
        shown.extend(Own::TABLE.shown(&live.own));
        shown
    }

    /// The downtime limit in force: the one that is set, or what the policy has let it grow to.
    #[must_use]
    pub fn limit(&self) -> Duration {
        let live = self.live();
        live.settings.limit_after(live.limit_steps)
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

    /// Has the migration go on by another way when its connections are lost and made again: to
    /// another address of its destination, or with another number of channels of memory (1 to 16).
    /// `None` leaves what there is.
    pub fn go_by(&self, to: Option<Address>, channels: Option<u8>) {
        let mut live = self.live();
        live.to = to.or(live.to.take());
        live.channels = channels.map(|count| count.clamp(1, CHANNELS_LIMIT)).or(live.channels);
    }

    /// The same for an operator: it has to make sense as the migration stands.
    ///
    /// # Errors
    /// When the guest is being handed over: connections are not made again then, but for what
    /// follows it in post-copy. And when a
    /// migration within this host would leave it, which need not be encrypted.
    pub fn redirect(&self, to: Option<Address>, channels: Option<u8>) -> Result<(), HandleError> {
        let (takes, from) = {
            let live = self.live();
            (live.takes, live.to.clone())
        };
        if takes == Open::Nothing {
            return Err(HandleError::TooLate);
        }
        let stays = |address: &Address| address.is_local();
        if let Some(to) = to.clone().filter(|to| !stays(to) && from.as_ref().is_none_or(stays)) {
            return Err(HandleError::Beyond { to });
        }
        self.go_by(to, channels);
        Ok(())
    }

    /// Channels of memory from the next connections on, where that was said.
    pub(crate) fn channels(&self) -> Option<u8> {
        self.live().channels
    }

    /// The settings to begin with, on the way to `to`.
    pub(crate) fn begin(&self, to: &Address) -> (Settings, Own) {
        let mut live = self.live();
        live.to = Some(to.clone());
        (live.settings, live.own)
    }

    /// All that is set, if something was since the last call.
    pub(crate) fn take_changes(&self) -> Option<(Settings, Own)> {
        let mut live = self.live();
        std::mem::take(&mut live.changed).then_some((live.settings, live.own))
    }

    /// The guest cannot be slowed down as it is set: `throttle` is in force from now on. Returns
    /// all settings that then hold.
    pub(crate) fn fall_back(&self, throttle: ThrottleMode) -> Settings {
        let mut live = self.live();
        live.settings.throttle = throttle;
        live.settings
    }

    /// The policy has let the downtime limit grow by `steps`.
    pub(crate) fn limit_has_grown(&self, steps: u32) {
        self.live().limit_steps = steps;
    }

    /// Whether the switchover was asked for.
    pub(crate) fn wants_switch_over(&self) -> bool {
        self.live().switch_over
    }

    /// From now on nothing is taken.
    pub(crate) fn close(&self) {
        self.live().takes = Open::Nothing;
    }

    /// The guest runs at the destination, and what is left follows: how can still be changed.
    pub(crate) fn follows(&self) {
        self.live().takes = Open::Following;
    }

    pub(crate) fn report(&self, progress: &Progress) {
        self.live().progress = Some(progress.clone());
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle() -> MigrationHandle {
        MigrationHandle::new(Settings::default(), Own::default(), Cancel::default())
    }

    fn typed(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn a_change_is_taken_whole_or_refused_with_the_reason() {
        let handle = handle();
        handle.set(&typed(&[("downtime-limit", "50ms"), ("max-bandwidth", "128MiB/s")])).unwrap();
        for (key, value, words) in [
            (
                "max-bandwidth",
                "1G",
                "'1G' is ambiguous: write 1Gbit (119MiB/s) or 1GiB/s (8.59Gbit)",
            ),
            ("downtime-limit", "soon", "downtime-limit=soon is not possible: use a time"),
            ("max-bandwidth", "0", "max-bandwidth=0 is not possible: use a rate"),
            ("cpu-budget", "0%", "cpu-budget=0% is not possible: use a whole number from 1"),
            ("speed", "9", "there is no setting 'speed': use one of"),
        ] {
            let error =
                handle.set(&typed(&[("patience", "5s"), (key, value)])).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            assert!(!words.contains("use one of") || error.contains("max-bandwidth"), "{error}");
        }
        let (taken, own) = handle.take_changes().unwrap();
        assert_eq!(taken.downtime_limit, Duration::from_millis(50));
        assert_eq!(taken.patience, Settings::default().patience);
        assert_eq!(own.max_bandwidth, Some("128MiB/s".parse().unwrap()));
        assert_eq!(handle.take_changes(), None);
        let settings = handle.settings();
        assert!(settings.contains(&("downtime-limit", "50ms".to_owned())));
        assert!(settings.contains(&("patience", "60s".to_owned())), "{settings:?}");
        assert!(settings.contains(&("max-bandwidth", "128MiB/s".to_owned())), "{settings:?}");
        handle.set(&typed(&[("max-bandwidth", "40Mbit")])).unwrap();
        assert!(
            handle.settings().contains(&("max-bandwidth", "40Mbit".to_owned())),
            "as it was typed"
        );
    }

    #[test]
    fn how_what_is_left_follows_can_be_changed_and_nothing_else() {
        let handle = handle();
        handle.close();
        handle.follows();
        handle.set(&typed(&[("max-bandwidth", "off"), ("compression", "none")])).unwrap();
        assert!(handle.take_changes().is_some());
        // Mutation: some of it is set.
        let too_much = typed(&[("max-bandwidth", "1MiB/s"), ("throttle", "off")]);
        assert_eq!(handle.set(&too_much), Err(HandleError::Follows));
        assert!(handle.settings().contains(&("max-bandwidth", "off".to_owned())));
        assert_eq!(handle.switch_over(true), Err(HandleError::Follows));
        assert_eq!(handle.redirect(None, Some(3)), Ok(()));
        assert_eq!(handle.channels(), Some(3));
    }

    #[test]
    fn nothing_is_taken_once_the_switchover_has_begun() {
        let handle = handle();
        handle.close();
        assert_eq!(handle.set(&typed(&[("downtime-limit", "50ms")])), Err(HandleError::TooLate));
        assert_eq!(handle.switch_over(true), Err(HandleError::TooLate));
        assert_eq!(handle.take_changes(), None);
    }

    fn progress(expected: Duration) -> Progress {
        serde_json::from_value(serde_json::json!({
            "elapsed_ms": 0.0, "stage": "pre-copy", "round": 3, "round_ended": true,
            "sent_bytes": 0, "remaining_bytes": 0, "dirty_bytes_per_second": null,
            "bandwidth_bytes_per_second": null, "remaining_time": null, "throttle": 0.0,
            "guest_speed": null, "delayed_segments": 0, "advice": null, "warning": null,
            "expected_downtime_ms": expected.as_secs_f64() * 1e3,
        }))
        .unwrap()
    }

    #[test]
    fn a_switchover_goes_by_the_limit_that_the_policy_has_let_grow() {
        // Regression: it was refused by the limit as it had been set.
        let handle = handle();
        handle.set(&typed(&[("downtime-ceiling", "1100ms")])).unwrap();
        handle.report(&progress(Duration::from_millis(600)));
        let above = |limit| HandleError::AboveLimit {
            expected: Duration::from_millis(600),
            limit: Duration::from_millis(limit),
        };
        assert_eq!(handle.switch_over(false), Err(above(300)));
        handle.limit_has_grown(2);
        assert_eq!(handle.switch_over(false), Err(above(500)));
        handle.limit_has_grown(3);
        assert_eq!(handle.limit(), Duration::from_millis(600));
        assert_eq!(handle.switch_over(false), Ok(()));
    }

    #[test]
    fn what_is_shown_after_a_fall_back_is_in_force_and_keeps_what_was_set_meanwhile() {
        let handle = handle();
        handle.set(&typed(&[("throttle", "governor"), ("patience", "5s")])).unwrap();
        let settings = handle.fall_back(ThrottleMode::Adaptive);
        assert_eq!(settings.patience, Some(Duration::from_secs(5)));
        assert_eq!(handle.take_changes().map(|(settings, _)| settings), Some(settings));
        assert!(handle.settings().contains(&("throttle", "adaptive".to_owned())));
    }

    #[test]
    fn a_switchover_above_the_limit_needs_force() {
        let handle = handle();
        assert_eq!(handle.switch_over(false), Err(HandleError::NotYet));
        assert!(!handle.wants_switch_over());
        handle.switch_over(true).unwrap();
        assert!(handle.wants_switch_over());
    }
}
