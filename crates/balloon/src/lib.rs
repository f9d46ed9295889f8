//! Free memory need not be sent: a virtio-balloon device for VMM authors ([`Balloon`]; virtio 1.2,
//! 5.5), and the pages that a guest says are free while it migrates ([`FreeHints`]).
//!
//! # When a hinted page may be left out
//!
//! A hint says that a page was free when the driver added it to the queue. The driver may take the
//! page back at once, before the device has even seen the hint (5.5.6.5.1), and it writes to it
//! before it reads. A dirty tracker knows of that write. The device may do with the page what it
//! likes "if the content of a previously hinted page has not been modified by the guest since the
//! device issued the free_page_hint_cmd_id associated with the hint" (5.5.6.5.2), and that is what
//! is kept to:
//!
//! 1. Writes are tracked from a moment `h` on. Every write after `h` is reported by some later
//!    harvest of its page.
//! 2. The command id is issued after `h` ([`Balloon::start_hints`]). A hint counts only behind an
//!    output buffer with that id, so its page was free at some moment after `h`.
//! 3. A hint is looked at in one place only: when the page's segment is dealt with for the *first*
//!    time since `h` ([`FreeHints::take`] answers once). A page is left out if it was hinted and
//!    that first harvest does not report it.
//!
//! Then: if the page was written after `h`, either the first harvest reports it, and it is sent; or
//! a later one does, and it is sent then. If no harvest ever reports it, it was not written after
//! `h`, the hint is true at the end as it was at its beginning, and nobody needs what the page
//! held. Nowhere does it matter when the device gets to see the hint, or whether the hint is older
//! or younger than the harvest. A hint never clears anything that the tracker knows.
//! `tests/loom.rs` runs all interleavings of hint, write and harvest, and shows a lost page for
//! each of the three conditions when it is dropped.
//!
//! Without the third condition a page could be lost like this: it was written and harvested, its
//! segment was put off, a late hint comes in, and at the second harvest the page is not reported.
//! QEMU is in the same danger, since its hints clear bits that a harvest has set. It stops hinting
//! before each harvest (`PRECOPY_NOTIFY_BEFORE_BITMAP_SYNC`, hw/virtio/virtio-balloon.c) and relies
//! on the driver to keep hinted pages until the end.
//!
//! # What such a page is at the destination
//!
//! Zero. It is named as a zero page, a few bytes for a run of any length, because the destination
//! may hold what an earlier attempt has left. So a comparison of all memory has something to
//! compare with: [`FreeHints::skipped`] says which pages of the source count as zero. With
//! VIRTIO_BALLOON_F_PAGE_POISON and a value other than zero the guest expects to find that value,
//! so neither hints nor reports are used then: such pages are sent as they are.
#![forbid(unsafe_code)]

mod balloon;
mod hints;
mod layout;

pub use balloon::{Balloon, BalloonError, Discard, Features, QUEUES_MOST, Statistic};
pub use hints::FreeHints;
pub use layout::Region;
