//! What all benchmarks share: medians, the machine's name, and the report file
//! `target/bench/NAME.json`.
//!
//! A benchmark is a program of its own under `src/bin`; this library leaves measuring to them.

pub mod arguments;
pub mod chart;
pub mod figures;
pub mod fixture;
pub mod godwit;
pub mod growth;
pub mod moves;
pub mod report;
pub mod row;
pub mod still;
pub mod sys;
pub mod table;
pub mod upgrades;
pub mod waits;
