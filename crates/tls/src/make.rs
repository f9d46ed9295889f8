//! Keys where there are none: an authority, and a certificate for each host.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

use crate::TlsError;

const AUTHORITY: &str = "ca-cert.pem";
const AUTHORITY_KEY: &str = "ca-key.pem";
const YEARS_OF_AUTHORITY: i64 = 10;

/// What [`make`] has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// The authority's certificate, if it was not there.
    pub authority: Option<PathBuf>,
    /// A directory for each host, which goes to that host.
    pub hosts: Vec<PathBuf>,
}

/// Makes, in `dir`, an authority if there is none, and keys for each of `hosts`, valid for `days`:
/// a directory that is called as the host, whose files go to that host. The authority's key stays
/// where it is.
///
/// # Errors
/// When something is there already, or cannot be written, or a name is none.
///
/// ```
/// use std::time::Duration;
/// use godwit_tls::{Files, Keys, Side, make};
///
/// let dir = std::env::temp_dir().join(format!("godwit-tls-{}", std::process::id()));
/// let made = make(&dir, &["west".to_owned(), "10.0.0.2".to_owned()], 365)?;
/// assert_eq!(made.hosts, [dir.join("west"), dir.join("10.0.0.2")]);
/// Keys::read(&Files::in_dir(&made.hosts[0], Side::Source)?)?;
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn make(dir: &Path, hosts: &[String], days: u32) -> Result<Made, TlsError> {
    let homes: Vec<PathBuf> = hosts.iter().map(|host| home(dir, host)).collect::<Result<_, _>>()?;
    if let Some(taken) = homes.iter().find(|home| home.exists()) {
        return Err(TlsError::Exists(taken.clone()));
    }
    private_dir(dir)?;
    let (certificate, key) = (dir.join(AUTHORITY), dir.join(AUTHORITY_KEY));
    let new = !certificate.exists() && !key.exists();
    let authority_key = if new { generate()? } else { read_key(&key)? };
    if new {
        let signed = authority().self_signed(&authority_key).map_err(failed)?;
        write(&key, &authority_key.serialize_pem(), 0o600)?;
        write(&certificate, &signed.pem(), 0o644)?;
    }
    let issuer = Issuer::new(authority(), authority_key);
    let authority_pem = fs::read(&certificate)
        .map_err(|source| TlsError::File { path: certificate.clone(), source })?;
    let authority_pem = String::from_utf8_lossy(&authority_pem);
    for (host, home) in hosts.iter().zip(&homes) {
        let key = generate()?;
        let signed = of_host(host, days)?.signed_by(&key, &issuer).map_err(failed)?;
        private_dir(home)?;
        write(&home.join(AUTHORITY), &authority_pem, 0o644)?;
        write(&home.join("host-cert.pem"), &signed.pem(), 0o644)?;
        write(&home.join("host-key.pem"), &key.serialize_pem(), 0o600)?;
    }
    Ok(Made { authority: new.then_some(certificate), hosts: homes })
}

/// The directory of `host`, whose name makes a file name.
fn home(dir: &Path, host: &str) -> Result<PathBuf, TlsError> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let name = rustls_pki_types::ServerName::try_from(bare);
    match name {
        Ok(_) if !bare.starts_with('.') && !bare.contains('/') => Ok(dir.join(bare)),
        _ => Err(TlsError::Name(host.to_owned())),
    }
}

fn failed(error: rcgen::Error) -> TlsError {
    TlsError::Other(error.to_string())
}

fn generate() -> Result<KeyPair, TlsError> {
    KeyPair::generate().map_err(failed)
}

fn read_key(path: &Path) -> Result<KeyPair, TlsError> {
    let text = fs::read_to_string(path)
        .map_err(|source| TlsError::File { path: path.to_owned(), source })?;
    KeyPair::from_pem(&text)
        .map_err(|_| TlsError::NotPem { path: path.to_owned(), what: "private key" })
}

/// The same for ever, so that its key alone is needed to sign for it.
fn authority() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "godwit migration authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    valid_for(&mut params, Duration::days(365 * YEARS_OF_AUTHORITY));
    params
}

fn of_host(host: &str, days: u32) -> Result<CertificateParams, TlsError> {
    let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let mut params = CertificateParams::new(vec![bare.clone()]).map_err(failed)?;
    params.distinguished_name.push(DnType::CommonName, bare);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    valid_for(&mut params, Duration::days(days.into()));
    Ok(params)
}

/// From an hour ago, for hosts whose clocks are behind.
fn valid_for(params: &mut CertificateParams, time: Duration) {
    let now = OffsetDateTime::now_utc();
    (params.not_before, params.not_after) = (now - Duration::hours(1), now + time);
}

fn private_dir(dir: &Path) -> Result<(), TlsError> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|source| TlsError::File { path: dir.to_owned(), source })
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), TlsError> {
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| match source.kind() {
        std::io::ErrorKind::AlreadyExists => TlsError::Exists(path.to_owned()),
        _ => TlsError::File { path: path.to_owned(), source },
    })
}
