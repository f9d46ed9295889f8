//! The segments that a round has yet to come to, by channel; where the destination takes them over
//! any, a channel that has no more of its own takes those of another.
//!
//! Invariants: whoever takes a segment keeps it to the end of the round; and what was sent of it in
//! earlier rounds is in place, since those were acknowledged. A round ends with nothing left here.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::limits;

pub(super) struct Turns<T> {
    queues: Vec<Mutex<VecDeque<T>>>,
    /// A channel takes what others have, too.
    shared: bool,
    /// How often a channel was done with a round, all channels together.
    done: Mutex<u64>,
    another: Condvar,
}

impl<T> Turns<T> {
    /// For `channels`; `shared` where a segment may go over any of them.
    pub(super) fn new(channels: usize, shared: bool) -> Self {
        let queues = (0..channels).map(|_| Mutex::default()).collect();
        Self { queues, shared, done: Mutex::default(), another: Condvar::new() }
    }

    /// A channel is done with a round: waits until all are, or until it `ends` otherwise; whether
    /// all are. No channel begins a round before all are done with the one before it.
    pub(super) fn all_are_done(&self, ends: impl Fn() -> bool) -> bool {
        let channels = self.queues.len() as u64;
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        *done += 1;
        let all = done.div_ceil(channels) * channels;
        self.another.notify_all();
        while *done < all {
            if ends() {
                return false;
            }
            let waited = self.another.wait_timeout(done, limits::TICK / 10);
            done = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Channel `number` has these to deal with.
    pub(super) fn add(&self, number: usize, segments: impl IntoIterator<Item = T>) {
        self.queue(number).extend(segments);
    }

    /// The next one that channel `number` is to deal with: of its own, or else the first of
    /// whoever has most.
    pub(super) fn next(&self, number: usize) -> Option<T> {
        let own = self.queue(number).pop_front();
        if own.is_some() || !self.shared {
            return own;
        }
        loop {
            let left = |number: usize| (self.queue(number).len(), number);
            let (most, other) = (0..self.queues.len()).map(left).max()?;
            // Another may have taken it meanwhile.
            let taken = self.queue(other).pop_front();
            if taken.is_some() || most == 0 {
                return taken;
            }
        }
    }

    /// Channel `number` does not deal with `segment` now: it comes first among its own.
    pub(super) fn put_back(&self, number: usize, segment: T) {
        self.queue(number).push_front(segment);
    }

    /// Channel `number` deals with no more of them in this round: what is left of its own.
    pub(super) fn take_back(&self, number: usize) -> VecDeque<T> {
        std::mem::take(&mut self.queue(number))
    }

    fn queue(&self, number: usize) -> MutexGuard<'_, VecDeque<T>> {
        self.queues[number].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(shared: bool) -> Turns<u32> {
        let turns = Turns::new(3, shared);
        turns.add(0, [0, 3]);
        turns.add(1, [1, 4, 7]);
        turns.add(2, [2, 5, 8, 11]);
        turns
    }

    fn all(turns: &Turns<u32>, number: usize) -> Vec<u32> {
        std::iter::from_fn(|| turns.next(number)).collect()
    }

    #[test]
    fn a_channel_deals_with_its_own_first_and_then_with_those_of_whoever_has_most() {
        let turns = turns(true);
        assert_eq!(all(&turns, 0), [0, 3, 2, 5, 1, 8, 4, 11, 7]);
        assert!(all(&turns, 1).is_empty());
    }

    #[test]
    fn where_they_are_not_shared_each_channel_has_its_own() {
        let turns = turns(false);
        assert_eq!(all(&turns, 0), [0, 3]);
        assert_eq!(all(&turns, 2), [2, 5, 8, 11]);
        assert_eq!(turns.take_back(1), [1, 4, 7]);
    }

    #[test]
    fn what_a_channel_gives_up_stays_with_it() {
        let turns = turns(true);
        assert_eq!(turns.next(2), Some(2));
        turns.put_back(2, 2);
        assert_eq!(turns.take_back(2), [2, 5, 8, 11]);
        assert_eq!(all(&turns, 0), [0, 3, 1, 4, 7]);
    }

    #[test]
    fn of_channels_that_take_at_once_each_gets_other_segments() {
        let turns = Turns::new(4, true);
        turns.add(2, 0..10_000);
        let mut taken = std::thread::scope(|scope| {
            let take = |number| all(&turns, number);
            let taken = [0, 1, 2, 3].map(|number| scope.spawn(move || take(number)));
            taken.map(|it| it.join().unwrap()).concat()
        });
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..10_000));
    }

    #[test]
    fn a_round_is_over_when_all_channels_are_done_with_it() {
        let turns = Turns::<u32>::new(2, true);
        for _round in 0..3 {
            std::thread::scope(|scope| {
                let first = scope.spawn(|| turns.all_are_done(|| false));
                std::thread::sleep(limits::TICK / 5);
                assert!(!first.is_finished());
                assert!(turns.all_are_done(|| false) && first.join().unwrap());
            });
        }
        assert!(!turns.all_are_done(|| true), "nobody waits for one that will not come");
    }
}
