//! The one thread that traces: it stops and continues, and looks after the signals of what it
//! traces.
//!
//! Invariant: when it ends, for whatever reason, nothing is traced any more.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::debt::Debt;
use crate::punctual::become_punctual;
use crate::tracees::{SOON, Tracees};
use crate::{Slices, ThrottleError};

/// Between two looks at running threads: the longest that a signal to one of them is held up.
const LOOK: Duration = Duration::from_micros(500);
/// The tracer answers within a look; a host without a processor to spare takes longer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// What the tracer is to do.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Orders {
    /// `None`: end.
    pub(crate) slices: Option<Slices>,
    pub(crate) tids: Vec<i32>,
}

#[derive(Debug)]
struct State {
    orders: Orders,
    /// How many orders were given, and how many are in force.
    given: u64,
    taken: u64,
    /// Set at the end.
    outcome: Option<Result<(), ThrottleError>>,
    longest_stop: Duration,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    ordered: Condvar,
    answered: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handle to the thread; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Tracer {
    pid: i32,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Tracer {
    /// Starts it; returns when it has begun or cannot.
    pub(crate) fn start(pid: i32, orders: Orders) -> Result<Self, ThrottleError> {
        let state =
            State { orders, given: 1, taken: 0, outcome: None, longest_stop: Duration::ZERO };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            ordered: Condvar::new(),
            answered: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let run = move || {
            let _end = End { pid, shared: &own };
            become_punctual();
            let outcome = trace(pid, &own);
            own.lock().outcome = Some(outcome);
        };
        let thread = std::thread::Builder::new().name("throttle".to_owned()).spawn(run);
        let thread = thread.map_err(|source| ThrottleError::System {
            pid,
            step: "starting a thread",
            source,
        })?;
        let mut tracer = Self { pid, shared, thread: Some(thread) };
        tracer.await_answer(1)?;
        Ok(tracer)
    }

    /// Gives new orders; returns when they are in force.
    pub(crate) fn order(&mut self, orders: Orders) -> Result<(), ThrottleError> {
        let given = {
            let mut state = self.shared.lock();
            state.orders = orders;
            state.given += 1;
            state.given
        };
        self.shared.ordered.notify_all();
        self.await_answer(given)
    }

    /// The longest time that the threads stood still at a stretch.
    pub(crate) fn longest_stop(&self) -> Duration {
        self.shared.lock().longest_stop
    }

    fn await_answer(&mut self, given: u64) -> Result<(), ThrottleError> {
        let until = Instant::now() + ANSWER_LIMIT;
        let mut state = self.shared.lock();
        loop {
            if let Some(outcome) = &mut state.outcome {
                return std::mem::replace(outcome, Ok(()));
            }
            if state.taken >= given {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ThrottleError::NoAnswer { pid: self.pid });
            }
            let waited = self.shared.answered.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        let ended = self.order(Orders { slices: None, tids: Vec::new() });
        // A thread that does not answer is not waited for either.
        if !matches!(ended, Err(ThrottleError::NoAnswer { .. }))
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Tells at the end of the thread that nobody need wait; of one that panics, too.
struct End<'a> {
    pid: i32,
    shared: &'a Shared,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.shared.lock().outcome.get_or_insert(Err(ThrottleError::NoAnswer { pid: self.pid }));
        self.shared.answered.notify_all();
    }
}

/// Stops and continues until it is told to end.
fn trace(pid: i32, shared: &Shared) -> Result<(), ThrottleError> {
    let mut orders = shared.lock().orders.clone();
    let mut tracees = Tracees::seize(pid, &orders.tids)?;
    let (mut known, mut debt) = (0, Debt::default());
    loop {
        let began = Instant::now();
        tracees.interrupt()?;
        loop {
            tracees.look(true)?;
            let Some(slices) = take(shared, &mut known, &mut orders, &mut tracees, pid)? else {
                return Ok(());
            };
            let until = began + slices.stop;
            // A thread that does not stop now does not run either, and need not be looked at often.
            let soon = if began.elapsed() < SOON * 50 { SOON } else { LOOK };
            let most = if tracees.all_stopped() { slices.stop } else { soon };
            if !sleep(shared, known, until, most) {
                break;
            }
        }
        let slice = orders.slices.map_or(Duration::ZERO, |slices| slices.run);
        let owed = debt.settle(tracees.times(), slice);
        tracees.go_on()?;
        let running = Instant::now();
        note_stop(shared, running - began);

        // A signal that came meanwhile shows at once; later there are few.
        let mut pause = SOON;
        loop {
            pause = if tracees.look(false)? { SOON } else { (pause * 2).min(LOOK) };
            tracees.check_alive()?;
            let Some(slices) = take(shared, &mut known, &mut orders, &mut tracees, pid)? else {
                return Ok(());
            };
            if !sleep(shared, known, running + slices.run + owed, pause) {
                break;
            }
        }
    }
}

/// Takes new orders, if there are any; the slices in force, `None` at the end.
fn take(
    shared: &Shared,
    known: &mut u64,
    orders: &mut Orders,
    tracees: &mut Tracees,
    pid: i32,
) -> Result<Option<Slices>, ThrottleError> {
    let (given, new) = {
        let state = shared.lock();
        if state.given == *known {
            return Ok(orders.slices);
        }
        (state.given, state.orders.clone())
    };
    if new.slices.is_some() && new.tids != orders.tids {
        // vCPUs were plugged or unplugged. The old ones are let go of first: a thread cannot be
        // seized twice.
        *tracees = Tracees::none(pid);
        *tracees = Tracees::seize(pid, &new.tids)?;
    }
    *orders = new;
    *known = given;
    if orders.slices.is_some() {
        // The end is answered for by the end of the thread.
        shared.lock().taken = given;
        shared.answered.notify_all();
    }
    Ok(orders.slices)
}

/// Sleeps until `until`, but at most for `most`, or until there are orders beyond the `known` ones.
/// Whether it is still before `until`.
fn sleep(shared: &Shared, known: u64, until: Instant, most: Duration) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return false;
    }
    let state = shared.lock();
    if state.given == known {
        drop(
            shared
                .ordered
                .wait_timeout(state, left.min(most))
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
    Instant::now() < until
}

fn note_stop(shared: &Shared, stop: Duration) {
    let mut state = shared.lock();
    state.longest_stop = state.longest_stop.max(stop);
}
