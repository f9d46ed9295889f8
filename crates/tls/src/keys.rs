//! What a host shows and whom it believes, from PEM files (RFC 7468).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use crate::TlsError;

/// A side of a migration. The source connects, as a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It has the guest.
    Source,
    /// It is to have it.
    Destination,
}

impl Side {
    /// What QEMU and libvirt call it in the names of files.
    fn word(self) -> &'static str {
        match self {
            Self::Source => "client",
            Self::Destination => "server",
        }
    }
}

/// Where the PEM files are.
///
/// ```
/// use godwit_tls::Files;
///
/// let files = Files {
///     authority: "/etc/pki/CA/cacert.pem".into(),
///     certificate: "/etc/pki/libvirt/clientcert.pem".into(),
///     key: "/etc/pki/libvirt/private/clientkey.pem".into(),
///     revoked: None,
/// };
/// assert!(files.key.ends_with("clientkey.pem"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The authority's certificate.
    pub authority: PathBuf,
    /// This host's certificate, and those between it and the authority behind it.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// What the authority has revoked.
    pub revoked: Option<PathBuf>,
}

impl Files {
    /// Those of `side` in `dir`: as [`make`](crate::make) names them, as QEMU does
    /// (docs/system/tls.rst), or as libvirt does (https://libvirt.org/kbase/tlscerts.html).
    ///
    /// # Errors
    /// When none of these is there.
    pub fn in_dir(dir: &Path, side: Side) -> Result<Self, TlsError> {
        let word = side.word();
        let sets = [
            ["ca-cert.pem", "host-cert.pem", "host-key.pem", "ca-crl.pem"].map(str::to_owned),
            ["ca-cert.pem", &format!("{word}-cert.pem"), &format!("{word}-key.pem"), "ca-crl.pem"]
                .map(str::to_owned),
            [
                "CA/cacert.pem",
                &format!("libvirt/{word}cert.pem"),
                &format!("libvirt/private/{word}key.pem"),
                "CA/cacrl.pem",
            ]
            .map(str::to_owned),
        ];
        let complete = |set: &&[String; 4]| set[..3].iter().all(|name| dir.join(name).exists());
        let [authority, certificate, key, revoked] = sets
            .iter()
            .find(complete)
            .ok_or_else(|| TlsError::NoKeys { dir: dir.to_owned(), side: word })?;
        Ok(Self {
            authority: dir.join(authority),
            certificate: dir.join(certificate),
            key: dir.join(key),
            revoked: Some(dir.join(revoked)).filter(|path| path.exists()),
        })
    }
}

/// What was in the files.
#[derive(Debug)]
pub struct Keys {
    pub(crate) files: Files,
    pub(crate) authority: Vec<CertificateDer<'static>>,
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
    pub(crate) revoked: Vec<CertificateRevocationListDer<'static>>,
}

impl Keys {
    /// Reads `files`.
    ///
    /// # Errors
    /// When one cannot be read or holds something else, or others may read the key.
    pub fn read(files: &Files) -> Result<Self, TlsError> {
        let authority = certificates(&files.authority)?;
        let chain = certificates(&files.certificate)?;
        let mode = fs::metadata(&files.key).map_err(failed(&files.key))?.permissions().mode();
        if mode & 0o004 != 0 {
            return Err(TlsError::Exposed(files.key.clone()));
        }
        let key = PrivateKeyDer::from_pem_slice(&bytes(&files.key)?)
            .map_err(|_| TlsError::NotPem { path: files.key.clone(), what: "private key" })?;
        let revoked = files.revoked.as_deref().map_or(Ok(Vec::new()), |path| {
            let lists = CertificateRevocationListDer::pem_slice_iter(&bytes(path)?)
                .collect::<Result<Vec<_>, _>>();
            let what = "list of revoked certificates";
            lists.map_err(|_| TlsError::NotPem { path: path.to_owned(), what })
        })?;
        Ok(Self { files: files.clone(), authority, chain, key, revoked })
    }
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> TlsError {
    move |source| TlsError::File { path: path.to_owned(), source }
}

fn bytes(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(failed(path))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = CertificateDer::pem_slice_iter(&bytes(path)?).collect::<Result<Vec<_>, _>>();
    found
        .ok()
        .filter(|found| !found.is_empty())
        .ok_or_else(|| TlsError::NotPem { path: path.to_owned(), what: "certificate" })
}
