//! Who is connected to a QEMU's unix sockets: to a monitor, which serves one client at a time, so
//! that an operator whom godwit refuses because of it must learn which; and to what vhost-user
//! devices talk over.
//!
//! The kernel tells which two unix sockets are connected (sock_diag(7), unix_diag), and /proc which
//! process has one open. What cannot be seen, processes of other users above all, gives no answer:
//! for a monitor that is no matter, of a device it is missed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

use crate::process::descriptors;

/// A process that is connected to a monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// Its number.
    pub pid: i32,
    /// Its program, without directories.
    pub program: String,
}

impl Client {
    /// What can be done about it.
    pub(crate) fn cure(&self) -> &'static str {
        match self.program.as_str() {
            "libvirtd" | "virtqemud" => {
                "libvirt keeps it for as long as it manages the VM: give QEMU one more -qmp \
                 option, for godwit alone (<qemu:commandline> in the domain's XML)"
            }
            _ => {
                "wait until it lets go or end it, or give QEMU one more -qmp option, for godwit \
                 alone"
            }
        }
    }
}

impl std::fmt::Display for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.pid, self.program)
    }
}

/// Who is connected to the monitor that listens at `path`, other than this process.
pub(crate) fn of_monitor(path: &Path) -> Option<Client> {
    let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let wanted = real(path);
    let sockets = sockets().ok()?;
    // What the monitor has accepted has its name; what still waits for that has no inode.
    let accepted = sockets.iter().filter(|socket| {
        let name = socket.name.as_deref();
        socket.inode != 0 && name.is_some_and(|name| name == path || real(name) == wanted)
    });
    let peers: Vec<u32> = accepted.filter_map(|socket| socket.peer).collect();
    if peers.is_empty() {
        return None;
    }
    let own = std::process::id().cast_signed();
    holders(&peers).into_iter().find(|client| client.pid != own)
}

/// A connection between a unix socket of a process and another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Connection {
    own: u32,
    peer: u32,
    /// The socket that was connected to: that of the one end or of the other.
    pub(crate) path: PathBuf,
}

/// The connections of process `pid` by unix sockets that have a name: those that it made, and those
/// that were made to it at one of `listening`.
pub(crate) fn connections_of(pid: i32, listening: &[PathBuf]) -> io::Result<Vec<Connection>> {
    let own = sockets_of(pid)?;
    let sockets = sockets()?;
    let by_inode: BTreeMap<u32, &Socket> =
        sockets.iter().map(|socket| (socket.inode, socket)).collect();
    let mut found: Vec<Connection> = own
        .iter()
        .filter_map(|own| {
            let socket = by_inode.get(own)?;
            let peer = socket.peer.filter(|peer| *peer != 0)?;
            let path = match &socket.name {
                Some(path) => listening.contains(path).then(|| path.clone()),
                None => by_inode.get(&peer)?.name.clone(),
            };
            Some(Connection { own: *own, peer, path: path? })
        })
        .collect();
    found.sort_by(|a, b| (&a.path, a.own).cmp(&(&b.path, b.own)));
    Ok(found)
}

/// The processes at the other ends of `connections`, each with the connections that it has.
pub(crate) fn peers(connections: &[Connection]) -> Vec<(i32, Vec<&Connection>)> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let with = |pid: i32| {
        let open = sockets_of(pid).unwrap_or_default();
        let has = |connection: &&Connection| open.contains(&connection.peer);
        (pid, connections.iter().filter(has).collect::<Vec<_>>())
    };
    pids.map(with).filter(|(_, has)| !has.is_empty()).collect()
}

/// The numbers of the sockets that process `pid` has open.
fn sockets_of(pid: i32) -> io::Result<BTreeSet<u32>> {
    Ok(descriptors(pid)?.filter_map(|it| inode(it.target()?.to_str()?)).collect())
}

/// The number of the socket that a link in /proc/PID/fd is.
fn inode(link: &str) -> Option<u32> {
    link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Whether somebody takes connections at the unix socket `path`, as the kernel lists them (proc(5),
/// /proc/net/unix). Nobody connects for it: QEMU throws away what is asked over a connection while
/// it clears up behind the one before (`monitor_qmp_cleanup_queue_and_resume`), which was seen to
/// cost the first command.
pub(crate) fn is_listened_on(path: &Path) -> bool {
    !listeners_at(path).is_empty()
}

/// Whether process `pid` takes connections at `path`.
pub(crate) fn listens_at(pid: i32, path: &Path) -> bool {
    let listeners = listeners_at(path);
    let resolved = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let all = if listeners.is_empty() { listeners_at(&resolved) } else { listeners };
    sockets_of(pid).is_ok_and(|open| all.iter().any(|inode| open.contains(inode)))
}

/// The numbers of the sockets that listen at `path`.
fn listeners_at(path: &Path) -> Vec<u32> {
    // The flag of a socket that listens, `__SO_ACCEPTCON`.
    const ACCEPTS: &str = "00010000";
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let end = format!(" {}", path.to_string_lossy());
    let of_line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().take(7).collect();
        let listens = words.get(3) == Some(&ACCEPTS) && line.ends_with(&end);
        words.get(6).filter(|_| listens)?.parse().ok()
    };
    sockets.lines().filter_map(of_line).collect()
}

/// The processes that have one of these sockets open.
fn holders(inodes: &[u32]) -> Vec<Client> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let holds = |pid: &i32| {
        sockets_of(*pid).is_ok_and(|open| inodes.iter().any(|inode| open.contains(inode)))
    };
    pids.filter(holds).map(|pid| Client { pid, program: program(pid) }).collect()
}

/// The program of process `pid`, without directories.
pub(crate) fn program(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let word = line.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = word.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let name = if name.is_empty() {
        fs::read(format!("/proc/{pid}/comm")).unwrap_or_default()
    } else {
        name.to_vec()
    };
    let clean = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    String::from_utf8_lossy(&name).trim().chars().take(60).map(clean).collect()
}

/// A unix socket, as the kernel tells of it.
#[derive(Debug, PartialEq, Eq)]
struct Socket {
    /// 0 while nobody has accepted it.
    inode: u32,
    name: Option<PathBuf>,
    /// The inode of the other end.
    peer: Option<u32>,
}

/// linux/netlink.h and linux/sock_diag.h.
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const HEADER: usize = 16;
/// linux/unix_diag.h: `struct unix_diag_msg`, what is asked for, and attributes.
const MESSAGE: usize = 16;
const SHOW_NAME_AND_PEER: u32 = 1 | 4;
const ESTABLISHED: u32 = 1 << 1;
const NAME: u16 = 0;
const PEER: u16 = 2;

/// All connected unix sockets of this network namespace.
fn sockets() -> io::Result<Vec<Socket>> {
    let protocol = Some(netlink::SOCK_DIAG);
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, protocol)?;
    let mut request = Vec::new();
    // A header, and a `struct unix_diag_req`.
    request.extend_from_slice(&40u32.to_ne_bytes());
    request.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend_from_slice(&NLM_F_REQUEST_DUMP.to_ne_bytes());
    request.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
    let family = u8::try_from(AddressFamily::UNIX.as_raw()).unwrap_or(1);
    request.extend_from_slice(&[family, 0, 0, 0]);
    for word in [ESTABLISHED, 0, SHOW_NAME_AND_PEER, u32::MAX, u32::MAX] {
        request.extend_from_slice(&word.to_ne_bytes());
    }
    sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut found = Vec::new();
    let mut bytes = vec![0; 1 << 16];
    loop {
        let (got, _) = recv(&socket, bytes.as_mut_slice(), RecvFlags::empty())?;
        if got == 0 || read_datagram(&bytes[..got], &mut found)? {
            return Ok(found);
        }
    }
}

/// Reads what the kernel said in one go; whether it was the last.
fn read_datagram(mut bytes: &[u8], found: &mut Vec<Socket>) -> io::Result<bool> {
    while let Some(length) = word(bytes, 0) {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let kind = half(bytes, 4).unwrap_or(NLMSG_ERROR);
        match kind {
            NLMSG_DONE => return Ok(true),
            // A kernel without unix_diag refuses.
            NLMSG_ERROR => return Err(io::ErrorKind::Unsupported.into()),
            _ => {}
        }
        let Some(message) = bytes.get(HEADER..length) else { return Ok(true) };
        found.extend(read_socket(message));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

fn read_socket(message: &[u8]) -> Option<Socket> {
    let mut socket = Socket { inode: word(message, 4)?, name: None, peer: None };
    let mut rest = message.get(MESSAGE..)?;
    while let (Some(length), Some(kind)) = (half(rest, 0), half(rest, 2)) {
        let length = usize::from(length);
        let Some(value) = rest.get(4..length) else { break };
        match kind {
            // An abstract name begins with a zero, and is no path.
            NAME if value.first().is_some_and(|byte| *byte != 0) => {
                let path = value.split(|byte| *byte == 0).next().unwrap_or_default();
                socket.name = Some(std::ffi::OsStr::from_bytes(path).into());
            }
            PEER => socket.peer = word(value, 0),
            _ => {}
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(socket)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn the_two_ends_of_a_connection_are_found() {
        let path = std::env::temp_dir().join(format!("godwit-clients-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let ours = UnixStream::connect(&path).unwrap();
        let inode = |fd: i32| -> u32 {
            let link = fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
            let text = link.to_str().unwrap();
            text.strip_prefix("socket:[").unwrap().strip_suffix(']').unwrap().parse().unwrap()
        };
        let named = || -> Vec<Socket> {
            let all = sockets().unwrap();
            all.into_iter().filter(|socket| socket.name.as_ref() == Some(&path)).collect()
        };
        // Who still waits holds nothing.
        assert!(named().iter().all(|socket| socket.inode == 0));
        let (theirs, _) = listener.accept().unwrap();
        let peer = inode(ours.as_raw_fd());
        let (inode, name) = (inode(theirs.as_raw_fd()), Some(path.clone()));
        assert_eq!(named(), [Socket { inode, name, peer: Some(peer) }]);
        let own = std::process::id().cast_signed();
        assert!(holders(&[peer]).iter().any(|client| client.pid == own));
        assert_eq!(of_monitor(&path), None, "it is this process itself");
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn who_listens_is_found_without_a_connection() {
        let path = std::env::temp_dir().join(format!("godwit-listens-{}", std::process::id()));
        assert!(!is_listened_on(&path));
        let listener = UnixListener::bind(&path).unwrap();
        assert!(is_listened_on(&path));
        let own = std::process::id().cast_signed();
        assert!(listens_at(own, &path) && !listens_at(own, "/nowhere".as_ref()));
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "somebody has connected");
        drop(listener);
        assert!(!is_listened_on(&path));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn what_makes_no_sense_is_passed_over() {
        for bytes in [&[][..], &[0; 40], &[0xff; 40], &[20, 0, 0, 0, 20, 0, 0, 0, 1, 2, 3]] {
            let _ = read_datagram(bytes, &mut Vec::new());
            let _ = read_socket(bytes);
        }
    }

    #[test]
    fn libvirt_is_told_apart() {
        let client = |program: &str| Client { pid: 7, program: program.to_owned() };
        assert!(client("virtqemud").cure().contains("libvirt keeps it"));
        assert!(client("python3").cure().contains("end it"));
        assert_eq!(client("socat").to_string(), "process 7 (socat)");
    }
}
