//! Where a plan and its steps are kept.
//!
//! Invariant: what [`Store::put`] has returned from is there after the process was killed, and no
//! two coordinators have the same store open.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition};

use crate::EvacuateError;

/// Keys and values.
pub trait Store {
    /// The value of `key`.
    ///
    /// # Errors
    /// When it cannot be read.
    fn read(&self, key: &str) -> Result<Option<Vec<u8>>, EvacuateError>;
    /// Writes one down.
    ///
    /// # Errors
    /// When it cannot be written.
    fn put(&mut self, key: &str, value: &[u8]) -> Result<(), EvacuateError>;
    /// All whose key begins with `prefix`.
    ///
    /// # Errors
    /// When they cannot be read.
    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, EvacuateError>;
}

/// In memory, for tests: a clone is the same store, as a file is for the next process.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Rc<RefCell<BTreeMap<String, Vec<u8>>>>);

impl Store for MemoryStore {
    fn read(&self, key: &str) -> Result<Option<Vec<u8>>, EvacuateError> {
        Ok(self.0.borrow().get(key).cloned())
    }

    fn put(&mut self, key: &str, value: &[u8]) -> Result<(), EvacuateError> {
        self.0.borrow_mut().insert(key.to_owned(), value.to_vec());
        Ok(())
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, EvacuateError> {
        let all = self.0.borrow();
        let found = all.iter().filter(|(key, _)| key.starts_with(prefix));
        Ok(found.map(|(key, value)| (key.clone(), value.clone())).collect())
    }
}

const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("evacuation");

/// In one file of redb's, for one coordinator.
#[derive(Debug)]
pub struct RedbStore {
    database: Database,
    path: PathBuf,
}

impl RedbStore {
    /// Opens the one at `path`, or makes it.
    ///
    /// # Errors
    /// When another coordinator has it open, or the file is none.
    pub fn open(path: &Path) -> Result<Self, EvacuateError> {
        let place = || path.display().to_string();
        let database = Database::create(path).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => EvacuateError::Busy { place: place() },
            error => {
                EvacuateError::Store { place: place(), action: "opened", why: error.to_string() }
            }
        })?;
        Ok(Self { database, path: path.to_owned() })
    }

    fn failed(&self, action: &'static str) -> impl Fn(redb::Error) -> EvacuateError {
        let place = self.path.display().to_string();
        move |error| EvacuateError::Store { place: place.clone(), action, why: error.to_string() }
    }

    fn all(&self) -> Result<Vec<(String, Vec<u8>)>, redb::Error> {
        let read = self.database.begin_read()?;
        let table = match read.open_table(TABLE) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        let mut found = Vec::new();
        for entry in table.iter()? {
            let (key, value) = entry?;
            found.push((key.value().to_owned(), value.value().to_vec()));
        }
        Ok(found)
    }

    fn write(&self, key: &str, value: &[u8]) -> Result<(), redb::Error> {
        let write = self.database.begin_write()?;
        write.open_table(TABLE)?.insert(key, value)?;
        // Durable when it returns (redb's default durability).
        write.commit()?;
        Ok(())
    }
}

impl Store for RedbStore {
    fn read(&self, key: &str) -> Result<Option<Vec<u8>>, EvacuateError> {
        let all = self.all().map_err(self.failed("read"))?;
        Ok(all.into_iter().find(|(known, _)| known == key).map(|(_, value)| value))
    }

    fn put(&mut self, key: &str, value: &[u8]) -> Result<(), EvacuateError> {
        self.write(key, value).map_err(self.failed("written"))
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, EvacuateError> {
        let mut all = self.all().map_err(self.failed("read"))?;
        all.retain(|(key, _)| key.starts_with(prefix));
        Ok(all)
    }
}
