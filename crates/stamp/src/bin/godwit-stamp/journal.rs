//! The journal's file.
//!
//! Keeps one promise: when [`JournalFile::append`] returns, what it was given is on the journal's
//! disk for good.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use godwit_stamp::journal::{Acknowledged, Header, Journal, NoJournal, Writer};

/// Why there is no journal.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JournalError {
    #[error("--journal {path}: cannot {what}: {source}")]
    Io { path: PathBuf, what: &'static str, source: io::Error },
    #[error("--journal {0}: is there already: move it away, or name another")]
    Exists(PathBuf),
    #[error("--journal {path}: {source}")]
    Content { path: PathBuf, source: NoJournal },
}

/// A journal that is being written.
#[derive(Debug)]
pub(crate) struct JournalFile {
    path: PathBuf,
    file: File,
    writer: Writer,
}

impl JournalFile {
    /// Makes a new file of it.
    pub(crate) fn create(path: &Path, header: &Header) -> Result<Self, JournalError> {
        let own = || path.to_owned();
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        let file = file.map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => JournalError::Exists(own()),
            _ => JournalError::Io { path: own(), what: "make it", source },
        })?;
        let (writer, bytes) = Writer::start(header);
        let mut journal = Self { path: own(), file, writer };
        journal.put(&bytes)?;
        // The file's name is in its directory.
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let synced = File::open(directory.unwrap_or(Path::new("."))).and_then(|dir| dir.sync_all());
        synced.map_err(|source| JournalError::Io {
            path: own(),
            what: "sync its folder",
            source,
        })?;
        Ok(journal)
    }

    /// Takes down what was acknowledged.
    pub(crate) fn append(&mut self, records: &[Acknowledged]) -> Result<(), JournalError> {
        let mut bytes = Vec::new();
        records.iter().for_each(|record| self.writer.acknowledge(&mut bytes, *record));
        self.put(&bytes)
    }

    /// The run has ended, and everything was acknowledged.
    pub(crate) fn end(&mut self) -> Result<(), JournalError> {
        let mut bytes = Vec::new();
        self.writer.end(&mut bytes);
        self.put(&bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), JournalError> {
        let written = self.file.write_all(bytes).and_then(|()| self.file.sync_data());
        let path = || self.path.clone();
        written.map_err(|source| JournalError::Io { path: path(), what: "write it", source })
    }
}

/// Reads a journal.
pub(crate) fn read(path: &Path) -> Result<Journal, JournalError> {
    let own = || path.to_owned();
    let bytes = std::fs::read(path).map_err(|source| JournalError::Io {
        path: own(),
        what: "read it",
        source,
    })?;
    Journal::read(&bytes).map_err(|source| JournalError::Content { path: own(), source })
}
