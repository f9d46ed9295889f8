//! How the guest is slowed down now, and how fast it is under that.
//!
//! Invariant: the CPU time that was consumed under one throttle is never counted under another; so
//! a sample is taken before each change.

use std::time::{Duration, Instant};

use super::speed::{Losses, Speed};
use crate::vm::{Brake, SourceVm, VmError};

/// Why a guest is not slowed down whose VMM has no [`Brake`].
const NO_BRAKE: &str = "this kind of machine cannot slow its guest down";

#[derive(Default)]
pub(super) struct Slowdown {
    /// The throttle in force.
    throttle: f64,
    /// The governor's rate in force.
    dirty_rate_limit: Option<f64>,
    speed: Speed,
    /// The guest's speed under the throttle in force, as last seen.
    guest_speed: Option<f64>,
}

impl Slowdown {
    /// Why the guest of `vm` cannot be governed; `None` if it can.
    pub(super) fn cannot_govern(vm: &mut dyn SourceVm) -> Option<String> {
        vm.brake().map_or_else(|| Some(NO_BRAKE.to_owned()), |brake| brake.cannot_govern())
    }

    /// The guest's speed since the last sample, which counts in [`Self::losses`].
    pub(super) fn sample(&mut self, vm: &mut dyn SourceVm) -> Option<f64> {
        let vcpu_time: Option<Duration> = vm.brake().and_then(|brake| brake.vcpu_time());
        let governed = self.dirty_rate_limit.is_some();
        let speed = self.speed.sample(Instant::now(), vcpu_time, self.throttle, governed);
        if speed.is_some() || !self.is_on() {
            self.guest_speed = speed;
        }
        speed
    }

    /// Throttles the vCPUs. When that fails they are not throttled at all.
    pub(super) fn throttle(&mut self, vm: &mut dyn SourceVm, share: f64) -> Result<(), VmError> {
        if share == self.throttle {
            return Ok(());
        }
        self.sample(vm);
        let throttled = brake(vm).and_then(|brake| brake.throttle(share));
        tracing::info!(share, failed = throttled.is_err(), "throttled");
        self.throttle = if throttled.is_ok() { share } else { 0.0 };
        throttled
    }

    /// Puts the governor's rate in force, or lets the guest write freely; which it does when that
    /// fails.
    pub(super) fn govern(
        &mut self,
        vm: &mut dyn SourceVm,
        dirty_rate_limit: Option<f64>,
    ) -> Result<(), VmError> {
        if dirty_rate_limit.is_none() && self.dirty_rate_limit.is_none() {
            return Ok(());
        }
        self.sample(vm);
        let governed = brake(vm).and_then(|brake| brake.govern(dirty_rate_limit));
        tracing::info!(?dirty_rate_limit, failed = governed.is_err(), "governed");
        self.dirty_rate_limit = if governed.is_ok() { dirty_rate_limit } else { None };
        governed
    }

    /// The guest stands still, and nothing slows it down any more.
    pub(super) fn guest_stopped(&mut self, vm: &mut dyn SourceVm) {
        self.sample(vm);
        (self.throttle, self.dirty_rate_limit, self.guest_speed) = (0.0, None, None);
    }

    /// Whether the guest is slowed down.
    pub(super) fn is_on(&self) -> bool {
        self.throttle != 0.0 || self.dirty_rate_limit.is_some()
    }

    /// The throttle in force.
    pub(super) fn share(&self) -> f64 {
        self.throttle
    }

    /// The governor's rate in force.
    pub(super) fn dirty_rate_limit(&self) -> Option<f64> {
        self.dirty_rate_limit
    }

    /// The guest's speed, as last seen.
    pub(super) fn guest_speed(&self) -> Option<f64> {
        self.guest_speed
    }

    /// What it took from the guest so far.
    pub(super) fn losses(&self) -> Losses {
        self.speed.losses()
    }
}

fn brake(vm: &mut dyn SourceVm) -> Result<&mut dyn Brake, VmError> {
    vm.brake().ok_or_else(|| NO_BRAKE.into())
}
