//! Addresses and connections: TCP (`HOST:PORT`), unix sockets (`unix:PATH`) and vsock
//! (`vsock:CID:PORT`, vsock(7)).

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};

use crate::{holder, limits};

/// VMADDR_CID_ANY (vsock(7)).
const CID_ANY: u32 = u32::MAX;
/// Connections that may wait to be accepted: a source's channels, and some strangers.
const BACKLOG: i32 = 128;

/// Where a destination listens.
///
/// ```
/// use godwit_engine::address::Address;
///
/// assert_eq!("tcp:west:4444".parse(), Ok(Address::Tcp("west:4444".to_owned())));
/// assert_eq!("vsock:3:4444".parse(), Ok(Address::Vsock(3, 4444)));
/// assert_eq!(Address::Unix("/run/vm1".into()).to_string(), "unix:/run/vm1");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `HOST:PORT`, also written `tcp:HOST:PORT`.
    Tcp(String),
    /// `unix:PATH`.
    Unix(PathBuf),
    /// `vsock:CID:PORT`: another VM of this host, or the host. To listen, `vsock:any:PORT`.
    Vsock(u32, u32),
}

/// A text that is no address.
///
/// ```
/// use godwit_engine::address::Address;
///
/// let error = ":4444".parse::<Address>().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "':4444' is not an address: write HOST:4444, \
///      or 0.0.0.0:4444 to listen on all addresses of this host"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an address: write {example}", example = example(.0))]
pub struct AddressError(String);

/// What would be an address instead of `text`.
fn example(text: &str) -> String {
    let port = text.strip_prefix("tcp:").unwrap_or(text);
    let port = port.strip_prefix(':').unwrap_or(port);
    match port.parse::<u16>() {
        Ok(port) => {
            format!("HOST:{port}, or 0.0.0.0:{port} to listen on all addresses of this host")
        }
        Err(_) => "HOST:PORT, [IPV6]:PORT, unix:PATH or vsock:CID:PORT".to_owned(),
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = || AddressError(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(error()) } else { Ok(Self::Unix(path.into())) };
        }
        if let Some(vsock) = text.strip_prefix("vsock:") {
            let (cid, port) = vsock.split_once(':').ok_or_else(error)?;
            let cid = if cid == "any" { CID_ANY } else { cid.parse().map_err(|_| error())? };
            return Ok(Self::Vsock(cid, port.parse().map_err(|_| error())?));
        }
        let tcp = text.strip_prefix("tcp:").unwrap_or(text);
        let (host, port) = tcp.rsplit_once(':').ok_or_else(error)?;
        let bare_ipv6 = host.contains(':') && !host.starts_with('[');
        if host.is_empty() || bare_ipv6 || port.parse::<u16>().is_err() {
            return Err(error());
        }
        Ok(Self::Tcp(tcp.to_owned()))
    }
}

impl Address {
    /// As the kernel takes it; a host's name may have several.
    fn resolve(&self) -> io::Result<Vec<SockAddr>> {
        match self {
            Self::Tcp(text) => Ok(text.to_socket_addrs()?.map(SockAddr::from).collect()),
            Self::Unix(path) => Ok(vec![SockAddr::unix(path)?]),
            Self::Vsock(cid, port) => Ok(vec![SockAddr::vsock(*cid, *port)]),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Vsock(CID_ANY, port) => write!(f, "vsock:any:{port}"),
            Self::Vsock(cid, port) => write!(f, "vsock:{cid}:{port}"),
        }
    }
}

/// One connection, whatever it goes over.
///
/// ```
/// use std::io::Write;
/// use godwit_engine::address::{Listener, Stream};
///
/// let listener = Listener::bind(&"127.0.0.1:0".parse()?)?;
/// let mut stream = Stream::connect(&listener.address()?)?;
/// stream.write_all(b"hello")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Stream(Socket);

impl Stream {
    /// Connects to `address` within [`limits::CONNECT`].
    ///
    /// # Errors
    /// When nobody answers there.
    pub fn connect(address: &Address) -> io::Result<Self> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in address.resolve()? {
            let socket = Socket::new(address.domain(), Type::STREAM, None)?;
            // Locally the kernel answers at once, or waits for a place in the listener's queue.
            let connected = match address.as_socket() {
                Some(_) => socket.connect_timeout(&address, limits::CONNECT),
                None => socket.connect(&address),
            };
            match connected {
                Ok(()) => return Self(socket).with_limits(),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn with_limits(self) -> io::Result<Self> {
        if matches!(self.0.domain()?, Domain::IPV4 | Domain::IPV6) {
            self.0.set_tcp_nodelay(true)?;
            // A cable that was pulled must not be waited for longer than this, whether we send
            // (user timeout) or only listen (keep-alive): tcp(7).
            let limit = limits::LINK;
            self.0.set_tcp_user_timeout(Some(limit))?;
            let alive =
                TcpKeepalive::new().with_time(limit / 2).with_interval(limit / 5).with_retries(3);
            self.0.set_tcp_keepalive(&alive)?;
        }
        self.set_write_limit(limits::WRITE)?;
        Ok(self)
    }

    /// Limits the time of one write without progress.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_write_limit(&self, limit: Duration) -> io::Result<()> {
        self.0.set_write_timeout(Some(limit))
    }

    /// Limits the time of one read; `None`: wait for as long as the link stands.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_read_limit(&self, limit: Option<Duration>) -> io::Result<()> {
        self.0.set_read_timeout(limit)
    }

    /// Who is at the other end, as an operator would call it.
    #[must_use]
    pub fn peer(&self) -> String {
        let peer = self.0.peer_addr().ok();
        if let Some(at) = peer.as_ref().and_then(SockAddr::as_socket) {
            return at.to_string();
        }
        match (sockopt::socket_peercred(&self.0), peer.and_then(|peer| peer.as_vsock_address())) {
            (_, Some((cid, _))) => format!("machine {cid} (vsock)"),
            (Ok(peer), None) => format!("process {}", peer.pid.as_raw_nonzero()),
            // A process of a namespace that this one cannot see.
            (Err(_), None) => "another machine".to_owned(),
        }
    }

    /// Another handle to the same connection.
    ///
    /// # Errors
    /// When descriptors are exhausted.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Ends the connection both ways; reads and writes in other threads return.
    pub fn shut_down(&self) {
        // It fails when the peer was first, which is as good.
        let _ = self.0.shutdown(Shutdown::Both);
    }

    /// Ends the sending direction: the peer reads what is on its way, then the end.
    pub fn shut_down_write(&self) {
        let _ = self.0.shutdown(Shutdown::Write);
    }
}

impl From<UnixStream> for Stream {
    /// A connection that was made elsewhere.
    fn from(stream: UnixStream) -> Self {
        Self(stream.into())
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

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
            (None, None) => Err(io::ErrorKind::Unsupported.into()),
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
                    return Stream(socket).with_limits().map(Some);
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
    fn addresses_round_trip() {
        for text in
            ["host:4444", "127.0.0.1:0", "[::1]:7", "unix:/run/x", "vsock:2:4444", "vsock:any:1"]
        {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("tcp:host:1".parse::<Address>().unwrap().to_string(), "host:1");
        for text in [
            "host",
            "host:",
            ":4444",
            "host:70000",
            "unix:",
            "::1:80",
            "vsock:2",
            "vsock:x:1",
            "vsock:2:",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn both_ends_over_tcp_give_up_a_link_that_is_dead() {
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let ours = Stream::connect(&listener.address().unwrap()).unwrap();
        let theirs = listener.accept(None, || false).unwrap().unwrap();
        for stream in [ours, theirs] {
            let stream = stream.0;
            let limit = sockopt::tcp_user_timeout(&stream).unwrap();
            assert_eq!(u128::from(limit), limits::LINK.as_millis());
            assert!(sockopt::socket_keepalive(&stream).unwrap());
            let interval = sockopt::tcp_keepintvl(&stream).unwrap();
            let silence = sockopt::tcp_keepidle(&stream).unwrap()
                + interval * sockopt::tcp_keepcnt(&stream).unwrap();
            assert!(silence <= limits::LINK + interval, "{silence:?}");
        }
    }

    #[test]
    fn a_port_alone_is_told_what_is_missing() {
        for text in ["4444", ":4444", "tcp:4444"] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            let words = "write HOST:4444, or 0.0.0.0:4444 to listen on all addresses of this host";
            assert!(error.ends_with(words), "{error}");
        }
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
        use std::io::Write;
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
