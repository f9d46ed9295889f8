//! The text forms of sizes, rates and durations, both ways.

use std::fmt;
use std::time::Duration;

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
    /// The unit is missing or unknown.
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

const BINARY: [(&str, f64); 5] = [
    ("TiB", 1.099_511_627_776e12),
    ("GiB", 1_073_741_824.0),
    ("MiB", 1_048_576.0),
    ("KiB", 1024.0),
    ("B", 1.0),
];

fn split<'a>(text: &'a str, example: &'static str) -> Result<(f64, &'a str), ParseError> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number = text[..end].parse().map_err(|_| ParseError::NoNumber { text: text.to_owned(), example })?;
    Ok((number, text[end..].trim()))
}

fn byte_factor(unit: &str) -> Option<f64> {
    Some(match unit {
        "" | "B" => 1.0,
        "K" | "KiB" => 1024.0,
        "M" | "MiB" => 1_048_576.0,
        "G" | "GiB" => 1_073_741_824.0,
        "T" | "TiB" => 1.099_511_627_776e12,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        _ => return None,
    })
}

pub(crate) fn bytes(text: &str) -> Result<u64, ParseError> {
    let (number, unit) = split(text, "64KiB or 1GiB")?;
    let factor = byte_factor(unit).ok_or_else(|| ParseError::Unit {
        text: text.to_owned(),
        unit: unit.to_owned(),
        units: "B, KiB, MiB, GiB, TiB, kB, MB, GB or TB",
    })?;
    let value = number * factor;
    if value >= 9e18 {
        return Err(ParseError::Range { text: text.to_owned(), limit: "8EiB" });
    }
    Ok(value as u64)
}

pub(crate) fn rate(text: &str) -> Result<f64, ParseError> {
    let (number, unit) = split(text, "10Gbit or 128MiB/s")?;
    let bare = unit.strip_suffix("/s").or_else(|| unit.strip_suffix("ps")).unwrap_or(unit);
    let factor = match bare {
        "bit" => 1.0 / 8.0,
        "kbit" | "Kbit" => 1e3 / 8.0,
        "Mbit" => 1e6 / 8.0,
        "Gbit" => 1e9 / 8.0,
        "Tbit" => 1e12 / 8.0,
        "" => 0.0,
        bytes => byte_factor(bytes).unwrap_or(0.0),
    };
    if factor == 0.0 {
        return Err(ParseError::Unit {
            text: text.to_owned(),
            unit: unit.to_owned(),
            units: "kbit, Mbit, Gbit (bits per second) or KiB/s, MiB/s, GiB/s (bytes per second)",
        });
    }
    let value = number * factor;
    if !(1.0..1e15).contains(&value) {
        return Err(ParseError::Range { text: text.to_owned(), limit: "8000Tbit" });
    }
    Ok(value)
}

/// Parses a duration with its unit: `300ms`, `1.5s`, `250us`, `2min`, `1h`.
///
/// # Errors
/// When there is no number in front, or the unit is missing or not one of ns, us, ms, s, min, h.
pub fn parse_duration(text: &str) -> Result<Duration, ParseError> {
    let (number, unit) = split(text, "300ms or 2s")?;
    let factor = match unit {
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "min" | "m" => 60.0,
        "h" => 3600.0,
        _ => {
            return Err(ParseError::Unit {
                text: text.to_owned(),
                unit: unit.to_owned(),
                units: "us, ms, s, min or h",
            });
        }
    };
    Duration::try_from_secs_f64(number * factor)
        .ok()
        .filter(|d| d.as_secs() < 1_000_000_000)
        .ok_or_else(|| ParseError::Range { text: text.to_owned(), limit: "30 years" })
}

/// Prints a duration as [`parse_duration`] reads it, with three significant digits.
#[must_use]
pub fn format_duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    let (value, unit) = match seconds {
        0.0 => return "0s".to_owned(),
        s if s < 1e-6 => (s * 1e9, "ns"),
        s if s < 1e-3 => (s * 1e6, "us"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s if s < 600.0 => (s, "s"),
        s if s < 36_000.0 => (s / 60.0, "min"),
        s => (s / 3600.0, "h"),
    };
    format!("{}{unit}", three_digits(value))
}

fn three_digits(value: f64) -> String {
    let text = match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    };
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

pub(crate) fn write_binary(f: &mut fmt::Formatter<'_>, bytes: u64) -> fmt::Result {
    let (unit, factor) =
        BINARY.iter().find(|(_, factor)| bytes as f64 >= *factor).unwrap_or(&BINARY[BINARY.len() - 1]);
    f.pad(&format!("{}{unit}", three_digits(bytes as f64 / factor)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_round_trip() {
        for text in ["300ms", "1.5s", "250us", "12.5ms", "20min", "11h", "7ns", "0s"] {
            assert_eq!(format_duration(parse_duration(text).unwrap()), text);
        }
    }

    #[test]
    fn sizes_round_trip() {
        for text in ["64KiB", "1GiB", "1.5GiB", "12TiB", "0B", "513B"] {
            assert_eq!(crate::ByteCount(bytes(text).unwrap()).to_string(), text);
        }
        assert_eq!(bytes("1GB"), Ok(1_000_000_000));
        assert_eq!(bytes("4096"), Ok(4096));
    }

    #[test]
    fn errors_say_what_would_do() {
        let error = parse_duration("300").unwrap_err().to_string();
        assert_eq!(error, "'' in '300' is not a unit here: use us, ms, s, min or h");
        assert!(parse_duration("soon").unwrap_err().to_string().contains("300ms"));
        assert!(bytes("64 furlongs").is_err());
        assert!(parse_duration("1e400s").is_err());
        assert!(bytes("99999999999TiB").is_err());
        assert!(parse_duration("99999999999h").is_err());
    }
}
