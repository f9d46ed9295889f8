//! Handing states from one writer to many readers, neither of whom waits for the other's work.
//!
//! A state has a number. Of two cells, the one of the number's parity holds the state; the writer
//! fills the cell that no reader is directed to, then announces the number. The invariant: the cell
//! of the announced number holds that state or a later one. A reader compares the number with the
//! one it has (one load) and only when it differs copies a reference out of the cell, with
//! `try_read`. That fails only while the writer is filling this very cell, hence has announced a
//! later number in the meantime, and the reader goes there: every retry means that the writer got
//! on. The writer waits at most for readers that are copying the reference of the state before
//! last.
//!
//! A cell may hold a state that is not announced yet: the writer fills it while a reader is on its
//! way there. Who has taken that one stays with it until a later one is announced, and never goes
//! back to the announced one.
//!
//! Rejected: one cell (a reader that meets the writer in it must wait or make do with a state older
//! than the last completed update), and a crate for the purpose (its atomics cannot be put under
//! loom).

use super::sync::{Arc, AtomicU64, Ordering, RwLock};

#[derive(Debug)]
struct Shared<T> {
    announced: AtomicU64,
    cells: [RwLock<(u64, Arc<T>)>; 2],
}

/// The writer's end.
#[derive(Debug)]
pub(crate) struct Publisher<T> {
    shared: Arc<Shared<T>>,
    number: u64,
}

impl<T: Default> Default for Publisher<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Publisher<T> {
    pub(crate) fn new(first: T) -> Self {
        let first = Arc::new(first);
        let cells = [RwLock::new((0, Arc::clone(&first))), RwLock::new((0, first))];
        Self { shared: Arc::new(Shared { announced: AtomicU64::new(0), cells }), number: 0 }
    }

    pub(crate) fn publish(&mut self, state: T) {
        self.number += 1;
        let next = (self.number, Arc::new(state));
        let cell = &self.shared.cells[(self.number % 2) as usize];
        let old = match cell.write() {
            Ok(mut cell) => std::mem::replace(&mut *cell, next),
            // Nobody can panic while holding the lock: it covers a copy of a reference.
            Err(_) => unreachable!("a cell is poisoned"),
        };
        self.shared.announced.store(self.number, Ordering::Release);
        // Perhaps the last reference to much memory: freed with no lock held.
        drop(old);
    }

    pub(crate) fn reader(&self) -> Reader<T> {
        let mut reader =
            Reader { shared: Arc::clone(&self.shared), number: 0, state: self.first_seen() };
        reader.refresh();
        reader
    }

    fn first_seen(&self) -> Arc<T> {
        match self.shared.cells[(self.number % 2) as usize].read() {
            Ok(cell) => Arc::clone(&cell.1),
            Err(_) => unreachable!("a cell is poisoned"),
        }
    }
}

/// A reader's end, for one thread.
#[derive(Debug)]
pub(crate) struct Reader<T> {
    shared: Arc<Shared<T>>,
    number: u64,
    state: Arc<T>,
}

impl<T> Clone for Reader<T> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            number: self.number,
            state: Arc::clone(&self.state),
        }
    }
}

impl<T> Reader<T> {
    /// Goes on to the latest state; returns whether it is another one than before.
    #[inline]
    pub(crate) fn refresh(&mut self) -> bool {
        self.shared.announced.load(Ordering::Acquire) > self.number && self.fetch()
    }

    #[cold]
    fn fetch(&mut self) -> bool {
        loop {
            let announced = self.shared.announced.load(Ordering::Acquire);
            if let Ok(cell) = self.shared.cells[(announced % 2) as usize].try_read() {
                self.number = cell.0;
                self.state = Arc::clone(&cell.1);
                return true;
            }
        }
    }

    /// The state that the last refresh found.
    #[inline]
    pub(crate) fn state(&self) -> &Arc<T> {
        &self.state
    }
}
