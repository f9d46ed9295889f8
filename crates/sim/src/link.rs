//! The link at a time.

use crate::scenario::LinkSpec;

/// Losses come and go in steps of this many seconds.
const STEP: f64 = 0.5;

/// For how many seconds from `now` on it carries as much as now.
pub(crate) fn steady(spec: &LinkSpec, now: f64) -> f64 {
    if spec.loss > 0.0 { STEP - now % STEP } else { f64::INFINITY }
}

/// Pages each second at `now`.
pub(crate) fn pages(spec: &LinkSpec, seed: u64, now: f64) -> f64 {
    let full = spec.bandwidth.bytes_per_second() / spec.page_bytes;
    if spec.loss <= 0.0 {
        return full;
    }
    let step = (now / STEP) as u64;
    let chance = crate::Rng::new(seed ^ step.wrapping_mul(0x5851_f42d_4c95_7f2d)).share();
    full * (1.0 - spec.loss * chance)
}
