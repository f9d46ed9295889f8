//! The init of the self-checking guest: it does nothing but write, check and count.
//!
//! Keeps one promise: nothing it finds stops it. A damaged page is reported and the work goes on,
//! so that a test sees how many there are; only a setting that makes no sense or a signal
//! (Ctrl-Alt-Del, a stop by hand) ends it. One thread does all the work on memory and each thread
//! on a disk has its own part, so no page is ever read while it is written. Run by hand, as
//! `godwit-stamp guest`, it takes the settings as arguments, is an ordinary program, and leaves
//! disks and network alone. What the lines mean is defined in the library.

mod builds;
mod disks;
mod drivers;
mod init;
mod network;
mod work;

use std::process::ExitCode;

use godwit_stamp::heartbeat::FAILED;
use godwit_stamp::settings::Settings;

/// Whether this process was started to do a job of [`builds`].
pub(crate) fn is_job() -> bool {
    std::env::args().nth(1).is_some_and(|first| first == builds::JOB)
}

/// Works until a signal or a setting that makes no sense ends it. Process 1, which is given no
/// words, takes its settings from the kernel's command line.
pub(crate) fn run(words: Option<&str>) -> ExitCode {
    if let Some(done) = builds::job() {
        return done;
    }
    let settings = match words {
        Some(words) => Ok(words.to_owned()),
        None => drivers::load().and_then(|()| init::command_line()),
    };
    let outcome = settings.and_then(|line| Ok(line.parse::<Settings>()?)).and_then(|settings| {
        if words.is_some() && (!settings.disk.is_idle() || settings.address.is_some()) {
            let cure = "disks are written by `godwit-stamp run --destroy-data PATH`";
            return Err(format!("disks and network are for process 1 of the guest: {cure}").into());
        }
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
    if words.is_none() {
        init::power_off();
    }
    if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
