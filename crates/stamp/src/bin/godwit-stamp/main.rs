//! The program `godwit-stamp`: the init of a small guest that does nothing else than the work of
//! the library, and an ordinary program for whoever starts it by hand.

#![forbid(unsafe_code)]

#[macro_use]
mod say;
mod guest;

use std::process::ExitCode;

fn main() -> ExitCode {
    guest::run()
}
