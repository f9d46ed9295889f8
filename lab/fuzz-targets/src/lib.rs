//! Everything of godwit's that listens to others, each as a function of bytes: what a peer, a QEMU,
//! a server, a guest or an operator says.
//!
//! A [`Target`] panics when a promise is broken: by what it calls, or by its own look at what came
//! of it. `make fuzz` runs each under libFuzzer, which follows the branches that an input takes
//! (`fuzz/`, by the nightly toolchain); `tests/smoke.rs` runs each on its corpus and on some
//! thousand changes of it, by the stable one. A corpus is what the other side really says, made by
//! `fuzz-seeds`.
//!
//! Invariants: a target reads no clock and no random number, so that an input does the same each
//! time, and it leaves nothing behind.
//!
//! ```
//! let frames = godwit_fuzz_targets::target("frames").expect("is one");
//! (frames.run)(b"neither a frame nor a message");
//! ```
#![forbid(unsafe_code)]

mod control;
pub mod corpus;
mod frames;
mod guests;
mod keys;
mod machines;
mod nbd;
mod qemu;
mod words;

/// One thing that listens.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its directory below `corpus`.
    pub name: &'static str,
    /// Who speaks, and what is listened to.
    pub about: &'static str,
    /// Hears `bytes`.
    ///
    /// # Panics
    /// When a promise is broken.
    pub run: fn(&[u8]),
}

macro_rules! targets {
    ($($name:literal, $about:literal, $run:path;)*) => {
        [$(Target { name: $name, about: $about, run: $run }),*]
    };
}

/// All of them.
pub const TARGETS: [Target; 15] = targets! {
    "greeting", "the first bytes of a connection", frames::greeting;
    "frames", "a peer: frames, messages, runs of pages, compressed pages", frames::frames;
    "handover", "both machines: any order of messages, links that break, sides that fail",
        machines::handover;
    "inputs", "each machine alone: any input in any state", machines::inputs;
    "monitor", "a QEMU: answers and events of its monitor", qemu::monitor;
    "machine", "a peer: the picture of its machine", qemu::machine;
    "start", "a peer: the command line of its QEMU", qemu::start;
    "domain", "a peer: the description of its domain; a save image of that", qemu::domain;
    "state", "a QEMU: the state of its devices; a file of its settings", qemu::state;
    "nbd", "an NBD server: handshake and replies", nbd::replies;
    "balloon", "a guest: the registers and rings of its balloon", guests::balloon;
    "rings", "a guest: the registers and rings of any virtio device", guests::rings;
    "control", "the control sockets, either end; what is printed of them", control::lines;
    "keys", "PEM files; a peer that is to encrypt", keys::keys;
    "words", "an operator: sizes, rates, addresses, settings", words::words;
};

/// The one called `name`.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
