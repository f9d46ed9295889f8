//! The size of dirty blocks of a disk.
//!
//! A block that is much larger than a write is sent again for a small part of it; one that is much
//! smaller only makes the bitmap larger. So it follows the guest's writes.

use godwit_units::{ByteCount, PAGE_SIZE};

use crate::{GRANULARITY_MAX, GRANULARITY_MIN, GRANULARITY_UNKNOWN};

/// What a guest has written to a disk so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Writes {
    /// Bytes.
    pub bytes: ByteCount,
    /// Requests.
    pub operations: u64,
}

/// Writes that are enough to tell what is being done to a disk.
const ENOUGH: u64 = 4;

impl Writes {
    /// What was written since there were `before`, where that is enough to tell; else all. A guest
    /// may have filled its disk in large pieces once, and write small ones ever since.
    #[must_use]
    pub fn recent(self, before: Self) -> Self {
        let bytes = self.bytes.saturating_sub(before.bytes);
        let operations = self.operations.saturating_sub(before.operations);
        if operations >= ENOUGH { Self { bytes, operations } } else { self }
    }
}

/// A size that is no granularity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0} is no size for dirty blocks: it must be a power of two from {GRANULARITY_MIN} to \
     {GRANULARITY_MAX}"
)]
pub struct GranularityError(pub ByteCount);

/// The granularity for a disk that is written in this way: the largest power of two that is no
/// larger than the mean write, within [`GRANULARITY_MIN`] and [`GRANULARITY_MAX`];
/// [`GRANULARITY_UNKNOWN`] where nothing was written.
///
/// A write of n blocks' length touches at most n + 1 of them, so what is sent is then at most about
/// twice what was written.
#[must_use]
pub fn granularity_for(writes: Writes) -> ByteCount {
    let Some(mean) = writes.bytes.0.checked_div(writes.operations).filter(|mean| *mean > 0) else {
        return GRANULARITY_UNKNOWN;
    };
    let power = 1 << mean.ilog2();
    ByteCount(power).clamp(GRANULARITY_MIN, GRANULARITY_MAX)
}

/// Refuses what is no granularity.
///
/// # Errors
/// When it is not a power of two from [`GRANULARITY_MIN`] to [`GRANULARITY_MAX`].
pub fn check_granularity(size: ByteCount) -> Result<ByteCount, GranularityError> {
    let bounds = GRANULARITY_MIN..=GRANULARITY_MAX;
    if size.0.is_power_of_two() && bounds.contains(&size) {
        Ok(size)
    } else {
        Err(GranularityError(size))
    }
}

/// Parses a granularity, for a command line: `4KiB` to `1MiB`.
///
/// # Errors
/// When it is no size, or none that may be a granularity; the words say which may.
pub fn parse_granularity(text: &str) -> Result<ByteCount, String> {
    let size: ByteCount =
        text.parse().map_err(|error: godwit_units::ParseError| error.to_string())?;
    check_granularity(size).map_err(|error| error.to_string())
}

const _: () = assert!(GRANULARITY_MIN.0 == PAGE_SIZE);

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(bytes: u64, operations: u64) -> u64 {
        granularity_for(Writes { bytes: ByteCount(bytes), operations }).0
    }

    #[test]
    fn the_granularity_follows_the_mean_write() {
        assert_eq!(chosen(0, 0), 64 << 10);
        assert_eq!(chosen(0, 7), 64 << 10);
        assert_eq!(chosen(512 * 10, 10), 4 << 10);
        assert_eq!(chosen((16 << 10) * 10, 10), 16 << 10);
        assert_eq!(chosen((16 << 10) * 10 - 1, 10), 8 << 10);
        assert_eq!(chosen(u64::MAX, 1), 1 << 20);
        assert_eq!(chosen(5000, 0), 64 << 10);
    }

    #[test]
    fn recent_writes_count_where_they_are_enough() {
        let writes = |bytes, operations| Writes { bytes: ByteCount(bytes), operations };
        let filled = writes(1 << 30, 1024);
        assert_eq!(writes((1 << 30) + 4 * 8192, 1028).recent(filled), writes(4 * 8192, 4));
        assert_eq!(
            writes((1 << 30) + 3 * 8192, 1027).recent(filled),
            writes((1 << 30) + 3 * 8192, 1027)
        );
        assert_eq!(filled.recent(filled), filled);
        // Counters that were reset.
        assert_eq!(writes(8192, 1).recent(filled), writes(8192, 1));
    }

    #[test]
    fn only_powers_of_two_within_the_bounds_are_taken() {
        assert_eq!(parse_granularity("64KiB"), Ok(ByteCount(64 << 10)));
        assert_eq!(parse_granularity("4KiB"), Ok(ByteCount(4 << 10)));
        assert_eq!(parse_granularity("1MiB"), Ok(ByteCount(1 << 20)));
        for text in ["2KiB", "2MiB", "48KiB", "0", "much"] {
            assert!(parse_granularity(text).is_err(), "{text}");
        }
        assert!(parse_granularity("2MiB").unwrap_err().contains("from 4KiB to 1MiB"));
    }
}
