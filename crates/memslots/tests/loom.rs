//! Publication of slot states under every interleaving of a writer and readers.
//!
//! Compiles the one file with the atomics a second time, with loom's in place of the standard ones.

use loom::thread;

mod sync {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
    pub(super) use loom::sync::{Arc, RwLock};
}

#[path = "../src/publish.rs"]
mod publish;

use publish::{Publisher, Reader};

/// What a half-made state would break: both halves are the same.
#[derive(Debug, Default, Clone, Copy)]
struct Halves(u64, u64);

/// A thread that looks twice: what it sees is whole, and never older than what it saw before.
fn watch(mut reader: Reader<Halves>) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut before = 0;
        for _ in 0..2 {
            reader.refresh();
            let Halves(a, b) = **reader.state();
            assert!(a == b && a >= before, "{a}, {b} after {before}");
            before = a;
        }
    })
}

#[test]
fn readers_see_whole_states_in_order() {
    loom::model(|| {
        let mut publisher = Publisher::new(Halves(0, 0));
        let watching = watch(publisher.reader());
        publisher.publish(Halves(1, 1));
        publisher.publish(Halves(2, 2));
        watching.join().unwrap();
    });
}

/// The cause that this is named for: a reader on its way to a cell finds in it the state after the
/// next, which is not announced yet, and then goes back to the one that is. It takes three states
/// after the first.
#[test]
fn a_reader_never_goes_back() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let mut publisher = Publisher::new(Halves(0, 0));
        let watching = watch(publisher.reader());
        (1..=3).for_each(|number| publisher.publish(Halves(number, number)));
        watching.join().unwrap();
    });
}

/// Whoever learns that an update has returned sees it at the next look-up, even in the midst of the
/// next one.
#[test]
fn an_update_that_has_returned_is_seen() {
    loom::model(|| {
        let mut publisher = Publisher::<Halves>::default();
        let mut reader = publisher.reader();
        let returned = sync::Arc::new(sync::AtomicU64::new(0));
        let watching = thread::spawn({
            let returned = sync::Arc::clone(&returned);
            move || {
                let returned = returned.load(sync::Ordering::Acquire);
                reader.refresh();
                assert!(reader.state().0 >= returned);
            }
        });
        for number in 1..=2 {
            publisher.publish(Halves(number, number));
            returned.store(number, sync::Ordering::Release);
        }
        watching.join().unwrap();
    });
}

#[test]
fn two_readers_do_not_stand_in_each_others_way() {
    loom::model(|| {
        let mut publisher = Publisher::<Halves>::default();
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let mut reader = publisher.reader();
                thread::spawn(move || {
                    reader.refresh();
                    assert_eq!(reader.state().0, reader.state().1);
                })
            })
            .collect();
        publisher.publish(Halves(1, 1));
        for reader in readers {
            reader.join().unwrap();
        }
    });
}
