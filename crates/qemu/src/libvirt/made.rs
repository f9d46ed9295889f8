//! The images that were made for a guest, in a file of the run directory for as long as the guest
//! has not come: who stands in for a godwit that was killed removes them by it.
//!
//! Invariant: an image is in the file before anything is written to it, and the file has gone
//! before the guest may run here.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::QemuError;
use crate::mark::{Mark, leftovers};
use crate::run_directory;

const ENDING: &str = "-images";

/// One image, once and for all: another file may come to its place.
#[derive(Debug, Serialize, Deserialize)]
struct Image {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Image {
    fn remove(&self) {
        let about = std::fs::symlink_metadata(&self.path);
        if about.is_ok_and(|it| (it.dev(), it.ino()) == (self.device, self.inode)) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// What this process has made.
#[derive(Debug, Default)]
pub(super) struct Made {
    images: Vec<Image>,
    note: Option<(File, PathBuf)>,
}

fn unwritable(source: io::Error) -> QemuError {
    QemuError::Record { path: run_directory::path(), source }
}

impl Made {
    /// `file` was made at `path` just now, and is empty.
    ///
    /// # Errors
    /// When that cannot be written down; the file is removed then.
    pub(super) fn add(&mut self, path: &Path, file: &File) -> Result<(), QemuError> {
        let added = self.note(path, file);
        if added.is_err() {
            let _ = std::fs::remove_file(path);
        }
        added.map_err(unwritable)
    }

    fn note(&mut self, path: &Path, file: &File) -> io::Result<()> {
        let about = file.metadata()?;
        let path = std::path::absolute(path)?;
        let image = Image { path, device: about.dev(), inode: about.ino() };
        if self.note.is_none() {
            let dir = run_directory::path();
            let user = rustix::process::getuid().as_raw();
            run_directory::make(&dir, user).map_err(io::Error::other)?;
            let note = dir.join(format!("{}{ENDING}", Mark::own()));
            let mut options = OpenOptions::new();
            let options = options.append(true).create(true).mode(0o600);
            self.note = Some((options.open(&note)?, note));
        }
        if let Some((note, _)) = &mut self.note {
            note.write_all(format!("{}\n", serde_json::to_string(&image)?).as_bytes())?;
        }
        self.images.push(image);
        Ok(())
    }

    /// From here on they stay, whatever comes.
    ///
    /// # Errors
    /// When the file that names them does not go.
    pub(super) fn keep(&mut self) -> Result<(), QemuError> {
        if let Some((_, path)) = &self.note {
            std::fs::remove_file(path).map_err(unwritable)?;
        }
        *self = Self::default();
        Ok(())
    }

    /// Removes them.
    pub(super) fn remove(&mut self) {
        self.images.drain(..).for_each(|image| image.remove());
        if let Some((_, path)) = self.note.take() {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Removes what godwits that are gone have made for guests that did not come to them.
pub(crate) fn sweep_images() {
    let directory = run_directory::path();
    if run_directory::check(&directory, rustix::process::getuid().as_raw()).is_ok() {
        sweep(&directory);
    }
}

fn sweep(directory: &Path) {
    for (note, _) in leftovers(directory, ENDING) {
        let text = std::fs::read_to_string(&note).unwrap_or_default();
        let images = text.lines().filter_map(|line| serde_json::from_str::<Image>(line).ok());
        images.for_each(|image| image.remove());
        let _ = std::fs::remove_file(note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_godwit_that_is_gone_has_made_is_removed_and_nothing_else() {
        let dir = std::env::temp_dir().join(format!("godwit-made-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        // What has come is in no file, and stays.
        let (mut kept, path) = (Made::default(), dir.join("kept"));
        kept.add(&path, &File::create(&path).unwrap()).unwrap();
        let note = kept.note.as_ref().unwrap().1.clone();
        assert!(note.exists());
        kept.keep().unwrap();
        kept.remove();
        assert!(path.exists() && !note.exists());

        let mut made = Made::default();
        for name in ["ours", "replaced"] {
            made.add(&dir.join(name), &File::create(dir.join(name)).unwrap()).unwrap();
        }
        // Somebody has put another file there since.
        std::fs::write(dir.join("other"), "another's").unwrap();
        std::fs::rename(dir.join("other"), dir.join("replaced")).unwrap();
        let note = made.note.take().unwrap().1;
        std::fs::copy(&note, dir.join(note.file_name().unwrap())).unwrap();
        sweep(&dir);
        assert!(dir.join("ours").exists(), "this process lives");
        // No process was ever started so late.
        std::fs::rename(&note, dir.join(format!("godwit-1-{}{ENDING}", u64::MAX))).unwrap();
        sweep(&dir);
        assert!(!dir.join("ours").exists());
        assert_eq!(std::fs::read(dir.join("replaced")).unwrap(), b"another's");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
