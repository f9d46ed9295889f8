//! The `--vm` argument: which machine, reached how.

use std::path::PathBuf;
use std::str::FromStr;

/// A machine as named on the command line.
#[derive(Clone, Debug)]
pub(crate) enum VmName {
    /// A QEMU, by the unix socket of a QMP monitor.
    Qemu(PathBuf),
}

impl FromStr for VmName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("qemu", path)) if !path.is_empty() => Ok(Self::Qemu(path.into())),
            _ => Err("write qemu:PATH, where PATH is the unix socket of a QMP monitor (QEMU option -qmp unix:PATH,server=on,wait=off)".to_owned()),
        }
    }
}
