//! The shared words under every interleaving, and every outcome that the memory model allows, of a
//! few steps.
//!
//! Compiles the one file that holds all atomic operations a second time, with loom's atomics in
//! place of the standard ones; the rest of the bitmap is sequential code above it.

use loom::sync::Arc;
use loom::thread;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
}

#[allow(dead_code)]
#[path = "../src/atomic/words.rs"]
mod words;

use sync::{AtomicU64, Ordering};
use words::SharedWords;

/// A guest page: its content, and the copy that the migration has.
struct Page {
    content: AtomicU64,
    copy: AtomicU64,
}

struct Guest {
    bitmap: SharedWords,
    pages: [Page; 2],
}

impl Guest {
    fn new() -> Arc<Self> {
        let page = || Page { content: AtomicU64::new(0), copy: AtomicU64::new(0) };
        Arc::new(Self { bitmap: SharedWords::new(2), pages: [page(), page()] })
    }

    fn harvest(&self) {
        let mut taken = [0; 2];
        self.bitmap.take_words(0, &mut taken);
        for (page, taken) in self.pages.iter().zip(taken) {
            if taken != 0 {
                page.copy.store(page.content.load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
    }

    fn is_copied(&self) -> bool {
        self.pages
            .iter()
            .all(|page| page.content.load(Ordering::Relaxed) == page.copy.load(Ordering::Relaxed))
    }
}

#[test]
fn no_write_is_lost() {
    loom::model(|| {
        let guest = Guest::new();
        let writer = thread::spawn({
            let guest = Arc::clone(&guest);
            move || {
                for (page, value) in [(0, 1), (1, 1), (0, 2)] {
                    guest.pages[page].content.store(value, Ordering::Relaxed);
                    guest.bitmap.set(page, 1);
                }
            }
        });
        guest.harvest();
        writer.join().unwrap();
        guest.harvest();
        assert!(guest.is_copied());
    });
}

#[test]
fn two_writers_of_one_word() {
    loom::model(|| {
        let guest = Guest::new();
        let writers: Vec<_> = (0..2)
            .map(|bit| {
                let guest = Arc::clone(&guest);
                thread::spawn(move || guest.bitmap.set(0, 1 << bit).count_ones())
            })
            .collect();
        let mut taken = [0; 2];
        guest.bitmap.take_words(0, &mut taken);
        let first = taken[0];
        for writer in writers {
            assert_eq!(writer.join().unwrap(), 1);
        }
        guest.bitmap.take_words(0, &mut taken);
        assert_eq!((first | taken[0], first & taken[0]), (3, 0));
    });
}

/// A page that was taken and could not be sent is marked again while its guest writes to it.
#[test]
fn putting_back_loses_nothing() {
    loom::model(|| {
        let guest = Guest::new();
        guest.bitmap.set(0, 1);
        let writer = thread::spawn({
            let guest = Arc::clone(&guest);
            move || {
                guest.pages[0].content.store(1, Ordering::Relaxed);
                guest.bitmap.set(0, 1);
            }
        });
        let taken = guest.bitmap.take(0, 1);
        guest.bitmap.set(0, taken);
        guest.harvest();
        writer.join().unwrap();
        guest.harvest();
        assert!(guest.is_copied());
    });
}

/// The optimisation that must not be made: with it, loom finds a run in which a write is lost.
#[test]
#[should_panic(expected = "lost")]
fn skipping_a_bit_that_is_set_loses_writes() {
    loom::model(|| {
        let guest = Guest::new();
        guest.bitmap.set(0, 1);
        let writer = thread::spawn({
            let guest = Arc::clone(&guest);
            move || {
                guest.pages[0].content.store(1, Ordering::Relaxed);
                if guest.bitmap.peek(0) == 0 {
                    guest.bitmap.set(0, 1);
                }
            }
        });
        guest.harvest();
        writer.join().unwrap();
        guest.harvest();
        assert!(guest.is_copied(), "lost");
    });
}
