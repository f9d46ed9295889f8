//! Which round each channel has placed, shared between the channels and the conversation.
//!
//! Kept apart from the queue of messages on purpose: while a round is waited for, what the source
//! said behind it stays in that queue, unread. Device state that follows the last round must not
//! overtake its pages.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

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
}

impl Barriers {
    /// Of `channels` channels, none of which has ended a round.
    pub(super) fn new(channels: usize) -> Self {
        let placed = Placed { rounds: vec![None; channels], failed: None };
        Self { placed: Mutex::new(placed), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Placed> {
        self.placed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `channel` has placed all pages up to the end of `round`.
    pub(super) fn reached(&self, channel: usize, round: u64) {
        self.lock().rounds[channel] = Some(round);
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
    pub(super) fn wait(
        &self,
        round: u64,
        ends: impl Fn() -> Option<EngineError>,
    ) -> Result<(), EngineError> {
        let until = Instant::now() + limits::ANSWER;
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
            placed = self
                .changed
                .wait_timeout(placed, limits::TICK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Ok(())
    }
}
