//! What this process starts: that it hears Ctrl-C, and its end when the operator loses patience.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once};

use procfs::process::{Process, all_processes};
use rustix::process::{Pid, Signal, kill_process};

/// Ends every child of this process, with which every wait for one of them fails and cleans up
/// after itself.
pub fn end_children() {
    let Ok(own) = Process::myself() else { return };
    let Ok(processes) = all_processes() else { return };
    for process in processes.flatten() {
        let is_child = process.stat().is_ok_and(|stat| stat.ppid == own.pid());
        if let (true, Some(pid)) = (is_child, Pid::from_raw(process.pid())) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Has what is started from now on hear Ctrl-C. In the background of a script it is ignored, and
/// who is started there would inherit that; what is handled here is as usual there (execve(2)).
pub(crate) fn hear_interrupts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let interrupt = signal_hook::consts::SIGINT;
        let status = Process::myself().and_then(|own| own.status());
        if status.is_ok_and(|status| status.sigign >> (interrupt - 1) & 1 == 1) {
            let _ = signal_hook::flag::register(interrupt, Arc::new(AtomicBool::new(false)));
        }
    });
}
