//! Whether both sides of a migration are on one host. There what lies between them is its memory,
//! and a destination that waits for a processor looks like a slow link: compressing would take it
//! one more, for nothing.
//!
//! The destination puts up a [`Landmark`]: a unix socket with an abstract name (unix(7)) that is
//! made of the session's number. Where the source finds that name in use, it is on the same host.
//! Such names belong to a network namespace, so over a tunnel, and between two namespaces of one
//! host, none is found. An address would not tell: a tunnel begins at this host's own.
//!
//! Invariant: the name, which everybody on the host can see (/proc/net/unix), tells nothing of the
//! session: who knows that may take part in it.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use godwit_tls::prove;
use godwit_wire::SessionId;

/// Tells whoever knows the session, and looks for it, that this is the same host, as long as this
/// is kept.
pub(crate) struct Landmark(#[expect(dead_code, reason = "its name is in use")] UnixDatagram);

impl Landmark {
    /// Puts it up; `None` where that is not possible, and then nobody finds it.
    pub(crate) fn put_up(session: SessionId) -> Option<Self> {
        let socket = UnixDatagram::bind_addr(&name(session)?).ok()?;
        // Nobody is to leave anything there.
        socket.shutdown(Shutdown::Both).ok()?;
        Some(Self(socket))
    }

    /// Whether that of `session` stands here.
    pub(crate) fn is_in_sight(session: SessionId) -> bool {
        let tried = name(session).map(|name| UnixDatagram::bind_addr(&name));
        matches!(tried, Some(Err(error)) if error.kind() == ErrorKind::AddrInUse)
    }
}

fn name(session: SessionId) -> Option<SocketAddr> {
    // A code without a secret is a digest.
    let digest = prove(&[0; 32], &[b"godwit", b"host", &session.0]);
    let name = u128::from_be_bytes(*digest.first_chunk()?);
    SocketAddr::from_abstract_name(format!("godwit-{name:032x}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_seen_as_long_as_it_stands_and_by_its_session_alone() {
        let [ours, other] = [[7; 16], [8; 16]].map(SessionId);
        assert!(!Landmark::is_in_sight(ours));
        let landmark = Landmark::put_up(ours);
        assert!(landmark.is_some());
        assert!((0..3).all(|_| Landmark::is_in_sight(ours)) && !Landmark::is_in_sight(other));
        assert!(Landmark::put_up(ours).is_none());
        let stranger = UnixDatagram::unbound().unwrap();
        stranger.send_to_addr(b"for you", &name(ours).unwrap()).unwrap_err();
        let shown = format!("{:?}", name(ours).unwrap());
        assert!(!shown.contains("0707"), "{shown}");
        drop(landmark);
        assert!(!Landmark::is_in_sight(ours));
    }
}
