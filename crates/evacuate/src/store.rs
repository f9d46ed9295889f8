//! Where a plan and its steps are kept, and who of several coordinators may go on with it.
//!
//! Invariants: what [`Store::put`] has returned from is there after the process was killed; of two
//! coordinators that have the same store only one can write, and the other learns that by
//! [`EvacuateError::Lost`] before it has changed anything.

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
    /// Writes one down, if this coordinator may still act.
    ///
    /// # Errors
    /// When it cannot be written; with [`EvacuateError::Lost`] when another has taken over.
    fn put(&mut self, key: &str, value: &[u8]) -> Result<(), EvacuateError>;
    /// All whose key begins with `prefix`.
    ///
    /// # Errors
    /// When they cannot be read.
    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, EvacuateError>;
    /// Whether this coordinator may act, as far as can be told without asking anybody.
    ///
    /// # Errors
    /// When it has not been heard of for so long that another may have taken over.
    fn held(&self) -> Result<(), EvacuateError> {
        Ok(())
    }
    /// The name by which steps are signed.
    fn who(&self) -> String {
        String::new()
    }
}

/// Who of several coordinators acts.
pub trait Lease {
    /// Takes the lease if nobody has it, or if who has it has been silent for too long; or goes on
    /// with the one that is had already. Does not wait.
    ///
    /// # Errors
    /// When the store does not answer.
    fn take(&mut self) -> Result<Tenure, EvacuateError>;
    /// Gives it back, so that another need not wait.
    fn release(&mut self);
}

/// Values that others than the coordinator change, too.
pub trait Wishes {
    /// Changes the value of `key` from whatever it is to what `change` makes of it.
    ///
    /// # Errors
    /// When the store does not answer.
    fn change(
        &self,
        key: &str,
        change: &dyn Fn(Option<&[u8]>) -> Vec<u8>,
    ) -> Result<(), EvacuateError>;
}

/// Who has a lease.
///
/// ```
/// use godwit_evacuate::Tenure;
///
/// let tenure = Tenure::Another("east, process 4711".to_owned());
/// assert_ne!(tenure, Tenure::Ours { number: 1 });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tenure {
    /// We, until it is lost.
    Ours {
        /// The how manieth coordinator this is, from 1.
        number: u64,
    },
    /// Another one, by its name.
    Another(String),
}

impl<S: Store + ?Sized> Store for &mut S {
    fn read(&self, key: &str) -> Result<Option<Vec<u8>>, EvacuateError> {
        (**self).read(key)
    }

    fn put(&mut self, key: &str, value: &[u8]) -> Result<(), EvacuateError> {
        (**self).put(key, value)
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, EvacuateError> {
        (**self).list(prefix)
    }

    fn held(&self) -> Result<(), EvacuateError> {
        (**self).held()
    }

    fn who(&self) -> String {
        (**self).who()
    }
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
