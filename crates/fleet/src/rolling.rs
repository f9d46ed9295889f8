//! A fleet whose hosts are emptied one wave after the other, as for a new kernel on all of them.
//!
//! Each wave is an [`Evacuation`] like any other: some hosts are sources, all others destinations.
//! A host that was emptied is empty when it comes back.

use std::collections::{BTreeMap, BTreeSet};

use godwit_units::{ByteCount, Rate};

use crate::evacuation::{Evacuation, Place, Stays};
use crate::inventory::{CpuSet, Destination, Source, Vm};
use crate::virtual_run::{Faults, run};

/// Hosts, and the virtual machines on them.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// Memory of each host for virtual machines, and the newest kind of processor that it can be;
    /// it can be all older ones, too.
    pub hosts: Vec<(ByteCount, u8)>,
    /// Virtual machines; their source is the host that they are on.
    pub vms: Vec<Vm>,
    /// What the link of each host carries.
    pub link: Rate,
}

impl Fleet {
    /// One that is made up: hosts of 384 GiB and three generations of processors, and virtual
    /// machines of 2 to 64 GiB, the small ones the most, of which most are nearly idle and one in
    /// fifty is very busy. Of ten, three are in groups of three that must not share a host.
    #[must_use]
    pub fn made_up(hosts: usize, vms: usize, link: Rate, draw: &mut dyn FnMut() -> f64) -> Self {
        let kinds: Vec<(ByteCount, u8)> =
            (0..hosts).map(|_| (ByteCount(384 << 30), (draw() * 3.0) as u8)).collect();
        let vm = |at: usize, draw: &mut dyn FnMut() -> f64| {
            let source = (draw() * hosts as f64) as usize;
            let memory = 1_u64 << (1 + (draw() * draw() * 6.0) as u32);
            let dirty = match draw() {
                busy if busy < 0.02 => 400e6,
                busy if busy < 0.2 => 20e6 + 40e6 * draw(),
                _ => 2e6 * draw(),
            };
            Vm {
                source,
                memory: ByteCount(memory << 30),
                data: ByteCount(((memory << 30) as f64 * (0.3 + 0.6 * draw())) as u64),
                dirty: Rate::from_bytes_per_second(dirty),
                cpu: (draw() < 0.5).then(|| (draw() * f64::from(kinds[source].1 + 1)) as u8),
                group: (at % 10 < 3).then_some((at / 10) as u32),
                only: None,
            }
        };
        let vms = (0..vms).map(|at| vm(at, draw)).collect();
        Self { hosts: kinds, vms, link }
    }
}

/// How the hosts are emptied.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Hosts of a wave.
    pub wave: usize,
    /// What the moves from a host may send.
    pub budget: Rate,
    /// Moves at once from a host, and to one.
    pub at_once: u32,
    /// Of so many moves one fails: a number from 0 to 1.
    pub failing: f64,
    /// In so many waves a host is lost as a destination: a number from 0 to 1.
    pub losing: f64,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Rolled {
    /// Waves.
    pub waves: usize,
    /// For all of them.
    pub seconds: f64,
    /// For each wave, as it was and as it was forecast before.
    pub wave_seconds: Vec<(f64, f64)>,
    /// Moves that ended well.
    pub moved: usize,
    /// Moves that failed.
    pub failures: usize,
    /// Virtual machines that stayed, by why.
    pub stays: BTreeMap<String, usize>,
    /// Hosts that were empty at the end of their wave.
    pub emptied: usize,
    /// Destinations that were lost.
    pub lost: usize,
    /// What was sent.
    pub bytes: f64,
    /// The mean part of its budget that a host used while it was emptied.
    pub mean_of_budget: f64,
    /// The highest part of its budget that any host used.
    pub most_of_budget: f64,
    /// The most moves at once.
    pub most_moves: usize,
}

struct Drawn<'a> {
    draw: &'a mut dyn FnMut() -> f64,
    failing: f64,
    loss: Option<(f64, usize)>,
}

impl Faults for Drawn<'_> {
    fn fails_after(&mut self, _: usize, _: usize) -> Option<f64> {
        ((self.draw)() < self.failing).then(|| (self.draw)())
    }

    fn next_loss(&mut self) -> Option<(f64, usize)> {
        self.loss.take()
    }
}

/// Empties every host of `fleet` once. `draw` draws numbers from 0 to 1.
pub fn roll(fleet: &mut Fleet, terms: &Terms, draw: &mut dyn FnMut() -> f64) -> Rolled {
    let mut rolled = Rolled::default();
    let count = fleet.hosts.len();
    let mut host_seconds = 0.0;
    let mut on: Vec<Vec<usize>> = vec![Vec::new(); count];
    for (at, vm) in fleet.vms.iter().enumerate() {
        on[vm.source].push(at);
    }
    for first in (0..count).step_by(terms.wave.max(1)) {
        let sources = first..count.min(first + terms.wave);
        let others: Vec<usize> = (0..count).filter(|host| !sources.contains(host)).collect();
        let destinations: Vec<Destination> =
            others.iter().map(|host| destination(fleet, &on[*host], *host, terms)).collect();
        let leaving: Vec<usize> = sources.clone().flat_map(|host| on[host].clone()).collect();
        let vms: Vec<Vm> = leaving
            .iter()
            .map(|vm| Vm { source: fleet.vms[*vm].source - first, ..fleet.vms[*vm].clone() })
            .collect();
        let budgets = vec![Source::new(terms.budget, terms.at_once); sources.len()];
        let mut evacuation = Evacuation::new(vms, destinations, budgets);
        let forecast = run(&mut evacuation.clone(), &mut crate::virtual_run::NoFaults);
        let loss = (draw() < terms.losing && !others.is_empty())
            .then(|| (draw() * forecast.seconds, (draw() * others.len() as f64) as usize));
        rolled.lost += usize::from(loss.is_some());
        let mut faults = Drawn { draw, failing: terms.failing, loss };
        let ran = run(&mut evacuation, &mut faults);
        let mut ends = vec![0.0_f64; sources.len()];
        for (at, vm) in leaving.iter().enumerate() {
            let source = fleet.vms[*vm].source;
            if let Some((_, end)) = ran.times[at] {
                ends[source - first] = ends[source - first].max(end);
            }
            match evacuation.places()[at] {
                Place::Moved { to } => {
                    fleet.vms[*vm].source = others[to];
                    on[source].retain(|other| other != vm);
                    on[others[to]].push(*vm);
                }
                Place::Stays(Stays::Unplaced(why)) => {
                    *rolled.stays.entry(why.to_string()).or_default() += 1;
                }
                _ => *rolled.stays.entry("its moves have failed".to_owned()).or_default() += 1,
            }
        }
        host_seconds += ends.iter().sum::<f64>();
        rolled.emptied += sources.filter(|host| on[*host].is_empty()).count();
        rolled.waves += 1;
        rolled.seconds += ran.seconds;
        rolled.wave_seconds.push((ran.seconds, forecast.seconds));
        rolled.moved += ran.moved;
        rolled.failures += ran.failures;
        rolled.bytes += ran.bytes;
        rolled.most_of_budget = rolled.most_of_budget.max(ran.most_of_budget);
        rolled.most_moves = rolled.most_moves.max(ran.most_moves);
    }
    rolled.mean_of_budget =
        rolled.bytes / (terms.budget.bytes_per_second() * host_seconds).max(1e-9);
    rolled
}

fn destination(fleet: &Fleet, on: &[usize], host: usize, terms: &Terms) -> Destination {
    let (memory, kind) = fleet.hosts[host];
    let taken: ByteCount = on.iter().map(|vm| fleet.vms[*vm].memory).sum();
    let groups: BTreeSet<u32> = on.iter().filter_map(|vm| fleet.vms[*vm].group).collect();
    Destination {
        room: memory.saturating_sub(taken),
        cpus: CpuSet((2_u64 << kind.min(62)) - 1),
        at_once: terms.at_once,
        link: fleet.link,
        groups,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rolled(failing: f64, losing: f64) -> (Fleet, Rolled) {
        let mut state = 7_u64;
        let mut draw = move || {
            // Knuth's MMIX generator: the same numbers each time.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        let link = Rate::from_bytes_per_second(25e9 / 8.0);
        let mut fleet = Fleet::made_up(200, 4000, link, &mut draw);
        let terms = Terms {
            wave: 10,
            budget: Rate::from_bytes_per_second(10e9 / 8.0),
            at_once: 2,
            failing,
            losing,
        };
        let rolled = roll(&mut fleet, &terms, &mut draw);
        (fleet, rolled)
    }

    #[test]
    fn every_host_is_emptied_once_and_the_forecast_is_what_happens() {
        let (fleet, rolled) = rolled(0.0, 0.0);
        assert_eq!((rolled.waves, rolled.emptied, rolled.failures), (20, 200, 0));
        assert!(rolled.stays.is_empty(), "{:?}", rolled.stays);
        assert!(rolled.wave_seconds.iter().all(|(was, forecast)| was == forecast));
        assert!(rolled.most_of_budget <= 1.0 && rolled.mean_of_budget > 0.5, "{rolled:?}");
        let mut on = vec![0; 200];
        fleet.vms.iter().for_each(|vm| on[vm.source] += vm.memory.0);
        assert!(on.iter().all(|bytes| *bytes <= 384 << 30));
    }

    #[test]
    fn moves_that_fail_are_made_again_and_lost_destinations_are_left_out() {
        let (_, rolled) = rolled(0.05, 0.5);
        assert!(rolled.failures > 100 && rolled.lost > 3, "{rolled:?}");
        assert!(rolled.emptied > 190, "{rolled:?}");
        assert!(rolled.moved >= 4000 - 20, "{rolled:?}");
        assert!(rolled.wave_seconds.iter().map(|(was, _)| was).sum::<f64>() > 0.0);
    }
}
