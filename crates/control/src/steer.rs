//! What a control socket answers about a migration under way: for a VMM's socket, and for that of a
//! command that has the engine in its own process.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use godwit_engine::address::Address;
use godwit_engine::handle::MigrationHandle;

use crate::ControlError;
use crate::messages::{Answer, MigrationLook, Request};

/// Does to the migration of `handle` what `request` asks; other requests than those about a
/// migration are refused. To watch it is for who has the connection ([`crate::watch`]).
#[must_use]
pub fn steer(handle: &MigrationHandle, request: &Request) -> Answer {
    let result = match request {
        Request::Progress => {
            let settings =
                handle.settings().into_iter().map(|(key, value)| (key.to_owned(), value));
            return Answer::Migration(MigrationLook {
                version: None,
                vm: None,
                to: handle.to().map(|to| to.to_string()),
                progress: handle.progress().map(Box::new),
                settings: settings.collect(),
            });
        }
        Request::Set { settings } => handle.set(settings),
        Request::Redirect { to, channels } => {
            let to = match to.as_deref().map(str::parse::<Address>).transpose() {
                Ok(to) => to,
                Err(error) => return Answer::Refused { error: error.to_string() },
            };
            handle.redirect(to, *channels)
        }
        Request::SwitchOver { post_copy: true, .. } => handle.switch_over_by_post_copy(),
        Request::SwitchOver { force, .. } => handle.switch_over(*force),
        Request::Cancel => {
            handle.cancel().cancel();
            Ok(())
        }
        _ => {
            return Answer::Refused {
                error: "this socket is a migration's, not a machine's".to_owned(),
            };
        }
    };
    match result {
        Ok(()) => Answer::Done,
        Err(error) => Answer::Refused { error: error.to_string() },
    }
}

/// The socket's file; it goes with this value.
#[derive(Debug)]
pub struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Listens at `path`, where a socket that nobody listens on any more may be.
///
/// # Errors
/// When somebody else listens there, or the socket cannot be made.
pub fn bind(path: &Path) -> Result<(UnixListener, Socket), ControlError> {
    let problem = |problem: String| ControlError::new(path, problem);
    match UnixListener::bind(path) {
        Ok(listener) => Ok((listener, Socket(path.to_owned()))),
        // Left behind by a process that was killed, if nobody answers there.
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            if UnixStream::connect(path).is_ok() {
                return Err(problem(
                    "another machine listens there: choose another path".to_owned(),
                ));
            }
            let _ = std::fs::remove_file(path);
            let listener = UnixListener::bind(path).map_err(|error| problem(error.to_string()))?;
            Ok((listener, Socket(path.to_owned())))
        }
        Err(error) => Err(problem(format!("{error}; is its directory there and writable?"))),
    }
}
