//! The sockets of migrations and upgrades in the run directory, which is swept when one more is
//! made, and the names of evacuations.
//!
//! Invariant: no socket is served in a directory to which another user could add, and none is
//! removed at which somebody listens or is about to: sweeping and binding are done under one lock.

use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use godwit_control::steer::{Socket, bind};
use godwit_qemu::run_directory;
use rustix::fs::FlockOperation;

/// Those who hold the lock sweep and bind, which takes them no time.
const LOCK_LIMIT: Duration = Duration::from_secs(2);

/// How the names of sockets end at which a migration or an upgrade is asked: whoever looks for
/// those that are under way asks all of them.
pub(crate) const CONTROL: &str = "sock";
/// And of those at which both sides of an upgrade meet, which are nobody else's.
pub(crate) const MEETING: &str = "meeting";

/// Listens at the socket for `name` in `directory`, of the kind that `ending` says, and removes
/// those that a godwit left behind that was killed.
///
/// # Errors
/// When the directory is not `user`'s own, or somebody listens there.
pub(crate) fn listen(
    directory: &Path,
    (name, ending): (&str, &str),
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
    bind(&directory.join(format!("{name}.{ending}"))).map_err(|error| error.to_string())
}

/// The name of an evacuation, which no other on this host has meanwhile.
#[derive(Debug)]
pub(crate) struct HeldName {
    path: PathBuf,
    /// Locked.
    file: File,
}

impl Drop for HeldName {
    fn drop(&mut self) {
        // Ours until the lock goes, which is after this; unless others share it.
        if self.file.try_lock().is_ok() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Holds `name` for the evacuation that is kept at `place`.
///
/// # Errors
/// When one of this name runs, or `directory` is not this user's own.
pub(crate) fn hold_name(directory: &Path, name: &str, place: &str) -> anyhow::Result<HeldName> {
    hold(directory, name, place, false)
}

/// The same for one of several coordinators of one evacuation, which have the same `place`: one
/// that was stopped must not keep the others from going on.
///
/// # Errors
/// When another evacuation of this name runs, or `directory` is not this user's own.
pub(crate) fn share_name(directory: &Path, name: &str, place: &str) -> anyhow::Result<HeldName> {
    hold(directory, name, place, true)
}

fn hold(directory: &Path, name: &str, place: &str, shared: bool) -> anyhow::Result<HeldName> {
    let user = rustix::process::getuid().as_raw();
    run_directory::make(directory, user).map_err(anyhow::Error::msg)?;
    let path = directory.join(format!("{name}.evacuation"));
    let failed = || path.display().to_string();
    loop {
        let open = File::options().create(true).append(true).read(true).open(&path);
        let mut file = open.with_context(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut other = String::new();
                file.read_to_string(&mut other).with_context(failed)?;
                if shared && other.trim() == place && file.try_lock_shared().is_ok() {
                    if is_at(&file, &path) {
                        return Ok(HeldName { path, file });
                    }
                    continue;
                }
                bail!(
                    "an evacuation named '{name}' runs on this host (in {}): give this one another \
                     --name",
                    other.trim()
                );
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(failed),
        }
        // Its holder may have removed it between the opening and the lock.
        if !is_at(&file, &path) {
            continue;
        }
        file.set_len(0).with_context(failed)?;
        writeln!(file, "{place}").with_context(failed)?;
        if shared && (file.lock_shared().is_err() || !is_at(&file, &path)) {
            continue;
        }
        return Ok(HeldName { path, file });
    }
}

/// Whether `file` is the one at `path`.
fn is_at(file: &File, path: &Path) -> bool {
    let number = |metadata: std::io::Result<std::fs::Metadata>| metadata.map(|it| it.ino()).ok();
    number(file.metadata()).is_some_and(|own| number(std::fs::metadata(path)) == Some(own))
}

/// Removes the sockets at which nobody listens.
fn sweep(directory: &Path) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let sockets = entries.map(|entry| entry.path());
    let is_ours = |path: &PathBuf| {
        path.extension().is_some_and(|extension| extension == CONTROL || extension == MEETING)
    };
    for socket in sockets.filter(is_ours) {
        let answer = UnixStream::connect(&socket);
        if answer.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused) {
            let _ = std::fs::remove_file(&socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

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
        let (_listener, socket) = listen(&dir.0, ("a", CONTROL), own()).unwrap();
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
            let error = listen(&dir.0, ("a", CONTROL), own()).unwrap_err();
            assert!(error.contains(&format!("(mode {mode:o}): chmod 700 /")), "{error}");
        }
        std::fs::set_permissions(&dir.0, PermissionsExt::from_mode(0o700)).unwrap();
        let error = listen(&dir.0, ("a", CONTROL), own() + 1).unwrap_err();
        assert!(
            error.contains("belongs to another user: remove it, or set XDG_RUNTIME_DIR"),
            "{error}"
        );
        let link = Dir::new("link");
        std::os::unix::fs::symlink(&dir.0, &link.0).unwrap();
        let error = listen(&link.0, ("a", CONTROL), own()).unwrap_err();
        assert!(error.contains("is not a directory"), "{error}");
    }

    #[test]
    fn the_name_of_an_evacuation_is_held_by_one() {
        let dir = Dir::new("names");
        let held = hold_name(&dir.0, "weekly", "/plans/weekly").unwrap();
        let error = hold_name(&dir.0, "weekly", "/elsewhere/weekly").unwrap_err().to_string();
        assert!(error.contains("(in /plans/weekly): give this one another --name"), "{error}");
        let _other = hold_name(&dir.0, "nightly", "/plans/nightly").unwrap();
        drop(held);
        assert!(!dir.0.join("weekly.evacuation").exists());
        // As one leaves it that was killed.
        std::fs::write(dir.0.join("weekly.evacuation"), "/plans/weekly\n").unwrap();
        drop(hold_name(&dir.0, "weekly", "/elsewhere/weekly").unwrap());
    }

    #[test]
    fn coordinators_of_one_evacuation_share_its_name() {
        let dir = Dir::new("shared");
        let first = share_name(&dir.0, "weekly", "/plans/weekly").unwrap();
        let second = share_name(&dir.0, "weekly", "/plans/weekly").unwrap();
        assert!(share_name(&dir.0, "weekly", "/elsewhere").is_err());
        assert!(hold_name(&dir.0, "weekly", "/plans/weekly").is_err());
        drop(first);
        assert!(dir.0.join("weekly.evacuation").exists());
        assert!(hold_name(&dir.0, "weekly", "/elsewhere").is_err());
        drop(second);
        assert!(!dir.0.join("weekly.evacuation").exists());
        let alone = hold_name(&dir.0, "weekly", "/plans/weekly").unwrap();
        assert!(share_name(&dir.0, "weekly", "/plans/weekly").is_err());
        drop(alone);
    }

    #[test]
    fn sockets_that_nobody_holds_are_removed_and_others_kept() {
        let dir = Dir::new("sweep");
        let (_served, _socket) = listen(&dir.0, ("served", CONTROL), own()).unwrap();
        let (_met, _meeting) = listen(&dir.0, ("7", MEETING), own()).unwrap();
        // As processes that were killed leave them.
        drop(UnixListener::bind(dir.0.join("dead.sock")).unwrap());
        drop(UnixListener::bind(dir.0.join("8.meeting")).unwrap());
        std::fs::write(dir.0.join("notes"), "").unwrap();
        let (_listener, _own) = listen(&dir.0, ("own", CONTROL), own()).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(&dir.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["7.meeting", "notes", "own.sock", "served.sock"]);
        assert!(listen(&dir.0, ("served", CONTROL), own()).is_err(), "a name that is in use");
    }
}
