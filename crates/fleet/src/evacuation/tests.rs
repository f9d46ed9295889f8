//! The machine against arbitrary fleets, orders of endings and changes on the way.

use std::collections::BTreeMap;

use godwit_units::ByteCount;
use proptest::prelude::*;

use super::*;
use crate::inventory::CpuSet;
use crate::virtual_run::{NoFaults, run};

fn rate(bytes: f64) -> Rate {
    Rate::from_bytes_per_second(bytes)
}

fn vm(sources: usize, hosts: usize) -> impl Strategy<Value = Vm> {
    let only = prop::option::weighted(0.2, prop::collection::btree_set(0..hosts, 1..=hosts));
    (
        (0..sources, 1_u64..64, 0.0..200.0),
        prop::option::weighted(0.3, 0_u8..3),
        prop::option::weighted(0.4, 0_u32..4),
        only,
    )
        .prop_map(|((source, memory, dirty), cpu, group, only)| Vm {
            source,
            memory: ByteCount(memory << 20),
            data: ByteCount(memory << 19),
            dirty: rate(dirty * 1e6),
            cpu,
            group,
            only,
        })
}

fn destination() -> impl Strategy<Value = Destination> {
    (0_u64..256, 0_u64..8, 1_u32..4, 1.0..300.0).prop_map(|(room, cpus, at_once, link)| {
        Destination {
            room: ByteCount(room << 20),
            cpus: CpuSet(cpus),
            at_once,
            link: rate(link * 1e6),
            groups: BTreeSet::new(),
        }
    })
}

type World = (Vec<Vm>, Vec<Destination>, Vec<Source>);

fn world() -> impl Strategy<Value = World> {
    (1_usize..4, 1_usize..6).prop_flat_map(|(sources, hosts)| {
        (
            prop::collection::vec(vm(sources, hosts), 0..30),
            prop::collection::vec(destination(), hosts),
            prop::collection::vec(
                (10.0..500.0, 1_u32..5).prop_map(|(b, n)| Source::new(rate(b * 1e6), n)),
                sources,
            ),
        )
    })
}

/// What an evacuation must keep, seen from outside.
struct Watcher {
    world: World,
    /// Moves under way: where to and at what rate.
    moving: BTreeMap<usize, (usize, f64)>,
    moved: BTreeMap<usize, usize>,
}

impl Watcher {
    fn take(&mut self, action: Action) {
        match action {
            Action::Begin { vm, to, rate } => {
                assert!(!self.moved.contains_key(&vm), "{vm} moves a second time");
                let before = self.moving.insert(vm, (to, rate.bytes_per_second()));
                assert_eq!(before, None, "two moves of {vm}");
            }
            Action::Pace { vm, rate } => {
                self.moving.get_mut(&vm).expect("a move under way").1 = rate.bytes_per_second();
            }
        }
        // Behind each action, not only behind the last one.
        for (at, source) in self.world.2.iter().enumerate() {
            let own = self.moving.iter().filter(|(vm, _)| self.world.0[**vm].source == at);
            let rates: Vec<f64> = own.map(|(_, (_, rate))| *rate).collect();
            assert!(rates.iter().sum::<f64>() <= source.budget.bytes_per_second(), "budget");
            assert!(rates.len() <= source.at_once as usize, "moves at once");
            assert!(rates.iter().all(|rate| *rate > 0.0), "a move without a share: {rates:?}");
        }
    }

    fn check_hosts(&self) {
        for (at, host) in self.world.1.iter().enumerate() {
            let here: Vec<&Vm> = self
                .moved
                .iter()
                .map(|(vm, to)| (vm, *to))
                .chain(self.moving.iter().map(|(vm, (to, _))| (vm, *to)))
                .filter(|(_, to)| *to == at)
                .map(|(vm, _)| &self.world.0[*vm])
                .collect();
            let memory: ByteCount = here.iter().map(|vm| vm.memory).sum();
            assert!(memory <= host.room, "{memory} in {}", host.room);
            assert!(here.iter().all(|vm| host.cpus.runs(vm.cpu)), "processor");
            assert!(here.iter().all(|vm| vm.only.as_ref().is_none_or(|only| only.contains(&at))));
            let mut groups: Vec<u32> = here.iter().filter_map(|vm| vm.group).collect();
            groups.sort_unstable();
            assert!(groups.windows(2).all(|two| two[0] != two[1]), "groups {groups:?}");
            let into: Vec<f64> =
                self.moving.values().filter(|(to, _)| *to == at).map(|(_, rate)| *rate).collect();
            assert!(into.len() <= host.at_once as usize, "moves to a host");
            assert!(into.iter().sum::<f64>() <= host.link.bytes_per_second(), "link");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever ends in whatever order and way: room, processors, groups, budgets and links are
    /// kept at every step, no virtual machine moves twice, and each has one place in the end.
    #[test]
    fn every_machine_has_one_place_and_no_limit_is_passed(
        world in world(),
        turns in prop::collection::vec((any::<prop::sample::Index>(), 0_u8..12), 0..400),
    ) {
        let (vms, hosts, sources) = world.clone();
        let count = vms.len();
        let mut evacuation = Evacuation::new(vms, hosts, sources);
        let mut watcher = Watcher { world, moving: BTreeMap::new(), moved: BTreeMap::new() };
        let mut turns = turns.into_iter();
        loop {
            for action in evacuation.advance() {
                watcher.take(action);
            }
            watcher.check_hosts();
            if watcher.moving.is_empty() {
                break;
            }
            let (which, how) = turns.next().map_or((None, 0), |(which, how)| (Some(which), how));
            let moving: Vec<usize> = watcher.moving.keys().copied().collect();
            let vm = which.map_or(moving[0], |which| *which.get(&moving));
            let to = watcher.moving[&vm].0;
            match how {
                10 => evacuation.lose(to),
                11 => {
                    // A smaller budget holds from the next advance on.
                    let half = watcher.world.2[0].budget.bytes_per_second() / 2.0;
                    if half > 1e6 {
                        watcher.world.2[0].budget = rate(half);
                        evacuation.set_budget(0, rate(half));
                    }
                    // Only then are all held to it.
                    for action in evacuation.advance() {
                        if let Action::Pace { vm, rate } = action {
                            watcher.moving.get_mut(&vm).unwrap().1 = rate.bytes_per_second();
                        } else {
                            watcher.take(action);
                        }
                    }
                    continue;
                }
                how => {
                    watcher.moving.remove(&vm);
                    let ending = match how {
                        0..=6 => Ending::Moved,
                        7 => Ending::Failed,
                        8 => Ending::Refused,
                        _ => Ending::InDoubt,
                    };
                    if ending == Ending::Moved || ending == Ending::InDoubt {
                        watcher.moved.insert(vm, to);
                    }
                    evacuation.ended(vm, ending);
                }
            }
        }
        prop_assert!(evacuation.is_over());
        for vm in 0..count {
            match evacuation.places()[vm] {
                Place::Moved { to } => prop_assert_eq!(watcher.moved[&vm], to),
                Place::Stays(Stays::Operator) => prop_assert!(watcher.moved.contains_key(&vm)),
                Place::Stays(_) => prop_assert!(!watcher.moved.contains_key(&vm)),
                place => prop_assert!(false, "{place:?}"),
            }
        }
    }

    /// What is divided is all of the budget that can be used, and no more.
    #[test]
    fn a_budget_is_used_up_and_not_passed(
        budget in 1.0..1e10_f64,
        claims in prop::collection::vec((0.0..1e9_f64, 1.0..1e10_f64), 1..10),
    ) {
        let claims: Vec<Claim> = claims
            .into_iter()
            .map(|(need, most)| Claim { need: rate(need), most: rate(most) })
            .collect();
        let given = divide(rate(budget), &claims);
        let sum: f64 = given.iter().map(|rate| rate.bytes_per_second()).sum();
        let usable: f64 = claims.iter().map(|claim| claim.most.bytes_per_second()).sum();
        prop_assert!(sum <= budget);
        prop_assert!(sum >= budget.min(usable) * 0.999_999 - claims.len() as f64, "{sum}");
        for (given, claim) in given.iter().zip(&claims) {
            prop_assert!(given.bytes_per_second() <= claim.most.bytes_per_second());
        }
    }

    /// In virtual time all come to an end, and those that have a place arrive.
    #[test]
    fn an_evacuation_without_faults_moves_whatever_has_a_place(world in world()) {
        let (vms, hosts, sources) = world;
        let mut evacuation = Evacuation::new(vms, hosts, sources);
        let places = evacuation.places().iter();
        let placed = places.filter(|place| matches!(place, Place::Waiting { .. })).count();
        let ran = run(&mut evacuation, &mut NoFaults);
        prop_assert_eq!((ran.moved, ran.failures), (placed, 0));
        prop_assert!(ran.most_of_budget <= 1.0 + 1e-9, "{}", ran.most_of_budget);
    }
}

#[test]
fn a_busy_guest_gets_what_it_needs_or_the_host_for_itself() {
    let idle = Vm::idle(ByteCount(1 << 30));
    let busy = Vm { dirty: rate(70e6), ..idle.clone() };
    let hosts = vec![Destination { at_once: 9, ..Destination::new(ByteCount(1 << 40)) }];
    let source = Source::new(rate(100e6), 9);
    let vms = vec![busy.clone(), idle.clone(), busy];
    let mut evacuation = Evacuation::new(vms, hosts, vec![source]);
    let began: Vec<usize> = evacuation
        .advance()
        .into_iter()
        .filter_map(|action| match action {
            Action::Begin { vm, .. } => Some(vm),
            Action::Pace { .. } => None,
        })
        .collect();
    // The idle one and one of the busy ones: both busy ones would need 175 MB/s.
    assert_eq!(began, [1, 0]);
}

#[test]
fn a_pause_begins_nothing_and_ends_nothing() {
    let hosts = vec![Destination::new(ByteCount(1 << 40))];
    let vms = vec![Vm::idle(ByteCount(1 << 30)); 4];
    let mut evacuation = Evacuation::new(vms, hosts, vec![Source::new(rate(1e8), 2)]);
    assert_eq!(evacuation.advance().len(), 2);
    evacuation.pause(true);
    evacuation.ended(0, Ending::Moved);
    // The other has all of the budget now.
    assert_eq!(evacuation.advance(), [Action::Pace { vm: 1, rate: rate(1e8) }]);
    evacuation.ended(1, Ending::Moved);
    assert_eq!(evacuation.advance(), []);
    assert!(!evacuation.is_over());
    evacuation.pause(false);
    assert_eq!(evacuation.advance().len(), 2);
}

#[test]
fn what_failed_goes_elsewhere_and_three_times_is_enough() {
    let hosts = vec![Destination::new(ByteCount(8 << 30)), Destination::new(ByteCount(4 << 30))];
    let mut evacuation =
        Evacuation::new(vec![Vm::idle(ByteCount(1 << 30))], hosts, vec![Source::new(rate(1e8), 2)]);
    let mut went = Vec::new();
    while let Some(Action::Begin { to, .. }) = evacuation.advance().first().copied() {
        went.push(to);
        evacuation.ended(0, Ending::Failed);
    }
    assert_eq!(went, [0, 1, 0]);
    assert_eq!(evacuation.places(), [Place::Stays(Stays::Failed)]);
}

#[test]
fn what_did_not_begin_waits_again_and_that_was_no_attempt() {
    // Mutation: it counts as one that failed.
    let hosts = vec![Destination::new(ByteCount(8 << 30)), Destination::new(ByteCount(4 << 30))];
    let vms = vec![Vm::idle(ByteCount(1 << 30)); 2];
    let mut evacuation = Evacuation::new(vms, hosts, vec![Source::new(rate(1e8), 2)]);
    let first = evacuation.advance();
    for _ in 0..5 {
        evacuation.ended(0, Ending::NeverBegan);
        assert_eq!(evacuation.advance(), [first[0]], "the other keeps its share");
    }
    evacuation.ended(0, Ending::Moved);
    evacuation.ended(1, Ending::Moved);
    assert!(evacuation.is_over());
}

#[test]
fn facts_are_taken_up_and_nothing_is_moved_again() {
    let hosts = vec![Destination::new(ByteCount(4 << 30)), Destination::new(ByteCount(4 << 30))];
    let vms = vec![Vm::idle(ByteCount(2 << 30)); 4];
    let mut evacuation = Evacuation::new(vms, hosts, vec![Source::new(rate(1e8), 2)]);
    evacuation.adopt(0, Place::Moved { to: 1 });
    evacuation.adopt(1, Place::Moving { to: 1 });
    evacuation.adopt(2, Place::Waiting { to: 1 });
    // There is no room at 1 any more. What was found under way may have had all of the budget: it
    // is held to its share before another begins.
    assert_eq!(evacuation.share(1), None);
    let begun = evacuation.advance();
    assert!(
        matches!(begun[..], [Action::Pace { vm: 1, .. }, Action::Begin { to: 0, .. }]),
        "{begun:?}"
    );
    assert_eq!((evacuation.share(0), evacuation.share(1)), (None, Some(rate(5e7))));
    assert_eq!(evacuation.places()[0], Place::Moved { to: 1 });
}

#[test]
fn more_moves_at_once_begin_and_fewer_end_none() {
    let hosts = vec![Destination { at_once: 9, ..Destination::new(ByteCount(1 << 40)) }];
    let vms = vec![Vm::idle(ByteCount(1 << 30)); 6];
    let mut evacuation = Evacuation::new(vms, hosts, vec![Source::new(rate(9e7), 1)]);
    assert_eq!(evacuation.advance(), [Action::Begin { vm: 0, to: 0, rate: rate(9e7) }]);
    evacuation.set_at_once(0, 3);
    // The first makes room before the others begin.
    let share = rate(3e7);
    let begin = |vm| Action::Begin { vm, to: 0, rate: share };
    assert_eq!(evacuation.advance(), [Action::Pace { vm: 0, rate: share }, begin(1), begin(2)]);
    evacuation.set_at_once(0, 1);
    assert_eq!(evacuation.advance(), []);
    evacuation.ended(0, Ending::Moved);
    let more = rate(4.5e7);
    let paced = [1, 2].map(|vm| Action::Pace { vm, rate: more });
    assert_eq!(evacuation.advance(), paced, "none begins beside two");
}
