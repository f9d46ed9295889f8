//! Whether what is left follows when the guest runs at the destination: what the operator wants,
//! whether it is possible, and when it is decided.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use godwit_bitmap::DirtyBitmap;
use godwit_policy::{Decision, PostCopy};
use godwit_protocol::source::{LastPages, State};
use godwit_units::{ByteCount, format_duration};
use godwit_wire::{Feature, Features};

use super::random::new_salt;
use super::{Source, Verify};
use crate::remainder::{self, Mark};
use crate::report::{Progress, Stage};
use crate::{EngineError, limits, threads};

/// A guest that is held back is told that it could leave where it would be gone by that sooner by
/// so much: less is not worth the risk.
const WORTH: Duration = Duration::from_secs(5);

/// What post-copy would be like now, and would risk.
fn way(remaining: ByteCount, follows: Duration) -> String {
    format!(
        "(godwit switchover --postcopy): {remaining} of its memory would follow within {}, and it \
         is lost if one of both hosts ends meanwhile",
        format_duration(follows)
    )
}

/// How long what remains would take to follow a guest that copies and is connected.
fn follows(progress: &Progress) -> Option<Duration> {
    let copies = progress.stage == Stage::PreCopy && progress.severed.is_none();
    let bandwidth = progress.bandwidth.filter(|_| copies)?;
    bandwidth.time_for(progress.remaining)
}

/// `advice` for a guest that does not come to an end, with what post-copy would be like, where that
/// is possible.
pub(super) fn with_post_copy(progress: &Progress, advice: String) -> String {
    match follows(progress) {
        Some(time) => {
            format!("{advice}; or have it leave first {}", way(progress.remaining, time))
        }
        None => advice,
    }
}

/// What to say of a guest that is held back, and would be gone sooner by post-copy, where that is
/// possible; `before` is what was said of it last.
pub(super) fn could_leave(progress: &Progress, before: Option<String>) -> Option<String> {
    match progress.stage {
        // Over connections that are lost it cannot, and nobody holds it back.
        _ if progress.severed.is_some() => None,
        // Within a round what remains gets less, and the estimate stays.
        Stage::PreCopy if !progress.round_ended => before,
        Stage::PreCopy => could_leave_now(progress),
        _ => None,
    }
}

/// The same at the end of a round.
fn could_leave_now(progress: &Progress) -> Option<String> {
    let held = progress.throttle > 0.0 || progress.dirty_rate_limit.is_some();
    let still = progress.remaining_time.filter(|_| held)?.low;
    let follows = follows(progress)?;
    (follows + WORTH <= still).then(|| {
        let (still, way) = (format_duration(still), way(progress.remaining, follows));
        format!("the guest is held back for {still} more at least; it could leave {way}")
    })
}

/// A thread that writes a copy. When this is dropped before it has ended, it is to end, and nothing
/// of the copy is to stay; it is not waited for longer than a peer that does not listen.
struct Writing {
    path: PathBuf,
    left: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
    written: Receiver<Result<(), EngineError>>,
}

/// What is told how much is left to be written.
type GoOn<'a> = &'a mut dyn FnMut(ByteCount) -> Result<(), EngineError>;

impl Writing {
    /// Begins with `all` to be written to `path`.
    fn start(
        path: PathBuf,
        all: ByteCount,
        write: impl FnOnce(GoOn<'_>) -> Result<(), EngineError> + Send + 'static,
    ) -> Result<Self, EngineError> {
        let (left, ends) = (Arc::new(AtomicU64::new(all.0)), Arc::new(AtomicBool::new(false)));
        let (tell, written) = mpsc::channel();
        let to = path.clone();
        let (tells_left, is_to_end) = (Arc::clone(&left), Arc::clone(&ends));
        threads::start("copy", move || {
            let mut go_on = |more: ByteCount| {
                tells_left.store(more.0, Ordering::Relaxed);
                match is_to_end.load(Ordering::Relaxed) {
                    true => Err(EngineError::Cancelled),
                    false => Ok(()),
                }
            };
            let result = write(&mut go_on);
            if tell.send(result).is_err() {
                let _ = std::fs::remove_file(to);
            }
        })?;
        Ok(Self { path, left, ends, written })
    }

    /// What came of it, if it has ended within `time`.
    fn within(&self, time: Duration) -> Option<Result<(), EngineError>> {
        match self.written.recv_timeout(time) {
            Ok(written) => Some(written),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(EngineError::Panicked("copy"))),
        }
    }

    /// How much is left to be written.
    fn left(&self) -> ByteCount {
        ByteCount(self.left.load(Ordering::Relaxed))
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        // Nothing comes any more where it has ended.
        if let Ok(Ok(())) = self.written.recv_timeout(limits::ABORT) {
            remainder::remove(self.path.clone());
        }
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
        } else if self.options.post_copy_safe.is_some()
            && common.is_some_and(|common| !common.contains(Feature::PostCopySafe))
        {
            Some("the destination knows of no copy in a third place; leave out --postcopy-safe")
        } else {
            None
        };
        let wanted = self.options.post_copy;
        match why {
            Some(why) if wanted != PostCopy::Never => {
                return Err(EngineError::NoPostCopy(why.to_owned()));
            }
            _ => {}
        }
        if common.is_none() {
            return Ok(());
        }
        self.handle.post_copy_is(why.map(str::to_owned));
        self.may_leave = why.is_none();
        if wanted == PostCopy::Now {
            // Nothing stands against it, as was seen just now.
            let _ = self.handle.switch_over_by_post_copy();
        }
        Ok(())
    }

    /// Marks where the copy of what is missing is to be made, if one is wanted, for the destination
    /// to see that it is the same storage there.
    ///
    /// # Errors
    /// When none can be made.
    pub(super) fn mark_safe_place(&self) -> Result<Option<Mark>, EngineError> {
        let Some(directory) = &self.options.post_copy_safe else { return Ok(None) };
        let ((session, ..), _) = self.session.known_by();
        Mark::make(directory, session).map(Some)
    }

    /// Whether nothing of its memory is sent while the guest runs here: that it leaves at once was
    /// wanted from the start, and can be.
    pub(super) fn leaves_at_once(&self) -> bool {
        self.may_leave && self.options.post_copy == PostCopy::Now
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

    /// Copies what is `missing` to where it can be had without this host, if that is wanted. The
    /// guest stands still meanwhile, so storage that hangs is not waited for: a thread is.
    pub(super) fn make_safe(&mut self, missing: &[DirtyBitmap]) -> Result<(), EngineError> {
        let Some(directory) = &self.options.post_copy_safe else { return Ok(()) };
        let ((session, secret, _), _) = self.session.known_by();
        let path = remainder::place(directory, session);
        let salt = new_salt().map_err(EngineError::Random)?;
        let stalled = |time| EngineError::Remainder {
            path: path.clone(),
            why: format!("the storage has taken nothing for {}", format_duration(time)),
        };
        let (ram, missing, to) = (Arc::clone(&self.ram), missing.to_vec(), path.clone());
        let all = missing.iter().map(|pages| pages.count().bytes()).sum();
        let writing = Writing::start(path.clone(), all, move |go_on| {
            remainder::write(&to, (session, secret), salt, (&ram, &missing), go_on)
        })?;
        let mut progress = self.handle.progress();
        let (mut told, mut moved, mut left) = (Instant::now(), Instant::now(), writing.left());
        loop {
            if let Some(written) = writing.within(limits::TICK / 4) {
                self.copied = written.is_ok().then_some(path);
                return written;
            }
            if self.session.interrupt().is_raised() {
                return Err(EngineError::Interrupted);
            }
            if std::mem::replace(&mut left, writing.left()) != left {
                moved = Instant::now();
            }
            if moved.elapsed() >= limits::STORAGE {
                return Err(stalled(limits::STORAGE));
            }
            if let Some(progress) = progress.as_mut().filter(|_| told.elapsed() >= limits::ALIVE) {
                progress.elapsed += told.elapsed();
                told = Instant::now();
                (progress.stage, progress.round_ended) = (Stage::StopAndCopy, false);
                progress.remaining = left;
                self.handle.report(progress);
                (self.progress)(progress);
            }
        }
    }

    /// The copy of what was missing at the destination, where it may still be needed behind a
    /// migration that ended in `state`. Else it is removed.
    pub(super) fn safe_copy(&self, state: State) -> Option<PathBuf> {
        let path = self.copied.clone()?;
        if state.is_final() {
            remainder::remove(path);
            return None;
        }
        remainder::is_there(path.clone()).then_some(path)
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
    use crate::report::Severed;

    /// How a guest stands that is held back, with 256 MiB left at 128 MiB/s, where the end is so
    /// many seconds away.
    fn held_back(seconds: u64) -> Progress {
        let end = seconds * 1000;
        serde_json::from_value(serde_json::json!({
            "elapsed_ms": 0.0, "stage": "pre-copy", "round": 3, "round_ended": true,
            "sent_bytes": 0, "remaining_bytes": 256 << 20, "dirty_bytes_per_second": null,
            "bandwidth_bytes_per_second": 128 << 20, "throttle": 0.5, "guest_speed": null,
            "remaining_time": { "low_ms": end, "mid_ms": end * 2, "high_ms": end * 4 },
            "expected_downtime_ms": null, "delayed_segments": 0, "advice": null, "warning": null,
        }))
        .unwrap()
    }

    #[test]
    fn advice_tells_of_post_copy_where_that_can_be() {
        let stuck = held_back(0);
        let told = with_post_copy(&stuck, "quieten it".to_owned());
        assert!(told.starts_with("quieten it; or have it leave first"), "{told}");
        assert!(told.contains("256MiB of its memory would follow within 2s"), "{told}");
        let unknown = Progress { bandwidth: None, ..stuck.clone() };
        let over = Progress { stage: Stage::Handover, ..stuck };
        for progress in [unknown, over] {
            assert_eq!(with_post_copy(&progress, "quieten it".to_owned()), "quieten it");
        }
    }

    #[test]
    fn a_guest_that_is_held_back_for_longer_than_its_memory_would_take_could_leave() {
        // Mutations: the times are not compared; told of a guest that nobody slows.
        let told = could_leave_now(&held_back(7)).unwrap();
        assert!(told.contains("held back for 7s more at least; it could leave (godwit"), "{told}");
        assert!(told.contains("follow within 2s, and it is lost if one of both hosts"), "{told}");
        let governed = Progress { throttle: 0.0, dirty_rate_limit: Some(9.0), ..held_back(7) };
        assert!(could_leave_now(&governed).is_some());
        assert_eq!(could_leave_now(&held_back(6)), None, "no gain that is worth the risk");
        let free = Progress { throttle: 0.0, ..held_back(7) };
        let unknown = Progress { remaining_time: None, ..held_back(7) };
        for progress in [free, unknown] {
            assert_eq!(could_leave_now(&progress), None);
        }
    }

    #[test]
    fn what_was_said_of_it_holds_within_a_round_and_neither_without_a_link_nor_at_the_end() {
        // Mutations: it stays said while the connections are lost, or when the guest leaves.
        let before = Some("before".to_owned());
        let (since, left) = (Duration::ZERO, Duration::from_secs(60));
        let lost = Severed { since, left, attempts: 0, why: String::new() };
        let within = Progress { round_ended: false, ..held_back(7) };
        assert_eq!(could_leave(&within, before.clone()), before);
        assert!(could_leave(&held_back(7), None).is_some_and(|told| told.contains("held back")));
        assert_eq!(could_leave(&held_back(6), before.clone()), None);
        let severed = Progress { severed: Some(lost), ..within.clone() };
        let over = Progress { stage: Stage::Handover, ..within };
        for progress in [severed, over] {
            assert_eq!(could_leave(&progress, before.clone()), None);
        }
    }
}
