//! What makes a domain that has arrived persistent, as it was at the source.

use godwit_libvirt::Connection;
use serde::{Deserialize, Serialize};

use crate::QemuError;

/// The definition of a persistent domain, and the libvirt that is to have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Definition {
    pub(crate) uri: String,
    /// Of what is started the next time.
    pub(crate) xml: String,
    /// It is started with its host.
    pub(crate) autostarts: bool,
}

impl Definition {
    /// Has libvirt keep it.
    ///
    /// # Errors
    /// When libvirt is not there, or refuses.
    pub(crate) fn keep(&self) -> Result<(), QemuError> {
        let domain = Connection::open(&self.uri)?.define(&self.xml)?;
        if self.autostarts {
            domain.set_autostart(true)?;
        }
        Ok(())
    }
}
