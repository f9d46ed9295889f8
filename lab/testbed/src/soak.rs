//! How often a test that may be run for long repeats itself.

/// The variable that says so.
const VARIABLE: &str = "GODWIT_SOAK";

/// The number in GODWIT_SOAK, as `make soak-tests` sets it, or `short` where there is none: in
/// `make
/// test`.
///
/// # Panics
/// When the variable holds anything else.
#[must_use]
pub fn soak(short: usize) -> usize {
    match std::env::var(VARIABLE) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{VARIABLE}={text} is not a number of repetitions")),
        Err(_) => short,
    }
}
