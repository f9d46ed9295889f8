//! What makes a migration converge: the policy, what it looks at (dirty pages, the guest's speed,
//! the link), and what it has put in force (throttle, governor, disk limit, delayed segments, the
//! share of memory).
//!
//! Invariant: what is reported is what is in force. What cannot be put in force is taken back in
//! the settings too, and the operator is warned.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_memory::RamBlock;
use godwit_policy::{Decision, Estimate, Plan, Policy, Round, Settings, ThrottleMode, Tick};
use godwit_track::DirtyTracker;
use godwit_units::PageCount;

use super::disks::Disks;
use super::lanes::Lanes;
use super::link_share::LinkShare;
use super::meter::Meter;
use super::segment_table::SegmentTable;
use super::slowdown::Slowdown;
use super::speed::Losses;
use super::verification::Cost;
use crate::EngineError;
use crate::handle::MigrationHandle;
use crate::report::{Progress, RoundMeasures, Stage};
use crate::vm::SourceVm;

/// Turns of the conversation while the guest is stopped: the device state and READY, COMMIT and
/// Running.
const TURNS: u32 = 2;
/// Of the time between two looks, the part that a look may take: with much memory they come less
/// often.
const LOOK_SHARE: u32 = 20;

/// Whether the guest's writes may be governed, whatever the machine can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Governs {
    Can,
    /// Why not. Without fingerprints a segment that changes hands would be sent again.
    Cannot(&'static str),
    /// There is no need, of which nobody is told.
    NeedNot,
}

pub(super) struct Convergence {
    policy: Policy,
    handle: MigrationHandle,
    segments: Arc<SegmentTable>,
    tracker: Arc<dyn DirtyTracker>,
    link_share: Arc<LinkShare>,
    slowdown: Slowdown,
    /// Whether the policy may use a governor.
    can_govern: bool,
    verification: Cost,
    /// Dirty pages as last seen.
    remaining: PageCount,
    next_look: Instant,
    estimate: Option<Estimate>,
    /// What the operator should know and is no reason to stop.
    warning: Option<String>,
    /// Whether both machines were ready in the last round.
    was_prepared: bool,
}

impl Convergence {
    /// Of a migration whose segments and `tracker` are ready, with so many pages to be sent.
    pub(super) fn new(
        handle: &MigrationHandle,
        settings: Settings,
        (segments, tracker): (&Arc<SegmentTable>, &Arc<dyn DirtyTracker>),
        lanes: &Lanes,
        verification: Cost,
        remaining: PageCount,
    ) -> Self {
        Self {
            policy: Policy::new(settings),
            handle: handle.clone(),
            segments: Arc::clone(segments),
            tracker: Arc::clone(tracker),
            link_share: Arc::clone(lanes.link_share()),
            slowdown: Slowdown::default(),
            can_govern: false,
            verification,
            remaining,
            next_look: Instant::now(),
            estimate: None,
            warning: lanes.lacks_codec(),
            was_prepared: false,
        }
    }

    /// Puts the first plan in force.
    pub(super) fn begin(&mut self, vm: &mut dyn SourceVm, disks: &mut Disks, governs: Governs) {
        let refusal = match governs {
            Governs::Can => Slowdown::cannot_govern(vm),
            Governs::Cannot(why) => Some(why.to_owned()),
            Governs::NeedNot => None,
        };
        self.can_govern = governs == Governs::Can && refusal.is_none() && vm.was_running();
        if let (Some(why), ThrottleMode::Governor) = (refusal, self.policy.settings().throttle) {
            self.fall_back(&why);
        }
        let plan = self.policy.start(!disks.is_empty());
        self.enforce(&plan, vm, disks);
    }

    /// The guest cannot be governed: it is throttled instead, if the operator did not forbid it.
    fn fall_back(&mut self, why: &str) {
        self.can_govern = false;
        self.warning = Some(format!(
            "the guest's writes cannot be governed: {why}; its vCPUs are throttled instead"
        ));
        if self.policy.settings().throttle == ThrottleMode::Governor {
            self.policy.change(self.handle.fall_back(ThrottleMode::Adaptive));
        }
    }

    /// Puts `plan` in force.
    pub(super) fn enforce(&mut self, plan: &Plan, vm: &mut dyn SourceVm, disks: &mut Disks) {
        self.segments.delay(plan.delayed.clone());
        self.link_share.set_share(plan.memory_share);
        if let Err(error) = disks.limit_writes(vm, plan.disk_limit) {
            self.warning = Some(format!("disk writes cannot be limited: {error}"));
        }
        if !vm.was_running() {
            return;
        }
        if let Err(error) = self.slowdown.govern(vm, plan.dirty_rate_limit) {
            self.fall_back(&error.to_string());
        }
        if let Err(error) = self.slowdown.throttle(vm, plan.throttle) {
            // The guest runs free; without a throttle the policy may still find a way, or gives up
            // and says why.
            self.warning = Some(format!("the guest cannot be throttled: {error}"));
            self.policy.change(self.handle.fall_back(ThrottleMode::Off));
        }
    }

    /// The connections are lost: the guest runs free until they stand again.
    pub(super) fn let_go(&mut self, vm: &mut dyn SourceVm, disks: &mut Disks) {
        if let Err(error) = disks.limit_writes(vm, None) {
            self.warning = Some(format!("the limit of disk writes cannot be lifted: {error}"));
        }
        let freed = self.slowdown.govern(vm, None);
        if let Err(error) = freed.and_then(|()| self.slowdown.throttle(vm, 0.0)) {
            self.warning = Some(format!("the guest cannot be let run free: {error}"));
        }
    }

    /// They stand again: what was in force is so again. A round was cut off after `in_round`, if
    /// one was.
    pub(super) fn take_up(
        &mut self,
        vm: &mut dyn SourceVm,
        disks: &mut Disks,
        in_round: Option<Duration>,
    ) -> Result<(), EngineError> {
        let look = self.segments.look(self.tracker.as_ref())?;
        self.remaining = look.remaining;
        self.policy.taken_up(in_round.unwrap_or_default(), &look.dirty);
        let plan = self.policy.plan().clone();
        self.enforce(&plan, vm, disks);
        Ok(())
    }

    /// Puts in force what the operator changed since the last call.
    fn take_changes(&mut self, vm: &mut dyn SourceVm, disks: &mut Disks, lanes: &Lanes) {
        let Some((settings, own)) = self.handle.take_changes() else { return };
        if lanes.set(&own) {
            self.warning = lanes.lacks_codec().or(self.warning.take());
        }
        let plan = self.policy.change(settings);
        self.enforce(&plan, vm, disks);
    }

    /// The guest is about to be stopped: nothing can be changed any more.
    pub(super) fn close(&mut self, vm: &mut dyn SourceVm, disks: &mut Disks, lanes: &Lanes) {
        self.handle.close();
        // What was taken until just now: a limit of bandwidth still matters.
        self.take_changes(vm, disks, lanes);
    }

    /// Whether the operator wants the switchover now.
    pub(super) fn is_hurried(&self) -> bool {
        self.handle.wants_switch_over()
    }

    /// Whether the guest is held back.
    pub(super) fn holds_back(&self) -> bool {
        self.slowdown.is_on()
    }

    /// Within a round: takes in what the operator changed, and lets the policy look.
    pub(super) fn tick(
        &mut self,
        vm: &mut dyn SourceVm,
        disks: &mut Disks,
        lanes: &mut Lanes,
        meter: &Meter,
    ) -> Result<(), EngineError> {
        self.take_changes(vm, disks, lanes);
        lanes.look_at_idle();
        if self.is_hurried() {
            self.segments.hurry(true);
        }
        if let Some(vm) = vm.moving_disks() {
            disks.tick(vm).map_err(EngineError::Vm)?;
        }
        let guest_speed = self.slowdown.sample(vm);
        let now = Instant::now();
        if now < self.next_look {
            return Ok(());
        }
        let look = self.segments.look(self.tracker.as_ref())?;
        self.next_look = now + (now.elapsed() * LOOK_SHARE).max(meter.tick());
        self.remaining = look.remaining;
        let plan = self.policy.tick(&Tick {
            in_round: meter.in_round(),
            sent: meter.sent_in_round(lanes.sent()),
            remaining: look.remaining,
            dirty: &look.dirty,
            throttle: self.slowdown.share(),
            guest_speed,
            can_govern: self.can_govern,
        });
        if let Some(plan) = plan {
            self.enforce(&plan, vm, disks);
        }
        Ok(())
    }

    /// What the policy makes of `round`, in which it fills in what remains. `prepared`: both
    /// machines are ready for the switchover.
    pub(super) fn judge(
        &mut self,
        vm: &mut dyn SourceVm,
        (disks, lanes): (&mut Disks, &Lanes),
        meter: &Meter,
        round: &mut RoundMeasures,
        prepared: bool,
    ) -> Result<Decision, EngineError> {
        self.take_changes(vm, disks, lanes);
        let guest_speed = self.slowdown.sample(vm);
        let ram = vm.ram();
        let verification = self.verification.expected(&ram)?;
        let look_began = Instant::now();
        let look = self.segments.look(self.tracker.as_ref())?;
        let look_time = look_began.elapsed();
        let last_look = self.segments.last_look(look.spent, lanes.memory());
        let costs = vm.switchover_costs();
        let bandwidth = self.estimate.as_ref().map(|estimate| estimate.bandwidth);
        let carried = bandwidth.and_then(|rate| rate.time_for(costs.bytes)).unwrap_or_default();
        let state = costs.state + carried;
        let fixed = last_look + state + meter.flush() + meter.round_trip() * TURNS;
        // Nobody waits for a guest that does not run: what more rounds would not make less is
        // foretold, and not held against its limit.
        let (fixed, foretold) = match vm.was_running() {
            true => (fixed, verification),
            false => (Duration::ZERO, verification + fixed),
        };
        // That they got ready comes once, before this round: no further one waits for it, nor has
        // to send what was written meanwhile.
        let got_ready = prepared && !self.was_prepared;
        self.was_prepared = prepared;
        let (gap, began_with) = match got_ready {
            true => (look_time, round.data + round.unchanged),
            false => (look_time.max(meter.gap()), PageCount::default()),
        };
        // Once both machines are ready nothing lies between.
        let prepare = if prepared { Duration::ZERO } else { meter.round_trip() };
        round.remaining = look.remaining;
        let disk = match vm.moving_disks() {
            Some(vm) => Some(disks.end_round(vm, round).map_err(EngineError::Vm)?),
            None => None,
        };
        let (decision, estimate) = self.policy.round(&Round {
            time: round.time + meter.gap(),
            idle: meter.idle(),
            // What comes before the next round is mostly this look, and what else it was the last
            // time.
            gap,
            sent: round.sent,
            pages: round.data,
            remaining: look.remaining,
            began_with,
            fixed,
            lead: look_time + costs.lead + prepare,
            round_trip: meter.round_trip(),
            verification: foretold,
            memory: ram.iter().map(RamBlock::pages).sum(),
            dirty: &look.dirty,
            throttle: self.slowdown.share(),
            guest_speed,
            can_govern: self.can_govern,
            disk,
            ..Round::default()
        });
        tracing::debug!(?fixed, round_trip = ?meter.round_trip(), ?estimate, "judged");
        self.estimate = Some(estimate);
        self.handle.limit_has_grown(self.policy.limit_steps());
        self.remaining = look.remaining;
        Ok(decision)
    }

    /// Whether what remains could be sent within the downtime limit, as far as that is known.
    pub(super) fn fits_into_limit(&self) -> bool {
        let expected = self.estimate.as_ref().and_then(|estimate| estimate.expected_downtime);
        expected.is_some_and(|expected| expected <= self.handle.limit())
    }

    /// Whether so little remains that both machines may get ready, though the policy still makes
    /// rounds in search of less downtime.
    pub(super) fn is_near(&self) -> bool {
        self.estimate.as_ref().is_some_and(Estimate::is_near)
    }

    /// The guest stands still.
    pub(super) fn guest_stopped(&mut self, vm: &mut dyn SourceVm) {
        self.slowdown.guest_stopped(vm);
    }

    /// What is in force at the end of a round.
    pub(super) fn end_round(&self, round: &mut RoundMeasures) {
        round.throttle = self.slowdown.share();
        round.memory_share = self.link_share.share();
    }

    /// What it took from the guest.
    pub(super) fn losses(&self) -> Losses {
        self.slowdown.losses()
    }

    /// How the migration stands.
    pub(super) fn progress(
        &self,
        (stage, round, round_ended): (Stage, u32, bool),
        meter: &Meter,
        disks: &Disks,
        lanes: &Lanes,
    ) -> Progress {
        let estimate = self.estimate.as_ref();
        Progress {
            elapsed: meter.elapsed(),
            stage,
            round,
            round_ended,
            sent: lanes.sent(),
            remaining: self.remaining.bytes(),
            dirty_rate: estimate.map(|estimate| estimate.dirty_rate),
            bandwidth: estimate.map(|estimate| estimate.bandwidth),
            expected_downtime: estimate.and_then(|estimate| estimate.expected_downtime),
            remaining_time: estimate.and_then(|estimate| estimate.remaining_time).map(Into::into),
            throttle: self.slowdown.share(),
            dirty_rate_limit: self.slowdown.dirty_rate_limit(),
            guest_speed: self.slowdown.guest_speed(),
            disks: disks.progress(),
            memory_share: self.link_share.share(),
            disk_limit: disks.limit(),
            delayed_segments: self.segments.delayed(),
            advice: estimate.and_then(|estimate| estimate.advice.as_ref()).map(ToString::to_string),
            warning: self.warning.clone(),
            severed: None,
        }
    }
}
