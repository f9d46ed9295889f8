//! Whether what is left follows when the guest runs at the destination: what the operator wants,
//! whether it is possible, and when it is decided.

use std::path::PathBuf;
use std::time::Instant;

use godwit_bitmap::DirtyBitmap;
use godwit_policy::{Decision, PostCopy};
use godwit_protocol::source::{LastPages, State};
use godwit_units::{ByteCount, Rate, format_duration};
use godwit_wire::{Feature, Features};

use super::random::new_salt;
use super::{Source, Verify};
use crate::report::Stage;
use crate::{EngineError, limits, remainder};

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
            _ if common.is_none() => {
                return self.options.post_copy_safe.as_deref().map_or(Ok(()), remainder::check);
            }
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
        // An operator who asks for it wants it now.
        let asked = self.handle.wants_post_copy();
        let wanted = if asked { PostCopy::Now } else { self.options.post_copy };
        self.leaves = self.may_leave && wanted.leaves(round, decision, fits);
        self.leaves
    }

    /// Copies what is `missing` to where it can be had without this host, if that is wanted.
    pub(super) fn make_safe(&mut self, missing: &[DirtyBitmap]) -> Result<(), EngineError> {
        let Some(directory) = &self.options.post_copy_safe else { return Ok(()) };
        let ((session, secret, _), _) = self.session.known_by();
        let path = &remainder::place(directory, session);
        let salt = new_salt().map_err(EngineError::Random)?;
        let (handle, interrupt) = (self.handle, self.session.interrupt());
        let mut progress = handle.progress();
        let mut told = Instant::now();
        let report = &mut self.progress;
        remainder::write(path, (session, secret), salt, (&self.ram, missing), &mut |left| {
            if interrupt.is_raised() {
                return Err(EngineError::Interrupted);
            }
            if told.elapsed() >= limits::ALIVE
                && let Some(progress) = &mut progress
            {
                progress.elapsed += told.elapsed();
                told = Instant::now();
                (progress.stage, progress.round_ended) = (Stage::StopAndCopy, false);
                progress.remaining = left;
                handle.report(progress);
                report(progress);
            }
            Ok(())
        })
    }

    /// The copy of what was missing at the destination, where it may still be needed behind a
    /// migration that ended in `state`. Else it is removed.
    pub(super) fn safe_copy(&self, state: State) -> Option<PathBuf> {
        let ((session, ..), _) = self.session.known_by();
        let path = remainder::place(self.options.post_copy_safe.as_ref()?, session);
        if state.is_final() {
            remainder::remove(&path);
            return None;
        }
        path.exists().then_some(path)
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
