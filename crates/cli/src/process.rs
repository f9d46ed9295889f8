//! This process: its signals, its cost, its exit codes.

use std::process::ExitCode;
use std::time::Duration;

use godwit_engine::{Cancel, EngineError, Failure, Survivor};
use godwit_microvm::control::messages::Cost;
use rustix::time::{ClockId, clock_gettime};

/// The program that runs, even where its file was replaced (proc_pid_exe(5)).
pub(crate) const THIS_PROGRAM: &str = "/proc/self/exe";
/// It failed; the guest is where it was.
pub(crate) const FAILED: u8 = 1;
/// Wrong usage, as clap has it.
pub(crate) const USAGE: u8 = 2;
/// An operator is needed.
pub(crate) const OPERATOR: u8 = 3;
/// Cancelled; the guest is where it was.
pub(crate) const CANCELLED: u8 = 130;

/// A cancellation that Ctrl-C and SIGTERM ask for. Asking twice changes nothing: to clean up comes first.
pub(crate) fn cancel_on_signals() -> Cancel {
    let cancel = Cancel::default();
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        // Where a handler cannot be installed, the signal ends the process, and the kernel cleans up.
        let _ = signal_hook::flag::register(signal, cancel.flag());
    }
    cancel
}

/// The exit code that tells what became of the guest.
pub(crate) fn exit_code(failure: &Failure) -> ExitCode {
    ExitCode::from(match (&failure.cause, failure.survivor) {
        (_, Survivor::SourceStopped | Survivor::Unknown | Survivor::Destination) => OPERATOR,
        (EngineError::Cancelled, _) => CANCELLED,
        _ => FAILED,
    })
}

/// What this process has cost.
pub(crate) fn cost() -> Cost {
    Cost { cpu_ms: cpu_time().as_secs_f64() * 1e3, peak_rss_bytes: peak_rss() }
}

/// CPU time of all threads of this process so far.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// The most memory this process ever had resident, in bytes (`VmHWM` of proc(5)).
fn peak_rss() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}
