//! The conversation with a `godwitd`: lines of JSON, one request a connection, and the answers to
//! it, as on godwit's other control sockets ([docs/godwitd.md](../../../docs/godwitd.md)).
//!
//! ```text
//!   {"version":1,"command":"room"}               -> {"answer":"room", …}
//!   {"version":1,"command":"list"}               -> {"answer":"list", …}
//!   {"version":1,"command":"receive","id":"…",
//!    "vm":{"name":"web01","memory_bytes":…}}     -> {"answer":"taken", …}, then as for follow
//!   {"version":1,"command":"follow","id":"…"}    -> {"answer":"said", …} … {"answer":"ended"}
//!   {"version":1,"command":"stop","id":"…"}      -> {"answer":"done"}
//!   anything that is not done                    -> {"answer":"refused","error":"…"}
//! ```
//!
//! [`messages`] has the lines, [`lines`] reads one within its limits, [`client`] is the end that
//! asks. Who may ask, and what is done, is `godwitd`'s.
//!
//! Invariant: what is not a request of this version, with no field that it does not have, is none.

#![forbid(unsafe_code)]

pub mod client;
pub mod lines;
pub mod messages;
