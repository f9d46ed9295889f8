//! Which round each channel has placed, shared between the channels and the conversation.
//!
//! Kept apart from the queue of messages on purpose: while a round is waited for, what the source
//! said behind it stays in that queue, unread. Device state that follows the last round must not
//! overtake its pages.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::link::Pulse;
use crate::{EngineError, limits};

#[derive(Debug, Default)]
struct Placed {
    /// The last round that each channel has ended.
    rounds: Vec<Option<u64>>,
    failed: Option<EngineError>,
}

/// The channels' progress.
#[derive(Debug)]
pub(super) struct Barriers {
    placed: Mutex<Placed>,
    changed: Condvar,
    /// Of the reader of each channel.
    pulses: Vec<Pulse>,
}

/// How long nothing has come at all.
#[derive(Debug)]
struct Stillness {
    /// The reads that wait, and since when it is these; `None` while somebody does something else.
    reads: Option<(Vec<u64>, Instant)>,
}

impl Stillness {
    /// For how long the same `reads` have waited `now`.
    fn look(&mut self, reads: Option<Vec<u64>>, now: Instant) -> Duration {
        let since = match &self.reads {
            Some((before, since)) if reads.as_ref() == Some(before) => *since,
            _ => now,
        };
        self.reads = reads.map(|reads| (reads, since));
        now.saturating_duration_since(since)
    }
}

impl Barriers {
    /// Of `channels` channels, none of which has ended a round.
    pub(super) fn new(channels: usize) -> Self {
        let placed = Placed { rounds: vec![None; channels], failed: None };
        let pulses = vec![(); channels].into_iter().map(|()| Pulse::default()).collect();
        Self { placed: Mutex::new(placed), changed: Condvar::new(), pulses }
    }

    /// What the reader of `channel` is to show. One that was added later ends no round.
    pub(super) fn pulse(&self, channel: usize) -> Pulse {
        self.pulses.get(channel).cloned().unwrap_or_default()
    }

    /// The reads of the channels that have not ended `round`, if all of these wait for bytes.
    fn waiting(&self, placed: &Placed, round: u64) -> Option<Vec<u64>> {
        let late =
            placed.rounds.iter().zip(&self.pulses).filter(|(ended, _)| **ended < Some(round));
        late.map(|(_, pulse)| pulse.waits()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Placed> {
        self.placed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `channel` has placed all pages up to the end of `round`.
    pub(super) fn reached(&self, channel: usize, round: u64) {
        if let Some(ended) = self.lock().rounds.get_mut(channel) {
            *ended = Some(round);
        }
        self.changed.notify_all();
    }

    /// A channel can no longer; the first reason is kept, but that connections are lost gives way
    /// to any other.
    pub(super) fn failed(&self, error: EngineError) {
        let failed = &mut self.lock().failed;
        if failed.as_ref().is_none_or(|first| first.is_loss() && !error.is_loss()) {
            *failed = Some(error);
        }
        self.changed.notify_all();
    }

    /// Why a channel can no longer, if so.
    pub(super) fn failure(&self) -> Option<EngineError> {
        self.lock().failed.take()
    }

    /// Waits until every channel has ended `round`, or a later one, or until it `ends` otherwise.
    /// The source has sent all of it by now, so while channels wait for bytes some must come.
    pub(super) fn wait(
        &self,
        round: u64,
        ends: impl Fn() -> Option<EngineError>,
    ) -> Result<(), EngineError> {
        let until = Instant::now() + limits::ANSWER;
        let mut stillness = Stillness { reads: None };
        let mut placed = self.lock();
        while placed.rounds.iter().any(|ended| *ended < Some(round)) {
            if let Some(error) = placed.failed.take() {
                return Err(error);
            }
            if let Some(error) = ends() {
                return Err(error);
            }
            if Instant::now() >= until {
                return Err(EngineError::Timeout {
                    what: "the pages of a round",
                    limit: limits::ANSWER,
                });
            }
            let waiting = self.waiting(&placed, round);
            if stillness.look(waiting, Instant::now()) >= limits::STALL {
                return Err(EngineError::Timeout {
                    what: "the rest of a round that was sent",
                    limit: limits::STALL,
                });
            }
            placed = self
                .changed
                .wait_timeout(placed, limits::TICK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reads_that_wait_all_the_while_are_still() {
        let (begin, mut stillness) = (Instant::now(), Stillness { reads: None });
        let mut at = |seconds, reads: Option<&[u64]>| {
            let now = begin + Duration::from_secs(seconds);
            stillness.look(reads.map(<[u64]>::to_vec), now).as_secs()
        };
        assert_eq!(at(0, Some(&[1, 3])), 0);
        assert_eq!(at(3, Some(&[1, 3])), 3);
        // Bytes have come on one of them.
        assert_eq!(at(4, Some(&[1, 5])), 0);
        assert_eq!(at(6, Some(&[1, 5])), 2);
        // One has ended the round.
        assert_eq!(at(7, Some(&[1])), 0);
        assert_eq!(at(9, Some(&[1])), 2);
        // The disk is written.
        assert_eq!(at(10, None), 0);
        assert_eq!(at(90, None), 0);
        assert_eq!(at(91, Some(&[7])), 0);
        assert_eq!(at(97, Some(&[7])), 6);
    }

    #[test]
    fn a_channel_that_has_ended_the_round_or_places_pages_is_not_waited_for() {
        let barriers = Barriers::new(2);
        let waiting = || barriers.waiting(&barriers.lock(), 4);
        assert_eq!(waiting(), None, "neither reads");
        barriers.pulse(0).beat();
        assert_eq!(waiting(), None, "one does not");
        barriers.pulse(1).beat();
        assert_eq!(waiting(), Some(vec![1, 1]));
        barriers.reached(0, 4);
        assert_eq!(waiting(), Some(vec![1]));
    }

    #[test]
    fn a_round_whose_bytes_do_not_come_is_given_up_long_before_a_disk_is() {
        let barriers = Barriers::new(1);
        barriers.pulse(0).beat();
        let error = barriers.wait(0, || None).unwrap_err();
        let limit = limits::STALL;
        assert!(matches!(error, EngineError::Timeout { limit: l, .. } if l == limit), "{error}");
    }
}
