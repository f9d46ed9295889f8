//! The connection that a disk is read by: whoever reads has it, and leaves it for the next one.

use std::sync::{Arc, Mutex, PoisonError};

use godwit_nbd::{Asked, Link, Stretch};

use crate::QemuError;

/// The connection of a disk while nobody has it.
pub(crate) type Pool = Arc<Mutex<Option<Link>>>;

/// A connection that goes back into its pool in the end, if nothing is under way on it.
#[derive(Debug)]
pub(crate) struct Pooled {
    disk: String,
    link: Option<Link>,
    pool: Pool,
}

impl Pooled {
    /// `link` to the disk of that name.
    pub(crate) fn new(disk: &str, link: Link, pool: &Pool) -> Self {
        Self { disk: disk.to_owned(), link: Some(link), pool: Pool::clone(pool) }
    }

    /// The connection.
    pub(crate) fn link(&mut self) -> Result<&mut Link, QemuError> {
        let name = &self.disk;
        self.link.as_mut().ok_or_else(|| QemuError::DiskUnmovable {
            disk: name.clone(),
            why: "its connection was given back",
        })
    }

    /// Takes a status that was `asked` for up to `end`, and what is missing of it: it may end
    /// early.
    pub(crate) fn take_status(
        &mut self,
        mut asked: Asked,
        end: u64,
    ) -> Result<Vec<Stretch>, QemuError> {
        let mut found: Vec<Stretch> = Vec::new();
        loop {
            found.extend(self.link()?.take_status(asked)?);
            let from = found.last().map_or(end, |last| last.offset + last.length);
            if from >= end {
                return Ok(found);
            }
            asked = self.link()?.ask_status(from, (end - from) as u32)?;
        }
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Some(link) = self.link.take().filter(|link| link.under_way() == 0) {
            *self.pool.lock().unwrap_or_else(PoisonError::into_inner) = Some(link);
        }
    }
}
