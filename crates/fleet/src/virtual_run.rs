//! An evacuation in virtual time.
//!
//! A move is a fluid here: memory flows at the rate that it was given, less what the guest writes
//! meanwhile. `godwit-sim` has a migration's rounds, throttles and handover; of tens of thousands
//! of moves only their times and bytes matter.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::evacuation::{Action, Ending, Evacuation, Place};
use crate::flow::{SETUP, progress};
use crate::inventory::Vm;

/// What goes wrong.
pub trait Faults {
    /// How far the move of `vm` to `to` comes before it fails, as a part of its data; `None`: it
    /// does not fail.
    fn fails_after(&mut self, vm: usize, to: usize) -> Option<f64>;
    /// The next destination that is lost, and when, in seconds; they come in their order.
    fn next_loss(&mut self) -> Option<(f64, usize)>;
}

/// Nothing does.
#[derive(Clone, Copy, Debug)]
pub struct NoFaults;

impl Faults for NoFaults {
    fn fails_after(&mut self, _: usize, _: usize) -> Option<f64> {
        None
    }

    fn next_loss(&mut self) -> Option<(f64, usize)> {
        None
    }
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// Until the last move ended.
    pub seconds: f64,
    /// What was sent.
    pub bytes: f64,
    /// Moves that ended well.
    pub moved: usize,
    /// Moves that failed, before another attempt or for good.
    pub failures: usize,
    /// Virtual machines that are where they were.
    pub stay: usize,
    /// When each virtual machine's last move began and ended.
    pub times: Vec<Option<(f64, f64)>>,
    /// The highest part of its budget that any host used.
    pub most_of_budget: f64,
    /// The most moves at once.
    pub most_moves: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    rate: f64,
    /// Seconds before memory flows.
    setup: f64,
    left: f64,
    /// Left when it fails.
    fails_at: Option<f64>,
    since: f64,
    began: f64,
    version: u64,
}

impl Flow {
    /// Goes on to `now`, and says how much was sent.
    fn settle(&mut self, vm: &Vm, now: f64) -> f64 {
        let time = now - self.since;
        let waited = self.setup.min(time);
        self.setup -= waited;
        self.left -= progress(vm, self.rate) * (time - waited);
        self.since = now;
        self.rate * (time - waited)
    }

    /// When it ends at this rate.
    fn end(&self, vm: &Vm) -> f64 {
        let left = (self.left - self.fails_at.unwrap_or(0.0)).max(0.0);
        self.since + self.setup + left / progress(vm, self.rate).max(1e-9)
    }
}

/// Time as a number that can be ordered.
fn micros(seconds: f64) -> u64 {
    (seconds * 1e6) as u64
}

/// Runs `evacuation` to its end.
pub fn run(evacuation: &mut Evacuation, faults: &mut dyn Faults) -> Ran {
    let vms = evacuation.vms().to_vec();
    let mut flows = vec![Flow::default(); vms.len()];
    let mut ran = Ran { times: vec![None; vms.len()], ..Ran::default() };
    let mut heap = BinaryHeap::new();
    let mut used = vec![0.0; evacuation.sources().len()];
    let (mut now, mut moves) = (0.0_f64, 0_usize);
    let mut loss = faults.next_loss();
    loop {
        for action in evacuation.advance() {
            let (vm, rate, begins) = match action {
                Action::Begin { vm, to, rate } => (vm, rate, Some(to)),
                Action::Pace { vm, rate } => (vm, rate, None),
            };
            let flow = &mut flows[vm];
            if let Some(to) = begins {
                let data = vms[vm].data.0 as f64;
                let fails_at = faults.fails_after(vm, to).map(|part| data * (1.0 - part));
                let version = flow.version;
                *flow = Flow {
                    setup: SETUP,
                    left: data,
                    fails_at,
                    since: now,
                    began: now,
                    version,
                    rate: 0.0,
                };
                moves += 1;
                ran.most_moves = ran.most_moves.max(moves);
            }
            ran.bytes += flow.settle(&vms[vm], now);
            let source = vms[vm].source;
            used[source] += rate.bytes_per_second() - flow.rate;
            let budget = evacuation.sources()[source].budget.bytes_per_second();
            ran.most_of_budget = ran.most_of_budget.max(used[source] / budget);
            flow.rate = rate.bytes_per_second();
            flow.version += 1;
            heap.push(Reverse((micros(flow.end(&vms[vm])), vm, flow.version)));
        }
        let next = loop {
            match heap.peek() {
                Some(Reverse((_, vm, version))) if flows[*vm].version != *version => {
                    heap.pop();
                }
                Some(Reverse((at, vm, _))) => break Some((*at, *vm)),
                None => break None,
            }
        };
        let Some((at, vm)) = next else { break };
        if let Some((when, host)) = loss.filter(|(when, _)| micros(*when) <= at) {
            now = now.max(when);
            loss = faults.next_loss();
            let into =
                (0..vms.len()).filter(|vm| evacuation.places()[*vm] == Place::Moving { to: host });
            let into: Vec<usize> = into.collect();
            evacuation.lose(host);
            for vm in into {
                end(&mut (&mut flows, &mut ran, &mut used), &vms, vm, now);
                (moves, ran.failures) = (moves - 1, ran.failures + 1);
                evacuation.ended(vm, Ending::Failed);
            }
            continue;
        }
        now = now.max(at as f64 / 1e6);
        let ending = match flows[vm].fails_at {
            Some(_) => Ending::Failed,
            None => Ending::Moved,
        };
        end(&mut (&mut flows, &mut ran, &mut used), &vms, vm, now);
        moves -= 1;
        match ending {
            Ending::Moved => ran.moved += 1,
            _ => ran.failures += 1,
        }
        evacuation.ended(vm, ending);
    }
    ran.seconds = now;
    ran.stay = vms.len() - ran.moved;
    ran
}

/// The move of `vm` is over.
fn end(
    (flows, ran, used): &mut (&mut Vec<Flow>, &mut Ran, &mut Vec<f64>),
    vms: &[Vm],
    vm: usize,
    now: f64,
) {
    let flow = &mut flows[vm];
    ran.bytes += flow.settle(&vms[vm], now);
    ran.times[vm] = Some((flow.began, now));
    used[vms[vm].source] -= flow.rate;
    flow.version += 1;
}
