//! Policy: observations in, a decision out.
//!
//! Pure: no clock, no I/O. Durations are handed in, so that a simulator can run the very same code.
//! What to do is decided here; how it is done is the engine's business.
//!
//! # How an engine drives it
//!
//! 1. [`Policy::new`] with [`Settings`], then [`Policy::start`] for the plan of round 0.
//! 2. Within each round, about every 100 ms, [`Policy::tick`]. When it returns a [`Plan`], that is
//!    put into force at once: throttle, delayed segments, share, disk limit. A channel that comes
//!    to a delayed segment passes it by, without harvesting it. A segment that was passed by in
//!    round 0 was never sent: it is sent in full, data and holes, in the first round (or in
//!    stop-and-copy) that does not delay it, and counts in `remaining` until then.
//! 3. At the end of each round, [`Policy::round`]. [`Decision::NextRound`] brings a whole plan.
//!    After [`Decision::SwitchOver`] the throttle stays until the vCPUs are stopped, and **every**
//!    segment is sent, delayed or not. After [`Decision::GiveUp`], and whenever a migration ends
//!    otherwise, all that was in force is released.
//! 4. [`Policy::change`] at any time before the switchover; it returns the plan that follows.
//!
//! `dirty` in rounds and ticks is a look that clears nothing, by segment in a fixed order; it holds
//! written pages only. `remaining` is what is still to be sent, pages of never-sent segments
//! included.
//!
//! Invariants: it ends (when a patience is set); it switches over only when the expected downtime
//! is within the limit; the throttle is never above `max-throttle`. Tests: `decide/tests.rs`, and
//! ten thousand simulated migrations in the `sim` crate.

#![forbid(unsafe_code)]

mod bandwidth;
mod decide;
pub mod downtime;
mod govern;
mod guest;
mod hot;
mod observe;
mod post_copy;
mod settings;
mod share;
mod throttle;

pub use bandwidth::Bandwidth;
pub use decide::Policy;
pub use observe::{
    Advice, Decision, Delayed, DiskStatistics, Estimate, Plan, RemainingTime, Round, Tick,
};
pub use post_copy::PostCopy;
pub use settings::{
    About, DiskLimit, Felt, Setting, SettingError, Settings, Table, Takes, ThrottleMode, Value,
};
