//! Ending what this process has started, when its operator loses patience.

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
