//! The text forms of sizes, rates and durations, both ways: the one grammar of all that is typed.
//!
//! A value is a number with its unit. What people use for two different things (`1G` a second,
//! `5m`, a number without a unit) is refused with both readings, since guessing wrong costs a
//! factor of eight or of a thousand. The grammar is described in `docs/units.md`.

use std::fmt;
use std::time::Duration;

use crate::Rate;

/// The grammar in a few lines, for help texts.
pub const GRAMMAR: &str = "\
Units: a SIZE is 512MiB, 4GiB (or 4G, the same) or 4GB (10^9 bytes each); a RATE
is 800Mbit or 10Gbit (decimal bits a second) or 128MiB/s (bytes a second); a
TIME is 300ms, 60s, 2min or 1h. More of it: docs/units.md";

/// Why a text is no size, rate or duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// There is no number in front.
    #[error("'{text}' does not start with a number: write for example {example}")]
    NoNumber {
        /// What was given.
        text: String,
        /// What would have been understood.
        example: &'static str,
    },
    /// It is used for two different things.
    #[error("'{text}' is ambiguous: write {readings}")]
    Ambiguous {
        /// What was given.
        text: String,
        /// What may have been meant, each as it should be written.
        readings: String,
    },
    /// The unit is unknown.
    #[error("'{unit}' in '{text}' is not a unit here: use {units}")]
    Unit {
        /// What was given.
        text: String,
        /// The part after the number.
        unit: String,
        /// The units that would have been understood.
        units: &'static str,
    },
    /// The value is zero where that makes no sense, or too large.
    #[error("'{text}' is out of range: it must be more than 0 and less than {limit}")]
    Range {
        /// What was given.
        text: String,
        /// The first value that is too large.
        limit: &'static str,
    },
}

impl ParseError {
    /// What to say beside `allowed`, the values that a setting takes: both readings of what is
    /// ambiguous, which help more, else `allowed` itself.
    #[must_use]
    pub fn readings_or(&self, allowed: &str) -> String {
        match self {
            Self::Ambiguous { .. } => self.to_string(),
            _ => allowed.to_owned(),
        }
    }
}

const BINARY: [(&str, f64); 5] = [
    ("TiB", 1.099_511_627_776e12),
    ("GiB", 1_073_741_824.0),
    ("MiB", 1_048_576.0),
    ("KiB", 1024.0),
    ("B", 1.0),
];

/// The decimal units of bytes.
const DECIMAL: [(&str, f64); 4] = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];

/// The units of rates as they are shown, and the bytes a second of one.
const RATES: [(&str, f64); 14] = [
    ("Tbit", 1e12 / 8.0),
    ("Gbit", 1e9 / 8.0),
    ("Mbit", 1e6 / 8.0),
    ("kbit", 1e3 / 8.0),
    ("bit", 1.0 / 8.0),
    ("TiB/s", 1.099_511_627_776e12),
    ("GiB/s", 1_073_741_824.0),
    ("MiB/s", 1_048_576.0),
    ("KiB/s", 1024.0),
    ("TB/s", 1e12),
    ("GB/s", 1e9),
    ("MB/s", 1e6),
    ("kB/s", 1e3),
    ("B/s", 1.0),
];

fn split<'a>(text: &'a str, example: &'static str) -> Result<(f64, &'a str), ParseError> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number =
        text[..end].parse().map_err(|_| ParseError::NoNumber { text: text.to_owned(), example })?;
    Ok((number, text[end..].trim()))
}

fn ambiguous(text: &str, readings: String) -> ParseError {
    ParseError::Ambiguous { text: text.trim().to_owned(), readings }
}

pub(crate) fn bytes(text: &str) -> Result<u64, ParseError> {
    let (number, unit) = split(text, "64KiB or 1GiB")?;
    let named = |(name, _): &&(&str, f64)| *name == unit;
    let factor = match unit {
        "" if number == 0.0 => 0.0,
        "" => return Err(ambiguous(text, format!("{number}MiB or {number}B"))),
        // As QEMU's -m, qemu-img and truncate(1) have it. Nobody means anything else of a size.
        "K" | "k" => 1024.0,
        "M" | "m" => 1_048_576.0,
        "G" | "g" => 1_073_741_824.0,
        "T" | "t" => 1.099_511_627_776e12,
        _ => match BINARY.iter().find(named).or_else(|| DECIMAL.iter().find(named)) {
            Some((_, factor)) => *factor,
            None => {
                return Err(ParseError::Unit {
                    text: text.trim().to_owned(),
                    unit: unit.to_owned(),
                    units: "B, KiB, MiB, GiB, TiB, kB, MB, GB or TB",
                });
            }
        },
    };
    let value = number * factor;
    if value >= 9e18 {
        return Err(ParseError::Range { text: text.trim().to_owned(), limit: "8EiB" });
    }
    Ok(value as u64)
}

/// A rate: the number and the unit as they are to be shown, and bytes a second.
pub(crate) fn rate(text: &str) -> Result<(f64, &'static str, f64), ParseError> {
    let (number, unit) = split(text, "10Gbit or 128MiB/s")?;
    let range = || ParseError::Range { text: text.trim().to_owned(), limit: "8000Tbit" };
    if number == 0.0 {
        return Err(range());
    }
    let bare = unit.strip_suffix("/s").or_else(|| unit.strip_suffix("ps")).unwrap_or(unit);
    let known = |name: &str| RATES.iter().find(|(known, _)| *known == name);
    // `Mbps` is megabits a second wherever it is written; with `Mb/s` some mean bytes.
    let bits =
        unit.strip_suffix("bps").filter(|prefix| matches!(*prefix, "" | "k" | "M" | "G" | "T"));
    let found = match bits {
        Some(prefix) => known(&format!("{prefix}bit")),
        None if bare == "Kbit" => known("kbit"),
        None => known(bare).or_else(|| known(&format!("{bare}/s"))),
    };
    let Some((name, factor)) = found else {
        return Err(match readings(number, bare) {
            Some(readings) => ambiguous(text, readings),
            None => ParseError::Unit {
                text: text.trim().to_owned(),
                unit: unit.to_owned(),
                units: "kbit, Mbit, Gbit (bits a second) or KiB/s, MiB/s, GiB/s (bytes a second)",
            },
        });
    };
    let value = number * factor;
    if !(1.0..1e15).contains(&value) {
        return Err(range());
    }
    Ok((number, name, value))
}

/// What a unit of a rate may mean that says neither bits nor bytes, each with what it is in the
/// other's units.
fn readings(number: f64, unit: &str) -> Option<String> {
    let lower = unit.to_ascii_lowercase();
    let (bits, bytes) = match lower.as_str() {
        "" => ("Mbit", "MiB/s"),
        "k" => ("kbit", "KiB/s"),
        "m" => ("Mbit", "MiB/s"),
        "g" => ("Gbit", "GiB/s"),
        "t" => ("Tbit", "TiB/s"),
        "kb" => ("kbit", "kB/s"),
        "mb" => ("Mbit", "MB/s"),
        "gb" => ("Gbit", "GB/s"),
        "tb" => ("Tbit", "TB/s"),
        _ => return None,
    };
    let both = |unit: &str| {
        let factor =
            RATES.iter().find(|(name, _)| *name == unit).map_or(0.0, |(_, factor)| *factor);
        let rate = Rate::from_bytes_per_second(number * factor);
        let other = if unit.ends_with("bit") { rate.to_string() } else { rate.in_bits() };
        format!("{number}{unit} ({other})")
    };
    Some(format!("{} or {}", both(bits), both(bytes)))
}

/// The unit of bytes a second in which `bytes` is a whole number, and that number.
pub(crate) fn whole_rate(bytes: f64) -> (f64, &'static str) {
    let of_bytes = RATES.iter().filter(|(name, _)| name.ends_with("iB/s"));
    let found = of_bytes.map(|(name, factor)| (bytes / factor, *name));
    found
        .into_iter()
        .find(|(number, _)| *number >= 1.0 && number.fract() == 0.0)
        .unwrap_or((bytes, "B/s"))
}

/// Parses a duration with its unit: `300ms`, `1.5s`, `250us`, `2min`, `1h`; `0` needs none.
///
/// # Errors
/// When there is no number in front, or the unit is missing, ambiguous or not one of ns, us, ms, s,
/// min, h.
pub fn parse_duration(text: &str) -> Result<Duration, ParseError> {
    let (number, unit) = split(text, "300ms or 2s")?;
    let factor = match unit {
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "min" => 60.0,
        "h" => 3600.0,
        "" if number == 0.0 => 0.0,
        "" => return Err(ambiguous(text, format!("{number}ms or {number}s"))),
        "m" | "M" => return Err(ambiguous(text, format!("{number}min or {number}ms"))),
        _ => {
            return Err(ParseError::Unit {
                text: text.trim().to_owned(),
                unit: unit.to_owned(),
                units: "us, ms, s, min or h",
            });
        }
    };
    Duration::try_from_secs_f64(number * factor)
        .ok()
        .filter(|d| d.as_secs() < 1_000_000_000)
        .ok_or_else(|| ParseError::Range { text: text.trim().to_owned(), limit: "30 years" })
}

/// Prints a duration as [`parse_duration`] reads it, with three significant digits.
#[must_use]
pub fn format_duration(duration: Duration) -> String {
    // The bounds are where three digits round up, so that it is `2s` and never `2000ms`.
    let seconds = duration.as_secs_f64();
    let (value, unit) = match seconds {
        0.0 => return "0s".to_owned(),
        s if s < 999.5e-9 => (s * 1e9, "ns"),
        s if s < 999.5e-6 => (s * 1e6, "us"),
        s if s < 999.5e-3 => (s * 1e3, "ms"),
        s if s < 599.5 => (s, "s"),
        s if s < 35_970.0 => (s / 60.0, "min"),
        s => (s / 3600.0, "h"),
    };
    format!("{}{unit}", three_digits(value))
}

fn three_digits(value: f64) -> String {
    let text = match value {
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

pub(crate) fn write_binary(f: &mut fmt::Formatter<'_>, bytes: u64) -> fmt::Result {
    f.pad(&binary(bytes))
}

pub(crate) fn binary(bytes: u64) -> String {
    let (unit, factor) = BINARY
        .iter()
        .find(|(_, factor)| bytes as f64 >= *factor)
        .unwrap_or(&BINARY[BINARY.len() - 1]);
    format!("{}{unit}", three_digits(bytes as f64 / factor))
}

/// A rate in decimal bits a second, with three significant digits.
pub(crate) fn bits(bytes_per_second: f64) -> String {
    let bits = bytes_per_second * 8.0;
    let (unit, factor) = [("Tbit", 1e12), ("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)]
        .into_iter()
        .find(|(_, factor)| bits >= factor * 0.9995)
        .unwrap_or(("bit", 1.0));
    format!("{}{unit}", three_digits(bits / factor))
}

#[cfg(test)]
mod tests;
