//! What godwit's programs print, for people and for programs, and how they end: tables that fit the
//! terminal, progress that rewrites its line, results and failures, exit codes, signals.
//!
//! A program begins with `#[macro_use] extern crate godwit_terminal;`: its `println!` and relatives
//! are then those of [`say`], which never panic.
#![forbid(unsafe_code)]

// First, for the macros in it.
#[macro_use]
pub mod say;

pub mod layout;
pub mod output;
pub mod process;
pub mod progress;
