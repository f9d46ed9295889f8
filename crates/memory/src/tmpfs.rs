//! What the mounts of this host say about a tmpfs: where it is, and the size of its pages.

use std::path::PathBuf;

/// Where the tmpfs with device number `device` is mounted, if it keeps to pages of 4 KiB: its
/// option `huge=` is `never`, which is the default (Documentation/filesystems/tmpfs.rst).
/// `mountinfo` is the text of /proc/self/mountinfo (proc(5)).
pub(crate) fn small_pages(mountinfo: &str, device: u64) -> Option<PathBuf> {
    mounts(mountinfo, device).find_map(|(at, options)| {
        let has = options.split(',').find_map(|option| option.strip_prefix("huge="));
        has.is_none_or(|huge| huge == "never").then(|| PathBuf::from(at))
    })
}

/// Where the file system with device number `device` is mounted; `mountinfo` as above.
pub(crate) fn mounted_at(mountinfo: &str, device: u64) -> Option<PathBuf> {
    mounts(mountinfo, device).next().map(|(at, _)| PathBuf::from(at))
}

/// The mounts of the file system with device number `device`: where, and its own options.
fn mounts(mountinfo: &str, device: u64) -> impl Iterator<Item = (&str, &str)> {
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    mountinfo.lines().filter_map(move |line| {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ').skip(2);
        let at = (fields.next()? == number).then(|| fields.nth(1))??;
        Some((at, after.split(' ').next_back()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_known_by_its_device() {
        let text = "22 1 0:5 / /dev rw - devtmpfs udev rw,size=1k\n\
                    27 22 0:23 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,inode64\n\
                    28 22 0:24 / /mnt/huge rw - tmpfs none rw,huge=within_size,inode64\n\
                    29 22 0:25 / /mnt/never rw - tmpfs none rw,huge=never\n";
        let at = |minor| small_pages(text, rustix::fs::makedev(0, minor));
        assert_eq!(at(23), Some("/dev/shm".into()));
        assert_eq!(at(24), None);
        assert_eq!(at(25), Some("/mnt/never".into()));
        assert_eq!(at(26), None);
        assert_eq!(mounted_at(text, rustix::fs::makedev(0, 24)), Some("/mnt/huge".into()));
        assert_eq!(mounted_at(text, rustix::fs::makedev(0, 26)), None);
    }
}
