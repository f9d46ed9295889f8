//! A file or block device under a disk of the guest: what it is on this host, and blocks of it.
//!
//! Read by path, beside QEMU and without a lock. Past the host's caches where that can be, so that
//! what another host has written is seen, and what this one has not written back yet is (O_DIRECT,
//! open(2)).

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Advice, OFlags};
use serde::{Deserialize, Serialize};

use crate::machine::Machine;

/// Bytes of a block.
pub(super) const BLOCK: usize = 4096;

/// What tells a file from others, on this host and between hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// This boot of this host; empty where that is not known.
    pub(super) host: String,
    /// Of a plain file: its file system and its number there.
    pub(super) file: Option<(u64, u64)>,
    /// Of a block device: its number.
    pub(super) device: Option<u64>,
    /// The server and the path that it exports, of a file on a network file system.
    pub(super) server: Option<String>,
    /// The name that the storage itself gives to a block device.
    pub(super) lun: Option<String>,
}

/// Whether two identities are of one storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sameness {
    /// They are.
    Same,
    /// Their names say so, which two storages may have in common.
    Alike,
    /// Nothing says so.
    Unknown,
}

impl Identity {
    /// Whether it is the same storage as `other`, or goes by the same name.
    pub(crate) fn may_be(&self, other: &Self) -> bool {
        self.compare(other) != Sameness::Unknown
    }

    pub(super) fn compare(&self, other: &Self) -> Sameness {
        let one = |a: Option<u64>, b: Option<u64>| a.is_some() && a == b;
        if !self.host.is_empty() && self.host == other.host {
            let same_file = self.file.is_some() && self.file == other.file;
            if same_file || one(self.device, other.device) {
                return Sameness::Same;
            }
        }
        let number = |identity: &Self| identity.file.map(|(_, number)| number);
        let served =
            self.server.is_some() && other.server.is_some() && one(number(self), number(other));
        if served || (self.lun.is_some() && self.lun == other.lun) {
            Sameness::Alike
        } else {
            Sameness::Unknown
        }
    }
}

/// An open file.
#[derive(Debug)]
pub(super) struct HostFile {
    file: File,
    pub(super) identity: Identity,
    pub(super) length: u64,
}

impl HostFile {
    /// Opens what the QEMU of `machine` calls `name`.
    ///
    /// # Errors
    /// Why it cannot be looked at, in words that follow the name.
    pub(super) fn open(machine: &Machine, name: &str) -> Result<Self, String> {
        // As QEMU tells a protocol from a path (path_has_protocol in block.c).
        let protocol = name.find([':', '/']).is_some_and(|at| name.as_bytes()[at] == b':');
        if name.is_empty() || protocol || name.starts_with("/dev/fdset/") {
            return Err("is no file that godwit could read".to_owned());
        }
        Self::open_path(&machine.path_here(Path::new(name)))
    }

    pub(super) fn open_path(path: &Path) -> Result<Self, String> {
        let open = |flags: OFlags| {
            // A device that hangs must not hold up the opening (O_NONBLOCK, open(2)).
            let flags = (flags | OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
            OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path)
        };
        let unread = |error: std::io::Error| format!("cannot be read ({error})");
        let file = open(OFlags::DIRECT).or_else(|_| open(OFlags::empty())).map_err(unread)?;
        let about = file.metadata().map_err(unread)?;
        let kind = about.file_type();
        let mut identity = Identity { host: host(), ..Identity::default() };
        if kind.is_block_device() {
            identity.device = Some(about.rdev());
            identity.lun = lun(about.rdev());
        } else if kind.is_file() {
            identity.file = Some((about.dev(), about.ino()));
            identity.server = server(about.dev());
        } else {
            return Err("is neither a file nor a block device".to_owned());
        }
        let length = (&file).seek(SeekFrom::End(0)).map_err(unread)?;
        Ok(Self { file, identity, length })
    }

    /// Where data is, as far as the file system tells, in `limit` stretches at the most: the last
    /// one may have holes.
    pub(super) fn data(&self, limit: usize) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        let mut at = 0;
        while at < self.length && found.len() < limit {
            let seek = |to| rustix::fs::seek(&self.file, to);
            let start = match seek(rustix::fs::SeekFrom::Data(at)) {
                Ok(start) => start,
                // Nothing but holes from here on.
                Err(rustix::io::Errno::NXIO) => return found,
                // No such call here: all of it counts.
                Err(_) => at,
            };
            let end = seek(rustix::fs::SeekFrom::Hole(start)).unwrap_or(self.length);
            let end = if found.len() + 1 == limit { self.length } else { end.min(self.length) };
            if end <= start {
                return found;
            }
            found.push((start, end));
            at = end;
        }
        found
    }

    /// The digest of `size` bytes, which are whole blocks; 0 for zeros, also beyond the end.
    pub(super) fn digest(&self, offset: u64, size: usize) -> std::io::Result<u64> {
        // Direct reads want memory that is aligned as the storage is.
        let mut room = vec![0; size + BLOCK];
        let start = room.as_ptr().align_offset(BLOCK).min(BLOCK);
        let block = &mut room[start..start + size];
        // A buffered read must not find what was there before another host wrote.
        let length = std::num::NonZeroU64::new(size as u64);
        let _ = rustix::fs::fadvise(&self.file, offset, length, Advice::DontNeed);
        let mut have = 0;
        while have < size {
            match self.file.read_at(&mut block[have..], offset + have as u64) {
                Ok(0) => break,
                Ok(count) => have += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // Behind the end of the file, where a direct read may not begin.
                Err(_) if offset + have as u64 >= self.length => break,
                Err(error) => return Err(error),
            }
            if !have.is_multiple_of(512) {
                break;
            }
        }
        block[have..].fill(0);
        if block.iter().all(|byte| *byte == 0) {
            return Ok(0);
        }
        Ok((godwit_wire::digest(block) as u64).max(1))
    }
}

/// This boot of this host.
fn host() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Major and minor number, as sysfs and mountinfo write them.
fn numbers(device: u64) -> String {
    format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device))
}

/// The name that the storage gives to a block device: World Wide Identifier, or that of device
/// mapper.
fn lun(device: u64) -> Option<String> {
    let dir = Path::new("/sys/dev/block").join(numbers(device));
    let read = |name: &str| {
        let text = std::fs::read_to_string(dir.join(name)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    // A partition begins somewhere on its disk.
    let whole = ["wwid", "device/wwid", "dm/uuid"].into_iter().find_map(read);
    let part = || {
        Some(format!(
            "{} from {}",
            ["../wwid", "../device/wwid"].into_iter().find_map(read)?,
            read("start")?
        ))
    };
    whole.or_else(part)
}

/// What is mounted as `device`, if it is a network file system (proc_pid_mountinfo(5)).
fn server(device: u64) -> Option<String> {
    const NETWORK: [&str; 12] = [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.glusterfs",
        "gfs2",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "smb3",
    ];
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let number = numbers(device);
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(number.as_str()))?;
    let mut behind = line.split_once(" - ")?.1.split(' ');
    let kind = behind.next().filter(|kind| NETWORK.contains(kind))?;
    Some(format!("{kind} {}", behind.next()?))
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A file that goes with this value.
    pub(in crate::compare::storage) struct Scratch(pub(in crate::compare::storage) PathBuf);

    impl Scratch {
        pub(in crate::compare::storage) fn new(
            name: &str,
            length: u64,
            written: &[(u64, &[u8])],
        ) -> Self {
            let path =
                std::env::temp_dir().join(format!("godwit-storage-{name}-{}", std::process::id()));
            let file = File::create(&path).unwrap();
            file.set_len(length).unwrap();
            written.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at).unwrap());
            file.sync_all().unwrap();
            Self(path)
        }

        pub(in crate::compare::storage) fn open(&self) -> HostFile {
            HostFile::open_path(&self.0).unwrap()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn blocks_are_digested_and_holes_are_zeros() {
        let scratch =
            Scratch::new("blocks", 1_000_100, &[(8192, &[7; 4096]), (999_424, &[1; 676])]);
        let file = scratch.open();
        assert_eq!(file.length, 1_000_100);
        assert_eq!(
            [0, 4096, 12_288, 2_000_000, u64::MAX / 2]
                .map(|at| file.digest(at, BLOCK).unwrap_or(9)),
            [0; 5]
        );
        let digest = |at| file.digest(at, BLOCK).unwrap();
        assert_ne!(digest(8192), 0);
        assert_ne!(digest(999_424), digest(8192));
        // More than the file has, and the same bytes at another place.
        assert_ne!(file.digest(0, 1 << 20).unwrap(), 0);
        assert_eq!(file.digest(16_384, 1 << 19).unwrap(), 0);
        let data = file.data(9);
        assert!(data.iter().any(|(start, end)| *start <= 8192 && *end >= 12_288), "{data:?}");
        assert!(data.iter().all(|(start, end)| start < end && *end <= file.length), "{data:?}");
        assert_eq!(file.data(1).last().unwrap().1, file.length);
    }

    #[test]
    fn a_file_is_itself_by_every_name_and_a_copy_is_not() {
        let (a, b) = (Scratch::new("a", 4096, &[]), Scratch::new("b", 4096, &[]));
        let link = a.0.with_extension("link");
        std::fs::hard_link(&a.0, &link).unwrap();
        let again = HostFile::open_path(&link).unwrap();
        std::fs::remove_file(link).unwrap();
        assert_eq!(a.open().identity.compare(&again.identity), Sameness::Same);
        assert_eq!(a.open().identity.compare(&b.open().identity), Sameness::Unknown);
    }

    #[test]
    fn names_of_the_storage_count_between_hosts() {
        let on = |host: &str| Identity { host: host.to_owned(), ..Identity::default() };
        let lun = |host: &str, name: &str| Identity { lun: Some(name.to_owned()), ..on(host) };
        let served = |host: &str, number| Identity {
            file: Some((5, number)),
            server: Some("nfs nas:/vm".to_owned()),
            ..on(host)
        };
        assert_eq!(lun("a", "naa.1").compare(&lun("b", "naa.1")), Sameness::Alike);
        assert_eq!(lun("a", "naa.1").compare(&lun("b", "naa.2")), Sameness::Unknown);
        assert_eq!(served("a", 7).compare(&served("b", 7)), Sameness::Alike);
        assert_eq!(served("a", 7).compare(&served("b", 8)), Sameness::Unknown);
        let local = |host: &str| Identity { file: Some((5, 7)), ..on(host) };
        assert_eq!(local("a").compare(&local("b")), Sameness::Unknown);
        assert_eq!(local("").compare(&local("")), Sameness::Unknown);
    }

    #[test]
    fn what_is_no_file_is_told() {
        assert!(HostFile::open_path(Path::new("/dev/null")).unwrap_err().contains("neither"));
        assert!(
            HostFile::open_path(Path::new("/nonexistent")).unwrap_err().contains("cannot be read")
        );
    }
}
