//! One connection.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_tls::{Host, Session};
use rustix::net::sockopt;
use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};

use super::Address;
use crate::limits;

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
pub struct Stream {
    socket: Socket,
    /// What it is encrypted by.
    session: Option<Arc<Session>>,
    /// How long the other side took to take it, where it was connected to.
    connected_in: Duration,
    /// How long whoever is there took to answer the greeting, where it was waited for.
    greeted_in: Duration,
}

impl Stream {
    /// Connects to `address` within [`limits::CONNECT`].
    ///
    /// # Errors
    /// When nobody answers there.
    pub fn connect(address: &Address) -> io::Result<Self> {
        Self::connect_within(address, limits::CONNECT)
    }

    /// The same within `limit` for each address that a name has.
    ///
    /// # Errors
    /// When nobody answers there.
    pub fn connect_within(address: &Address, limit: Duration) -> io::Result<Self> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in address.resolve()? {
            let socket = Socket::new(address.domain(), Type::STREAM, None)?;
            let begun = Instant::now();
            // Locally the kernel answers at once, or waits for a place in the listener's queue.
            let connected = match address.as_socket() {
                Some(_) => socket.connect_timeout(&address, limit),
                None => socket.connect(&address),
            };
            match connected {
                Ok(()) => {
                    let connected_in = begun.elapsed();
                    return Self { connected_in, ..Self::plain(socket) }.with_limits();
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn plain(socket: Socket) -> Self {
        let (connected_in, greeted_in) = (Duration::ZERO, Duration::ZERO);
        Self { socket, session: None, connected_in, greeted_in }
    }

    /// A connection that was accepted.
    pub(super) fn accepted(socket: Socket) -> io::Result<Self> {
        Self::plain(socket).with_limits()
    }

    fn with_limits(self) -> io::Result<Self> {
        if matches!(self.socket.domain()?, Domain::IPV4 | Domain::IPV6) {
            self.socket.set_tcp_nodelay(true)?;
            // A cable that was pulled must not be waited for longer than this, whether we send
            // (user timeout) or only listen (keep-alive): tcp(7).
            let limit = limits::LINK;
            self.socket.set_tcp_user_timeout(Some(limit))?;
            let alive =
                TcpKeepalive::new().with_time(limit / 2).with_interval(limit / 5).with_retries(3);
            self.socket.set_tcp_keepalive(&alive)?;
        }
        self.set_write_limit(limits::WRITE)?;
        Ok(self)
    }

    /// Has the peer take its time to read ([`limits::PLACE`]), which another connection tells to be
    /// there. While it reads nothing, the kernel counts what waits here as unacknowledged.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn be_patient(&self) -> io::Result<()> {
        if matches!(self.socket.domain()?, Domain::IPV4 | Domain::IPV6) {
            self.socket.set_tcp_user_timeout(Some(limits::PLACE))?;
        }
        self.set_write_limit(limits::PLACE)
    }

    /// Takes more to send only while no more than so many `bytes` wait to be sent for the first
    /// time (`TCP_NOTSENT_LOWAT`, tcp(7)).
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn keep_little_unsent(&self, bytes: u32) -> io::Result<()> {
        if matches!(self.socket.domain()?, Domain::IPV4 | Domain::IPV6) {
            self.socket.set_tcp_notsent_lowat(bytes)?;
        }
        Ok(())
    }

    /// Limits the time of one write without progress.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_write_limit(&self, limit: Duration) -> io::Result<()> {
        self.socket.set_write_timeout(Some(limit))
    }

    /// Limits the time of one read; `None`: wait for as long as the link stands.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_read_limit(&self, limit: Option<Duration>) -> io::Result<()> {
        self.socket.set_read_timeout(limit)
    }

    /// How long it took to connect, which over a network is its round trip; zero for a connection
    /// that was accepted.
    pub(crate) fn connected_in(&self) -> Duration {
        self.connected_in
    }

    /// How long the answer to the greeting took: a round trip all the way, also where somebody
    /// between the two takes connections (ssh, a proxy). Zero where none was waited for.
    pub(crate) fn greeted_in(&self) -> Duration {
        self.greeted_in
    }

    /// The greeting was answered in that time.
    pub(crate) fn note_greeting(&mut self, time: Duration) {
        self.greeted_in = time;
    }

    /// Who is at the other end, as an operator would call it.
    #[must_use]
    pub fn peer(&self) -> String {
        let peer = self.socket.peer_addr().ok();
        if let Some(at) = peer.as_ref().and_then(SockAddr::as_socket) {
            return at.to_string();
        }
        match (
            sockopt::socket_peercred(&self.socket),
            peer.and_then(|peer| peer.as_vsock_address()),
        ) {
            (_, Some((cid, _))) => format!("machine {cid} (vsock)"),
            (Ok(peer), None) => format!("process {}", peer.pid.as_raw_nonzero()),
            // A process of a namespace that this one cannot see.
            (Err(_), None) => "another machine".to_owned(),
        }
    }

    /// The user of the process at the other end of a unix socket (`SO_PEERCRED`, unix(7)); `None`
    /// over a network.
    #[must_use]
    pub fn user(&self) -> Option<u32> {
        let is_unix = self.socket.domain().is_ok_and(|domain| domain == Domain::UNIX);
        let peer = is_unix.then(|| sockopt::socket_peercred(&self.socket).ok()).flatten();
        peer.map(|peer| peer.uid.as_raw())
    }

    /// Whether it stays within this host.
    pub(crate) fn is_local(&self) -> bool {
        match self.socket.peer_addr() {
            Ok(peer) if peer.as_vsock_address().is_some() => false,
            Ok(peer) => peer.as_socket().is_none_or(|peer| peer.ip().is_loopback()),
            Err(_) => false,
        }
    }

    /// Encrypts all that follows, at one end of it `host`, within `limit` or until it is to `stop`.
    /// The other end is `peer` to an operator.
    ///
    /// # Errors
    /// Those of the socket, `WouldBlock` where it was given up, and what is wrong with the peer.
    pub(crate) fn encrypt(
        &mut self,
        host: &Host,
        peer: &str,
        limit: Duration,
        stop: impl Fn() -> bool,
    ) -> io::Result<()> {
        let session = host.session(peer).map_err(io::Error::other)?;
        let mut hurried = Hurried { socket: &self.socket, until: Instant::now() + limit, stop };
        if let Err(error) = session.begin(&mut hurried) {
            self.await_end(hurried.stop);
            return Err(error);
        }
        self.socket.set_read_timeout(None)?;
        self.session = Some(Arc::new(session));
        Ok(())
    }

    /// Says nothing more, and waits for a moment until the peer does so, too. Who ends a
    /// connection of which something is unread takes its own last words along (tcp(7): a reset
    /// overtakes data).
    fn await_end(&self, stop: impl Fn() -> bool) {
        let _ = self.socket.shutdown(Shutdown::Write);
        let mut hurried =
            Hurried { socket: &self.socket, until: Instant::now() + limits::ABORT, stop };
        while matches!(hurried.read(&mut [0; 4096]), Ok(1..)) {}
    }

    /// The certificate that the peer has shown, in DER; `None`: nothing is encrypted.
    #[must_use]
    pub fn shown(&self) -> Option<Vec<u8>> {
        self.session.as_ref().and_then(|session| session.shown())
    }

    /// Reads, until `until` at the latest or until it is to `stop`. Then it is `WouldBlock`.
    ///
    /// # Errors
    /// That, and those of the connection.
    pub fn read_until(
        &mut self,
        buffer: &mut [u8],
        until: Instant,
        stop: impl Fn() -> bool,
    ) -> io::Result<usize> {
        let mut hurried = Hurried { socket: &self.socket, until, stop };
        match &self.session {
            Some(session) => session.read(&mut hurried, buffer),
            None => hurried.read(buffer),
        }
    }

    /// Another handle to the same connection.
    ///
    /// # Errors
    /// When descriptors are exhausted.
    pub fn try_clone(&self) -> io::Result<Self> {
        let socket = self.socket.try_clone()?;
        let Self { connected_in, greeted_in, .. } = *self;
        Ok(Self { socket, session: self.session.clone(), connected_in, greeted_in })
    }

    /// Ends the connection both ways; reads and writes in other threads return.
    pub fn shut_down(&self) {
        // It fails when the peer was first, which is as good.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Ends the sending direction: the peer reads what is on its way, then the end.
    pub fn shut_down_write(&self) {
        if let Some(session) = &self.session {
            // Without it the peer takes the end for a connection that somebody cut.
            let _ = session.finish(&self.socket);
        }
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<UnixStream> for Stream {
    /// A connection that was made elsewhere.
    fn from(stream: UnixStream) -> Self {
        Self::plain(stream.into())
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &self.session {
            Some(session) => session.read(&self.socket, buffer),
            None => self.socket.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.session {
            Some(session) => session.write(&self.socket, bytes),
            None => self.socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A socket of which a read ends in time. It leaves a time limit of its own at the socket.
struct Hurried<'a, F> {
    socket: &'a Socket,
    until: Instant,
    stop: F,
}

impl<F: Fn() -> bool> Read for Hurried<'_, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            // One limit for all of it, also for a peer that sends a byte now and then.
            let wait = left.min(limits::TICK / 2).max(Duration::from_millis(1));
            self.socket.set_read_timeout(Some(wait))?;
            match (&mut &*self.socket).read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && !left.is_zero()
                        && !(self.stop)() => {}
                read => return read,
            }
        }
    }
}

impl<F> Write for Hurried<'_, F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&mut &*self.socket).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Listener;
    use super::*;

    #[test]
    fn both_ends_over_tcp_give_up_a_link_that_is_dead() {
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let ours = Stream::connect(&listener.address().unwrap()).unwrap();
        let theirs = listener.accept(None, || false).unwrap().unwrap();
        for stream in [ours, theirs] {
            let stream = stream.socket;
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
    fn a_channel_waits_for_a_peer_that_places_pages() {
        // Regression: what the peer leaves unread counts as unacknowledged, and after 10 s the
        // kernel took the link for dead: one huge page of 1 GiB may take longer to be had.
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let mut ours = Stream::connect(&listener.address().unwrap()).unwrap();
        ours.be_patient().unwrap();
        let mut theirs = listener.accept(None, || false).unwrap().unwrap();
        let bytes = 64 << 20;
        let writing = std::thread::spawn(move || ours.write_all(&vec![1; bytes]));
        std::thread::sleep(limits::LINK + Duration::from_secs(4));
        let mut read = Vec::new();
        theirs.read_to_end(&mut read).unwrap();
        writing.join().unwrap().unwrap();
        assert_eq!(read.len(), bytes);
    }
}
