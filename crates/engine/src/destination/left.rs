//! What a destination writes down before it runs a guest whose pages are not all here: enough for
//! another godwit to fetch the rest, should this one be killed.
//!
//! Invariant: it is there before the source hears that the guest could run here, and until the last
//! page has come.

use std::path::Path;

use godwit_bitmap::DirtyBitmap;
use godwit_memory::RamBlock;
use godwit_units::PageRun;
use serde::{Deserialize, Serialize};

use super::record::Record;
use crate::EngineError;
use crate::record::Place;
use crate::security::Security;
use crate::vm::Kept;

/// What a godwit that was killed has left: a guest that runs here, or was about to, while pages of
/// it are missing.
///
/// ```
/// use godwit_engine::destination::Left;
///
/// /// Leaves it alone, for somebody else to go on by.
/// fn leave(left: Left) {
///     println!("a guest lacks pages: {}", left.machine());
///     left.abandon();
/// }
/// ```
pub struct Left {
    place: Place,
    pub(super) written: Written,
}

impl std::fmt::Debug for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // It holds a secret.
        f.debug_struct("Left").field("machine", &self.written.machine).finish_non_exhaustive()
    }
}

/// What is written down.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Written {
    pub(super) record: Record,
    /// What the machine wants to know again.
    machine: String,
    missing: Runs,
}

/// First page and number of each run that was missing, by RAM block in our order.
pub(super) type Runs = Vec<Vec<(u64, u64)>>;

/// The runs of what is `missing`.
pub(super) fn runs_of(missing: &[DirtyBitmap]) -> Runs {
    let of_block = |pages: &DirtyBitmap| {
        let mut runs = Vec::new();
        pages.for_each_run(|run| runs.push((run.start.0, run.count.0)));
        runs
    };
    missing.iter().map(of_block).collect()
}

impl Left {
    /// What was left at `path`, if anything was, for who goes on with this `security`.
    ///
    /// # Errors
    /// When the godwit that wrote it still lives, it cannot be read, or the source would not know
    /// who goes on with other keys. It stays where it is then.
    ///
    /// ```
    /// use godwit_engine::destination::Left;
    /// use godwit_engine::security::Security;
    ///
    /// assert!(Left::find("/nonexistent/left.json".as_ref(), &Security::Local)?.is_none());
    /// # Ok::<(), godwit_engine::EngineError>(())
    /// ```
    pub fn find(path: &Path, security: &Security) -> Result<Option<Self>, EngineError> {
        let mut place = Place::of_left(path);
        let written = place.find(|written: &Written| written.record.other_keys(security))?;
        Ok(written.map(|written| Self { place, written }))
    }

    /// What the machine has left of itself
    /// ([`PostCopyDestination::kept`](crate::vm::PostCopyDestination::kept)).
    #[must_use]
    pub fn machine(&self) -> &str {
        &self.written.machine
    }

    /// Leaves it for another godwit.
    pub fn abandon(mut self) {
        self.place.abandon();
    }

    /// Writes it down, where the machine wants it to be.
    pub(super) fn write(
        Kept { record: path, machine }: Kept,
        record: Record,
        missing: Runs,
    ) -> Result<Self, EngineError> {
        let written = Written { record, machine, missing };
        let mut place = Place::of_left(&path);
        place.write(&written)?;
        Ok(Self { place, written })
    }

    /// The source has come back by this attempt: it may not do so again by this or an earlier one.
    pub(super) fn returned(&mut self, attempt: u32) -> Result<(), EngineError> {
        self.written.record.attempt = attempt;
        self.place.write(&self.written)
    }

    /// What was missing of `ram`, by block.
    ///
    /// # Errors
    /// When it is another machine's.
    pub(super) fn missing(&self, ram: &[RamBlock]) -> Result<Vec<DirtyBitmap>, EngineError> {
        let Written { record, missing, .. } = &self.written;
        let why = record.unfit(ram).or_else(|| {
            let fits = |(block, runs): (&RamBlock, &Vec<(u64, u64)>)| {
                let end = |run: &(u64, u64)| run.0.checked_add(run.1);
                runs.iter().all(|run| end(run).is_some_and(|end| end <= block.pages().0))
            };
            let same = missing.len() == ram.len() && ram.iter().zip(missing).all(fits);
            (!same).then_some("it is of a machine with other RAM blocks")
        });
        if let Some(why) = why {
            return Err(self.place.refused(why));
        }
        let of_block = |(block, runs): (&RamBlock, &Vec<(u64, u64)>)| {
            let mut pages = DirtyBitmap::new(block.pages());
            runs.iter().for_each(|(start, count)| {
                pages.set(PageRun::new(*start, *count));
            });
            pages
        };
        Ok(ram.iter().zip(missing).map(of_block).collect())
    }
}
