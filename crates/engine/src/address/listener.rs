//! A listening socket.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{SockAddr, Socket, Type};

use super::{Address, Stream};
use crate::{holder, limits};

/// Connections that may wait to be accepted: a source's channels, and some strangers.
const BACKLOG: i32 = 128;

/// A listening socket, and other handles to the same one; a unix socket's file is removed with the
/// last of them.
///
/// ```
/// use godwit_engine::address::{Address, Listener};
///
/// // Port 0: any. Which, is asked.
/// let listener = Listener::bind(&"127.0.0.1:0".parse()?)?;
/// assert!(matches!(listener.address()?, Address::Tcp(at) if !at.ends_with(":0")));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Listener(Arc<Listening>);

#[derive(Debug)]
struct Listening {
    socket: Socket,
    /// The file of a unix socket.
    path: Option<PathBuf>,
}

impl Listener {
    /// Listens on `address`. A unix socket that a process left behind when it was killed is
    /// replaced.
    ///
    /// # Errors
    /// When the address is taken or not ours, in words that name the cure.
    pub fn bind(address: &Address) -> io::Result<Self> {
        let bound = Self::bind_now(address);
        let bound = match (bound, address) {
            (Err(error), Address::Unix(path))
                if error.kind() == io::ErrorKind::AddrInUse && is_dead(path) =>
            {
                std::fs::remove_file(path)?;
                Self::bind_now(address)
            }
            (bound, _) => bound,
        };
        bound.map_err(|error| with_cure(error, address))
    }

    fn bind_now(address: &Address) -> io::Result<Self> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for at in address.resolve()? {
            match Self::bind_one(&at) {
                Ok(socket) => {
                    let path =
                        if let Address::Unix(path) = address { Some(path.clone()) } else { None };
                    return Ok(Self(Arc::new(Listening { socket, path })));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn bind_one(at: &SockAddr) -> io::Result<Socket> {
        let socket = Socket::new(at.domain(), Type::STREAM, None)?;
        if at.as_socket().is_some() {
            // A port is free again at once when its last listener has gone.
            socket.set_reuse_address(true)?;
        }
        socket.bind(at)?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    }

    /// Takes over a socket that listens already, as a service manager hands one to whom it starts
    /// (sd_listen_fds(3)). The file of a unix socket stays when this is dropped: it belongs to who
    /// made it.
    ///
    /// ```
    /// use godwit_engine::address::Listener;
    ///
    /// let socket = std::net::TcpListener::bind("127.0.0.1:0")?;
    /// let at = socket.local_addr()?.to_string();
    /// assert_eq!(Listener::inherited(socket)?.address()?.to_string(), at);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// When it is no listening stream socket.
    pub fn inherited(socket: impl Into<OwnedFd>) -> io::Result<Self> {
        let socket = Socket::from(socket.into());
        if socket.r#type()? != Type::STREAM || !socket.is_listener()? {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "nobody listens at it"));
        }
        socket.set_nonblocking(true)?;
        // They are handed over without it.
        socket.set_cloexec(true)?;
        Ok(Self(Arc::new(Listening { socket, path: None })))
    }

    /// Where it listens, with the port that port 0 became.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn address(&self) -> io::Result<Address> {
        if let Some(path) = &self.0.path {
            return Ok(Address::Unix(path.clone()));
        }
        let address = self.0.socket.local_addr()?;
        match (address.as_vsock_address(), address.as_socket()) {
            (Some((cid, port)), _) => Ok(Address::Vsock(cid, port)),
            (None, Some(address)) => Ok(Address::Tcp(address.to_string())),
            (None, None) => {
                let path = address.as_pathname().ok_or(io::ErrorKind::Unsupported)?;
                Ok(Address::Unix(path.to_path_buf()))
            }
        }
    }

    /// The next connection, or `None` when `until` passes or `stop` answers yes first.
    ///
    /// # Errors
    /// When accepting fails.
    pub fn accept(
        &self,
        until: Option<Instant>,
        stop: impl Fn() -> bool,
    ) -> io::Result<Option<Stream>> {
        loop {
            match self.0.socket.accept() {
                Ok((socket, _)) => {
                    socket.set_nonblocking(false)?;
                    return Stream::accepted(socket).map(Some);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The peer gave up between its SYN and our accept.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if stop() || until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
            self.wait_readable(Duration::from_millis(20).min(limits::TICK));
        }
    }

    fn wait_readable(&self, limit: Duration) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(limit.subsec_nanos()) };
        let _ = poll(&mut [PollFd::new(&self.0.socket, PollFlags::IN)], Some(&timeout));
    }
}

/// Whether `path` is a socket at which nobody listens any more.
fn is_dead(path: &Path) -> bool {
    let socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    let answer = UnixStream::connect(path);
    socket && answer.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Why `address` cannot be listened on, and what to do.
fn with_cure(error: io::Error, address: &Address) -> io::Error {
    let cure = match (error.kind(), address) {
        (io::ErrorKind::AddrInUse, Address::Tcp(text)) => {
            let port = text.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
            let who =
                port.and_then(holder::of_port).unwrap_or_else(|| "another process".to_owned());
            format!("{who} listens there: end it, or choose another port")
        }
        (io::ErrorKind::AddrInUse, Address::Unix(path)) => match holder::of_path(path) {
            Some(who) => format!("{who} listens there: end it, or choose another path"),
            None => "the file exists already: remove it, or choose another path".to_owned(),
        },
        (io::ErrorKind::AddrNotAvailable, _) => {
            "it is no address of this host: use one of its own, or 0.0.0.0 for all of them"
                .to_owned()
        }
        (io::ErrorKind::PermissionDenied, Address::Tcp(_)) => {
            "ports below 1024 are for root: use a higher one".to_owned()
        }
        (io::ErrorKind::PermissionDenied, Address::Unix(_)) => {
            "no right to its directory: use another, or run as its owner".to_owned()
        }
        (io::ErrorKind::NotFound, Address::Unix(_)) => {
            "its directory does not exist: make it".to_owned()
        }
        _ => return error,
    };
    io::Error::new(error.kind(), cure)
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::CID_ANY;
    use super::*;

    #[test]
    fn a_local_listener_that_is_busy_is_waited_for() {
        let path = std::env::temp_dir().join(format!("godwit-busy-{}", std::process::id()));
        let address = Address::Unix(path);
        let listener = Listener::bind(&address).unwrap();
        // More than its queue takes before the first of them is accepted.
        let callers = BACKLOG as usize + 10;
        let connected = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let calling = scope.spawn(|| {
                let call = |_| {
                    let stream = Stream::connect(&address);
                    connected.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    stream
                };
                (0..callers).map(call).collect::<Result<Vec<_>, _>>()
            });
            while connected.load(std::sync::atomic::Ordering::Relaxed) < BACKLOG as usize {
                std::thread::yield_now();
            }
            let until = Some(Instant::now() + std::time::Duration::from_secs(60));
            for _ in 0..callers {
                listener.accept(until, || false).unwrap().unwrap();
            }
            assert_eq!(calling.join().unwrap().unwrap().len(), callers);
        });
    }

    #[test]
    fn what_cannot_be_listened_on_names_the_cure() {
        let refused = |address: &Address| Listener::bind(address).unwrap_err().to_string();
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let taken = refused(&listener.address().unwrap());
        let own = format!("process {} (", std::process::id());
        assert!(
            taken.starts_with(&own) && taken.ends_with("end it, or choose another port"),
            "{taken}"
        );
        assert!(refused(&"192.0.2.1:4444".parse().unwrap()).contains("no address of this host"));

        let path = std::env::temp_dir().join(format!("godwit-listen-{}", std::process::id()));
        let address = Address::Unix(path.clone());
        // As a receiver that was killed leaves it.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&address).unwrap();
        assert!(refused(&address).starts_with(&own));
        drop(listener);
        std::fs::write(&path, "something else").unwrap();
        assert!(refused(&address).contains("the file exists already"));
        assert_eq!(std::fs::read(&path).unwrap(), b"something else");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_listener_gives_up_when_told() {
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        assert!(listener.accept(Some(Instant::now()), || false).unwrap().is_none());
        assert!(listener.accept(None, || true).unwrap().is_none());
        let address = listener.address().unwrap();
        let _connection = Stream::connect(&address).unwrap();
        assert!(listener.accept(None, || false).unwrap().is_some());
    }

    #[test]
    fn bytes_pass_over_vsock() {
        use std::io::{Read, Write};
        let test = "bytes_pass_over_vsock";
        // Not eprintln: the test harness would hold that back.
        let skip = |why: &str, error: io::Error| {
            let _ = writeln!(io::stderr(), "SKIPPED {test}: {why}: {error}");
        };
        let any = Address::Vsock(CID_ANY, u32::MAX);
        let listener = match Listener::bind(&any) {
            Ok(listener) => listener,
            Err(error) => return skip("this kernel has no vsock", error),
        };
        let Address::Vsock(_, port) = listener.address().unwrap() else {
            panic!("another kind of address")
        };
        assert!(listener.accept(Some(Instant::now()), || false).unwrap().is_none());
        match Stream::connect(&Address::Vsock(1, port)) {
            Err(error) => skip("vsock does not loop back here (module vsock_loopback)", error),
            Ok(mut ours) => {
                let mut theirs = listener.accept(None, || false).unwrap().unwrap();
                ours.write_all(b"word").unwrap();
                let mut word = [0; 4];
                theirs.read_exact(&mut word).unwrap();
                assert_eq!(&word, b"word");
            }
        }
    }
}
