//! An evacuation as a state machine.
//!
//! Invariant: of a virtual machine at most one move is under way, none after it has moved; the
//! rates that were told last never add up to more than a budget or a link, at no point of the list
//! of actions: a move is slowed down before another begins.

use std::collections::BTreeSet;

use godwit_units::Rate;
use serde::{Deserialize, Serialize};

use crate::divide::{Claim, divide};
use crate::flow::expected_seconds;
use crate::inventory::{Destination, Source, Vm};
use crate::rooms::{Rooms, Unplaced};

/// A guest that writes at a rate needs that and a quarter more, or its rounds do not get shorter.
const HEADROOM: f64 = 1.25;
/// A move that failed is tried so often, each time to another destination if there is one.
const ATTEMPTS: u32 = 3;

/// The rate of a move that was found under way: any share is less.
fn unknown() -> Rate {
    Rate::from_bytes_per_second(f64::INFINITY)
}

/// Where a virtual machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At its source, until its turn comes.
    Waiting {
        /// The destination where room is reserved for it.
        to: usize,
    },
    /// On its way.
    Moving {
        /// Where to.
        to: usize,
    },
    /// At its destination.
    Moved {
        /// Which.
        to: usize,
    },
    /// At its source, and it stays there.
    Stays(Stays),
}

/// Why one stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// There is no place for it.
    Unplaced(Unplaced),
    /// Its moves have failed.
    Failed,
    /// It must not be touched: an operator has to look at it.
    Operator,
}

/// How a move ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// The guest runs at the destination.
    Moved,
    /// It runs at the source; another destination may do.
    Failed,
    /// It runs at the source, and no destination would do.
    Refused,
    /// Nobody but an operator can tell.
    InDoubt,
    /// It was not begun after all: that counts as no attempt.
    NeverBegan,
}

/// What is to be done, in this order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    /// Begin the move of a virtual machine.
    Begin {
        /// Which.
        vm: usize,
        /// To which destination.
        to: usize,
        /// At what rate.
        rate: Rate,
    },
    /// Hold a move to another rate.
    Pace {
        /// Which.
        vm: usize,
        /// To this one.
        rate: Rate,
    },
}

#[derive(Clone, Debug, Default)]
struct Moves {
    running: Vec<usize>,
    /// Those that wait, the shortest first.
    queue: BTreeSet<(u64, usize)>,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Evacuation {
    vms: Vec<Vm>,
    sources: Vec<Source>,
    rooms: Rooms,
    places: Vec<Place>,
    rates: Vec<Rate>,
    tried: Vec<Vec<usize>>,
    /// Where each is in its queue: it stays there when the budget changes.
    keys: Vec<u64>,
    moves: Vec<Moves>,
    /// Moves into each destination.
    incoming: Vec<Vec<usize>>,
    /// Sources with a virtual machine that waits for a turn at the destination.
    waiting_for: Vec<BTreeSet<usize>>,
    /// Sources that are to be looked at.
    changed: BTreeSet<usize>,
    paused: bool,
}

impl Evacuation {
    /// Gives each of `vms` a place among `destinations`, the largest first.
    ///
    /// # Panics
    /// When the source of a virtual machine is not one of `sources`.
    #[must_use]
    pub fn new(vms: Vec<Vm>, destinations: Vec<Destination>, sources: Vec<Source>) -> Self {
        let count = vms.len();
        let mut new = Self {
            places: vec![Place::Stays(Stays::Unplaced(Unplaced::NoDestination)); count],
            rates: vec![Rate::ZERO; count],
            tried: vec![Vec::new(); count],
            keys: vec![0; count],
            moves: vec![Moves::default(); sources.len()],
            incoming: vec![Vec::new(); destinations.len()],
            waiting_for: vec![BTreeSet::new(); destinations.len()],
            changed: (0..sources.len()).collect(),
            rooms: Rooms::new(destinations),
            paused: false,
            vms,
            sources,
        };
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by_key(|vm| {
            let free = new.vms[*vm].only.as_ref().map_or(usize::MAX, BTreeSet::len);
            (free, std::cmp::Reverse(new.vms[*vm].memory), *vm)
        });
        for vm in order {
            assert!(new.vms[vm].source < new.moves.len(), "a virtual machine of no source");
            new.place(vm);
        }
        new
    }

    /// Where each virtual machine is.
    #[must_use]
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// The virtual machines.
    #[must_use]
    pub fn vms(&self) -> &[Vm] {
        &self.vms
    }

    /// What is left at the destinations.
    #[must_use]
    pub fn rooms(&self) -> &Rooms {
        &self.rooms
    }

    /// The hosts that are emptied.
    #[must_use]
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Whether no move is under way and none will begin.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let idle = |moves: &Moves| moves.running.is_empty() && moves.queue.is_empty();
        self.moves.iter().all(idle)
    }

    /// Whether moves are under way.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.moves.iter().any(|moves| !moves.running.is_empty())
    }

    /// No further move begins, until it is resumed.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
        self.changed.extend(0..self.sources.len());
    }

    /// The budget of the host `source` is another one from now on.
    pub fn set_budget(&mut self, source: usize, budget: Rate) {
        self.sources[source].budget = budget;
        self.changed.insert(source);
    }

    /// The host `source` makes so many moves at once from now on; what is under way goes on.
    pub fn set_at_once(&mut self, source: usize, at_once: u32) {
        self.sources[source].at_once = at_once;
        self.changed.insert(source);
    }

    /// The share of the budget that `vm` was told last, if it moves and was told one.
    #[must_use]
    pub fn share(&self, vm: usize) -> Option<Rate> {
        let rate = self.rates[vm];
        (rate != Rate::ZERO && rate != unknown()).then_some(rate)
    }

    /// The destination `host` takes nothing any more: those that wait for it get another place.
    pub fn lose(&mut self, host: usize) {
        self.rooms.lose(host);
        for vm in 0..self.vms.len() {
            if self.places[vm] == (Place::Waiting { to: host }) {
                self.unqueue(vm);
                self.rooms.release(&self.vms[vm], host);
                self.place(vm);
            }
        }
    }

    /// A virtual machine is known to be at `host`, to be on its way there, or to stay where it is,
    /// as the facts are when an evacuation is taken up again. Says whether there is room; a fact
    /// is a fact all the same.
    pub fn adopt(&mut self, vm: usize, place: Place) {
        if let Place::Waiting { to } = self.places[vm] {
            self.unqueue(vm);
            self.rooms.release(&self.vms[vm], to);
        }
        self.places[vm] = place;
        if let Place::Moving { to } | Place::Moved { to } = place {
            self.make_room(vm, to);
        }
        match place {
            Place::Waiting { to } if self.rooms.fits(&self.vms[vm], to) => {
                self.rooms.reserve(&self.vms[vm], to);
                self.queue(vm);
            }
            Place::Waiting { .. } => self.place(vm),
            Place::Moving { to } => {
                self.moves[self.vms[vm].source].running.push(vm);
                self.incoming[to].push(vm);
                // Nobody knows what it was told, so it is told anew before another begins.
                self.rates[vm] = unknown();
                self.touch(to);
            }
            Place::Moved { .. } | Place::Stays(_) => {}
        }
        self.changed.insert(self.vms[vm].source);
    }

    /// Those that wait for a place at `to` make room for `vm`, which has it.
    fn make_room(&mut self, vm: usize, to: usize) {
        let waiting = (0..self.vms.len()).filter(|other| *other != vm);
        let waiting = waiting.filter(|other| self.places[*other] == (Place::Waiting { to }));
        let mut displaced = Vec::new();
        for other in waiting.collect::<Vec<_>>() {
            if self.rooms.fits(&self.vms[vm], to) {
                break;
            }
            self.unqueue(other);
            self.rooms.release(&self.vms[other], to);
            displaced.push(other);
        }
        self.rooms.reserve(&self.vms[vm], to);
        for other in displaced {
            self.place(other);
        }
    }

    /// The move of `vm` has ended.
    ///
    /// # Panics
    /// When it was not under way.
    pub fn ended(&mut self, vm: usize, ending: Ending) {
        let Place::Moving { to } = self.places[vm] else { panic!("no move of {vm} is under way") };
        let source = self.vms[vm].source;
        self.moves[source].running.retain(|other| *other != vm);
        self.incoming[to].retain(|other| *other != vm);
        self.rates[vm] = Rate::ZERO;
        self.changed.insert(source);
        self.touch(to);
        match ending {
            Ending::Moved => self.places[vm] = Place::Moved { to },
            Ending::InDoubt => self.places[vm] = Place::Stays(Stays::Operator),
            Ending::NeverBegan => {
                self.rooms.release(&self.vms[vm], to);
                self.place(vm);
            }
            Ending::Refused => {
                self.rooms.release(&self.vms[vm], to);
                self.places[vm] = Place::Stays(Stays::Failed);
            }
            Ending::Failed => {
                self.rooms.release(&self.vms[vm], to);
                self.tried[vm].push(to);
                if self.tried[vm].len() >= ATTEMPTS as usize {
                    self.places[vm] = Place::Stays(Stays::Failed);
                } else {
                    self.place(vm);
                }
            }
        }
    }

    /// What is to be done now.
    pub fn advance(&mut self) -> Vec<Action> {
        let mut began = Vec::new();
        let mut paced = BTreeSet::new();
        while let Some(source) = self.changed.pop_first() {
            while let Some(vm) = self.candidate(source) {
                let Place::Waiting { to } = self.places[vm] else { unreachable!("it waits") };
                self.unqueue(vm);
                self.places[vm] = Place::Moving { to };
                self.moves[source].running.push(vm);
                self.incoming[to].push(vm);
                paced.extend(self.sources_into(to));
                began.push(vm);
            }
            paced.insert(source);
        }
        let mut slower = Vec::new();
        let mut faster = Vec::new();
        for source in paced {
            for (vm, rate) in self.shares(source) {
                let before = std::mem::replace(&mut self.rates[vm], rate);
                if began.contains(&vm) || before == rate {
                    continue;
                }
                let list = if rate < before { &mut slower } else { &mut faster };
                list.push(Action::Pace { vm, rate });
            }
        }
        let begin = began.into_iter().map(|vm| {
            let Place::Moving { to } = self.places[vm] else { unreachable!("it has begun") };
            Action::Begin { vm, to, rate: self.rates[vm] }
        });
        slower.into_iter().chain(begin).chain(faster).collect()
    }

    /// The next of `source` that may begin.
    fn candidate(&mut self, source: usize) -> Option<usize> {
        let moves = &self.moves[source];
        if self.paused || moves.running.len() >= self.sources[source].at_once as usize {
            return None;
        }
        let budget = self.sources[source].budget.bytes_per_second();
        let needed: f64 = moves.running.iter().map(|vm| self.need(*vm)).sum();
        for &(_, vm) in &moves.queue {
            let Place::Waiting { to } = self.places[vm] else { continue };
            // One that needs more than is left of the budget comes when it has the host for itself.
            if !moves.running.is_empty() && needed + self.need(vm) > budget {
                continue;
            }
            if self.incoming[to].len() < self.rooms.hosts()[to].at_once as usize {
                return Some(vm);
            }
            self.waiting_for[to].insert(source);
        }
        None
    }

    /// What a move needs in order to come to an end.
    fn need(&self, vm: usize) -> f64 {
        self.vms[vm].dirty.bytes_per_second() * HEADROOM
    }

    /// The rate of each move from `source`.
    fn shares(&self, source: usize) -> Vec<(usize, Rate)> {
        let running = &self.moves[source].running;
        let claims: Vec<Claim> = running
            .iter()
            .map(|vm| {
                let Place::Moving { to } = self.places[*vm] else { unreachable!("it moves") };
                let link = self.rooms.hosts()[to].link.bytes_per_second();
                let most = link / self.incoming[to].len().max(1) as f64;
                Claim {
                    need: Rate::from_bytes_per_second(self.need(*vm)),
                    most: Rate::from_bytes_per_second(most),
                }
            })
            .collect();
        running.iter().copied().zip(divide(self.sources[source].budget, &claims)).collect()
    }

    fn sources_into(&self, to: usize) -> impl Iterator<Item = usize> {
        self.incoming[to].iter().map(|vm| self.vms[*vm].source)
    }

    /// The moves to `to` are others than before.
    fn touch(&mut self, to: usize) {
        let sources: Vec<usize> = self.sources_into(to).collect();
        self.changed.extend(sources);
        self.changed.append(&mut self.waiting_for[to]);
    }

    /// Finds a place for `vm`: one that it was not at yet, or else any.
    fn place(&mut self, vm: usize) {
        let chosen = self
            .rooms
            .choose(&self.vms[vm], &self.tried[vm])
            .or_else(|_| self.rooms.choose(&self.vms[vm], &[]));
        match chosen {
            Ok(to) => {
                self.rooms.reserve(&self.vms[vm], to);
                self.places[vm] = Place::Waiting { to };
                self.queue(vm);
            }
            Err(why) => self.places[vm] = Place::Stays(Stays::Unplaced(why)),
        }
    }

    fn queue(&mut self, vm: usize) {
        self.keys[vm] = self.key(vm);
        let source = self.vms[vm].source;
        self.moves[source].queue.insert((self.keys[vm], vm));
        self.changed.insert(source);
    }

    fn unqueue(&mut self, vm: usize) {
        let source = self.vms[vm].source;
        self.moves[source].queue.remove(&(self.keys[vm], vm));
    }

    /// The order of the moves from a host: those that failed last, then as long as they take.
    fn key(&self, vm: usize) -> u64 {
        let alone = self.sources[self.vms[vm].source].budget;
        let seconds = expected_seconds(&self.vms[vm], alone);
        let late = if self.tried[vm].is_empty() { 0.0 } else { 1e9 };
        ((seconds + late) * 1e3) as u64
    }
}

#[cfg(test)]
mod tests;
