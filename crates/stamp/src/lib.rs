//! Proof that a migrated guest is the same guest: memory and disks that say what they should hold.
//!
//! For anybody's guest and anybody's migration there is the program `godwit-stamp run`, of
//! [`sector`]s that name their run, place, version, time and writer, the [`table`] of the versions
//! that they should have, the orders in which they are written ([`pattern`]), the [`journal`] of
//! what an fsync acknowledged, and what a difference means ([`finding`]).
//!
//! The guest of Godwit's own tests is the same program as process 1, with a cheaper page
//! ([`stamp`]), the buffer of such pages that is written and re-read ([`workload`]), the same on
//! disks ([`disk`]), the page that counts for an observer outside ([`beacon`]), the loop that does
//! all this ([`main_loop`]), and the lines a guest prints and a test reads ([`heartbeat`],
//! [`settings`]).
//!
//! The microvm's guest has neither Linux nor a heap: it shares the files `beacon`, `heartbeat`,
//! `main_loop`, `pace`, `stamp` and `workload`, which keep to `core` for that reason.
//!
//! Keeps one promise: every way in which migration can damage a page (a page left out, an older
//! version, a mixture of two versions, another page's content, a changed bit, zeroes) is reported
//! as a fault, also when the page is consistent in itself. Starting guests and reading what they
//! print is left to `godwit-testbed`.

#![forbid(unsafe_code)]

pub mod beacon;
pub mod disk;
pub mod finding;
pub mod heap;
pub mod heartbeat;
pub mod journal;
pub mod main_loop;
pub mod pace;
pub mod pattern;
pub mod sector;
pub mod settings;
pub mod stamp;
pub mod table;
pub mod workload;
