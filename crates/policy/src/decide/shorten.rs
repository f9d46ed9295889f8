//! One more round of a guest that is slowed and could be stopped, so that it stands still for less.

use std::time::Duration;

use godwit_units::Rate;

use super::Policy;
use crate::govern::UNHELD;
use crate::guest::{Class, after_round};
use crate::observe::Round;
use crate::settings::ThrottleMode;

/// Such a round may cost a guest so many times the work that it is spared by standing still less:
/// it answers more slowly meanwhile, where it would not answer at all.
const WORK: f64 = 2.0;
/// It is made only where the guest then stands still so many seconds less.
const LESS: f64 = 0.02;
/// So many are made of one migration, at the most.
const ROUNDS: u32 = 3;

impl Policy {
    /// Whether a guest that is slowed goes through another round behind `round`, with which it
    /// could be stopped: then how long that takes, and how long what is left to send.
    ///
    /// What that costs of its work is what it does not get while the round is sent and
    /// acknowledged; where it is governed, all of it at the most.
    pub(super) fn shortened(
        &self,
        classes: &[Class],
        round: &Round,
        dirty_rate: f64,
        bandwidth: Rate,
    ) -> Option<(Duration, Duration)> {
        let view = self.view(classes, self.clock, round.remaining, bandwidth);
        let acknowledged = round.round_trip.as_secs_f64();
        let governed = self.plan.dirty_rate_limit;
        let speed = governed.map_or(self.guest.speed(round.throttle), |_| 0.0);
        let (later, sending) = after_round(classes, view.unsent, speed, view.link());
        let time = sending + acknowledged;
        // Each page is harvested half of the sending ago, on average.
        let age = if view.at_once { time } else { (sending - view.idle) / 2.0 + acknowledged };
        let left = match governed {
            // One that lets through more than that has failed, or did not hold in all of the round
            // that was seen.
            Some(limit) => dirty_rate.min(UNHELD * limit) * age,
            None => {
                let dirty: f64 = later.iter().map(|class| class.dirty).sum();
                let more = self.growth(&later, round.round_trip, round.throttle);
                (dirty + more).max(dirty_rate * age)
            }
        };
        // What is dirtied until the guest stands still comes to either.
        let last = self.last_bandwidth(bandwidth).bytes_per_second() / self.page_bytes;
        let (now, next) = (view.remaining / last, left / last);
        let lost = time * governed.map_or(round.throttle, |_| 1.0);
        let adapts = matches!(
            self.settings.throttle,
            ThrottleMode::Adaptive | ThrottleMode::Vcpus | ThrottleMode::Governor
        );
        let worth = adapts
            && !self.disks
            && self.shortenings < ROUNDS
            && now - next >= LESS
            && lost <= WORK * (now - next)
            && time + next + round.fixed.as_secs_f64() <= view.time_left
            && self.throttle.has_time(&view, time);
        worth.then(|| (Duration::from_secs_f64(time), Duration::from_secs_f64(next)))
    }
}
