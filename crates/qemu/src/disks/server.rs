//! QEMU's NBD server: one a QEMU, on a socket that godwit opened and handed over.
//!
//! QEMU gets the listening socket by `getfd`, so it needs no right to the directory, and neither a
//! chroot nor a mount namespace of its own is in the way. The directory is godwit's alone (0700),
//! for the server asks nobody who they are.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use godwit_nbd::Address;
use procfs::process::Process;
use serde_json::json;

use crate::QemuError;
use crate::machine::Machine;
use crate::mark::Mark;
use crate::monitor::commands::{CloseFd, NbdServerStart, NbdServerStop, QueryExports};
use crate::monitor::{Monitor, QmpError};
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
        let all = run_directory::path();
        let dir = all.join(name(Mark::own(), machine.pid));
        let failed = |source| QemuError::Socket { path: dir.clone(), source };
        run_directory::make(&all, rustix::process::getuid().as_raw())
            .map_err(|problem| failed(io::Error::new(io::ErrorKind::PermissionDenied, problem)))?;
        std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&dir).map_err(failed)?;
        let server = Self { dir: dir.clone() };
        let path = dir.join(SOCKET);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(failed)?;
        machine.qmp.uninterrupted(|qmp| server.begin(qmp, &listener))
    }

    /// Has QEMU listen. Whether it does has to be known: a server that is somebody else's must not
    /// be stopped.
    fn begin(self, qmp: &mut dyn Monitor, listener: &UnixListener) -> Result<Self, QemuError> {
        qmp.pass_fd(FD_NAME, listener.as_fd())?;
        let addr = json!({ "type": "fd", "data": { "str": FD_NAME } });
        match qmp.run(&NbdServerStart { addr }) {
            Ok(_) => Ok(self),
            Err(QmpError::Refused { description, .. }) => {
                // Only a server that starts takes the descriptor.
                let _ = qmp.run(&CloseFd { fdname: FD_NAME });
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
    pub(crate) fn stop(self, qmp: &mut dyn Monitor) -> Result<(), QmpError> {
        // Refused where somebody else was quicker.
        qmp.run_if_known(&NbdServerStop).map(drop)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// The names of all NBD exports.
pub(crate) fn exports(qmp: &mut dyn Monitor) -> Result<Vec<String>, QmpError> {
    let nbd = qmp.run(&QueryExports)?.into_iter().filter(|export| export.kind == "nbd");
    Ok(nbd.map(|export| export.id).collect())
}

/// Whose server this QEMU runs, if it is a godwit's: told by the path of its socket, which the
/// kernel keeps (`/proc/net/unix`).
pub(crate) fn owner(pid: i32) -> Option<Mark> {
    let sockets = Process::new(pid).ok()?.unix().ok()?;
    let paths = sockets.iter().filter_map(|socket| socket.path.as_ref()?.to_str());
    let end = format!("-nbd-{pid}/{SOCKET}");
    let ours = paths.filter_map(|path| path.strip_suffix(&end));
    let marks = ours.filter_map(|path| Mark::of(path.rsplit('/').next()?));
    // The socket of one that has ended may linger for as long as somebody is connected to it; a
    // living owner comes first.
    let mut marks: Vec<Mark> = marks.collect();
    marks.sort_by_key(|mark| !mark.is_alive());
    marks.into_iter().next()
}

/// Removes the directories in `all` of processes that are gone, whichever QEMU they were for.
fn sweep(all: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(all)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let mark = Mark::of(&name).filter(|_| name.contains("-nbd-"));
        if mark.is_some_and(|mark| !mark.is_alive()) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// The same in the run directory.
pub(crate) fn remove_directories() -> io::Result<()> {
    sweep(&run_directory::path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_that_is_gone_has_left_is_removed() {
        // Mutation: only what it left for the QEMU that is looked at now.
        let all = std::env::temp_dir().join(format!("godwit-sweep-{}", std::process::id()));
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let own = name(Mark::own(), 7);
        let prefix = own.split('-').next().unwrap();
        let dead = format!("{prefix}-{}-1-nbd-7", ended.id());
        for dir in [own.as_str(), &dead, "others"] {
            std::fs::create_dir_all(all.join(dir)).unwrap();
            std::fs::write(all.join(dir).join(SOCKET), "").unwrap();
        }
        sweep(&all).unwrap();
        let mut left: Vec<String> = std::fs::read_dir(&all)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        std::fs::remove_dir_all(&all).unwrap();
        let mut kept = ["others".to_owned(), own];
        kept.sort();
        assert_eq!(left, kept);
    }
}
