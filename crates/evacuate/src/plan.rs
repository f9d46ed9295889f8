//! What is written down: who is to go where under which limits, and how far each is.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::path::PathBuf;

use godwit_fleet::{CpuSet, Destination, Source, Vm};
use godwit_units::{ByteCount, Rate};
use serde::{Deserialize, Serialize};

/// What an evacuation is to do. Once it is written down nothing of it changes but the limits, and
/// those when an operator says so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// What all moves together may send, in bytes a second.
    pub bytes_per_second: f64,
    /// The most moves at once.
    pub at_once: u32,
    /// Processor time for all moves together, in hundredths of a processor; `None`: all that they
    /// want.
    #[serde(default)]
    pub cpu_percent: Option<NonZeroU32>,
    /// Options for each `godwit migrate`.
    pub options: Vec<String>,
    /// Who leaves.
    pub vms: Vec<PlannedVm>,
    /// Where there is room.
    pub destinations: Vec<PlannedDestination>,
    /// Seconds that it was forecast to take.
    pub forecast_seconds: f64,
    /// Milliseconds since 1970 when it began.
    pub began_ms: u64,
    /// Which host is emptied, where several coordinators may go on with the plan.
    #[serde(default)]
    pub home: Option<Home>,
}

/// The host that is emptied, and where on it moves are found.
///
/// ```
/// use godwit_evacuate::Home;
///
/// let home = Home { host: "east".to_owned(), directory: "/var/lib/evacuations/weekly".into() };
/// assert!(home.directory.is_absolute());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Its name, which no other has.
    pub host: String,
    /// Where each move has its file.
    pub directory: PathBuf,
}

/// One that leaves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedVm {
    /// Its name, of which there is one.
    pub name: String,
    /// How `godwit migrate --vm` knows it.
    pub vm: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// How much of that holds data.
    pub data_bytes: u64,
    /// What it writes each second.
    pub dirty_bytes_per_second: f64,
    /// The model of processor that it needs.
    #[serde(default)]
    pub cpu: Option<String>,
    /// At most one of a group is on a host.
    #[serde(default)]
    pub group: Option<String>,
    /// Its disks, with what is in use of each.
    #[serde(default)]
    pub disks: BTreeMap<String, u64>,
    /// Who takes it in, for each destination that it may go to.
    pub receivers: BTreeMap<String, Receiver>,
}

/// A host with room.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedDestination {
    /// Its name, of which there is one.
    pub name: String,
    /// Memory that it has for these guests.
    pub room_bytes: u64,
    /// Models of processors that it can be; none: all.
    pub cpus: Vec<String>,
    /// The most that it takes in at once.
    pub at_once: u32,
    /// Groups of which it has one already.
    pub groups: Vec<String>,
}

/// How a guest is taken in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Receiver {
    /// A `godwit receive` listens there already.
    Listens(String),
    /// A command starts one: it prints the address on its first line, or lines of JSON of which one
    /// is `{"event":"listening","address":"…"}`, as `godwit receive --json` does.
    Starts {
        /// The command and its arguments.
        start: Vec<String>,
    },
}

/// A move, as it is written down before it begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// Whose.
    pub vm: usize,
    /// Where to.
    pub to: usize,
    /// The how manieth, from 1.
    pub number: u32,
}

/// How far a virtual machine is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// A move is under way, or was about to begin.
    Moving(Attempt),
    /// It is there.
    Moved {
        /// Where.
        to: usize,
        /// By which attempt.
        number: u32,
    },
    /// A move has failed, and it is where it was.
    Failed {
        /// The how manieth that was.
        number: u32,
        /// Where to.
        to: usize,
        /// Why.
        why: String,
    },
    /// An operator has to look at it.
    Operator {
        /// Which attempt left it so.
        number: u32,
        /// Where to.
        to: usize,
        /// What is known.
        why: String,
    },
}

impl Step {
    /// Whether `next` may follow what is written down of a virtual machine, which is nothing before
    /// its first move. One that has moved, or that an operator has to look at, is left alone; a
    /// move has one end; and no number is used twice.
    ///
    /// ```
    /// use godwit_evacuate::{Attempt, Step};
    ///
    /// let first = Step::Moving(Attempt { vm: 0, to: 1, number: 1 });
    /// let moved = Step::Moved { to: 1, number: 1 };
    /// assert!(Step::may_follow(None, &first) && Step::may_follow(Some(&first), &moved));
    /// let again = Step::Moving(Attempt { vm: 0, to: 0, number: 2 });
    /// assert!(!Step::may_follow(Some(&moved), &again));
    /// ```
    #[must_use]
    pub fn may_follow(before: Option<&Self>, next: &Self) -> bool {
        match (before, next) {
            (None, Self::Moving(attempt)) => attempt.number == 1,
            (Some(Self::Failed { number, .. }), Self::Moving(attempt)) => {
                attempt.number == number + 1
            }
            (
                Some(Self::Moving(attempt)),
                Self::Moved { to, number }
                | Self::Failed { to, number, .. }
                | Self::Operator { to, number, .. },
            ) => (attempt.to, attempt.number) == (*to, *number),
            _ => false,
        }
    }
}

/// A step as it is written down: who has taken it, and when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    #[serde(flatten)]
    pub(crate) step: Step,
    /// Nobody, of an evacuation that one coordinator has in a file.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) by: String,
    #[serde(default)]
    pub(crate) since_ms: u64,
}

/// What operators want of an evacuation, whoever coordinates it.
///
/// ```
/// use godwit_evacuate::Wanted;
///
/// let wanted = Wanted { paused: true, ..Wanted::default() };
/// assert!(!wanted.cancelled && wanted.at_once.is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Wanted {
    /// No further move is to begin.
    #[serde(default)]
    pub paused: bool,
    /// The moves under way are to be cancelled, and no further one to begin.
    #[serde(default)]
    pub cancelled: bool,
    /// What all moves together may send, if it is not what was planned.
    #[serde(default)]
    pub bytes_per_second: Option<f64>,
    /// Moves at once, if it is not what was planned.
    #[serde(default)]
    pub at_once: Option<u32>,
}

impl Plan {
    /// Whether `other` moves the same virtual machines in the same way: what a coordinator that is
    /// started by the same command finds. Limits may have been changed since.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        (&self.vms, &self.destinations, &self.options)
            == (&other.vms, &other.destinations, &other.options)
    }

    /// Those of the disks of `vm` that move along with it, as the options for each `godwit migrate`
    /// have it.
    pub fn moving_disks<'a>(
        &self,
        vm: &'a PlannedVm,
    ) -> impl Iterator<Item = (&'a str, ByteCount)> + use<'a> {
        let behind = self.options.windows(2).filter(|two| two[0] == "--disks").map(|two| &two[1]);
        let within = self.options.iter().filter_map(|word| word.strip_prefix("--disks="));
        let choice = behind.map(String::as_str).chain(within).last().unwrap_or_default();
        let names: Vec<String> = choice.split(',').map(str::to_owned).collect();
        let moves = move |name: &String| names.iter().any(|it| it == "all" || it == name);
        let disks = vm.disks.iter().filter(move |(name, _)| moves(name));
        disks.map(|(name, bytes)| (name.as_str(), ByteCount(*bytes)))
    }

    /// What the move whose share of the bandwidth is `rate` may use, as a value of the setting
    /// `cpu-budget`: as much of the processor time as of the bandwidth, and at least a hundredth of
    /// a processor. `None`: all that it wants.
    pub(crate) fn cpu_budget(&self, rate: Rate) -> Option<String> {
        let all = f64::from(self.cpu_percent?.get());
        let share = (rate.bytes_per_second() / self.bytes_per_second).clamp(0.0, 1.0);
        // Down to the whole number: all shares together are within the budget, but where one would
        // get nothing.
        Some(format!("{}%", ((all * share) as u32).max(1)))
    }

    /// The same for the planner: virtual machines, destinations and the host that is emptied.
    #[must_use]
    pub fn inventory(&self) -> (Vec<Vm>, Vec<Destination>, Source) {
        let groups: BTreeSet<&str> = self
            .vms
            .iter()
            .filter_map(|vm| vm.group.as_deref())
            .chain(self.destinations.iter().flat_map(|host| host.groups.iter().map(String::as_str)))
            .collect();
        let group = |name: &str| groups.iter().position(|known| *known == name).map(|at| at as u32);
        let cpus: BTreeSet<&str> = self.vms.iter().filter_map(|vm| vm.cpu.as_deref()).collect();
        // Models beyond the 64th count as the last one, which a destination then is not.
        let cpu = |name: &str| cpus.iter().position(|known| *known == name).map(|at| at.min(63));
        let host = |name: &str| self.destinations.iter().position(|host| host.name == name);
        let vms = self.vms.iter().map(|vm| Vm {
            source: 0,
            memory: ByteCount(vm.memory_bytes),
            data: ByteCount(vm.data_bytes)
                + self.moving_disks(vm).map(|(_, bytes)| bytes).sum::<ByteCount>(),
            dirty: Rate::from_bytes_per_second(vm.dirty_bytes_per_second),
            cpu: vm.cpu.as_deref().and_then(cpu).map(|at| at as u8),
            group: vm.group.as_deref().and_then(group),
            only: Some(vm.receivers.keys().filter_map(|name| host(name)).collect()),
        });
        let destinations = self.destinations.iter().map(|host| Destination {
            room: ByteCount(host.room_bytes),
            cpus: if host.cpus.is_empty() {
                CpuSet::ALL
            } else {
                let known = host.cpus.iter().filter_map(|name| cpu(name));
                CpuSet(known.fold(0, |set, at| set | 1 << at))
            },
            at_once: host.at_once,
            groups: host.groups.iter().filter_map(|name| group(name)).collect(),
            ..Destination::new(ByteCount::ZERO)
        });
        let budget = Rate::from_bytes_per_second(self.bytes_per_second);
        (vms.collect(), destinations.collect(), Source::new(budget, self.at_once))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::tests;

    #[test]
    fn processor_time_is_divided_as_the_bandwidth_is() {
        let mut plan = tests::plan();
        let budget = |plan: &Plan, share: f64| {
            plan.cpu_budget(Rate::from_bytes_per_second(plan.bytes_per_second * share))
        };
        assert_eq!(budget(&plan, 0.5), None);
        plan.cpu_percent = NonZeroU32::new(250);
        let told = [1.0, 0.5, 1.0 / 3.0, 0.0, 2.0].map(|share| budget(&plan, share).unwrap());
        assert_eq!(told, ["250%", "125%", "83%", "1%", "250%"]);
    }

    #[test]
    fn disks_that_move_along_are_part_of_the_forecast() {
        let disks = [("vda", 10), ("vdb", 100)].map(|(name, bytes)| (name.to_owned(), bytes));
        let vm = PlannedVm {
            name: "web01".to_owned(),
            vm: "libvirt:web01".to_owned(),
            memory_bytes: 1,
            data_bytes: 1,
            dirty_bytes_per_second: 0.0,
            cpu: None,
            group: None,
            disks: disks.into(),
            receivers: BTreeMap::new(),
        };
        let data = |options: &[&str]| {
            let plan = Plan {
                bytes_per_second: 1.0,
                at_once: 1,
                cpu_percent: None,
                options: options.iter().map(|&word| word.to_owned()).collect(),
                vms: vec![vm.clone()],
                destinations: Vec::new(),
                forecast_seconds: 0.0,
                began_ms: 0,
                home: None,
            };
            plan.inventory().0[0].data.0
        };
        assert_eq!(data(&[]), 1);
        assert_eq!(data(&["--disks", "all"]), 111);
        assert_eq!(data(&["--verify", "--disks=vdb,vdc"]), 101);
        assert_eq!(data(&["--disks", "none"]), 1);
    }
}
