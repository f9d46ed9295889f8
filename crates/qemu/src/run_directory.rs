//! The directory for the sockets of godwit: where it is, and that it is ours.
//!
//! Invariant: no socket of ours is made, and none is connected to, in a directory to which another
//! user could add. Who could exchange the socket of QEMU's NBD server would choose what is written
//! to a disk.

use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where it is: root's for all the host, others' for themselves.
pub fn path() -> PathBuf {
    let user = rustix::process::getuid();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
        Some(path) if !user.is_root() => Path::new(&path).join("godwit"),
        _ if user.is_root() => "/run/godwit".into(),
        _ => format!("/tmp/godwit-{}", user.as_raw()).into(),
    }
}

/// Makes `directory`, for its owner only, where it is not there yet.
///
/// # Errors
/// When it cannot be made, is not `user`'s own, or others may write to it: in /tmp anyone can make
/// it first.
pub fn make(directory: &Path, user: u32) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", directory.display());
    DirBuilder::new().mode(0o700).recursive(true).create(directory).map_err(failed)?;
    check(directory, user)
}

/// Refuses a directory that somebody else made or may write to.
pub(crate) fn check(directory: &Path, user: u32) -> Result<(), String> {
    let shown = directory.display();
    let failed = |error: std::io::Error| format!("{shown}: {error}");
    // Not through a link, which may be another's as well.
    let meta = std::fs::symlink_metadata(directory).map_err(failed)?;
    let problem = if !meta.is_dir() {
        "is not a directory"
    } else if meta.uid() != user {
        "belongs to another user"
    } else if meta.mode() & 0o022 != 0 {
        return Err(format!(
            "others may write to {shown} (mode {:o}): chmod 700 {shown}",
            meta.mode() & 0o7777
        ));
    } else {
        return Ok(());
    };
    Err(format!("{shown} {problem}: remove it, or set XDG_RUNTIME_DIR to a directory of your own"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_directory_that_others_may_read_will_do_and_one_that_they_may_write_to_will_not() {
        let directory = std::env::temp_dir().join(format!("godwit-run-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let own = std::fs::metadata(&directory).unwrap().uid();
        let check_with = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&directory, mode).unwrap();
            check(&directory, own)
        };
        let outcomes = [0o700, 0o755, 0o720, 0o702].map(check_with);
        let strange = check(&directory, own + 1);
        std::fs::remove_dir(&directory).unwrap();
        assert_eq!(outcomes.each_ref().map(Result::is_ok), [true, true, false, false]);
        assert!(outcomes[2].as_ref().unwrap_err().contains("others may write to"));
        assert!(strange.unwrap_err().contains("belongs to another user"));
    }
}
