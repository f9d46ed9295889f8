//! Who may write next: a token bucket, and one queue in which writers take turns.
//!
//! Pure: times come in as what has passed since some beginning. Tokens are pages. They come at the
//! rate that is allowed; while nobody waits, little is saved up, and while somebody waits nothing
//! is lost, so a handler that came late makes up for it and the rate stays what it was to be.
//!
//! Turns go by pages (start-time fair queueing, Goyal et al., SIGCOMM 1996): the writer that was
//! allowed least so far is next. One that writes little is never behind one that writes much, and
//! what it leaves the other may have.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// What may be saved up while nobody waits: what comes in this time,
const BURST: Duration = Duration::from_millis(4);
/// and no less than so many pages. A kernel that only keeps house writes about as many each time it
/// looks at its clocks; it need not wait for them.
const LEAST_BURST: f64 = 32.0;
/// Nobody waits longer than this: the writer may hold a lock that the VMM's main loop wants.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_millis(20);
/// Neighbouring pages that a sequential writer is allowed at once, at the most.
const WINDOW: u64 = 64;
/// Bytes in a page.
const PAGE: u64 = godwit_units::PAGE_SIZE;

/// A fault that waits.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    writer: i32,
    address: u64,
    since: Duration,
}

/// What is known of one writer.
#[derive(Clone, Copy, Debug, Default)]
struct Writer {
    /// Pages allowed, from a common beginning.
    turn: u64,
    /// The address behind what it was allowed last.
    behind: u64,
    /// Pages that it was allowed at once, as long as it goes on where it ended.
    window: u64,
}

/// An answer to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    /// The first page.
    pub(crate) address: u64,
    /// How many pages, one at least.
    pub(crate) pages: u64,
    /// How long the writer waited for it.
    pub(crate) waited: Duration,
}

/// The queue and its tokens.
#[derive(Debug)]
pub(crate) struct Queue {
    /// Pages a second; infinite: no limit.
    rate: f64,
    tokens: f64,
    at: Duration,
    waiting: BTreeMap<(u64, u64), Waiting>,
    writers: HashMap<i32, Writer>,
    /// The turn of the last grant: nobody who was away comes back with an older one.
    turn: u64,
    number: u64,
}

impl Queue {
    /// An empty queue without a limit.
    pub(crate) fn new() -> Self {
        Self {
            rate: f64::INFINITY,
            tokens: 0.0,
            at: Duration::ZERO,
            waiting: BTreeMap::new(),
            writers: HashMap::new(),
            turn: 0,
            number: 0,
        }
    }

    /// Allows `rate` pages a second from `now` on.
    pub(crate) fn set_rate(&mut self, rate: f64, now: Duration) {
        self.earn(now);
        self.rate = rate;
        self.tokens = if rate.is_finite() { self.tokens.min(self.burst()) } else { 0.0 };
    }

    /// `writer` waits at `address` since `now`.
    pub(crate) fn push(&mut self, writer: i32, address: u64, now: Duration) {
        self.earn(now);
        let known = self.writers.entry(writer).or_default();
        known.turn = known.turn.max(self.turn);
        self.number += 1;
        self.waiting.insert((known.turn, self.number), Waiting { writer, address, since: now });
    }

    /// Who may go on at `now`, if anybody may. `room` tells how many pages from an address on may
    /// be allowed at once.
    pub(crate) fn next(&mut self, now: Duration, room: impl Fn(u64) -> u64) -> Option<Grant> {
        self.earn(now);
        let key = if self.tokens >= 1.0 || self.rate.is_infinite() {
            self.waiting.first_key_value().map(|(key, _)| *key)?
        } else {
            let overdue =
                |(_, waiting): &(_, &Waiting)| now.saturating_sub(waiting.since) >= LONGEST_WAIT;
            self.waiting.iter().find(overdue).map(|(key, _)| *key)?
        };
        let waiting = self.waiting.remove(&key)?;
        let writer = self.writers.entry(waiting.writer).or_default();
        // Who goes on where it was allowed last is given twice as much, at its own risk: pages
        // count as written.
        writer.window =
            if writer.behind == waiting.address { (writer.window * 2).min(WINDOW) } else { 1 };
        let affordable = if self.rate.is_finite() { self.tokens.max(1.0) as u64 } else { WINDOW };
        let pages = writer.window.min(affordable).min(room(waiting.address)).max(1);
        writer.behind = waiting.address + pages * PAGE;
        self.turn = key.0;
        writer.turn = key.0 + pages;
        if self.rate.is_finite() {
            // What was overdue is paid back, within bounds.
            self.tokens = (self.tokens - pages as f64).max(-self.burst());
        }
        Some(Grant { address: waiting.address, pages, waited: now.saturating_sub(waiting.since) })
    }

    /// How long from `now` until [`Self::next`] will have an answer, if nobody else comes.
    pub(crate) fn pause(&self, now: Duration) -> Option<Duration> {
        if self.waiting.is_empty() {
            return None;
        }
        if self.rate.is_infinite() || self.tokens >= 1.0 {
            return Some(Duration::ZERO);
        }
        let oldest = self.waiting.values().map(|waiting| waiting.since).min()?;
        let overdue = (oldest + LONGEST_WAIT).saturating_sub(now);
        let token = Duration::try_from_secs_f64((1.0 - self.tokens) / self.rate).unwrap_or(overdue);
        Some(token.saturating_sub(now.saturating_sub(self.at)).min(overdue))
    }

    fn burst(&self) -> f64 {
        (self.rate * BURST.as_secs_f64()).max(LEAST_BURST)
    }

    fn earn(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        if self.rate.is_finite() {
            self.tokens += self.rate * passed.as_secs_f64();
            if self.waiting.is_empty() {
                self.tokens = self.tokens.min(self.burst());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    /// Lets writers write: each comes back `pause` after it was allowed, to the page that `next`
    /// tells. Returns pages allowed to each within `time`, and the longest wait.
    fn run(
        queue: &mut Queue,
        pauses: &[Duration],
        time: Duration,
        step: Duration,
        mut next: impl FnMut(usize, u64) -> u64,
    ) -> (Vec<u64>, Duration) {
        let mut due: Vec<Option<(Duration, u64)>> =
            (0..pauses.len()).map(|writer| Some((Duration::ZERO, next(writer, 0)))).collect();
        let mut at: HashMap<u64, usize> = HashMap::new();
        let (mut pages, mut longest) = (vec![0; pauses.len()], Duration::ZERO);
        let mut now = Duration::ZERO;
        while now < time {
            for (writer, due) in due.iter_mut().enumerate() {
                if let Some((_, address)) = due.take_if(|(when, _)| *when <= now) {
                    at.insert(address, writer);
                    queue.push(i32::try_from(writer).unwrap(), address, now);
                }
            }
            while let Some(grant) = queue.next(now, |_| 1000) {
                let writer = at.remove(&grant.address).unwrap();
                pages[writer] += grant.pages;
                longest = longest.max(grant.waited);
                let behind = grant.address + grant.pages * PAGE;
                due[writer] = Some((now + pauses[writer], next(writer, behind)));
            }
            now += step;
        }
        (pages, longest)
    }

    /// Pages far from each other, of each writer its own.
    fn scattered() -> impl FnMut(usize, u64) -> u64 {
        let mut number = 0;
        move |_, _| {
            number += 1;
            number * 7 * PAGE
        }
    }

    #[test]
    fn the_rate_is_held_whoever_is_late() {
        for step in [5, 700, 8000] {
            let mut queue = Queue::new();
            queue.set_rate(2000.0, Duration::ZERO);
            let writers = [MICRO * 10; 20];
            let (pages, _) =
                run(&mut queue, &writers, Duration::from_secs(2), MICRO * step, scattered());
            let sum: u64 = pages.iter().sum();
            assert!((3900..=4100).contains(&sum), "{sum} at steps of {step} us");
        }
    }

    #[test]
    fn who_writes_little_does_not_wait_for_who_writes_much() {
        let mut queue = Queue::new();
        queue.set_rate(1000.0, Duration::ZERO);
        let pauses = [MICRO * 10, MICRO * 10, Duration::from_millis(10)];
        let (pages, longest) =
            run(&mut queue, &pauses, Duration::from_secs(1), MICRO * 50, scattered());
        // The third asks less than a hundred times and gets it; the others share the rest.
        assert!((85..=100).contains(&pages[2]), "{pages:?}");
        assert!(pages[0].abs_diff(pages[1]) <= 2, "{pages:?}");
        assert!(longest < Duration::from_millis(4), "{longest:?}");
    }

    #[test]
    fn nobody_waits_for_ever() {
        let mut queue = Queue::new();
        queue.set_rate(0.0, Duration::ZERO);
        let (pages, longest) =
            run(&mut queue, &[MICRO], Duration::from_secs(1), MICRO * 100, scattered());
        assert!((45..=52).contains(&pages[0]), "{pages:?}");
        assert!(longest <= LONGEST_WAIT + MICRO * 100, "{longest:?}");
    }

    #[test]
    fn sequential_writers_are_answered_by_neighbourhoods_and_pay_for_each_page() {
        let mut queue = Queue::new();
        queue.set_rate(10_000.0, Duration::ZERO);
        let mut answers = 0;
        let (pages, _) =
            run(&mut queue, &[MICRO], Duration::from_secs(1), MICRO * 1000, |_, behind| {
                answers += 1;
                behind.max(PAGE)
            });
        assert!((9_900..=10_100).contains(&pages[0]), "{pages:?}");
        assert!(answers < 3000, "{answers}");
    }

    #[test]
    fn without_a_limit_all_go_at_once() {
        let mut queue = Queue::new();
        for writer in 0..3 {
            queue.push(writer, u64::from(writer.unsigned_abs()) * 9 * PAGE, MICRO);
        }
        assert_eq!(queue.pause(MICRO), Some(Duration::ZERO));
        let granted = std::iter::from_fn(|| queue.next(MICRO, |_| 1)).count();
        assert_eq!((granted, queue.pause(MICRO)), (3, None));
    }

    #[test]
    fn it_says_when_it_will_have_an_answer() {
        let mut queue = Queue::new();
        queue.set_rate(1000.0, Duration::ZERO);
        queue.push(1, PAGE, Duration::ZERO);
        assert_eq!(queue.pause(Duration::ZERO), Some(Duration::from_millis(1)));
        assert_eq!(queue.next(MICRO * 999, |_| 1), None);
        assert!(queue.next(MICRO * 1001, |_| 1).is_some());
        // What is saved up is bounded.
        let now = Duration::from_secs(9);
        for page in 0..100 {
            queue.push(1, page * 9 * PAGE, now);
        }
        assert_eq!(std::iter::from_fn(|| queue.next(now, |_| 1)).count(), LEAST_BURST as usize);
    }
}
