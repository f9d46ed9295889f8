//! Several coordinators of one evacuation, step by step in an order that chance makes: each may be
//! killed before any step, be left standing while others go on, and lose its lease at any moment,
//! whether it knows that or not.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_units::Rate;

use super::tests::plan;
use super::*;

/// What the order of steps says to one that waits for its next.
enum Turn {
    Go,
    /// The lease may be taken, whoever has it.
    Take,
    Kill,
}

struct Killed;

/// Where a coordinator waits before each step.
struct Gate {
    turns: Receiver<Turn>,
    /// One for each step: now it waits.
    waits: Sender<()>,
}

impl Gate {
    fn step(&self) -> bool {
        // Nobody listens when the test has failed elsewhere.
        let _ = self.waits.send(());
        match self.turns.recv() {
            Ok(Turn::Go) => false,
            Ok(Turn::Take) => true,
            Ok(Turn::Kill) | Err(_) => resume_unwind(Box::new(Killed)),
        }
    }
}

/// What all of them share: the store, and the host with its guests.
#[derive(Default)]
struct Shared {
    values: BTreeMap<String, Vec<u8>>,
    /// The how manieth coordinator has the lease.
    lease: u64,
    /// Moves: until when they last, and how they end.
    moves: BTreeMap<(usize, u32), (u32, Look)>,
    arrived: BTreeSet<usize>,
    time: u32,
}

type World = Arc<Mutex<Shared>>;

fn locked(world: &World) -> MutexGuard<'_, Shared> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Coordinator<'a> {
    world: World,
    gate: &'a Gate,
    lease: u64,
}

impl Store for Coordinator<'_> {
    fn read(&self, key: &str) -> Result<Option<Vec<u8>>, EvacuateError> {
        self.gate.step();
        Ok(locked(&self.world).values.get(key).cloned())
    }

    fn put(&mut self, key: &str, value: &[u8]) -> Result<(), EvacuateError> {
        self.gate.step();
        let mut world = locked(&self.world);
        if world.lease != self.lease {
            return Err(EvacuateError::Lost { place: "the store".to_owned() });
        }
        world.values.insert(key.to_owned(), value.to_vec());
        Ok(())
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, EvacuateError> {
        self.gate.step();
        let world = locked(&self.world);
        let found = world.values.iter().filter(|(key, _)| key.starts_with(prefix));
        Ok(found.map(|(key, value)| (key.clone(), value.clone())).collect())
    }

    fn who(&self) -> String {
        format!("coordinator {}", self.lease)
    }
}

/// As [`crate::Moves`] are: what was found not to have begun cannot begin.
struct Own<'a>(World, &'a Gate);

impl Hands for Own<'_> {
    fn begin(&mut self, _: &Plan, attempt: &Attempt, _: Rate) -> Result<(), String> {
        self.1.step();
        let mut world = locked(&self.0);
        let (vm, time) = (attempt.vm, world.time);
        if world.moves.contains_key(&(vm, attempt.number)) {
            return Err("another coordinator has gone on".to_owned());
        }
        let is_under_way =
            |((other, _), (until, _)): (&(usize, u32), &(u32, Look))| *other == vm && *until > time;
        assert!(!world.moves.iter().any(is_under_way), "two moves of {vm} at once");
        assert!(!world.arrived.contains(&vm), "{vm} moves once more");
        let look = match (vm, attempt.number) {
            (2, 1) => Look::Failed("the link broke".to_owned()),
            _ => Look::Moved,
        };
        world.moves.insert((vm, attempt.number), (time + 2 + vm as u32 % 3, look));
        Ok(())
    }

    fn look(&mut self, _: &Plan, attempt: &Attempt) -> Look {
        self.1.step();
        let mut world = locked(&self.0);
        let time = world.time;
        match world.moves.get(&(attempt.vm, attempt.number)) {
            Some((until, _)) if *until > time => Look::Moving,
            Some((_, look)) => look.clone(),
            None => {
                let burnt = (0, Look::Failed("it never began".to_owned()));
                world.moves.insert((attempt.vm, attempt.number), burnt);
                Look::NeverBegan
            }
        }
    }

    fn pace(&mut self, _: &Plan, _: &Attempt, _: Rate) -> bool {
        self.1.step();
        true
    }

    fn cancel(&mut self, _: &Plan, _: &Attempt) {}
}

/// Stands by and coordinates until the evacuation is over.
fn coordinate(world: &World, gate: &Gate) {
    loop {
        let may_take = gate.step();
        let lease = {
            let mut world = locked(world);
            if world.values.contains_key(OUTCOME) {
                return;
            }
            if !may_take {
                continue;
            }
            world.lease += 1;
            world.lease
        };
        let mut hands = Own(Arc::clone(world), gate);
        let store = Coordinator { world: Arc::clone(world), gate, lease };
        let run = || -> Result<(), EvacuateError> {
            let (mut runner, _) = Runner::resume(store, "here", &mut hands)?;
            while !runner.is_over() {
                runner.turn()?;
                gate.step();
            }
            let report = bytes(&runner.report());
            runner.conclude(&report)
        };
        match run() {
            Ok(()) => return,
            Err(EvacuateError::Lost { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// One evacuation in an order made of `seed`: how many coordinators were killed, and how often the
/// lease was taken.
fn evacuate(seed: u64) -> (u32, u64) {
    let mut chance = fastrand::Rng::with_seed(seed);
    let world = World::default();
    locked(&world).values.insert(PLAN.to_owned(), bytes(&plan()));
    let mut killed = 0;
    std::thread::scope(|scope| {
        let start = || {
            let (turn, turns) = channel();
            let (waits, waiting) = channel();
            let world = Arc::clone(&world);
            let thread = scope.spawn(move || {
                let gate = Gate { turns, waits };
                let ended = catch_unwind(AssertUnwindSafe(|| coordinate(&world, &gate)));
                drop(gate);
                ended.err().filter(|cause| !cause.is::<Killed>())
            });
            (turn, waiting, thread)
        };
        let mut coordinators: Vec<_> = (0..3).map(|_| start()).collect();
        // Who is slow, and who is not: that changes.
        let mut favourite = 0;
        while !coordinators.is_empty() {
            if chance.u32(..40) == 0 {
                favourite = chance.usize(..);
            }
            let any = if chance.u32(..8) == 0 { chance.usize(..) } else { favourite };
            let at = any % coordinators.len();
            let (turn, waiting, _) = &coordinators[at];
            // It comes to its next step, or to its end.
            if waiting.recv().is_err() {
                let (_, _, thread) = coordinators.remove(at);
                if let Some(cause) = thread.join().unwrap() {
                    let words = cause.downcast_ref::<String>().map_or("", String::as_str);
                    panic!("seed {seed}: {words}");
                }
                continue;
            }
            let next = match chance.u32(..100) {
                0 if killed < 20 => {
                    killed += 1;
                    Turn::Kill
                }
                1..10 => Turn::Take,
                _ => Turn::Go,
            };
            let kills = matches!(next, Turn::Kill);
            let _ = turn.send(next);
            if kills {
                coordinators.push(start());
            }
            if chance.u32(..6) == 0 {
                let mut world = locked(&world);
                world.time += 1;
                let time = world.time;
                let arrived = world
                    .moves
                    .iter()
                    .filter(|(_, (until, look))| *until == time && *look == Look::Moved);
                let arrived: Vec<usize> = arrived.map(|((vm, _), _)| *vm).collect();
                for vm in arrived {
                    assert!(world.arrived.insert(vm), "seed {seed}: {vm} arrives twice");
                }
            }
        }
    });
    let world = locked(&world);
    let report: serde_json::Value = serde_json::from_slice(&world.values[OUTCOME]).unwrap();
    let moved: BTreeSet<usize> =
        (0..6).filter(|vm| report["vms"][*vm]["state"] == "moved").collect();
    assert_eq!(moved, world.arrived, "seed {seed}: {report}");
    // Moves that were found not to have begun count as failed, so one may have had its three; none
    // is left out.
    let left_out = (0..6).filter(|vm| !moved.contains(vm));
    for vm in left_out {
        assert_eq!(report["vms"][vm]["state"], "stayed", "seed {seed}: {report}");
        assert!(report["vms"][vm]["attempts"].as_u64() >= Some(3), "seed {seed}: {report}");
    }
    (killed, world.lease)
}

#[test]
fn whoever_is_killed_or_loses_the_lease_no_guest_moves_twice_and_none_is_left_out() {
    let (mut killed, mut taken) = (0, 0);
    for seed in 0..300 {
        let (kills, takes) = evacuate(seed);
        killed += kills;
        taken += takes;
    }
    assert!(killed > 300 && taken > 1000, "{killed} killed, {taken} times taken");
}
