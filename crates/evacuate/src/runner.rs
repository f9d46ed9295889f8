//! The coordinator: carries out what the planner says, and takes up what another one has left.
//!
//! Invariants: a move is written down before it begins, and its end before the next thing is
//! decided; no other move begins before those under way have been told to make room for it.

use std::collections::{BTreeMap, VecDeque};
use std::time::{SystemTime, UNIX_EPOCH};

use godwit_fleet::{Action, Ending, Evacuation, Place, Stays};
use godwit_units::Rate;
use serde::{Deserialize, Serialize};

use self::keys::{NEWS, OUTCOME, PLAN, WANTED};
use crate::EvacuateError;
use crate::plan::{Attempt, Plan, Record, Step, Wanted};
use crate::store::Store;

/// How far each is.
const VM: &str = "vm/";
/// So often in a row may a move of a VM be found not to have begun before that counts as a failure.
const NEVER: u32 = 3;

/// Under which names things are kept, for those who read them beside a coordinator.
pub mod keys {
    /// The plan, which is written once.
    pub const PLAN: &str = "plan";
    /// What operators want, [`Wanted`](crate::Wanted).
    pub const WANTED: &str = "wanted";
    /// What the coordinator last said of it.
    pub const NEWS: &str = "news";
    /// What became of it.
    pub const OUTCOME: &str = "outcome";
}

/// What is seen of a move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Look {
    /// It never began, and cannot begin any more; the guest runs at the source.
    NeverBegan,
    /// It is under way.
    Moving,
    /// The guest runs at the destination.
    Moved,
    /// It runs at the source.
    Failed(String),
    /// Nobody but an operator can tell where it runs, or whether.
    InDoubt(String),
}

/// What really moves virtual machines.
pub trait Hands {
    /// Begins a move, which then goes on without the coordinator.
    ///
    /// # Errors
    /// Why it did not begin.
    fn begin(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> Result<(), String>;
    /// What became of one, by the facts.
    fn look(&mut self, plan: &Plan, attempt: &Attempt) -> Look;
    /// Holds one to `rate`. Whether that was done: one that has only just begun, or ends, cannot be
    /// told.
    fn pace(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> bool;
    /// Asks one to end; the guest stays.
    fn cancel(&mut self, plan: &Plan, attempt: &Attempt);
    /// Whether a move could begin now: not on a host that does not answer.
    fn are_there(&mut self) -> bool {
        true
    }
    /// Why they are not, if an operator has to know.
    fn trouble(&self) -> Option<String> {
        None
    }
}

/// Something that an operator wants to hear of.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A move has begun.
    Began {
        /// Whose.
        vm: usize,
        /// Where to.
        to: usize,
        /// At what rate.
        rate: Rate,
    },
    /// One was found under way.
    Found {
        /// Whose.
        vm: usize,
        /// Where to.
        to: usize,
    },
    /// A guest is at its destination.
    Moved {
        /// Which.
        vm: usize,
        /// Where.
        to: usize,
    },
    /// A move has failed.
    Failed {
        /// Whose.
        vm: usize,
        /// Why.
        why: String,
        /// Whether another attempt follows.
        again: bool,
    },
    /// An operator has to look at one.
    Operator {
        /// Which.
        vm: usize,
        /// What is known.
        why: String,
    },
}

/// What became of each.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One for each.
    pub vms: Vec<ReportedVm>,
    /// How many are at a destination.
    pub moved: usize,
    /// How many are where they were.
    pub stayed: usize,
    /// How many an operator has to look at.
    pub in_doubt: usize,
    /// What all moves together may send, in bytes a second.
    pub budget_bytes_per_second: f64,
    /// The most moves at once.
    pub at_once: u32,
}

/// What became of one.
#[derive(Clone, Debug, Serialize)]
pub struct ReportedVm {
    /// Its name.
    pub name: String,
    /// How `godwit` knows it at the source.
    pub vm: String,
    /// In a word: `waiting`, `moving`, `moved`, `stayed` or `in-doubt`.
    pub state: &'static str,
    /// The destination.
    pub to: Option<String>,
    /// Moves that were begun.
    pub attempts: u32,
    /// Why it stayed.
    pub why: Option<String>,
    /// Its share of the budget in bytes a second, while it moves.
    pub bytes_per_second: Option<f64>,
}

/// See the module.
pub struct Runner<'a, S: Store> {
    store: S,
    plan: Plan,
    hands: &'a mut dyn Hands,
    evacuation: Evacuation,
    steps: BTreeMap<usize, Step>,
    pending: VecDeque<Action>,
    /// How often in a row a move of each was found not to have begun.
    never_began: BTreeMap<usize, u32>,
    wanted: Wanted,
    /// What was last said of it.
    news: Vec<u8>,
}

impl<'a, S: Store> Runner<'a, S> {
    /// Writes down a new plan.
    ///
    /// # Errors
    /// When there is one already, or it cannot be written.
    pub fn begin(
        mut store: S,
        plan: &Plan,
        place: &str,
        hands: &'a mut dyn Hands,
    ) -> Result<Self, EvacuateError> {
        if store.read(PLAN)?.is_some() {
            return Err(EvacuateError::Planned { place: place.to_owned() });
        }
        store.put(PLAN, &bytes(plan))?;
        Self::resume(store, place, hands).map(|(runner, _)| runner)
    }

    /// Takes up the one that is written down: what is under way, what has ended meanwhile, and what
    /// never began.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn resume(
        store: S,
        place: &str,
        hands: &'a mut dyn Hands,
    ) -> Result<(Self, Vec<Event>), EvacuateError> {
        let unread = |error: serde_json::Error| EvacuateError::Store {
            place: place.to_owned(),
            action: "read",
            why: error.to_string(),
        };
        let Some(plan) = store.read(PLAN)? else {
            return Err(EvacuateError::NoPlan { place: place.to_owned() });
        };
        let plan: Plan = serde_json::from_slice(&plan).map_err(unread)?;
        let (vms, destinations, source) = plan.inventory();
        let mut runner = Self {
            evacuation: Evacuation::new(vms, destinations, vec![source]),
            plan,
            hands,
            steps: BTreeMap::new(),
            pending: VecDeque::new(),
            never_began: BTreeMap::new(),
            wanted: Wanted::default(),
            news: Vec::new(),
            store,
        };
        let mut events = Vec::new();
        for (key, value) in runner.store.list(VM)? {
            let Some(vm) = runner.plan.vms.iter().position(|vm| key == format!("{VM}{}", vm.name))
            else {
                continue;
            };
            let step = serde_json::from_slice::<Record>(&value).map_err(unread)?.step;
            runner.steps.insert(vm, step.clone());
            match step {
                Step::Moved { to, .. } => runner.evacuation.adopt(vm, Place::Moved { to }),
                Step::Operator { to, .. } => {
                    // It may be there, and take the room.
                    runner.evacuation.adopt(vm, Place::Moving { to });
                    runner.evacuation.ended(vm, Ending::InDoubt);
                }
                Step::Failed { .. } => {}
                Step::Moving(attempt) => {
                    runner.evacuation.adopt(vm, Place::Moving { to: attempt.to });
                    match runner.hands.look(&runner.plan, &attempt) {
                        Look::Moving => events.push(Event::Found { vm, to: attempt.to }),
                        look => runner.end(&attempt, look, &mut events)?,
                    }
                }
            }
        }
        runner.heed()?;
        Ok((runner, events))
    }

    /// What was cancelled may go on: for the next coordinator, before it takes the plan up.
    ///
    /// # Errors
    /// When that cannot be written down.
    pub fn uncancel(store: &mut S) -> Result<(), EvacuateError> {
        let wanted = wanted(store)?;
        if wanted.cancelled {
            store.put(WANTED, &bytes(&Wanted { cancelled: false, ..wanted }))?;
        }
        Ok(())
    }

    /// Does what operators want by now, as it is written down. Whether that is something else than
    /// before.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn heed(&mut self) -> Result<bool, EvacuateError> {
        let wanted = wanted(&self.store)?;
        let changed = wanted != self.wanted;
        if changed {
            self.apply(wanted);
        }
        Ok(changed)
    }

    fn apply(&mut self, wanted: Wanted) {
        let budget = wanted.bytes_per_second.unwrap_or(self.plan.bytes_per_second);
        let at_once = wanted.at_once.unwrap_or(self.plan.at_once);
        if (budget, at_once) != (self.plan.bytes_per_second, self.plan.at_once) {
            (self.plan.bytes_per_second, self.plan.at_once) = (budget, at_once);
            self.evacuation.set_budget(0, Rate::from_bytes_per_second(budget));
            self.evacuation.set_at_once(0, at_once);
        }
        self.evacuation.pause(wanted.paused || wanted.cancelled);
        if wanted.paused || wanted.cancelled {
            self.withdraw();
        }
        if wanted.cancelled {
            for attempt in self.moving() {
                self.hands.cancel(&self.plan, &attempt);
            }
        }
        self.wanted = wanted;
    }

    /// Writes down what is wanted, and then does it.
    fn want(&mut self, wanted: Wanted) -> Result<(), EvacuateError> {
        self.store.put(WANTED, &bytes(&wanted))?;
        self.apply(wanted);
        Ok(())
    }

    /// What operators want.
    #[must_use]
    pub fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// Writes down how far it is, for those who ask elsewhere.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn publish(&mut self) -> Result<(), EvacuateError> {
        let news = bytes(&self.report());
        if news != self.news {
            self.store.put(NEWS, &news)?;
            self.news = news;
        }
        Ok(())
    }

    /// Tells all moves under way once more what they were told: a coordinator that did not know yet
    /// that it had lost its lease may have told them something else, or may not have been heard.
    ///
    /// # Errors
    /// When the lease is not ours any more.
    pub fn tell_again(&mut self) -> Result<(), EvacuateError> {
        for attempt in self.moving() {
            self.store.held()?;
            if self.wanted.cancelled {
                self.hands.cancel(&self.plan, &attempt);
            } else if self.pending.is_empty()
                && let Some(rate) = self.evacuation.share(attempt.vm)
            {
                let _ = self.hands.pace(&self.plan, &attempt, rate);
            }
        }
        Ok(())
    }

    /// Writes down what became of it, for those who stand by.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn conclude(&mut self, outcome: &[u8]) -> Result<(), EvacuateError> {
        self.store.put(OUTCOME, outcome)
    }

    /// Whether the host that is emptied answers.
    pub fn is_reached(&mut self) -> bool {
        self.hands.are_there()
    }

    /// Why it does not, if an operator has to know.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.hands.trouble()
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// No further move begins, until it goes on; nor with the next coordinator.
    ///
    /// # Errors
    /// When that cannot be written down; then nothing has changed.
    pub fn pause(&mut self, paused: bool) -> Result<(), EvacuateError> {
        self.want(Wanted { paused, ..self.wanted.clone() })
    }

    /// All moves together may send `budget` from now on, and so many are made at once. That is
    /// written down first, and so holds when another coordinator goes on.
    ///
    /// # Errors
    /// When it cannot be written down; then nothing has changed.
    pub fn limit(&mut self, budget: Rate, at_once: u32) -> Result<(), EvacuateError> {
        let bytes_per_second = Some(budget.bytes_per_second());
        self.want(Wanted { bytes_per_second, at_once: Some(at_once), ..self.wanted.clone() })
    }

    /// Ends what is under way, and begins nothing more. The plan stays, to go on with.
    ///
    /// # Errors
    /// When that cannot be written down; it is done all the same.
    pub fn cancel(&mut self) -> Result<(), EvacuateError> {
        self.apply(Wanted { cancelled: true, ..self.wanted.clone() });
        self.store.put(WANTED, &bytes(&self.wanted))
    }

    /// The moves under way.
    #[must_use]
    pub fn moving(&self) -> Vec<Attempt> {
        let moving = self.steps.values().filter_map(|step| match step {
            Step::Moving(attempt) => Some(attempt.clone()),
            _ => None,
        });
        moving.collect()
    }

    /// Whether there is nothing left to do.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.moving().is_empty() && (self.wanted.cancelled || self.evacuation.is_over())
    }

    /// Looks at what is under way, and does what is to be done.
    ///
    /// # Errors
    /// When something cannot be written down; then nothing more is done.
    pub fn turn(&mut self) -> Result<Vec<Event>, EvacuateError> {
        let mut events = Vec::new();
        self.store.held()?;
        for attempt in self.moving() {
            match self.hands.look(&self.plan, &attempt) {
                Look::Moving => {}
                look => self.end(&attempt, look, &mut events)?,
            }
        }
        if !self.hands.are_there() {
            self.withdraw();
            return Ok(events);
        }
        self.pending.extend(self.evacuation.advance());
        while let Some(action) = self.pending.pop_front() {
            match action {
                Action::Pace { vm, rate } => {
                    // One that has ended takes nothing any more.
                    let Some(Step::Moving(attempt)) = self.steps.get(&vm) else { continue };
                    self.store.held()?;
                    if !self.hands.pace(&self.plan, attempt, rate) {
                        self.pending.push_front(action);
                        break;
                    }
                }
                Action::Begin { vm, to, rate } => self.start(vm, to, rate, &mut events)?,
            }
        }
        Ok(events)
    }

    /// What was to begin, and has waited for others to make room, waits for its turn again.
    fn withdraw(&mut self) {
        let evacuation = &mut self.evacuation;
        self.pending.retain(|action| {
            let Action::Begin { vm, .. } = *action else { return true };
            evacuation.ended(vm, Ending::NeverBegan);
            false
        });
    }

    fn start(
        &mut self,
        vm: usize,
        to: usize,
        rate: Rate,
        events: &mut Vec<Event>,
    ) -> Result<(), EvacuateError> {
        if !self.hands.are_there() {
            self.evacuation.ended(vm, Ending::NeverBegan);
            return Ok(());
        }
        let attempt = Attempt { vm, to, number: self.attempts(vm) + 1 };
        self.write(vm, Step::Moving(attempt.clone()))?;
        match self.hands.begin(&self.plan, &attempt, rate) {
            Ok(()) => events.push(Event::Began { vm, to, rate }),
            Err(why) => self.end(&attempt, Look::Failed(why), events)?,
        }
        Ok(())
    }

    /// Moves of `vm` that were begun so far.
    fn attempts(&self, vm: usize) -> u32 {
        match self.steps.get(&vm) {
            None => 0,
            Some(Step::Moving(attempt)) => attempt.number,
            Some(
                Step::Moved { number, .. }
                | Step::Failed { number, .. }
                | Step::Operator { number, .. },
            ) => *number,
        }
    }

    fn write(&mut self, vm: usize, step: Step) -> Result<(), EvacuateError> {
        let name = &self.plan.vms[vm].name;
        if !Step::may_follow(self.steps.get(&vm), &step) {
            // Nothing is begun without having been written down.
            return Err(EvacuateError::Store {
                place: name.clone(),
                action: "gone on with",
                why: format!("{step:?} cannot follow {:?}", self.steps.get(&vm)),
            });
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let since_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let record = Record { step, by: self.store.who(), since_ms };
        self.store.put(&format!("{VM}{name}"), &bytes(&record))?;
        self.steps.insert(vm, record.step);
        Ok(())
    }

    /// The move of `attempt` is over, as `look` says.
    fn end(
        &mut self,
        attempt: &Attempt,
        look: Look,
        events: &mut Vec<Event>,
    ) -> Result<(), EvacuateError> {
        let Attempt { vm, to, number } = *attempt;
        let look = match look {
            Look::NeverBegan => {
                let times = self.never_began.entry(vm).or_default();
                *times += 1;
                // Whoever is to begin it comes to nothing each time.
                if *times > NEVER { Look::Failed("it never began".to_owned()) } else { look }
            }
            Look::Moving => look,
            _ => {
                self.never_began.remove(&vm);
                look
            }
        };
        match look {
            Look::Moving => {}
            Look::Moved => {
                self.write(vm, Step::Moved { to, number })?;
                self.evacuation.ended(vm, Ending::Moved);
                events.push(Event::Moved { vm, to });
            }
            Look::InDoubt(why) => {
                self.write(vm, Step::Operator { to, number, why: why.clone() })?;
                self.evacuation.ended(vm, Ending::InDoubt);
                events.push(Event::Operator { vm, why });
            }
            Look::NeverBegan => {
                let why = "it never began".to_owned();
                self.write(vm, Step::Failed { to, number, why: why.clone() })?;
                self.evacuation.ended(vm, Ending::NeverBegan);
                events.push(Event::Failed { vm, why, again: !self.wanted.cancelled });
            }
            Look::Failed(why) => {
                self.write(vm, Step::Failed { to, number, why: why.clone() })?;
                self.evacuation.ended(vm, Ending::Failed);
                let again = matches!(self.evacuation.places()[vm], Place::Waiting { .. });
                events.push(Event::Failed { vm, why, again: again && !self.wanted.cancelled });
            }
        }
        Ok(())
    }

    /// What became of each so far.
    #[must_use]
    pub fn report(&self) -> Report {
        let host = |to: usize| Some(self.plan.destinations[to].name.clone());
        let of = |(at, vm): (usize, &crate::PlannedVm)| {
            let (state, to, why) = match self.evacuation.places()[at] {
                Place::Waiting { to } => ("waiting", host(to), None),
                Place::Moving { to } => ("moving", host(to), None),
                Place::Moved { to } => ("moved", host(to), None),
                Place::Stays(Stays::Unplaced(why)) => ("stayed", None, Some(why.to_string())),
                Place::Stays(Stays::Failed) => ("stayed", None, None),
                Place::Stays(Stays::Operator) => ("in-doubt", None, None),
            };
            let told = match self.steps.get(&at) {
                Some(Step::Failed { why, .. } | Step::Operator { why, .. }) => Some(why.clone()),
                _ => None,
            };
            ReportedVm {
                name: vm.name.clone(),
                vm: vm.vm.clone(),
                state,
                to,
                attempts: self.attempts(at),
                why: told.or(why),
                bytes_per_second: self.evacuation.share(at).map(Rate::bytes_per_second),
            }
        };
        let vms: Vec<ReportedVm> = self.plan.vms.iter().enumerate().map(of).collect();
        let count = |states: &[&str]| vms.iter().filter(|vm| states.contains(&vm.state)).count();
        Report {
            moved: count(&["moved"]),
            stayed: count(&["stayed", "waiting"]),
            in_doubt: count(&["in-doubt", "moving"]),
            budget_bytes_per_second: self.plan.bytes_per_second,
            at_once: self.plan.at_once,
            vms,
        }
    }
}

/// What operators want, as it is written down in `store`.
fn wanted(store: &impl Store) -> Result<Wanted, EvacuateError> {
    let Some(value) = store.read(WANTED)? else { return Ok(Wanted::default()) };
    serde_json::from_slice(&value).map_err(|error| EvacuateError::Store {
        place: WANTED.to_owned(),
        action: "read",
        why: error.to_string(),
    })
}

/// JSON of our own types cannot fail.
pub(crate) fn bytes(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

#[cfg(test)]
mod several;
#[cfg(test)]
pub(crate) mod tests;
