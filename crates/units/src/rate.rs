//! Rates: how fast bytes pass a link or become dirty.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::ByteCount;
use crate::parse::{self, ParseError};

/// Bytes per second, kept as a float since rates are measured and averaged; never negative, never NaN.
/// Parsed as bits (`10Gbit`, `800Mbit`) or bytes per second (`128MiB`, `128MiB/s`, `1GB/s`).
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
        parse::write_binary(f, self.0 as u64)?;
        f.write_str("/s")
    }
}

impl FromStr for Rate {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        parse::rate(text).map(Self)
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
