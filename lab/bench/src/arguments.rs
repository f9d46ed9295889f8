//! What the command lines of several benchmarks have in common.

use std::num::ParseIntError;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;

/// How often something is done that has to be done.
pub fn at_least_once() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

/// A time in whole seconds.
///
/// # Errors
/// When `text` is not a number.
pub fn seconds(text: &str) -> Result<Duration, ParseIntError> {
    text.parse().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_whole_number_of_seconds() {
        assert_eq!(seconds("20"), Ok(Duration::from_secs(20)));
        assert!(seconds("20s").is_err() && seconds("-1").is_err());
    }
}
