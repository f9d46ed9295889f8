//! `godwitd`: the daemon of a host. It starts destinations for coordinators on other hosts, says
//! what room its host has, keeps what came of all that, and serves metrics.
//!
//! ```text
//!   config         what the operator of the host allows
//!   server         listens, knows who asks, answers within limits
//!   destinations   what it started, each a process of its own, written down
//!   room           what the host has left for guests
//!   program        `godwit`, run for an answer
//!   metrics        what Prometheus collects
//!   handed         sockets that systemd hands over
//!   notify         what systemd hears
//! ```
//!
//! It touches no guest itself: each is taken in by a `godwit receive` of its own, which goes on
//! when the daemon is killed.
//!
//! Invariant: nothing that a peer says becomes a program, an option or a path. It names a guest,
//! by a name that is no more than a name, and a way that the operator of this host has written.

#![forbid(unsafe_code)]

// For its macros: what is printed with them never ends the process.
#[macro_use]
extern crate godwit_terminal;

mod config;
mod destinations;
mod handed;
mod metrics;
mod notify;
mod program;
mod room;
mod server;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use clap_complete::Shell;
use godwit_terminal::{process, say};

use config::Config;
use destinations::Destinations;
use handed::Handed;
use program::Program;
use server::Server;

/// Processes that have ended are buried this often.
const TICK: Duration = Duration::from_millis(100);

/// Starts destinations of live migrations for other hosts, and says what room there is.
///
/// Hosts ask over TLS, and must show a certificate of the authority that this one trusts; the
/// operator of this host asks at a unix socket (`godwit host`). What may be started is what the
/// configuration names: docs/godwitd.md. Destinations go on when godwitd is killed, and are listed
/// again when it is back; those that still wait for a source end with it when it is stopped.
#[derive(Debug, Parser)]
#[command(name = "godwitd", version, max_term_width = 80)]
#[command(after_help = "Exit codes: 0 stopped; 1 failed; 2 wrong usage.")]
struct Arguments {
    /// The configuration, in TOML [default: /etc/godwit/godwitd.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Listen for other hosts here, HOST:PORT; beyond this host only with keys
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,

    /// This host's keys [default, beyond this host: $GODWIT_KEYS or /etc/godwit/keys]
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,

    /// Serve metrics at http://ADDRESS/metrics; who reaches it reads the names of VMs
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<std::net::SocketAddr>,

    /// The socket for this user [default: godwitd in the directory of godwit's sockets]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Where destinations are written down [default: beside the records of migrations]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,

    /// Print what makes a shell complete options, and end
    #[arg(long, value_name = "SHELL")]
    completions: Option<Shell>,

    /// Print the page of the manual, and end
    #[arg(long)]
    man: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(done) = about_itself(&arguments) {
        return done;
    }
    match serve(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("godwitd: {}", say::line(format!("{error:#}")));
            ExitCode::from(process::FAILED)
        }
    }
}

/// What is asked of the program itself.
fn about_itself(arguments: &Arguments) -> Option<ExitCode> {
    let mut text = Vec::new();
    if let Some(shell) = arguments.completions {
        clap_complete::generate(shell, &mut Arguments::command(), "godwitd", &mut text);
    } else if arguments.man {
        let page = clap_mangen::Man::new(Arguments::command()).section("8");
        if let Err(error) = page.render(&mut text) {
            eprintln!("godwitd: the page cannot be made: {error}");
            return Some(ExitCode::from(process::FAILED));
        }
    } else {
        return None;
    }
    print!("{}", String::from_utf8_lossy(&text));
    Some(ExitCode::SUCCESS)
}

fn serve(arguments: &Arguments) -> anyhow::Result<()> {
    let handed = Handed::take()?;
    let config = Config::read(arguments, &handed)?;
    let cancel = process::cancel_on_signals();
    let program = Program::find()?;
    let destinations = Arc::new(Destinations::open(&config, &program)?);
    let server = Server::start(config, handed, Arc::clone(&destinations), program, cancel.clone())?;
    notify::tell("READY=1");
    while !cancel.is_cancelled() {
        destinations.bury();
        std::thread::sleep(TICK);
    }
    notify::tell("STOPPING=1");
    let ended = destinations.stop_waiting();
    drop(server);
    eprintln!(
        "godwitd: stopped{}",
        match ended {
            0 => String::new(),
            1 => "; a destination that waited for its source has been ended".to_owned(),
            n => format!("; {n} destinations that waited for their sources have been ended"),
        }
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_is_on_one_screen() {
        let help = Arguments::command().render_long_help().to_string();
        let widest = help.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= 80, "{widest} columns: {help}");
        let short = Arguments::command().render_help().to_string();
        assert!(short.lines().count() <= 40, "{short}");
    }
}
