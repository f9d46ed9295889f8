//! What there is: virtual machines, the hosts that they leave, and those that have room.

use std::collections::BTreeSet;

use godwit_units::{ByteCount, Rate};

/// The kinds of processor that a host can be for a guest, by their numbers: at most 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuSet(pub u64);

impl CpuSet {
    /// Every kind.
    pub const ALL: Self = Self(u64::MAX);

    /// Whether a guest that needs `kind` can run; one that needs none can.
    #[must_use]
    pub fn runs(self, kind: Option<u8>) -> bool {
        kind.is_none_or(|kind| kind < 64 && self.0 & (1 << kind) != 0)
    }
}

/// A virtual machine that is to leave its host.
#[derive(Clone, Debug, PartialEq)]
pub struct Vm {
    /// The host that it is on, by its number among the sources.
    pub source: usize,
    /// What it takes at its destination.
    pub memory: ByteCount,
    /// How much of that holds data.
    pub data: ByteCount,
    /// How fast it writes to its memory.
    pub dirty: Rate,
    /// The kind of processor that it needs.
    pub cpu: Option<u8>,
    /// At most one of a group is on a host.
    pub group: Option<u32>,
    /// The destinations that it may go to; none: all.
    pub only: Option<BTreeSet<usize>>,
}

impl Vm {
    /// One on the first host that writes nothing.
    #[must_use]
    pub fn idle(memory: ByteCount) -> Self {
        Self {
            source: 0,
            memory,
            data: memory,
            dirty: Rate::ZERO,
            cpu: None,
            group: None,
            only: None,
        }
    }
}

/// A host that is to be emptied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Source {
    /// What all of its moves together may send.
    pub budget: Rate,
    /// The most moves at once.
    pub at_once: u32,
}

impl Source {
    /// One with this budget.
    #[must_use]
    pub fn new(budget: Rate, at_once: u32) -> Self {
        Self { budget, at_once }
    }
}

/// A host that may take virtual machines in.
#[derive(Clone, Debug, PartialEq)]
pub struct Destination {
    /// Memory that it has left for them.
    pub room: ByteCount,
    /// What it can be for a guest.
    pub cpus: CpuSet,
    /// The most that it takes in at once.
    pub at_once: u32,
    /// What its link carries.
    pub link: Rate,
    /// Groups of which it has one already.
    pub groups: BTreeSet<u32>,
}

impl Destination {
    /// One that takes two guests at once, of any kind, over a link that is not the limit.
    #[must_use]
    pub fn new(room: ByteCount) -> Self {
        Self {
            room,
            cpus: CpuSet::ALL,
            at_once: 2,
            link: Rate::from_bytes_per_second(1e15),
            groups: BTreeSet::new(),
        }
    }
}
