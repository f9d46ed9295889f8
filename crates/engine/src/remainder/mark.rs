//! Whether both sides mean the same storage by the directory that the copy is made in: the source
//! makes a file there that is called by the session's number, and the destination looks for it.
//!
//! Invariant: a mark is there no longer than the source is being accepted, unless its godwit is
//! killed or the storage hangs just then.

use std::fs::File;
use std::path::{Path, PathBuf};

use godwit_wire::SessionId;

use super::{aside, create, failed, place, remove};
use crate::{EngineError, limits};

fn of(copy: &Path) -> PathBuf {
    copy.with_extension("mark")
}

/// The mark of a source. It is gone when this is dropped.
pub(crate) struct Mark {
    path: PathBuf,
}

impl Mark {
    /// Makes sure that the copy of a session can be made in `directory`, and marks it.
    ///
    /// # Errors
    /// When none can.
    pub(crate) fn make(directory: &Path, session: SessionId) -> Result<Self, EngineError> {
        let path = of(&place(directory, session));
        let (looked_at, made, late) = (directory.to_owned(), path.clone(), path.clone());
        let make = move || {
            if !looked_at.metadata().map_err(|error| error.to_string())?.is_dir() {
                return Err("it is no directory: name one that both hosts have".to_owned());
            }
            match create(&made) {
                // One of this session that was killed just then has left it.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
                other => other.map(drop).map_err(|error| {
                    format!("nothing can be written there ({error}): name a directory where it can")
                }),
            }
        };
        let found = aside(limits::CONNECT, make, move || {
            let _ = std::fs::remove_file(late);
        });
        let found = found.unwrap_or_else(|| Err("its storage does not answer".to_owned()));
        found.map(|()| Self { path }).map_err(|why| failed(directory, why))
    }

    /// Looks for the mark of a session's source in `directory`, and whether what its source makes
    /// there can be read.
    ///
    /// # Errors
    /// Why it cannot, with the cure.
    pub(crate) fn find(directory: &Path, session: SessionId) -> Result<(), String> {
        let path = of(&place(directory, session));
        let found = aside(limits::CONNECT, move || File::open(path).map(drop), || {});
        let shown = directory.display();
        match found {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => Err(format!(
                "{shown} is not where the source makes it, or not the same storage: name with \
                 --postcopy-safe of receive and migrate what both hosts have"
            )),
            Some(Err(error)) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                Err(format!(
                    "what the source makes in {shown} cannot be read ({error}): run both sides as \
                     the same user"
                ))
            }
            Some(Err(error)) => Err(format!("what is in {shown} cannot be read ({error})")),
            None => Err(format!("the storage of {shown} does not answer")),
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        remove(std::mem::take(&mut self.path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_where_it_was_made_and_nowhere_else() {
        let directory = std::env::temp_dir().join(format!("godwit-mark-{}", std::process::id()));
        let other = directory.join("other");
        std::fs::create_dir_all(&other).unwrap();
        let session = SessionId([5; 16]);
        let mark = Mark::make(&directory, session).unwrap();
        Mark::find(&directory, session).unwrap();
        // As when its godwit was killed just then. Mutation: it is in its own way.
        std::mem::forget(mark);
        let mark = Mark::make(&directory, session).unwrap();
        // Mutation: any file of godwit's is taken for it.
        assert!(Mark::find(&directory, SessionId([6; 16])).unwrap_err().contains("not the same"));
        assert!(Mark::find(&other, session).unwrap_err().contains("not the same storage"));
        // Mutation: it stays.
        drop(mark);
        assert!(Mark::find(&directory, session).is_err());
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1);
        // Before anything is sent it is known that nothing can be made there.
        std::fs::write(other.join("file"), "precious").unwrap();
        for (path, words) in [("file", "it is no directory"), ("nothing", "No such file")] {
            let refused = Mark::make(&other.join(path), session).err().unwrap().to_string();
            assert!(refused.contains(words), "{refused}");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
