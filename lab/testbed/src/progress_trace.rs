//! The course of a guest's counter, and what a migration took from the guest. Pure: times come from
//! the caller.
//!
//! Keeps one promise: work is what the guest counted, wherever it ran. What it lost in some time is
//! what it would have counted in it at its rate before, less what it did.

use std::time::Duration;

/// Between two points of a course: the window in which the guest's speed is judged.
pub const WINDOW: Duration = Duration::from_millis(50);

/// How far the guest had counted, and when, about every [`WINDOW`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgressTrace {
    points: Vec<(Duration, u64)>,
}

/// What was taken from a guest in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// Work lost, as the time that it takes at the guest's rate before.
    pub work: Duration,
    /// How long the guest ran below half of that rate, window by window; time in which it stood
    /// still counts.
    pub under_half: Duration,
    /// And below a tenth.
    pub under_tenth: Duration,
}

impl ProgressTrace {
    /// The guest had counted to `count` at `at`. Points closer than [`WINDOW`] to the last are
    /// passed over.
    pub(crate) fn note(&mut self, at: Duration, count: u64) {
        let due = self.points.last().is_none_or(|(last, _)| at >= *last + WINDOW);
        if due {
            self.points.push((at, self.points.last().map_or(count, |(_, last)| count.max(*last))));
        }
    }

    /// The count at `at`, by a straight line between points; beyond the ends that of the end.
    fn count_at(&self, at: Duration) -> f64 {
        let next = self.points.partition_point(|(time, _)| *time <= at);
        match (next.checked_sub(1).map(|last| self.points[last]), self.points.get(next)) {
            (Some((t0, c0)), Some(&(t1, c1))) => {
                c0 as f64
                    + (c1 - c0) as f64
                        * ((at - t0).as_secs_f64() / (t1 - t0).as_secs_f64().max(1e-9))
            }
            (Some((_, count)), None) => count as f64,
            (None, Some(&(_, count))) => count as f64,
            (None, None) => 0.0,
        }
    }

    /// What the guest counted each second between two moments.
    #[must_use]
    pub fn rate(&self, from: Duration, to: Duration) -> f64 {
        (self.count_at(to) - self.count_at(from)) / to.saturating_sub(from).as_secs_f64().max(1e-9)
    }

    /// What the guest lost between two moments against the rate `before`.
    #[must_use]
    pub fn loss(&self, from: Duration, to: Duration, before: f64) -> Loss {
        let mut loss = Loss::default();
        let time = to.saturating_sub(from).as_secs_f64();
        let lost = time - (self.count_at(to) - self.count_at(from)) / before.max(1e-9);
        loss.work = Duration::from_secs_f64(lost.max(0.0));
        for pair in self.points.windows(2) {
            let ((t0, c0), (t1, c1)) = (pair[0], pair[1]);
            let inside = t1.min(to).saturating_sub(t0.max(from));
            let speed = (c1 - c0) as f64 / (t1 - t0).as_secs_f64().max(1e-9) / before.max(1e-9);
            if speed < 0.5 {
                loss.under_half += inside;
            }
            if speed < 0.1 {
                loss.under_tenth += inside;
            }
        }
        loss
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn work_lost_is_what_was_not_counted() {
        let mut trace = ProgressTrace::default();
        // A second at full speed, one at a quarter, one at a twentieth.
        for at in (0..=3000).step_by(10) {
            let count = at.min(1000) * 100 + at.clamp(1000, 2000) * 25 - 25_000
                + at.clamp(2000, 3000) * 5
                - 10_000;
            trace.note(ms(at), count);
        }

        let before = trace.rate(ms(0), ms(1000));
        let loss = trace.loss(ms(500), ms(3000), before);

        assert!((before - 100_000.0).abs() < 1.0, "{before}");
        assert!((loss.work.as_secs_f64() - 1.7).abs() < 0.01, "{loss:?}");
        assert_eq!((loss.under_half, loss.under_tenth), (ms(2000), ms(1000)));
    }

    #[test]
    fn a_count_that_was_read_from_an_older_copy_is_no_step_back() {
        let mut trace = ProgressTrace::default();
        trace.note(ms(0), 100);
        trace.note(ms(60), 40);
        trace.note(ms(120), 220);
        assert_eq!(trace.rate(ms(0), ms(120)), 1000.0);
    }
}
