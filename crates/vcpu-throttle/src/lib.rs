//! Slowing a guest: its vCPU threads are stopped for a share of each period of 10 ms (up to 100 ms
//! above 90 %).
//!
//! ```text
//!             one period, 10 ms
//!   |<------ stop ------>|<- run ->|
//!   interrupt all         continue all         interrupt all
//! ```
//!
//! [`VcpuThrottle`] does it to the threads of another process, with ptrace(2). It is made so that a
//! guest cannot be left slow: the tracer is a thread of this process, and the kernel lets go of all
//! that it traces when it ends, however it ends ("If the tracer dies, all tracees are automatically
//! detached and restarted", ptrace(2)). A VMM that throttles itself takes [`Slices`] and
//! [`become_punctual`] and its own way to stop a vCPU.
//!
//! How far to throttle, and when, is not decided here.

mod cycle;
mod debt;
mod error;
mod punctual;
mod sys;
mod throttle;
mod time;
mod tracees;
mod tracer;

pub use cycle::{MOST, PERIOD, Slices};
pub use error::ThrottleError;
pub use punctual::become_punctual;
pub use throttle::{Measures, VcpuThrottle};
pub use time::vcpu_time;
