//! A connection to a libvirt daemon.
//!
//! Libvirt's connections may be used by several threads at once (libvirt, "Thread safety"); each
//! call waits for its own answer.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_ulong};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::error::LibvirtError;
use crate::library::{ConnectPtr, Library, c_text, library, own_text};

/// A daemon that is silent for so long is given up: every call that waits for it then fails.
pub const SILENCE_LIMIT: Duration = Duration::from_secs(20);
/// So often it is asked whether it is there.
const KEEPALIVE_SECONDS: c_int = 5;
/// VIR_DOMAIN_SAVE_PAUSED.
const PAUSED: u32 = 4;
/// The first that takes descriptors for its monitor: 8.2.0.
const OLDEST: u64 = 8_002_000;

/// A connection. Clones are the same one, which is closed with the last of them.
#[derive(Clone, Debug)]
pub struct Connection {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) library: &'static Library,
    pub(crate) pointer: ConnectPtr,
    uri: String,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Library")
    }
}

// SAFETY: a virConnectPtr is an object with a lock of its own, and any thread may use it.
unsafe impl Send for Inner {}
// SAFETY: the same; calls of several threads at once are served side by side.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the reference that open() got, which is given back once.
        unsafe { (self.library.virConnectClose)(self.pointer) };
    }
}

/// A version of libvirt's or of a hypervisor's, in its usual form.
#[must_use]
pub fn version_words(version: u64) -> String {
    format!("{}.{}.{}", version / 1_000_000, version / 1000 % 1000, version % 1000)
}

impl Connection {
    /// Connects to the daemon at `uri`.
    ///
    /// # Errors
    /// Where there is no library, no daemon, no right to it, or one of them is too old.
    pub fn open(uri: &str) -> Result<Self, LibvirtError> {
        let library = library()?;
        let name = c_text(uri)?;
        // SAFETY: the text ends with a NUL and lives as long as the call.
        let pointer = unsafe { (library.virConnectOpen)(name.as_ptr()) };
        if pointer.is_null() {
            let (_, words) = library.last_error();
            return Err(LibvirtError::Connect { uri: uri.to_owned(), words });
        }
        let inner = Arc::new(Inner { library, pointer, uri: uri.to_owned() });
        let connection = Self { inner };
        // SAFETY: the connection is open. Where the daemon has no keepalive it is none the worse.
        unsafe { (library.virConnectSetKeepAlive)(pointer, KEEPALIVE_SECONDS, 3) };
        let version = connection.daemon_version()?;
        if version < OLDEST {
            let (uri, version) = (uri.to_owned(), version_words(version));
            return Err(LibvirtError::OldDaemon { uri, version });
        }
        Ok(connection)
    }

    /// The text it was opened by.
    #[must_use]
    pub fn uri(&self) -> &str {
        &self.inner.uri
    }

    /// The address that the daemon gives itself.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn own_uri(&self) -> Result<String, LibvirtError> {
        let library = self.inner.library;
        // SAFETY: the connection is open; the text is the caller's to free.
        let uri = unsafe { own_text((library.virConnectGetURI)(self.inner.pointer)) };
        uri.ok_or_else(|| library.refused("tell its address"))
    }

    /// Whether it stands.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // SAFETY: the connection is open.
        unsafe { (self.inner.library.virConnectIsAlive)(self.inner.pointer) == 1 }
    }

    /// This connection, or a new one to the same daemon where this one stands no more, as when the
    /// daemon was started anew.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn standing(&self) -> Result<Self, LibvirtError> {
        if self.is_alive() { Ok(self.clone()) } else { Self::open(self.uri()) }
    }

    /// The daemon's version: a million for each major one, a thousand for each minor one.
    ///
    /// # Errors
    /// When it does not tell.
    pub fn daemon_version(&self) -> Result<u64, LibvirtError> {
        self.version(self.inner.library.virConnectGetLibVersion)
    }

    /// The version of the hypervisor that the daemon would start, counted in the same way.
    ///
    /// # Errors
    /// When it does not tell.
    pub fn hypervisor_version(&self) -> Result<u64, LibvirtError> {
        self.version(self.inner.library.virConnectGetVersion)
    }

    fn version(
        &self,
        ask: unsafe extern "C" fn(ConnectPtr, *mut c_ulong) -> c_int,
    ) -> Result<u64, LibvirtError> {
        let mut version = 0;
        // SAFETY: the connection is open, and the number is this function's own.
        if unsafe { ask(self.inner.pointer, &raw mut version) } < 0 {
            return Err(self.inner.library.refused("tell its version"));
        }
        Ok(version)
    }

    /// Restores a domain from the save image at `path`, a file or a pipe, and leaves it paused.
    /// Returns when all of the image was read and the domain is there.
    ///
    /// # Errors
    /// When it cannot be restored; then nothing of it is left.
    pub fn restore_paused(&self, path: &Path) -> Result<(), LibvirtError> {
        let path = c_text(&path.to_string_lossy())?;
        let library = self.inner.library;
        // SAFETY: the connection is open, and the text lives as long as the call; no XML is given.
        let done = unsafe {
            (library.virDomainRestoreFlags)(
                self.inner.pointer,
                path.as_ptr(),
                std::ptr::null(),
                PAUSED,
            )
        };
        if done < 0 { Err(library.refused("restore the domain")) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(version_words(9_000_000), "9.0.0");
        assert_eq!(version_words(OLDEST), "8.2.0");
        assert_eq!(version_words(7_002_022), "7.2.22");
    }
}
