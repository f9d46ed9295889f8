//! What process 1 owes the kernel: /proc mounted, Ctrl-Alt-Del taken, the machine switched off at
//! the end.
//!
//! Keeps one promise: process 1 never just ends, which would be a kernel panic. The work itself is
//! `work`'s.

use std::error::Error;
use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use godwit_stamp::heartbeat::ASKS;
use godwit_stamp::settings::ASK;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Mounts /proc and reads the kernel's command line, or the line for which that says to ask.
pub(super) fn command_line() -> Result<String, Box<dyn Error>> {
    mount(c"proc", c"/proc", c"proc", MountFlags::empty(), None::<&CStr>)
        .map_err(|problem| format!("cannot mount /proc: {problem}"))?;
    let mut line = std::fs::read_to_string("/proc/cmdline")
        .map_err(|problem| format!("cannot read /proc/cmdline: {problem}"))?;
    if line.split_ascii_whitespace().any(|word| word == ASK) {
        say!("{ASKS}");
        line.clear();
        std::io::stdin()
            .read_line(&mut line)
            .map_err(|problem| format!("cannot read settings from the console: {problem}"))?;
    }
    Ok(line)
}

/// A flag that a signal raises. With Ctrl-Alt-Del taken from the kernel it arrives as SIGINT.
pub(super) fn ending_signals() -> Result<Arc<AtomicBool>, Box<dyn Error>> {
    let ending = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&ending))?;
    }
    if std::process::id() == 1 {
        reboot(RebootCommand::CadOff)?;
    }
    Ok(ending)
}

/// Switches the machine off; where that fails there is nothing left but to wait for whoever started
/// it.
pub(super) fn power_off() {
    if let Err(problem) = reboot(RebootCommand::PowerOff) {
        say!("cannot switch off: {problem}");
    }
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}
