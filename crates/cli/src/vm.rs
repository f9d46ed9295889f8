//! The `--vm` argument: which machine, reached how, and what can come of a request to one.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use godwit_engine::Failure;
use godwit_microvm::control::client;

/// A machine as named on the command line.
#[derive(Clone, Debug)]
pub(crate) enum VmName {
    /// A QEMU, by the unix socket of a QMP monitor.
    Qemu(PathBuf),
    /// A microvm, by its control socket.
    Microvm(PathBuf),
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qemu(path) => write!(f, "qemu:{}", path.display()),
            Self::Microvm(path) => write!(f, "microvm:{}", path.display()),
        }
    }
}

impl FromStr for VmName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("qemu", path)) if !path.is_empty() => Ok(Self::Qemu(path.into())),
            Some(("microvm", path)) if !path.is_empty() => Ok(Self::Microvm(path.into())),
            _ => Err("write qemu:PATH, where PATH is the unix socket of a QMP monitor (QEMU option -qmp unix:PATH,server=on,wait=off), or microvm:PATH, where PATH is the control socket (godwit microvm run --control PATH)".to_owned()),
        }
    }
}

/// Why a request to a machine came to nothing.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// Nothing began.
    Refused(Box<dyn Error>),
    /// A migration began and failed.
    Failed(Failure),
}

impl From<client::RequestError> for RequestError {
    fn from(error: client::RequestError) -> Self {
        match error {
            client::RequestError::Refused(error) => Self::Refused(error.into()),
            client::RequestError::Failed(failure) => Self::Failed(failure),
        }
    }
}
