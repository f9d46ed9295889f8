//! What stands against migrations on a host, found out by trying.
//!
//! Whether a kernel can do what godwit needs is not told by its version: a container, a security
//! module or a setting may stand against it. So each capability is used once, on a process that
//! this crate starts for that and ends again ([`Subject`]): its memory is read from outside, its
//! writes are tracked by its page tables, and it is governed. No VM is touched.
//!
//! ```text
//!   finding   what was found, its verdict, and the cure
//!   subject   the process on which things are tried, both ends of it
//!   there     what a destination tells of its host, beside what this one has
//!   host      what is tried and looked at, one after the other
//! ```

#![forbid(unsafe_code)]

mod finding;
mod host;
mod subject;
mod there;

pub use finding::{Finding, Verdict, worst};
pub use host::{MAY_GOVERN, host};
pub use subject::{COMMAND, Subject, stand};
pub use there::{Guest, there};
