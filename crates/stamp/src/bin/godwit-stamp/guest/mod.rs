//! The init of the self-checking guest: it does nothing but write, check and count.
//!
//! Keeps one promise: nothing it finds stops it. A damaged page is reported and the work goes on,
//! so that a test sees how many there are; only a setting that makes no sense or a signal
//! (Ctrl-Alt-Del, a stop by hand) ends it. One thread does all the work on memory and each thread
//! on a disk has its own part, so no page is ever read while it is written. Run by hand, not as
//! process 1, it takes the settings as arguments and is an ordinary program. What the lines mean is
//! defined in the library.

mod builds;
mod disks;
mod drivers;
mod init;
mod network;
mod work;

use std::process::ExitCode;

use godwit_stamp::heartbeat::FAILED;
use godwit_stamp::settings::Settings;

/// Works until a signal or a setting that makes no sense ends it.
pub(crate) fn run() -> ExitCode {
    if let Some(done) = builds::job() {
        return done;
    }
    let as_init = std::process::id() == 1;
    let settings =
        if as_init { drivers::load().and_then(|()| init::command_line()) } else { Ok(arguments()) };
    let outcome = settings.and_then(|line| Ok(line.parse::<Settings>()?)).and_then(|settings| {
        let ending = init::ending_signals()?;
        network::start(settings.address)?;
        let disk_bugs = disks::start(&settings.disk)?;
        builds::start(&settings.build, &disk_bugs)?;
        work::run(&settings, &disk_bugs, &ending);
        Ok(())
    });
    if let Err(problem) = &outcome {
        say!("{FAILED} {problem}");
    }
    if as_init {
        init::power_off();
    }
    if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn arguments() -> String {
    std::env::args().skip(1).collect::<Vec<_>>().join(" ")
}
