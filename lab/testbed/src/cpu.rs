//! Processor time and memory of processes, from /proc.
//!
//! Keeps one promise: threads that ended count too. The kernel adds their time to the process's
//! total (proc(5), `stat`), so what was not spent on virtual processors is that total less the time
//! of the threads that emulate them.

use std::ops::Sub;
use std::time::Duration;

use anyhow::Context;
use godwit_units::ByteCount;
use procfs::process::Process;

/// Processor time of a QEMU, divided by who used it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CpuTime {
    /// Threads that run virtual processors.
    pub vcpus: Duration,
    /// All other threads: main loop, migration, channels, also those that ended.
    pub others: Duration,
}

impl Sub for CpuTime {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            vcpus: self.vcpus.saturating_sub(earlier.vcpus),
            others: self.others.saturating_sub(earlier.others),
        }
    }
}

impl CpuTime {
    /// What the process `pid` has used, of which the threads `vcpus` are virtual processors. To 10
    /// ms.
    ///
    /// # Errors
    /// When there is no such process, or no such thread.
    pub fn of(pid: i32, vcpus: &[i32]) -> anyhow::Result<Self> {
        let gone = || format!("process {pid} is gone");
        let process = Process::new(pid).with_context(gone)?;
        let mut of_vcpus = Duration::ZERO;
        for &tid in vcpus {
            let schedstat =
                process.task_from_tid(tid).and_then(|task| task.schedstat()).with_context(gone)?;
            of_vcpus += Duration::from_nanos(schedstat.sum_exec_runtime);
        }
        // The total last: what runs meanwhile then counts as others' work rather than disappearing.
        let stat = process.stat().with_context(gone)?;
        let ticks = stat.utime + stat.stime;
        let total = Duration::from_secs_f64(ticks as f64 / procfs::ticks_per_second() as f64);
        Ok(Self { vcpus: of_vcpus, others: total.saturating_sub(of_vcpus) })
    }
}

/// The most memory that the process `pid` ever had resident (`VmHWM`).
///
/// # Errors
/// When there is no such process.
pub fn peak_rss(pid: i32) -> anyhow::Result<ByteCount> {
    let status =
        Process::new(pid).and_then(|process| process.status()).context("the process is gone")?;
    let kib = status.vmhwm.context("the process has no memory: it has ended")?;
    Ok(ByteCount(kib * 1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_used_something() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let started = std::time::Instant::now();
        while started.elapsed() < Duration::from_millis(50) {}
        let used = CpuTime::of(pid, &[]).unwrap();
        assert!(used.others > Duration::ZERO && used.vcpus.is_zero(), "{used:?}");
        assert!(peak_rss(pid).unwrap() > ByteCount(1 << 20));
    }
}
