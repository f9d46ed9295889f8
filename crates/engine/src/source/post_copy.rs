//! Whether what is left follows when the guest runs at the destination: what the operator wants,
//! whether it is possible, and when it is decided.

use std::fmt;
use std::str::FromStr;

use godwit_policy::Decision;
use godwit_protocol::source::LastPages;
use godwit_units::{ByteCount, Rate, format_duration};
use godwit_wire::{Feature, Features};

use super::{Source, Verify};
use crate::EngineError;

/// When the guest is to run at the destination before all of its pages are there (post-copy). It
/// does that only where what is left could not follow within the downtime limit.
///
/// ```
/// use godwit_engine::source::PostCopy;
///
/// assert_eq!("after 2".parse(), Ok(PostCopy::After(2)));
/// assert_eq!("after:2".parse(), Ok(PostCopy::After(2)));
/// assert_eq!(PostCopy::OnTimeout.to_string(), "on-timeout");
/// assert!("later".parse::<PostCopy>().is_err());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PostCopy {
    /// Only when the operator asks for it
    /// ([`switch_over_by_post_copy`](crate::handle::MigrationHandle::switch_over_by_post_copy)).
    #[default]
    Never,
    /// When it would be given up since it does not converge.
    OnTimeout,
    /// After so many rounds.
    After(u32),
    /// As soon as the destination has accepted: nothing is copied before.
    Now,
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

/// `advice` for a guest that does not come to an end, with what post-copy would be like and would
/// risk, where it is `possible`: what remains follows by this bandwidth.
pub(super) fn with_post_copy(
    advice: String,
    possible: bool,
    (remaining, bandwidth): (ByteCount, Option<Rate>),
) -> String {
    match bandwidth.and_then(|bandwidth| bandwidth.time_for(remaining)) {
        Some(time) if possible => format!(
            "{advice}; or have it leave first (godwit switchover --postcopy): {remaining} of its \
             memory would follow within {}, and it is lost if one of both hosts ends meanwhile",
            format_duration(time)
        ),
        _ => advice,
    }
}

impl Source<'_> {
    /// Finds out whether what is left can follow, given what both sides have, as soon as that is
    /// known.
    ///
    /// # Errors
    /// When it is wanted and cannot.
    pub(super) fn allow_post_copy(&mut self, common: Option<Features>) -> Result<(), EngineError> {
        let lacks = common.is_some_and(|common| !common.contains(Feature::PostCopy));
        let why = if self.options.verify != Verify::No {
            Some("what follows when the guest runs cannot be compared before; leave out --verify")
        } else if self.options.reconnect.is_zero() {
            Some("connections that are lost meanwhile must be made again; leave out --reconnect 0s")
        } else if self.vm.moving_disks().is_some_and(|vm| !vm.disks().is_empty()) {
            Some("disks move along, for which the guest would stand still; leave out --disks")
        } else if !self.vm.was_running() {
            Some("the guest is stopped, and can be moved as it is")
        } else if lacks {
            let words = "the destination does not have it for this VM; --postcopy on-timeout from \
                         the start says why";
            Some(words)
        } else {
            None
        };
        let wanted = self.options.post_copy;
        match why {
            Some(why) if wanted != PostCopy::Never => {
                return Err(EngineError::NoPostCopy(why.to_owned()));
            }
            _ if common.is_none() => return Ok(()),
            _ => self.handle.post_copy_is(why.map(str::to_owned)),
        }
        self.may_leave = why.is_none();
        if wanted == PostCopy::Now {
            // Nothing stands against it, as was seen just now.
            let _ = self.handle.switch_over_by_post_copy();
        }
        Ok(())
    }

    /// Whether what is left follows, behind `round`, of which the policy makes `decision`: not
    /// where it `fits` into the downtime limit.
    pub(super) fn decide_post_copy(&mut self, round: u32, decision: &Decision, fits: bool) -> bool {
        let wanted = match self.options.post_copy {
            PostCopy::After(rounds) => round + 1 >= rounds,
            PostCopy::OnTimeout => matches!(decision, Decision::GiveUp(_)),
            PostCopy::Never | PostCopy::Now => false,
        };
        let wanted = wanted || self.handle.wants_post_copy();
        let fits = fits || matches!(decision, Decision::SwitchOver);
        self.leaves = self.may_leave && wanted && !fits;
        self.leaves
    }

    /// How the last pages go over.
    pub(super) fn last_pages(&self) -> LastPages {
        if self.leaves {
            LastPages::Left
        } else {
            LastPages::sent(self.options.verify != Verify::No)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_tells_of_post_copy_where_that_can_be() {
        let left = (ByteCount(256 << 20), Some(Rate::from_bytes_per_second(128.0 * 1_048_576.0)));
        let told = with_post_copy("quieten it".to_owned(), true, left);
        assert!(told.starts_with("quieten it; or have it leave first"), "{told}");
        assert!(told.contains("256MiB of its memory would follow within 2s"), "{told}");
        for (possible, bandwidth) in [(false, left.1), (true, None)] {
            let told = with_post_copy("quieten it".to_owned(), possible, (left.0, bandwidth));
            assert_eq!(told, "quieten it");
        }
    }
}
