//! Counts of bytes and pages, and runs of pages.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};
use std::str::FromStr;

use crate::parse::{self, ParseError};
use crate::{PAGE_SIZE, Rate};

macro_rules! count {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);

        impl $name {
            /// None.
            pub const ZERO: Self = Self(0);

            /// The difference, or zero where it would be negative.
            #[must_use]
            pub fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                Self(iter.map(|n| n.0).sum())
            }
        }
    };
}

count!(
    /// A number of bytes; printed and parsed with binary prefixes (`64KiB`, `1GiB`).
    ByteCount
);
count!(
    /// A number of pages of [`PAGE_SIZE`] bytes.
    PageCount
);

impl ByteCount {
    /// How many pages these bytes fill; `None` unless they are a whole number of pages.
    #[must_use]
    pub fn whole_pages(self) -> Option<PageCount> {
        self.0.is_multiple_of(PAGE_SIZE).then_some(PageCount(self.0 / PAGE_SIZE))
    }

    /// The rate at which these bytes pass in `seconds`; zero when no time has passed.
    #[must_use]
    pub fn per(self, seconds: f64) -> Rate {
        if seconds > 0.0 {
            Rate::from_bytes_per_second(self.0 as f64 / seconds)
        } else {
            Rate::ZERO
        }
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        parse::write_binary(f, self.0)
    }
}

impl FromStr for ByteCount {
    type Err = ParseError;

    /// Parses `4096B`, `64KiB`, `1.5GiB`, and with decimal prefixes `1GB`.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        parse::bytes(text).map(Self)
    }
}

impl PageCount {
    /// The bytes of these pages.
    #[must_use]
    pub const fn bytes(self) -> ByteCount {
        ByteCount(self.0 * PAGE_SIZE)
    }
}

impl fmt::Display for PageCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages", self.0)
    }
}

/// The number of a page within its RAM block, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// The byte offset of this page in its RAM block.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.0 * PAGE_SIZE
    }
}

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Of a page that is none, as a peer may name it, the offset takes more bits than `offset`
        // has.
        write!(f, "page {} (offset {:#x})", self.0, u128::from(self.0) * u128::from(PAGE_SIZE))
    }
}

/// A run of consecutive pages within one RAM block: `start .. start + count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRun {
    /// The first page.
    pub start: PageIndex,
    /// How many pages; a run handed to anyone is never empty.
    pub count: PageCount,
}

impl PageRun {
    /// The run of `count` pages from `start` on.
    #[must_use]
    pub const fn new(start: u64, count: u64) -> Self {
        Self { start: PageIndex(start), count: PageCount(count) }
    }

    /// The first page after the run.
    #[must_use]
    pub const fn end(self) -> PageIndex {
        PageIndex(self.start.0 + self.count.0)
    }

    /// The pages that both runs hold, if any.
    #[must_use]
    pub fn intersect(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        (start < end).then(|| Self::new(start.0, end.0 - start.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_and_bytes() {
        assert_eq!(ByteCount(8192).whole_pages(), Some(PageCount(2)));
        assert_eq!(ByteCount(8193).whole_pages(), None);
        assert_eq!(PageCount(3).bytes(), ByteCount(12288));
        assert_eq!(ByteCount(1000).per(0.5), Rate::from_bytes_per_second(2000.0));
        assert_eq!(ByteCount(1000).per(0.0), Rate::ZERO);
    }

    #[test]
    fn a_page_beyond_all_memory_can_be_told_of() {
        assert_eq!(PageIndex(3).to_string(), "page 3 (offset 0x3000)");
        assert_eq!(
            PageIndex(1 << 52).to_string(),
            "page 4503599627370496 (offset 0x10000000000000000)"
        );
        assert!(PageIndex(u64::MAX).to_string().ends_with("(offset 0xffffffffffffffff000)"));
    }

    #[test]
    fn runs_intersect() {
        let run = PageRun::new(10, 10);
        assert_eq!(run.intersect(PageRun::new(15, 10)), Some(PageRun::new(15, 5)));
        assert_eq!(run.intersect(PageRun::new(0, 100)), Some(run));
        assert_eq!(run.intersect(PageRun::new(20, 1)), None);
    }
}
