//! Page fingerprints: one of each page as last sent.
//!
//! With it the source skips pages that were written but did not change, finds the changed 4 KiB
//! within huge pages, finds what direct I/O changed behind the tracker, knows after a broken
//! connection what was acknowledged, and the destination proves that it wrote what was sent.
//!
//! - [`Key`]: the session's secret seed; makes a [`Fingerprint`] of a page.
//! - [`PageFingerprints`]: makes the parts and counts the memory of all of them.
//! - [`SegmentFingerprints`]: the part of one segment. **The channel thread that owns the segment
//!   owns it**: no lock, no atomic operation but one when it first takes memory. It is `Send`: give
//!   it back and hand it out again when channels change.
//!
//! ```
//! use godwit_fingerprints::{Key, PageFingerprints};
//! use godwit_units::{PageIndex, PageRun};
//!
//! let key = Key::new(0x5eed);
//! let fingerprints = PageFingerprints::new();
//! let mut part = fingerprints.segment(PageRun::new(4096, 4096));
//! let page = vec![7; 4096];
//! let print = key.page(&page);
//! // True the first time: send it. False as long as it stays what was sent: skip it.
//! assert!(part.update(PageIndex(4100), print));
//! assert!(!part.update(PageIndex(4100), print));
//! assert_eq!(fingerprints.memory().0, 32 << 10);
//! ```
//!
//! # Why 8 bytes are enough
//!
//! A fingerprint is XXH3-64 under a seed that is random for each session and never shown to a
//! guest. A page is compared with *its own* last version, never with other pages, so there is no
//! birthday: a changed page is taken for unchanged with a chance of 2^-64. A guest of 16 TiB has
//! 2^32 pages; if every one of them changes in each of 128 rounds, that is 2^39 comparisons, and
//! the chance that one page of that whole migration goes wrong is 2^-25, one in 33 million. For 64
//! GiB and 10 rounds it is one in 10^11. 16 bytes would double the memory (0.4 % of the guest
//! instead of 0.2 %) and the cache lines touched, to improve what is already rarer than a wrong bit
//! that ECC memory does not see. XXH3 is not a cryptographic hash: the seed keeps a guest from
//! preparing pages with equal fingerprints, and one that still managed would harm its own memory
//! only.
//!
//! This crate is pure: no clock, thread, file or socket.

#![forbid(unsafe_code)]

mod fingerprint;
mod segment;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use fingerprint::{Fingerprint, Key, RangeDigest};
pub use segment::{SegmentFingerprints, Unknown};

use godwit_units::{ByteCount, PageRun};

/// Makes the parts, one for each segment, and counts what they take.
#[derive(Clone, Debug, Default)]
pub struct PageFingerprints {
    account: Account,
}

impl PageFingerprints {
    /// Fingerprints of no page yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The part for the pages of `run`, in which nothing was sent yet. It takes no memory before
    /// two different fingerprints are in it.
    ///
    /// # Panics
    /// When `run` is empty: a mistake of the caller.
    #[must_use]
    pub fn segment(&self, run: PageRun) -> SegmentFingerprints {
        SegmentFingerprints::new(run, self.account.clone())
    }

    /// Bytes that the fingerprints of all parts take now.
    #[must_use]
    pub fn memory(&self) -> ByteCount {
        ByteCount(self.account.0.load(Ordering::Relaxed))
    }
}

/// The bytes that all parts take together.
#[derive(Clone, Debug, Default)]
struct Account(Arc<AtomicU64>);

impl Account {
    fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: u64) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}
