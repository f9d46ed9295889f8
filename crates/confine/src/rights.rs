//! Capabilities (capabilities(7)), and giving them up.

use std::fmt;
use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets};
use rustix::thread::{
    capabilities, clear_ambient_capability_set, configure_capability_in_ambient_set, no_new_privs,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// Capabilities by name.
///
/// ```
/// use godwit_confine::Rights;
///
/// let rights = Rights::TRACE | Rights::KILL;
/// assert_eq!(rights.to_string(), "CAP_KILL, CAP_SYS_PTRACE");
/// assert!(!rights.contains(Rights::NICE));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights(CapabilitySet);

/// Those that godwit has a use for.
const NAMES: [(Rights, &str); 11] = [
    (Rights::SUSPEND, "CAP_SYS_ADMIN"),
    (Rights::MAPPED, "CAP_CHECKPOINT_RESTORE"),
    (Rights::FILES, "CAP_DAC_OVERRIDE"),
    (Rights::LOOK, "CAP_DAC_READ_SEARCH"),
    (Rights::KILL, "CAP_KILL"),
    (Rights::PORTS, "CAP_NET_BIND_SERVICE"),
    (Rights::PACKETS, "CAP_NET_RAW"),
    (Rights::TRACE, "CAP_SYS_PTRACE"),
    (Rights::NICE, "CAP_SYS_NICE"),
    (Rights::RESOURCE, "CAP_SYS_RESOURCE"),
    (Rights::OWNER, "CAP_FOWNER"),
];

impl Rights {
    /// None.
    pub const NONE: Self = Self(CapabilitySet::empty());
    /// CAP_DAC_OVERRIDE: to reach sockets and files that belong to others.
    pub const FILES: Self = Self(CapabilitySet::DAC_OVERRIDE);
    /// CAP_CHECKPOINT_RESTORE: to open memory that a process has mapped and no name leads to
    /// (`/proc/PID/map_files`, proc(5)).
    pub const MAPPED: Self = Self(CapabilitySet::CHECKPOINT_RESTORE);
    /// CAP_DAC_READ_SEARCH: to read files and directories of others.
    pub const LOOK: Self = Self(CapabilitySet::DAC_READ_SEARCH);
    /// CAP_KILL: to end a process of another user.
    pub const KILL: Self = Self(CapabilitySet::KILL);
    /// CAP_NET_BIND_SERVICE: to listen at a port below 1024.
    pub const PORTS: Self = Self(CapabilitySet::NET_BIND_SERVICE);
    /// CAP_NET_RAW: to have copies of what an interface is given, and to give it more (packet(7)).
    pub const PACKETS: Self = Self(CapabilitySet::NET_RAW);
    /// CAP_SYS_PTRACE: to attach to a process of another user, and to read and write its memory.
    pub const TRACE: Self = Self(CapabilitySet::SYS_PTRACE);
    /// CAP_SYS_NICE: to be woken in time.
    pub const NICE: Self = Self(CapabilitySet::SYS_NICE);
    /// CAP_SYS_RESOURCE: to be the last that is killed where memory runs out.
    pub const RESOURCE: Self = Self(CapabilitySet::SYS_RESOURCE);
    /// CAP_SYS_ADMIN: to suspend the system-call filter of a process that is attached to
    /// (PTRACE_O_SUSPEND_SECCOMP, ptrace(2)).
    pub const SUSPEND: Self = Self(CapabilitySet::SYS_ADMIN);
    /// CAP_FOWNER: to change the mode of what belongs to others.
    pub const OWNER: Self = Self(CapabilitySet::FOWNER);

    /// These and `others`.
    #[must_use]
    pub const fn and(self, others: Self) -> Self {
        Self(self.0.union(others.0))
    }

    /// Whether all of `others` are among them.
    #[must_use]
    pub fn contains(self, others: Self) -> bool {
        self.0.contains(others.0)
    }

    /// Those that the calling thread has in effect.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn of_this_thread() -> io::Result<Self> {
        Ok(Self(capabilities(None)?.effective))
    }
}

impl std::ops::BitOr for Rights {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl std::ops::BitAnd for Rights {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = NAMES.iter().filter(|(right, _)| self.contains(*right));
        let mut names: Vec<&str> = named.map(|(_, name)| *name).collect();
        names.sort_unstable();
        let others = NAMES.iter().fold(self.0, |rest, (right, _)| rest - right.0);
        match (names.is_empty(), others.is_empty()) {
            (true, true) => f.write_str("none"),
            (true, false) => write!(f, "{:#x}", others.bits()),
            (false, true) => f.write_str(&names.join(", ")),
            (false, false) => write!(f, "{}, {:#x}", names.join(", "), others.bits()),
        }
    }
}

/// Gives up, for good, every capability of the calling thread that is not among `rights`, and
/// those that a program which it runs could get. What it has not got it does not get.
///
/// # Errors
/// When the kernel refuses, of which no reason is known.
///
/// ```
/// use godwit_confine::{Rights, keep};
///
/// std::thread::spawn(|| {
///     keep(Rights::NONE).unwrap();
///     assert_eq!(Rights::of_this_thread().unwrap(), Rights::NONE);
/// });
/// ```
pub fn keep(rights: Rights) -> io::Result<()> {
    let had = capabilities(None)?;
    // First, since it takes a capability itself. Who has not got that one cannot run a program
    // that gets any either, once it is sealed.
    if had.effective.contains(CapabilitySet::SETPCAP) {
        for bit in 0..u64::BITS {
            let one = CapabilitySet::from_bits_retain(1 << bit);
            if rights.0.contains(one) {
                continue;
            }
            match remove_capability_from_bounding_set(one) {
                // Beyond the last that this kernel has.
                Err(rustix::io::Errno::INVAL) => break,
                removed => removed?,
            }
        }
    }
    // Those that are passed on by somebody who is not root stay passed on.
    for bit in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        let gone = !rights.0.contains(one) && had.inheritable.contains(one);
        if gone {
            configure_capability_in_ambient_set(one, false)?;
        }
    }
    if rights == Rights::NONE {
        clear_ambient_capability_set()?;
    }
    let permitted = had.permitted & rights.0;
    set_capabilities(
        None,
        CapabilitySets {
            effective: had.effective & permitted,
            permitted,
            inheritable: had.inheritable & rights.0,
        },
    )?;
    Ok(())
}

/// Gives up all of them, and the way back.
///
/// # Errors
/// As [`keep`].
pub fn give_up_all() -> io::Result<()> {
    seal()?;
    keep(Rights::NONE)
}

/// From now on no program that this thread runs, nor one of its threads, gets more than it has
/// itself (PR_SET_NO_NEW_PRIVS).
///
/// # Errors
/// When the kernel refuses, of which no reason is known.
///
/// ```
/// std::thread::spawn(|| {
///     godwit_confine::seal().unwrap();
///     assert!(godwit_confine::is_sealed());
/// });
/// ```
pub fn seal() -> io::Result<()> {
    Ok(set_no_new_privs(true)?)
}

/// Whether [`seal`] was called here.
#[must_use]
pub fn is_sealed() -> bool {
    no_new_privs().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(name: &str) -> String {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().to_owned()
    }

    fn in_a_thread(run: impl FnOnce() + Send + 'static) {
        std::thread::spawn(run).join().unwrap();
    }

    #[test]
    fn what_is_given_up_is_gone_from_every_set_of_the_thread() {
        let before = status("CapEff:");
        in_a_thread(|| {
            let had = Rights::of_this_thread().unwrap();
            keep(Rights::TRACE | Rights::KILL).unwrap();
            let left = Rights::of_this_thread().unwrap();
            assert_eq!(left, had & (Rights::TRACE | Rights::KILL));
            for set in ["CapPrm:", "CapEff:"] {
                assert_eq!(u64::from_str_radix(&status(set), 16).unwrap(), left.0.bits(), "{set}");
            }
            if rustix::process::getuid().is_root() {
                let bounding = u64::from_str_radix(&status("CapBnd:"), 16).unwrap();
                assert_eq!(bounding & !(Rights::TRACE | Rights::KILL).0.bits(), 0);
            }
            give_up_all().unwrap();
            let sets = ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"];
            assert!(sets.iter().all(|set| status(set) == "0000000000000000"));
            assert_eq!(status("NoNewPrivs:"), "1");
            // And from one that it starts.
            in_a_thread(|| assert_eq!(status("CapEff:"), "0000000000000000"));
            keep(Rights::TRACE).unwrap();
            assert_eq!(status("CapEff:"), "0000000000000000", "nothing comes back");
        });
        assert_eq!(status("CapEff:"), before, "others keep theirs");
    }

    #[test]
    fn they_have_the_names_of_the_manual() {
        assert_eq!(Rights::NONE.to_string(), "none");
        let all = NAMES.iter().fold(Rights::NONE, |all, (right, _)| all | *right);
        assert_eq!(all.to_string().split(", ").count(), NAMES.len());
        assert_eq!(Rights(CapabilitySet::SYS_MODULE).to_string(), "0x10000");
    }
}
