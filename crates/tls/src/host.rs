//! One end of connections, made of a host's keys.

use std::fmt;
use std::sync::Arc;

use rustls::client::UnbufferedClientConnection;
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::CryptoProvider;
use rustls::server::UnbufferedServerConnection;
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig, SupportedCipherSuite};
use rustls_pki_types::ServerName;

use crate::connection::{Connection, End};
use crate::named::Named;
use crate::{Keys, Session, TlsError};

#[derive(Clone)]
enum Config {
    Source(Arc<ClientConfig>, ServerName<'static>),
    Destination(Arc<ServerConfig>),
}

/// One end of connections.
#[derive(Clone)]
pub struct Host {
    config: Config,
    /// Our certificate's file.
    own: Arc<str>,
    /// What we show of it.
    shows: Arc<[u8]>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("own", &self.own).finish_non_exhaustive()
    }
}

impl Host {
    /// A source, which expects the certificate of its destination to be made out to `name`.
    ///
    /// # Errors
    /// When the keys do not belong together, or `name` is none.
    pub fn source(keys: &Keys, name: &str) -> Result<Self, TlsError> {
        Self::source_by(keys, name, provider())
    }

    fn source_by(keys: &Keys, name: &str, provider: Arc<CryptoProvider>) -> Result<Self, TlsError> {
        let name = parsed(name)?;
        let unusable = unusable(keys);
        let roots = roots(keys)?;
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .with_crls(keys.revoked.iter().cloned())
            .build()
            .map_err(|error| unusable(error.to_string()))?;
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| unusable(error.to_string()))?
            .with_webpki_verifier(verifier)
            .with_client_auth_cert(keys.chain.clone(), keys.key.clone_key())
            .map_err(|error| unusable(error.to_string()))?;
        let config = Config::Source(Arc::new(config), name);
        Ok(Self { config, own: own(keys), shows: shows(keys) })
    }

    /// A destination, to which sources may come whose certificates are made out to one of `names`,
    /// or to any, if there are none.
    ///
    /// # Errors
    /// When the keys do not belong together, or one of `names` is none.
    pub fn destination(keys: &Keys, names: &[String]) -> Result<Self, TlsError> {
        let names = names.iter().map(|name| parsed(name)).collect::<Result<Vec<_>, _>>()?;
        let unusable = unusable(keys);
        let roots = roots(keys)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
            .with_crls(keys.revoked.iter().cloned())
            .build()
            .map_err(|error| unusable(error.to_string()))?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| unusable(error.to_string()))?
            .with_client_cert_verifier(Named::wrap(verifier, names))
            .with_single_cert(keys.chain.clone(), keys.key.clone_key())
            .map_err(|error| unusable(error.to_string()))?;
        // Each connection shows its certificates; none is taken up again by a ticket.
        config.send_tls13_tickets = 0;
        let config = Config::Destination(Arc::new(config));
        Ok(Self { config, own: own(keys), shows: shows(keys) })
    }

    /// Our certificate, in DER: what [`Session::shown`] is at the other end.
    ///
    /// ```
    /// use godwit_tls::{Files, Host, Keys, Side, make};
    ///
    /// let dir = std::env::temp_dir().join(format!("godwit-doc-{}", std::process::id()));
    /// let made = make(&dir, &["east".to_owned()], 1)?;
    /// let keys = |side| Files::in_dir(&made.hosts[0], side).and_then(|it| Keys::read(&it));
    /// let destination = Host::destination(&keys(Side::Destination)?, &[])?;
    /// let source = Host::source(&keys(Side::Source)?, "west")?;
    /// assert_eq!(source.certificate(), destination.certificate(), "it is one host's");
    /// # std::fs::remove_dir_all(&dir).unwrap();
    /// # Ok::<(), godwit_tls::TlsError>(())
    /// ```
    #[must_use]
    pub fn certificate(&self) -> &[u8] {
        &self.shows
    }

    /// A new connection, whose other end an operator would call `peer`.
    ///
    /// # Errors
    /// When the library refuses.
    pub fn session(&self, peer: &str) -> Result<Session, TlsError> {
        let failed = |error: rustls::Error| TlsError::Other(error.to_string());
        let end = match &self.config {
            Config::Source(config, name) => {
                let client = UnbufferedClientConnection::new(Arc::clone(config), name.clone());
                End::Source(client.map_err(failed)?)
            }
            Config::Destination(config) => {
                let server = UnbufferedServerConnection::new(Arc::clone(config));
                End::Destination(server.map_err(failed)?)
            }
        };
        Ok(Session::new(Connection::new(end), peer, &self.own))
    }
}

/// The library's, but that keys of 128 bits come first: they encrypt a third faster, and are as far
/// from being guessed as the certificates' are.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    let order =
        |suite: &SupportedCipherSuite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256;
    provider.cipher_suites.sort_by_key(order);
    Arc::new(provider)
}

fn own(keys: &Keys) -> Arc<str> {
    keys.files.certificate.display().to_string().into()
}

fn shows(keys: &Keys) -> Arc<[u8]> {
    keys.chain.first().map(|certificate| certificate.to_vec()).unwrap_or_default().into()
}

fn parsed(name: &str) -> Result<ServerName<'static>, TlsError> {
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    ServerName::try_from(bare.to_owned()).map_err(|_| TlsError::Name(name.to_owned()))
}

fn unusable(keys: &Keys) -> impl Fn(String) -> TlsError {
    let path = keys.files.certificate.clone();
    move |why| TlsError::Unusable { path: path.clone(), why }
}

fn roots(keys: &Keys) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in &keys.authority {
        roots.add(certificate.clone()).map_err(|error| TlsError::Unusable {
            path: keys.files.authority.clone(),
            why: error.to_string(),
        })?;
    }
    Ok(Arc::new(roots))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustls::{CipherSuiteCommon, Tls13CipherSuite};

    use super::*;
    use crate::{Files, Side, make};

    /// Records that a key is for.
    const RECORDS: u64 = 40;

    /// One whose keys are worn out soon; those of AES-GCM last for 256 GiB of a connection
    /// (RFC 8446, section 5.5).
    fn short_lived() -> Arc<CryptoProvider> {
        let mut provider = CryptoProvider::clone(&provider());
        let [SupportedCipherSuite::Tls13(suite), ..] = provider.cipher_suites[..] else {
            panic!("no suite of TLS 1.3")
        };
        let common = CipherSuiteCommon { confidentiality_limit: RECORDS, ..suite.common };
        let Tls13CipherSuite { hkdf_provider, aead_alg, quic, .. } = *suite;
        let suite = Tls13CipherSuite { common, hkdf_provider, aead_alg, quic };
        provider.cipher_suites = vec![SupportedCipherSuite::Tls13(Box::leak(Box::new(suite)))];
        Arc::new(provider)
    }

    #[test]
    fn a_key_that_is_worn_out_is_replaced() {
        // A connection that carries more than a key is for would end in the midst of a guest.
        let dir = std::env::temp_dir().join(format!("godwit-tls-keys-{}", std::process::id()));
        let made = make(&dir, &["west", "east"].map(str::to_owned), 1).unwrap();
        let keys = |number: usize, side| {
            Keys::read(&Files::in_dir(&made.hosts[number], side).unwrap()).unwrap()
        };
        let source = Host::source_by(&keys(0, Side::Source), "east", short_lived()).unwrap();
        let destination = Host::destination(&keys(1, Side::Destination), &[]).unwrap();
        let (one, other) = UnixStream::pair().unwrap();
        let bytes: Vec<u8> = (0..30_u32 << 18).flat_map(u32::to_le_bytes).collect();
        assert!(bytes.len() as u64 > 10 * RECORDS * (16 << 10));
        std::thread::scope(|scope| {
            let there = scope.spawn(|| {
                let session = destination.session("west").unwrap();
                session.begin(&other).unwrap();
                let (mut seen, mut buffer) = (Vec::new(), vec![0; 1 << 20]);
                while seen.len() < bytes.len() {
                    let read = session.read(&other, &mut buffer).unwrap();
                    seen.extend_from_slice(&buffer[..read]);
                }
                // What the source says of its keys may ask for the like.
                session.write(&other, b"all").unwrap();
                seen
            });
            let session = source.session("east").unwrap();
            session.begin(&one).unwrap();
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                rest = &rest[session.write(&one, rest).unwrap()..];
            }
            let mut word = [0; 3];
            assert_eq!(session.read(&one, &mut word).unwrap(), 3);
            assert!(there.join().unwrap() == bytes);
        });
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
