//! How much of its time the guest loses: five modes over the same view of things.
//!
//! Time comes in as `clock`, the sum of all rounds and of the ticks within the current one.

use std::time::Duration;

use crate::guest::{Class, Guest, Link, after_round, time_to_finish};
use crate::settings::ThrottleMode;

/// Two rounds whose remaining data differ by less than this do not converge.
const SAME: f64 = 0.05;
/// Direct throttling is for what is sent within this time.
const DIRECT: f64 = 5.0;
/// How long direct throttling holds each of its two levels, and staged throttling its last.
const HOLD: Duration = Duration::from_secs(3);
const FIRST: f64 = 0.90;
/// The strongest that direct and staged throttling know.
const LAST: f64 = 0.99;
/// Staged throttling wants the guest to dirty this share of the bandwidth.
const STAGED: f64 = 0.2;
/// QEMU: cpu-throttle-initial, cpu-throttle-increment, throttle-trigger-threshold, periods of at
/// least a second.
const INITIAL: f64 = 0.20;
const INCREMENT: f64 = 0.10;
const TRIGGER: f64 = 0.5;
const PERIOD: Duration = Duration::from_secs(1);
/// From this on the guest hardly works; the whole time under it is to stay within [`SEVERE_TIME`].
pub(crate) const SEVERE: f64 = 0.9;
const SEVERE_TIME: f64 = 3.0;
/// Share of the severe time that is planned with: mechanisms and estimates are not exact.
const RESERVE: f64 = 0.85;
/// Of throttles that strong the mildest that takes hardly longer than the fastest: the guest loses
/// its work either way.
const LONGER: f64 = 1.1;
/// Shares of time left to the guest that adaptive throttling chooses from, mild ones first.
const MILD: [f64; 9] = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15];
const STRONG: [f64; 10] = [0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.025, 0.02, 0.015, 0.01];
/// A milder throttle may cost this much more of the guest's work than the best.
const DEARER: f64 = 1.25;
/// A round without a throttle is made when it brings the cost down to this share.
const CHEAPER: f64 = 0.9;
/// A round that leaves at most this share of what the one before left has shrunk.
const SHRINKS: f64 = 0.8;
/// A throttle above [`SEVERE`] that leaves the dirty rate at more than this does not help.
const DEAF: f64 = 0.7;

/// What modes decide from. Amounts are in pages, times in seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) clock: Duration,
    pub(crate) remaining: f64,
    pub(crate) bandwidth: f64,
    /// Dirtied each second, in the last round.
    pub(crate) dirty_rate: f64,
    pub(crate) dirtied: f64,
    pub(crate) sent: f64,
    pub(crate) guest: &'a Guest,
    pub(crate) classes: &'a [Class],
    pub(crate) unsent: f64,
    /// Time of each round in which nothing is sent.
    pub(crate) idle: f64,
    /// All segments are harvested at once, after that time.
    pub(crate) at_once: bool,
    pub(crate) lead: f64,
    /// What may remain when the guest is stopped.
    pub(crate) enough: f64,
    /// What is left of the time to finish in, without and with a throttle.
    pub(crate) free_time: f64,
    pub(crate) time_left: f64,
    pub(crate) downtime: f64,
    pub(crate) most: f64,
    /// Hot segments are delayed: the others still shrink by themselves.
    pub(crate) delaying: bool,
}

impl View<'_> {
    /// What sending is like.
    pub(crate) fn link(&self) -> Link {
        Link { pages: self.bandwidth, idle: self.idle, at_once: self.at_once, lead: self.lead }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Throttle {
    value: f64,
    previous: Option<f64>,
    clock: Duration,
    /// When direct throttling began.
    direct: Option<Duration>,
    /// The share left to the guest by staged throttling.
    staged: Option<f64>,
    /// Since when staged throttling holds its last level.
    held: Option<Duration>,
    /// Nothing more can be done by throttling.
    exhausted: bool,
    period: (Duration, f64, f64),
    bad_periods: u32,
    severe: f64,
    deaf_rounds: u32,
    /// The last round left clearly less than the one before: rounds do some good by themselves.
    shrinking: bool,
    /// It left hot segments out.
    delayed: bool,
    /// This round goes without a throttle.
    waiting: bool,
}

impl Throttle {
    pub(crate) fn value(&self) -> f64 {
        self.value
    }

    /// Whether all that throttling can do was done, in vain.
    pub(crate) fn exhausted(&self) -> bool {
        self.exhausted
    }

    /// At the end of a round that leaves too much.
    pub(crate) fn round(&mut self, mode: ThrottleMode, view: &View, time: Duration) {
        self.pass(view);
        let previous = self.previous.replace(view.remaining);
        self.shrinking = previous.is_none_or(|previous| view.remaining < SHRINKS * previous);
        if self.exhausted {
            self.value = 0.0;
            return;
        }
        match mode {
            ThrottleMode::Off => self.value = 0.0,
            ThrottleMode::Direct | ThrottleMode::Staged => self.chosen(mode, view, previous),
            ThrottleMode::AutoConverge => self.ramp(view, time),
            // Where the governor is forced it takes the place of this one ([`crate::govern`]).
            ThrottleMode::Governor => self.value = 0.0,
            ThrottleMode::Adaptive | ThrottleMode::Vcpus => {
                let deaf = self.value >= SEVERE && view.guest.speed(self.value) > DEAF;
                self.deaf_rounds = if deaf { self.deaf_rounds + 1 } else { 0 };
                self.exhausted = self.deaf_rounds >= 3;
                self.waiting = false;
                self.value = if self.exhausted {
                    0.0
                } else {
                    self.adapt(view, self.shrinking || self.delayed)
                };
                self.waiting = self.value <= 0.0;
                self.delayed = view.delaying;
            }
        }
    }

    /// Within a round.
    pub(crate) fn tick(&mut self, mode: ThrottleMode, view: &View) {
        self.pass(view);
        if self.exhausted {
            return;
        }
        match mode {
            ThrottleMode::Direct | ThrottleMode::Staged => self.hold(view.most),
            // Within a round the throttle only rises. How much of the memory just sent is dirty
            // again is known at its end.
            ThrottleMode::Adaptive | ThrottleMode::Vcpus
                if self.previous.is_some() && !self.waiting =>
            {
                self.value = self.adapt(view, false).max(self.value);
            }
            _ => {}
        }
    }

    /// Whether a round of that many seconds fits into the time in which the guest hardly works, if
    /// it does hardly work.
    pub(crate) fn has_time(&self, view: &View, seconds: f64) -> bool {
        self.value < SEVERE || seconds <= self.severe_left(view)
    }

    /// Of the time in which the guest may hardly work, what is left to plan with before it stands
    /// still.
    fn severe_left(&self, view: &View) -> f64 {
        let since = view.clock.saturating_sub(self.clock).as_secs_f64();
        let severe = self.severe + if self.value >= SEVERE { since } else { 0.0 };
        RESERVE * (SEVERE_TIME - view.downtime - severe)
    }

    /// Whether a guest that is not slowed would keep this from finishing in time, and another round
    /// as it is would hardly leave less; or rounds are `stuck`, whatever the model says of the next
    /// one. A guest that dirties nearly as much as the link carries, by fits and starts, leaves
    /// less on average and never little enough.
    pub(crate) fn is_needed(&self, view: &View, stuck: bool) -> bool {
        let link = view.link();
        let (later, _) = after_round(view.classes, view.unsent, 1.0, link);
        let left: f64 = later.iter().map(|class| class.dirty).sum();
        (stuck || left > SHRINKS * view.remaining) && self.adapt(view, false) > 0.0
    }

    /// What a round leaves that the governor looks after.
    pub(crate) fn look_on(&mut self, view: &View) {
        self.pass(view);
        self.previous = Some(view.remaining);
        self.delayed = view.delaying;
        self.value = 0.0;
    }

    /// What a round leaves is little enough, and the next one is made to leave less: not slowed.
    pub(crate) fn rest(&mut self, view: &View) {
        self.look_on(view);
        self.waiting = true;
    }

    fn pass(&mut self, view: &View) {
        if self.value >= SEVERE {
            self.severe += view.clock.saturating_sub(self.clock).as_secs_f64();
        }
        self.clock = view.clock;
    }

    fn chosen(&mut self, mode: ThrottleMode, view: &View, previous: Option<f64>) {
        if let Some(share) = self.staged {
            self.stage(share, view);
        } else if self.direct.is_none() {
            let Some(previous) = previous else { return };
            if (view.remaining - previous).abs() >= SAME * previous {
                return;
            }
            if mode == ThrottleMode::Direct && view.remaining < view.bandwidth * DIRECT {
                self.direct = Some(view.clock);
            } else {
                self.stage(1.0, view);
            }
        } else if self.direct.is_some_and(|since| view.clock >= since + HOLD + HOLD) {
            self.direct = None;
            self.stage(1.0 - self.value, view);
        }
        self.hold(view.most);
    }

    fn stage(&mut self, share: f64, view: &View) {
        let wanted = share * STAGED * view.bandwidth / view.dirty_rate.max(1.0);
        // Each stage is stronger than the one before.
        let share = wanted.min(share);
        self.staged = Some(share);
        if 1.0 - share > LAST {
            self.held.get_or_insert(view.clock);
        }
        self.value = (1.0 - share).min(LAST).min(view.most);
    }

    /// What passes by time alone.
    fn hold(&mut self, most: f64) {
        if let Some(since) = self.direct {
            let level = if self.clock < since + HOLD { FIRST } else { LAST };
            self.value = level.min(most);
        }
        if self.held.is_some_and(|since| self.clock >= since + HOLD) {
            self.exhausted = true;
            self.value = 0.0;
        }
    }

    fn ramp(&mut self, view: &View, time: Duration) {
        self.period.0 += time;
        self.period.1 += view.dirtied;
        self.period.2 += view.sent;
        if self.period.0 < PERIOD {
            return;
        }
        let (_, dirtied, sent) = std::mem::take(&mut self.period);
        if dirtied > TRIGGER * sent {
            self.bad_periods += 1;
        }
        if self.bad_periods >= 2 {
            self.bad_periods = 0;
            let next = if self.value > 0.0 { self.value + INCREMENT } else { INITIAL };
            self.value = next.min(view.most);
        }
    }

    /// The mildest throttle that finishes in time and costs hardly more work than the best; none
    /// where a round without one makes it cheaper later.
    fn adapt(&self, view: &View, may_wait: bool) -> f64 {
        if view.delaying || view.bandwidth <= 0.0 {
            return 0.0;
        }
        let link = view.link();
        let free = time_to_finish(view.classes, view.unsent, 1.0, link, view.enough);
        if free.is_some_and(|time| time <= view.free_time) {
            return 0.0;
        }
        let (share, cost) = self.best(view, view.classes, view.unsent, view.time_left);
        if may_wait {
            let (later, spent) = after_round(view.classes, view.unsent, 1.0, link);
            if self.best(view, &later, 0.0, view.time_left - spent).1 < CHEAPER * cost {
                return 0.0;
            }
        }
        self.settle(1.0 - share)
    }

    /// The share of time to leave to the guest, and what that costs of its work. From 90 % on the
    /// guest hardly works, so that what is better for it is to be through with it. That is chosen
    /// where it costs clearly less work than any milder throttle and fits into [`SEVERE_TIME`],
    /// downtime and all such times before included; and where no milder one finishes in time.
    fn best(&self, view: &View, classes: &[Class], unsent: f64, time_left: f64) -> (f64, f64) {
        let link = view.link();
        let time = |share: f64| {
            let speed = view.guest.speed(1.0 - share);
            time_to_finish(classes, unsent, speed, link, view.enough).unwrap_or(f64::INFINITY)
        };
        let least = 1.0 - view.most;
        // Half as slow for twice as long is no gain.
        let mild: Vec<(f64, f64)> = MILD
            .iter()
            .filter(|share| **share >= least)
            .map(|share| (*share, time(*share)))
            .filter(|(_, time)| *time <= time_left)
            .map(|(share, time)| (share, (1.0 - share) * time))
            .collect();
        let cheapest = mild.iter().map(|(_, cost)| *cost).fold(f64::INFINITY, f64::min);
        let milder = mild.iter().copied().find(|(_, cost)| *cost <= DEARER * cheapest);
        let strong: Vec<f64> =
            STRONG.iter().copied().filter(|share| *share > least).chain([least]).collect();
        let severe_left = self.severe_left(view);
        let fastest = time(least);
        if fastest.is_infinite() {
            return milder.unwrap_or((least, f64::INFINITY));
        }
        let share = largest(&strong, |share| time(share) <= LONGER * fastest).unwrap_or(least);
        let stronger = (share, (1.0 - share) * time(share));
        match milder {
            Some(level) if time(share) > severe_left || level.1 <= DEARER * stronger.1 => level,
            _ => stronger,
        }
    }

    /// Small changes are not worth making.
    fn settle(&self, wanted: f64) -> f64 {
        let (now, next) = (1.0 - self.value, 1.0 - wanted);
        if self.value > 0.0 && next > now && next < 1.3 * now { self.value } else { wanted }
    }
}

/// The first of falling `shares` that `fits`, which all smaller ones do as well.
fn largest(shares: &[f64], fits: impl Fn(f64) -> bool) -> Option<f64> {
    let at = shares.partition_point(|share| !fits(*share));
    shares.get(at).copied()
}

#[cfg(test)]
mod tests;
