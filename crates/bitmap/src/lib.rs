//! Dirty bitmaps: one bit a page, set and clear ranges, count, merge, harvest, and walk over
//! maximal runs.
//!
//! Three kinds share their meaning and their code: [`DirtyBitmap`] has one owner,
//! [`AtomicDirtyBitmap`] has many writers and one harvester, [`LayeredBitmap`] knows where it is
//! empty. Bits past the end are never set, a harvested page is either handed out or put back, and
//! no walk allocates. Who sets the bits and when they are harvested is decided elsewhere.
//!
//! With the feature `vm-memory`, [`AtomicDirtyBitmap`] is a `vm_memory::bitmap::Bitmap`.
//!
//! The hot loops exist in up to three versions, chosen when the program runs; see [`CodePath`].
//!
//! ```
//! use godwit_bitmap::DirtyBitmap;
//! use godwit_units::{PageCount, PageRun};
//!
//! let mut dirty = DirtyBitmap::new(PageCount(1000));
//! assert_eq!(dirty.set(PageRun::new(62, 4)), PageCount(4));
//! let mut runs = Vec::new();
//! dirty.for_each_run(|run| runs.push(run));
//! assert_eq!(runs, [PageRun::new(62, 4)]);
//! ```

mod atomic;
mod flat;
mod layered;
mod merge;
mod path;
#[cfg(feature = "vm-memory")]
mod rust_vmm;
mod scan;
mod word;

/// What only this crate's loom test replaces: the atomics that the shared words are made of.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
}

pub use atomic::AtomicDirtyBitmap;
pub use flat::{DirtyBitmap, Runs, for_each_run_of_union};
pub use layered::LayeredBitmap;
pub use path::CodePath;
