//! Units: page counts, byte counts, addresses and rates as types, durations and sizes as text, and
//! room for the bytes of pages.
//!
//! No bare `u64` crosses a crate border where one of these says what it counts. Everything that is
//! parsed here is printed here in the same form: `300ms`, `10Gbit`, `64KiB`.

#![forbid(unsafe_code)]

mod address;
mod count;
mod page_buffer;
mod parse;
mod ranges;
mod rate;

pub use address::{Gfn, Gpa, Hva};
pub use count::{ByteCount, PageCount, PageIndex, PageRun};
pub use page_buffer::PageBuffer;
pub use parse::{GRAMMAR, ParseError, format_duration, parse_duration};
pub use ranges::parse_ranges;
pub use rate::{Rate, TypedRate};

/// Bytes in the page that dirty tracking counts in: 4 KiB, the base page of x86-64.
pub const PAGE_SIZE: u64 = 4096;
