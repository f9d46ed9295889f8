//! How fast the guest is, as far as its vCPUs' CPU time tells, and what the migration took from it.
//!
//! A guest that computes consumes CPU time in proportion to its speed. Its speed is therefore the
//! CPU time of its vCPUs in an interval against that in an equally long interval without a
//! throttle. Of a guest that mostly sleeps this says nothing, and then only the throttle counts.

use std::time::{Duration, Instant};

/// A guest that consumes less of one processor than this sleeps too much to be measured.
const BUSY: f64 = 0.2;
/// Intervals shorter than this are joined with the next: CPU time of a running thread is known to a
/// tick.
const SHORTEST: Duration = Duration::from_millis(50);

/// What the throttle took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Losses {
    /// How long a throttle was in force.
    pub(super) throttled: Duration,
    /// Guest time lost: one minus speed, summed up over that time.
    pub(super) lost: Duration,
    /// How long the guest ran under 50 % of its speed.
    pub(super) under_half: Duration,
    /// How long it ran under 10 %.
    pub(super) under_tenth: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Speed {
    last: Option<(Instant, Option<Duration>)>,
    /// Wall-clock and CPU seconds without a throttle.
    free: (f64, f64),
    losses: Losses,
}

impl Speed {
    /// Takes in the vCPUs' time at `now`, and the throttle that was in force since the last call,
    /// or whether the guest was governed. Returns the guest's speed in between as a share of that
    /// without either, if it can be seen.
    pub(super) fn sample(
        &mut self,
        now: Instant,
        vcpu_time: Option<Duration>,
        throttle: f64,
        governed: bool,
    ) -> Option<f64> {
        let free = throttle == 0.0 && !governed;
        let Some((before, cpu_before)) = self.last else {
            self.last = Some((now, vcpu_time));
            return None;
        };
        let time = now.saturating_duration_since(before);
        if time < SHORTEST && free {
            return None;
        }
        self.last = Some((now, vcpu_time));
        let cpu =
            vcpu_time.zip(cpu_before).map(|(now, before)| now.saturating_sub(before).as_secs_f64());
        if free {
            if let Some(cpu) = cpu {
                self.free.0 += time.as_secs_f64();
                self.free.1 += cpu;
            }
            return None;
        }
        let usual = self.free.1 / self.free.0.max(1e-6);
        let seen =
            cpu.filter(|_| usual > BUSY).map(|cpu| cpu / time.as_secs_f64().max(1e-6) / usual);
        let seen = seen.map(|speed| speed.clamp(0.0, 1.0));
        let speed = seen.unwrap_or(1.0 - throttle);
        self.losses.throttled += time;
        self.losses.lost += time.mul_f64(1.0 - speed);
        if speed < 0.5 {
            self.losses.under_half += time;
        }
        if speed < 0.1 {
            self.losses.under_tenth += time;
        }
        seen
    }

    pub(super) fn losses(&self) -> Losses {
        self.losses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(100);

    #[test]
    fn a_busy_guest_is_measured_by_its_vcpus() {
        let mut speed = Speed::default();
        let (mut now, mut cpu) = (Instant::now(), Duration::ZERO);
        let mut go = |speed: &mut Speed, share: f64, throttle: f64| {
            now += TICK;
            cpu += TICK.mul_f64(share);
            speed.sample(now, Some(cpu), throttle, false)
        };
        for _ in 0..10 {
            assert_eq!(go(&mut speed, 0.8, 0.0), None);
        }
        // The throttle asked for 95 %, but a tenth of the time they ran: an eighth of their speed.
        let seen = go(&mut speed, 0.1, 0.95).unwrap();
        assert!((seen - 0.125).abs() < 1e-6, "{seen}");
        go(&mut speed, 0.04, 0.95);
        let losses = speed.losses();
        assert_eq!(losses.throttled, TICK * 2);
        assert_eq!(losses.under_half, TICK * 2);
        assert_eq!(losses.under_tenth, TICK);
        assert!((losses.lost.as_secs_f64() - 0.1825).abs() < 1e-6, "{losses:?}");
    }

    #[test]
    fn of_a_guest_that_sleeps_only_the_throttle_is_known() {
        let mut speed = Speed::default();
        let now = Instant::now();
        speed.sample(now, None, 0.0, false);
        assert_eq!(speed.sample(now + TICK, None, 0.0, false), None);
        assert_eq!(speed.sample(now + TICK * 2, None, 0.6, false), None);
        assert_eq!(speed.losses().under_half, TICK);
        assert_eq!(speed.losses().lost, TICK.mul_f64(0.6));
    }
}
