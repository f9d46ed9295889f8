//! A move as a fluid: memory flows at the rate that it was given, less what the guest writes
//! meanwhile.

use godwit_units::Rate;

use crate::inventory::Vm;

/// Seconds of a move in which no memory flows: looking, connecting, handing over.
pub const SETUP: f64 = 0.5;
/// A guest that outruns its share is held to this part of it.
const HELD: f64 = 0.5;

/// Bytes a second by which what is left gets less at `rate`.
pub(crate) fn progress(vm: &Vm, rate: f64) -> f64 {
    rate - vm.dirty.bytes_per_second().min(rate * HELD)
}

/// How long `vm` takes at `rate`, in seconds.
pub(crate) fn expected_seconds(vm: &Vm, rate: Rate) -> f64 {
    SETUP + vm.data.0 as f64 / progress(vm, rate.bytes_per_second()).max(1.0)
}
