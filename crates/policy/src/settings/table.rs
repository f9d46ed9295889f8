//! What a setting is: one row of a table, with all that help, documents and completions say of it,
//! and the two functions that put a value in and show it.
//!
//! Invariant: a row's text is parsed in one place, [`About::parse`], by the kind and the bounds
//! that the row declares; so what is refused and what the documents allow cannot differ. Rows say
//! nothing of where the settings are kept: the policy and the engine have a table each.

use std::time::Duration;

use godwit_units::{ParseError, TypedRate, format_duration, parse_duration};

/// What kind of value a setting takes beside its words, and within which bounds.
///
/// ```
/// use godwit_policy::{Settings, Takes};
///
/// let row = Settings::TABLE.find("throttle").expect("it is in the table");
/// assert_eq!(row.about.takes, Takes::Words);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Takes {
    /// Nothing but the words.
    Words,
    /// A time.
    Time {
        /// The shortest.
        least: Duration,
        /// The longest.
        most: Duration,
        /// Whether zero may be given as well.
        or_zero: bool,
        /// What one looks like.
        such_as: &'static str,
    },
    /// A whole number.
    Number {
        /// The smallest.
        least: u32,
        /// The largest.
        most: u32,
        /// What is counted; may be empty.
        unit: &'static str,
    },
    /// A rate.
    Rate {
        /// What one looks like.
        such_as: &'static str,
    },
    /// What the owner of the setting parses by himself.
    Other {
        /// What one looks like.
        such_as: &'static str,
    },
}

/// A value as it was parsed.
///
/// ```
/// use std::time::Duration;
///
/// use godwit_policy::{Settings, Value};
///
/// let row = Settings::TABLE.find("downtime-limit").expect("it is in the table");
/// assert_eq!(row.about.parse("50ms"), Ok(Value::Time(Duration::from_millis(50))));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// One of the row's words.
    Word(&'static str),
    /// A time within the bounds.
    Time(Duration),
    /// A number within the bounds.
    Number(u32),
    /// A rate.
    Rate(TypedRate),
    /// Of [`Takes::Other`]: the text itself.
    Other(&'a str),
}

/// When a change of a setting is felt in a migration that runs.
///
/// ```
/// use godwit_policy::{Felt, Settings};
///
/// let at_once = Settings::TABLE.about().filter(|about| about.felt == Felt::AtOnce);
/// for about in at_once {
///     println!("{} is in force within a tenth of a second", about.name);
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Felt {
    /// Within a tenth of a second.
    AtOnce,
    /// At the end of the round at the latest, when it is decided how to go on.
    RoundEnd,
}

/// What there is to say of a setting.
///
/// ```
/// use godwit_policy::Settings;
///
/// for about in Settings::TABLE.about() {
///     println!("{:<24} {} (default {})", about.name, about.meaning, about.default);
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct About {
    /// What is typed.
    pub name: &'static str,
    /// The values that it takes.
    pub takes: Takes,
    /// The words that it takes as well, each with what it stands for where that needs saying.
    pub words: &'static [(&'static str, &'static str)],
    /// Its value when nothing is said, as it is typed.
    pub default: &'static str,
    /// When a change is felt.
    pub felt: Felt,
    /// What it does.
    pub meaning: &'static str,
    /// Whether `godwit migrate` has an option of this name.
    pub option: bool,
}

/// One setting of `S`.
///
/// ```
/// use godwit_policy::{SettingError, Settings};
///
/// let row = Settings::TABLE.find("downtime-limit").expect("it is in the table");
/// let mut settings = Settings::default();
/// row.set(&mut settings, "50ms")?;
/// assert_eq!((row.show)(&settings), "50ms");
/// # Ok::<(), SettingError>(())
/// ```
#[derive(Debug)]
pub struct Setting<S: 'static> {
    /// What there is to say of it.
    pub about: About,
    /// Puts a value in, or says what would do instead and changes nothing.
    pub put: fn(&mut S, Value<'_>) -> Result<(), String>,
    /// The value as it is typed.
    pub show: fn(&S) -> String,
}

/// All settings of `S`, in the order in which help shows them.
///
/// ```
/// use godwit_policy::Settings;
///
/// let shown = Settings::TABLE.shown(&Settings::default());
/// assert!(shown.contains(&("downtime-limit", "300ms".to_owned())));
/// assert!(Settings::TABLE.find("downtime").is_none());
/// ```
#[derive(Debug)]
pub struct Table<S: 'static>(pub &'static [Setting<S>]);

/// Why a setting was not taken. Nothing has changed.
///
/// ```
/// use godwit_policy::Settings;
///
/// let error = Settings::default().set("patience", "long").unwrap_err();
/// assert!(error.to_string().starts_with("patience=long is not possible: use"));
/// ```
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

impl SettingError {
    /// There is no setting `key`; there are those of `rows`.
    pub fn unknown(key: &str, rows: impl Iterator<Item = &'static About>) -> Self {
        let known: Vec<&str> = rows.map(|about| about.name).collect();
        Self::UnknownKey { key: key.trim().to_owned(), known: known.join(", ") }
    }
}

impl<S> Table<S> {
    /// The row of `name`.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&'static Setting<S>> {
        self.0.iter().find(|row| row.about.name == name.trim())
    }

    /// What there is to say of each.
    pub fn about(&self) -> impl Iterator<Item = &'static About> {
        self.0.iter().map(|row| &row.about)
    }

    /// All values by name, as they are typed.
    #[must_use]
    pub fn shown(&self, settings: &S) -> Vec<(&'static str, String)> {
        self.0.iter().map(|row| (row.about.name, (row.show)(settings))).collect()
    }
}

impl<S> Setting<S> {
    /// Sets it in `settings` to what `text` says.
    ///
    /// # Errors
    /// One line that names the setting, the value and what is allowed. Nothing has changed then.
    pub fn set(&self, settings: &mut S, text: &str) -> Result<(), SettingError> {
        let value = self.about.parse(text)?;
        (self.put)(settings, value).map_err(|allowed| self.about.refuse(text, allowed))
    }
}

impl About {
    /// What `text` says.
    ///
    /// # Errors
    /// One line that names the setting, the value and what is allowed.
    pub fn parse<'a>(&self, text: &'a str) -> Result<Value<'a>, SettingError> {
        let text = text.trim();
        if let Some((word, _)) = self.words.iter().find(|(word, _)| *word == text) {
            return Ok(Value::Word(word));
        }
        let no = || self.refuse(text, self.allowed());
        let unclear = |error: ParseError| self.refuse(text, error.readings_or(&self.allowed()));
        match self.takes {
            Takes::Words => Err(no()),
            Takes::Time { least, most, or_zero, .. } => {
                let time = parse_duration(text).map_err(unclear)?;
                let fits = (least..=most).contains(&time) || or_zero && time.is_zero();
                fits.then_some(Value::Time(time)).ok_or_else(no)
            }
            Takes::Number { least, most, .. } => {
                let bare = text.strip_suffix('%').unwrap_or(text);
                let number = bare.parse().ok().filter(|number| (least..=most).contains(number));
                number.map(Value::Number).ok_or_else(no)
            }
            Takes::Rate { .. } => text.parse().map(Value::Rate).map_err(unclear),
            Takes::Other { .. } => Ok(Value::Other(text)),
        }
    }

    /// What would do, as the cure in a refusal.
    #[must_use]
    pub fn allowed(&self) -> String {
        let kind = match self.takes {
            Takes::Words => {
                let words: Vec<&str> = self.words.iter().map(|(word, _)| *word).collect();
                let (last, others) = words.split_last().unwrap_or((&"", &[]));
                return format!("use {} or {last}", others.join(", "));
            }
            Takes::Time { least, most, such_as, .. } => {
                format!("use a time from {} to {}, such as {such_as}", whole(least), whole(most))
            }
            Takes::Number { least, most, .. } => {
                format!("use a whole number from {least} to {most}")
            }
            Takes::Rate { such_as } => format!("use a rate such as {such_as}"),
            Takes::Other { such_as } => format!("use {such_as}"),
        };
        let words = self.words.iter().map(|(word, stands_for)| match *stands_for {
            "" => format!(", or {word}"),
            stands_for => format!(", or {word} for {stands_for}"),
        });
        std::iter::once(kind).chain(words).collect()
    }

    /// The values that it takes, in a few words: unit and range.
    #[must_use]
    pub fn values(&self) -> String {
        let kind = match self.takes {
            Takes::Words => None,
            Takes::Time { least, most, .. } => {
                Some(format!("time, {} to {}", whole(least), whole(most)))
            }
            Takes::Number { least, most, unit: "" } => Some(format!("{least} to {most}")),
            Takes::Number { least, most, unit } => Some(format!("{unit}, {least} to {most}")),
            Takes::Rate { .. } => Some("rate".to_owned()),
            Takes::Other { such_as } => Some(such_as.to_owned()),
        };
        let words = self.words.iter().map(|(word, _)| (*word).to_owned());
        let all: Vec<String> = kind.into_iter().chain(words).collect();
        match all.split_last() {
            Some((last, others)) if !others.is_empty() => {
                let comma =
                    if matches!(self.takes, Takes::Words) || others.len() > 1 { "" } else { "," };
                format!("{}{comma} or {last}", others.join(", "))
            }
            _ => all.concat(),
        }
    }

    /// What stands for a value in a line of usage.
    #[must_use]
    pub fn placeholder(&self) -> &'static str {
        match self.takes {
            Takes::Words => "MODE",
            Takes::Time { .. } => "TIME",
            Takes::Number { .. } => "N",
            Takes::Rate { .. } => "RATE",
            Takes::Other { .. } => "CODEC",
        }
    }

    fn refuse(&self, text: &str, allowed: String) -> SettingError {
        let (key, value) = (self.name.to_owned(), text.trim().to_owned());
        SettingError::Value { key, value, allowed }
    }
}

/// What a row's kind of value makes certain. Of another kind it is nothing: rows cannot mix them up
/// unnoticed, for each default is put in and shown by a test.
impl Value<'_> {
    pub(super) fn time(self) -> Duration {
        if let Self::Time(time) = self { time } else { Duration::ZERO }
    }

    /// A whole number; 0 where it is none.
    #[must_use]
    pub fn number(self) -> u32 {
        if let Self::Number(number) = self { number } else { 0 }
    }

    /// `None`: a word.
    #[must_use]
    pub fn rate(self) -> Option<TypedRate> {
        if let Self::Rate(rate) = self { Some(rate) } else { None }
    }

    /// `None`: a word.
    pub(super) fn or_word(self) -> Option<Self> {
        if matches!(self, Self::Word(_)) { None } else { Some(self) }
    }
}

/// Whole hours as such: `1h` and not `60min`.
fn whole(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds > 0 && seconds % 3600 == 0 => format!("{}h", seconds / 3600),
        _ => format_duration(time),
    }
}
