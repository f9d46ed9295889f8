//! Migrations in virtual time: make-believe guests, links and disks under the real policy and
//! protocol.
//!
//! [`run`] takes a [`Scenario`] to its end in a few milliseconds, whatever its size: memory is kept
//! by segment, with the number of dirty pages in each and not which they are. What decides is the
//! production code: `Policy` of the `policy` crate and the two machines of the `protocol` crate.
//! What carries out is made up here, and is as exact as its numbers.
//!
//! Pure: no clock, no I/O, and no chance but from a seed. The same scenario always gives the same
//! [`Outcome`].
//!
//! Checked in every step: at most one side may run the guest. Checked at the end by tests: it ends,
//! and within limits.

#![forbid(unsafe_code)]

mod chart;
mod disk;
mod follow;
mod forecast;
mod guest;
mod link;
mod memory;
mod named;
mod outcome;
mod rng;
mod scenario;
mod simulation;
mod source;

pub use chart::chart;
pub use forecast::{Forecast, Sample, fit, forecast};
pub use named::{NAMES, named, plain, random, random_leaving, random_trouble};
pub use outcome::{End, Followed, Outcome, Point, RoundRow};
pub use rng::Rng;
pub use scenario::{
    Cut, DiskSpec, GuestSpec, Incident, LinkSpec, Moment, Phase, Region, Scenario, Synchronisation,
    Trouble, Vcpus,
};
pub use simulation::run;
