//! The sockets of migrations in the run directory, which is swept when one more is made.
//!
//! Invariant: no socket is served in a directory to which another user could add, and none is
//! removed at which somebody listens or is about to: sweeping and binding are done under one lock.

use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use godwit_control::steer::{Socket, bind};
use godwit_qemu::run_directory;
use rustix::fs::FlockOperation;

/// Those who hold the lock sweep and bind, which takes them no time.
const LOCK_LIMIT: Duration = Duration::from_secs(2);

/// Listens at the socket for `name` in `directory`, and removes those that a godwit left behind
/// that was killed.
///
/// # Errors
/// When the directory is not `user`'s own, or somebody listens there.
pub(crate) fn listen(
    directory: &Path,
    name: &str,
    user: u32,
) -> Result<(UnixListener, Socket), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", directory.display());
    run_directory::make(directory, user)?;
    let lock = File::open(directory).map_err(failed)?;
    let until = Instant::now() + LOCK_LIMIT;
    while let Err(errno) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        if Instant::now() >= until {
            return Err(failed(errno.into()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    sweep(directory);
    bind(&directory.join(format!("{name}.sock"))).map_err(|error| error.to_string())
}

/// Removes the sockets at which nobody listens.
fn sweep(directory: &Path) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let sockets = entries.map(|entry| entry.path());
    for socket in
        sockets.filter(|path| path.extension().is_some_and(|extension| extension == "sock"))
    {
        let answer = UnixStream::connect(&socket);
        if answer.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused) {
            let _ = std::fs::remove_file(&socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::PathBuf;

    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            Self(std::env::temp_dir().join(format!("godwit-run-{name}-{}", std::process::id())))
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn own() -> u32 {
        rustix::process::getuid().as_raw()
    }

    #[test]
    fn a_directory_of_ones_own_is_made_for_its_owner_only() {
        let dir = Dir::new("own");
        let (_listener, socket) = listen(&dir.0, "a", own()).unwrap();
        assert_eq!(std::fs::metadata(&dir.0).unwrap().mode() & 0o7777, 0o700);
        assert!(dir.0.join("a.sock").exists());
        drop(socket);
        assert!(!dir.0.join("a.sock").exists());
    }

    #[test]
    fn a_directory_that_others_may_write_to_or_own_is_refused() {
        let dir = Dir::new("others");
        std::fs::create_dir(&dir.0).unwrap();
        for mode in [0o777, 0o720, 0o1777] {
            std::fs::set_permissions(&dir.0, PermissionsExt::from_mode(mode)).unwrap();
            let error = listen(&dir.0, "a", own()).unwrap_err();
            assert!(error.contains(&format!("(mode {mode:o}): chmod 700 /")), "{error}");
        }
        std::fs::set_permissions(&dir.0, PermissionsExt::from_mode(0o700)).unwrap();
        let error = listen(&dir.0, "a", own() + 1).unwrap_err();
        assert!(
            error.contains("belongs to another user: remove it, or set XDG_RUNTIME_DIR"),
            "{error}"
        );
        let link = Dir::new("link");
        std::os::unix::fs::symlink(&dir.0, &link.0).unwrap();
        let error = listen(&link.0, "a", own()).unwrap_err();
        assert!(error.contains("is not a directory"), "{error}");
    }

    #[test]
    fn sockets_that_nobody_holds_are_removed_and_others_kept() {
        let dir = Dir::new("sweep");
        let (_served, _socket) = listen(&dir.0, "served", own()).unwrap();
        // As a process that was killed leaves it.
        drop(UnixListener::bind(dir.0.join("dead.sock")).unwrap());
        std::fs::write(dir.0.join("notes"), "").unwrap();
        let (_listener, _own) = listen(&dir.0, "own", own()).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(&dir.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["notes", "own.sock", "served.sock"]);
        assert!(listen(&dir.0, "served", own()).is_err(), "a name that is in use");
    }
}
