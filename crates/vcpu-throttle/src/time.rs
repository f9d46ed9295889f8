//! How long threads have run, from /proc.

use std::time::Duration;

/// The processor time that the threads `tids` of process `pid` have used since they were started,
/// together. `None` when one of them is gone. The kernel brings the figure up to date at each tick
/// (1 to 10 ms) of a thread that runs.
#[must_use]
pub fn vcpu_time(pid: i32, tids: &[i32]) -> Option<Duration> {
    tids.iter().map(|&tid| thread_time(pid, tid)).sum()
}

/// The same of one thread.
pub(crate) fn thread_time(pid: i32, tid: i32) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).ok()?;
    // The first word is time on the CPU in nanoseconds (Documentation/scheduler/sched-stats.rst).
    text.split_ascii_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_threads_grows_and_that_of_none_is_unknown() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let before = vcpu_time(pid, &[pid]);
        assert!(before.is_some_and(|time| !time.is_zero()), "{before:?}");
        assert_eq!(vcpu_time(pid, &[]), Some(Duration::ZERO));
        assert_eq!(vcpu_time(pid, &[pid, 1]), None);
    }
}
