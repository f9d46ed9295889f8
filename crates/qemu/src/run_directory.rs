//! Where godwit's sockets and records are: root's for all the host, others' for themselves.
//!
//! Invariant: nobody else can write there, for what lies there is done to a QEMU.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Its path, whether it is there or not.
pub(crate) fn path() -> PathBuf {
    let user = rustix::process::getuid();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
        Some(path) if !user.is_root() => Path::new(&path).join("godwit"),
        _ if user.is_root() => "/run/godwit".into(),
        _ => format!("/tmp/godwit-{}", user.as_raw()).into(),
    }
}

/// Its path, after making sure that it is there and this user's alone.
///
/// # Errors
/// When it cannot be made, or is another user's.
pub(crate) fn make() -> io::Result<PathBuf> {
    let path = path();
    std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&path)?;
    check(&path)?;
    Ok(path)
}

/// Refuses a directory that somebody else made or may write to.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    // Not through a link, which would be another user's choice of a directory.
    let meta = std::fs::symlink_metadata(path)?;
    let own = meta.is_dir() && meta.uid() == rustix::process::getuid().as_raw();
    if own && meta.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(io::Error::other("it belongs to another user, or others may write to it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_directory_that_others_may_write_to_is_refused() {
        let own = std::env::temp_dir().join(format!("godwit-run-directory-{}", std::process::id()));
        std::fs::create_dir(&own).unwrap();
        std::fs::set_permissions(&own, PermissionsExt::from_mode(0o700)).unwrap();
        assert!(check(&own).is_ok());
        std::fs::set_permissions(&own, PermissionsExt::from_mode(0o777)).unwrap();
        assert!(check(&own).is_err());
        let link = own.join("link");
        std::os::unix::fs::symlink("/proc", &link).unwrap();
        assert!(check(&link).is_err());
        std::fs::remove_dir_all(&own).unwrap();
    }
}
