//! Emptying hosts: which virtual machine goes where, when, and at what rate.
//!
//! [`Evacuation`] is a state machine. It is told how moves end and answers what is to be done next:
//! begin a move, give another its share of the bandwidth. It has no clock, no socket and no file:
//! `godwit evacuate` drives it with real migrations, and [`run()`] drives it in virtual time, for a
//! forecast before anything begins and for fleets that nobody has at hand.
//!
//! Invariants: a virtual machine has one place at any time; what is reserved at a destination never
//! exceeds its room; the rates of the moves from a host never exceed its budget, nor those of the
//! moves to a host what its link carries.
//!
//! ```
//! use godwit_fleet::{Action, Destination, Evacuation, Source, Vm};
//! use godwit_units::{ByteCount, Rate};
//!
//! let gib = |n: u64| ByteCount(n << 30);
//! let budget = Rate::from_bytes_per_second(1e9);
//! let vms = vec![Vm::idle(gib(4)), Vm::idle(gib(2))];
//! let destinations = vec![Destination::new(gib(8)), Destination::new(gib(8))];
//! let mut evacuation = Evacuation::new(vms, destinations, vec![Source::new(budget, 1)]);
//! // One at once, the shortest first.
//! let [Action::Begin { vm: 1, rate, .. }] = evacuation.advance()[..] else { panic!() };
//! assert_eq!(rate.bytes_per_second(), 1e9);
//! ```

#![forbid(unsafe_code)]

mod divide;
mod evacuation;
mod flow;
mod inventory;
mod rolling;

mod rooms;
mod virtual_run;

pub use divide::{Claim, divide};
pub use evacuation::{Action, Ending, Evacuation, Place, Stays};
pub use flow::SETUP;
pub use inventory::{CpuSet, Destination, Source, Vm};
pub use rolling::{Fleet, Rolled, Terms, roll};

pub use rooms::{Rooms, Unplaced};
pub use virtual_run::{Faults, NoFaults, Ran, run};
