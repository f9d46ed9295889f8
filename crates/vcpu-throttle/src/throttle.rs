//! A throttle for the vCPU threads of another process, as its users see it.

use std::time::{Duration, Instant};

use crate::tracer::{Orders, Tracer};
use crate::{Slices, ThrottleError, vcpu_time};

/// Slows threads of another process. Nothing is traced while the share is 0; dropping it lets the
/// threads run free.
///
/// ```no_run
/// # fn main() -> Result<(), godwit_vcpu_throttle::ThrottleError> {
/// let mut throttle = godwit_vcpu_throttle::VcpuThrottle::new(4711, &[4715, 4716]);
/// throttle.set(0.5)?; // half of the time they stand still
/// throttle.set(0.0)?; // nobody traces them any more
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct VcpuThrottle {
    pid: i32,
    tids: Vec<i32>,
    slices: Option<Slices>,
    short: bool,
    tracer: Option<Tracer>,
    began: Began,
    last: Measures,
}

#[derive(Clone, Copy, Debug)]
struct Began {
    at: Instant,
    cpu: Option<Duration>,
}

/// What a throttle did, since it was put in force last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measures {
    /// How long it was in force.
    pub wall: Duration,
    /// How long the threads ran in that time, together (their `schedstat`). Unknown when one of
    /// them has ended.
    pub ran: Option<Duration>,
    /// How many threads there are.
    pub threads: usize,
    /// The longest time that they stood still at a stretch.
    pub longest_stop: Duration,
}

impl Measures {
    /// The share of the time in which the threads did run, 1 for all of it.
    #[must_use]
    pub fn ran_share(&self) -> Option<f64> {
        let all = self.wall.as_secs_f64() * self.threads as f64;
        self.ran.filter(|_| all > 0.0).map(|ran| ran.as_secs_f64() / all)
    }
}

impl VcpuThrottle {
    /// A throttle for the threads `tids` of process `pid`. Does nothing yet.
    #[must_use]
    pub fn new(pid: i32, tids: &[i32]) -> Self {
        let began = Began { at: Instant::now(), cpu: None };
        let mut throttle = Self {
            pid,
            tids: Vec::new(),
            slices: None,
            short: false,
            tracer: None,
            began,
            last: Measures::default(),
        };
        throttle.tids = each_once(tids);
        throttle
    }

    /// Keeps the threads from running for `share` of the time, from now on. With 0 they are let go:
    /// when this returns nobody traces them (one in an uninterruptible wait of the kernel is let go
    /// at its end).
    ///
    /// # Errors
    /// When it is no share (nothing changes then), when the threads may not or cannot be traced, or
    /// when throttling had failed since the last call. In all cases but the first, the threads run
    /// at full speed.
    pub fn set(&mut self, share: f64) -> Result<(), ThrottleError> {
        self.slices = Slices::of(share)?;
        self.apply()
    }

    /// Throttles the threads `tids` from now on, since vCPUs were plugged or unplugged.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn set_threads(&mut self, tids: &[i32]) -> Result<(), ThrottleError> {
        let tids = each_once(tids);
        if tids == self.tids {
            return Ok(());
        }
        self.tids = tids;
        self.began = Began { at: Instant::now(), cpu: vcpu_time(self.pid, &self.tids) };
        self.apply()
    }

    /// Uses [`Slices::short`] slices from now on, or no longer: while the VMM is waited for.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn set_short(&mut self, short: bool) -> Result<(), ThrottleError> {
        self.short = short;
        self.apply()
    }

    /// What it did, since it was put in force last.
    #[must_use]
    pub fn measures(&self) -> Measures {
        let Some(tracer) = &self.tracer else { return self.last };
        let now = vcpu_time(self.pid, &self.tids);
        Measures {
            wall: self.began.at.elapsed(),
            ran: self.began.cpu.zip(now).map(|(before, now)| now.saturating_sub(before)),
            threads: self.tids.len(),
            longest_stop: tracer.longest_stop(),
        }
    }

    fn apply(&mut self) -> Result<(), ThrottleError> {
        let slices = self.slices.map(|slices| if self.short { slices.short() } else { slices });
        let orders = Orders { slices, tids: self.tids.clone() };
        let result = match (&mut self.tracer, slices) {
            (None, None) => Ok(()),
            (Some(tracer), _) => tracer.order(orders),
            (None, Some(_)) => {
                self.began = Began { at: Instant::now(), cpu: vcpu_time(self.pid, &self.tids) };
                Tracer::start(self.pid, orders).map(|tracer| self.tracer = Some(tracer))
            }
        };
        if slices.is_none() || result.is_err() {
            self.last = self.measures();
            self.tracer = None;
        }
        if result.is_err() {
            self.slices = None;
        }
        result
    }
}

/// Several vCPUs may share one thread.
fn each_once(tids: &[i32]) -> Vec<i32> {
    let mut tids = tids.to_vec();
    tids.sort_unstable();
    tids.dedup();
    tids
}
