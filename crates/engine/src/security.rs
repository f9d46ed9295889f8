//! Whether connections are encrypted, and who may be at their other end.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_tls::{Files, Host, Keys, Side, TlsError};
use serde::{Deserialize, Serialize};

use crate::EngineError;
use crate::address::{Address, Stream};

/// Where a host's keys are, if nothing else is said.
pub const DEFAULT_KEYS: &str = "/etc/godwit/keys";

/// How the connections of a migration are made.
///
/// ```
/// use godwit_engine::security::Security;
///
/// assert!(matches!(Security::default(), Security::Local));
/// ```
#[derive(Clone, Debug, Default)]
pub enum Security {
    /// Nothing is encrypted, and no connection leaves this host (loopback, unix sockets).
    #[default]
    Local,
    /// Nothing is encrypted, wherever a connection goes.
    Insecure,
    /// TLS 1.3 (RFC 8446) with a certificate at both ends, before the first byte of the protocol.
    Tls(Host),
}

impl Security {
    /// Whether connections to or from `address` may be made like this.
    ///
    /// # Errors
    /// [`EngineError::Plaintext`], where it may not.
    pub fn allows(&self, address: &Address) -> Result<(), EngineError> {
        match self {
            Self::Local if !address.is_local() => {
                Err(EngineError::Plaintext { address: address.to_string() })
            }
            _ => Ok(()),
        }
    }

    /// The certificate that is shown to peers, in DER; `None`: nothing is encrypted.
    pub(crate) fn shows(&self) -> Option<&[u8]> {
        match self {
            Self::Tls(host) => Some(host.certificate()),
            Self::Local | Self::Insecure => None,
        }
    }

    /// Why nobody can go on like this with a session in which the peer had `shown` this
    /// certificate, and we ours, as far as that was written down; `None` if one can. The peer takes
    /// nobody else for us.
    pub(crate) fn differs(
        &self,
        shown: Option<&[u8]>,
        ours: Option<&[u8]>,
    ) -> Option<&'static str> {
        match (shown, self.shows()) {
            (None, Some(_)) => {
                Some("it was begun without keys, and can only go on like that: leave --keys out")
            }
            (Some(_), None) => Some("it was begun with keys: give those that it was begun with"),
            (_, shows) if ours.is_some() && ours != shows => Some(
                "it was begun with other keys, by which the other side knows this one: give those \
                 that it was begun with",
            ),
            _ => None,
        }
    }

    /// Makes of a new connection to `peer` what it is to be, within `limit` or until it is to
    /// `stop`: for who speaks something else over it than migrations.
    ///
    /// # Errors
    /// What is wrong with the peer, in words, and those of the connection.
    pub fn secure(
        &self,
        stream: &mut Stream,
        peer: &str,
        limit: Duration,
        stop: impl Fn() -> bool,
    ) -> io::Result<()> {
        self.begin(stream, peer, limit, stop).map_err(|error| match error {
            BeginError::Engine(error) => io::Error::other(error.to_string()),
            BeginError::Link(error) => error,
        })
    }

    /// Makes of a new connection to `peer` what it is to be, within `limit` or until it is to
    /// `stop`.
    pub(crate) fn begin(
        &self,
        stream: &mut Stream,
        peer: &str,
        limit: Duration,
        stop: impl Fn() -> bool,
    ) -> Result<(), BeginError> {
        match self {
            Self::Local if !stream.is_local() => {
                Err(EngineError::Plaintext { address: peer.to_owned() }.into())
            }
            Self::Local | Self::Insecure => Ok(()),
            Self::Tls(host) => {
                stream.encrypt(host, peer, limit, stop).map_err(|error| match distrust(error) {
                    Ok(words) => EngineError::Distrust(words).into(),
                    Err(error) => BeginError::Link(error),
                })
            }
        }
    }
}

/// Why a connection cannot be made what it is to be.
#[derive(Debug)]
pub(crate) enum BeginError {
    /// For a reason that an operator has to know.
    Engine(EngineError),
    /// It broke, or nothing came (`WouldBlock`).
    Link(io::Error),
}

impl From<EngineError> for BeginError {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

/// The words for what is wrong with the peer, if `error` is that.
pub(crate) fn distrust(error: io::Error) -> Result<String, io::Error> {
    if error.get_ref().is_some_and(|inner| inner.is::<TlsError>()) {
        return Ok(error.to_string());
    }
    Err(error)
}

/// What an operator wishes of the connections; nothing by default.
///
/// ```
/// use godwit_engine::security::{Security, SecurityWish};
///
/// let wish = SecurityWish::default();
/// assert!(matches!(wish.source(&"127.0.0.1:4444".parse()?), Ok(Security::Local)));
/// let wish = SecurityWish { insecure: true, ..wish };
/// assert!(matches!(wish.source(&"192.0.2.7:4444".parse()?), Ok(Security::Insecure)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecurityWish {
    /// The directory of this host's keys. Without it, [`DEFAULT_KEYS`] are used for what leaves
    /// this host, if they are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<PathBuf>,
    /// A directory in the place of [`DEFAULT_KEYS`]: it must be there when something leaves this
    /// host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_keys: Option<PathBuf>,
    /// The names of which one must be in the peer's certificate. Without one a source expects the
    /// host of the destination's address, and a destination takes whoever its authority has signed
    /// for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<String>,
    /// Without encryption, also where others may listen.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
}

impl SecurityWish {
    /// What becomes of it at a source whose destination is at `to`.
    ///
    /// # Errors
    /// [`EngineError::Distrust`] says what is wrong with the keys or the names, and
    /// [`EngineError::Plaintext`] that there are none and must be.
    pub fn source(&self, to: &Address) -> Result<Security, EngineError> {
        let Some(keys) = self.keys_for(to, Side::Source)? else {
            let security = self.plain();
            return security.allows(to).map(|()| security);
        };
        let name = match (&self.peers[..], to.host()) {
            ([name], _) => name.as_str(),
            ([], Some(host)) => host,
            ([], None) => {
                let words = format!(
                    "{to} says nothing of the destination's name: name it as its certificate does \
                     (--peer NAME)"
                );
                return Err(EngineError::Distrust(words));
            }
            ([..], _) => {
                let words = "a source has one destination: name it once (--peer NAME)";
                return Err(EngineError::Distrust(words.to_owned()));
            }
        };
        Host::source(&keys, name).map(Security::Tls).map_err(wrong)
    }

    /// What becomes of it at a destination that listens at `at`.
    ///
    /// # Errors
    /// [`EngineError::Distrust`] says what is wrong with the keys or the names, and
    /// [`EngineError::Plaintext`] that there are none and must be.
    pub fn destination(&self, at: &Address) -> Result<Security, EngineError> {
        let security = match self.keys_for(at, Side::Destination)? {
            Some(keys) => {
                Host::destination(&keys, &self.peers).map(Security::Tls).map_err(wrong)?
            }
            None => self.plain(),
        };
        security.allows(at)?;
        Ok(security)
    }

    fn plain(&self) -> Security {
        if self.insecure { Security::Insecure } else { Security::Local }
    }

    fn keys_for(&self, address: &Address, side: Side) -> Result<Option<Keys>, EngineError> {
        if self.insecure {
            if self.keys.is_some() {
                let words = "with keys everything is encrypted: leave --keys or --insecure out";
                return Err(EngineError::Distrust(words.to_owned()));
            }
            return Ok(None);
        }
        let usual = || match &self.default_keys {
            Some(dir) => Some(dir.as_path()),
            None => Some(Path::new(DEFAULT_KEYS)).filter(|dir| dir.is_dir()),
        };
        let beyond = || if address.is_local() { None } else { usual() };
        let dir = match self.keys.as_deref().or_else(beyond) {
            Some(dir) => dir,
            None if !self.peers.is_empty() => {
                let words = format!(
                    "a name is proven by keys, and there are none for {address}: name their \
                     directory (--keys DIR)"
                );
                return Err(EngineError::Distrust(words));
            }
            None => return Ok(None),
        };
        let keys = Files::in_dir(dir, side).and_then(|files| Keys::read(&files));
        keys.map(Some).map_err(wrong)
    }
}

fn wrong(error: TlsError) -> EngineError {
    EngineError::Distrust(error.to_string())
}
