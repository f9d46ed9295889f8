//! Whether a guest leaves before all of its memory (post-copy).

use std::fmt;
use std::str::FromStr;

use crate::observe::Decision;

/// When the guest is to run at the destination before all of its pages are there (post-copy). It
/// does that only where what is left could not follow within the downtime limit.
///
/// ```
/// use godwit_policy::{Decision, Plan, PostCopy};
///
/// assert_eq!("after 2".parse(), Ok(PostCopy::After(2)));
/// assert_eq!("after:2".parse(), Ok(PostCopy::After(2)));
/// assert_eq!(PostCopy::OnTimeout.to_string(), "on-timeout");
/// assert!("later".parse::<PostCopy>().is_err());
///
/// let another = Decision::NextRound(Plan::default());
/// assert!(!PostCopy::After(2).leaves(0, &another, false));
/// assert!(PostCopy::After(2).leaves(1, &another, false));
/// assert!(!PostCopy::After(2).leaves(1, &another, true));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PostCopy {
    /// Only when the operator asks for it while it runs.
    #[default]
    Never,
    /// When it would be given up since it does not converge.
    OnTimeout,
    /// After so many rounds.
    After(u32),
    /// As soon as the destination has accepted: nothing is copied before.
    Now,
}

impl PostCopy {
    /// Whether the guest leaves behind `round`, counted from 0, of which the policy makes
    /// `decision`. Never where that is [`Decision::SwitchOver`], or where what is left `fits` into
    /// the downtime limit though another round is made of it: it then goes before.
    #[must_use]
    pub fn leaves(self, round: u32, decision: &Decision, fits: bool) -> bool {
        match (self, decision) {
            (_, Decision::SwitchOver) | (Self::Never, _) => false,
            _ if fits => false,
            (Self::OnTimeout, decision) => matches!(decision, Decision::GiveUp(_)),
            (Self::After(rounds), _) => round + 1 >= rounds,
            (Self::Now, _) => true,
        }
    }
}

impl fmt::Display for PostCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => f.pad("never"),
            Self::OnTimeout => f.pad("on-timeout"),
            Self::After(rounds) => f.pad(&format!("after {rounds}")),
            Self::Now => f.pad("now"),
        }
    }
}

impl FromStr for PostCopy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rounds = text.strip_prefix("after").and_then(|rest| {
            let rounds = rest.strip_prefix([' ', ':', '=', '-'])?;
            rounds.parse().ok()
        });
        match (text, rounds) {
            ("never", _) => Ok(Self::Never),
            ("on-timeout", _) => Ok(Self::OnTimeout),
            ("now", _) => Ok(Self::Now),
            (_, Some(rounds)) => Ok(Self::After(rounds)),
            _ => Err(format!("{text:?}: it must be never, on-timeout, now, or after and a count")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use godwit_units::Rate;

    use super::*;
    use crate::{Advice, Plan};

    #[test]
    fn a_guest_whose_rest_fits_does_not_leave_before_it() {
        let all = [PostCopy::Never, PostCopy::OnTimeout, PostCopy::After(1), PostCopy::Now];
        let leave = |decision| {
            // What fits goes before, whatever is made of it.
            assert_eq!(all.map(|when| when.leaves(0, &decision, true)), [false; 4]);
            all.map(|when| when.leaves(0, &decision, false))
        };
        assert_eq!(leave(Decision::SwitchOver), [false; 4]);
        assert_eq!(leave(Decision::NextRound(Plan::default())), [false, false, true, true]);
        let advice = Advice {
            best: Duration::ZERO,
            limit: Duration::ZERO,
            fixed: Duration::ZERO,
            dirty_rate: Rate::ZERO,
            bandwidth: Rate::ZERO,
            throttle: 0.0,
        };
        assert_eq!(leave(Decision::GiveUp(advice)), [false, true, true, true]);
    }
}
