//! The control socket: lines of JSON, one request a connection, and the answers to it.
//!
//! ```text
//!   {"command":"status"}                       -> {"answer":"status", …}
//!   {"command":"pause"} resume, quit           -> {"answer":"done"}
//!   {"command":"migrate","to":"host:port", …}  -> {"answer":"progress", …} … {"answer":"migrated", …}
//!   {"command":"receive","listen":"…", …}      -> {"answer":"listening", …} {"answer":"notice", …} … {"answer":"received", …}
//!   {"command":"watch"}                        -> {"answer":"watching", …} {"event":…} … {"outcome":…}
//!   anything that cannot be done               -> {"answer":"refused","error":"…"}
//! ```
//!
//! The engine runs in the VMM's process; whoever asked only listens. Closing the connection's
//! sending side asks to cancel, and so does dying: a migration that nobody watches any more is
//! undone. [`messages`] has the lines, [`asked`] their version, [`client`] the command's end,
//! [`steer`] what every such socket answers about a migration, [`watch`] those who watch one, and
//! [`events`] what these are told. docs/control.md is for those who write such clients. The end of
//! a VMM that has the engine inside is its own: the microvm's is in `godwit-microvm`. A
//! `godwit migrate` of a QEMU has a socket of the same kind.

#![forbid(unsafe_code)]

pub mod asked;
pub mod client;
mod error;
pub mod events;
pub mod messages;
pub mod steer;
pub mod watch;

pub use error::ControlError;
