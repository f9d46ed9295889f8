//! The directory in which records are kept.
//!
//! Invariant: at most [`KEPT`] records are there when one has been added, the newest. What is not
//! named as a record is left alone.

use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Records that are kept.
const KEPT: usize = 200;
const ENDING: &str = ".migration.jsonl";

/// Where records are.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
}

/// A record that is kept.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kept {
    /// What names it: when it began, as milliseconds since 1970, and the VM.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
}

impl Store {
    /// That of this user: `$XDG_STATE_HOME/godwit/records`, or `~/.local/state/godwit/records`
    /// (XDG Base Directory); of root `/var/lib/godwit/records`. None without a home.
    #[must_use]
    pub fn own(is_root: bool) -> Option<Self> {
        let of =
            |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|it| it.is_absolute());
        let state = of("XDG_STATE_HOME");
        let state = state.or_else(|| is_root.then(|| PathBuf::from("/var/lib")));
        let state = state.or_else(|| of("HOME").map(|home| home.join(".local/state")));
        state.map(|state| Self::at(&state.join("godwit/records")))
    }

    /// The one in `directory`, which need not be there yet.
    #[must_use]
    pub fn at(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Keeps a record of `vm` that began `began_ms` milliseconds after 1970. The oldest go.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn keep(&self, vm: &str, began_ms: u64, lines: &str) -> std::io::Result<PathBuf> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
        let vm: String = vm.chars().map(plain).take(64).collect();
        let path = self.directory.join(format!("{began_ms:013}-{vm}{ENDING}"));
        let beside = path.with_extension(format!("new{}", std::process::id()));
        let write = || {
            let mut options = std::fs::OpenOptions::new();
            let mut file =
                options.write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
            file.write_all(lines.as_bytes())?;
            std::fs::rename(&beside, &path)
        };
        write().inspect_err(|_| drop(std::fs::remove_file(&beside)))?;
        let all = self.list()?;
        for old in all.iter().skip(KEPT) {
            match std::fs::remove_file(&old.path) {
                // Another migration that ends just now has removed it.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                removed => removed?,
            }
        }
        Ok(path)
    }

    /// All of them, the newest first; none where there is no such directory.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn list(&self) -> std::io::Result<Vec<Kept>> {
        let entries = match std::fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut kept = Vec::new();
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(ENDING));
            if let Some(name) = name {
                kept.push(Kept { name: name.to_owned(), path: path.clone() });
            }
        }
        kept.sort();
        kept.reverse();
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_that_end_at_once_all_have_their_record() {
        // Regression: one that found an old record removed by another called its own not kept.
        let directory = std::env::temp_dir().join(format!("godwit-at-once-{}", std::process::id()));
        let store = Store::at(&directory);
        for began in 0..KEPT as u64 {
            store.keep("old", began, "{}\n").unwrap();
        }
        std::thread::scope(|scope| {
            for vm in ["a", "b", "c", "d", "e", "f", "g", "h"] {
                let store = &store;
                scope.spawn(move || {
                    for began in 1000..1100 {
                        store.keep(vm, began, "{}\n").unwrap();
                    }
                });
            }
        });
        assert_eq!(store.list().unwrap().len(), KEPT);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn the_newest_are_kept_and_what_is_no_record_is_left_alone() {
        let directory = std::env::temp_dir().join(format!("godwit-store-{}", std::process::id()));
        let store = Store::at(&directory.join("records"));
        assert_eq!(store.list().unwrap(), Vec::new());
        for began in 0..KEPT as u64 + 3 {
            store.keep("web/../01", 1_790_000_000_000 + began, "{}\n").unwrap();
        }
        std::fs::write(store.directory().join("notes.txt"), "mine").unwrap();
        let kept = store.list().unwrap();
        assert_eq!(kept.len(), KEPT);
        assert_eq!(kept[0].name, "1790000000202-web----01");
        assert_eq!(kept[KEPT - 1].name, "1790000000003-web----01");
        assert!(kept.iter().all(|kept| kept.path.parent() == Some(store.directory())));
        assert!(store.directory().join("notes.txt").exists());
        std::fs::remove_dir_all(directory).unwrap();
    }
}
