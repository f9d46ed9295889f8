//! How often a test that may be run for long repeats itself.

/// The variables that say so.
const AT_MOST: &str = "GODWIT_AT_MOST";
const SOAK: &str = "GODWIT_SOAK";

/// The number in GODWIT_SOAK, as `make soak-tests` sets it, or `short` where there is none: in
/// `make test`.
///
/// # Panics
/// When the variable holds anything else.
#[must_use]
pub fn soak(short: usize) -> usize {
    number_in(SOAK).unwrap_or(short)
}

/// `full`, or the number in GODWIT_AT_MOST where that is smaller, for whoever has less time than
/// `make test-long` takes.
///
/// # Panics
/// When the variable holds anything but a number.
#[must_use]
pub fn at_most(full: usize) -> usize {
    number_in(AT_MOST).map_or(full, |most| most.min(full))
}

fn number_in(variable: &str) -> Option<usize> {
    let text = std::env::var(variable).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{variable}={text} is not a number of repetitions")))
}
