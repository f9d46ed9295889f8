//! How many clean pages the guest may make dirty each second, where the machine can hold it to that.
//!
//! With the link sending `B` pages a second, `R` remaining and `E` of them fitting into the downtime, a round takes `R / B`, and a
//! guest that makes `g` pages dirty each second leaves at most `g·R / B` behind it. So
//!
//! ```text
//!   one round is enough:     g₁ = E·B / R
//!   done within T, in any number of rounds, each g / B of the one before:
//!                            (R − E) / (B − g) ≤ T   ⟹   g ≤ B − (R − E) / T
//! ```
//!
//! A guest that wants `D > B` loses `(1 − g/D)` of its work for `(R − E) / (B − g)`: the more, the larger `g` is. So the
//! smallest `g` costs least work in all; but it is felt most. Up to [`SHORT`] of that are taken in one go, with `g₁`. What takes
//! longer is spread over the time there is, at the rate of the second line, never above [`SHARE`] of the link; `g₁` grows as `R` falls,
//! and once that is the larger one, or the rest is short, the end is in sight.

use std::time::Duration;

use crate::throttle::View;

/// Of the link, the part that the guest may make dirty again at the most: each round leaves half of the one before.
const SHARE: f64 = 0.5;
/// Of what may remain at the end, the part that is planned with.
const CAREFUL: f64 = 0.95;
/// A rest that is sent within this is sent in one round.
const SHORT: f64 = 3.0;
/// No guest is held to less than this many pages a second: its kernel has a house to keep.
const LEAST: f64 = 500.0;
/// A round under the governor that leaves over this share of what the one before left does not converge.
const DEAF: f64 = 0.9;
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
    pub(crate) fn failed(&self) -> bool {
        self.failed
    }

    /// At the end of a round that leaves too much. `needed`: rounds alone would not finish in time.
    pub(crate) fn round(&mut self, view: &View, offered: bool, needed: bool) {
        let deaf = self.budget.is_some() && view.remaining > DEAF * self.previous;
        self.deaf_rounds = if deaf { self.deaf_rounds + 1 } else { 0 };
        self.previous = view.remaining;
        self.failed |= self.deaf_rounds >= DEAF_ROUNDS;
        // Once in force it stays, as a guest that is let go would have the next rounds undo what was won.
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
        let seconds = (view.remaining - view.enough).max(0.0) / spare + view.enough / view.bandwidth;
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
mod tests {
    use super::*;
    use crate::guest::Guest;

    fn view(guest: &Guest, remaining: f64, time_left: f64) -> View<'_> {
        View {
            clock: Duration::from_secs(10),
            remaining,
            bandwidth: 32_768.0,
            dirty_rate: 65_536.0,
            dirtied: 65_536.0,
            sent: 32_768.0,
            guest,
            classes: &[],
            unsent: 0.0,
            idle: 0.0,
            at_once: false,
            lead: 0.0,
            enough: 8192.0,
            free_time: 20.0,
            time_left,
            downtime: 0.3,
            most: 0.99,
            delaying: false,
        }
    }

    fn budget_for(remaining: f64, time_left: f64) -> f64 {
        let (guest, mut governor) = (Guest::default(), Governor::default());
        governor.round(&view(&guest, remaining, time_left), true, true);
        governor.budget().unwrap()
    }

    #[test]
    fn what_is_sent_soon_is_sent_in_one_round() {
        // 256 MiB in two seconds, of which 32 MiB may remain.
        let budget = budget_for(65_536.0, 10.0);
        assert!((budget * 2.0 - CAREFUL * 8192.0).abs() < 1.0, "{budget}");
        assert_eq!(
            budget_for(8192.0, 10.0),
            0.5 * 32_768.0,
            "but the link is never shared by more than halves"
        );
    }

    #[test]
    fn what_takes_long_is_spread_over_the_time_there_is() {
        // Ten seconds of sending in fifteen: a third of the link is left for the guest.
        let budget = budget_for(327_680.0, 15.0);
        let time = (327_680.0 - 8192.0) / (32_768.0 - budget);
        assert!((time - 15.0).abs() < 0.01, "{time}");
        assert_eq!(budget_for(327_680.0, 1000.0), 0.5 * 32_768.0);
        // With no time left it is one round.
        let budget = budget_for(327_680.0, -3.0);
        assert!((budget * 10.0 - CAREFUL * 8192.0).abs() < 1.0, "{budget}");
        // Not by its name: a guest is held to no less, however little time there is.
        assert_eq!(budget_for(1e9, 1.0), 500.0);
    }

    #[test]
    fn it_begins_when_it_is_needed_and_stays() {
        let (guest, mut governor) = (Guest::default(), Governor::default());
        governor.round(&view(&guest, 60_000.0, 10.0), true, false);
        assert_eq!(governor.budget(), None);
        governor.round(&view(&guest, 60_000.0, 10.0), true, true);
        governor.round(&view(&guest, 30_000.0, 10.0), true, false);
        assert!(governor.budget().is_some());
        assert!(governor.time_to_finish(&view(&guest, 30_000.0, 10.0)).is_some());
        governor.round(&view(&guest, 20_000.0, 10.0), false, true);
        assert_eq!((governor.budget(), governor.failed()), (None, false));
    }

    #[test]
    fn a_guest_that_it_does_not_hold_is_let_go() {
        let (guest, mut governor) = (Guest::default(), Governor::default());
        for _ in 0..4 {
            governor.round(&view(&guest, 60_000.0, 10.0), true, true);
        }
        assert_eq!((governor.budget(), governor.failed()), (None, true));
    }
}
