//! The options about encryption.

use std::path::PathBuf;

use clap::Args;
use godwit_engine::security::SecurityWish;

/// How the connections are made.
#[derive(Debug, Args)]
pub(crate) struct SecurityArguments {
    /// Encrypt all connections (TLS 1.3), with this host's keys in DIR: as `godwit keys` makes
    /// them, or as QEMU or libvirt have them (/etc/pki) [default, if the address is beyond this
    /// host: $GODWIT_KEYS, or /etc/godwit/keys if it is there]
    #[arg(long, value_name = "DIR", conflicts_with = "insecure")]
    keys: Option<PathBuf>,

    /// The name that the other side must prove by its certificate. At the source [default: the host
    /// of --to]; at the destination, more than once for several [default: whoever the authority has
    /// signed for]
    #[arg(long, value_name = "NAME", conflicts_with = "insecure")]
    peer: Vec<String>,

    /// Without keys, connect beyond this host all the same: whoever is on the way can read and
    /// change the guest's memory, and whoever reaches the port can take its place
    #[arg(long)]
    insecure: bool,
}

impl SecurityArguments {
    /// What is wished, for this process and for others on this host.
    pub(crate) fn wish(&self) -> SecurityWish {
        let absolute = |dir: &PathBuf| std::path::absolute(dir).unwrap_or_else(|_| dir.clone());
        SecurityWish {
            keys: self.keys.as_ref().map(absolute),
            default_keys: default_keys().as_ref().map(absolute),
            peers: self.peer.clone(),
            insecure: self.insecure,
        }
    }
}

/// What the environment names in place of `/etc/godwit/keys`.
pub(crate) fn default_keys() -> Option<PathBuf> {
    std::env::var_os("GODWIT_KEYS").filter(|dir| !dir.is_empty()).map(PathBuf::from)
}
