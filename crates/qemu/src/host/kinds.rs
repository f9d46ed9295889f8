//! Words for what is told of a QEMU: who keeps it, what its RAM is, whether it could move.

/// Who started a QEMU, and keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Libvirt, as the domain of this name.
    Libvirt(String),
    /// Proxmox VE, under this number.
    Proxmox(String),
    /// Incus or LXD, as the instance of this name.
    Incus(String),
    /// Nobody who is known.
    Plain,
}

impl Owner {
    /// In a word.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Libvirt(_) => "libvirt",
            Self::Proxmox(_) => "proxmox",
            Self::Incus(_) => "incus",
            Self::Plain => "plain",
        }
    }

    /// What its keeper calls it.
    #[must_use]
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Libvirt(id) | Self::Proxmox(id) | Self::Incus(id) => Some(id),
            Self::Plain => None,
        }
    }
}

/// What kind of memory guest RAM is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RamKind {
    /// Anonymous memory of the process.
    Anonymous,
    /// A memfd.
    Memfd,
    /// A file on a hugetlbfs.
    Hugetlbfs,
    /// Another file.
    File,
}

impl RamKind {
    /// In a word.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Anonymous => "anonymous",
            Self::Memfd => "memfd",
            Self::Hugetlbfs => "hugetlbfs",
            Self::File => "file",
        }
    }
}

/// Whether a VM could move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing stands against it.
    Moves,
    /// It would be refused, in these words.
    Refused(String),
    /// It could not be asked, or not all of it, for this reason.
    Unknown(String),
}
