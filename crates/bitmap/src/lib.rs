//! Dirty bitmaps: one bit a page, set ranges, count, and walk over maximal runs.
//!
//! Pure data; who sets the bits and when they are harvested is decided elsewhere.

#![forbid(unsafe_code)]

mod flat;

pub use flat::DirtyBitmap;
