//! Addresses and connections: TCP (`HOST:PORT`), unix sockets (`unix:PATH`) and vsock
//! (`vsock:CID:PORT`, vsock(7)).

mod listener;
mod stream;

use std::fmt;
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;

use socket2::SockAddr;

pub use listener::Listener;
pub use stream::Stream;

/// VMADDR_CID_ANY (vsock(7)).
const CID_ANY: u32 = u32::MAX;

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

impl Address {
    /// Whether connections to it stay within this host: loopback and unix sockets. No name server
    /// is asked, so of names it is `localhost` alone (RFC 6761, section 6.3).
    ///
    /// ```
    /// use godwit_engine::address::Address;
    ///
    /// assert!("127.0.0.1:4444".parse::<Address>()?.is_local());
    /// assert!(!"0.0.0.0:4444".parse::<Address>()?.is_local());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(_) => self.host().is_some_and(|host| {
                let bare = host.trim_start_matches('[').trim_end_matches(']');
                let number = bare.parse::<IpAddr>();
                number.map_or(bare == "localhost", |number| number.is_loopback())
            }),
            Self::Unix(_) => true,
            Self::Vsock(..) => false,
        }
    }

    /// The host's name or number, where there is one.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        match self {
            Self::Tcp(text) => text.rsplit_once(':').map(|(host, _)| host),
            Self::Unix(_) | Self::Vsock(..) => None,
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

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_port_alone_is_told_what_is_missing() {
        for text in ["4444", ":4444", "tcp:4444"] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            let words = "write HOST:4444, or 0.0.0.0:4444 to listen on all addresses of this host";
            assert!(error.ends_with(words), "{error}");
        }
    }
}
