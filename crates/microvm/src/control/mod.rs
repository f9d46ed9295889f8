//! The control socket: lines of JSON, one request a connection, and the answers to it.
//!
//! ```text
//!   {"command":"status"}                       -> {"answer":"status", …}
//!   {"command":"pause"} resume, quit           -> {"answer":"done"}
//!   {"command":"migrate","to":"host:port", …}  -> {"answer":"progress", …} … {"answer":"migrated", …}
//!   {"command":"receive","listen":"…", …}      -> {"answer":"listening", …} {"answer":"notice", …} … {"answer":"received", …}
//!   anything that cannot be done               -> {"answer":"refused","error":"…"}
//! ```
//!
//! The engine runs in the VMM's process; whoever asked only listens. Closing the connection's sending side asks to
//! cancel, and so does dying: a migration that nobody watches any more is undone. [`messages`] has the lines, [`server`]
//! the VMM's end, [`client`] the command's, [`steer`] what both kinds of socket answer about a migration.

pub mod client;
pub mod messages;
pub mod server;
pub mod steer;
