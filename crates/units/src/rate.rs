//! Rates: how fast bytes pass a link or become dirty.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::ByteCount;
use crate::parse::{self, ParseError};

/// Bytes per second, kept as a float since rates are measured and averaged; never negative, never
/// NaN. Parsed as bits (`10Gbit`, `800Mbit`) or bytes per second (`128MiB/s`, `1GB/s`).
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Default)]
pub struct Rate(f64);

impl Rate {
    /// Nothing passes.
    pub const ZERO: Self = Self(0.0);

    /// The rate of `bytes` each second; what is negative or not a number becomes zero.
    #[must_use]
    pub fn from_bytes_per_second(bytes: f64) -> Self {
        Self(if bytes > 0.0 { bytes } else { 0.0 })
    }

    /// Bytes each second.
    #[must_use]
    pub fn bytes_per_second(self) -> f64 {
        self.0
    }

    /// The rate in decimal bits a second, as links are sold: `10Gbit`. [`Display`](fmt::Display)
    /// shows binary bytes.
    #[must_use]
    pub fn in_bits(self) -> String {
        parse::bits(self.0)
    }

    /// How long `bytes` take at this rate; `None` when nothing passes, or for longer than 30 years.
    #[must_use]
    pub fn time_for(self, bytes: ByteCount) -> Option<Duration> {
        if bytes == ByteCount::ZERO {
            return Some(Duration::ZERO);
        }
        let seconds = bytes.0 as f64 / self.0;
        (seconds.is_finite() && seconds < 1e9).then(|| Duration::from_secs_f64(seconds))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&(parse::binary(self.0 as u64) + "/s"))
    }
}

impl FromStr for Rate {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        parse::rate(text).map(|(.., bytes)| Self(bytes))
    }
}

/// A rate that somebody typed: it is shown again as it was typed, so that who said `40Mbit` reads
/// `40Mbit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TypedRate {
    number: f64,
    unit: &'static str,
    rate: Rate,
}

impl TypedRate {
    /// The rate itself.
    #[must_use]
    pub fn rate(self) -> Rate {
        self.rate
    }

    /// As typed, and the same in bytes where bits were typed, in bits where bytes were: `40Mbit
    /// (4.77MiB/s)`.
    #[must_use]
    pub fn both(self) -> String {
        let other =
            if self.unit.ends_with("bit") { self.rate.to_string() } else { self.rate.in_bits() };
        format!("{self} ({other})")
    }
}

impl From<Rate> for TypedRate {
    fn from(rate: Rate) -> Self {
        let (number, unit) = parse::whole_rate(rate.0);
        Self { number, unit, rate }
    }
}

impl fmt::Display for TypedRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}{}", self.number, self.unit))
    }
}

impl FromStr for TypedRate {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        parse::rate(text).map(|(number, unit, bytes)| Self { number, unit, rate: Rate(bytes) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_for_bytes() {
        let rate = Rate::from_bytes_per_second(1000.0);
        assert_eq!(rate.time_for(ByteCount(500)), Some(Duration::from_millis(500)));
        assert_eq!(Rate::ZERO.time_for(ByteCount(1)), None);
        assert_eq!(Rate::ZERO.time_for(ByteCount::ZERO), Some(Duration::ZERO));
        assert_eq!(Rate::from_bytes_per_second(f64::NAN), Rate::ZERO);
    }

    #[test]
    fn bits_and_bytes() {
        assert_eq!("10Gbit".parse(), Ok(Rate(1.25e9)));
        assert_eq!("128MiB/s".parse(), Ok(Rate(134_217_728.0)));
        assert_eq!(Rate(134_217_728.0).to_string(), "128MiB/s");
        assert!("0bit".parse::<Rate>().is_err());
        assert!("fast".parse::<Rate>().is_err());
    }
}
