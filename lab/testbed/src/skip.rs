//! Tests that cannot run here say so aloud.

use std::fmt::Display;
use std::io::Write;

/// Says that `test` is skipped, and why. `make test` counts these lines.
pub fn skip(test: &str, why: impl Display) {
    // Past the test harness, which keeps what a passing test prints to itself. In one piece, as
    // others print too.
    let _ = std::io::stderr().write_all(format!("\nSKIPPED {test}: {why}\n").as_bytes());
}
