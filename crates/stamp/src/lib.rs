//! Proof that a migrated guest is the same guest: the workload that checks its own memory.
//!
//! The pure half lives here and is tested on the host: pages that say what they should hold
//! ([`stamp`]), the buffer of such pages that is written and re-read ([`workload`]), the same on
//! disks ([`disk`]), the page that counts for an observer outside ([`beacon`]), the loop that does
//! all this ([`main_loop`]), and the lines a guest prints and a test reads ([`heartbeat`],
//! [`settings`]). The binary `godwit-stamp` is
//! the other half: the init of a small guest that does nothing else.
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
pub mod heap;
pub mod heartbeat;
pub mod main_loop;
pub mod pace;
pub mod settings;
pub mod stamp;
pub mod workload;
