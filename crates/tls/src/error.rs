//! What may be wrong with certificates and connections, in words for an operator.

use std::io;
use std::path::PathBuf;

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

/// Why keys or a connection cannot be used.
///
/// ```
/// use godwit_tls::{Files, Keys, Side};
///
/// let files = Files::in_dir("/nowhere".as_ref(), Side::Source);
/// let error = files.and_then(|files| Keys::read(&files)).unwrap_err();
/// assert!(error.to_string().starts_with("there are no keys in /nowhere"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// No known set of files is in the directory.
    #[error(
        "there are no keys in {}: godwit keys makes them; files of QEMU's (ca-cert.pem, \
         {side}-cert.pem, {side}-key.pem) and libvirt's (CA/cacert.pem, libvirt/{side}cert.pem) \
         are taken, too",
        dir.display()
    )]
    NoKeys {
        /// The directory.
        dir: PathBuf,
        /// What QEMU and libvirt call this side.
        side: &'static str,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file holds something else.
    #[error("{} holds no {what} in PEM form", path.display())]
    NotPem {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        what: &'static str,
    },
    /// A private key that others may read.
    #[error(
        "{} can be read by others: chmod 600 it, and make another key if they are not trusted",
        .0.display()
    )]
    Exposed(PathBuf),
    /// A file that would be overwritten.
    #[error("{} is there already: nothing was changed", .0.display())]
    Exists(PathBuf),
    /// Certificate and key cannot be used together, or not at all.
    #[error("{}: {why}", path.display())]
    Unusable {
        /// The certificate.
        path: PathBuf,
        /// In words.
        why: String,
    },
    /// A name that is none.
    #[error("'{0}' is no name of a host: write it as it stands in the certificate")]
    Name(String),
    /// The peer shows a certificate that is not taken, or none.
    #[error("{0}")]
    Peer(String),
    /// The peer took our certificate for wrong.
    #[error("{0}")]
    Refused(String),
    /// The peer speaks something else.
    #[error("{0}")]
    NotTls(String),
    /// The library, or the connection.
    #[error("{0}")]
    Other(String),
}

/// The words for what the library found, of a peer called `peer`, against our certificate in
/// `own`.
pub(crate) fn explain(error: Error, peer: &str, own: &str) -> TlsError {
    match error {
        Error::InvalidCertificate(error) => TlsError::Peer(certificate(&error, peer)),
        Error::NoCertificatesPresented => TlsError::Peer(format!(
            "{peer} shows no certificate: give godwit there its keys (--keys DIR)"
        )),
        Error::AlertReceived(alert) => TlsError::Refused(alerted(alert, peer, own)),
        Error::InvalidMessage(
            InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion,
        ) => unwilling(peer),
        Error::PeerIncompatible(why) => {
            TlsError::NotTls(format!("{peer} speaks no TLS 1.3 that is known here: {why:?}"))
        }
        other => TlsError::Other(format!("TLS with {peer}: {other}")),
    }
}

/// The words for a peer that does not encrypt.
pub(crate) fn unwilling(peer: &str) -> TlsError {
    TlsError::NotTls(format!(
        "{peer} does not encrypt: give godwit there its keys (--keys DIR), or let both sides go \
         without (--insecure)"
    ))
}

fn certificate(error: &CertificateError, peer: &str) -> String {
    let of = format!("the certificate of {peer}");
    match error {
        CertificateError::Expired => format!("{of} has expired: make another one there"),
        CertificateError::ExpiredContext { time, not_after } => format!(
            "{of} expired {} ago: make another one there, or set the clock of this host",
            days(time.as_secs().saturating_sub(not_after.as_secs()))
        ),
        CertificateError::NotValidYet => {
            format!("{of} is not valid yet: compare the clocks of both hosts")
        }
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "{of} is not valid for {} yet: compare the clocks of both hosts",
            days(not_before.as_secs().saturating_sub(time.as_secs()))
        ),
        CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
            "{of} is signed by another authority than ours: give both hosts certificates of one \
             authority"
        ),
        CertificateError::Revoked => format!("{of} has been revoked"),
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "{of} is not made out to '{}', but to {}: name it as the certificate does \
             (--peer NAME), or make another one",
            expected.to_str(),
            if presented.is_empty() { "nobody".to_owned() } else { presented.join(", ") }
        ),
        CertificateError::NotValidForName => {
            format!("{of} is made out to another name: --peer NAME says which is expected")
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            format!("{of} is not made for this side of a connection")
        }
        CertificateError::ExpiredRevocationList
        | CertificateError::ExpiredRevocationListContext { .. } => {
            "our list of revoked certificates has expired: fetch a new one".to_owned()
        }
        other => format!("{of} cannot be taken: {other:?}"),
    }
}

fn alerted(alert: AlertDescription, peer: &str, own: &str) -> String {
    let why = match alert {
        AlertDescription::CertificateExpired => "it has expired, or a clock is wrong",
        // The second is of an authority that is called as another one.
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "another authority has signed it than the peer believes"
        }
        AlertDescription::CertificateRevoked => "it has been revoked",
        AlertDescription::CertificateRequired => "none was shown",
        AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
            "it is not made out to the name that the peer expects, or is damaged"
        }
        AlertDescription::AccessDenied => "its name may not come",
        other => return format!("{peer} ended TLS: {other:?}"),
    };
    format!("{peer} does not take our certificate ({own}): {why}")
}

fn days(seconds: u64) -> String {
    match seconds {
        0..=7199 => format!("{} minutes", seconds.div_ceil(60)),
        7200..=172_799 => format!("{} hours", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}
