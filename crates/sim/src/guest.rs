//! How busy the guest is at a time.

use crate::scenario::Phase;

/// The factor of all rates at `now` seconds.
pub(crate) fn factor(phases: &[Phase], now: f64) -> f64 {
    let cycle: f64 = phases.iter().map(|phase| phase.time.as_secs_f64()).sum();
    if cycle <= 0.0 {
        return 1.0;
    }
    let mut within = now % cycle;
    for phase in phases {
        let time = phase.time.as_secs_f64();
        if within < time {
            return phase.factor;
        }
        within -= time;
    }
    1.0
}
