//! A coordinator that is killed at each of its steps, one after the other, and followed by another.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use godwit_units::Rate;

use super::*;
use crate::plan::{PlannedDestination, PlannedVm, Receiver};
use crate::store::MemoryStore;

/// Where guests really are, and what moves them: it goes on without a coordinator.
#[derive(Default)]
struct World {
    /// Moves: until when they last, how they end, and at what rate they are.
    moves: BTreeMap<(usize, u32), (u32, Look, f64)>,
    /// Guests that have arrived, how often each.
    arrived: BTreeMap<usize, u32>,
    time: u32,
    most_rate: f64,
    /// The most that were under way at a time.
    most_moves: usize,
}

/// What kills the coordinator.
struct Killed;

/// Steps of the coordinator that are left until it is killed.
#[derive(Clone)]
struct Life(Rc<Cell<u32>>);

impl Life {
    /// A kill may come before each step and behind it.
    fn step(&self) {
        if self.0.get() == 0 {
            std::panic::resume_unwind(Box::new(Killed));
        }
        self.0.set(self.0.get() - 1);
    }
}

impl World {
    fn pass_time(&mut self) {
        self.time += 1;
        for ((vm, _), (until, look, rate)) in &mut self.moves {
            if *until == self.time {
                *rate = 0.0;
                if *look == Look::Moved {
                    *self.arrived.entry(*vm).or_default() += 1;
                }
            }
        }
    }

    fn check_rates(&mut self) {
        let sum = self.moves.values().map(|(_, _, rate)| rate).sum();
        self.most_rate = self.most_rate.max(sum);
        let under_way = self.moves.values().filter(|(until, ..)| *until > self.time).count();
        self.most_moves = self.most_moves.max(under_way);
    }
}

/// A coordinator's hands on it.
struct Own(Rc<RefCell<World>>, Life);

impl Hands for Own {
    fn begin(&mut self, _: &Plan, attempt: &Attempt, rate: Rate) -> Result<(), String> {
        self.1.step();
        let mut world = self.0.borrow_mut();
        let (vm, time) = (attempt.vm, world.time);
        let under_way =
            world.moves.iter().any(|((other, _), (until, ..))| *other == vm && *until > time);
        assert!(!under_way, "two moves of {vm} at once");
        assert_eq!(world.arrived.get(&vm), None, "{vm} moves once more");
        let look = match (vm, attempt.number) {
            (2, 1) => Look::Failed("the link broke".to_owned()),
            (3, _) => Look::InDoubt("who knows".to_owned()),
            _ => Look::Moved,
        };
        let new = (time + 2 + vm as u32 % 3, look, rate.bytes_per_second());
        assert!(world.moves.insert((vm, attempt.number), new).is_none(), "one name twice");
        world.check_rates();
        self.1.step();
        Ok(())
    }

    fn look(&mut self, _: &Plan, attempt: &Attempt) -> Look {
        self.1.step();
        let world = self.0.borrow();
        match world.moves.get(&(attempt.vm, attempt.number)) {
            None => Look::NeverBegan,
            Some((until, ..)) if *until > world.time => Look::Moving,
            Some((_, look, _)) => look.clone(),
        }
    }

    fn pace(&mut self, _: &Plan, attempt: &Attempt, rate: Rate) -> bool {
        self.1.step();
        let mut world = self.0.borrow_mut();
        let time = world.time;
        if let Some((until, _, held)) = world.moves.get_mut(&(attempt.vm, attempt.number))
            && *until > time
        {
            *held = rate.bytes_per_second();
        }
        world.check_rates();
        true
    }

    fn cancel(&mut self, _: &Plan, _: &Attempt) {}
}

/// A store whose coordinator is killed before it has written, and behind that.
struct Mortal(MemoryStore, Life);

impl Store for Mortal {
    fn read(&self, key: &str) -> Result<Option<Vec<u8>>, EvacuateError> {
        self.0.read(key)
    }

    fn put(&mut self, key: &str, value: &[u8]) -> Result<(), EvacuateError> {
        self.1.step();
        self.0.put(key, value)?;
        self.1.step();
        Ok(())
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, EvacuateError> {
        self.0.list(prefix)
    }
}

pub(crate) fn plan() -> Plan {
    let receiver = || Receiver::Listens("127.0.0.1:1".to_owned());
    let vm = |at: usize| PlannedVm {
        name: format!("vm{at}"),
        vm: format!("qemu:/{at}"),
        memory_bytes: 1 << 30,
        data_bytes: 1 << 29,
        dirty_bytes_per_second: 0.0,
        cpu: None,
        group: (at < 2).then(|| "pair".to_owned()),
        disks: BTreeMap::new(),
        receivers: ["east", "west"].map(|host| (host.to_owned(), receiver())).into(),
    };
    let host = |name: &str| PlannedDestination {
        name: name.to_owned(),
        room_bytes: 8 << 30,
        cpus: Vec::new(),
        at_once: 2,
        groups: Vec::new(),
    };
    Plan {
        bytes_per_second: 1e8,
        cpu_percent: None,
        at_once: 3,
        options: Vec::new(),
        vms: (0..6).map(vm).collect(),
        destinations: vec![host("east"), host("west")],
        forecast_seconds: 0.0,
        began_ms: 0,
        home: None,
    }
}

/// Runs a coordinator until it is killed after `life` steps, or done.
fn coordinate(store: &MemoryStore, world: &Rc<RefCell<World>>, life: u32) -> Option<Report> {
    let life = Life(Rc::new(Cell::new(life)));
    let run = std::panic::AssertUnwindSafe(|| {
        let mut hands = Own(Rc::clone(world), life.clone());
        let store = Mortal(store.clone(), life.clone());
        let (mut runner, _) = Runner::resume(store, "memory", &mut hands).unwrap();
        while !runner.is_over() {
            runner.turn().unwrap();
            world.borrow_mut().pass_time();
        }
        runner.report()
    });
    match std::panic::catch_unwind(run) {
        Ok(report) => Some(report),
        Err(cause) if cause.is::<Killed>() => None,
        Err(cause) => std::panic::resume_unwind(cause),
    }
}

/// A coordinator that lives for `life` steps each time, the next one `later` ticks behind it.
fn evacuate(life: impl Fn(u32) -> u32, later: u32) -> (World, Report, u32) {
    let (mut store, world) = (MemoryStore::default(), Rc::new(RefCell::new(World::default())));
    store.put(PLAN, &bytes(&plan())).unwrap();
    for coordinator in 0.. {
        if let Some(report) = coordinate(&store, &world, life(coordinator)) {
            return (world.take(), report, coordinator);
        }
        (0..later).for_each(|_| world.borrow_mut().pass_time());
    }
    unreachable!("there is always another coordinator")
}

fn check(world: &World, report: &Report) {
    let states: Vec<&str> = report.vms.iter().map(|vm| vm.state).collect();
    assert_eq!(states, ["moved", "moved", "moved", "in-doubt", "moved", "moved"]);
    let arrived: Vec<(usize, u32)> = world.arrived.clone().into_iter().collect();
    assert_eq!(arrived, [(0, 1), (1, 1), (2, 1), (4, 1), (5, 1)]);
    assert_ne!(report.vms[0].to, report.vms[1].to, "they are a group");
}

#[test]
fn a_coordinator_that_lives_moves_each_once_within_the_budget() {
    let (world, report, killed) = evacuate(|_| u32::MAX, 0);
    check(&world, &report);
    assert_eq!((killed, report.moved, report.in_doubt), (0, 5, 1));
    assert!(world.most_rate <= 1e8 && world.most_rate > 0.99e8, "{}", world.most_rate);
}

#[test]
fn a_coordinator_that_is_killed_at_any_step_leaves_nothing_twice_and_nothing_out() {
    for later in [0, 1, 5] {
        for life in 0..200 {
            let (world, report, _) = evacuate(|n| if n == 0 { life } else { u32::MAX }, later);
            check(&world, &report);
            assert!(world.most_rate <= 1e8, "{life}, {later}: {}", world.most_rate);
        }
    }
}

#[test]
fn coordinators_that_are_killed_again_and_again_come_to_the_end() {
    for life in 7..60 {
        let (world, report, _) = evacuate(|n| life + n % 3, 1);
        check(&world, &report);
    }
}

#[test]
fn a_plan_is_begun_once() {
    let store = MemoryStore::default();
    let world = Rc::new(RefCell::new(World::default()));
    let mut hands = Own(world, Life(Rc::new(Cell::new(u32::MAX))));
    let none = Runner::resume(store.clone(), "here", &mut hands).err().unwrap();
    assert!(none.to_string().contains("there is no plan in here"), "{none}");
    drop(Runner::begin(store.clone(), &plan(), "here", &mut hands).unwrap());
    let again = Runner::begin(store, &plan(), "here", &mut hands).err().unwrap();
    assert!(again.to_string().contains("--resume"), "{again}");
}

#[test]
fn what_is_cancelled_stays_and_can_be_taken_up_again() {
    let (mut store, world) = (MemoryStore::default(), Rc::new(RefCell::new(World::default())));
    store.put(PLAN, &bytes(&plan())).unwrap();
    let mut hands = Own(Rc::clone(&world), Life(Rc::new(Cell::new(u32::MAX))));
    let (mut runner, _) = Runner::resume(store.clone(), "memory", &mut hands).unwrap();
    runner.turn().unwrap();
    runner.cancel().unwrap();
    while !runner.is_over() {
        runner.turn().unwrap();
        world.borrow_mut().pass_time();
    }
    let report = runner.report();
    assert_eq!(world.borrow().moves.len(), 3, "none begins after that");
    assert!(report.stayed >= 3, "{report:?}");
    drop(runner);
    Runner::uncancel(&mut store).unwrap();
    let report = coordinate(&store, &world, u32::MAX).unwrap();
    check(&world.borrow(), &report);
}

#[test]
fn a_pause_holds_for_the_next_coordinator() {
    let (mut store, world) = (MemoryStore::default(), Rc::new(RefCell::new(World::default())));
    store.put(PLAN, &bytes(&plan())).unwrap();
    let mut hands = Own(Rc::clone(&world), Life(Rc::new(Cell::new(u32::MAX))));
    let (mut runner, _) = Runner::resume(store.clone(), "memory", &mut hands).unwrap();
    runner.pause(true).unwrap();
    drop(runner);
    let (mut runner, _) = Runner::resume(store.clone(), "memory", &mut hands).unwrap();
    assert!(runner.turn().unwrap().is_empty() && !runner.is_over());
    // As somebody elsewhere writes it down.
    store.put(WANTED, &bytes(&Wanted { at_once: Some(1), ..Wanted::default() })).unwrap();
    assert!(runner.heed().unwrap() && !runner.heed().unwrap());
    assert_eq!(runner.turn().unwrap().len(), 1);
}

/// Hands on a host that is not always reached.
struct Elsewhere {
    own: Own,
    is_there: Rc<Cell<bool>>,
    /// Whether moves are told their rates.
    paces: Rc<Cell<bool>>,
    /// How often one was asked there to cancel.
    cancels: Rc<Cell<u32>>,
}

impl Elsewhere {
    fn new(world: &Rc<RefCell<World>>) -> Self {
        let own = Own(Rc::clone(world), Life(Rc::new(Cell::new(u32::MAX))));
        let yes = || Rc::new(Cell::new(true));
        Self { own, is_there: yes(), paces: yes(), cancels: Rc::default() }
    }
}

impl Hands for Elsewhere {
    fn begin(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> Result<(), String> {
        self.own.begin(plan, attempt, rate)
    }

    fn look(&mut self, plan: &Plan, attempt: &Attempt) -> Look {
        if self.is_there.get() { self.own.look(plan, attempt) } else { Look::Moving }
    }

    fn pace(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> bool {
        self.is_there.get() && self.paces.get() && self.own.pace(plan, attempt, rate)
    }

    fn cancel(&mut self, _: &Plan, _: &Attempt) {
        self.cancels.set(self.cancels.get() + u32::from(self.is_there.get()));
    }

    fn are_there(&mut self) -> bool {
        self.is_there.get()
    }
}

#[test]
fn nothing_begins_on_a_host_that_is_not_reached_and_no_attempt_is_counted() {
    // Mutations: it is written down all the same; it counts as one that failed.
    let (mut store, world) = (MemoryStore::default(), Rc::new(RefCell::new(World::default())));
    store.put(PLAN, &bytes(&plan())).unwrap();
    let mut hands = Elsewhere::new(&world);
    let (there, cancels) = (Rc::clone(&hands.is_there), Rc::clone(&hands.cancels));
    there.set(false);
    let (mut runner, _) = Runner::resume(store.clone(), "memory", &mut hands).unwrap();
    for _ in 0..10 {
        assert!(runner.turn().unwrap().is_empty() && !runner.is_over());
    }
    assert_eq!((store.list(VM).unwrap().len(), world.borrow().moves.len()), (0, 0));
    assert!(runner.report().vms.iter().all(|vm| vm.state == "waiting" && vm.attempts == 0));
    there.set(true);
    assert_eq!(runner.turn().unwrap().len(), 3);
    // Those under way stay so, others wait though there is room, and they are asked to end when it
    // is reached again.
    there.set(false);
    runner.limit(Rate::from_bytes_per_second(1e8), 6).unwrap();
    runner.turn().unwrap();
    let moving = runner.report().vms.iter().filter(|vm| vm.state == "moving").count();
    assert_eq!((moving, world.borrow().moves.len()), (3, 3));
    runner.cancel().unwrap();
    for _ in 0..10 {
        world.borrow_mut().pass_time();
        assert!(runner.turn().unwrap().is_empty() && !runner.is_over());
        runner.tell_again().unwrap();
    }
    assert_eq!(cancels.get(), 0);
    there.set(true);
    runner.tell_again().unwrap();
    assert_eq!(cancels.get(), 3);
    runner.turn().unwrap();
    assert!(runner.is_over() && world.borrow().moves.len() == 3);
}

#[test]
fn a_move_that_never_began_is_tried_again_and_was_no_attempt() {
    // Mutations: three of them, and the guest stays; none of them ever counts.
    struct Deaf(Own, u32);
    impl Hands for Deaf {
        fn begin(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> Result<(), String> {
            self.1 = self.1.saturating_sub(1);
            if self.1 == 0 { self.0.begin(plan, attempt, rate) } else { Ok(()) }
        }
        fn look(&mut self, plan: &Plan, attempt: &Attempt) -> Look {
            self.0.look(plan, attempt)
        }
        fn pace(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> bool {
            self.0.pace(plan, attempt, rate)
        }
        fn cancel(&mut self, _: &Plan, _: &Attempt) {}
    }
    for (deaf, stay) in [(4, 0), (u32::MAX, plan().vms.len())] {
        let (mut store, world) = (MemoryStore::default(), Rc::new(RefCell::new(World::default())));
        store.put(PLAN, &bytes(&plan())).unwrap();
        let own = Own(Rc::clone(&world), Life(Rc::new(Cell::new(u32::MAX))));
        let mut hands = Deaf(own, deaf);
        let (mut runner, _) = Runner::resume(store, "memory", &mut hands).unwrap();
        for turn in 0.. {
            if runner.is_over() {
                break;
            }
            assert!(turn < 1000, "it is tried for ever: {:?}", runner.report());
            runner.turn().unwrap();
            world.borrow_mut().pass_time();
        }
        assert_eq!(runner.report().stayed, stay, "{:?}", runner.report());
    }
}

#[test]
fn what_waits_to_begin_when_a_pause_comes_does_not_begin() {
    // Mutation: only what was not planned yet is held back.
    let (mut store, world) = (MemoryStore::default(), Rc::new(RefCell::new(World::default())));
    store.put(PLAN, &bytes(&Plan { at_once: 2, ..plan() })).unwrap();
    let mut hands = Elsewhere::new(&world);
    let paces = Rc::clone(&hands.paces);
    let (mut runner, _) = Runner::resume(store, "memory", &mut hands).unwrap();
    runner.turn().unwrap();
    // Those under way cannot be told to make room for a third.
    paces.set(false);
    runner.limit(Rate::from_bytes_per_second(1e8), 3).unwrap();
    runner.turn().unwrap();
    runner.pause(true).unwrap();
    paces.set(true);
    runner.turn().unwrap();
    assert_eq!(world.borrow().moves.len(), 2);
    runner.pause(false).unwrap();
    runner.turn().unwrap();
    assert_eq!(world.borrow().moves.len(), 3);
}

#[test]
fn limits_that_are_changed_hold_at_once_and_after_a_kill() {
    let (mut store, world) = (MemoryStore::default(), Rc::new(RefCell::new(World::default())));
    let tight = Plan { at_once: 2, ..plan() };
    store.put(PLAN, &bytes(&tight)).unwrap();
    let mut hands = Own(Rc::clone(&world), Life(Rc::new(Cell::new(u32::MAX))));
    let (mut runner, _) = Runner::resume(store.clone(), "memory", &mut hands).unwrap();
    runner.turn().unwrap();
    let shares: Vec<Option<f64>> =
        runner.report().vms.iter().map(|vm| vm.bytes_per_second).collect();
    assert_eq!(shares.iter().flatten().sum::<f64>(), 1e8, "{shares:?}");
    assert_eq!(world.borrow().most_moves, 2);

    // Those under way are slowed down, and another begins.
    runner.limit(Rate::from_bytes_per_second(3e7), 3).unwrap();
    world.borrow_mut().most_rate = 0.0;
    runner.turn().unwrap();
    let rates: Vec<f64> = world.borrow().moves.values().map(|(_, _, rate)| *rate).collect();
    assert_eq!((rates.len(), rates.iter().sum::<f64>()), (3, 3e7), "{rates:?}");
    let report = runner.report();
    assert_eq!((report.budget_bytes_per_second, report.at_once), (3e7, 3));
    drop(runner);

    // As another coordinator finds them.
    world.borrow_mut().most_rate = 0.0;
    let report = coordinate(&store, &world, u32::MAX).unwrap();
    check(&world.borrow(), &report);
    assert!(world.borrow().most_rate <= 3e7, "{}", world.borrow().most_rate);
    assert_eq!(world.borrow().most_moves, 3);
}

#[test]
fn a_limit_that_cannot_be_written_down_does_not_hold() {
    struct Full(MemoryStore, Rc<Cell<bool>>);
    impl Store for Full {
        fn read(&self, key: &str) -> Result<Option<Vec<u8>>, EvacuateError> {
            self.0.read(key)
        }
        fn put(&mut self, key: &str, value: &[u8]) -> Result<(), EvacuateError> {
            if self.1.get() {
                let (place, why) = ("here".to_owned(), "it is full".to_owned());
                return Err(EvacuateError::Store { place, action: "written", why });
            }
            self.0.put(key, value)
        }
        fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, EvacuateError> {
            self.0.list(prefix)
        }
    }
    let full = Rc::new(Cell::new(false));
    let store = Full(MemoryStore::default(), Rc::clone(&full));
    let mut hands = Own(Rc::default(), Life(Rc::new(Cell::new(u32::MAX))));
    let mut runner = Runner::begin(store, &plan(), "here", &mut hands).unwrap();
    full.set(true);
    let why = runner.limit(Rate::from_bytes_per_second(1.0), 1).unwrap_err().to_string();
    assert!(why.contains("it is full"), "{why}");
    assert_eq!((runner.report().at_once, runner.plan().bytes_per_second), (3, 1e8));
}
