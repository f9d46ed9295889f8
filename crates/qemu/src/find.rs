//! The monitor of a QEMU of which only the process is known.
//!
//! Its command line says which of its sockets are QMP monitors; no other socket is connected to, as
//! that may be the guest's serial line or its agent.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use procfs::net::{UnixNetEntry, UnixState};
use procfs::process::{FDTarget, Process};

use crate::command_line::{Given, find, key, options, parts, settings};
use crate::{QemuError, clients};

/// The unix socket of a QMP monitor of QEMU process `pid` that nobody is connected to.
///
/// # Errors
/// When there is no such process, it has no QMP monitor on a unix socket, or all are in use: says
/// what to do.
pub fn monitor_of(pid: i32) -> Result<PathBuf, QemuError> {
    let monitors = monitors_of(pid)?;
    if monitors.is_empty() {
        return Err(QemuError::NoMonitor { pid });
    }
    match monitors.iter().find(|(_, in_use)| !in_use) {
        Some((path, _)) => Ok(path.clone()),
        None => {
            let paths: Vec<PathBuf> = monitors.into_iter().map(|(path, _)| path).collect();
            let client = paths.iter().find_map(|path| clients::of_monitor(path));
            Err(QemuError::MonitorsInUse { pid, paths, client })
        }
    }
}

/// The unix sockets of all QMP monitors of process `pid`, and of each whether somebody is connected
/// to it.
///
/// # Errors
/// When there is no such process, or it may not be looked at.
pub fn monitors_of(pid: i32) -> Result<Vec<(PathBuf, bool)>, QemuError> {
    let failed = |source: procfs::ProcError| QemuError::NoProcess { pid, why: source.to_string() };
    let process = Process::new(pid).map_err(failed)?;
    let line: Vec<String> = process.cmdline().map_err(failed)?;
    let sockets = process.unix().map_err(failed)?;
    let own = own_sockets(&process).map_err(failed)?;
    let path = |monitor| match monitor {
        Monitor::Path(path) => Some(path),
        Monitor::Descriptor(number) => path_of(&process, number, &sockets),
    };
    let told = |path: PathBuf| (here(&process, &path), is_in_use(&own, &path, &sockets));
    Ok(monitors(&given(&process, &line)).into_iter().filter_map(path).map(told).collect())
}

/// The inodes of the sockets that `process` has.
pub(crate) fn own_sockets(process: &Process) -> Result<BTreeSet<u64>, procfs::ProcError> {
    let socket = |target| match target {
        FDTarget::Socket(inode) => Some(inode),
        _ => None,
    };
    Ok(process.fd()?.filter_map(|descriptor| socket(descriptor.ok()?.target)).collect())
}

/// A monitor on a command line.
#[derive(Debug, PartialEq, Eq)]
enum Monitor {
    Path(PathBuf),
    /// A socket that whoever started QEMU has made.
    Descriptor(u32),
}

/// The options of a QEMU's command line, and those in the files of settings that it names.
pub(crate) fn given(process: &Process, line: &[String]) -> Vec<Given> {
    let mut options = options(line);
    let files = options.iter().filter(|it| it.name == "readconfig");
    let files: Vec<PathBuf> = files.filter_map(|it| it.value.clone()).map(PathBuf::from).collect();
    for file in files {
        // One that cannot be read tells nothing.
        let text = std::fs::read_to_string(here(process, &file)).unwrap_or_default();
        options.extend(settings(&text));
    }
    options
}

/// The QMP monitors on unix sockets that a command line asks for (qemu-options.hx: -qmp,
/// -qmp-pretty, and -mon with -chardev, for which QEMU has an object from 11.1 on). One that goes
/// when somebody has been connected to it is not among them: nobody could come back to it.
fn monitors(options: &[Given]) -> Vec<Monitor> {
    let valued = |it: &Given| Some((it.name.clone(), it.value.clone()?));
    let pairs: Vec<(String, String)> = options.iter().filter_map(valued).collect();
    let mut found = Vec::new();
    for (name, value) in &pairs {
        match name.as_str() {
            "qmp" | "qmp-pretty" => {
                let rest = value.strip_prefix("unix:").map(parts).filter(|rest| listens(rest));
                found.extend(rest.map(|mut rest| Monitor::Path(rest.swap_remove(0).into())));
            }
            "mon" => {
                let mode = parts(value);
                if !mode.iter().any(|part| part == "mode=control") {
                    continue;
                }
                let id = key(&mode, "chardev").or_else(|| mode.first().cloned());
                found.extend(id.and_then(|id| behind(&pairs, &id)));
            }
            "object" if find(value, "qom-type", "qom-type").as_deref() == Some("monitor-qmp") => {
                let goes = find(value, "close-action", "").is_some_and(|it| it == "delete");
                let id = find(value, "chardev", "").filter(|_| !goes);
                found.extend(id.and_then(|id| behind(&pairs, &id)));
            }
            _ => {}
        }
    }
    found
}

/// The monitor on the chardev called `id`, if that is a socket at which QEMU listens.
fn behind(pairs: &[(String, String)], id: &str) -> Option<Monitor> {
    let chardevs = pairs.iter().filter(|(name, _)| name == "chardev");
    let parts = chardevs
        .map(|(_, value)| parts(value))
        .find(|parts| parts[0] == "socket" && key(parts, "id").as_deref() == Some(id))
        .filter(|parts| listens(parts))?;
    let descriptor = key(&parts, "fd").and_then(|fd| fd.parse().ok());
    let path = key(&parts, "path").map(|path| Monitor::Path(path.into()));
    path.or(descriptor.map(Monitor::Descriptor))
}

/// Whether QEMU listens at a socket; else it has called somebody, as it does Proxmox's qmeventd.
fn listens(parts: &[String]) -> bool {
    parts.iter().any(|part| matches!(part.as_str(), "server" | "server=on" | "server=yes"))
}

/// The path of the socket that a process has as descriptor `number`.
fn path_of(process: &Process, number: u32, sockets: &[UnixNetEntry]) -> Option<PathBuf> {
    let FDTarget::Socket(inode) = process.fd_from_fd(number.cast_signed()).ok()?.target else {
        return None;
    };
    sockets.iter().find(|socket| socket.inode == inode)?.path.clone()
}

/// Whether somebody is connected to the monitor `path` of a process that has the sockets `own`, one
/// of which is that end and has that name, too; or whether it is not known to be this process's:
/// its name was given to another since.
fn is_in_use(own: &BTreeSet<u64>, path: &Path, sockets: &[UnixNetEntry]) -> bool {
    let named = || sockets.iter().filter(|socket| socket.path.as_deref() == Some(path));
    let is = |socket: &UnixNetEntry, connected: bool| {
        matches!(socket.state, UnixState::CONNECTED) == connected
    };
    let connected = named().any(|socket| is(socket, true) && own.contains(&socket.inode));
    let another = path.is_absolute()
        && named().any(|socket| is(socket, false) && !own.contains(&socket.inode));
    connected || another
}

/// The path as this process reaches it, across directories and mount namespaces.
fn here(process: &Process, path: &Path) -> PathBuf {
    let of = |pid: &str, what: &str| std::fs::read_link(format!("/proc/{pid}/{what}")).ok();
    let number = process.pid.to_string();
    let same = ["ns/mnt", "root"].iter().all(|what| of(&number, what) == of("self", what));
    let base = if path.is_absolute() { "root" } else { "cwd" };
    let through = PathBuf::from(format!("/proc/{number}/{base}"));
    match (same, of(&number, "cwd")) {
        (true, Some(_)) if path.is_absolute() => path.to_owned(),
        (true, Some(directory)) => directory.join(path),
        _ => through.join(path.strip_prefix("/").unwrap_or(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn monitors_are_those_that_the_command_line_asks_for() {
        // As an operator, Proxmox and libvirt start it.
        let found = |line| monitors(&options(&words(line)));
        let path = |path: &str| Monitor::Path(path.into());
        assert_eq!(
            found("qemu -qmp unix:/run/a,,b.qmp,server=on,wait=off -qmp tcp:localhost:1 -m 1"),
            [path("/run/a,b.qmp")]
        );
        let two = "kvm -chardev socket,id=qmp,path=/run/1.qmp,server=on,wait=off -mon \
                   chardev=qmp,mode=control -chardev socket,path=/run/1.serial,id=serial0 \
                   -mon chardev=serial0,mode=readline -chardev \
                   socket,id=charmonitor,fd=33,server=on,wait=off -mon \
                   chardev=charmonitor,id=monitor,mode=control";
        assert_eq!(found(two), [path("/run/1.qmp"), Monitor::Descriptor(33)]);
        let events = "kvm -chardev socket,id=e,path=/var/run/qmeventd.sock,reconnect=5 -mon \
                      chardev=e,mode=control -qmp unix:/run/client";
        assert_eq!(found(events), []);
        let objects = "qemu -chardev socket,id=c,path=/run/1.qmp,server=on -chardev \
                       socket,id=d,path=/run/2.qmp,server=on -object \
                       {\"qom-type\":\"monitor-qmp\",\"id\":\"m\",\"chardev\":\"c\"} -object \
                       monitor-qmp,id=n,chardev=d -object monitor-hmp,id=o,chardev=c -object \
                       memory-backend-ram,id=c";
        assert_eq!(found(objects), [path("/run/1.qmp"), path("/run/2.qmp")]);
        let goes = "qemu -chardev socket,id=c,path=/run/1.qmp,server=on -object \
                    monitor-qmp,id=n,close-action=delete,chardev=c";
        assert_eq!(found(goes), []);
        let other = "qemu -monitor unix:/run/hmp,server=on -serial unix:/run/s -mon";
        assert_eq!(found(other), []);
    }

    #[test]
    fn a_process_without_a_monitor_is_said_to_have_none() {
        let own = std::process::id().cast_signed();
        assert!(matches!(monitor_of(own), Err(QemuError::NoMonitor { .. })));
        assert!(matches!(monitor_of(i32::MAX), Err(QemuError::NoProcess { .. })));
    }
}
