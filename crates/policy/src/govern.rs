//! How many clean pages the guest may make dirty each second, where the machine can hold it to
//! that.
//!
//! With the link sending `B` pages a second, `R` remaining and `E` of them fitting into the
//! downtime, a round takes `R / B`, and a guest that makes `g` pages dirty each second leaves at
//! most `g·R / B` behind it. So
//!
//! ```text
//!   one round is enough:     g₁ = E·B / R
//!   done within T, in any number of rounds, each g / B of the one before:
//!                            (R − E) / (B − g) ≤ T   ⟹   g ≤ B − (R − E) / T
//! ```
//!
//! A guest that wants `D > B` loses `(1 − g/D)` of its work for `(R − E) / (B − g)`: the more, the
//! larger `g` is. So the smallest `g` costs least work in all; but it is felt most. Up to [`SHORT`]
//! of that are taken in one go, with `g₁`. What takes longer is spread over the time there is, at
//! the rate of the second line, never above [`SHARE`] of the link; `g₁` grows as `R` falls, and
//! once that is the larger one, or the rest is short, the end is in sight.

use std::time::Duration;

use crate::throttle::View;

/// Of the link, the part that the guest may make dirty again at the most: each round leaves half of
/// the one before.
const SHARE: f64 = 0.5;
/// Of what may remain at the end, the part that is planned with.
const CAREFUL: f64 = 0.95;
/// A rest that is sent within this is sent in one round.
const SHORT: f64 = 3.0;
/// No guest is held to less than this many pages a second: its kernel has a house to keep.
const LEAST: f64 = 500.0;
/// A round under the governor that leaves over this share of what the one before left does not
/// converge.
const DEAF: f64 = 0.9;
/// That is the governor's failure where the guest made more pages dirty than it granted, this many
/// times over. Otherwise it holds the guest, and there is no less to be had.
pub(crate) const UNHELD: f64 = 2.0;
/// After so many of them it is given up.
const DEAF_ROUNDS: u32 = 3;

#[derive(Clone, Debug, Default)]
pub(crate) struct Governor {
    budget: Option<f64>,
    previous: f64,
    deaf_rounds: u32,
    failed: bool,
}

impl Governor {
    /// Clean pages that may be made dirty each second; `None`: not governed.
    pub(crate) fn budget(&self) -> Option<f64> {
        self.budget
    }

    /// Whether it was tried in vain.
    #[cfg(test)]
    pub(crate) fn failed(&self) -> bool {
        self.failed
    }

    /// Whether a guest cannot be held to less.
    pub(crate) fn is_at_its_least(&self) -> bool {
        self.budget.is_some_and(|budget| budget <= LEAST)
    }

    /// Whether nothing more is to be had of it where nothing else is allowed.
    pub(crate) fn is_at_its_end(&self) -> bool {
        self.budget.is_none() || self.failed || self.is_at_its_least()
    }

    /// At the end of a round that leaves too much. `needed`: rounds alone would not finish in time.
    pub(crate) fn round(&mut self, view: &View, offered: bool, needed: bool) {
        let unheld = self.budget.is_some_and(|budget| view.dirty_rate > UNHELD * budget);
        let deaf = unheld && view.remaining > DEAF * self.previous;
        self.deaf_rounds = if deaf { self.deaf_rounds + 1 } else { 0 };
        self.previous = view.remaining;
        self.failed |= self.deaf_rounds >= DEAF_ROUNDS;
        // Once in force it stays, as a guest that is let go would have the next rounds undo what
        // was won.
        let wanted = offered && !self.failed && (needed || self.budget.is_some());
        self.budget = (wanted && view.bandwidth > 0.0).then(|| budget(view));
    }

    /// The machine offers it no longer.
    pub(crate) fn withdraw(&mut self) {
        self.budget = None;
    }

    /// How long until what may remain remains, at this budget.
    pub(crate) fn time_to_finish(&self, view: &View) -> Option<Duration> {
        let spare = view.bandwidth - self.budget?;
        let seconds =
            (view.remaining - view.enough).max(0.0) / spare + view.enough / view.bandwidth;
        Duration::try_from_secs_f64(seconds).ok()
    }
}

/// Pages a second, from what `view` shows.
fn budget(view: &View) -> f64 {
    let link = view.bandwidth;
    let one_round = CAREFUL * view.enough * link / view.remaining.max(1.0);
    let in_time = if view.remaining <= SHORT * link {
        0.0
    } else {
        link - (view.remaining - view.enough).max(0.0) / view.time_left.max(1e-3)
    };
    one_round.max(in_time).min(SHARE * link).max(LEAST.min(SHARE * link))
}

#[cfg(test)]
mod tests;
