//! What can go wrong between godwit and libvirt.

/// A kind of refusal, where it matters which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// There is no such domain (VIR_ERR_NO_DOMAIN).
    NoDomain,
    /// The domain is not in a state for this, or has a job (VIR_ERR_OPERATION_INVALID).
    Invalid,
    /// Another.
    Other,
}

impl ErrorKind {
    /// By libvirt's number (virterror.h, `virErrorNumber`).
    pub(crate) fn of(code: i32) -> Self {
        match code {
            42 => Self::NoDomain,
            55 => Self::Invalid,
            _ => Self::Other,
        }
    }
}

/// Why something with libvirt could not be done.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibvirtError {
    /// The library is not there.
    #[error(
        "libvirt's library cannot be loaded ({why}): install it on this host (Debian: libvirt0)"
    )]
    NoLibrary {
        /// The loader's words.
        why: String,
    },
    /// The library lacks a function.
    #[error("libvirt's library here is too old, as it has no {function}: 8.2 or newer is needed")]
    OldLibrary {
        /// The function.
        function: &'static str,
    },
    /// The daemon is too old.
    #[error("the libvirt daemon at {uri} is {version}: 8.2 or newer is needed")]
    OldDaemon {
        /// Where it is.
        uri: String,
        /// What it says that it is.
        version: String,
    },
    /// No connection comes about.
    #[error(
        "cannot connect to libvirt at {uri}: {words}; is its daemon running, and godwit root or of \
         the group libvirt?"
    )]
    Connect {
        /// Where.
        uri: String,
        /// Libvirt's words.
        words: String,
    },
    /// Libvirt refused.
    #[error("libvirt refused to {action}: {words}")]
    Refused {
        /// What was to be done.
        action: &'static str,
        /// Which kind of refusal it is.
        kind: ErrorKind,
        /// Libvirt's words.
        words: String,
    },
    /// A text with a NUL character in it, which C cannot have.
    #[error("'{text}' has a NUL character in it, which is no part of any name")]
    Nul {
        /// The text.
        text: String,
    },
}

impl LibvirtError {
    /// Which kind of refusal it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused { kind, .. } => *kind,
            _ => ErrorKind::Other,
        }
    }

    /// Libvirt's own words, without what was to be done.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Self::Refused { words, .. } => words.clone(),
            other => other.to_string(),
        }
    }
}
