//! How a budget is divided among moves.
//!
//! Invariant: what is given is never more than there is, and nobody gets more than it can use.

use godwit_units::Rate;

/// What a move needs, and the most that it can use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// Below this it does not come to an end.
    pub need: Rate,
    /// Above this it is held by something else.
    pub most: Rate,
}

/// Of a budget this part is divided among all alike before anything else, so that no move starves.
const LEAST: f64 = 0.1;

/// Divides `budget`: first each gets what it needs (a tenth of an equal share at least), or all get
/// the same part of it; the rest goes to all alike, as far as they can use it.
///
/// ```
/// use godwit_fleet::{Claim, divide};
/// use godwit_units::Rate;
///
/// let rate = Rate::from_bytes_per_second;
/// let idle = Claim { need: Rate::ZERO, most: rate(1000.0) };
/// let busy = Claim { need: rate(60.0), ..idle };
/// assert_eq!(divide(rate(100.0), &[idle, busy]), [rate(22.0), rate(77.0)]);
/// ```
#[must_use]
pub fn divide(budget: Rate, claims: &[Claim]) -> Vec<Rate> {
    let budget = budget.bytes_per_second();
    let least = budget * LEAST / claims.len().max(1) as f64;
    let needs: Vec<f64> = claims
        .iter()
        .map(|claim| claim.need.bytes_per_second().max(least).min(claim.most.bytes_per_second()))
        .collect();
    let sum: f64 = needs.iter().sum();
    let part = if sum > budget { budget / sum } else { 1.0 };
    let mut given: Vec<f64> = needs.iter().map(|need| need * part).collect();
    let mut rest = (budget - given.iter().sum::<f64>()).max(0.0);
    // Those with the least left to use are filled first, so that what they leave is for the others.
    let mut order: Vec<usize> = (0..claims.len()).collect();
    let left = |at: usize, given: &[f64]| claims[at].most.bytes_per_second() - given[at];
    order.sort_by(|a, b| left(*a, &given).total_cmp(&left(*b, &given)));
    let mut others = order.len();
    for at in order {
        let more = (rest / others as f64).min(left(at, &given)).max(0.0);
        given[at] += more;
        rest -= more;
        others -= 1;
    }
    // Whole bytes, so that sums of floats cannot be above what there is.
    given.into_iter().map(|rate| Rate::from_bytes_per_second(rate.floor())).collect()
}
