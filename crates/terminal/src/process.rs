//! This process: its signals, its cost, its exit codes.

use std::process::ExitCode;
use std::time::Duration;

use godwit_control::messages::Cost;
use godwit_engine::{Cancel, EngineError, Failure, Survivor};
use rustix::time::{ClockId, clock_gettime};

/// The program that runs, even where its file was replaced (proc_pid_exe(5)).
pub const THIS_PROGRAM: &str = "/proc/self/exe";
/// It failed; the guest is where it was.
pub const FAILED: u8 = 1;
/// Wrong usage, as clap has it.
pub const USAGE: u8 = 2;
/// An operator is needed.
pub const OPERATOR: u8 = 3;
/// Cancelled; the guest is where it was.
pub const CANCELLED: u8 = 130;

/// A cancellation that Ctrl-C and SIGTERM ask for. Asking twice changes nothing: to clean up comes
/// first. A signal that whoever started this process had it ignore stays ignored: SIGHUP under
/// nohup(1), SIGINT in the background of a script.
pub fn cancel_on_signals() -> Cancel {
    let cancel = Cancel::default();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let signals =
        [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
    for signal in signals.into_iter().filter(|signal| !is_ignored(&status, *signal)) {
        // Where a handler cannot be installed, the signal ends the process, and the kernel cleans
        // up.
        let _ = signal_hook::flag::register(signal, cancel.flag());
    }
    cancel
}

/// Whether a process with this `status` ignores `signal` (`SigIgn` of proc(5), a mask in
/// hexadecimal).
fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

/// The exit code that tells what became of the guest.
pub fn exit_code(failure: &Failure) -> ExitCode {
    ExitCode::from(match (&failure.cause, failure.survivor) {
        (EngineError::Cancelled, Survivor::Source) => CANCELLED,
        (_, Survivor::Source) => FAILED,
        _ => OPERATOR,
    })
}

/// What this process has cost.
pub fn cost() -> Cost {
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
    line.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0)
        * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signals_that_are_ignored_are_told_apart() {
        // SIGHUP (1) and SIGPIPE (13).
        let status =
            "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000442\n";
        let ignored: Vec<i32> = (1..32).filter(|signal| is_ignored(status, *signal)).collect();
        assert_eq!(ignored, [1, 13]);
        assert!(!is_ignored("", 1));
    }
}
