//! Policy: after each round, observations in, a decision out.
//!
//! Pure: no clock, no I/O. Durations are handed in, so that a simulator can run the very same code. What to do
//! is decided here; how it is done is the engine's business.

#![forbid(unsafe_code)]

mod bandwidth;
mod decide;
pub mod downtime;

pub use bandwidth::Bandwidth;
pub use decide::{Advice, Config, Decision, Estimate, Policy, Round};
