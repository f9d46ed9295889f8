//! A small VMM on KVM with the engine inside: the embedded default, and the example for people who
//! write VMMs.
//!
//! [`Machine`] is memory, vCPUs, a serial port, a disk and a balloon. It runs a program of our own
//! on the bare machine, which checks its memory and disk all the time (`guest/`), so it needs
//! neither QEMU nor a guest image. The engine and the protocol run in this process too: `source`
//! and `destination` implement the engine's traits, and [`control`] is the socket through which
//! `godwit migrate` and `godwit receive` ask for it.
//!
//! Keeps one promise: what arrives is the whole machine, or an error. Dirty tracking is left to
//! `godwit-track`, the conversation to `godwit-engine`.

mod balloon;
mod blob;
pub mod boot_block;
pub mod control;
mod destination;
mod disk;
mod error;
mod guest;
mod layout;
mod machine;
mod ram;
mod serial;
mod slots;
mod source;
mod throttle;
mod tracking;
mod vcpu;
mod vcpu_state;

pub use blob::VERSION as STATE_VERSION;
pub use destination::MicrovmDestination;
pub use godwit_balloon::Features as BalloonFeatures;

pub use error::{MicrovmError, StateError};
pub use guest::{BootMemory, GuestMode, GuestPlan, IMAGE as GUEST_IMAGE, place_guest};
pub use layout::{BlockPlan, plain as plain_layout};
pub use machine::{Machine, MachineEvent, MachinePlan};
pub use ram::GuestRam;
pub use source::MicrovmSource;
pub use tracking::TrackerKind;
