//! Room at the destinations, and where a virtual machine fits.
//!
//! Invariant: what is reserved at a destination never exceeds the room that it had, and it has at
//! most one virtual machine of a group.

use std::collections::BTreeSet;
use std::fmt;

use crate::inventory::{Destination, Vm};

/// Why there is no place for a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unplaced {
    /// No destination that it may go to is left.
    NoDestination,
    /// None has the processor that it needs.
    NoCpu,
    /// Each that would do has one of its group.
    Group,
    /// None has as much memory left.
    NoRoom,
}

impl fmt::Display for Unplaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoDestination => "no destination is left that it may go to",
            Self::NoCpu => "no destination has the processor that it needs",
            Self::Group => "every destination with room has a VM of its group already",
            Self::NoRoom => "no destination has enough memory left for it",
        })
    }
}

/// What is left at each destination.
#[derive(Clone, Debug)]
pub struct Rooms {
    hosts: Vec<Destination>,
    lost: Vec<bool>,
    /// Free bytes and number of each host that is not lost.
    by_room: BTreeSet<(u64, usize)>,
}

impl Rooms {
    /// Nothing is reserved yet.
    #[must_use]
    pub fn new(hosts: Vec<Destination>) -> Self {
        let by_room = hosts.iter().enumerate().map(|(at, host)| (host.room.0, at)).collect();
        Self { lost: vec![false; hosts.len()], hosts, by_room }
    }

    /// The destinations, with what they have left.
    #[must_use]
    pub fn hosts(&self) -> &[Destination] {
        &self.hosts
    }

    /// The destination with the most room where `vm` fits, not one of `without`.
    ///
    /// # Errors
    /// Why there is none.
    pub fn choose(&self, vm: &Vm, without: &[usize]) -> Result<usize, Unplaced> {
        let mut why = Unplaced::NoDestination;
        for &(room, at) in self.by_room.iter().rev() {
            let host = &self.hosts[at];
            // The others have less.
            if room < vm.memory.0 {
                return Err(why.max(Unplaced::NoRoom));
            }
            let allowed = vm.only.as_ref().is_none_or(|only| only.contains(&at));
            let obstacle = if !allowed || without.contains(&at) {
                Unplaced::NoDestination
            } else if !host.cpus.runs(vm.cpu) {
                Unplaced::NoCpu
            } else if vm.group.is_some_and(|group| host.groups.contains(&group)) {
                Unplaced::Group
            } else {
                return Ok(at);
            };
            why = why.max(obstacle);
        }
        Err(why)
    }

    /// Whether `vm` can go to the host `at`.
    #[must_use]
    pub fn fits(&self, vm: &Vm, at: usize) -> bool {
        let host = &self.hosts[at];
        !self.lost[at]
            && vm.only.as_ref().is_none_or(|only| only.contains(&at))
            && host.cpus.runs(vm.cpu)
            && vm.memory <= host.room
            && vm.group.is_none_or(|group| !host.groups.contains(&group))
    }

    /// Takes the room of `vm` at `at`, which [`Self::fits`] or [`Self::choose`] has named.
    pub fn reserve(&mut self, vm: &Vm, at: usize) {
        self.by_room.remove(&(self.hosts[at].room.0, at));
        let host = &mut self.hosts[at];
        host.room = host.room.saturating_sub(vm.memory);
        host.groups.extend(vm.group);
        self.list(at);
    }

    /// Gives it back.
    pub fn release(&mut self, vm: &Vm, at: usize) {
        self.by_room.remove(&(self.hosts[at].room.0, at));
        let host = &mut self.hosts[at];
        host.room.0 = host.room.0.saturating_add(vm.memory.0);
        if let Some(group) = vm.group {
            host.groups.remove(&group);
        }
        self.list(at);
    }

    /// The host `at` takes nothing any more.
    pub fn lose(&mut self, at: usize) {
        self.by_room.remove(&(self.hosts[at].room.0, at));
        self.lost[at] = true;
    }

    fn list(&mut self, at: usize) {
        if !self.lost[at] {
            self.by_room.insert((self.hosts[at].room.0, at));
        }
    }
}
