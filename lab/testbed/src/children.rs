//! What this process starts: that it hears Ctrl-C, and its end when the operator loses patience.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use procfs::process::{Process, all_processes};
use rustix::process::{Pid, Signal, kill_process};

/// How often it is looked whether a signal has come.
const LOOK: Duration = Duration::from_millis(100);

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

/// Ends every child of this process for as long as it goes on behind Ctrl-C or a SIGTERM; whether
/// one of these has come. Whoever makes moves one after another looks there between them.
///
/// # Errors
/// When the signals cannot be handled, or no thread can be started.
pub fn end_children_on_interrupt() -> io::Result<Arc<AtomicBool>> {
    let heard = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&heard))?;
    }
    let watched = Arc::clone(&heard);
    let watch = std::thread::Builder::new().name("interrupt".to_owned());
    watch.spawn(move || {
        loop {
            if watched.load(Ordering::Relaxed) {
                end_children();
            }
            std::thread::sleep(LOOK);
        }
    })?;
    Ok(heard)
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
