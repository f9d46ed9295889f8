//! The size of each disk's dirty blocks, as the guest writes now.
//!
//! QEMU counts writes from its start on. A guest that once filled its disk in large pieces and
//! writes small ones ever since would get blocks many times as large as its writes, and each would
//! be sent for a small part of it. So the counts are looked at twice.

use std::time::{Duration, Instant};

use godwit_disk::{Writes, granularity_for};
use godwit_units::ByteCount;

use crate::disks::find::{Found, writes_so_far};
use crate::monitor::{Monitor, QmpError};

/// Between the two looks, most of which passes anyway while the destination is asked.
const BETWEEN: Duration = Duration::from_millis(500);

/// Which size is wanted.
#[derive(Debug)]
pub(crate) enum Granularity {
    /// This one, for all.
    Given(ByteCount),
    /// Such as suits the writes; so many there were, and when.
    AsWritten { before: Vec<Writes>, at: Instant },
}

impl Granularity {
    /// As given, or else to be found out from now on.
    pub(crate) fn of(
        given: Option<ByteCount>,
        qmp: &mut dyn Monitor,
        found: &[Found],
    ) -> Result<Self, QmpError> {
        match given {
            Some(size) => Ok(Self::Given(size)),
            None => Ok(Self::AsWritten { before: writes_so_far(qmp, found)?, at: Instant::now() }),
        }
    }

    /// The size for each of `found`. Waits until there was time to see writes.
    pub(crate) fn sizes(
        &self,
        qmp: &mut dyn Monitor,
        found: &[Found],
    ) -> Result<Vec<ByteCount>, QmpError> {
        match self {
            Self::Given(size) => Ok(vec![*size; found.len()]),
            Self::AsWritten { before, at } => {
                std::thread::sleep(BETWEEN.saturating_sub(at.elapsed()));
                let now = writes_so_far(qmp, found)?;
                Ok(now
                    .iter()
                    .zip(before)
                    .map(|(now, before)| granularity_for(now.recent(*before)))
                    .collect())
            }
        }
    }
}
