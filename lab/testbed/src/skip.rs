//! Tests that cannot run here say so aloud.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;

/// Says that `test` is skipped, and why. `make test` counts these lines.
pub fn skip(test: &str, why: impl Display) {
    // Past the test harness, which keeps what a passing test prints to itself. In one piece, as
    // others print too.
    let _ = std::io::stderr().write_all(format!("\nSKIPPED {test}: {why}\n").as_bytes());
}

/// Whether VMs can run on KVM here. If not, says on standard error that the test `test` is skipped.
#[must_use]
pub fn kvm_for(test: &str) -> bool {
    let usable = File::options().read(true).write(true).open("/dev/kvm");
    if let Err(error) = &usable {
        skip(test, format_args!("/dev/kvm cannot be opened: {error}"));
    }
    usable.is_ok()
}
