//! QEMU's NBD server: one a QEMU, on a socket that godwit opened and handed over.
//!
//! QEMU gets the listening socket by `getfd`, so it needs no right to the directory, and neither a chroot nor a mount namespace of its own
//! is in the way. The directory is godwit's alone (0700), for the server asks nobody who they are.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use godwit_nbd::Address;
use serde_json::{Value, json};

use crate::QemuError;
use crate::machine::{Machine, text};
use crate::mark::Mark;
use crate::qmp::{Qmp, QmpError};
use crate::run_directory;

/// The name under which QEMU keeps the socket for a moment.
pub(crate) const FD_NAME: &str = "godwit-nbd";
const SOCKET: &str = "nbd";

/// QEMU's NBD server, ours until it is stopped.
#[derive(Debug)]
pub(crate) struct Server {
    dir: PathBuf,
}

/// The name of the directory for the QEMU `pid`: the mark first, as everywhere.
fn name(mark: Mark, pid: i32) -> String {
    format!("{mark}-nbd-{pid}")
}

impl Server {
    /// Starts the server.
    ///
    /// # Errors
    /// When it runs already, for somebody else.
    pub(crate) fn start(machine: &mut Machine) -> Result<Self, QemuError> {
        let dir = run_directory::path().join(name(Mark::own(), machine.pid));
        let failed = |source| QemuError::Socket { path: dir.clone(), source };
        run_directory::make().map_err(failed)?;
        std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&dir).map_err(failed)?;
        let server = Self { dir: dir.clone() };
        let path = dir.join(SOCKET);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(failed)?;
        let qmp = &mut machine.qmp;
        qmp.pass_fd(FD_NAME, listener.as_fd())?;
        let address = json!({ "addr": { "type": "fd", "data": { "str": FD_NAME } } });
        match qmp.execute("nbd-server-start", address) {
            Ok(_) => Ok(server),
            Err(QmpError::Refused { description, .. }) => {
                // Only a server that starts takes the descriptor.
                let _ = qmp.execute("closefd", json!({ "fdname": FD_NAME }));
                let exports = match exports(qmp)?.join(", ") {
                    none if none.is_empty() => "none".to_owned(),
                    exports => exports,
                };
                Err(QemuError::NbdServer { words: description, exports })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> Address {
        Address::Unix(self.dir.join(SOCKET))
    }

    /// Stops it; all exports end with it.
    pub(crate) fn stop(self, qmp: &mut Qmp) -> Result<(), QmpError> {
        match qmp.execute("nbd-server-stop", Value::Null) {
            // Somebody else was quicker.
            Ok(_) | Err(QmpError::Refused { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// The names of all NBD exports.
pub(crate) fn exports(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    let exports = qmp.execute("query-block-exports", Value::Null)?;
    let nbd = exports.as_array().into_iter().flatten().filter(|export| export["type"] == "nbd");
    Ok(nbd.map(|export| text(&export["id"])).collect())
}

/// Whose server this QEMU runs, if it is a godwit's: told by the path of its socket, which the kernel keeps (`/proc/net/unix`).
pub(crate) fn owner(pid: i32) -> Option<Mark> {
    let sockets = std::fs::read_to_string(format!("/proc/{pid}/net/unix")).ok()?;
    let paths = sockets.lines().filter_map(|line| line.split_whitespace().nth(7));
    let end = format!("-nbd-{pid}/{SOCKET}");
    let ours = paths.filter_map(|path| path.strip_suffix(&end));
    let marks = ours.filter_map(|path| Mark::of(path.rsplit('/').next()?));
    // The socket of one that has ended may linger for as long as somebody is connected to it; a living owner comes first.
    let mut marks: Vec<Mark> = marks.collect();
    marks.sort_by_key(|mark| !mark.is_alive());
    marks.into_iter().next()
}

/// Removes the directories of some processes.
pub(crate) fn remove_directories(pid: i32, which: impl Fn(Mark) -> bool) -> io::Result<()> {
    let end = format!("-nbd-{pid}");
    for entry in std::fs::read_dir(run_directory::path())?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let mark = name.strip_suffix(&end).and_then(Mark::of);
        if mark.is_some_and(&which) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}
